"""Sums or means of bags of rows of a table, as for the features of recommendation models.

    output[b] = sum_i weight[indices[i]] * per_sample_weights[i],  offsets[b] <= i < offsets[b + 1]

Shows indices that the kernel itself checks (``refuse=``), sums in registers, rows that are
prefetched, and a gradient that is scattered on several threads without atomics: each part of the
table searches all indices for its own, after a check (``check=``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foo_ops import language, library
from foo_ops.testing import OpSpec, Sample, random

TAGS = torch.Tag.pt2_compliant_tag
ARGUMENTS = (
    "Tensor weight, Tensor indices, Tensor offsets, Tensor? per_sample_weights=None, *, "
    "bool mean=False"
)
library.define("examples::embedding_bag", f"({ARGUMENTS}) -> Tensor", tags=TAGS)
library.define(
    "examples::embedding_bag_backward",
    f"(Tensor grad_output, {ARGUMENTS}) -> (Tensor grad_weight, Tensor grad_per_sample_weights)",
    tags=TAGS,
)
MOST_PARTS = 16
AHEAD = 12


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None = None,
    *,
    mean: bool = False,
) -> Tensor:
    """Return the sum or the mean of each bag, (bags, D), zero for an empty bag.

    ``weight`` is (rows, D). ``indices`` (N,) of its rows and ``offsets`` (bags,), the starts of the
    bags, are int64. ``per_sample_weights`` (N,) are for sums.
    """
    return torch.ops.examples.embedding_bag(weight, indices, offsets, per_sample_weights, mean=mean)


# ---------------------------------------------------------------------------------------- kernels


def are_bags(weight: Any, indices: Any, offsets: Any) -> bool:
    # Without an early exit the loop is vectorised, with an instruction each for these.
    least, most = 0, -1
    for i in range(indices.size):
        least, most = min(least, indices[i]), max(most, indices[i])
    if least < 0 or most >= weight.shape[0]:
        return False
    end = 0
    for bag in range(offsets.size):
        if not end <= offsets[bag] <= indices.size:
            return False
        end = offsets[bag]
    # Require that no index precedes the first bag.
    return indices.size == 0 or (offsets.size > 0 and offsets[0] == 0)


def refuse_bags(weight: Tensor, indices: Tensor, offsets: Tensor) -> None:
    rows, size = weight.shape[0], indices.shape[0]
    wrong = indices[(indices < 0) | (indices >= rows)]
    if wrong.numel() > 0:
        raise IndexError(
            f"embedding_bag: indices must be in [0, {rows}), the rows of weight, got "
            f"{int(wrong[0])}"
        )
    raise ValueError(
        f"embedding_bag: offsets must begin with 0, not decrease and be at most {size}, the "
        f"number of indices, got {offsets.tolist()}"
    )


def end_of(offsets: Any, bag: Any, indices: Any) -> Any:
    return offsets[bag + 1] if bag + 1 < offsets.size else indices.size


def factor_of(per_sample_weights: Any, i: Any, each: Any) -> Any:
    if per_sample_weights is None:
        return each
    return per_sample_weights[i]


def add_four(sums: Any, x: Any, column: Any, factor: Any) -> Any:
    """Add four vectors of a row, times a factor, to sums."""
    a, b, c, d = sums
    step = language.lanes(x)
    return (
        language.fma(language.load_vector(x, column, step), factor, a),
        language.fma(language.load_vector(x, column + step, step), factor, b),
        language.fma(language.load_vector(x, column + 2 * step, step), factor, c),
        language.fma(language.load_vector(x, column + 3 * step, step), factor, d),
    )


def store_four(y: Any, column: Any, sums: Any) -> None:
    a, b, c, d = sums
    step = language.lanes(y)
    language.store(y, column, a)
    language.store(y, column + step, b)
    language.store(y, column + 2 * step, c)
    language.store(y, column + 3 * step, d)


@library.register_kernel("examples::embedding_bag", ("cpu", "foo"))
@library.tile_kernel(
    # Without bags there must be no indices.
    tiles=lambda offsets: max(offsets.size, 1),
    contiguous_rows=True,
    refuse=refuse_bags,
)
def forward_kernel(
    weight: Any, indices: Any, offsets: Any, per_sample_weights: Any, mean: Any, output: Any,
    bags: Any,
) -> bool:  # fmt: skip
    if offsets.size == 0:
        return indices.size == 0
    size, step = weight.shape[1], language.lanes(weight)
    zero = language.splat(language.zero(weight), step)
    zeros, last = (zero, zero, zero, zero), indices.size - 1
    for bag in bags:
        y, start, stop = output.row(bag), offsets[bag], end_of(offsets, bag, indices)
        if not 0 <= start <= stop <= indices.size or (bag == 0 and start != 0):
            return False
        for i in range(start, stop if size == 0 else start):
            if not 0 <= indices[i] < weight.shape[0]:
                return False
        each = language.cast(1.0 / max(stop - start, 1) if mean else 1.0, weight)
        column = 0
        # Sum eight vectors, or four, in registers.
        while column + 8 * step <= size:
            first = second = zeros
            for i in range(start, stop):
                # This index is only prefetched, so it need not be valid.
                ahead = indices[min(i + AHEAD, last)] * weight.strides[0]
                language.prefetch_vectors(weight.data, ahead + column, step, 8)
                row = indices[i]
                if not 0 <= row < weight.shape[0]:
                    return False
                x = weight.row(row)
                factor = language.splat(factor_of(per_sample_weights, i, each), step)
                first = add_four(first, x, column, factor)
                second = add_four(second, x, column + 4 * step, factor)
            store_four(y, column, first)
            store_four(y, column + 4 * step, second)
            column += 8 * step
        while column + 4 * step <= size:
            first = zeros
            for i in range(start, stop):
                row = indices[i]
                if not 0 <= row < weight.shape[0]:
                    return False
                factor = language.splat(factor_of(per_sample_weights, i, each), step)
                first = add_four(first, weight.row(row), column, factor)
            store_four(y, column, first)
            column += 4 * step
        while column + step <= size:
            total = zero
            for i in range(start, stop):
                row = indices[i]
                if not 0 <= row < weight.shape[0]:
                    return False
                factor = language.splat(factor_of(per_sample_weights, i, each), step)
                value = language.load_vector(weight.row(row), column, step)
                total = language.fma(value, factor, total)
            language.store(y, column, total)
            column += step
        while column < size:
            rest = language.zero(weight)
            for i in range(start, stop):
                row = indices[i]
                if not 0 <= row < weight.shape[0]:
                    return False
                rest += weight.row(row)[column] * factor_of(per_sample_weights, i, each)
            y[column] = rest
            column += 1
    return True


def count_parts(weight: Any) -> Any:
    return min(weight.shape[0], MOST_PARTS)


@library.register_kernel("examples::embedding_bag_backward", ("cpu", "foo"))
@library.tile_kernel(tiles=count_parts, contiguous_rows=True, check=are_bags, refuse=refuse_bags)
def backward_kernel(
    grad_output: Any, weight: Any, indices: Any, offsets: Any, per_sample_weights: Any, mean: Any,
    grad_weight: Any, grad_per_sample_weights: Any, parts: Any,
) -> None:  # fmt: skip
    size, count = weight.shape[1], count_parts(weight)
    for part in parts:
        first, end = part * weight.shape[0] // count, (part + 1) * weight.shape[0] // count
        for row in range(first, end):
            target = grad_weight.row(row)
            for column in range(size):
                target[column] = 0.0
        for bag in range(offsets.size):
            g, start, stop = grad_output.row(bag), offsets[bag], end_of(offsets, bag, indices)
            each = language.cast(1.0 / max(stop - start, 1) if mean else 1.0, weight)
            for i in range(start, stop):
                row = indices[i]
                if first <= row < end:
                    target, factor = grad_weight.row(row), factor_of(per_sample_weights, i, each)
                    for column in range(size):
                        target[column] = target[column] + factor * g[column]
                    if per_sample_weights is not None:
                        x, product = weight.row(row), language.zero(weight)
                        for column in range(size):
                            product = language.accumulate(product, x[column] * g[column])
                        grad_per_sample_weights[i] = product


# ------------------------------------------------------------------------------------------- fake


@library.register_fake("examples::embedding_bag")
def fake(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None = None,
    *,
    mean: bool = False,
) -> Tensor:
    if not weight.is_floating_point():
        raise TypeError(f"embedding_bag: weight must be floating-point, got {weight.dtype}")
    for name, given, dimensions in (
        ("weight", weight, 2), ("indices", indices, 1), ("offsets", offsets, 1)
    ):  # fmt: skip
        if given.dim() != dimensions:
            raise ValueError(
                f"embedding_bag: {name} must have {dimensions} dimension{'s' * (dimensions > 1)}, "
                f"got {given.dim()}"
            )
        if dimensions == 1 and given.dtype != torch.int64:
            raise TypeError(f"embedding_bag: {name} must be torch.int64, got {given.dtype}")
    if per_sample_weights is not None:
        if mean:
            raise ValueError("embedding_bag: per_sample_weights must be None for means")
        if not library.have_sizes(per_sample_weights.shape, indices.shape):
            raise ValueError(
                f"embedding_bag: per_sample_weights must have shape {list(indices.shape)} as "
                f"indices have, got {list(per_sample_weights.shape)}"
            )
        if per_sample_weights.dtype != weight.dtype:
            raise TypeError(
                f"embedding_bag: per_sample_weights must be {weight.dtype} as weight is, "
                f"got {per_sample_weights.dtype}"
            )
    return weight.new_empty((offsets.shape[0], weight.shape[1]))


@library.register_fake("examples::embedding_bag_backward")
def fake_backward(
    grad_output: Tensor,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None = None,
    *,
    mean: bool = False,
) -> tuple[Tensor, Tensor]:
    fake(weight, indices, offsets, per_sample_weights, mean=mean)
    # Rows are summed in float32; autograd rounds once to the table's dtype.
    compute = torch.float64 if weight.dtype == torch.float64 else torch.float32
    grad_weight = weight.new_empty(weight.shape, dtype=compute)
    # The first offset is zero, so every index belongs to a bag.
    has_weights = per_sample_weights is not None
    return grad_weight, weight.new_empty(indices.shape[0] if has_weights else 0)


# --------------------------------------------------------------------------------------- autograd


def composite(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None = None,
    *,
    mean: bool = False,
) -> Tensor:
    """Compute the same with torch's operators, for forward mode."""
    ends = torch.cat((offsets[1:], offsets.new_full((1,), indices.shape[0])))[: offsets.shape[0]]
    lengths = ends - offsets
    bags = torch.repeat_interleave(lengths)
    chosen = weight[indices]
    if per_sample_weights is not None:
        chosen = chosen * per_sample_weights[:, None]
    sums = weight.new_zeros(offsets.shape[0], weight.shape[1]).index_add(0, bags, chosen)
    return sums / lengths.clamp(min=1)[:, None] if mean else sums


library.register_autograd(
    "examples::embedding_bag", "examples::embedding_bag_backward", composite=composite
)


# ---------------------------------------------------------------------------------------- samples


def reference(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None = None,
    mean: bool = False,
) -> Tensor:
    factors = weight.new_ones(indices.shape) if per_sample_weights is None else per_sample_weights
    terms = weight[indices] * factors[:, None]
    bags = terms.tensor_split(offsets[1:].tolist()) if len(offsets) else ()
    sums = [bag.sum(0) / (max(len(bag), 1) if mean else 1) for bag in bags]
    return torch.stack(sums) if sums else weight[:0]


def sample(
    rows: int, size: int, bags: int, dtype: torch.dtype, *, weighted: bool = False, **options: Any
) -> Sample:
    """Make a sample whose second bag is empty."""
    count = 3 * max(bags - 1, 0)
    weight, factors = random("embedding_bag", (rows, size), (count,), dtype=dtype)
    indices = torch.randint(max(rows, 1), (count,), generator=torch.Generator().manual_seed(1))
    offsets = torch.tensor([0, *range(0, count + 1, 3)])[:bags]
    return Sample((weight, indices, offsets, factors if weighted else None), options)


SPEC = OpSpec(
    operator=torch.ops.examples.embedding_bag.default,
    reference=reference,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sized=lambda dtype, size: sample(size + 1, size, size, dtype),
    samples={
        "mean": lambda dtype: sample(9, 33, 5, dtype, mean=True),
        "weighted": lambda dtype: sample(9, 67, 5, dtype, weighted=True),
        "empty table": lambda dtype: sample(0, 5, 1, dtype),
    },
    essential=("size7", "weighted"),
    large=lambda dtype: sample(301, 101, 501, dtype, weighted=True),
)
