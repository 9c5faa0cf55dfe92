"""The one matrix product that attention is made of, on register tiles."""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import njit
from numba.core import types

from foo_ops.kernels.simd import (
    ELEMENTS,
    Pointer,
    shift,
    tile_fma,
    tile_load,
    tile_store,
    tile_zero,
)
from foo_ops.kernels.target import vector_bits, vector_registers


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

    @njit(_signature(dtype, sizes=3))
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


def _panel(dtype: str, COLUMNS: int) -> Callable:  # noqa: N803
    """The product for ``COLUMNS`` vectors: four rows at a time, then row by row.

    The sums of a tile of c stay in registers over all steps.
    """
    LANES = lanes_of(dtype)  # noqa: N806

    @njit(_signature(dtype, sizes=2))
    def panel(c, c_stride, a, a_row, a_step, b, b_stride, rows, steps, accumulate):
        row = 0
        while row + 4 <= rows:
            target, factors = shift(c, row * c_stride), shift(a, row * a_row)
            if accumulate:
                sums = tile_load(target, c_stride, 4, COLUMNS, LANES)
            else:
                sums = tile_zero(c, 4, COLUMNS, LANES)
            for step in range(steps):
                factor, vectors = shift(factors, step * a_step), shift(b, step * b_stride)
                sums = tile_fma(sums, factor, a_row, vectors)
            tile_store(sums, target, c_stride)
            row += 4
        while row < rows:
            target, factors = shift(c, row * c_stride), shift(a, row * a_row)
            if accumulate:
                row_sums = tile_load(target, c_stride, 1, COLUMNS, LANES)
            else:
                row_sums = tile_zero(c, 1, COLUMNS, LANES)
            for step in range(steps):
                factor, vectors = shift(factors, step * a_step), shift(b, step * b_stride)
                row_sums = tile_fma(row_sums, factor, a_row, vectors)
            tile_store(row_sums, target, c_stride)
            row += 1

    return panel


def _signature(dtype: str, sizes: int) -> types.Type:
    """Of matmul and its panels. Without it Numba compiles them anew for each constant passed."""
    pointer, size = Pointer(dtype), types.int64
    return types.void(
        *(pointer, size), *(pointer, size, size), *(pointer, size), *(size,) * sizes, types.boolean
    )
