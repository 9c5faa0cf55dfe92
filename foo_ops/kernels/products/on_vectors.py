"""Multiply matrices on register tiles."""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.compiler.processor import vector_registers
from foo_ops.kernels.simd.memory import CACHE_LINE, prefetch, shift
from foo_ops.kernels.simd.narrow import PAIRS
from foo_ops.kernels.simd.register_tiles import (
    tile_add,
    tile_fma,
    tile_store,
    tile_store_sums_of_pairs,
    tile_zero,
)
from foo_ops.kernels.simd.types import lanes_of


def shapes() -> tuple[tuple[int, int], ...]:
    """Return the numbers of rows and vectors of the register tiles, the widest first."""
    if vector_registers() == 16:
        # 12 sums, 3 vectors of b and 1 element of a fill them all.
        return (4, 3), (4, 2), (8, 1)
    # 16 independent sums hide the latency of fma, and heads of 64 are 4 vectors of 16 lanes.
    return (4, 4), (8, 2), (8, 1)


def tall_shape() -> tuple[int, int]:
    """Return the numbers of rows and vectors of the tile that reads the least of b, for many rows.

    With it, b stays in L1. A tile of more vectors reads b from L2, which takes a fifth of the time
    of float32 on a processor with AVX-512.
    """
    return (6 if vector_registers() == 16 else 12), 2


# Rows of the tiles for the rows that tall tiles leave.
REST = 4
# Steps per iteration of the loop. If another thread shares the core, as a neighbour of a virtual
# machine may, each instruction counts: with 4 instead of 1, a Zen 3 takes 0.86 of the time, and
# with 8 0.84.
UNROLLED = 4


@functools.cache
def make_next_register_panel(dtype: str) -> Callable:
    """Make ``next_panel(columns)``: the number of columns that the next register tile takes."""
    lanes = lanes_of(dtype)
    widest, pair, _ = (vectors * lanes for _, vectors in shapes())
    # Two tiles of two vectors are faster than one of three and one of one.
    halved = 2 * pair if 2 * pair == widest + lanes else 0

    @njit
    def next_panel(columns):
        if columns >= widest and columns != halved:
            return widest
        return pair if columns >= pair else lanes

    return next_panel


@functools.cache
def make_matmul(c: str, a: str, b: str) -> Callable:
    """Make the matrix product for a compute dtype c, and dtypes a and b with that compute dtype.

    ``matmul(c, c_stride, a, a_row_stride, a_step_stride, b, b_stride, rows, columns, steps,
    accumulate)`` computes, for row < rows and column < columns,

        c[row, column] = sum over step of a[row, step] * b[step, column]   (+ c if accumulate)

    Elements of a, at any strides, are broadcast; rows of b and c are vectors of adjacent elements.
    ``columns`` must be a multiple of the vector's lanes. Where a and b are both bfloat16x2, a step
    is a pair.
    """
    lanes = lanes_of(c)
    panel, pair, single = (make_panel_product((c, a, b), *shape) for shape in shapes())
    next_panel = make_next_register_panel(c)

    @njit
    def matmul(c, c_stride, a, a_row, a_step, b, b_stride, rows, columns, steps, accumulate):
        start = 0
        while start < columns:
            width = next_panel(columns - start)
            sums, vectors = shift(c, start), shift(b, start)
            if width == lanes:
                single(
                    sums, c_stride, a, a_row, a_step, vectors, b_stride, rows, steps, accumulate,
                    None,
                )  # fmt: skip
            elif width == 2 * lanes:
                pair(
                    sums, c_stride, a, a_row, a_step, vectors, b_stride, rows, steps, accumulate,
                    None,
                )  # fmt: skip
            else:
                panel(
                    sums, c_stride, a, a_row, a_step, vectors, b_stride, rows, steps, accumulate,
                    None,
                )  # fmt: skip
            start += width

    return matmul


@functools.cache
def make_tall_matmul(c: str, a: str, b: str, CHUNK: int, ROW_STRIDE: int) -> Callable:
    """Like `make_matmul`, for many rows, and for the columns of one tile of `tall_shape`.

    Its further argument ``ahead`` has the lines that it prefetches, some for each ``CHUNK`` steps,
    or none if that is 0: see `_make_prefetching_sum`. Columns of one vector use tiles of the same
    rows, since callers cut rows for them: with tiles of 8, the last 4 of 12 rows, one by one, would
    wait for each sum, and take twice as long.
    """
    lanes = lanes_of(c)
    rows, vectors = tall_shape()
    pair = make_panel_product((c, a, b), rows, vectors, CHUNK, ROW_STRIDE)
    single = make_panel_product((c, a, b), rows, 1, CHUNK, ROW_STRIDE)

    @njit
    def matmul(c, c_stride, a, a_row, a_step, b, b_stride, rows, columns, steps, accumulate, ahead):
        if columns > lanes:
            pair(c, c_stride, a, a_row, a_step, b, b_stride, rows, steps, accumulate, ahead)
        else:
            single(c, c_stride, a, a_row, a_step, b, b_stride, rows, steps, accumulate, ahead)

    return matmul


@functools.cache
def make_panel_product(
    dtypes: tuple[str, str, str], ROWS: int, COLUMNS: int, CHUNK: int = 0, ROW_STRIDE: int = 0
) -> Callable:
    """Make the matrix product of a panel of ``COLUMNS`` vectors, for dtypes c, a and b.

    It computes ``ROWS`` rows at a time, then some, then row by row. The sums of a tile of c stay in
    registers over all steps. The previous values of c are added at the end: one sum over thousands
    of keys or queries would round each step to that sum's precision, while the sum of each tile is
    as exact as a sum of few. With ``CHUNK``, tiles of several rows prefetch.
    """
    LANES = lanes_of(dtypes[0])
    has_rest = ROWS > REST and ROWS * COLUMNS > 2 * REST
    unrolled = UNROLLED if COLUMNS > 1 else 1
    sums = make_sum(unrolled, ROW_STRIDE), make_sum(1), make_sum(1)
    heights = (ROWS, REST if has_rest else 1, 1)
    store_tile = tile_store_sums_of_pairs if dtypes[1] == PAIRS else tile_store
    most, some, single = (
        _make_rows(
            LANES,
            height,
            COLUMNS,
            store_tile,
            _make_prefetching_sum(add, CHUNK) if CHUNK and height > 1 else add,
        )
        for height, add in zip(heights, sums, strict=True)
    )

    @njit
    def product(c, c_stride, a, a_row, a_step, b, b_stride, rows, steps, accumulate, ahead):
        row = most(c, c_stride, a, a_row, a_step, b, b_stride, 0, rows, steps, accumulate, ahead)
        row = some(c, c_stride, a, a_row, a_step, b, b_stride, row, rows, steps, accumulate, ahead)
        single(c, c_stride, a, a_row, a_step, b, b_stride, row, rows, steps, accumulate, ahead)

    return product


def _make_rows(
    LANES: int, ROWS: int, COLUMNS: int, store_tile: Callable, add_products: Callable
) -> Callable:
    """Make the product of ``ROWS`` rows at a time, from ``row`` on; it returns the next row."""

    @njit
    def multiply(c, c_stride, a, a_row, a_step, b, b_stride, row, rows, steps, accumulate, ahead):
        while row + ROWS <= rows:
            target, factors = shift(c, row * c_stride), shift(a, row * a_row)
            sums = tile_zero(c, ROWS, COLUMNS, LANES)
            sums = add_products(sums, factors, a_row, a_step, b, b_stride, steps, ahead)
            if accumulate:
                sums = tile_add(sums, target, c_stride)
            store_tile(sums, target, c_stride)
            row += ROWS
        return row

    return multiply


def make_sum(STEPS: int, ROW_STRIDE: int = 0) -> Callable:
    """Make ``add_products(sums, a, a_row, a_step, b, b_stride, steps, ahead)`` of a tile.

    Its loop is unrolled by ``STEPS`` steps; ``ahead`` is for sums that prefetch. If rows are
    ``ROW_STRIDE`` apart, which is 0 for none, one register has all addresses. Otherwise those of 12
    rows leave too few for other numbers: 96 multiply-adds have up to 211 instructions instead of
    157, and a Skylake, which multiplies them in 48 cycles, begins 192 in that time.
    """

    @njit
    def add_steps(sums, a, a_row, a_step, b, b_stride, start, steps):
        for step in range(start, steps):
            factors, vectors = shift(a, step * a_step), shift(b, step * b_stride)
            sums = tile_fma(sums, factors, a_row, a_step, vectors, b_stride, 1)
        return sums

    @njit
    def add_one_by_one(sums, a, a_row, a_step, b, b_stride, steps, ahead):
        return add_steps(sums, a, a_row, a_step, b, b_stride, 0, steps)

    @njit
    def add_unrolled(sums, a, a_row, a_step, b, b_stride, steps, ahead):
        # With a stride of 1, offsets are constants in the instructions' addresses.
        whole = steps // STEPS * STEPS if a_step == 1 or a_row == 1 else 0
        if ROW_STRIDE > 0 and a_row == ROW_STRIDE and a_step == 1:
            for step in range(0, whole, STEPS):
                factors, vectors = shift(a, step), shift(b, step * b_stride)
                sums = tile_fma(sums, factors, ROW_STRIDE, 1, vectors, b_stride, STEPS)
        elif a_step == 1:
            for step in range(0, whole, STEPS):
                factors, vectors = shift(a, step), shift(b, step * b_stride)
                sums = tile_fma(sums, factors, a_row, 1, vectors, b_stride, STEPS)
        else:
            for step in range(0, whole, STEPS):
                factors, vectors = shift(a, step * a_step), shift(b, step * b_stride)
                sums = tile_fma(sums, factors, 1, a_step, vectors, b_stride, STEPS)
        return add_steps(sums, a, a_row, a_step, b, b_stride, whole, steps)

    return add_one_by_one if STEPS == 1 else add_unrolled


def _make_prefetching_sum(add_products: Callable, CHUNK: int) -> Callable:
    """Make the sum of a tile that prefetches the lines ``ahead``, chunk by chunk of steps.

    These are a pointer to bytes, the number of rows and their distance, the number of lines of a
    row in a chunk, the number of chunks and their distance: `foo_ops.kernels.linear.packing`.
    """

    @njit
    def add_and_prefetch(sums, a, a_row, a_step, b, b_stride, steps, ahead):
        place, rows, stride, lines, chunks, distance = ahead
        for step in range(0, steps, CHUNK):
            # A call would spill the sums.
            for row in range(rows if chunks > 0 else 0):
                for line in range(lines):
                    prefetch(place, row * stride + line * CACHE_LINE)
            place, chunks = shift(place, distance), chunks - 1
            factors, vectors = shift(a, step * a_step), shift(b, step * b_stride)
            count = min(CHUNK, steps - step)
            sums = add_products(sums, factors, a_row, a_step, vectors, b_stride, count, ahead)
        return sums

    return add_and_prefetch
