"""Linear layers with weights of MXFP4, and their conversion.

MXFP4 has 4-bit numbers of one exponent bit more than mantissa bits (E2M1), of which 32 share a
scale, a power of two (Open Compute Project 2023, "OCP Microscaling Formats (MX) Specification",
version 1.0). gpt-oss's experts are published in it.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foo_ops import _C, library
from foo_ops.library.operators import FLOATING, dtype_name, holds
from foo_ops.ops.arguments import require_device
from foo_ops.ops.dequantize import EXPONENT_BIAS, NAN_EXPONENT, numbers_of_mxfp4
from foo_ops.ops.linear_quantized import flops, grad_of_input, rows_of

# ------------------------------------------------------------------------------------- conversion

GROUP_SIZE = 32
# By code, of which the highest bit is the sign.
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The exponent of the largest number.
LARGEST_EXPONENT = 2


def quantize_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight to MXFP4, as the specification does (section 6.3).

    The scale of 32 adjacent weights is the largest power of two that is no larger than their
    largest magnitude, divided by 4. Weights divided by it are rounded to the nearest of 0, 0.5, 1,
    1.5, 2, 3, 4 and 6, ties to the code that is even, and larger ones to 6.

    Args:
        weight: (..., K), float16, bfloat16, float32 or float64; K is a multiple of 32.

    Returns:
        weight (..., K / 2) uint8, the codes of two adjacent weights in a byte, the first in the
        lower bits; and scale (..., K / 32) uint8, exponents of powers of two, plus 127. A group
        with an infinity or NaN has the scale 255, which stands for NaN.

    Raises:
        ValueError: for a K that is no multiple of 32.
        TypeError: for other dtypes.

    Example:
        >>> weight, scale = foo_ops.quantize_mxfp4(torch.linspace(0, 6, 32))
        >>> scale
        tensor([127], dtype=torch.uint8)
        >>> foo_ops.dequantize_mxfp4(weight, scale)[::8]
        tensor([0.0000, 1.5000, 3.0000, 4.0000])
    """
    name = "quantize_mxfp4"
    if weight.dtype not in FLOATING:
        raise TypeError(
            f"{name}: weight must be float16, bfloat16, float32 or float64, "
            f"got {dtype_name(weight.dtype)}"
        )
    if not weight.dim() or not holds(weight.shape[-1] % GROUP_SIZE == 0):
        got = weight.shape[-1] if weight.dim() else "no dimension"
        raise ValueError(f"{name}: weight must have whole groups of 32 columns, got {got}")
    groups = weight.detach().double().unflatten(-1, (-1, GROUP_SIZE))
    largest = groups.abs().amax(-1)
    # frexp's mantissas are below 1.
    exponents = torch.frexp(largest).exponent - 1 - LARGEST_EXPONENT
    exponents = exponents.clamp(-EXPONENT_BIAS, EXPONENT_BIAS)
    scaled = torch.ldexp(groups, -exponents.unsqueeze(-1))
    codes = codes_of(scaled.abs()) | scaled.signbit().to(torch.uint8) << 3
    scale = torch.where(largest.isfinite(), exponents + EXPONENT_BIAS, NAN_EXPONENT)
    pairs = codes.flatten(-2).unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4, scale.to(torch.uint8)


def codes_of(magnitudes: Tensor) -> Tensor:
    """Return the codes of the nearest numbers; halfway between two, the even code."""
    halfway = [(a + b) / 2 for a, b in pairwise(NUMBERS)]
    codes = torch.zeros(magnitudes.shape, dtype=torch.uint8, device=magnitudes.device)
    for code, bound in enumerate(halfway):
        codes += magnitudes >= bound if code % 2 else magnitudes > bound
    return codes


def dequantize_mxfp4(weight: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the numbers of MXFP4 weights.

    Args:
        weight: (..., K / 2) uint8, as `quantize_mxfp4` returns it.
        scale: (..., K / 32) uint8.
        dtype: float16, bfloat16, float32 or float64. All but float16 have every number, except
            that numbers below 2^-133 are rounded for bfloat16.

    Raises:
        ValueError: for shapes that do not fit together.
        TypeError: for other dtypes.

    Example:
        >>> weight = torch.full((16,), 0x72, dtype=torch.uint8)
        >>> foo_ops.dequantize_mxfp4(weight, torch.tensor([128], dtype=torch.uint8))[:4]
        tensor([ 2., 12.,  2., 12.])
    """
    name = "dequantize_mxfp4"
    for argument, tensor in (("weight", weight), ("scale", scale)):
        if tensor.dtype != torch.uint8:
            raise TypeError(f"{name}: {argument} must be uint8, got {dtype_name(tensor.dtype)}")
    if dtype not in FLOATING:
        raise TypeError(
            f"{name}: dtype must be float16, bfloat16, float32 or float64, got {dtype_name(dtype)}"
        )
    require_device(name, weight=weight, scale=scale)
    fits = weight.dim() and weight.dim() == scale.dim() and weight.shape[:-1] == scale.shape[:-1]
    if not fits or not holds(2 * weight.shape[-1] == GROUP_SIZE * scale.shape[-1]):
        raise ValueError(
            f"{name}: scale must have a column for each 32 of the numbers of weight, "
            f"got shapes {list(scale.shape)} and {list(weight.shape)}"
        )
    return numbers_of_mxfp4(weight, scale, dtype)


# ------------------------------------------------------------------------------- foo::linear_mxfp4

library.define(
    "foo::linear_mxfp4",
    "(Tensor input, Tensor weight, Tensor scale, Tensor? bias=None) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def linear_mxfp4(
    input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Compute ``input @ dequantize_mxfp4(weight, scale).T + bias``, with MXFP4 weights as they are.

    For few rows, it reads a seventh of the memory of float32 weights.

    Args:
        input: (..., K), float16, bfloat16, float32 or float64, any strides; K is a multiple of 32.
        weight: (N, K / 2), uint8, the codes of two adjacent weights in each, the first in the lower
            bits, as checkpoints have them; fastest if the elements of a row are adjacent.
        scale: (N, K / 32), uint8, exponents.
        bias: (N,), of input's dtype.

    Returns:
        A contiguous tensor (..., N) of input's dtype, computed as by `foo_ops.linear_int4`. Has
        gradients for input and bias, of every order.

    Raises:
        ValueError: for shapes that do not fit together.
        TypeError: for dtypes.

    Example:
        >>> weight, scale = foo_ops.quantize_mxfp4(torch.ones(2, 32))
        >>> foo_ops.linear_mxfp4(torch.ones(32), weight, scale)
        tensor([32., 32.])
    """
    return torch.ops.foo.linear_mxfp4.default(input, weight, scale, bias)


@library.register_fake("foo::linear_mxfp4")
def fake(input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    _C.check_linear_mxfp4(input, weight, scale, bias)
    return input.new_empty(*input.shape[:-1], weight.shape[0])


# --------------------------------------------------------------------------------------- autograd


def composite(input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute the same with torch's own operators, for forward mode."""
    return F.linear(input, numbers_of_mxfp4(weight, scale, input.dtype), bias)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, weight, scale, _ = inputs
    ctx.save_for_backward(weight, scale)


def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    weight, scale = ctx.saved_tensors
    needs_input, _, _, needs_bias = ctx.needs_input_grad
    grad_input = grad_bias = None
    if needs_input:
        dequantize = partial(numbers_of_mxfp4, dtype=grad_output.dtype)
        grad_input = grad_of_input(grad_output, dequantize, weight, scale)
    if needs_bias:
        grad_bias = rows_of(grad_output).sum(0)
    return grad_input, None, None, grad_bias


library.register_autograd(
    "foo::linear_mxfp4", backward, setup_context=setup_context, composite=composite
)


# ---------------------------------------------------------------- sharding, vmap, autocast, FLOPs


@library.register_sharding("foo::linear_mxfp4")
def sharding(input: Any, weight: Any, scale: Any, bias: Any = None) -> str:
    # Sharded along k, each process would add the bias.
    return "... k, n k, n k, . -> ... n" if bias is None else "... ., n ., n ., n -> ... n"


library.register_vmap_rows("foo::linear_mxfp4", "input")
library.register_nested_rows("foo::linear_mxfp4", "input")
library.register_autocast("foo::linear_mxfp4")
library.register_flops("foo::linear_mxfp4")(flops)
