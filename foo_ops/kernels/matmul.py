"""The one matrix product that attention is made of, on register tiles."""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.simd import (
    ELEMENTS,
    shift,
    tile_fma,
    tile_load,
    tile_store,
    tile_zero,
    vector_bits,
    vector_registers,
)


def lanes_of(dtype: str) -> int:
    """Number of elements of a compute dtype in a vector."""
    return vector_bits() // 8 // ELEMENTS[dtype].size


@functools.cache
def matmul_of(dtype: str) -> Callable:
    """The matrix product for one compute dtype, float32 or float64.

    ``matmul(c, c_stride, a, a_row_stride, a_step_stride, b, b_stride, rows, columns, steps,
    accumulate)`` computes, for row < rows and column < columns,

        c[row, column] = sum over step of a[row, step] * b[step, column]   (+ c if accumulate)

    Elements of a, at any strides, are broadcast; rows of b and c are vectors of adjacent elements.
    ``columns`` must be a multiple of the vector's lanes.
    """
    lanes = lanes_of(dtype)
    # With 16 registers 12 sums, 3 vectors of b and 1 element of a fill them all. With 32, 4 x 4
    # has enough independent sums to hide the latency of fma.
    widest = 3 if vector_registers() == 16 else 4
    panel, pair, single = (_panel(dtype, columns) for columns in (widest, 2, 1))
    panel_width, pair_width = widest * lanes, 2 * lanes

    @njit
    def matmul(c, c_stride, a, a_row, a_step, b, b_stride, rows, columns, steps, accumulate):
        start = 0
        while columns - start >= panel_width:
            panel(
                shift(c, start), c_stride, a, a_row, a_step,
                shift(b, start), b_stride, rows, steps, accumulate,
            )  # fmt: skip
            start += panel_width
        while columns - start >= pair_width:
            pair(
                shift(c, start), c_stride, a, a_row, a_step,
                shift(b, start), b_stride, rows, steps, accumulate,
            )  # fmt: skip
            start += pair_width
        if start < columns:
            single(
                shift(c, start), c_stride, a, a_row, a_step,
                shift(b, start), b_stride, rows, steps, accumulate,
            )  # fmt: skip

    return matmul


def _panel(dtype: str, columns: int) -> Callable:
    """The product for ``columns`` vectors: four rows at a time, then row by row."""
    four_rows, one_row = _tile(dtype, 4, columns), _tile(dtype, 1, columns)

    @njit
    def panel(c, c_stride, a, a_row, a_step, b, b_stride, rows, steps, accumulate):
        row = 0
        while row + 4 <= rows:
            four_rows(
                shift(c, row * c_stride), c_stride, shift(a, row * a_row), a_row, a_step,
                b, b_stride, steps, accumulate,
            )  # fmt: skip
            row += 4
        while row < rows:
            one_row(
                shift(c, row * c_stride), c_stride, shift(a, row * a_row), a_row, a_step,
                b, b_stride, steps, accumulate,
            )  # fmt: skip
            row += 1

    return panel


def _tile(dtype: str, ROWS: int, COLUMNS: int) -> Callable:  # noqa: N803
    """The product for a tile of c that stays in registers over all steps."""
    LANES = lanes_of(dtype)  # noqa: N806

    @njit
    def tile_product(c, c_stride, a, a_row, a_step, b, b_stride, steps, accumulate):
        if accumulate:
            sums = tile_load(c, c_stride, ROWS, COLUMNS, LANES)
        else:
            sums = tile_zero(c, ROWS, COLUMNS, LANES)
        for step in range(steps):
            sums = tile_fma(sums, shift(a, step * a_step), a_row, shift(b, step * b_stride))
        tile_store(sums, c, c_stride)

    return tile_product
