"""foo::rms_norm and foo::add_rms_norm divide rows by their root mean square.

    output = input / sqrt(mean(input^2) + eps) * weight

(Zhang and Sennrich 2019, equation 4), and the same for a sum, as between the layers of a model.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from foo_ops import language, library
from foo_ops.ops.arguments import (
    compute_type,
    require_device,
    require_floating,
    require_like,
    require_rows,
    require_shape,
)

TAGS = torch.Tag.pt2_compliant_tag
library.define(
    "foo::rms_norm", "(Tensor input, Tensor? weight=None, *, float eps=1e-6) -> Tensor", tags=TAGS
)
library.define(
    "foo::add_rms_norm",
    "(Tensor input, Tensor residual, Tensor? weight=None, *, float eps=1e-6) "
    "-> (Tensor output, Tensor sum)",
    tags=TAGS,
)
library.define(
    "foo::rms_norm_backward",
    "(Tensor grad_output, Tensor input, Tensor? weight, *, float eps) "
    "-> (Tensor grad_input, Tensor grad_weight)",
    tags=TAGS,
)
library.define(
    "foo::add_rms_norm_backward",
    "(Tensor grad_output, Tensor grad_sum, Tensor sum, Tensor? weight, *, float eps) "
    "-> (Tensor grad_input_and_residual, Tensor grad_weight)",
    tags=TAGS,
)
# The gradient of the weight is summed over parts of the rows, which are added at the end, so that
# it is equal for any number of threads.
MOST_PARTS = 64


def rms_norm(input: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6) -> Tensor:
    """Divide each row by its root mean square, and multiply by a weight.

    Args:
        input: (..., D), floating-point, any strides. float16 and bfloat16 are computed in float32
            and rounded once.
        weight: (D,), floating-point; also float32 beside input in half precision.
        eps: added to the mean of the squares.

    Returns:
        A contiguous tensor of input's shape and dtype. Has gradients for input and weight.

    Raises:
        ValueError, TypeError: for shapes and dtypes that do not fit.

    Example:
        >>> foo_ops.rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]))
        tensor([[0.8485, 2.2627]])
    """
    return torch.ops.foo.rms_norm.default(input, weight, eps=eps)


def add_rms_norm(
    input: Tensor, residual: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Return ``rms_norm(input + residual)`` and the sum, which is read and written once.

    Args:
        input: as for `rms_norm`.
        residual: of input's shape and dtype.
        weight, eps: as for `rms_norm`.

    Returns:
        The norm and the sum, both in input's shape and dtype. Has gradients for all tensors.

    Raises:
        ValueError, TypeError: for shapes and dtypes that do not fit.

    Example:
        >>> foo_ops.add_rms_norm(torch.tensor([[1.0, 4.0]]), torch.tensor([[2.0, 0.0]]))
        (tensor([[0.8485, 1.1314]]), tensor([[3., 4.]]))
    """
    return torch.ops.foo.add_rms_norm.default(input, residual, weight, eps=eps)


# ---------------------------------------------------------------------------------------- kernels


def write_normalised(x: Any, squares: Any, size: Any, weight: Any, eps: Any, y: Any) -> None:
    """Write a row over its root mean square, from the sum of its squares."""
    scale = language.cast(1.0 / math.sqrt(squares / size + eps), squares)
    for i in range(size):
        value = x[i] * scale
        if weight is not None:
            value = value * weight[i]
        y[i] = value


@library.tile_kernel(contiguous_rows=True)
def forward_kernel(input: Any, weight: Any, eps: Any, output: Any, rows: Any) -> None:
    size = input.shape[-1]
    for row in rows:
        x, y = input.row(row), output.row(row)
        total = language.zero(input)
        for i in range(size):
            total = language.accumulate(total, x[i] * x[i])
        write_normalised(x, total, size, weight, eps, y)


@library.tile_kernel(contiguous_rows=True)
def add_kernel(
    input: Any, residual: Any, weight: Any, eps: Any, output: Any, sum: Any, rows: Any
) -> None:
    size = input.shape[-1]
    for row in rows:
        x, r, s, y = input.row(row), residual.row(row), sum.row(row), output.row(row)
        total = language.zero(input)
        for i in range(size):
            s[i] = x[i] + r[i]
            # The rounded sum is normalised.
            total = language.accumulate(total, s[i] * s[i])
        write_normalised(s, total, size, weight, eps, y)


def count_parts(grad_output: Any) -> int:
    return min(grad_output.rows, MOST_PARTS)


SUMS = library.scratch(
    count_parts, lambda grad_weight: grad_weight.size, like="grad_output", per_call=True
)


def add_up_parts(grad_weight: Any, sums_of_parts: Any) -> None:
    if grad_weight.size == 0:
        return
    for i in range(grad_weight.size):
        grad_weight[i] = 0.0
    if sums_of_parts.shape[0] > 0:
        total = sums_of_parts.row(0)
        for part in range(1, sums_of_parts.shape[0]):
            sums = sums_of_parts.row(part)
            for i in range(grad_weight.size):
                total[i] = total[i] + sums[i]
        for i in range(grad_weight.size):
            grad_weight[i] = total[i]


def differentiate_rows(
    grad_output: Any, input: Any, weight: Any, grad_sum: Any, eps: Any,
    grad_input: Any, sums_of_parts: Any, parts: Any,
) -> None:  # fmt: skip
    """Differentiate rows, with r = 1 / sqrt(mean(x^2) + eps) and g = grad_output * weight.

    grad_input = r * g - x * r^3 * mean(g * x) + grad_sum.
    """
    size, count = input.shape[-1], sums_of_parts.shape[0]
    for part in parts:
        sums = sums_of_parts.row(part)
        for i in range(sums_of_parts.shape[1]):
            sums[i] = 0.0
        for row in range(part * input.rows // count, (part + 1) * input.rows // count):
            g, x, target = grad_output.row(row), input.row(row), grad_input.row(row)
            squares, product = language.zero(input), language.zero(input)
            for i in range(size):
                squares = language.accumulate(squares, x[i] * x[i])
                weighted = g[i]
                if weight is not None:
                    weighted = weighted * weight[i]
                product = language.accumulate(product, weighted * x[i])
            added = x
            if grad_sum is not None:
                added = grad_sum.row(row)
            inverse = 1.0 / math.sqrt(squares / size + eps)
            scale = language.cast(inverse, input)
            slope = language.cast(inverse * inverse * inverse * product / size, input)
            for i in range(size):
                weighted = g[i]
                if weight is not None:
                    weighted = weighted * weight[i]
                    sums[i] = sums[i] + g[i] * x[i] * scale
                value = scale * weighted - x[i] * slope
                if grad_sum is not None:
                    value = value + added[i]
                target[i] = value


@library.tile_kernel(
    tiles=count_parts,
    scratch={"sums_of_parts": SUMS},
    finish=add_up_parts,
    contiguous_rows=True,
)
def backward_kernel(
    grad_output: Any,
    input: Any,
    weight: Any,
    eps: Any,
    grad_input: Any,
    grad_weight: Any,
    sums_of_parts: Any,
    parts: Any,
) -> None:
    differentiate_rows(grad_output, input, weight, None, eps, grad_input, sums_of_parts, parts)


@library.tile_kernel(
    tiles=count_parts,
    scratch={"sums_of_parts": SUMS},
    finish=add_up_parts,
    contiguous_rows=True,
)
def add_backward_kernel(
    grad_output: Any,
    grad_sum: Any,
    sum: Any,
    weight: Any,
    eps: Any,
    grad_input: Any,
    grad_weight: Any,
    sums_of_parts: Any,
    parts: Any,
) -> None:
    differentiate_rows(grad_output, sum, weight, grad_sum, eps, grad_input, sums_of_parts, parts)


# ------------------------------------------------------------------------------------------- fake


def check(operator: str, input: Tensor, weight: Tensor | None) -> None:
    require_floating(operator, input=input, weight=weight)
    require_rows(operator, input=input)
    if weight is not None:
        require_shape(operator, "weight", weight, input.shape[-1:], "as input's rows have")


@library.register_fake("foo::rms_norm")
def fake_rms_norm(input: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6) -> Tensor:
    require_device("rms_norm", input=input, weight=weight)
    check("rms_norm", input, weight)
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@library.register_fake("foo::add_rms_norm")
def fake_add_rms_norm(
    input: Tensor, residual: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    require_device("add_rms_norm", input=input, residual=residual, weight=weight)
    check("add_rms_norm", input, weight)
    require_like("add_rms_norm", "residual", residual, "input", input)
    output = torch.empty_like(input, memory_format=torch.contiguous_format)
    return output, torch.empty_like(output)


@library.register_fake("foo::rms_norm_backward")
def fake_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor]:
    operator = "rms_norm_backward"
    require_device(operator, grad_output=grad_output, input=input, weight=weight)
    check(operator, input, weight)
    require_like(operator, "grad_output", grad_output, "input", input)
    return empty_gradients(input, weight)


@library.register_fake("foo::add_rms_norm_backward")
def fake_add_backward(
    grad_output: Tensor, grad_sum: Tensor, sum: Tensor, weight: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor]:
    operator = "add_rms_norm_backward"
    require_device(operator, grad_output=grad_output, grad_sum=grad_sum, sum=sum, weight=weight)
    check(operator, sum, weight)
    require_like(operator, "grad_output", grad_output, "sum", sum)
    require_like(operator, "grad_sum", grad_sum, "sum", sum)
    return empty_gradients(sum, weight)


def empty_gradients(input: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    grad_input = torch.empty_like(input, memory_format=torch.contiguous_format)
    grad_weight = input.new_empty(0) if weight is None else weight.new_empty(weight.shape)
    return grad_input, grad_weight


for name, kernel in (
    ("foo::rms_norm", forward_kernel),
    ("foo::add_rms_norm", add_kernel),
    ("foo::rms_norm_backward", backward_kernel),
    ("foo::add_rms_norm_backward", add_backward_kernel),
):
    library.register_kernel(name, ("cpu", "foo"), kernel)


# --------------------------------------------------------------------------------------- autograd


def scale_of(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def composite(input: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6) -> Tensor:
    """Compute foo::rms_norm with torch's own operators."""
    x = input.to(compute_type(input.dtype))
    normalised = x * scale_of(x, eps)
    if weight is not None:
        normalised = normalised * weight.to(x.dtype)
    return normalised.to(input.dtype)


def add_composite(
    input: Tensor, residual: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    sum = input + residual
    return composite(sum, weight, eps=eps), sum.clone()


def composite_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute foo::rms_norm_backward with torch's own operators, for second derivatives."""
    compute = compute_type(input.dtype)
    grad, x = grad_output.to(compute), input.to(compute)
    scale = scale_of(x, eps)
    weighted = grad if weight is None else grad * weight.to(compute)
    grad_input = scale * weighted - x * scale**3 * (weighted * x).mean(-1, keepdim=True)
    if weight is None:
        return grad_input.to(input.dtype), input.new_empty(0)
    sums = (grad * x * scale).flatten(0, -2)
    return grad_input.to(input.dtype), sums.sum(0).to(weight.dtype)


def add_composite_backward(
    grad_output: Tensor, grad_sum: Tensor, sum: Tensor, weight: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor]:
    grad_input, grad_weight = composite_backward(grad_output, sum, weight, eps=eps)
    return grad_input + grad_sum, grad_weight


library.register_autograd("foo::rms_norm", "foo::rms_norm_backward", composite=composite)
library.register_autograd(
    "foo::add_rms_norm", "foo::add_rms_norm_backward", composite=add_composite
)
library.register_autograd("foo::rms_norm_backward", composite=composite_backward)
library.register_autograd("foo::add_rms_norm_backward", composite=add_composite_backward)


# --------------------------------------------------------------------------- vmap, sharding, FLOPs

library.register_vmap_rows("foo::rms_norm", "input")
library.register_vmap_rows("foo::add_rms_norm", "input", "residual")
library.register_nested_rows("foo::rms_norm", "input")
library.register_nested_rows("foo::add_rms_norm", "input", "residual")

# The sources of the forward kernels show that they work by rows. Each process sums the gradient of
# the weight over its own rows, in parts of its own.
library.register_sharding("foo::rms_norm_backward", "... ., ... ., . -> ... ., .")
library.register_sharding("foo::add_rms_norm_backward", "... ., ... ., ... ., . -> ... ., .")


@library.register_flops("foo::rms_norm", takes_tensors=True)
def flops(input: Tensor, weight: Tensor | None = None, **_: Any) -> int:
    """Count the operations for each element, without those for each row."""
    return (3 if weight is None else 4) * input.numel()


@library.register_flops("foo::add_rms_norm", takes_tensors=True)
def add_flops(input: Tensor, residual: Tensor, weight: Tensor | None = None, **_: Any) -> int:
    return flops(input, weight) + input.numel()


@library.register_flops("foo::rms_norm_backward", takes_tensors=True)
def backward_flops(grad_output: Tensor, input: Tensor, weight: Tensor | None, **_: Any) -> int:
    """Count two sums over the row, and the gradient; with a weight, its gradient, too."""
    return (7 if weight is None else 12) * input.numel()


@library.register_flops("foo::add_rms_norm_backward", takes_tensors=True)
def add_backward_flops(
    grad_output: Tensor, grad_sum: Tensor, sum: Tensor, weight: Tensor | None, **_: Any
) -> int:
    return backward_flops(grad_output, sum, weight) + sum.numel()
