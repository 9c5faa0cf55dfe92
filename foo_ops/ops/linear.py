"""Linear layers: foo::linear, with an activation, and of gated MLPs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foo_ops import _C, library
from foo_ops.library.rules import cast_as_autocast
from foo_ops.ops.silu_mul import silu_mul

# -------------------------------------------------------------- foo::linear, foo::linear_activation


TAGS = torch.Tag.pt2_compliant_tag
library.define(
    "foo::linear", "(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor", tags=TAGS
)
library.define(
    "foo::linear_activation",
    "(Tensor input, Tensor weight, Tensor? bias=None, *, str activation) -> Tensor",
    tags=TAGS,
)
# The gradient of a tensor that requires none has size 0. A tensor that no gradient needs is not
# saved.
library.define(
    "foo::linear_backward",
    "(Tensor grad_output, Tensor? input, Tensor? weight, *, bool input_requires_grad=True, "
    "bool weight_requires_grad=True, bool bias_requires_grad=False) "
    "-> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
    tags=TAGS,
)


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None
) -> Tensor:
    """Compute ``input @ weight.T + bias``, as `torch.nn.functional.linear` does.

    Args:
        input: (..., K), float16, bfloat16, float32 or float64, any strides.
        weight: (N, K), of input's dtype, any strides.
        bias: (N,), of input's dtype.
        activation: None, ``relu``, ``silu``, ``gelu`` or ``gelu_tanh``, as in
            `torch.nn.functional`, applied to the sums while they are in the caches. If gradients
            are recorded, it is a second step, which saves its input for them.

    Returns:
        A contiguous tensor (..., N) of input's dtype. float16 and bfloat16 are summed up in
        float32 and rounded once, bias and activation included. The result does not depend on the
        number of threads. Has gradients for all tensors, of every order.

    Raises:
        ValueError: for shapes that do not fit together, and other activations.
        TypeError: for dtypes.

    Example:
        >>> foo_ops.linear(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        tensor([[11.,  2.]])
    """
    if activation is None:
        return torch.ops.foo.linear.default(input, weight, bias)
    if are_recorded(input, weight, bias):
        input, weight, bias = cast_as_autocast(input, weight, bias)
        return composite_activation(input, weight, bias, activation=activation)
    return torch.ops.foo.linear_activation.default(input, weight, bias, activation=activation)


# ------------------------------------------------------------------------------------------- fake


@library.register_fake("foo::linear")
def fake(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    _C.check_linear(input, weight, bias)
    return input.new_empty(*input.shape[:-1], weight.shape[0])


@library.register_fake("foo::linear_activation")
def fake_activation(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str
) -> Tensor:
    _C.check_linear_activation(input, weight, bias, activation)
    return input.new_empty(*input.shape[:-1], weight.shape[0])


@library.register_fake("foo::linear_backward")
def fake_backward(
    grad_output: Tensor,
    input: Tensor | None,
    weight: Tensor | None,
    *,
    input_requires_grad: bool = True,
    weight_requires_grad: bool = True,
    bias_requires_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    _C.check_linear_backward(grad_output, input, weight, input_requires_grad, weight_requires_grad)
    grad_input = grad_weight = grad_bias = grad_output.new_empty(0)
    *leading, rows = grad_output.shape
    if input_requires_grad and weight is not None:
        grad_input = grad_output.new_empty(*leading, weight.shape[1])
    if weight_requires_grad and input is not None:
        grad_weight = grad_output.new_empty(rows, input.shape[-1])
    if bias_requires_grad:
        grad_bias = grad_output.new_empty(rows)
    return grad_input, grad_weight, grad_bias


# --------------------------------------------------------------------------------------- autograd


def composite_backward(
    grad_output: Tensor,
    input: Tensor | None,
    weight: Tensor | None,
    *,
    input_requires_grad: bool = True,
    weight_requires_grad: bool = True,
    bias_requires_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute foo::linear_backward with torch's own operators, for second derivatives."""
    grad_input = grad_weight = grad_bias = grad_output.new_empty(0)
    if input_requires_grad and weight is not None:
        grad_input = grad_output @ weight
    if weight_requires_grad and input is not None:
        grad_weight = torch.einsum("...n,...k->nk", grad_output, input)
    if bias_requires_grad:
        grad_bias = torch.einsum("...n->n", grad_output)
    return grad_input, grad_weight, grad_bias


def are_recorded(*inputs: Tensor | None) -> bool:
    """Whether gradients of an operator's inputs are recorded.

    Two steps then replace a fused operator: they save the product, which its gradients would have
    to compute again, up to a third of the work of the backward pass. The operator cannot take two
    steps itself: it promises one rounding in half precision, with gradients and without. A graph
    that torch.compile traces keeps the fused operator, since the composite's checks are in C++.
    """
    return not torch.compiler.is_compiling() and any_requires_grad(*inputs)


def any_requires_grad(*inputs: Tensor | None) -> bool:
    """Whether an operator's results will require gradients, if it has derivatives."""
    return torch.is_grad_enabled() and any(it is not None and it.requires_grad for it in inputs)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def composite_activation(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str
) -> Tensor:
    _C.check_linear_activation(input, weight, bias, activation)
    return ACTIVATIONS[activation](linear(input, weight, bias))


library.register_autograd("foo::linear_activation", composite=composite_activation)
library.register_autograd("foo::linear", "foo::linear_backward", composite=F.linear)
library.register_autograd("foo::linear_backward", composite=composite_backward)


# ---------------------------------------------------------------- sharding, vmap, autocast, FLOPs


@library.register_sharding("foo::linear")
def sharding(input: Any, weight: Any, bias: Any = None) -> str:
    # Sharded along k, each process would add the bias.
    return "... k, n k, . -> ... n" if bias is None else "... ., n ., n -> ... n"


@library.register_sharding("foo::linear_activation")
def activation_sharding(input: Any, weight: Any, bias: Any = None, **_: Any) -> str:
    return f"... ., n ., {'.' if bias is None else 'n'} -> ... n"


@library.register_sharding("foo::linear_backward")
def backward_sharding(*inputs: Any, bias_requires_grad: bool = False, **_: Any) -> str:
    # Sharded along k, each process would compute all of the bias's gradient.
    k = "." if bias_requires_grad else "k"
    return f"... n, ... {k}, n {k} -> ... {k}, n {k}, n"


for _name in ("foo::linear", "foo::linear_activation"):
    library.register_vmap_rows(_name, "input")
    library.register_nested_rows(_name, "input")
    library.register_autocast(_name)
library.register_vmap_loop("foo::linear_backward")


def product_flops(rows_shape: torch.Size, columns: int) -> int:
    return 2 * torch.Size(rows_shape).numel() * columns


@library.register_flops("foo::linear")
@library.register_flops("foo::linear_activation")
def flops(input_shape: torch.Size, weight_shape: torch.Size, *bias: Any, **_: Any) -> int:
    """Count one matrix product, without the bias, as torch does."""
    return product_flops(input_shape, weight_shape[0])


@library.register_flops("foo::linear_backward")
def backward_flops(
    grad_output_shape: torch.Size,
    input_shape: torch.Size | None,
    weight_shape: torch.Size | None,
    *,
    input_requires_grad: bool = True,
    weight_requires_grad: bool = True,
    **_: Any,
) -> int:
    """Count a product for each gradient of a matrix."""
    total = 0
    if input_requires_grad and weight_shape is not None:
        total += product_flops(grad_output_shape, weight_shape[1])
    if weight_requires_grad and input_shape is not None:
        total += product_flops(grad_output_shape, input_shape[-1])
    return total


# ----------------------------------------------------------------------------- foo::linear_silu_mul


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
        return composite_silu_mul(*cast_as_autocast(input, gate_weight, up_weight))
    return torch.ops.foo.linear_silu_mul.default(input, gate_weight, up_weight)


@library.register_fake("foo::linear_silu_mul")
def fake_silu_mul(input: Tensor, gate_weight: Tensor, up_weight: Tensor) -> Tensor:
    _C.check_linear_silu_mul(input, gate_weight, up_weight)
    return input.new_empty(*input.shape[:-1], gate_weight.shape[0])


def composite_silu_mul(input: Tensor, gate_weight: Tensor, up_weight: Tensor) -> Tensor:
    _C.check_linear_silu_mul(input, gate_weight, up_weight)
    return silu_mul(linear(input, gate_weight), linear(input, up_weight))


library.register_autograd("foo::linear_silu_mul", composite=composite_silu_mul)
library.register_vmap_rows("foo::linear_silu_mul", "input")
library.register_nested_rows("foo::linear_silu_mul", "input")
library.register_autocast("foo::linear_silu_mul")


@library.register_sharding("foo::linear_silu_mul")
def silu_mul_sharding(input: Any, gate_weight: Any, up_weight: Any) -> str:
    return "... ., n ., n . -> ... n"


@library.register_flops("foo::linear_silu_mul")
def silu_mul_flops(
    input_shape: torch.Size, gate_shape: torch.Size, up_shape: torch.Size, **_: Any
) -> int:
    """Count two matrix products."""
    return 2 * product_flops(input_shape, gate_shape[0])
