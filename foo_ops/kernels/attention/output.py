"""Write the results of a block: output and logsumexp, those of a key split, or grad_query."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
from numba import njit

from foo_ops.kernels.attention.operands import make_next_panel
from foo_ops.kernels.attention.parameters import LOG2, dim_name_of
from foo_ops.kernels.attention.rows import make_operand_row
from foo_ops.kernels.lang.scratch import field, row_of
from foo_ops.kernels.math.exponential import log
from foo_ops.kernels.simd.arithmetic import absolute, fma, less, select, splat
from foo_ops.kernels.simd.memory import load, load_vector, shift, store
from foo_ops.kernels.simd.transpose import (
    make_copy_row,
    make_fill,
    make_transpose,
    transpose_products,
)
from foo_ops.kernels.simd.types import ELEMENTS, compute_dtype, lanes_of


@functools.cache
def make_finish(dtype: str) -> Callable:
    """Make ``finish(parameters, piece, largest, total, factors, is_key_split)``, which writes
    logsumexps.

    For a key split it writes largest score and sum instead, from which the logsumexp is merged.
    ``factors`` gets what each row's sums have to be multiplied by; ``total`` is overwritten.
    """
    compute, LANES = ELEMENTS[dtype].compute, lanes_of(compute_dtype(dtype))
    copy_row, fill = make_copy_row(compute_dtype(dtype)), make_fill(compute_dtype(dtype))
    SMALLEST, LARGEST = (
        float(getattr(np.finfo(compute_dtype(dtype)), name)) for name in ("tiny", "max")
    )

    @njit
    def finish_rows(largest, total, factors, block_row, dropout_scale):
        zero, smallest = splat(compute(0.0), LANES), splat(compute(SMALLEST), LANES)
        top, sum_ = load_vector(largest, block_row, LANES), load_vector(total, block_row, LANES)
        # The sum is zero for a query that sees nothing, and its output is zero.
        factor = select(less(sum_, smallest), zero, splat(compute(dropout_scale), LANES) / sum_)
        store(factors, block_row, factor)
        logsumexp = fma(top, splat(compute(LOG2), LANES), log(sum_))
        # The sum is NaN for a score of +infinity, whose logsumexp is nevertheless +infinity.
        is_infinite = less(splat(compute(LARGEST), LANES), top)
        logsumexp = select(is_infinite, top, logsumexp)
        # Finite scores end at 0.9955 of the largest number, in units of log 2: see lowest_score.
        size, largest_number = absolute(top), splat(compute(LARGEST), LANES)
        end = select(less(zero, top), largest_number, zero - largest_number)
        end_or_nan = end + logsumexp * zero
        is_end = less(splat(compute(0.9954 * LARGEST), LANES), size)
        is_finite = less(size, splat(compute(math.inf), LANES))
        logsumexp = select(is_finite, select(is_end, end_or_nan, logsumexp), logsumexp)
        store(total, block_row, logsumexp)

    @njit
    def finish(parameters, piece, largest, total, factors, is_key_split):
        count = piece.query_count
        rows = piece.heads * count
        if is_key_split:
            largest_row = row_of(parameters, "partial_largest", piece.key_split, piece.slot, 0)
            total_row = row_of(parameters, "partial_total", piece.key_split, piece.slot, 0)
            copy_row(largest_row, largest, 1, rows, rows)
            copy_row(total_row, total, 1, rows, rows)
            fill(factors, rows, 1.0)
            return
        for block_row in range(0, rows, LANES):
            finish_rows(largest, total, factors, block_row, parameters.dropout_scale)
        query, stride = piece.query_offset + piece.query_start, parameters.logsumexp_row_stride
        for index in range(piece.heads):
            target = row_of(parameters, "logsumexp", piece.batch, piece.head + index, query)
            for row in range(count):
                store(target, row * stride, load(total, index * count + row))

    return finish


@functools.cache
def make_row_writer(dtype: str, operand: str) -> Callable:
    """Make ``write(parameters, piece, source, factor, block_row, column, count, is_key_split)``.

    It writes ``count`` columns, from ``column`` on, of a row of the block, multiplied by the
    factor. For a key split the output goes to partial_output.
    """
    LANES, operand_row = lanes_of(compute_dtype(dtype)), make_operand_row(operand)
    may_be_key_split = operand == "output"

    @njit
    def write_row(target, source, factor, count):
        factors, whole = splat(factor, LANES), count // LANES * LANES
        for column in range(0, whole, LANES):
            store(target, column, load_vector(source, column, LANES) * factors)
        for column in range(whole, count):
            store(target, column, load(source, column) * factor)

    @njit
    def write(parameters, piece, source, factor, block_row, column, count, is_key_split):
        if may_be_key_split and is_key_split:
            target = row_of(parameters, "partial_output", piece.key_split, piece.slot, block_row)
            write_row(shift(target, column), source, factor, count)
        else:
            write_row(
                shift(operand_row(parameters, piece, block_row), column), source, factor, count
            )

    return write


@functools.cache
def make_panel_writer(dtype: str, operand: str) -> Callable:
    """Make ``write(parameters, piece, panels, factors, width, columns, scratch)`` for an operand's
    rows.

    The rows are the columns of the panels, each multiplied by its factor. A panel has ``width``
    rows, and all together have ``columns`` columns. ``scratch`` has room for a square of vectors.
    """
    LANES = lanes_of(compute_dtype(dtype))
    next_panel, transpose = make_next_panel(dtype), make_transpose(compute_dtype(dtype))
    operand_row, write_row = make_operand_row(operand), make_row_writer(dtype, operand)
    row_stride_name, may_be_key_split = f"{operand}_row_stride", operand == "output"
    dim_name = dim_name_of(operand)

    @njit
    def write_square(parameters, piece, source, stride, factors, block_row, column, count, scratch):
        """Write up to LANES rows from ``block_row`` on, of the ``count`` columns from ``column``
        on.
        """
        rows_left = piece.heads * piece.query_count - block_row
        is_key_split = may_be_key_split and piece.slot >= 0
        if rows_left >= LANES and count >= LANES and piece.heads == 1 and not is_key_split:
            target = shift(operand_row(parameters, piece, block_row), column)
            row_stride = field(parameters, row_stride_name)
            transpose_products(target, row_stride, source, stride, factors, LANES)
            return
        transpose(scratch, LANES, source, stride, LANES, LANES)
        for index in range(min(rows_left, LANES)):
            row, factor = shift(scratch, index * LANES), load(factors, index)
            some = min(count, LANES)
            write_row(parameters, piece, row, factor, block_row + index, column, some, is_key_split)

    @njit
    def write(parameters, piece, panels, factors, width, columns, scratch):
        start, size = 0, field(parameters, dim_name)
        while start < columns:
            some, stride = next_panel(parameters, columns - start)
            stop = min(start + some, piece.heads * piece.query_count)
            for block_row in range(start, stop, LANES):
                for column in range(0, size, LANES):
                    source = shift(panels, start * width + column * stride + block_row - start)
                    write_square(
                        parameters, piece, source, stride, shift(factors, block_row), block_row,
                        column, size - column, scratch,
                    )  # fmt: skip
            start += some

    return write
