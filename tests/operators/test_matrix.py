"""Every operator passes every check, on cpu and on foo: one table, one matrix (foo_ops/testing)."""

import pytest

from foo_ops.testing import OPERATORS


@pytest.mark.operators(*OPERATORS)
def test_operator(operator_check):
    operator_check()
