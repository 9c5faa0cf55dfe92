"""foo::abs in the table of operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from foo_ops.testing import reference
from foo_ops.testing.rounding import roundoff, smallest
from foo_ops.testing.spec import Dtypes, OpSpec, Sample, Tensors, random

ABS_SHAPES: dict[str, tuple[int, ...]] = {
    "0-d": (),
    "empty": (0,),
    "empty inside": (3, 0, 2),
    "one": (1,),
    "odd": (7,),
    "vector and tail": (67,),
    "matrix": (5, 7),
    "4-d": (2, 3, 4, 5),
    "6-d": (2, 1, 3, 1, 2, 2),
    "several tasks": (3, 33_333),
}


def abs_sample(name: str, shape: Sequence[int]) -> Callable[[torch.dtype], Sample]:
    return lambda dtype: Sample(tuple(random(name, shape, dtype=dtype)))


def abs_special(dtype: torch.dtype) -> Sample:
    values = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0]
    if dtype.is_complex:
        parts = [(real, imag) for real in values for imag in values]
        return Sample((torch.tensor([complex(*pair) for pair in parts], dtype=dtype),))
    info = torch.finfo(dtype)
    values += [info.min, info.max, -info.tiny, -info.smallest_normal / 2, -smallest(dtype)]
    return Sample((torch.tensor(values, dtype=dtype),))


def abs_output_budget(sample: Sample, dtype: torch.dtype) -> Tensors:
    """Bound the error: real results are exact.

    Complex: the squares, their sum and the root are rounded in float64, then the result to the
    dtype; the reference rounds in float64 too.
    """
    (value,) = sample.call(reference.abs)
    if not dtype.is_complex:
        return (torch.zeros_like(value),)
    part = dtype.to_real()
    return ((roundoff(part) + 5 * roundoff(torch.float64)) * value + smallest(part),)


def abs_gradient_budget(sample: Sample, dtypes: Dtypes, cotangents: Tensors) -> Tensors:
    """Bound the error: real is exact; complex sgn rounds modulus (3), division and product (3)."""
    (dtype,), (cotangent,) = dtypes, cotangents
    assert dtype is not None
    rounded = 6 * roundoff(dtype.to_real()) if dtype.is_complex else 0.0
    return (rounded * cotangent.abs(),)


ABS = OpSpec(
    operator=torch.ops.foo.abs.default,
    dtypes=(
        *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
        *(torch.complex64, torch.complex128),
    ),
    sizes=(),
    samples={name: abs_sample(name, shape) for name, shape in ABS_SHAPES.items()}
    | {"special values": abs_special},
    essential=("0-d", "empty inside", "vector and tail", "4-d"),
    in_layouts=ABS_SHAPES.keys(),
    sized=lambda dtype, size: abs_sample("sized", (size, size + 1))(dtype),
    large=abs_sample("large", (7, 50_001)),
    reference=reference.abs,
    output_budget=abs_output_budget,
    gradient_budget=abs_gradient_budget,
)

# The modulus of a complex number is real, so it cannot replace it in place.
ABS_IN_PLACE = ABS.variant(
    torch.ops.foo.abs_, dtypes=[dtype for dtype in ABS.dtypes if not dtype.is_complex]
)
ABS_OUT = ABS.variant(torch.ops.foo.abs.out)
