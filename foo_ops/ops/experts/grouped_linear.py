"""foo::grouped_linear multiplies groups of rows, each by a matrix of weights of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foo_ops import _C, library
from foo_ops.ops.arguments import compute_type
from foo_ops.ops.linear import product_flops

TAGS = torch.Tag.pt2_compliant_tag
library.define(
    "foo::grouped_linear",
    "(Tensor input, Tensor weight, Tensor offsets, Tensor? bias=None) -> Tensor",
    tags=TAGS,
)
# The gradient of a tensor that requires none has size 0.
library.define(
    "foo::grouped_linear_backward",
    "(Tensor grad_output, Tensor input, Tensor weight, Tensor offsets, *, "
    "bool input_requires_grad=True, bool weight_requires_grad=True, "
    "bool bias_requires_grad=False) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
    tags=TAGS,
)


def grouped_linear(
    input: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Compute ``input[i] @ weight[g].T + bias[g]`` for each row i of each group g.

    All groups are computed in one parallel loop, as the experts of a mixture are. Group g has the
    rows from offsets[g - 1] (0 for the first) to offsets[g] - 1, as in
    `torch.nn.functional.grouped_mm`.

    Args:
        input: (S, K), float16, bfloat16, float32 or float64, any strides.
        weight: (E, N, K), of input's dtype, any strides.
        offsets: (E,), int32 or int64, the ends of the groups, which do not decrease and are at
            most S.
        bias: (E, N), of input's dtype.

    Returns:
        A contiguous tensor (S, N) of input's dtype; rows behind the last group are zeros. float16
        and bfloat16 are summed up in float32 and rounded once. The result does not depend on the
        number of threads. Has gradients for input, weight and bias, of every order; groups without
        rows have zeros.

    Raises:
        ValueError: for shapes that do not fit together, and offsets out of range.
        TypeError: for dtypes.

    Example:
        >>> input, weight = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[[1.0]], [[10.0]]])
        >>> foo_ops.grouped_linear(input, weight, torch.tensor([1, 3]))
        tensor([[ 1.],
                [20.],
                [30.]])
    """
    return torch.ops.foo.grouped_linear.default(input, weight, offsets, bias)


# ------------------------------------------------------------------------------------------- fake


@library.register_fake("foo::grouped_linear")
def fake(input: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
    _C.check_grouped_linear(input, weight, offsets, bias)
    return input.new_empty(input.shape[0], weight.shape[1])


def empty_gradient(matrices: Tensor) -> Tensor:
    """Make the gradient of matrices (E, N, K), by the rule of the launcher.

    It is contiguous, or transposed where the matrices are, so that autograd accumulates it without
    a copy.
    """
    shape, strides = matrices.shape, matrices.stride()
    groups, rows, columns = shape
    is_transposed = strides[2] != 1 and columns > 1 and (strides[1] == 1 or rows <= 1)
    if is_transposed:
        return matrices.new_empty(groups, columns, rows).transpose(1, 2)
    return matrices.new_empty(shape)


@library.register_fake("foo::grouped_linear_backward")
def fake_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    input_requires_grad: bool = True,
    weight_requires_grad: bool = True,
    bias_requires_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    _C.check_grouped_linear_backward(grad_output, input, weight, offsets)
    none = input.new_empty(0)
    return (
        input.new_empty(input.shape) if input_requires_grad else none,
        empty_gradient(weight) if weight_requires_grad else torch.empty_like(none),
        input.new_empty(weight.shape[:2]) if bias_requires_grad else torch.empty_like(none),
    )


# --------------------------------------------------------------------------------------- autograd


def memberships(input: Tensor, offsets: Tensor) -> Tensor:
    """Return the membership of rows in groups, (E, S): 1 for the group of a row, else 0."""
    rows = torch.arange(input.shape[0], device=input.device)
    starts = torch.cat((torch.zeros_like(offsets[:1]), offsets[:-1]))
    are_members = (rows >= starts.unsqueeze(1)) & (rows < offsets.unsqueeze(1))
    return are_members.to(compute_type(input.dtype))


def composite(input: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute foo::grouped_linear with torch's own operators, each row with each matrix."""
    member, compute = memberships(input, offsets), compute_type(input.dtype)
    output = torch.einsum("es,sk,enk->sn", member, input.to(compute), weight.to(compute))
    if bias is not None:
        output = output + torch.einsum("es,en->sn", member, bias.to(compute))
    return output.to(input.dtype)


def composite_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    input_requires_grad: bool = True,
    weight_requires_grad: bool = True,
    bias_requires_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute foo::grouped_linear_backward with torch's own operators."""
    member, dtype = memberships(input, offsets), input.dtype
    compute = compute_type(dtype)
    grad = grad_output.to(compute)
    grad_input = grad_weight = grad_bias = input.new_empty(0)
    if input_requires_grad:
        grad_input = torch.einsum("es,sn,enk->sk", member, grad, weight.to(compute)).to(dtype)
    if weight_requires_grad:
        grad_weight = torch.einsum("es,sn,sk->enk", member, grad, input.to(compute)).to(dtype)
    if bias_requires_grad:
        grad_bias = torch.einsum("es,sn->en", member, grad).to(dtype)
    return grad_input, grad_weight, grad_bias


library.register_autograd(
    "foo::grouped_linear", "foo::grouped_linear_backward", composite=composite
)
library.register_autograd("foo::grouped_linear_backward", composite=composite_backward)


# ---------------------------------------------------------------- sharding, vmap, autocast, FLOPs


@library.register_sharding("foo::grouped_linear")
def sharding(input: Any, weight: Any, offsets: Any, bias: Any = None) -> str:
    # Sharded along k, each process would add the bias.
    return ". k, . n k, ., . -> . n" if bias is None else ". ., . n ., ., . n -> . n"


@library.register_sharding("foo::grouped_linear_backward")
def backward_sharding(*inputs: Any, bias_requires_grad: bool = False, **_: Any) -> str:
    # Sharded along k, each process would compute all of the bias's gradient.
    k = "." if bias_requires_grad else "k"
    return f". n, . {k}, . n {k}, . -> . {k}, . n {k}, . n"


library.register_vmap_loop("foo::grouped_linear")
library.register_vmap_loop("foo::grouped_linear_backward")
library.register_autocast("foo::grouped_linear")


@library.register_flops("foo::grouped_linear")
def flops(input_shape: torch.Size, weight_shape: torch.Size, *others: Any, **_: Any) -> int:
    """Count the product of all rows, without the bias, as torch counts linear layers."""
    return product_flops(input_shape, weight_shape[1])


@library.register_flops("foo::grouped_linear_backward")
def backward_flops(
    grad_output_shape: torch.Size,
    input_shape: torch.Size,
    weight_shape: torch.Size,
    *others: Any,
    input_requires_grad: bool = True,
    weight_requires_grad: bool = True,
    **_: Any,
) -> int:
    """Count a product for each gradient of a matrix."""
    count = input_requires_grad + weight_requires_grad
    return count * product_flops(grad_output_shape, input_shape[-1])
