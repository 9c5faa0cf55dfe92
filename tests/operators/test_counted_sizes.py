"""Sizes that depend on data, in every dimension of every tensor at once."""

import pytest

from foo_ops.testing import OPERATORS, cases
from foo_ops.testing.checks.open_sizes import check_counted_sizes


@pytest.mark.parametrize("spec", OPERATORS, ids=str)
def test_every_dimension_may_depend_on_data(spec):
    """The matrix asks for the dimensions that grow alone, since others may be fixed in general."""
    case, *_ = cases(spec, ["compiled_for_counted_sizes"])
    check_counted_sizes(case, [list(range(it.dim())) for it in case.sized(9).tensors()])
