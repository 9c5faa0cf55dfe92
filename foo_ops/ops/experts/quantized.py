"""foo::moe_experts_quantized computes experts whose weights have 8 or 4 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foo_ops import _C, library
from foo_ops.ops.dequantize import numbers_of_fp8, numbers_of_integers, numbers_of_mxfp4
from foo_ops.ops.experts.mixture import OPTIONS, flops_of
from foo_ops.ops.linear_fp8 import codes_of

library.define(
    "foo::moe_experts_quantized",
    "(Tensor hidden, Tensor expert_index, Tensor expert_weight, "
    "Tensor gate_up, Tensor gate_up_scale, Tensor? gate_up_zero, "
    "Tensor down, Tensor down_scale, Tensor? down_zero, "
    f"Tensor? gate_up_bias=None, Tensor? down_bias=None, *, {OPTIONS}) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def moe_experts_quantized(
    hidden: Tensor,
    expert_index: Tensor,
    expert_weight: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_zero: Tensor | None,
    down: Tensor,
    down_scale: Tensor,
    down_zero: Tensor | None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str = "silu",
    is_gated: bool = True,
    is_interleaved: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> Tensor:
    """Compute `foo_ops.moe_experts` with weights of 8 or 4 bits: integers, FP8 or MXFP4.

    `foo_ops.quantize_weight` and `foo_ops.quantize_mxfp4` make them. Weights are read as they are:
    for few tokens, whose time is that of reading weights, experts of bfloat16 take twice as long as
    those of 8 bits, and four times as long as those of 4.

    Args:
        hidden, expert_index, expert_weight: as for `foo_ops.moe_experts`.
        gate_up: (E, 2 N, K) int8, or float8_e4m3fn or uint8 with its bits; or (E, 2 N, K / 2) uint8
            for 4 bits, packed by groups, and for MXFP4, where adjacent weights share a byte.
        gate_up_scale: (E, 2 N, K / group_size), with groups of 32, 64 or 128 weights, or for 8 bits
            also (E, 2 N); of hidden's dtype, for float8_e4m3fn float32 or float64 as for
            `foo_ops.linear_fp8`. (E, 2 N, K / 32) uint8 for MXFP4, exponents.
        gate_up_zero: of gate_up_scale's shape and dtype, for integers of 4 bits; else None.
        down, down_scale, down_zero: likewise, for (E, L, N).
        gate_up_bias, down_bias, activation, is_gated, is_interleaved, alpha, limit, up_offset: as
            for `foo_ops.moe_experts`.

    Returns:
        (T, L) in hidden's dtype. Has gradients for all floating-point tensors, of every order; the
        backward pass dequantizes the weights.

    Raises:
        ValueError, TypeError: for shapes, dtypes and options that do not fit.
        IndexError: for an expert outside [0, E].

    Example:
        >>> gate_up, gate_up_scale = foo_ops.quantize_weight(torch.ones(4, 2), 8)
        >>> down, down_scale = foo_ops.quantize_weight(torch.ones(2, 2), 8)
        >>> foo_ops.moe_experts_quantized(
        ...     torch.ones(1, 2), torch.tensor([[0]]), torch.ones(1, 1),
        ...     gate_up[None], gate_up_scale[None], None, down[None], down_scale[None], None,
        ...     activation="relu",
        ... )
        tensor([[8.0000, 8.0000]])
    """
    return torch.ops.foo.moe_experts_quantized.default(
        hidden,
        expert_index,
        expert_weight,
        codes_of(gate_up),
        gate_up_scale,
        gate_up_zero,
        codes_of(down),
        down_scale,
        down_zero,
        gate_up_bias,
        down_bias,
        activation=activation,
        is_gated=is_gated,
        is_interleaved=is_interleaved,
        alpha=alpha,
        limit=limit,
        up_offset=up_offset,
    )


@library.register_fake("foo::moe_experts_quantized")
def fake(
    *inputs: Any,
    activation: str = "silu",
    is_gated: bool = True,
    alpha: float = 1.0,
    limit: float | None = None,
    **_: Any,
) -> Tensor:
    missing = (None,) * (11 - len(inputs))
    _C.check_moe_experts_quantized(*inputs, *missing, activation, is_gated, alpha, limit)
    hidden, down = inputs[0], inputs[6]
    output: Tensor = hidden.new_empty(hidden.shape[0], down.shape[1])
    return output


def dequantized(weight: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the numbers of all experts' weights, in dtype."""
    if zero is None and scale.dtype == torch.uint8:
        return numbers_of_mxfp4(weight, scale, dtype)
    if are_fp8(weight, zero):
        numbers = numbers_of_fp8(weight.flatten(0, 1), scale.flatten(0, 1), dtype)
        return numbers.unflatten(0, weight.shape[:2])
    of_rows = [None if it is None else it.flatten(0, 1) for it in (weight, scale, zero)]
    return numbers_of_integers(*of_rows).unflatten(0, weight.shape[:2])  # type: ignore[arg-type]


def composite(
    hidden: Tensor,
    expert_index: Tensor,
    expert_weight: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_zero: Tensor | None,
    down: Tensor,
    down_scale: Tensor,
    down_zero: Tensor | None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Compute the same with dequantized weights."""
    gate_up = dequantized(gate_up, gate_up_scale, gate_up_zero, hidden.dtype)
    down = dequantized(down, down_scale, down_zero, hidden.dtype)
    output: Tensor = torch.ops.foo.moe_experts.default(
        hidden, expert_index, expert_weight, gate_up, down, gate_up_bias, down_bias, **options
    )
    return output


library.register_autograd("foo::moe_experts_quantized", composite=composite)


# ---------------------------------------------------------------- sharding, vmap, autocast, FLOPs

library.register_vmap_loop("foo::moe_experts_quantized")


def scales_of_fp8(*inputs: Any, **options: Any) -> list[str]:
    """Return the names of scales in the compute type, which autocast leaves as they are."""
    gate_up, _, gate_up_zero, down, _, down_zero = inputs[3:9]
    weights = {"gate_up_scale": (gate_up, gate_up_zero), "down_scale": (down, down_zero)}
    return [name for name, (codes, zero) in weights.items() if are_fp8(codes, zero)]


def are_fp8(codes: Tensor, zero: Tensor | None) -> bool:
    """Whether weights with floating scales are float8_e4m3fn, and not integers."""
    return zero is None and codes.dtype == torch.uint8


library.register_autocast("foo::moe_experts_quantized", uncast=scales_of_fp8)


@library.register_sharding("foo::moe_experts_quantized")
def sharding(
    hidden: Any,
    index: Any,
    weight: Any,
    gate_up: Any,
    scale: Any,
    zero: Any,
    down: Any,
    down_scale: Any,
    down_zero: Any,
    *_: Any,
    **__: Any,
) -> str:
    """Shard tokens."""
    matrices = [f". . ., {'. ' * len(it.shape)}, . . ." for it in (scale, down_scale)]
    return f"t ., t ., t ., {matrices[0]}, {matrices[1]}, . ., . . -> t ."


@library.register_flops("foo::moe_experts_quantized")
def flops(
    hidden_shape: torch.Size,
    index_shape: torch.Size,
    weight_shape: torch.Size,
    gate_up_shape: torch.Size,
    gate_up_scale_shape: torch.Size,
    gate_up_zero_shape: torch.Size | None,
    down_shape: torch.Size,
    *others: Any,
    is_gated: bool = True,
    **_: Any,
) -> int:
    """Count both products of all choices, without scales and zeros."""
    return flops_of(index_shape.numel(), hidden_shape[1], gate_up_shape[1], down_shape[1], is_gated)
