"""foo::linear_silu_mul_quantized is the gate of a SwiGLU, for weights of 8 or 4 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foo_ops import _C, library
from foo_ops.ops.linear import are_recorded, cast_as_autocast, product_flops
from foo_ops.ops.linear_quantized import linear_int4, linear_int8
from foo_ops.ops.silu_mul import silu_mul

library.define(
    "foo::linear_silu_mul_quantized",
    "(Tensor input, Tensor weight, Tensor scale, Tensor? zero=None, *, int? activations=None, "
    "bool by_section=False) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def linear_silu_mul_quantized(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    activations: int | None = None,
    by_section: bool = False,
) -> Tensor:
    """Compute ``silu(input @ gate.T) * (input @ up.T)`` with integers of 8 or 4 bits.

    The rows of gate are the first half of the weight's, those of up the second. `quantize_weight`
    makes ``weight``, ``scale`` and ``zero`` from ``torch.cat((gate, up))``.

    Args:
        input: (..., K), float16, bfloat16, float32 or float64, any strides.
        weight: (N, K), int8, or with ``zero`` (N, K / 2), uint8, as in `linear_int4`; N is even.
        scale: (N,), or (N, K / group_size) for groups of 32, 64 or 128 elements of a row, which
            integers of 4 bits must have; of input's dtype.
        zero: (N, K / group_size), of input's dtype. It need not be an integer.
        activations: 8 to round input to integers of 8 bits, as by `linear_int8`.
        by_section: round input and weight by sections, as by `linear_int8`.

    Returns:
        A contiguous tensor (..., N / 2) of input's dtype. The products are those of `linear_int8`
        and `linear_int4`, and are rounded to input's dtype before the gate, as the result is. They
        are not rounded, and never in memory as a whole, with ``activations=8`` and more than 64
        rows, or more than 16 if there are groups, or any by section, unless gradients are recorded.
        The result does not depend on the number of threads. Has gradients for input, scale and
        zero, of every order.

    Raises:
        ValueError: for shapes that do not fit together, other numbers of bits, and by_section
            without ``activations`` or groups.
        TypeError: for dtypes, and float64 with ``activations``.

    Example:
        >>> gate, up = torch.tensor([[127.0, 0.0]]), torch.tensor([[0.0, 127.0]])
        >>> weight, scale = foo_ops.quantize_weight(torch.cat((gate, up)) / 127, 8)
        >>> foo_ops.linear_silu_mul_quantized(torch.tensor([[1.0, 2.0]]), weight, scale)
        tensor([[1.4621]])
    """
    if are_recorded(input, scale, zero):
        input, scale, zero = cast_as_autocast(input, scale, zero)
        return composite(input, weight, scale, zero, activations=activations, by_section=by_section)
    return torch.ops.foo.linear_silu_mul_quantized.default(
        input, weight, scale, zero, activations=activations, by_section=by_section
    )


@library.register_fake("foo::linear_silu_mul_quantized")
def fake(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    activations: int | None = None,
    by_section: bool = False,
) -> Tensor:
    _C.check_linear_silu_mul_quantized(input, weight, scale, zero, activations, by_section)
    return input.new_empty(*input.shape[:-1], weight.shape[0] // 2)


def composite(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    activations: int | None = None,
    by_section: bool = False,
) -> Tensor:
    _C.check_linear_silu_mul_quantized(input, weight, scale, zero, activations, by_section)
    rounding: Any = {"activations": activations, "by_section": by_section}
    if zero is None:
        both = linear_int8(input, weight, scale, **rounding)
    else:
        # Without steps, any size is right.
        groups = scale.shape[1]
        size = 2 * weight.shape[1] // groups if groups else 32
        both = linear_int4(input, weight, scale, zero, group_size=size, **rounding)
    # The numbers of rows may be unknown in a graph, which cannot split them by a number of parts.
    half = weight.shape[0] // 2
    return silu_mul(both.narrow(-1, 0, half), both.narrow(-1, half, half))


library.register_autograd("foo::linear_silu_mul_quantized", composite=composite)
library.register_vmap_rows("foo::linear_silu_mul_quantized", "input")
library.register_nested_rows("foo::linear_silu_mul_quantized", "input")
library.register_autocast("foo::linear_silu_mul_quantized")


@library.register_sharding("foo::linear_silu_mul_quantized")
def sharding(input: Any, weight: Any, scale: Any, zero: Any = None, **_: Any) -> str:
    # The rows of gate and up are halves of one dimension, which no process has a part of.
    of_scale = ". ." if len(scale.shape) == 2 else "."
    of_zero = "." if zero is None else ". ."
    return f"... ., . ., {of_scale}, {of_zero} -> ... ."


@library.register_flops("foo::linear_silu_mul_quantized")
def flops(input_shape: torch.Size, weight_shape: torch.Size, *others: Any, **_: Any) -> int:
    """Count both matrix products, without scale, zero and the gate."""
    return product_flops(input_shape, weight_shape[0])
