"""Check all operators alike, ours and others': one table, one matrix.

Each check is a function of a `Case`: an operator, a device, a dtype, a sample. `cases` lists them,
the pytest plugin makes a test of each, and `check_operator` runs them all.
"""

# In the order in which they are run.
# isort: off
from foo_ops.testing.checks import values, gradients, schema, compilation  # noqa: F401

# isort: on
from foo_ops.testing.checks.calls import OperatorCheckError, check_operator
from foo_ops.testing.checks.matrix import CHECKS, Case, cases

__all__ = ["CHECKS", "Case", "OperatorCheckError", "cases", "check_operator"]
