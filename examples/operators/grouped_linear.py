"""A product of rows with one matrix per group of rows, such as tokens and their experts.

    output[m] = input[m] @ weight[g],  offsets[g - 1] <= m < offsets[g]

The rows are sorted by group, and ``offsets`` has the end of each group, as for torch._grouped_mm.
Rows behind the last group have no matrix, and give zeros.

Shows tiles of a fixed number of rows, whatever the groups, so that uneven groups keep all threads
busy: a tile multiplies the part of each group in it. Its gradients are the same operator with
transposed weights, and one other, and so are theirs, of every order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foo_ops import language, library
from foo_ops.testing import OpSpec, Sample, random

TAGS = torch.Tag.pt2_compliant_tag
library.define(
    "examples::grouped_linear", "(Tensor input, Tensor weight, Tensor offsets) -> Tensor", tags=TAGS
)
library.define(
    "examples::grouped_outer", "(Tensor input, Tensor other, Tensor offsets) -> Tensor", tags=TAGS
)


def grouped_linear(input: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply rows of ``input`` (M, K) by the matrices of their groups in ``weight`` (G, K, N).

    ``offsets`` (G,), int32 or int64, are the non-decreasing ends of the groups.
    """
    return torch.ops.examples.grouped_linear(input, weight, offsets)


# ---------------------------------------------------------------------------------------- kernels

ROWS, COLUMNS = 256, 512


def parts(size: Any, most: Any) -> Any:
    return (size + most - 1) // most


def refuse(input: Tensor, offsets: Tensor) -> None:
    raise ValueError(
        f"grouped_linear: offsets must not decrease and be in [0, {input.shape[0]}], the rows of "
        f"input, got {offsets.tolist()}"
    )


@library.register_kernel("examples::grouped_linear", ("cpu", "foo"))
@library.tile_kernel(
    # At least one, which checks the offsets.
    tiles=lambda input, weight: max(
        parts(input.shape[0], ROWS) * parts(weight.shape[2], COLUMNS), 1
    ),
    refuse=refuse,
)
def linear_kernel(input: Any, weight: Any, offsets: Any, output: Any, tiles: Any) -> bool:
    rows, columns = output.shape[0], output.shape[1]
    down = max(parts(rows, ROWS), 1)
    for tile in tiles:
        # Tiles of the same columns are adjacent, since they read the same weights.
        first, left = tile % down * ROWS, tile // down * COLUMNS
        last, right = min(first + ROWS, rows), min(left + COLUMNS, columns)
        start = 0
        for group in range(offsets.size):
            stop = offsets[group]
            if not start <= stop <= rows:
                return False
            i, j = max(first, start), min(last, stop)
            if i < j:
                language.dot(output[i:j, left:right], input[i:j], weight[group, :, left:right])
            start = stop
        for row in range(max(first, start), last):
            for column in range(left, right):
                output[row, column] = 0.0
    return True


@library.register_kernel("examples::grouped_outer", ("cpu", "foo"))
@library.tile_kernel(
    tiles=lambda input, other, offsets: max(
        offsets.size * parts(input.shape[1], ROWS) * parts(other.shape[1], COLUMNS), 1
    ),
    refuse=refuse,
)
def outer_kernel(input: Any, other: Any, offsets: Any, output: Any, tiles: Any) -> bool:
    """Multiply the transposed input rows of each group by the other rows, giving (G, K, N)."""
    down = max(parts(input.shape[1], ROWS), 1)
    across = max(parts(other.shape[1], COLUMNS), 1)
    for tile in tiles:
        group, part = tile // (down * across), tile % (down * across)
        if group >= offsets.size:
            continue
        start, stop = 0 if group == 0 else offsets[group - 1], offsets[group]
        if not 0 <= start <= stop <= input.shape[0]:
            return False
        k, n = part // across * ROWS, part % across * COLUMNS
        language.dot(
            output[group, k : k + ROWS, n : n + COLUMNS],
            input[start:stop, k : k + ROWS].T,
            other[start:stop, n : n + COLUMNS],
        )
    return True


# ------------------------------------------------------------------------------------------- fake


def check(input: Tensor, offsets: Tensor, groups: int | None = None) -> None:
    if not input.is_floating_point():
        raise TypeError(f"grouped_linear: input must be floating-point, got {input.dtype}")
    if input.dim() != 2:
        raise ValueError(f"grouped_linear: input must have 2 dimensions, got {input.dim()}")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"grouped_linear: offsets must be torch.int32 or torch.int64, got {offsets.dtype}"
        )
    if offsets.dim() != 1 or not library.holds(groups is None or offsets.shape[0] == groups):
        size = "G" if groups is None else groups
        raise ValueError(
            f"grouped_linear: offsets must have shape [{size}], one for each group, "
            f"got {list(offsets.shape)}"
        )


@library.register_fake("examples::grouped_linear")
def fake(input: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    if weight.dim() != 3:
        raise ValueError(f"grouped_linear: weight must have 3 dimensions, got {weight.dim()}")
    check(input, offsets, weight.shape[0])
    if not library.holds(weight.shape[1] == input.shape[1]):
        raise ValueError(
            f"grouped_linear: weight must have shape [G, {input.shape[1]}, N] as input has "
            f"columns, got {list(weight.shape)}"
        )
    if weight.dtype != input.dtype:
        raise TypeError(
            f"grouped_linear: weight must be {input.dtype} as input is, got {weight.dtype}"
        )
    return input.new_empty(input.shape[0], weight.shape[2])


@library.register_fake("examples::grouped_outer")
def fake_outer(input: Tensor, other: Tensor, offsets: Tensor) -> Tensor:
    check(input, offsets)
    if other.dim() != 2 or not library.holds(other.shape[0] == input.shape[0]):
        raise ValueError(
            f"grouped_linear: other must have shape [{input.shape[0]}, N] as input has rows, "
            f"got {list(other.shape)}"
        )
    return input.new_empty(offsets.shape[0], input.shape[1], other.shape[1])


# --------------------------------------------------------------------------------------- autograd


def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    input, weight, offsets = ctx.saved_tensors
    operators, needs = torch.ops.examples, ctx.needs_input_grad
    if input.dtype == torch.bfloat16:
        # The kernel multiplies pairs of adjacent numbers in a row, here a row of the transpose.
        # With a copy in which pairs are adjacent, the product takes a third of the time.
        input = input.mT.contiguous().mT
    return (
        operators.grouped_linear(grad, weight.mT, offsets) if needs[0] else None,
        operators.grouped_outer(input, grad, offsets) if needs[1] else None,
        None,
    )


def outer_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    input, other, offsets = ctx.saved_tensors
    grouped_linear, needs = torch.ops.examples.grouped_linear, ctx.needs_input_grad
    return (
        grouped_linear(other, grad.mT, offsets) if needs[0] else None,
        grouped_linear(input, grad, offsets) if needs[1] else None,
        None,
    )


library.register_autograd("examples::grouped_linear", backward, setup_context=setup_context)
library.register_autograd("examples::grouped_outer", outer_backward, setup_context=setup_context)


# ---------------------------------------------------------------------------------------- samples


def reference(input: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply each row by the matrix of its group, or by zeros."""
    groups = torch.searchsorted(offsets, torch.arange(input.shape[0]), right=True)
    matrices = torch.cat((weight, torch.zeros_like(weight[:1])))[groups] if len(weight) else None
    if matrices is None:
        return input.new_zeros(input.shape[0], weight.shape[2]) * input.sum()
    return (input[:, :, None] * matrices).sum(1)


def sample(rows: int, k: int, n: int, ends: list[int], dtype: torch.dtype) -> Sample:
    input, weight = random("grouped", (rows, k), (len(ends), k, n), dtype=dtype)
    return Sample((input, weight / max(k, 1) ** 0.5, torch.tensor(ends, dtype=torch.int32)))


SPEC = OpSpec(
    operator=torch.ops.examples.grouped_linear.default,
    reference=reference,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sized=lambda dtype, size: sample(2 * size, size, size + 3, [size // 2, size, size], dtype),
    samples={
        "all in one": lambda dtype: sample(9, 5, 3, [0, 9, 9], dtype),
        "rows of no group": lambda dtype: sample(9, 5, 3, [2, 6], dtype),
        "no inner columns": lambda dtype: sample(4, 0, 3, [1, 4], dtype),
        "several tiles": lambda dtype: sample(150, 17, 300, [30, 131, 150], dtype),
    },
    sizes=(0, 1, 7),
    essential=("size7", "rows of no group"),
    large=lambda dtype: sample(301, 101, 301, [0, 7, 190, 301], dtype),
)
