"""Symmetric quantization of rows to int8, as for weights or activations of a model.

    scale = max(|row|) / 127
    quantized = round(row / scale), halves to even

Shows two results of other dtypes than the input, explicit vectors, and a loop written so that it is
vectorised: without branches, and rounding by an addition.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from foo_ops import language, library
from foo_ops.testing import OpSpec, Sample, random

library.define(
    "examples::quantize",
    "(Tensor input) -> (Tensor quantized, Tensor scale)",
    tags=torch.Tag.pt2_compliant_tag,
)
LARGEST = 127
# A float32 added to this has no fractional bits left.
ROUNDING = 1.5 * 2**23


def quantize(input: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of ``input`` (..., D) as int8, and their scales (...) in float32.

    NaN becomes zero. If a row has an infinity, its scale is infinite and all its elements become 0.
    """
    return torch.ops.examples.quantize(input)


# ----------------------------------------------------------------------------------------- kernel


@library.register_kernel("examples::quantize", ("cpu", "foo"))
@library.tile_kernel(contiguous_rows=True)
def kernel(input: Any, quantized: Any, scale: Any, rows: Any) -> None:
    size, step = input.shape[-1], language.lanes(input)
    whole = size // step * step
    for row in rows:
        x, y = input.row(row), quantized.row(row)
        most = language.splat(language.zero(input), step)
        for i in range(0, whole, step):
            # If the first is NaN, the maximum is the second.
            most = language.maximum(language.absolute(language.load_vector(x, i, step)), most)
        largest = language.reduce_maximum(most)
        for i in range(whole, size):
            largest = abs(x[i]) if abs(x[i]) > largest else largest
        scale.flat[row] = largest / LARGEST
        inverse = language.cast(LARGEST / largest, input)
        if not inverse < math.inf:
            # Rows of zeros, or of numbers too small for an inverse, become zeros.
            inverse = language.zero(input)
        for i in range(size):
            value = language.cast(x[i] * inverse, scale)
            rounded = (value + ROUNDING) - ROUNDING
            y[i] = rounded if value == value else language.zero(scale)


# ------------------------------------------------------------------------------------------- fake


@library.register_fake("examples::quantize")
def fake(input: Tensor) -> tuple[Tensor, Tensor]:
    if not input.is_floating_point():
        raise TypeError(f"quantize: input must be floating-point, got {input.dtype}")
    if input.dim() == 0:
        raise ValueError("quantize: input must have at least 1 dimension, got 0")
    quantized = torch.empty_like(input, dtype=torch.int8, memory_format=torch.contiguous_format)
    return quantized, input.new_empty(input.shape[:-1], dtype=torch.float32)


library.register_vmap_rows("examples::quantize", "input")


# ---------------------------------------------------------------------------------------- samples


def scales(input: Tensor) -> Tensor:
    if not library.holds(input.shape[-1] > 0):
        return input.new_zeros(input.shape[:-1])
    return input.abs().nan_to_num(0.0, torch.inf).amax(-1) / 127


def reference(input: Tensor) -> tuple[Tensor, Tensor]:
    scale = scales(input)
    return (input / scale[..., None]).nan_to_num(0.0).round().to(torch.int8), scale


def budgets(sample: Sample, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Allow one step where a number is too near to a midpoint for float32."""
    (input,) = sample.inputs
    scale = scales(input)
    steps = (input / scale[..., None]).nan_to_num(0.0)
    distance = (steps - steps.floor() - 0.5).abs()
    is_middle = distance < 4 * 127 * torch.finfo(torch.float32).eps
    return is_middle.double(), 2 * torch.finfo(torch.float32).eps * scale.nan_to_num(0.0)


def sample(shape: tuple[int, ...], dtype: torch.dtype) -> Sample:
    return Sample((*random("quantize", shape, dtype=dtype),))


def special(dtype: torch.dtype) -> Sample:
    """Make rows of zeros, of halves, of small numbers, with infinity and with NaN."""
    (input,) = random("special", (5, 19), dtype=dtype)
    input[0] = 0
    input[1, 0], input[1, 1:] = 127, torch.arange(18) / 2
    input[2] *= 1e-3
    input[3, 2], input[4, 3] = torch.inf, torch.nan
    return Sample((input,))


SPEC = OpSpec(
    operator=torch.ops.examples.quantize.default,
    reference=reference,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sized=lambda dtype, size: sample((2, size, size + 3), dtype),
    samples={
        "vector": lambda dtype: sample((33,), dtype),
        "no columns": lambda dtype: sample((3, 0), dtype),
        "special values": special,
    },
    essential=("size7", "vector"),
    large=lambda dtype: sample((301, 501), dtype),
    differentiable=False,
    output_budget=budgets,
)
