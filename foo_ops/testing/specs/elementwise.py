"""Operators of elements and of rows in the table of operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from foo_ops.testing import reference
from foo_ops.testing.spec import Dtypes, Maker, OpSpec, Sample, Tensors, random
from foo_ops.testing.tolerance import roundoff, smallest

# ----------------------------------------------------------------------------------------- foo::abs


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


# ------------------------------------------------------------------------------------ foo::silu_mul


def silu_mul_sample(name: str, gate: tuple[int, ...], up: tuple[int, ...]) -> Maker:
    return lambda dtype: Sample(tuple(random(name, gate, up, dtype=dtype)))


def special_gates(dtype: torch.dtype) -> Sample:
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
        "special values": special_gates,
        "small of large": small_of_large,
    },
    essential=("size1", "size7", "broadcast"),
    large=silu_mul_sample("large", (7, 50_001), (7, 50_001)),
    # The gradient of a broadcast operand is a sum of rounded gradients.
    tolerances={torch.float16: (1e-3, 1e-3)},
)


# ----------------------------------------------------------------- foo::rms_norm, foo::add_rms_norm


HALF = (torch.bfloat16, torch.float16)


def sized_rows(dtype: torch.dtype, size: int) -> Sample:
    return rms_norm_sample("sized", (2, size, size + 3))(dtype)


def rms_norm_sample(
    name: str, shape: tuple[int, ...], *, has_weight: bool = True, **keywords: Any
) -> Maker:
    def make(dtype: torch.dtype) -> Sample:
        input, weight = random(name, shape, shape[-1:], dtype=dtype)
        return Sample((input, weight if has_weight else None), keywords)

    return make


def wide_weight(dtype: torch.dtype) -> Sample:
    """Use a float32 weight, as models in half precision do in their norms."""
    input, weight = rms_norm_sample("wide weight", (5, 67))(dtype).inputs
    return Sample((input, weight.float()))


def special_rows(dtype: torch.dtype) -> Sample:
    """Make rows with zeros, NaN, infinity, and numbers whose squares are large or small."""
    (input,) = random("special", (6, 19), dtype=dtype)
    input[0] = 0
    input[1, 3], input[2, 5] = torch.nan, torch.inf
    input[3] *= 1e-4
    input[4] *= 1e3
    return Sample((input, None))


RMS_NORM = OpSpec(
    operator=torch.ops.foo.rms_norm.default,
    reference=reference.rms_norm,
    dtypes=(torch.float32, torch.float64, *HALF),
    sized=sized_rows,
    samples={
        "vector": rms_norm_sample("vector", (19,)),
        "no weight": rms_norm_sample("no weight", (3, 4, 33), has_weight=False, eps=0.25),
        "4-d": rms_norm_sample("4-d", (2, 3, 2, 17), eps=1e-5),
        "no columns": rms_norm_sample("no columns", (3, 0)),
        "wide weight": wide_weight,
        "special values": special_rows,
    },
    essential=("size1", "size7", "no weight"),
    large=rms_norm_sample("large", (301, 1001)),
)


def add_sample(name: str, shape: tuple[int, ...], *, has_weight: bool = True) -> Maker:
    def make(dtype: torch.dtype) -> Sample:
        input, residual, weight = random(name, shape, shape, shape[-1:], dtype=dtype)
        return Sample((input, residual, weight if has_weight else None))

    return make


ADD_RMS_NORM = OpSpec(
    operator=torch.ops.foo.add_rms_norm.default,
    reference=reference.add_rms_norm,
    dtypes=RMS_NORM.dtypes,
    sized=lambda dtype, size: add_sample("sized", (2, size, size + 3))(dtype),
    samples={
        "vector": add_sample("vector", (19,)),
        "no weight": add_sample("no weight", (3, 4, 33), has_weight=False),
        "no columns": add_sample("no columns", (3, 0)),
    },
    essential=("size1", "size7", "no weight"),
    large=add_sample("large", (301, 1001)),
    # The sum is rounded before it is normalised.
    tolerances={torch.float16: (3e-3, 3e-3), torch.bfloat16: (2e-2, 2e-2)},
)


# ------------------------------------------------------------- foo::layer_norm, foo::add_layer_norm


def layer_norm_sample(
    shape: tuple[int, ...], *, inputs: int = 1, given: int = 2, **keywords: Any
) -> Maker:
    """Make samples of ``inputs`` rows, and the first ``given`` of weight and bias."""

    def make(dtype: torch.dtype) -> Sample:
        shapes = [shape] * inputs + [shape[-1:]] * given
        tensors = random(f"layer_norm {shape}", *shapes, dtype=dtype)
        return Sample((*tensors, *[None] * (2 - given)), keywords)

    return make


def wide_weight_and_bias(dtype: torch.dtype) -> Sample:
    """Use float32 weights, as models in half precision do in their norms."""
    input, weight, bias = layer_norm_sample((5, 67))(dtype).inputs
    return Sample((input, weight.float(), bias.float()))


def bias_alone(dtype: torch.dtype) -> Sample:
    input, bias = layer_norm_sample((3, 19), given=1)(dtype).inputs[:2]
    return Sample((input, None, bias))


def rows_far_from_zero(dtype: torch.dtype) -> Sample:
    """Make variances that are small beside the mean, a constant row, NaN, and infinity."""
    (input,) = random("far from zero", (7, 33), dtype=dtype)
    input[:2] += 100
    input[2] = 0.1
    input[3, 1], input[4, 2] = torch.nan, torch.inf
    input[5] *= 1e-4
    input[6] *= 1e3
    return Sample((input, None, None))


LAYER_NORM = OpSpec(
    operator=torch.ops.foo.layer_norm.default,
    reference=reference.layer_norm,
    dtypes=RMS_NORM.dtypes,
    sized=lambda dtype, size: layer_norm_sample((2, size, size + 3))(dtype),
    samples={
        "vector": layer_norm_sample((19,)),
        "nothing else": layer_norm_sample((3, 4, 33), given=0, eps=0.25),
        "no bias": layer_norm_sample((2, 3, 2, 17), given=1, eps=1e-12),
        "bias alone": bias_alone,
        "one column": layer_norm_sample((3, 1)),
        "no columns": layer_norm_sample((3, 0)),
        "wide weight": wide_weight_and_bias,
        "far from zero": rows_far_from_zero,
    },
    essential=("size7", "nothing else"),
    large=layer_norm_sample((301, 1001)),
)

ADD_LAYER_NORM = OpSpec(
    operator=torch.ops.foo.add_layer_norm.default,
    reference=reference.add_layer_norm,
    dtypes=RMS_NORM.dtypes,
    sized=lambda dtype, size: layer_norm_sample((2, size, size + 3), inputs=2)(dtype),
    samples={
        "vector": layer_norm_sample((19,), inputs=2),
        "nothing else": layer_norm_sample((3, 4, 33), inputs=2, given=0, eps=0.25),
        "no columns": layer_norm_sample((3, 0), inputs=2),
    },
    essential=("size7", "nothing else"),
    large=layer_norm_sample((301, 1001), inputs=2),
    tolerances=ADD_RMS_NORM.tolerances,
)


# ---------------------------------------------------------------------------- foo::rotary_embedding


def rotary_sample(
    name: str, input: tuple[int, ...], table: tuple[int, ...], **keywords: Any
) -> Maker:
    def make(dtype: torch.dtype) -> Sample:
        return Sample(tuple(random(name, input, table, table, dtype=dtype)), keywords)

    return make


def sized_rotary(dtype: torch.dtype, size: int) -> Sample:
    return rotary_sample("sized", (2, size, 2 * size + 3), (size, size + 1))(dtype)


def wide_tables(dtype: torch.dtype) -> Sample:
    """Use float32 cosines and sines for a query in half precision."""
    input, cosine, sine = rotary_sample("wide tables", (2, 5, 34), (5, 17))(dtype).inputs
    wide = torch.promote_types(dtype, torch.float32)
    return Sample((input, cosine.to(wide), sine.to(wide)))


ROTARY_EMBEDDING = OpSpec(
    operator=torch.ops.foo.rotary_embedding.default,
    reference=reference.rotary_embedding,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sized=sized_rotary,
    samples={
        "vector": rotary_sample("vector", (38,), (19,)),
        "interleaved": rotary_sample("interleaved", (2, 3, 5, 34), (5, 17), interleaved=True),
        "heads inside": rotary_sample("heads inside", (2, 5, 3, 34), (5, 1, 17)),
        "a table for each sequence": rotary_sample("tables", (2, 3, 5, 16), (2, 1, 5, 8)),
        "part of a row": rotary_sample("part", (3, 5, 33), (5, 7), interleaved=True),
        "nothing turns": rotary_sample("nothing", (3, 5), (3, 0)),
        "inverse": rotary_sample("inverse", (3, 34), (3, 17), inverse=True),
        "interleaved inverse": rotary_sample(
            "both", (3, 34), (3, 17), interleaved=True, inverse=True
        ),
        "wide tables": wide_tables,
    },
    essential=("size7", "heads inside", "interleaved inverse"),
    large=rotary_sample("large", (3, 301, 130), (301, 64)),
)
ROTARY_EMBEDDING_IN_PLACE = ROTARY_EMBEDDING.variant(torch.ops.foo.rotary_embedding_)
