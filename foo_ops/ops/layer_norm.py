"""foo::layer_norm and foo::add_layer_norm normalise rows to mean 0 and variance 1.

    output = (input - mean(input)) / sqrt(var(input) + eps) * weight + bias

(Ba, Kiros and Hinton 2016, equation 4), and the same for a sum, as behind the blocks of encoders.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
from foo_ops.ops.rms_norm import add_up_parts, count_parts

TAGS = torch.Tag.pt2_compliant_tag
library.define(
    "foo::layer_norm",
    "(Tensor input, Tensor? weight=None, Tensor? bias=None, *, float eps=1e-5) -> Tensor",
    tags=TAGS,
)
library.define(
    "foo::add_layer_norm",
    "(Tensor input, Tensor residual, Tensor? weight=None, Tensor? bias=None, *, float eps=1e-5) "
    "-> (Tensor output, Tensor sum)",
    tags=TAGS,
)
library.define(
    "foo::layer_norm_backward",
    "(Tensor grad_output, Tensor input, Tensor? weight, Tensor? bias, *, float eps) "
    "-> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
    tags=TAGS,
)
library.define(
    "foo::add_layer_norm_backward",
    "(Tensor grad_output, Tensor grad_sum, Tensor sum, Tensor? weight, Tensor? bias, *, float eps) "
    "-> (Tensor grad_input_and_residual, Tensor grad_weight, Tensor grad_bias)",
    tags=TAGS,
)


def layer_norm(
    input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """Subtract each row's mean, divide by its standard deviation, and apply weight and bias.

    Args:
        input: (..., D), floating-point, any strides. float16 and bfloat16 are computed in float32
            and rounded once.
        weight: (D,), floating-point; also float32 beside input in half precision.
        bias: (D,), floating-point, as for weight.
        eps: added to the variance.

    Returns:
        A contiguous tensor of input's shape and dtype; under autocast on foo, float32, as
        `torch.nn.functional.layer_norm` returns. Has gradients for input, weight and bias.

    Raises:
        ValueError, TypeError: for shapes and dtypes that do not fit.

    Example:
        >>> foo_ops.layer_norm(torch.tensor([[1.0, 5.0]]), torch.tensor([1.0, 2.0]))
        tensor([[-1.0000,  2.0000]])
    """
    return torch.ops.foo.layer_norm.default(input, weight, bias, eps=eps)


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Return ``layer_norm(input + residual)`` and the sum, which is read and written once.

    Args:
        input: as for `layer_norm`.
        residual: of input's shape and dtype.
        weight, bias, eps: as for `layer_norm`.

    Returns:
        The norm and the sum, both in input's shape and dtype. Has gradients for all tensors.

    Raises:
        ValueError, TypeError: for shapes and dtypes that do not fit.

    Example:
        >>> foo_ops.add_layer_norm(torch.tensor([[1.0, 4.0]]), torch.tensor([[0.0, 1.0]]))
        (tensor([[-1.0000,  1.0000]]), tensor([[1., 5.]]))
    """
    return torch.ops.foo.add_layer_norm.default(input, residual, weight, bias, eps=eps)


# ---------------------------------------------------------------------------------------- kernels


def moments_in(x: Any, size: Any, zero: Any) -> Any:
    """Return a row's mean, the mean of the rest after subtracting it, and the variance.

    The rest is the rounding error of the mean of numbers far from 0. Sums have the type of
    ``zero``.
    """
    total, squares, rest = zero, zero, zero
    for i in range(size):
        total = language.accumulate(total, language.cast(x[i], zero))
    mean = language.cast(total / size, x)
    first = language.cast(mean, zero)
    for i in range(size):
        centred = language.cast(x[i], zero) - first
        squares = language.accumulate(squares, centred * centred)
        rest = language.accumulate(rest, centred)
    shift = rest / size
    variance = squares / size - shift * shift
    # A constant row's may be less than 0 by a rounding.
    return mean, language.cast(shift, x), 0.0 if variance < 0.0 else variance


def statistics_of(x: Any, size: Any, eps: Any) -> Any:
    """Return mean, its rounding error, and 1 / sqrt(var + eps)."""
    mean, rest, variance = moments_in(x, size, language.zero(x))
    if not math.isfinite(variance):
        # The squares of numbers beyond 1e19 overflow in float32.
        mean, rest, variance = moments_in(x, size, 0.0)
    return mean, rest, language.cast(1.0 / math.sqrt(variance + eps), x)


def write_normalised(x: Any, size: Any, weight: Any, bias: Any, eps: Any, y: Any) -> None:
    mean, rest, scale = statistics_of(x, size, eps)
    for i in range(size):
        value = (x[i] - mean - rest) * scale
        if weight is not None:
            value = value * weight[i]
        if bias is not None:
            value = value + bias[i]
        y[i] = value


@library.tile_kernel(contiguous_rows=True)
def forward_kernel(input: Any, weight: Any, bias: Any, eps: Any, output: Any, rows: Any) -> None:
    for row in rows:
        write_normalised(
            input.row(row), input.shape[-1], weight, bias, eps, output.row(row)
        )  # fmt: skip


@library.tile_kernel(contiguous_rows=True)
def add_kernel(
    input: Any, residual: Any, weight: Any, bias: Any, eps: Any, output: Any, sum: Any, rows: Any
) -> None:
    size = input.shape[-1]
    for row in rows:
        x, r, s = input.row(row), residual.row(row), sum.row(row)
        for i in range(size):
            s[i] = x[i] + r[i]
        # The rounded sum is normalised.
        write_normalised(s, size, weight, bias, eps, output.row(row))


def sums_for(size: Callable[..., int]) -> Any:
    return library.scratch(count_parts, size, like="grad_output", per_call=True)


SUMS = {
    "weight_sums": sums_for(lambda grad_weight: grad_weight.size),
    "bias_sums": sums_for(lambda grad_bias: grad_bias.size),
}


def add_up_both(grad_weight: Any, grad_bias: Any, weight_sums: Any, bias_sums: Any) -> None:
    add_up_parts(grad_weight, weight_sums)
    add_up_parts(grad_bias, bias_sums)


def differentiate_rows(
    grad_output: Any, input: Any, weight: Any, bias: Any, grad_sum: Any, eps: Any,
    grad_input: Any, weight_sums: Any, bias_sums: Any, parts: Any,
) -> None:  # fmt: skip
    """Differentiate rows, with s = 1 / sqrt(var + eps), n = (x - mean) * s, g = grad * weight.

    grad_input = s * (g - mean(g) - n * mean(g * n)) + grad_sum.
    """
    size, count = input.shape[-1], weight_sums.shape[0]
    for part in parts:
        of_weight, of_bias = weight_sums.row(part), bias_sums.row(part)
        for i in range(weight_sums.shape[1]):
            of_weight[i] = 0.0
        for i in range(bias_sums.shape[1]):
            of_bias[i] = 0.0
        for row in range(part * input.rows // count, (part + 1) * input.rows // count):
            g, x, target = grad_output.row(row), input.row(row), grad_input.row(row)
            mean, rest, scale = statistics_of(x, size, eps)
            total, product = language.zero(input), language.zero(input)
            for i in range(size):
                weighted = g[i]
                if weight is not None:
                    weighted = language.cast(weighted * weight[i], input)
                total = language.accumulate(total, weighted)
                # The scale is applied here, since the centred numbers may be huge.
                product = language.accumulate(product, weighted * ((x[i] - mean - rest) * scale))
            offset = language.cast(total / size, input)
            slope = language.cast(product / size, input)
            added = x
            if grad_sum is not None:
                added = grad_sum.row(row)
            for i in range(size):
                weighted, normalised = g[i], (x[i] - mean - rest) * scale
                if weight is not None:
                    weighted = language.cast(weighted * weight[i], input)
                    of_weight[i] = of_weight[i] + g[i] * normalised
                if bias is not None:
                    of_bias[i] = of_bias[i] + g[i]
                value = scale * (weighted - offset - normalised * slope)
                if grad_sum is not None:
                    value = value + added[i]
                target[i] = value


@library.tile_kernel(tiles=count_parts, scratch=SUMS, finish=add_up_both, contiguous_rows=True)
def backward_kernel(
    grad_output: Any, input: Any, weight: Any, bias: Any, eps: Any,
    grad_input: Any, grad_weight: Any, grad_bias: Any,
    weight_sums: Any, bias_sums: Any, parts: Any,
) -> None:  # fmt: skip
    differentiate_rows(
        grad_output, input, weight, bias, None, eps, grad_input, weight_sums, bias_sums, parts
    )


@library.tile_kernel(tiles=count_parts, scratch=SUMS, finish=add_up_both, contiguous_rows=True)
def add_backward_kernel(
    grad_output: Any, grad_sum: Any, sum: Any, weight: Any, bias: Any, eps: Any,
    grad_input: Any, grad_weight: Any, grad_bias: Any,
    weight_sums: Any, bias_sums: Any, parts: Any,
) -> None:  # fmt: skip
    differentiate_rows(
        grad_output, sum, weight, bias, grad_sum, eps, grad_input, weight_sums, bias_sums, parts
    )


# ------------------------------------------------------------------------------------------- fake


def check(operator: str, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    require_floating(operator, input=input, weight=weight, bias=bias)
    require_rows(operator, input=input)
    for name, given in (("weight", weight), ("bias", bias)):
        if given is not None:
            require_shape(operator, name, given, input.shape[-1:], "as input's rows have")


@library.register_fake("foo::layer_norm")
def fake_layer_norm(
    input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    require_device("layer_norm", input=input, weight=weight, bias=bias)
    check("layer_norm", input, weight, bias)
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@library.register_fake("foo::add_layer_norm")
def fake_add_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    operator = "add_layer_norm"
    require_device(operator, input=input, residual=residual, weight=weight, bias=bias)
    check(operator, input, weight, bias)
    require_like(operator, "residual", residual, "input", input)
    output = torch.empty_like(input, memory_format=torch.contiguous_format)
    return output, torch.empty_like(output)


@library.register_fake("foo::layer_norm_backward")
def fake_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    operator = "layer_norm_backward"
    require_device(operator, grad_output=grad_output, input=input, weight=weight, bias=bias)
    check(operator, input, weight, bias)
    require_like(operator, "grad_output", grad_output, "input", input)
    return empty_gradients(input, weight, bias)


@library.register_fake("foo::add_layer_norm_backward")
def fake_add_backward(
    grad_output: Tensor,
    grad_sum: Tensor,
    sum: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    operator = "add_layer_norm_backward"
    require_device(
        operator, grad_output=grad_output, grad_sum=grad_sum, sum=sum, weight=weight, bias=bias
    )
    check(operator, sum, weight, bias)
    require_like(operator, "grad_output", grad_output, "sum", sum)
    require_like(operator, "grad_sum", grad_sum, "sum", sum)
    return empty_gradients(sum, weight, bias)


def empty_gradients(
    input: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    grad_input = torch.empty_like(input, memory_format=torch.contiguous_format)
    grad_weight, grad_bias = (
        input.new_empty(0) if given is None else given.new_empty(given.shape)
        for given in (weight, bias)
    )
    return grad_input, grad_weight, grad_bias


for name, kernel in (
    ("foo::layer_norm", forward_kernel),
    ("foo::add_layer_norm", add_kernel),
    ("foo::layer_norm_backward", backward_kernel),
    ("foo::add_layer_norm_backward", add_backward_kernel),
):
    library.register_kernel(name, ("cpu", "foo"), kernel)


# --------------------------------------------------------------------------------------- autograd


def normalised_and_scale(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    centred = x - x.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return centred * scale, scale


def composite(
    input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """Compute foo::layer_norm with torch's own operators."""
    x = input.to(compute_type(input.dtype))
    output, _ = normalised_and_scale(x, eps)
    if weight is not None:
        output = output * weight.to(x.dtype)
    if bias is not None:
        output = output + bias.to(x.dtype)
    return output.to(input.dtype)


def add_composite(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    sum = input + residual
    return composite(sum, weight, bias, eps=eps), sum.clone()


def composite_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute foo::layer_norm_backward with torch's own operators, for second derivatives."""
    compute = compute_type(input.dtype)
    grad = grad_output.to(compute)
    normalised, scale = normalised_and_scale(input.to(compute), eps)
    weighted = grad if weight is None else grad * weight.to(compute)
    slope = (weighted * normalised).mean(-1, keepdim=True)
    grad_input = scale * (weighted - weighted.mean(-1, keepdim=True) - normalised * slope)
    grad_weight, grad_bias = (
        input.new_empty(0) if given is None else terms.flatten(0, -2).sum(0).to(given.dtype)
        for given, terms in ((weight, grad * normalised), (bias, grad))
    )
    return grad_input.to(input.dtype), grad_weight, grad_bias


def add_composite_backward(
    grad_output: Tensor,
    grad_sum: Tensor,
    sum: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_input, grad_weight, grad_bias = composite_backward(grad_output, sum, weight, bias, eps=eps)
    return grad_input + grad_sum, grad_weight, grad_bias


library.register_autograd("foo::layer_norm", "foo::layer_norm_backward", composite=composite)
library.register_autograd(
    "foo::add_layer_norm", "foo::add_layer_norm_backward", composite=add_composite
)
library.register_autograd("foo::layer_norm_backward", composite=composite_backward)
library.register_autograd("foo::add_layer_norm_backward", composite=add_composite_backward)


# -------------------------------------------------------------- vmap, autocast, sharding, FLOPs

library.register_vmap_rows("foo::layer_norm", "input")
library.register_vmap_rows("foo::add_layer_norm", "input", "residual")
library.register_nested_rows("foo::layer_norm", "input")
library.register_nested_rows("foo::add_layer_norm", "input", "residual")

# As aten::layer_norm, which autocast computes in float32 on accelerators and leaves as it is on
# CPUs.
library.register_autocast("foo::layer_norm", "foo", torch.float32)

# The sources of the forward kernels show that they work by rows. Each process sums the gradients of
# weight and bias over its own rows, in parts of its own.
library.register_sharding("foo::layer_norm_backward", "... ., ... ., ., . -> ... ., ., .")
library.register_sharding(
    "foo::add_layer_norm_backward", "... ., ... ., ... ., ., . -> ... ., ., ."
)


@library.register_flops("foo::layer_norm", takes_tensors=True)
def flops(input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, **_: Any) -> int:
    """Count the operations for each element, without those for each row: two sums over the row."""
    return (6 + (weight is not None) + (bias is not None)) * input.numel()


@library.register_flops("foo::add_layer_norm", takes_tensors=True)
def add_flops(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    **_: Any,
) -> int:
    return flops(input, weight, bias) + input.numel()


@library.register_flops("foo::layer_norm_backward", takes_tensors=True)
def backward_flops(
    grad_output: Tensor, input: Tensor, weight: Tensor | None, bias: Tensor | None, **_: Any
) -> int:
    """Count four sums over the row, and the gradients."""
    return (13 + 3 * (weight is not None) + (bias is not None)) * input.numel()


@library.register_flops("foo::add_layer_norm_backward", takes_tensors=True)
def add_backward_flops(
    grad_output: Tensor,
    grad_sum: Tensor,
    sum: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    **_: Any,
) -> int:
    return backward_flops(grad_output, sum, weight, bias) + sum.numel()
