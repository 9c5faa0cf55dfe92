"""foo::linear_silu_mul is the first half of a SwiGLU (Shazeer 2020, equation 6), in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foo_ops import _C, library
from foo_ops.library.autocast import cast_as_autocast
from foo_ops.ops.linear import are_recorded, linear, product_flops
from foo_ops.ops.silu_mul import silu_mul

library.define(
    "foo::linear_silu_mul",
    "(Tensor input, Tensor gate_weight, Tensor up_weight) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def linear_silu_mul(input: Tensor, gate_weight: Tensor, up_weight: Tensor) -> Tensor:
    """Compute ``silu(input @ gate_weight.T) * (input @ up_weight.T)``.

    Neither product is ever in memory as a whole, unless gradients are recorded: then both are
    computed first and saved.

    Args:
        input: (..., K), float16, bfloat16, float32 or float64, any strides.
        gate_weight, up_weight: (N, K), of input's dtype, any strides.

    Returns:
        A contiguous tensor (..., N) of input's dtype. float16 and bfloat16 are computed in float32
        and rounded once. The result does not depend on the number of threads. Has gradients for
        all tensors, of every order.

    Raises:
        ValueError: for shapes that do not fit together.
        TypeError: for dtypes.

    Example:
        >>> gate, up = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
        >>> foo_ops.linear_silu_mul(torch.tensor([[1.0, 2.0]]), gate, up)
        tensor([[1.4621]])
    """
    if are_recorded(input, gate_weight, up_weight):
        return composite(*cast_as_autocast(input, gate_weight, up_weight))
    return torch.ops.foo.linear_silu_mul.default(input, gate_weight, up_weight)


@library.register_fake("foo::linear_silu_mul")
def fake(input: Tensor, gate_weight: Tensor, up_weight: Tensor) -> Tensor:
    _C.check_linear_silu_mul(input, gate_weight, up_weight)
    return input.new_empty(*input.shape[:-1], gate_weight.shape[0])


def composite(input: Tensor, gate_weight: Tensor, up_weight: Tensor) -> Tensor:
    _C.check_linear_silu_mul(input, gate_weight, up_weight)
    return silu_mul(linear(input, gate_weight), linear(input, up_weight))


library.register_autograd("foo::linear_silu_mul", composite=composite)
library.register_vmap_rows("foo::linear_silu_mul", "input")
library.register_nested_rows("foo::linear_silu_mul", "input")
library.register_autocast("foo::linear_silu_mul")


@library.register_sharding("foo::linear_silu_mul")
def sharding(input: Any, gate_weight: Any, up_weight: Any) -> str:
    return "... ., n ., n . -> ... n"


@library.register_flops("foo::linear_silu_mul")
def flops(input_shape: torch.Size, gate_shape: torch.Size, up_shape: torch.Size, **_: Any) -> int:
    """Count two matrix products."""
    return 2 * product_flops(input_shape, gate_shape[0])
