"""foo::linear_table4: linear layers with codes of 4 bits and a table of their 16 numbers.

bitsandbytes' NF4 and FP4 are such tables (Dettmers et al. 2023, "QLoRA: Efficient Finetuning of
Quantized LLMs").
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foo_ops import _C, library
from foo_ops.ops.dequantize import adjacent_codes, groups_of, in_groups, numbers_of_table4
from foo_ops.ops.linear_quantized import flops, grad_of_input, grad_of_weight, rows_of

library.define(
    "foo::linear_table4",
    "(Tensor input, Tensor weight, Tensor scale, Tensor table, Tensor? bias=None) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def linear_table4(
    input: Tensor, weight: Tensor, scale: Tensor, table: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Compute ``input @ (table[weight] * scale).T + bias`` with codes of 4 bits.

    For few rows, it reads a seventh of the memory of float32 weights.

    Args:
        input: (..., K), float16, bfloat16, float32 or float64, any strides.
        weight: (N, K / 2), uint8, the codes of two adjacent weights in each, the first in the lower
            bits; fastest if the elements of a row are adjacent.
        scale: (N, K / group_size) for each group of 32, 64 or 128 elements of a row; float32, or
            float64 for an input of float64.
        table: (16,), the number of each code; of scale's dtype.
        bias: (N,), of input's dtype.

    Returns:
        A contiguous tensor (..., N) of input's dtype. Weights and sums are computed in float32
        (float64 for float64); the sums are rounded once, the bias included. For more than 8 rows,
        weights are rounded to bfloat16 if the input is bfloat16 and the processor multiplies it
        itself (AVX512-BF16, AMX). All gradients for a bfloat16 or float16 input use weights that
        are rounded to its dtype. The result does not depend on the number of threads. Has gradients
        for input, scale, table and bias, of every order.

    Raises:
        ValueError: for shapes that do not fit together.
        TypeError: for dtypes.

    Example:
        >>> weight = torch.full((1, 16), 0x10, dtype=torch.uint8)  # codes 0 and 1 in turn
        >>> table, scale = torch.arange(16) / 16, torch.tensor([[2.0]])
        >>> foo_ops.linear_table4(torch.ones(32), weight, scale, table)
        tensor([2.])
    """
    return torch.ops.foo.linear_table4.default(input, weight, scale, table, bias)


@library.register_fake("foo::linear_table4")
def fake(
    input: Tensor, weight: Tensor, scale: Tensor, table: Tensor, bias: Tensor | None = None
) -> Tensor:
    _C.check_linear_table4(input, weight, scale, table, bias)
    return input.new_empty(*input.shape[:-1], weight.shape[0])


# --------------------------------------------------------------------------------------- autograd


def composite(
    input: Tensor, weight: Tensor, scale: Tensor, table: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Compute the same with torch's own operators, for forward mode."""
    return F.linear(input, numbers_of_table4(weight, scale, table, input.dtype), bias)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, scale, table, _ = inputs
    needs_numbers = any(ctx.needs_input_grad[2:4])
    ctx.save_for_backward(input if needs_numbers else None, weight, scale, table)


def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    input, weight, scale, table = ctx.saved_tensors
    needs_input, _, needs_scale, needs_table, needs_bias = ctx.needs_input_grad
    grad_input = grad_scale = grad_table = grad_bias = None
    if needs_input:

        def dequantize(weight: Tensor, scale: Tensor) -> Tensor:
            return numbers_of_table4(weight, scale, table, grad_output.dtype)

        grad_input = grad_of_input(grad_output, dequantize, weight, scale)
    if needs_scale or needs_table:
        grad, codes = grad_of_weight(grad_output, input).to(scale.dtype), adjacent_codes(weight)
        if needs_scale:
            grad_scale = in_groups(grad * table[codes], groups_of(scale)).sum(-1)
        if needs_table:
            grad_table = grad_of_table(grad, codes, scale)
    if needs_bias:
        grad_bias = rows_of(grad_output).sum(0)
    return grad_input, None, grad_scale, grad_table, grad_bias


def grad_of_table(grad: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient, (16,), from that of the dequantized weight.

    Groups are summed up first, since torch's sum of a whole tensor depends on the threads.
    """
    terms, places = (in_groups(it, groups_of(scale)) for it in (grad, codes))
    of_groups = [terms.masked_fill(places != code, 0).sum(-1) * scale for code in range(16)]
    return torch.stack(of_groups).sum((1, 2))


library.register_autograd(
    "foo::linear_table4", backward, setup_context=setup_context, composite=composite
)


# ---------------------------------------------------------------- sharding, vmap, autocast, FLOPs


@library.register_sharding("foo::linear_table4")
def sharding(input: Any, weight: Any, scale: Any, table: Any, bias: Any = None) -> str:
    # Sharded along k, each process would add the bias.
    return "... k, n k, n k, ., . -> ... n" if bias is None else "... ., n ., n ., ., n -> ... n"


library.register_vmap_rows("foo::linear_table4", "input")
library.register_nested_rows("foo::linear_table4", "input")
library.register_autocast("foo::linear_table4", uncast=("scale", "table"))
library.register_flops("foo::linear_table4")(flops)
