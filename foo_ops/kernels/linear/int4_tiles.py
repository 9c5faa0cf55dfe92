"""Multiply few rows by integers of 4 bits, as they are stored, in registers.

A weight is (integer - zero) * scale. A row of the output is, summed over the groups g of a column,

    scale[g] * sum((integer - 8) * left)  +  scale[g] * (8 - zero[g]) * sum(left),

of which only the first sum is over all steps: sums of the left row's groups are made once. Steps of
the left row are copied in the order in which a vector of stored integers gives them, so that these
need no shuffle, only shifts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from numba import njit

from foo_ops.kernels.compiler.processor import has_bfloat16_dot
from foo_ops.kernels.linear.few_rows import Tiles, columns_of_sums
from foo_ops.kernels.linear.parameters import quantized_argument_types
from foo_ops.kernels.products.operands import vector_product_dtype
from foo_ops.kernels.vectors.arithmetic import splat
from foo_ops.kernels.vectors.elements import ELEMENTS, compute_dtype, lanes_of
from foo_ops.kernels.vectors.integers import INT4_MIDDLE, tile_dot_int4
from foo_ops.kernels.vectors.memory import (
    address_of,
    load,
    load_vector,
    pointer_to,
    prefetch,
    prefetch_vectors,
    shift,
    store,
)
from foo_ops.kernels.vectors.pairs import PAIRS
from foo_ops.kernels.vectors.reduction import reduce_add
from foo_ops.kernels.vectors.register_tiles import tile_dot, tile_store_sums, tile_zero
from foo_ops.kernels.vectors.rows import make_copy_row, round_up
from foo_ops.kernels.vectors.transpose import transpose_adjacent

# A lane of a vector of stored integers has so many bits.
LANE_BYTES = 4


def make_int4_tiles(dtype: str, GROUP_SIZE: int) -> Tiles:
    """Make tiles that bring the next columns, their scales and zeros to the caches.

    A column of 4096 integers is half a page of memory, and what brings lines to the caches on its
    own stops at pages. On a Zen 5 a bfloat16 row reads 31 GB/s for groups of 32 and 34 for 128, and
    16 and 17 where the next columns are not brought.
    """
    compute, HALF = compute_dtype(dtype), GROUP_SIZE // 2
    LANES, BYTES = lanes_of(compute), LANE_BYTES * lanes_of(compute)
    # Groups that share a vector of integers; where a group has several vectors, they share a scale.
    GROUPS = max(1, BYTES // HALF)
    row, load_factors = _make_rows(dtype, GROUP_SIZE), _make_factors_loader(compute)
    STEP = row.step
    as_factors, as_sums = pointer_to(PAIRS if STEP == 2 else compute), pointer_to(compute)
    whole_steps, as_bytes = row.whole_steps, pointer_to("uint8")

    def make_tile(ROWS: int, COLUMNS: int) -> Callable:
        @njit
        def tile(product, right, memory, sums, width, left, depth, column):
            groups, stride = product.depth // GROUP_SIZE, product.right_column_stride
            padded = round_up(groups, LANES)
            scales, offsets = memory.factors, shift(memory.factors, COLUMNS * padded)
            for other in range(COLUMNS):
                load_factors(
                    product, column + other, groups, shift(scales, other * padded),
                    shift(offsets, other * padded),
                )  # fmt: skip
            factors = as_factors(address_of(left))
            of_groups = as_sums(address_of(shift(left, whole_steps(product.depth))))
            total = tile_zero(sums, ROWS, COLUMNS, LANES)
            for group in range(0, padded, LANES):
                total = tile_dot(
                    total, shift(of_groups, group), depth // STEP, shift(offsets, group), padded
                )
            right, count = shift(right, column * stride), product.depth // 2
            whole = count // BYTES * BYTES
            for byte in range(0, whole, BYTES):
                prefetch_vectors(right, COLUMNS * (stride + byte), BYTES, COLUMNS)
                total = tile_dot_int4(
                    total, shift(factors, byte * 2 // STEP), depth // STEP, shift(right, byte),
                    stride, shift(scales, byte // HALF), padded, GROUPS,
                )  # fmt: skip
            if whole < count:
                edges = as_bytes(address_of(memory.edges))
                for other in range(COLUMNS):
                    for byte in range(count - whole):
                        value = load(right, other * stride + whole + byte)
                        store(edges, other * BYTES + byte, value)
                total = tile_dot_int4(
                    total, shift(factors, whole * 2 // STEP), depth // STEP, edges, BYTES,
                    shift(scales, whole // HALF), padded, GROUPS,
                )  # fmt: skip
            tile_store_sums(total, sums, width)

        return tile

    def regions(depth: Any) -> dict[str, Any]:
        # A scale and an offset for each group of 32 steps or more, of at most 16 columns.
        edges = LANES * LANES if HALF % BYTES else "factors"
        return {"factors": depth + 2 * LANES * LANES, "edges": edges}

    arguments = quantized_argument_types(dtype, "uint8")
    return Tiles(
        row.left, row.row_size, row.copy_row, arguments, make_tile, columns_of_sums(LANES), regions,
        _make_mender(compute, GROUP_SIZE),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Copies of rows of the left matrix: their steps, reordered, and the sums of their groups.

    Attributes:
        left: the dtype of the steps.
        step: how many of them enter a product at a time. Sums have as many times their size.
        whole_steps: ``whole_steps(depth)`` is how many steps there are with the zeros behind them.
        row_size: ``row_size(depth)`` is how many there would be in the place of steps and sums.
        copy_row: ``copy_row(target, source, stride, depth, row_size)`` makes a copy.
    """

    left: str
    step: int
    whole_steps: Callable
    row_size: Callable
    copy_row: Callable


def _make_rows(dtype: str, GROUP_SIZE: int) -> _Rows:
    compute, HALF = compute_dtype(dtype), GROUP_SIZE // 2
    LANES = lanes_of(compute)
    # Lookups of bfloat16 have 16 numbers, so many of which a vector must hold.
    use_pairs = vector_product_dtype(dtype) == PAIRS and has_bfloat16_dot() and LANES >= 8
    STEP = 2 if use_pairs else 1
    left = dtype if use_pairs else compute
    # A part of a vector of integers is what the same shift brings out of all its lanes.
    BYTES, PART = LANE_BYTES * LANES, STEP * LANES
    SIZE, STEPS = LANE_BYTES // STEP, 2 * BYTES
    # Bytes of a group in a vector of integers.
    COUNT, as_sums, none = min(BYTES, HALF), pointer_to(compute), ELEMENTS[compute].compute(0)

    @njit
    def whole_steps(depth):
        return round_up(depth, STEPS)

    @njit
    def row_size(depth):
        return whole_steps(depth) + STEP * round_up(depth // GROUP_SIZE, LANES)

    @njit
    def copy_row(target, source, stride, depth, row_size):
        # The steps of the source are adjacent.
        whole, groups = whole_steps(depth), depth // GROUP_SIZE
        for step in range(depth // STEPS * STEPS, whole, LANES):
            store(target, step, splat(none, LANES))
        sums = as_sums(address_of(shift(target, whole)))
        for group in range(groups):
            line = shift(source, group * GROUP_SIZE)
            for index in range(0, HALF, COUNT):
                byte = group * HALF + index
                place = shift(target, byte // BYTES * STEPS + byte % BYTES // SIZE)
                lower, upper = shift(line, index), shift(line, index + HALF)
                transpose_adjacent(place, 2 * PART, lower, COUNT // SIZE, SIZE)
                transpose_adjacent(shift(place, PART), 2 * PART, upper, COUNT // SIZE, SIZE)
            total = splat(none, LANES)
            for step in range(0, GROUP_SIZE, LANES):
                total = total + load_vector(line, step, LANES)
            store(sums, group, reduce_add(total))
        for group in range(groups, round_up(groups, LANES)):
            store(sums, group, none)

    return _Rows(left, STEP, whole_steps, row_size, copy_row)


def _make_factors_loader(compute: str) -> Callable:
    """Make ``load_factors(product, column, groups, scales, offsets)`` of a column's groups, with
    zeros behind them: scale, and scale * (8 - zero). Those of the next column it brings to the
    caches.
    """
    LANES, copy_row = lanes_of(compute), make_copy_row(compute)
    middle = ELEMENTS[compute].compute(INT4_MIDDLE)

    @njit
    def load_factors(product, column, groups, scales, offsets):
        scale = shift(product.scale, column * product.scale_column_stride)
        zero = shift(product.zero, column * product.zero_column_stride)
        padded = round_up(groups, LANES)
        next_scale = shift(scale, product.scale_column_stride)
        next_zero = shift(zero, product.zero_column_stride)
        copy_row(scales, scale, product.scale_group_stride, groups, padded)
        copy_row(offsets, zero, product.zero_group_stride, groups, padded)
        for group in range(0, padded, LANES):
            prefetch(next_scale, group * product.scale_group_stride)
            prefetch(next_zero, group * product.zero_group_stride)
            above = splat(middle, LANES) - load_vector(offsets, group, LANES)
            store(offsets, group, above * load_vector(scales, group, LANES))

    return load_factors


def _make_mender(compute: str, GROUP_SIZE: int) -> Callable:
    """Make ``mend(product, block, memory, width, panel)``: sums that are not finite, once more.

    In the two sums that a row of the output is taken from, infinities and numbers near the largest
    may come to inf - inf, where the weights themselves give a number or an infinity.
    """
    HALF, NUMBER = GROUP_SIZE // 2, ELEMENTS[compute].compute
    none = NUMBER(0)

    @njit
    def has_nan(left, stride, depth):
        for step in range(depth):
            value = load(left, step * stride)
            if value != value:
                return True
        return False

    @njit
    def multiply(product, left, column):
        right = shift(product.right, column * product.right_column_stride)
        scales = shift(product.scale, column * product.scale_column_stride)
        zeros = shift(product.zero, column * product.zero_column_stride)
        total = none
        for group in range(product.depth // GROUP_SIZE):
            scale = load(scales, group * product.scale_group_stride)
            zero = load(zeros, group * product.zero_group_stride)
            for index in range(HALF):
                byte = load(right, group * HALF + index)
                step = (group * GROUP_SIZE + index) * product.left_step_stride
                total += load(left, step) * ((NUMBER(byte & 15) - zero) * scale)
                step += HALF * product.left_step_stride
                total += load(left, step) * ((NUMBER(byte >> 4) - zero) * scale)
        return total

    @njit
    def mend(product, block, memory, width, panel):
        for row in range(block.row_stop - block.row_start):
            sums = shift(memory.sums, row * width)
            left = shift(product.left, (block.row_start + row) * product.left_row_stride)
            for column in range(block.column_stop - block.column_start):
                value = load(sums, column)
                if value - value != 0:
                    if has_nan(left, product.left_step_stride, product.depth):
                        break
                    store(sums, column, multiply(product, left, block.column_start + column))

    return mend
