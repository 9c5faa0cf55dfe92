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
    def load_bias(product, block, memory, row):
        columns = block.column_stop - block.column_start
        if not product.has_bias:
            fill(memory.bias, columns, 0.0)
            return
        place = row * product.bias_row_stride + block.column_start * product.bias_column_stride
        source = shift(product.bias, place)
        copy_row(memory.bias, source, product.bias_column_stride, columns, columns)

    @njit
    def write_row(target, stride, sums, bias, count):
        whole = count // LANES * LANES if stride == 1 else 0
        for column in range(0, whole, LANES):
            value = load_vector(sums, column, LANES) + load_vector(bias, column, LANES)
            store(target, column, value)
        for column in range(whole, count):
            store(target, column * stride, load(sums, column) + load(bias, column))

    @njit
    def write(product, block, memory, width, panel):
        columns, stride = block.column_stop - block.column_start, product.output_column_stride
        for row in range(block.row_start, block.row_stop):
            if row == block.row_start or product.bias_row_stride != 0:
                load_bias(product, block, memory, row)
            line = shift(
                product.output, row * product.output_row_stride + block.column_start * stride
            )
            for start in range(0, columns, width):
                place = start // width * panel + (row - block.row_start) * width
                write_row(
                    shift(line, start * stride), stride, shift(memory.sums, place),
                    shift(memory.bias, start), min(width, columns - start),
                )  # fmt: skip

    return write
