"""Check that torch.compile takes an operator on a device where it takes it on the CPU."""

from collections.abc import Callable
from typing import Any

import torch

from foo_ops.testing.conformance.comparison import agree

# Dynamo, the decompositions of Inductor and its partitioner, but no C++ to compile: a hundredth of
# the time. What Inductor writes is the same for both devices.
BACKEND = "aot_eager_decomp_partition"


def _compiled(op: Any, sample: Any) -> Callable[[], Any]:
    torch._dynamo.reset()
    function = torch.compile(op.op, backend=BACKEND, fullgraph=True)
    return lambda: function(sample.input, *sample.args, **sample.kwargs)


def check_compiled(op: Any, there: Any, sample: Any, what: str, *, values: bool) -> None:
    """Compare a sample on the device, compiled, with the same on the CPU, which both may refuse."""
    agree(_compiled(op, there), _compiled(op, sample), what, values=values)
