"""A tile of scores: scale, soft cap, bias, ALiBi, and what a query does not see.

    score = softcap * tanh(scale * k.q / softcap) + bias - slope * |distance|

(soft cap: Gemma Team 2024, Gemma 2, section 2; ALiBi: Press et al. 2022, section 3). Query i sees
the keys from i + first_visible to i + last_visible.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention.operands import products_of, sizes_of, steps_of
from foo_ops.kernels.attention.parameters import (
    BIAS_BOOL,
    BIAS_NONE,
    BIAS_OF_QUERY_DTYPE,
    QUERY_BLOCK,
    TILE_STRIDE,
    compute_dtype,
    lowest_score,
)
from foo_ops.kernels.attention.rows import fill_of, round_up
from foo_ops.kernels.vectors.arithmetic import absolute, less, maximum, select, splat
from foo_ops.kernels.vectors.elements import ELEMENTS, lanes_of
from foo_ops.kernels.vectors.functions import tanh, tanh_derivative
from foo_ops.kernels.vectors.memory import address_of, load, load_vector, pointer_to, shift, store
from foo_ops.kernels.vectors.philox import WORDS, store_kept
from foo_ops.kernels.vectors.struct import row_of
from foo_ops.kernels.vectors.transpose import transpose_square

# What is known of each lane of a block, as rows of QUERY_BLOCK elements: the query's place in the
# block as a number of the compute type, its ALiBi slope, and as int32 query and head.
POSITIONS, SLOPES, QUERIES, HEADS = (row * QUERY_BLOCK for row in range(4))
LANE_ROWS = 4


@functools.cache
def lanes_filler_of(dtype: str) -> Callable:
    """``fill_lanes(parameters, piece, lanes, columns)``, once for a block."""
    fill = fill_of(compute_dtype(dtype))
    as_int32 = pointer_to("int32")

    @njit
    def fill_lanes(parameters, piece, lanes, columns):
        for row in range(LANE_ROWS):
            fill(shift(lanes, row * QUERY_BLOCK), columns, 0.0)
        queries = as_int32(address_of(shift(lanes, QUERIES)))
        heads = as_int32(address_of(shift(lanes, HEADS)))
        for index in range(piece.heads):
            head = piece.head + index
            slope = 0.0
            if parameters.has_alibi_slopes:
                slope = load(row_of(parameters, "alibi_slopes", piece.batch, head, 0), 0)
            for row in range(piece.query_count):
                lane = index * piece.query_count + row
                store(lanes, POSITIONS + lane, row)
                store(lanes, SLOPES + lane, slope)
                store(queries, lane, piece.query_start + row)
                store(heads, lane, piece.batch * parameters.query_heads + head)

    return fill_lanes


@functools.cache
def transpose_of(dtype: str, source_dtype: str) -> Callable:
    """``transpose(target, source, row_stride, column_stride, rows, columns)``, of any strides.

    target[column * TILE_STRIDE + row] = source[row, column].
    """
    LANES = lanes_of(dtype)  # noqa: N806
    in_squares = ELEMENTS[source_dtype].compute is ELEMENTS[dtype].compute

    @njit
    def one_by_one(
        target, source, row_stride, column_stride, first_row, rows, first_column, columns
    ):
        for column in range(first_column, columns):
            line = shift(target, column * TILE_STRIDE)
            start = shift(source, column * column_stride)
            for row in range(first_row, rows):
                store(line, row, load(start, row * row_stride))

    if not in_squares:

        @njit
        def transpose(target, source, row_stride, column_stride, rows, columns):
            one_by_one(target, source, row_stride, column_stride, 0, rows, 0, columns)

        return transpose

    @njit
    def transpose_by_squares(target, source, row_stride, column_stride, rows, columns):
        whole_rows = rows // LANES * LANES if column_stride == 1 else 0
        whole_columns = columns // LANES * LANES
        for row in range(0, whole_rows, LANES):
            for column in range(0, whole_columns, LANES):
                transpose_square(
                    shift(target, column * TILE_STRIDE + row), TILE_STRIDE,
                    shift(source, row * row_stride + column), row_stride, LANES,
                )  # fmt: skip
        one_by_one(target, source, row_stride, column_stride, 0, whole_rows, whole_columns, columns)
        one_by_one(target, source, row_stride, column_stride, whole_rows, rows, 0, columns)

    return transpose_by_squares


@functools.cache
def bias_adder_of(dtype: str) -> Callable:
    """``add_bias(parameters, piece, target, scratch, key_start, columns, count)``."""
    compute, scalar = compute_dtype(dtype), ELEMENTS[dtype].compute
    LANES = lanes_of(compute)  # noqa: N806
    as_mask, as_own, as_float32 = pointer_to("mask"), pointer_to(dtype), pointer_to("float32")
    fill = fill_of(compute)
    transpose_mask, transpose_own, transpose_float32 = (
        transpose_of(compute, source) for source in ("mask", dtype, "float32")
    )

    LOWEST = lowest_score(dtype)  # noqa: N806

    @njit
    def load_bias(parameters, piece, target, key_start, count):
        row_stride = parameters.attn_bias_row_stride
        column_stride = parameters.attn_bias_column_stride
        kind, address = parameters.bias_kind, address_of(parameters.attn_bias)
        rows = piece.query_count
        for index in range(piece.heads):
            offset = (
                piece.batch * parameters.attn_bias_batch_stride
                + (piece.head + index) * parameters.attn_bias_head_stride
                + piece.query_start * row_stride
                + key_start * column_stride
            )
            place = shift(target, index * rows)
            if kind == BIAS_BOOL:
                mask = shift(as_mask(address), offset)
                transpose_mask(place, mask, row_stride, column_stride, rows, count)
            elif kind == BIAS_OF_QUERY_DTYPE:
                own = shift(as_own(address), offset)
                transpose_own(place, own, row_stride, column_stride, rows, count)
            else:
                wide = shift(as_float32(address), offset)
                transpose_float32(place, wide, row_stride, column_stride, rows, count)

    @njit
    def add_bias(parameters, piece, target, scratch, key_start, columns, count):
        used = piece.heads * piece.query_count
        for key in range(count):
            fill(shift(scratch, key * TILE_STRIDE + used), columns - used, 0.0)
        load_bias(parameters, piece, scratch, key_start, count)
        # Where a mask is False, it hides even a NaN, which a sum would keep.
        limit = splat(scalar(0.0 if parameters.bias_kind == BIAS_BOOL else -math.inf), LANES)
        hidden, lowest = splat(scalar(-math.inf), LANES), splat(scalar(LOWEST), LANES)
        highest, infinite = splat(scalar(-LOWEST), LANES), splat(scalar(math.inf), LANES)
        for key in range(count):
            for column in range(0, columns, LANES):
                index = key * TILE_STRIDE + column
                score, bias = load_vector(target, index, LANES), load_vector(scratch, index, LANES)
                sum_ = score + bias
                sum_ = select(less(hidden, sum_), maximum(lowest, sum_), sum_)
                limited = select(less(sum_, infinite), highest, sum_)
                sum_ = select(less(highest, sum_), limited, sum_)
                store(target, index, select(less(bias, limit), bias, sum_))

    return add_bias


@functools.cache
def modify_of(dtype: str, differentiates: bool = False) -> Callable:
    """``modify(parameters, piece, lanes, target, scratch, slopes, key_start, columns, count)``.

    From products k.q to scores, natural logarithms, but for what is not seen. If it
    ``differentiates`` and there is a soft cap, its derivative 1 - tanh^2 is written to slopes (a
    tile, which else may be scratch).
    """
    compute = ELEMENTS[dtype].compute
    LANES = lanes_of(compute_dtype(dtype))  # noqa: N806
    add_bias, LOWEST = bias_adder_of(dtype), lowest_score(dtype)  # noqa: N806

    @njit
    def multiply(target, factor, columns, count):
        factors = splat(compute(factor), LANES)
        for key in range(count):
            for column in range(0, columns, LANES):
                index = key * TILE_STRIDE + column
                store(target, index, load_vector(target, index, LANES) * factors)

    @njit
    def cap(target, slopes, softcap, columns, count):
        # A cap may be so small that no float32 is its inverse.
        inverse = splat(compute(min(1.0 / softcap, -LOWEST)), LANES)
        caps = splat(compute(softcap), LANES)
        for key in range(count):
            for column in range(0, columns, LANES):
                index = key * TILE_STRIDE + column
                share = load_vector(target, index, LANES) * inverse
                if differentiates:
                    store(slopes, index, tanh_derivative(share))
                store(target, index, caps * tanh(share))

    @njit
    def subtract_distances(lanes, target, first_distance, columns, count):
        """first_distance: of the block's first query from the tile's first key."""
        for key in range(count):
            offset = splat(compute(first_distance - key), LANES)
            for column in range(0, columns, LANES):
                distance = absolute(load_vector(lanes, POSITIONS + column, LANES) + offset)
                slope = load_vector(lanes, SLOPES + column, LANES)
                index = key * TILE_STRIDE + column
                store(target, index, load_vector(target, index, LANES) - slope * distance)

    @njit
    def modify(parameters, piece, lanes, target, scratch, slopes, key_start, columns, count):
        multiply(target, parameters.scale, columns, count)
        if parameters.softcap > 0.0:
            cap(target, slopes, parameters.softcap, columns, count)
        if parameters.bias_kind != BIAS_NONE:
            add_bias(parameters, piece, target, scratch, key_start, columns, count)
        if parameters.has_alibi_slopes:
            first_distance = piece.query_start + piece.alignment - key_start
            subtract_distances(lanes, target, first_distance, columns, count)

    return modify


@functools.cache
def hide_of(dtype: str) -> Callable:
    """``hide(piece, lanes, target, first_query, queries, key_start, columns, count)``.

    -infinity for what is not seen. The columns have ``queries`` queries from first_query on.
    """
    compute = ELEMENTS[dtype].compute
    LANES = lanes_of(compute_dtype(dtype))  # noqa: N806

    @njit
    def hide_outside(lanes, target, first, last, columns, count):
        """first, last: the keys that the block's first query sees, from the tile's first key on."""
        hidden = splat(compute(-math.inf), LANES)
        for key in range(count):
            smallest = splat(compute(key - last), LANES)
            largest = splat(compute(key - first), LANES)
            for column in range(0, columns, LANES):
                index = key * TILE_STRIDE + column
                position = load_vector(lanes, POSITIONS + column, LANES)
                score = load_vector(target, index, LANES)
                score = select(less(position, smallest), hidden, score)
                store(target, index, select(less(largest, position), hidden, score))

    @njit
    def hide(piece, lanes, target, first_query, queries, key_start, columns, count):
        first = piece.first_visible - key_start
        last = piece.last_visible - key_start
        if first_query + last < count - 1 or first_query + queries - 1 + first > 0:
            start = piece.query_start
            hide_outside(lanes, target, start + first, start + last, columns, count)

    return hide


@functools.cache
def scores_of(dtype: str, has_options: bool, differentiates: bool = False) -> Callable:
    """``scores(parameters, piece, lanes, target, scratch, slopes, keys, queries, are_small,
    first_query, query_count, key_start, columns, count)``.

    target[key, query] is the score before it is multiplied by parameters.factor (which is log2(e)
    and, unless the scores are modified, the scale), and -infinity where the query does not see the
    key. ``scratch`` has room for a tile, and so has ``slopes``: see modify_of. The rows up to a
    multiple of what a product takes are undefined.
    """
    matmul, _, _ = products_of(dtype)
    steps, ROWS = steps_of(dtype), sizes_of(dtype).rows  # noqa: N806
    modify, hide = modify_of(dtype, differentiates), hide_of(dtype)

    @njit
    def scores(
        parameters, piece, lanes, target, scratch, slopes, keys, queries, are_small,
        first_query, query_count, key_start, columns, count,
    ):  # fmt: skip
        matmul(
            target, TILE_STRIDE, keys, queries, round_up(count, ROWS), columns,
            steps(parameters.head_dim), False, are_small,
        )  # fmt: skip
        if has_options and parameters.modifies:
            modify(parameters, piece, lanes, target, scratch, slopes, key_start, columns, count)
        hide(piece, lanes, target, first_query, query_count, key_start, columns, count)

    return scores


@functools.cache
def kept_of(dtype: str) -> Callable:
    """``load_kept(parameters, lanes, target, key_start, first_column, columns, count)``.

    A tile of 1.0 where dropout keeps a weight and of 0.0 where it does not. key_start must be a
    multiple of WORDS.
    """
    LANES = lanes_of(compute_dtype(dtype))  # noqa: N806
    as_int32 = pointer_to("int32")

    @njit
    def load_kept(parameters, lanes, target, key_start, first_column, columns, count):
        queries = shift(as_int32(address_of(shift(lanes, QUERIES))), first_column)
        heads = shift(as_int32(address_of(shift(lanes, HEADS))), first_column)
        for key in range(0, count, WORDS):
            for column in range(0, columns, LANES):
                store_kept(
                    shift(target, key * TILE_STRIDE + column), TILE_STRIDE,
                    (key_start + key) // WORDS, shift(queries, column), shift(heads, column),
                    parameters.seed, parameters.dropout_threshold, LANES,
                )  # fmt: skip

    return load_kept
