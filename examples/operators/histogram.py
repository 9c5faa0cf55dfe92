"""Count numbers in bins of equal width, as torch.histc does, in integers.

    counts[b] = |{x : edge[b] <= x < edge[b + 1]}|, edge[b] = min + b * (max - min) / bins

The last bin includes its upper edge. Numbers outside are not counted, nor is NaN.

Shows parts that count separately, on several threads, in scratch memory, and are added up at the
end (``finish=``), and options that are checked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foo_ops import language, library
from foo_ops.testing import OpSpec, Sample, random

library.define(
    "examples::histogram",
    "(Tensor input, *, SymInt bins, float min, float max) -> Tensor counts",
    tags=torch.Tag.pt2_compliant_tag,
)
MOST_PARTS, LEAST_OF_PART = 16, 4096


def histogram(input: Tensor, *, bins: int, min: float, max: float) -> Tensor:
    """Return the counts (bins,), int64, of the elements of ``input``, floating-point."""
    return torch.ops.examples.histogram(input.reshape(-1), bins=bins, min=min, max=max)


# ----------------------------------------------------------------------------------------- kernel


def count_parts(input: Any) -> int:
    return min(input.size // LEAST_OF_PART + 1, MOST_PARTS)


COUNTS = library.scratch(count_parts, lambda bins: bins, like="counts", per_call=True)


def add_up_parts(counts: Any, counts_of_parts: Any) -> None:
    for i in range(counts.size):
        total = language.zero(counts)
        for part in range(counts_of_parts.rows):
            total += counts_of_parts[part, i]
        counts[i] = total


@library.register_kernel("examples::histogram", ("cpu", "foo"))
@library.tile_kernel(tiles=count_parts, scratch={"counts_of_parts": COUNTS}, finish=add_up_parts)
def kernel(
    input: Any, bins: Any, min: Any, max: Any, counts: Any, counts_of_parts: Any, parts: Any
) -> None:
    count, width = counts_of_parts.rows, max - min
    for part in parts:
        own = counts_of_parts.row(part)
        for i in range(bins):
            own[i] = 0
        for i in range(part * input.size // count, (part + 1) * input.size // count):
            value = language.cast(input[i], min)
            if min <= value <= max:
                place = int((value - min) / width * bins)
                own[place if place < bins else bins - 1] += 1


# ------------------------------------------------------------------------------------------- fake


@library.register_fake("examples::histogram")
def fake(input: Tensor, *, bins: int, min: float, max: float) -> Tensor:
    if not input.is_floating_point():
        raise TypeError(f"histogram: input must be floating-point, got {input.dtype}")
    if input.dim() != 1:
        raise ValueError(f"histogram: input must have 1 dimension, got {input.dim()}")
    if bins < 1:
        raise ValueError(f"histogram: bins must be at least 1, got {bins}")
    if not min < max:
        raise ValueError(f"histogram: max must be more than min, {min}, got {max}")
    return input.new_empty(bins, dtype=torch.int64)


# ---------------------------------------------------------------------------------------- samples


def reference(input: Tensor, bins: int, min: float, max: float) -> Tensor:
    """Search the edges for each number; torch.histc rounds differently."""
    edges = torch.linspace(min, max, bins + 1, dtype=torch.float64)
    is_inside = (input >= min) & (input <= max)
    place = torch.bucketize(input[is_inside], edges, right=True) - 1
    return torch.bincount(place.clamp(max=bins - 1), minlength=bins)


def sample(size: int, dtype: torch.dtype, bins: int = 16, spread: float = 1.0) -> Sample:
    """Make numbers, some of them outside."""
    (input,) = random("histogram", (size,), dtype=dtype)
    return Sample((spread * input,), {"bins": bins, "min": -2.0, "max": 2.0})


def on_edges(dtype: torch.dtype) -> Sample:
    drawn = sample(3 * LEAST_OF_PART, dtype)
    return drawn.map(lambda input: (4 * input).round() / 4)


def special(dtype: torch.dtype) -> Sample:
    numbers = [torch.nan, torch.inf, -torch.inf, 2.0, -2.0, 0.0, -0.0, 1.99]
    return Sample((torch.tensor(numbers, dtype=dtype),), {"bins": 5, "min": -2.0, "max": 2.0})


SPEC = OpSpec(
    operator=torch.ops.examples.histogram.default,
    reference=reference,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sized=lambda dtype, size: sample(7 * size, dtype, bins=size + 1),
    samples={
        "one bin": lambda dtype: sample(33, dtype, bins=1),
        "on edges, in several parts": on_edges,
        "all outside": lambda dtype: sample(33, dtype, spread=1e3),
        "special values": special,
    },
    essential=("size7", "one bin"),
    large=lambda dtype: sample(100_001, dtype),
    differentiable=False,
)
