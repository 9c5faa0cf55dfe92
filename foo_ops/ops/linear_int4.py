"""foo::linear_int4 multiplies rows by weights of 4 bits, as for decoding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foo_ops import _C, library
from foo_ops.ops.linear import linear, product_flops
from foo_ops.ops.linear_int8 import grad_of_weight, rows_of
from foo_ops.ops.quantize_weight import dequantize_weight, unpack_integers

library.define(
    "foo::linear_int4",
    "(Tensor input, Tensor weight, Tensor scale, Tensor zero, Tensor? bias=None, *, "
    "int group_size) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def linear_int4(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor,
    bias: Tensor | None = None,
    *,
    group_size: int,
) -> Tensor:
    """Compute ``input @ ((integers - zero) * scale).T + bias`` with integers of 4 bits.

    For few rows, it reads an eighth of the memory of float32 weights, besides scale and zero.
    `quantize_weight` makes ``weight``, ``scale`` and ``zero``, and documents how they are packed.

    Args:
        input: (..., K), float16, bfloat16, float32 or float64, any strides.
        weight: (N, K / 2), uint8, two integers in each; fastest if the elements of a row are
            adjacent.
        scale: (N, K / group_size), of input's dtype.
        zero: (N, K / group_size), of input's dtype. It need not be an integer.
        bias: (N,), of input's dtype.
        group_size: 32, 64 or 128 elements of a row that share a scale and a zero.

    Returns:
        A contiguous tensor (..., N) of input's dtype. Weights and sums are computed in float32
        (float64 for float64); the sums are rounded once, the bias included. Up to 8 rows of the
        other dtypes are multiplied in integers: each group of input is rounded to multiples of a
        power of two, and its largest magnitude is at least 16 256 (bfloat16) or 4 161 536 (float16,
        float32) times that power; bfloat16 numbers are exact down to a 64th of the largest. If the
        processor multiplies bfloat16 itself (AVX512-BF16, AMX), more rows use weights that are
        rounded to bfloat16. All gradients for a bfloat16 or float16 input use rounded weights. The
        result does not depend on the number of threads. Has gradients for input, scale, zero and
        bias, of every order.

    Raises:
        ValueError: for shapes that do not fit together, and other group sizes.
        TypeError: for dtypes.

    Example:
        >>> weight = torch.arange(32.0).reshape(1, 32) % 16
        >>> quantized = foo_ops.quantize_weight(weight, 4, group_size=32)
        >>> foo_ops.linear_int4(torch.ones(2, 32), *quantized, group_size=32)
        tensor([[240.],
                [240.]])
    """
    return torch.ops.foo.linear_int4.default(
        input, weight, scale, zero, bias, group_size=group_size
    )


# ------------------------------------------------------------------------------------------- fake


@library.register_fake("foo::linear_int4")
def fake(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor,
    bias: Tensor | None = None,
    *,
    group_size: int,
) -> Tensor:
    _C.check_linear_int4(input, weight, scale, zero, bias, group_size)
    return input.new_empty(*input.shape[:-1], weight.shape[0])


# --------------------------------------------------------------------------------------- autograd


def composite(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor,
    bias: Tensor | None = None,
    *,
    group_size: int,
) -> Tensor:
    """Compute the same with torch's own operators, for forward mode."""
    return F.linear(input, dequantize_weight(weight, scale, zero), bias)


def setup_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    input, weight, scale, zero, _ = inputs
    _, _, needs_scale, needs_zero, _ = ctx.needs_input_grad
    ctx.save_for_backward(input if needs_scale or needs_zero else None, weight, scale, zero)


def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    input, weight, scale, zero = ctx.saved_tensors
    needs_input, _, needs_scale, needs_zero, needs_bias = ctx.needs_input_grad
    grad_input = grad_scale = grad_zero = grad_bias = None
    if needs_input:
        grad_input = linear(grad_output, dequantize_weight(weight, scale, zero).t())
    if needs_scale or needs_zero:
        integers = unpack_integers(weight, scale.shape[1])
        grad = grad_of_weight(grad_output, input).reshape(integers.shape)
        steps = integers - zero.to(grad.dtype).unsqueeze(-1)
        grad_scale = (grad * steps).sum(-1).to(scale.dtype)
        grad_zero = -(grad * scale.unsqueeze(-1)).sum(-1).to(zero.dtype)
    if needs_bias:
        grad_bias = rows_of(grad_output).sum(0)
    return grad_input, None, grad_scale, grad_zero, grad_bias


library.register_autograd(
    "foo::linear_int4", backward, setup_context=setup_context, composite=composite
)


# ---------------------------------------------------------------- sharding, vmap, autocast, FLOPs


@library.register_sharding("foo::linear_int4")
def sharding(input: Any, weight: Any, scale: Any, zero: Any, bias: Any = None, **_: Any) -> str:
    # Sharded along k, each process would add the bias.
    if bias is None:
        return "... k, n k, n k, n k, . -> ... n"
    return "... ., n ., n ., n ., n -> ... n"


library.register_vmap_rows("foo::linear_int4", "input")
library.register_nested_rows("foo::linear_int4", "input")
library.register_autocast("foo::linear_int4")


@library.register_flops("foo::linear_int4")
def flops(input_shape: torch.Size, weight_shape: torch.Size, *others: Any, **_: Any) -> int:
    """Count one matrix product, without scale, zero and bias."""
    return product_flops(input_shape, weight_shape[0])
