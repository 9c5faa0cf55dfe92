"""foo::linear_int8 multiplies rows by weights of 8 bits, as for decoding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foo_ops import _C, library
from foo_ops.ops.linear import linear, product_flops
from foo_ops.ops.quantize_weight import dequantize_weight

library.define(
    "foo::linear_int8",
    "(Tensor input, Tensor weight, Tensor scale, Tensor? bias=None) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def linear_int8(input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``input @ weight.T * scale + bias`` with integers of 8 bits.

    For few rows, it reads a quarter of the memory of float32 weights. `quantize_weight` makes
    ``weight`` and ``scale``.

    Args:
        input: (..., K), float16, bfloat16, float32 or float64, any strides.
        weight: (N, K), int8; fastest if the elements of a row are adjacent.
        scale: (N,), of input's dtype.
        bias: (N,), of input's dtype.

    Returns:
        A contiguous tensor (..., N) of input's dtype. Products with the integers, which are exact
        in bfloat16, are summed up in float32 (float64 for float64), scaled, and rounded once, the
        bias included. The result does not depend on the number of threads. Has gradients for input,
        scale and bias, of every order; those for a bfloat16 or float16 input use weights that are
        rounded to its dtype.

    Raises:
        ValueError: for shapes that do not fit together.
        TypeError: for dtypes.

    Example:
        >>> weight, scale = foo_ops.quantize_weight(torch.tensor([[127.0, 2.0], [0.0, 254.0]]), 8)
        >>> foo_ops.linear_int8(torch.tensor([[1.0, 2.0]]), weight, scale)
        tensor([[131., 508.]])
    """
    return torch.ops.foo.linear_int8.default(input, weight, scale, bias)


# ------------------------------------------------------------------------------------------- fake


@library.register_fake("foo::linear_int8")
def fake(input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    _C.check_linear_int8(input, weight, scale, bias)
    return input.new_empty(*input.shape[:-1], weight.shape[0])


# --------------------------------------------------------------------------------------- autograd


def composite(input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute the same with torch's own operators, for forward mode."""
    return F.linear(input, dequantize_weight(weight, scale), bias)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, scale, _ = inputs
    _, _, needs_scale, _ = ctx.needs_input_grad
    ctx.save_for_backward(input if needs_scale else None, weight, scale)


def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    input, weight, scale = ctx.saved_tensors
    needs_input, _, needs_scale, needs_bias = ctx.needs_input_grad
    grad_input = grad_scale = grad_bias = None
    if needs_input:
        grad_input = linear(grad_output, dequantize_weight(weight, scale).t())
    if needs_scale:
        grad_scale = (grad_of_weight(grad_output, input) * weight).sum(-1).to(scale.dtype)
    if needs_bias:
        grad_bias = rows_of(grad_output).sum(0)
    return grad_input, None, grad_scale, grad_bias


def grad_of_weight(grad_output: Tensor, input: Tensor) -> Tensor:
    """Return the gradient, (N, K), in the compute type, since its elements are summed."""
    wide = torch.promote_types(input.dtype, torch.float32)
    rows, columns = (rows_of(it).to(wide) for it in (grad_output, input))
    return linear(rows.t(), columns.t())


def rows_of(tensor: Tensor) -> Tensor:
    """Return a matrix of the rows of a tensor of any number of dimensions."""
    return tensor.unsqueeze(0).flatten(0, -2)


library.register_autograd(
    "foo::linear_int8", backward, setup_context=setup_context, composite=composite
)


# ---------------------------------------------------------------- sharding, vmap, autocast, FLOPs


@library.register_sharding("foo::linear_int8")
def sharding(input: Any, weight: Any, scale: Any, bias: Any = None) -> str:
    # Sharded along k, each process would add the bias.
    return "... k, n k, n, . -> ... n" if bias is None else "... ., n ., n, n -> ... n"


library.register_vmap_rows("foo::linear_int8", "input")
library.register_nested_rows("foo::linear_int8", "input")
library.register_autocast("foo::linear_int8")


@library.register_flops("foo::linear_int8")
def flops(input_shape: torch.Size, weight_shape: torch.Size, *others: Any, **_: Any) -> int:
    """Count one matrix product, without scale and bias."""
    return product_flops(input_shape, weight_shape[0])
