"""A filter in the frequency domain: spectra times an optional response and an optional gain.

    output[..., f] = input[..., f] * response[f] * gain[f]

where the response is complex and the gain real, as in a learned equalizer or an FNO's layer.

Shows complex numbers, optional tensors of another dtype, gradients of complex numbers (torch's
convention: that of a product is the gradient times the conjugate of the other factor), and tiles of
columns, so that each sum over rows belongs to one tile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foo_ops import library
from foo_ops.testing import OpSpec, Sample, random

TAGS = torch.Tag.pt2_compliant_tag
library.define(
    "examples::spectral_filter",
    "(Tensor input, Tensor? response=None, Tensor? gain=None) -> Tensor",
    tags=TAGS,
)
library.define(
    "examples::spectral_filter_backward",
    "(Tensor grad_output, Tensor input, Tensor? response, Tensor? gain) "
    "-> (Tensor grad_input, Tensor grad_response, Tensor grad_gain)",
    tags=TAGS,
)
COLUMNS = 64


def spectral_filter(
    input: Tensor, response: Tensor | None = None, gain: Tensor | None = None
) -> Tensor:
    """Filter ``input`` (..., F) by ``response`` (F,), both complex, and ``gain`` (F,), real."""
    return torch.ops.examples.spectral_filter(input, response, gain)


# ---------------------------------------------------------------------------------------- kernels


@library.register_kernel("examples::spectral_filter", ("cpu", "foo"))
@library.tile_kernel(contiguous_rows=True)
def forward_kernel(input: Any, response: Any, gain: Any, output: Any, rows: Any) -> None:
    for row in rows:
        x, y = input.row(row), output.row(row)
        for i in range(input.shape[-1]):
            value = x[i]
            if response is not None:
                value = value * response[i]
            if gain is not None:
                value = value * gain[i]
            y[i] = value


@library.register_kernel("examples::spectral_filter_backward", ("cpu", "foo"))
@library.tile_kernel(
    tiles=lambda input: (input.shape[-1] + COLUMNS - 1) // COLUMNS, contiguous_rows=True
)
def backward_kernel(
    grad_output: Any, input: Any, response: Any, gain: Any,
    grad_input: Any, grad_response: Any, grad_gain: Any, tiles: Any,
) -> None:  # fmt: skip
    size = input.shape[-1]
    for tile in tiles:
        first, end = tile * COLUMNS, min((tile + 1) * COLUMNS, size)
        for i in range(first, end):
            if response is not None:
                grad_response[i] = 0.0
            if gain is not None:
                grad_gain[i] = 0.0
        for row in range(input.rows):
            g, x, target = grad_output.row(row), input.row(row), grad_input.row(row)
            for i in range(first, end):
                value, factor = g[i], x[i].conjugate()
                if gain is not None:
                    value = value * gain[i]
                if response is not None:
                    grad_response[i] = grad_response[i] + value * factor
                if gain is not None:
                    product = g[i] * factor
                    if response is not None:
                        product = product * response[i].conjugate()
                    grad_gain[i] = grad_gain[i] + product.real
                if response is not None:
                    value = value * response[i].conjugate()
                target[i] = value


# ------------------------------------------------------------------------------------------- fake


@library.register_fake("examples::spectral_filter")
def fake(input: Tensor, response: Tensor | None = None, gain: Tensor | None = None) -> Tensor:
    if input.dtype not in (torch.complex64, torch.complex128):
        raise TypeError(
            f"spectral_filter: input must be torch.complex64 or torch.complex128, got {input.dtype}"
        )
    if input.dim() == 0:
        raise ValueError("spectral_filter: input must have at least 1 dimension, got 0")
    for name, given, dtype in (
        ("response", response, input.dtype), ("gain", gain, input.dtype.to_real())
    ):  # fmt: skip
        if given is None:
            continue
        if given.dtype != dtype:
            raise TypeError(
                f"spectral_filter: {name} must be {dtype} where input is {input.dtype}, "
                f"got {given.dtype}"
            )
        if not library.have_sizes(given.shape, input.shape[-1:]):
            raise ValueError(
                f"spectral_filter: {name} must have shape {list(input.shape[-1:])} as input's rows "
                f"have, got {list(given.shape)}"
            )
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@library.register_fake("examples::spectral_filter_backward")
def fake_backward(
    grad_output: Tensor, input: Tensor, response: Tensor | None, gain: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    grad_response = input.new_empty(0 if response is None else response.shape)
    real = input.dtype.to_real()
    grad_gain = input.new_empty(0 if gain is None else gain.shape, dtype=real)
    return fake(input, response, gain), grad_response, grad_gain


# --------------------------------------------------------------------------------------- autograd


def composite(input: Tensor, response: Tensor | None = None, gain: Tensor | None = None) -> Tensor:
    """Compute the same with torch's operators, for forward mode."""
    for factor in (response, gain):
        input = input.clone() if factor is None else input * factor
    return input


library.register_autograd(
    "examples::spectral_filter", "examples::spectral_filter_backward", composite=composite
)
library.register_vmap_rows("examples::spectral_filter", "input")


# ---------------------------------------------------------------------------------------- samples


def reference(input: Tensor, response: Tensor | None = None, gain: Tensor | None = None) -> Tensor:
    real, imaginary = input.real, input.imag
    if response is not None:
        real, imaginary = (
            real * response.real - imaginary * response.imag,
            real * response.imag + imaginary * response.real,
        )
    factor = 1 if gain is None else gain
    return torch.complex(real * factor, imaginary * factor)


def sample(
    shape: tuple[int, ...], dtype: torch.dtype, *, response: bool = True, gain: bool = True
) -> Sample:
    input, factors = random("filter", shape, shape[-1:], dtype=dtype)
    (gains,) = random("gain", shape[-1:], dtype=dtype.to_real())
    return Sample((input, factors if response else None, gains if gain else None))


SPEC = OpSpec(
    operator=torch.ops.examples.spectral_filter.default,
    reference=reference,
    dtypes=(torch.complex64, torch.complex128),
    sized=lambda dtype, size: sample((2, size, size + 3), dtype),
    samples={
        "vector": lambda dtype: sample((19,), dtype),
        "no response": lambda dtype: sample((3, 33), dtype, response=False),
        "no gain": lambda dtype: sample((3, 33), dtype, gain=False),
        "neither": lambda dtype: sample((3, 4), dtype, response=False, gain=False),
        "several tiles": lambda dtype: sample((3, 2 * COLUMNS + 1), dtype),
    },
    essential=("size7", "no response"),
    large=lambda dtype: sample((301, 501), dtype),
)
