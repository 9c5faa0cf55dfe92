"""Dropout, and its mask of kept elements, by which its backward pass multiplies.

An element is kept if its random number, of 32 bits, is at least p * 2^32, and divided by 1 - p. The
number is Philox-2x32-10 (Salmon et al. 2011, section 3.3) of the element's index, with the seed as
the key, and depends neither on threads nor on devices.

Shows integers in kernels, a seed in a tensor, which torch.compile traces, and a second result for
the backward pass: drawing the numbers again would take 5 times as long as reading a byte for each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foo_ops import language, library
from foo_ops.testing import OpSpec, Sample, random

TAGS = torch.Tag.pt2_compliant_tag
library.define(
    "examples::dropout",
    "(Tensor input, Tensor seed, *, float p) -> (Tensor output, Tensor mask)",
    tags=TAGS,
)
library.define(
    "examples::dropout_backward",
    "(Tensor grad_output, Tensor mask, *, float p) -> Tensor grad_input",
    tags=TAGS,
)
MULTIPLIER, KEY_STEP = 0xD256D193, 0x9E3779B9
WORD = 0xFFFFFFFF


def dropout(input: Tensor, *, p: float = 0.5) -> Tensor:
    """Drop elements of ``input``, floating-point, with probability p; see torch.manual_seed."""
    seed = torch.randint(2**62, (1,), device=input.device)
    return torch.ops.examples.dropout(input, seed, p=p)[0]


# ---------------------------------------------------------------------------------------- kernels


def mixed(low: Any, high: Any, key: Any) -> Any:
    """Return the words after one round."""
    product = low * MULTIPLIER
    return (product >> 32 & WORD) ^ (key & WORD) ^ high, product & WORD


def mixed_five_times(low: Any, high: Any, key: Any) -> Any:
    low, high = mixed(low, high, key)
    low, high = mixed(low, high, key + KEY_STEP)
    low, high = mixed(low, high, key + 2 * KEY_STEP)
    low, high = mixed(low, high, key + 3 * KEY_STEP)
    return mixed(low, high, key + 4 * KEY_STEP)


def philox(low: Any, high: Any, key: Any) -> Any:
    """Return the first of the two 32-bit words after ten rounds on two words and a key.

    Unrolled: with an inner loop over rounds, the loop over elements is not vectorised, and takes 4
    times as long.
    """
    low, high = mixed_five_times(low, high, key)
    low, high = mixed_five_times(low, high, key + 5 * KEY_STEP)
    return low


def scale_of(p: float) -> float:
    """Return the factor of kept elements."""
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0


@library.register_kernel("examples::dropout", ("cpu", "foo"))
@library.tile_kernel(contiguous_rows=True)
def forward_kernel(input: Any, seed: Any, p: Any, output: Any, mask: Any, rows: Any) -> None:
    size, least = input.shape[-1], int(p * 2.0**32)
    scale = language.cast(scale_of(p), input)
    key, upper = seed[0] & WORD, seed[0] >> 32
    for row in rows:
        x, y, kept = input.row(row), output.row(row), mask.row(row)
        first = row * size
        for i in range(size):
            place = first + i
            is_kept = philox(place & WORD, place >> 32 ^ upper, key) >= least
            y[i] = x[i] * scale if is_kept else language.zero(input)
            kept[i] = is_kept


@library.register_kernel("examples::dropout_backward", ("cpu", "foo"))
@library.tile_kernel(contiguous_rows=True)
def backward_kernel(grad_output: Any, mask: Any, p: Any, grad_input: Any, rows: Any) -> None:
    scale = language.cast(scale_of(p), grad_output)
    for row in rows:
        g, kept, target = grad_output.row(row), mask.row(row), grad_input.row(row)
        for i in range(grad_output.shape[-1]):
            target[i] = g[i] * scale if kept[i] else language.zero(grad_output)


# ------------------------------------------------------------------------------------------- fake


def check(name: str, given: Tensor, p: float) -> None:
    if not given.is_floating_point():
        raise TypeError(f"dropout: {name} must be floating-point, got {given.dtype}")
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout: p must be in [0, 1], got {p}")


@library.register_fake("examples::dropout")
def fake(input: Tensor, seed: Tensor, *, p: float) -> tuple[Tensor, Tensor]:
    check("input", input, p)
    if seed.dtype != torch.int64:
        raise TypeError(f"dropout: seed must be torch.int64, got {seed.dtype}")
    if not library.have_sizes(seed.shape, (1,)):
        raise ValueError(f"dropout: seed must have shape [1], got {list(seed.shape)}")
    output = torch.empty_like(input, memory_format=torch.contiguous_format)
    return output, torch.empty_like(output, dtype=torch.bool)


@library.register_fake("examples::dropout_backward")
def fake_backward(grad_output: Tensor, mask: Tensor, *, p: float) -> Tensor:
    check("grad_output", grad_output, p)
    if mask.dtype != torch.bool:
        raise TypeError(f"dropout: mask must be torch.bool, got {mask.dtype}")
    if not library.have_sizes(mask.shape, grad_output.shape):
        raise ValueError(
            f"dropout: mask must have shape {list(grad_output.shape)} as grad_output has, "
            f"got {list(mask.shape)}"
        )
    return torch.empty_like(grad_output, memory_format=torch.contiguous_format)


# --------------------------------------------------------------------------------------- autograd


def composite(input: Tensor, seed: Tensor, *, p: float) -> tuple[Tensor, Tensor]:
    """Multiply by the mask, for forward mode."""
    ones = torch.ones_like(input, requires_grad=False)
    factors, mask = torch.ops.examples.dropout(ones, seed, p=p)
    return input * factors, mask


def composite_backward(grad_output: Tensor, mask: Tensor, *, p: float) -> Tensor:
    """Multiply by the mask, for second derivatives."""
    return grad_output * (scale_of(p) * mask).to(grad_output.dtype)


library.register_autograd("examples::dropout", "examples::dropout_backward", composite=composite)
library.register_autograd("examples::dropout_backward", composite=composite_backward)


# ---------------------------------------------------------------------------------------- samples


def multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower word of a product, computed by halves."""
    low = (word & 0xFFFF) * factor
    high = (word >> 16) * factor + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF


def reference(input: Tensor, seed: Tensor, p: float) -> tuple[Tensor, Tensor]:
    seed, place = seed[0], torch.arange(input.numel()).view(input.shape)
    left, right = place % 2**32, place // 2**32 ^ (seed >> 32)
    for round in range(10):
        upper, lower = multiply(left, 0xD256D193)
        left, right = upper ^ (seed % 2**32 + 0x9E3779B9 * round) % 2**32 ^ right, lower
    is_kept = left >= int(p * 2**32)
    return torch.where(is_kept, input / (1 - p), 0) if p < 1 else 0 * input, is_kept


def sample(
    shape: tuple[int, ...], dtype: torch.dtype, p: float = 0.25, seed: int = 2**61 + 12345
) -> Sample:
    return Sample((*random("dropout", shape, dtype=dtype), torch.tensor([seed])), {"p": p})


SPEC = OpSpec(
    operator=torch.ops.examples.dropout.default,
    reference=reference,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sized=lambda dtype, size: sample((2, size, size + 3), dtype),
    samples={
        "0-d": lambda dtype: sample((), dtype),
        "all": lambda dtype: sample((3, 5), dtype, p=1.0),
        "none": lambda dtype: sample((3, 5), dtype, p=0.0, seed=0),
    },
    essential=("size7", "0-d"),
    large=lambda dtype: sample((301, 501), dtype),
)
