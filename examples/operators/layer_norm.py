"""Layer normalisation over the last dimension (Ba, Kiros and Hinton 2016, equation 4).

    output = (input - mean(input)) / sqrt(var(input) + eps) * weight + bias

Shows a kernel over rows, optional tensors, gradients as an operator with its own kernel, results
that are kept for it (the mean and the scale of each row), and a sum over all rows, in scratch
memory, that is equal for any number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foo_ops import language, library
from foo_ops.testing import OpSpec, Sample, random

TAGS = torch.Tag.pt2_compliant_tag
library.define(
    "examples::layer_norm",
    "(Tensor input, Tensor? weight=None, Tensor? bias=None, *, float eps=1e-5) "
    "-> (Tensor output, Tensor mean, Tensor scale)",
    tags=TAGS,
)
library.define(
    "examples::layer_norm_backward",
    "(Tensor grad_output, Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor scale, "
    "*, float eps) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
    tags=TAGS,
)
MOST_PARTS = 64


def layer_norm(
    input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """Normalise the rows of ``input`` (..., D), with ``weight`` and ``bias`` (D,)."""
    return torch.ops.examples.layer_norm(input, weight, bias, eps=eps)[0]


# ---------------------------------------------------------------------------------------- kernels


def mean_of(x: Any, size: Any) -> Any:
    total = language.zero(x)
    for i in range(size):
        total = language.accumulate(total, x[i])
    return language.cast(total / size, x)


def scale_of(squares: Any, rest: Any, size: Any, eps: Any) -> Any:
    """Return 1 / sqrt(var + eps), from the sum of squares after subtracting the mean.

    ``rest`` is the mean after that subtraction: the rounding error of the mean of numbers far from
    0.
    """
    return language.cast(1.0 / math.sqrt(squares / size - rest * rest + eps), squares)


@library.register_kernel("examples::layer_norm", ("cpu", "foo"))
@library.tile_kernel(contiguous_rows=True)
def forward_kernel(
    input: Any, weight: Any, bias: Any, eps: Any, output: Any, means: Any, scales: Any, rows: Any
) -> None:
    size = input.shape[-1]
    for row in rows:
        x, y = input.row(row), output.row(row)
        mean, squares, rest = mean_of(x, size), language.zero(x), language.zero(x)
        for i in range(size):
            squares = language.accumulate(squares, (x[i] - mean) * (x[i] - mean))
            rest = language.accumulate(rest, x[i] - mean)
        rest = language.cast(rest / size, x)
        mean, scale = mean + rest, scale_of(squares, rest, size, eps)
        means.flat[row], scales.flat[row] = mean, scale
        for i in range(size):
            value = (x[i] - mean) * scale
            if weight is not None:
                value = value * weight[i]
            if bias is not None:
                value = value + bias[i]
            y[i] = value


def count_parts(grad_output: Any) -> int:
    return min(grad_output.rows, MOST_PARTS)


def sums_for(size: Callable[..., int]) -> Any:
    """Allocate a row of sums for each part of the rows; for half precision they are float32."""
    return library.scratch(count_parts, size, like="grad_output", per_call=True)


def write_sum(sums: Any, target: Any) -> None:
    """Add the other rows to the first; along rows, the loop is vectorised."""
    for part in range(1, sums.rows):
        total, other = sums.row(0), sums.row(part)
        for i in range(target.size):
            total[i] = total[i] + other[i]
    for i in range(target.size):
        target[i] = sums[0, i] if sums.rows > 0 else 0.0


def add_up_parts(grad_weight: Any, grad_bias: Any, weight_sums: Any, bias_sums: Any) -> None:
    write_sum(weight_sums, grad_weight)
    write_sum(bias_sums, grad_bias)


@library.register_kernel("examples::layer_norm_backward", ("cpu", "foo"))
@library.tile_kernel(
    tiles=count_parts,
    scratch={
        "weight_sums": sums_for(lambda grad_weight: grad_weight.size),
        "bias_sums": sums_for(lambda grad_bias: grad_bias.size),
    },
    finish=add_up_parts,
    contiguous_rows=True,
)
def backward_kernel(
    grad_output: Any, input: Any, weight: Any, bias: Any, means: Any, scales: Any, eps: Any,
    grad_input: Any, grad_weight: Any, grad_bias: Any,
    weight_sums: Any, bias_sums: Any, parts: Any,
) -> None:  # fmt: skip
    """Compute the input's gradient s * (g - mean(g) - n * mean(g * n)), and sums for the others.

    s = 1 / sqrt(var + eps) is the scale, n = (x - mean) * s, and g = grad_output * weight.
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
            mean, scale = means.flat[row], scales.flat[row]
            total, product = language.zero(x), language.zero(x)
            for i in range(size):
                weighted = g[i]
                if weight is not None:
                    weighted = language.cast(weighted * weight[i], x)
                total = language.accumulate(total, weighted)
                product = language.accumulate(product, weighted * (x[i] - mean))
            offset = language.cast(total / size, x)
            slope = language.cast(product * scale / size, x)
            for i in range(size):
                weighted, normalised = g[i], (x[i] - mean) * scale
                if weight is not None:
                    weighted = language.cast(weighted * weight[i], input)
                    of_weight[i] = of_weight[i] + g[i] * normalised
                if bias is not None:
                    of_bias[i] = of_bias[i] + g[i]
                target[i] = scale * (weighted - offset - normalised * slope)


# ------------------------------------------------------------------------------------------- fake


@library.register_fake("examples::layer_norm")
def fake(
    input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> tuple[Tensor, ...]:
    if not input.is_floating_point():
        raise TypeError(f"layer_norm: input must be floating-point, got {input.dtype}")
    if input.dim() == 0:
        raise ValueError("layer_norm: input must have at least 1 dimension, got 0")
    for name, given in (("weight", weight), ("bias", bias)):
        if given is not None and not given.is_floating_point():
            raise TypeError(f"layer_norm: {name} must be floating-point, got {given.dtype}")
        if given is not None and not library.have_sizes(given.shape, input.shape[-1:]):
            raise ValueError(
                f"layer_norm: {name} must have shape {list(input.shape[-1:])} as input's rows "
                f"have, got {list(given.shape)}"
            )
    compute = torch.float64 if input.dtype == torch.float64 else torch.float32
    mean = input.new_empty(input.shape[:-1], dtype=compute)
    output = torch.empty_like(input, memory_format=torch.contiguous_format)
    return output, mean, torch.empty_like(mean)


@library.register_fake("examples::layer_norm_backward")
def fake_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    scale: Tensor,
    *,
    eps: float,
) -> tuple[Tensor, ...]:
    nothing = input.new_empty(0)
    grad_weight, grad_bias = (
        nothing.clone() if given is None else given.new_empty(given.shape)
        for given in (weight, bias)
    )
    return fake(input, weight, bias)[0], grad_weight, grad_bias


# --------------------------------------------------------------------------------------- autograd


def composite(
    input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> tuple[Tensor, ...]:
    """Compute the same with torch's operators, for forward mode."""
    weight, bias = (None if given is None else given.to(input.dtype) for given in (weight, bias))
    output = F.layer_norm(input, input.shape[-1:], weight, bias, eps)
    return output, *(it.squeeze(-1) for it in statistics(input, eps))


def statistics(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = input.double() if input.dtype == torch.float64 else input.float()
    variance, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
    return mean, torch.rsqrt(variance + eps)


def composite_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    scale: Tensor,
    *,
    eps: float,
) -> tuple[Tensor, ...]:
    """Compute the gradients with torch's operators, for second derivatives.

    Mean and scale are recomputed from the input, on which they depend.
    """
    mean, scale = statistics(input, eps)
    normalised = (input - mean) * scale
    weighted = grad_output if weight is None else grad_output * weight
    product = (weighted * normalised).mean(-1, keepdim=True)
    grad_input = scale * (weighted - weighted.mean(-1, keepdim=True) - normalised * product)
    nothing, rows = input.new_empty(0), tuple(range(input.dim() - 1))
    return (
        grad_input.to(input.dtype),
        nothing if weight is None else (grad_output * normalised).sum(rows).to(weight.dtype),
        nothing.clone() if bias is None else grad_output.sum(rows).to(bias.dtype),
    )


library.register_autograd(
    "examples::layer_norm", "examples::layer_norm_backward", composite=composite
)
library.register_autograd("examples::layer_norm_backward", composite=composite_backward)
library.register_vmap_rows("examples::layer_norm", "input")


# ---------------------------------------------------------------------------------------- samples


def reference(
    input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, ...]:
    mean = input.mean(-1, keepdim=True)
    centred = input - mean
    scale = 1 / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    # Both are kept for the gradients, and have none; for a row with an infinity they are NaN.
    mean = mean + centred.mean(-1, keepdim=True)
    statistics = (it.detach().squeeze(-1) for it in (mean, scale))
    output = centred * scale * (1 if weight is None else weight) + (0 if bias is None else bias)
    return output, *statistics


def sample(shape: tuple[int, ...], dtype: torch.dtype, *, given: int = 3, **options: Any) -> Sample:
    """Make a sample that has the first ``given`` of input, weight and bias."""
    tensors = random("layer_norm", shape, shape[-1:], shape[-1:], dtype=dtype)
    return Sample((*tensors[:given], *[None] * (3 - given)), options)


def wide_weight(dtype: torch.dtype) -> Sample:
    """Use float32 weights, as models in half precision do in their norms."""
    input, weight, bias = sample((5, 67), dtype).inputs
    return Sample((input, weight.float(), bias.float()))


def far_from_zero(dtype: torch.dtype) -> Sample:
    """Make a variance that is small beside the mean, a row with NaN, and one with infinity."""
    (input, *others) = sample((5, 33), dtype).inputs
    input[:3] += 100
    input[3, 1], input[4, 2] = torch.nan, torch.inf
    return Sample((input, *others))


SPEC = OpSpec(
    operator=torch.ops.examples.layer_norm.default,
    reference=reference,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sized=lambda dtype, size: sample((2, size, size + 3), dtype),
    samples={
        "vector": lambda dtype: sample((19,), dtype),
        "nothing else": lambda dtype: sample((3, 4, 33), dtype, given=1, eps=0.25),
        "no bias": lambda dtype: sample((3, 33), dtype, given=2),
        "one column": lambda dtype: sample((3, 1), dtype),
        "no columns": lambda dtype: sample((3, 0), dtype),
        "wide weight": wide_weight,
        "far from zero": far_from_zero,
    },
    essential=("size7", "nothing else"),
    large=lambda dtype: sample((301, 501), dtype),
)
