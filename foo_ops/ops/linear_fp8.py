"""foo::linear_fp8: linear layers with weights of float8_e4m3fn.

A sign, 4 bits of exponent and 3 of fraction, without infinities (Micikevicius et al. 2022, "FP8
formats for deep learning"). DeepSeek's and Qwen's models are published in it, with a scale for each
block of weights.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foo_ops import _C, library
from foo_ops.ops.dequantize import decoded_fp8, groups_of, in_groups, numbers_of_fp8
from foo_ops.ops.linear_quantized import (
    flops,
    grad_of_input,
    grad_of_weight,
    rows_of,
    setup_context,
)

library.define(
    "foo::linear_fp8",
    "(Tensor input, Tensor weight, Tensor scale, Tensor? bias=None) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def linear_fp8(input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``input @ (weight * scale).T + bias`` with floating-point weights of 8 bits.

    For few rows, it reads a quarter of the memory of float32 weights.

    Args:
        input: (..., K), float16, bfloat16, float32 or float64, any strides.
        weight: (N, K), float8_e4m3fn, or uint8 with its bits; fastest if the elements of a row are
            adjacent.
        scale: (N,), or (N, K / group_size) for each group of 32, 64 or 128 elements of a row;
            float32, or float64 for an input of float64.
        bias: (N,), of input's dtype.

    Returns:
        A contiguous tensor (..., N) of input's dtype, computed as by `foo_ops.linear_int8`. Has
        gradients for input, scale and bias, of every order.

    Raises:
        ValueError: for shapes that do not fit together.
        TypeError: for dtypes.

    Example:
        >>> weight = torch.tensor([[1.0, -0.5, 448.0]]).to(torch.float8_e4m3fn)
        >>> foo_ops.linear_fp8(torch.ones(3), weight, torch.tensor([2.0]))
        tensor([897.])
    """
    return torch.ops.foo.linear_fp8.default(input, codes_of(weight), scale, bias)


def codes_of(weight: Tensor) -> Tensor:
    """Return the bits of a weight of float8_e4m3fn as uint8, and others as they are."""
    return weight.view(torch.uint8) if weight.dtype == torch.float8_e4m3fn else weight


@library.register_fake("foo::linear_fp8")
def fake(input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    _C.check_linear_fp8(input, weight, scale, bias)
    return input.new_empty(*input.shape[:-1], weight.shape[0])


# --------------------------------------------------------------------------------------- autograd


def composite(input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute the same with torch's own operators, for forward mode."""
    return F.linear(input, numbers_of_fp8(weight, scale, input.dtype), bias)


def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    input, weight, scale = ctx.saved_tensors
    needs_input, _, needs_scale, needs_bias = ctx.needs_input_grad
    grad_input = grad_scale = grad_bias = None
    if needs_input:
        dequantize = partial(numbers_of_fp8, dtype=grad_output.dtype)
        grad_input = grad_of_input(grad_output, dequantize, weight, scale)
    if needs_scale:
        terms = grad_of_weight(grad_output, input).to(scale.dtype) * decoded_fp8(weight)
        grad_scale = in_groups(terms, groups_of(scale)).sum(-1)
    if needs_bias:
        grad_bias = rows_of(grad_output).sum(0)
    return grad_input, None, grad_scale, grad_bias


library.register_autograd(
    "foo::linear_fp8", backward, setup_context=setup_context, composite=composite
)


# ---------------------------------------------------------------- sharding, vmap, autocast, FLOPs


@library.register_sharding("foo::linear_fp8")
def sharding(input: Any, weight: Any, scale: Any, bias: Any = None) -> str:
    # Sharded along k, each process would add the bias.
    k, of_bias = ("k", ".") if bias is None else (".", "n")
    of_scale = f"n {k}" if len(scale.shape) == 2 else "n"
    return f"... {k}, n {k}, {of_scale}, {of_bias} -> ... n"


library.register_vmap_rows("foo::linear_fp8", "input")
library.register_nested_rows("foo::linear_fp8", "input")
library.register_autocast("foo::linear_fp8", uncast=("scale",))
library.register_flops("foo::linear_fp8")(flops)
