"""A short causal convolution over time, per channel, as in Mamba or Hyena.

    output[b, d, t] = bias[d] + sum_w weight[d, w] * input[b, d, t - W + 1 + w]

with zeros before the first element.

Shows explicit vectors, rows that are read at an offset, and gradients whose tiles are chosen so
that each sum belongs to one tile.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foo_ops import language, library
from foo_ops.testing import OpSpec, Sample, random

TAGS = torch.Tag.pt2_compliant_tag
library.define(
    "examples::causal_conv1d",
    "(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor",
    tags=TAGS,
)
library.define(
    "examples::causal_conv1d_backward",
    "(Tensor grad_output, Tensor input, Tensor weight, Tensor? bias) "
    "-> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
    tags=TAGS,
)


def causal_conv1d(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Convolve ``input`` (B, D, T) with ``weight`` (D, W), and add ``bias`` (D,)."""
    return torch.ops.examples.causal_conv1d(input, weight, bias)


# ---------------------------------------------------------------------------------------- kernels


def sum_of_taps(x: Any, w: Any, t: Any, taps: Any, total: Any) -> Any:
    """Return one element of the output, at the beginning or the end of a row."""
    for tap in range(max(taps - 1 - t, 0), taps):
        total += w[tap] * x[t - taps + 1 + tap]
    return total


@library.register_kernel("examples::causal_conv1d", ("cpu", "foo"))
@library.tile_kernel(contiguous_rows=True)
def forward_kernel(input: Any, weight: Any, bias: Any, output: Any, rows: Any) -> None:
    size, taps, step = input.shape[-1], weight.shape[1], language.lanes(input)
    first = min(taps - 1, size)
    whole = first + (size - first) // step * step
    for row in rows:
        channel = row % input.shape[1]
        x, w, y = input.row(row), weight.row(channel), output.row(row)
        base = language.zero(input)
        if bias is not None:
            base = bias[channel]
        for t in range(first):
            y[t] = sum_of_taps(x, w, t, taps, base)
        for t in range(first, whole, step):
            total = language.splat(base, step)
            for tap in range(taps):
                value = language.load_vector(x, t - taps + 1 + tap, step)
                total = language.fma(value, language.splat(w[tap], step), total)
            language.store(y, t, total)
        for t in range(whole, size):
            y[t] = sum_of_taps(x, w, t, taps, base)


def sum_of_gradients(g: Any, w: Any, t: Any, taps: Any, size: Any) -> Any:
    """Return the gradient of one element of the input, at the end of a row."""
    total = language.zero(g)
    for tap in range(max(taps - size + t, 0), taps):
        total += w[tap] * g[t + taps - 1 - tap]
    return total


@library.register_kernel("examples::causal_conv1d_backward", ("cpu", "foo"))
@library.tile_kernel(tiles=lambda input: input.shape[1], contiguous_rows=True)
def backward_kernel(
    grad_output: Any, input: Any, weight: Any, bias: Any,
    grad_input: Any, grad_weight: Any, grad_bias: Any, channels: Any,
) -> None:  # fmt: skip
    batch, count, size = input.shape[0], input.shape[1], input.shape[2]
    taps, step = weight.shape[1], language.lanes(input)
    whole = max(size - taps + 1, 0) // step * step
    for channel in channels:
        w, slopes = weight.row(channel), grad_weight.row(channel)
        for row in range(channel, batch * count, count):
            g, target = grad_output.row(row), grad_input.row(row)
            for t in range(0, whole, step):
                total = language.splat(language.zero(input), step)
                for tap in range(taps):
                    value = language.load_vector(g, t + taps - 1 - tap, step)
                    total = language.fma(value, language.splat(w[tap], step), total)
                language.store(target, t, total)
            for t in range(whole, size):
                target[t] = sum_of_gradients(g, w, t, taps, size)
        for tap in range(taps):
            product = language.zero(input)
            for row in range(channel, batch * count, count):
                g, x = grad_output.row(row), input.row(row)
                offset = taps - 1 - tap
                for t in range(offset, size):
                    product = language.accumulate(product, g[t] * x[t - offset])
            slopes[tap] = product
        if bias is not None:
            total = language.zero(input)
            for row in range(channel, batch * count, count):
                g = grad_output.row(row)
                for t in range(size):
                    total = language.accumulate(total, g[t])
            grad_bias[channel] = total


# ------------------------------------------------------------------------------------------- fake


@library.register_fake("examples::causal_conv1d")
def fake(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not input.is_floating_point():
        raise TypeError(f"causal_conv1d: input must be floating-point, got {input.dtype}")
    if input.dim() != 3:
        raise ValueError(f"causal_conv1d: input must have 3 dimensions, got {input.dim()}")
    if (
        weight.dim() != 2
        or not library.holds(weight.shape[0] == input.shape[1])
        or not library.holds(weight.shape[1] > 0)
    ):
        raise ValueError(
            f"causal_conv1d: weight must have shape [{input.shape[1]}, W], W > 0, as input has "
            f"channels, got {list(weight.shape)}"
        )
    if bias is not None and not library.have_sizes(bias.shape, weight.shape[:1]):
        raise ValueError(
            f"causal_conv1d: bias must have shape {list(weight.shape[:1])} as input has channels, "
            f"got {list(bias.shape)}"
        )
    for name, given in (("weight", weight), ("bias", bias)):
        if given is not None and given.dtype != input.dtype:
            raise TypeError(
                f"causal_conv1d: {name} must be {input.dtype} as input is, got {given.dtype}"
            )
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@library.register_fake("examples::causal_conv1d_backward")
def fake_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    grad_bias = input.new_empty(0 if bias is None else bias.shape)
    return fake(input, weight, bias), weight.new_empty(weight.shape), grad_bias


# --------------------------------------------------------------------------------------- autograd


def composite(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute the same with torch's operators, for forward mode."""
    padded = F.pad(input, (weight.shape[1] - 1, 0))
    return F.conv1d(padded, weight[:, None], bias, groups=weight.shape[0])


library.register_autograd(
    "examples::causal_conv1d", "examples::causal_conv1d_backward", composite=composite
)


# ---------------------------------------------------------------------------------------- samples


def reference(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    taps, size = weight.shape[1], input.shape[2]
    result = torch.zeros_like(input) if bias is None else bias[:, None].expand_as(input)
    for tap in range(taps):
        delay = min(taps - 1 - tap, size)
        nothing = input.new_zeros(*input.shape[:2], delay)
        delayed = torch.cat((nothing, input[..., : size - delay]), -1)
        result = result + weight[:, tap, None] * delayed
    return result


def sample(
    shape: tuple[int, ...], taps: int, dtype: torch.dtype, *, has_bias: bool = True
) -> Sample:
    channels = shape[1]
    tensors = random("conv", shape, (channels, taps), (channels,), dtype=dtype)
    return Sample((*tensors[:2], tensors[2] if has_bias else None))


SPEC = OpSpec(
    operator=torch.ops.examples.causal_conv1d.default,
    reference=reference,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sized=lambda dtype, size: sample((2, size, size + 3), 4, dtype),
    samples={
        "no bias": lambda dtype: sample((2, 3, 33), 4, dtype, has_bias=False),
        "one tap": lambda dtype: sample((1, 2, 9), 1, dtype),
        "longer than the row": lambda dtype: sample((1, 2, 5), 11, dtype),
        "empty rows": lambda dtype: sample((2, 3, 0), 4, dtype),
    },
    essential=("size7", "no bias"),
    large=lambda dtype: sample((3, 101, 501), 4, dtype),
)
