"""Add the bias to the sums of a block, and round once."""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.vectors.elements import compute_dtype, lanes_of
from foo_ops.kernels.vectors.memory import load, load_vector, shift, store
from foo_ops.kernels.vectors.rows import make_copy_row, make_fill


@functools.cache
def make_writer(dtype: str) -> Callable:
    """Make ``write(product, block, memory, width, panel)``.

    The sums are panels of ``width`` columns, which are ``panel`` elements after one another.
    """
    compute = compute_dtype(dtype)
    LANES, fill, copy_row = lanes_of(compute), make_fill(compute), make_copy_row(compute)

    @njit
    def write(product, block, memory, width, panel):
        columns = block.column_stop - block.column_start
        if product.has_bias:
            source = shift(product.bias, block.column_start * product.bias_stride)
            copy_row(memory.bias, source, product.bias_stride, columns, columns)
        else:
            fill(memory.bias, columns, 0.0)
        for row in range(block.row_start, block.row_stop):
            line = shift(product.output, row * product.output_row_stride + block.column_start)
            for start in range(0, columns, width):
                stop = min(width, columns - start)
                sums = shift(memory.sums, start // width * panel + (row - block.row_start) * width)
                target, bias = shift(line, start), shift(memory.bias, start)
                whole = stop // LANES * LANES
                for column in range(0, whole, LANES):
                    value = load_vector(sums, column, LANES) + load_vector(bias, column, LANES)
                    store(target, column, value)
                for column in range(whole, stop):
                    store(target, column, load(sums, column) + load(bias, column))

    return write
