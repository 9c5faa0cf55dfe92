"""foo::silu_mul in the table of operators."""

from __future__ import annotations

import torch

from foo_ops.testing import reference
from foo_ops.testing.spec import Maker, OpSpec, Sample, random


def silu_mul_sample(name: str, gate: tuple[int, ...], up: tuple[int, ...]) -> Maker:
    return lambda dtype: Sample(tuple(random(name, gate, up, dtype=dtype)))


def special(dtype: torch.dtype) -> Sample:
    """Make gates for which exp overflows, or underflows to zero."""
    gate = torch.tensor([0.0, -0.0, 200.0, -200.0, -60_000.0, torch.inf, torch.nan])
    up = torch.tensor([1.0, -1.0, 300.0])[:, None]
    return Sample((gate.to(dtype), up.to(dtype)))


def small_of_large(dtype: torch.dtype) -> Sample:
    """Make a small result although gate * up is infinite."""
    up = torch.full((3,), min(torch.finfo(dtype).max / 2, 1e38), dtype=dtype)
    return Sample((torch.full((3,), -60.0, dtype=dtype), up))


SILU_MUL = OpSpec(
    operator=torch.ops.foo.silu_mul.default,
    reference=reference.silu_mul,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sized=lambda dtype, size: silu_mul_sample("sized", *[(2, size, size + 1)] * 2)(dtype),
    samples={
        "0-d": silu_mul_sample("0-d", (), ()),
        "broadcast": silu_mul_sample("broadcast", (3, 1, 9), (4, 1)),
        "special values": special,
        "small of large": small_of_large,
    },
    essential=("size1", "size7", "broadcast"),
    large=silu_mul_sample("large", (7, 50_001), (7, 50_001)),
    # The gradient of a broadcast operand is a sum of rounded gradients.
    tolerances={torch.float16: (1e-3, 1e-3)},
)
