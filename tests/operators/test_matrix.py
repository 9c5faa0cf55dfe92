"""Every operator passes every check, on cpu and on foo: one table, one matrix (foo_ops/testing)."""

import pytest

from foo_ops.testing import ABS, ATTENTION, CACHE_APPEND, OPERATORS, RMS_NORM

# An elementwise kernel, a launcher in C++, an operator that writes, and a kernel of rows.
ONE_OF_EACH_FAMILY = (ABS, ATTENTION, CACHE_APPEND, RMS_NORM)


@pytest.mark.operators(*OPERATORS)
def test_operator(operator_check):
    operator_check()


@pytest.mark.operators(*ONE_OF_EACH_FAMILY, checks=["compiled_for_layouts"], quick=False)
def test_inductor(operator_check):
    """``make test`` traces all operators, and compiles only these with Inductor."""
    operator_check()
