"""What kernels write of their sums: output and logsumexp, parts of them, or grad_query."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
from numba import njit

from foo_ops.kernels.attention.operands import panel_of
from foo_ops.kernels.attention.parameters import LOG2, compute_dtype, dim_name_of
from foo_ops.kernels.attention.rows import copy_row_of, fill_of, lane_row_of, turn_of
from foo_ops.kernels.vectors.arithmetic import absolute, fma, less, select, splat
from foo_ops.kernels.vectors.elements import ELEMENTS, lanes_of
from foo_ops.kernels.vectors.functions import log
from foo_ops.kernels.vectors.memory import load, load_vector, shift, store
from foo_ops.kernels.vectors.struct import field, row_of
from foo_ops.kernels.vectors.transpose import transpose_products


@functools.cache
def finisher_of(dtype: str) -> Callable:
    """``finish(parameters, piece, largest, total, factors, is_part)``: writes the logsumexp of each
    lane, or what it is computed from, where this is one part of the keys.

    What its sums have to be multiplied by goes to ``factors``; ``total`` is overwritten.
    """
    compute, LANES = ELEMENTS[dtype].compute, lanes_of(compute_dtype(dtype))  # noqa: N806
    copy_row, fill = copy_row_of(compute_dtype(dtype)), fill_of(compute_dtype(dtype))
    SMALLEST, LARGEST = (  # noqa: N806
        float(getattr(np.finfo(compute_dtype(dtype)), name)) for name in ("tiny", "max")
    )

    @njit
    def finish_lanes(largest, total, factors, lane, kept_scale):
        zero, smallest = splat(compute(0.0), LANES), splat(compute(SMALLEST), LANES)
        top, sum_ = load_vector(largest, lane, LANES), load_vector(total, lane, LANES)
        # The sum is zero for a query that sees nothing, and its output is zero.
        factor = select(less(sum_, smallest), zero, splat(compute(kept_scale), LANES) / sum_)
        store(factors, lane, factor)
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
        store(total, lane, logsumexp)

    @njit
    def finish(parameters, piece, largest, total, factors, is_part):
        count = piece.query_count
        rows = piece.heads * count
        if is_part:
            largest_row = row_of(parameters, "partial_largest", piece.part, piece.slot, 0)
            total_row = row_of(parameters, "partial_total", piece.part, piece.slot, 0)
            copy_row(largest_row, largest, 1, rows, rows)
            copy_row(total_row, total, 1, rows, rows)
            fill(factors, rows, 1.0)
            return
        for lane in range(0, rows, LANES):
            finish_lanes(largest, total, factors, lane, parameters.kept_scale)
        query, stride = piece.query_offset + piece.query_start, parameters.logsumexp_row_stride
        for index in range(piece.heads):
            target = row_of(parameters, "logsumexp", piece.batch, piece.head + index, query)
            for row in range(count):
                store(target, row * stride, load(total, index * count + row))

    return finish


@functools.cache
def row_writer_of(dtype: str, operand: str) -> Callable:
    """``write(parameters, piece, source, factor, lane, column, count, is_part)``, times the factor.

    ``count`` columns of the row of a lane, from ``column`` on. Those of output go to partial_output
    if this is one part of the keys.
    """
    LANES, lane_row = lanes_of(compute_dtype(dtype)), lane_row_of(operand)  # noqa: N806
    may_be_part = operand == "output"

    @njit
    def write_row(target, source, factor, count):
        factors, whole = splat(factor, LANES), count // LANES * LANES
        for column in range(0, whole, LANES):
            store(target, column, load_vector(source, column, LANES) * factors)
        for column in range(whole, count):
            store(target, column, load(source, column) * factor)

    @njit
    def write(parameters, piece, source, factor, lane, column, count, is_part):
        if may_be_part and is_part:
            part = row_of(parameters, "partial_output", piece.part, piece.slot, lane)
            write_row(shift(part, column), source, factor, count)
        else:
            write_row(shift(lane_row(parameters, piece, lane), column), source, factor, count)

    return write


@functools.cache
def panel_writer_of(dtype: str, operand: str) -> Callable:
    """``write(parameters, piece, panels, factors, width, columns, scratch)``: rows of an operand.

    They are the columns of the panels, times the factor of each. A panel has ``width`` rows, and
    all together have ``columns``. ``scratch`` has room for a vector in each of its lanes.
    """
    LANES = lanes_of(compute_dtype(dtype))  # noqa: N806
    next_panel, turn = panel_of(dtype), turn_of(compute_dtype(dtype))
    lane_row, write_row = lane_row_of(operand), row_writer_of(dtype, operand)
    row_stride_name, may_be_part = f"{operand}_row_stride", operand == "output"
    dim_name = dim_name_of(operand)

    @njit
    def write_square(parameters, piece, source, stride, factors, lane, column, count, scratch):
        """The lanes from ``lane`` on, and the columns from ``column`` on, which are ``count``."""
        lanes = piece.heads * piece.query_count - lane
        is_part = may_be_part and piece.slot >= 0
        if lanes >= LANES and count >= LANES and piece.heads == 1 and not is_part:
            target = shift(lane_row(parameters, piece, lane), column)
            row_stride = field(parameters, row_stride_name)
            transpose_products(target, row_stride, source, stride, factors, LANES)
            return
        turn(scratch, LANES, source, stride, LANES, LANES)
        for index in range(min(lanes, LANES)):
            row, factor = shift(scratch, index * LANES), load(factors, index)
            some = min(count, LANES)
            write_row(parameters, piece, row, factor, lane + index, column, some, is_part)

    @njit
    def write(parameters, piece, panels, factors, width, columns, scratch):
        start, size = 0, field(parameters, dim_name)
        while start < columns:
            some, stride = next_panel(parameters, columns - start)
            stop = min(start + some, piece.heads * piece.query_count)
            for lane in range(start, stop, LANES):
                for column in range(0, size, LANES):
                    source = shift(panels, start * width + column * stride + lane - start)
                    write_square(
                        parameters, piece, source, stride, shift(factors, lane), lane, column,
                        size - column, scratch,
                    )  # fmt: skip
            start += some

    return write
