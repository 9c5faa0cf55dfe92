"""One table of all operators, for tests and benchmarks: samples, references, error budgets.

A new operator is covered by adding its `OpSpec` to `OPERATORS`: tests/test_operators.py takes
values, gradients, layouts, opcheck and compilation from there.
"""

from foo_ops.testing.abs import ABS
from foo_ops.testing.attention import ATTENTION
from foo_ops.testing.attention_varlen import ATTENTION_VARLEN
from foo_ops.testing.layouts import LAYOUTS, copy_with_layout
from foo_ops.testing.spec import OpSpec, Sample, check_gradients, check_outputs, cotangents_for

__all__ = [
    "ABS",
    "ATTENTION",
    "ATTENTION_VARLEN",
    "LAYOUTS",
    "OPERATORS",
    "OpSpec",
    "Sample",
    "check_gradients",
    "check_outputs",
    "copy_with_layout",
    "cotangents_for",
]

OPERATORS = (ABS, ATTENTION, ATTENTION_VARLEN)
