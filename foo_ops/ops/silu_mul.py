"""foo::silu_mul is the gate of a SwiGLU (Shazeer 2020, equation 6): silu(gate) * up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foo_ops import language, library

library.define(
    "foo::silu_mul", "(Tensor gate, Tensor up) -> Tensor", tags=torch.Tag.pt2_compliant_tag
)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Compute ``silu(gate) * up`` element by element, with silu(x) = x / (1 + exp(-x)).

    Args:
        gate, up: floating-point, of shapes that broadcast and any strides. float16 and bfloat16
            are computed in float32 and rounded once.

    Returns:
        A tensor of the shape and dtype that gate * up has. Has gradients for both.

    Raises:
        TypeError: for dtypes that are not floating-point.

    Example:
        >>> foo_ops.silu_mul(torch.tensor([0.0, 1.0]), torch.tensor([5.0, 2.0]))
        tensor([0.0000, 1.4621])
    """
    return torch.ops.foo.silu_mul(gate, up)


def kernel(gate: Any, up: Any) -> Any:
    return gate / (1 + language.exp(-gate)) * up


def gradient(grad: Any, gate: Any, up: Any) -> Any:
    sigmoid = 1 / (1 + language.exp(-gate))
    silu = gate * sigmoid
    return grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu


def second_gradient(grad_gate: Any, grad_up: Any, grad: Any, gate: Any, up: Any) -> Any:
    """Differentiate `gradient`: silu' = s + x s (1 - s), silu'' = s (1 - s) (2 + x (1 - 2 s))."""
    sigmoid = 1 / (1 + language.exp(-gate))
    rest = sigmoid * (1 - sigmoid)
    slope = sigmoid + gate * rest
    bend = rest * (2 + gate * (1 - 2 * sigmoid))
    silu = gate * sigmoid
    return (
        grad_gate * up * slope + grad_up * silu,
        grad * (grad_gate * up * bend + grad_up * slope),
        grad_gate * grad * slope,
    )


derivative = library.elementwise_kernel(gradient, backward=second_gradient)
library.register_kernel(
    "foo::silu_mul", ("cpu", "foo"), library.elementwise_kernel(kernel, backward=derivative)
)
library.register_nested_rows("foo::silu_mul", "gate", "up", elementwise=True)
