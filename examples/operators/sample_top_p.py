"""Draws a token from the most probable ones of each row (nucleus sampling).

The candidates of a row are its tokens in order of decreasing probability, until their probabilities
add up to p; equal ones in order of their index. One candidate is drawn, with its relative
probability.

Shows an operator that draws random numbers: its kernel gets a seed, which PyTorch draws from the
generator of the call, so that torch.manual_seed decides the result, on every device, compiled or
not. It is tested by its frequencies (``draws=`` and ``statistic=`` of the `OpSpec`). It also shows
a sum without sorting: the least candidate probability is found by bisection, some 30 vectorised
sums of a row, in a fraction of the time of a sort.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from foo_ops import language, library
from foo_ops.testing import OpSpec, Sample, random

library.define(
    "examples::sample_top_p",
    "(Tensor logits, *, float p, float temperature=1.0, Generator? generator=None) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
STEPS = 70


def sample_top_p(
    logits: Tensor,
    p: float = 0.9,
    *,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the index of a token for each row of ``logits`` (..., V), of shape (...), int64.

    It is -1 for a row with NaN, or whose largest logit is infinite.
    """
    return torch.ops.examples.sample_top_p(
        logits, p=p, temperature=temperature, generator=generator
    )


# ---------------------------------------------------------------------------------------- kernels


def write_weights(x: Any, weights: Any, size: Any, temperature: Any) -> Any:
    """Write probabilities, scaled so that the largest is 1, and return their sum."""
    largest, total = language.cast(-math.inf, x), language.zero(weights)
    scale = language.cast(1.0 / temperature, weights)
    for i in range(size):
        largest = language.accumulate_maximum(largest, x[i])
    for i in range(size):
        weights[i] = math.exp((x[i] - largest) * scale)
        total = language.accumulate(total, weights[i])
    return total


def mass_from(weights: Any, size: Any, least: Any) -> Any:
    """Return the sum of the weights that are at least ``least``."""
    total = nothing = language.zero(weights)
    for i in range(size):
        total = language.accumulate(total, weights[i] if weights[i] >= least else nothing)
    return total


def least_weight(weights: Any, size: Any, wanted: Any) -> Any:
    """Return a lower bound of the candidates' weights; larger weights do not reach ``wanted``."""
    low, high = language.zero(weights), language.cast(1.0, weights)
    if mass_from(weights, size, high) >= wanted:
        return high
    for _ in range(STEPS):
        # Bisect the exponent as long as the bounds are far apart.
        middle = 0.5 * (low + high) if low > 0.25 * high else math.sqrt(max(low, 1e-30) * high)
        if middle <= low or middle >= high:
            break
        if mass_from(weights, size, middle) >= wanted:
            low = middle
        else:
            high = middle
    return low


def pick(weights: Any, size: Any, least: Any, wanted: Any, uniform: Any) -> Any:
    """Return the candidate at which the cumulative sum passes a random part of the total."""
    nothing, equal = language.zero(weights), language.cast(2.0, weights)
    for i in range(size):
        # The least candidate weight may occur several times, and not all of these are candidates.
        equal = min(equal, weights[i] if weights[i] >= least else equal)
    above = nothing
    for i in range(size):
        above = language.accumulate(above, weights[i] if weights[i] > equal else nothing)
    ties = max(math.ceil((wanted - above) / equal), 1.0)
    target = uniform * (above + ties * equal)
    passed, chosen = nothing, -1
    for i in range(size):
        takes_part = weights[i] > equal
        if weights[i] == equal and ties > 0:
            takes_part, ties = True, ties - 1
        if takes_part:
            passed += weights[i]
            chosen = i
            if passed > target:
                break
    return chosen


@library.register_kernel("examples::sample_top_p", ("cpu", "foo"))
@library.tile_kernel(
    contiguous_rows=True,
    scratch={"weights": library.scratch(lambda logits: logits.shape[-1], like="logits")},
)
def kernel(
    logits: Any, p: Any, temperature: Any, seed: Any, output: Any, weights: Any, rows: Any
) -> None:
    size = logits.shape[-1]
    for row in rows:
        total = write_weights(logits.row(row), weights, size, temperature)
        output.flat[row] = -1
        if not 0 < total < math.inf:
            continue
        wanted = total * language.cast(p, weights)
        least = least_weight(weights, size, wanted)
        uniform = language.cast(language.random(seed, row), weights)
        output.flat[row] = pick(weights, size, least, wanted, uniform)


# ------------------------------------------------------------------------------------------- fake


@library.register_fake("examples::sample_top_p")
def fake(logits: Tensor, *, p: float, temperature: float = 1.0, generator: Any = None) -> Tensor:
    if not logits.is_floating_point():
        raise TypeError(f"sample_top_p: logits must be floating-point, got {logits.dtype}")
    if logits.dim() == 0:
        raise ValueError("sample_top_p: logits must have at least 1 dimension, got 0")
    if not 0.0 < p <= 1.0:
        raise ValueError(f"sample_top_p: p must be in (0, 1], got {p}")
    if not temperature > 0.0:
        raise ValueError(f"sample_top_p: temperature must be positive, got {temperature}")
    return logits.new_empty(logits.shape[:-1], dtype=torch.int64)


def composite(
    logits: Tensor, *, p: float, temperature: float = 1.0, generator: Any = None
) -> Tensor:
    """Compute the same with torch's operators, with other random numbers."""
    probabilities, order = (
        (logits / temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
    )
    before = probabilities.cumsum(-1) - probabilities
    kept = probabilities.where(before < p, 0.0).flatten(0, -2)
    drawn = torch.multinomial(kept, 1, generator=generator)
    return order.gather(-1, drawn.view(*logits.shape[:-1], 1))[..., 0]


# ---------------------------------------------------------------------------------------- samples


def reference(logits: Tensor, p: float, temperature: float = 1.0) -> Tensor:
    """Return each token's probability of being drawn."""
    probabilities, order = (
        (logits / temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
    )
    before = probabilities.cumsum(-1) - probabilities
    kept = probabilities.where(before < p, 0.0)
    return torch.zeros_like(logits).scatter(-1, order, kept / kept.sum(-1, keepdim=True))


def sample(shape: tuple[int, ...], dtype: torch.dtype, p: float = 0.8, **options: Any) -> Sample:
    return Sample((*random("top_p", shape, dtype=dtype),), {"p": p} | options)


def equal(dtype: torch.dtype) -> Sample:
    """Make rows with many equal logits, and one that is never drawn."""
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0, -torch.inf], [0.0, 2.0, 2.0, -torch.inf, 2.0]])
    return Sample((logits.to(dtype),), {"p": 0.6})


SPEC = OpSpec(
    operator=torch.ops.examples.sample_top_p.default,
    reference=reference,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sized=lambda dtype, size: sample((2, size, size + 3), dtype),
    sizes=(0, 5),
    samples={
        "vector": lambda dtype: sample((33,), dtype, temperature=2.0),
        "all": lambda dtype: sample((3, 7), dtype, p=1.0),
        "the best alone": lambda dtype: sample((3, 7), dtype, p=1e-6),
        "equal": equal,
    },
    essential=("size5", "equal"),
    large=lambda dtype: sample((301, 501), dtype),
    differentiable=False,
    draws=400,
    statistic=lambda outputs, logits, **options: one_hot(outputs[0], logits.shape[-1]),
)
