"""Compute a tile of scores: scale, soft cap, bias, ALiBi, and the mask of what a query does not
see.

    score = softcap * tanh(scale * k.q / softcap) + bias - slope * |distance|

(soft cap: Gemma Team 2024, Gemma 2, section 2; ALiBi: Press et al. 2022, section 3). Query i sees
the keys from i + first_visible to i + last_visible.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention.parameters import (
    BIAS_BOOL,
    BIAS_NONE,
    BIAS_OF_QUERY_DTYPE,
    QUERY_BLOCK,
    TILE_STRIDE,
    lowest_score,
)
from foo_ops.kernels.attention.programs import make_program_steps
from foo_ops.kernels.attention.rows import make_tile_operation, second
from foo_ops.kernels.lang.random import WORDS, store_dropout_mask
from foo_ops.kernels.lang.scratch import row_of
from foo_ops.kernels.math.exponential import tanh, tanh_derivative
from foo_ops.kernels.products.operands import make_products, make_step_counter, sizes_of
from foo_ops.kernels.simd.arithmetic import absolute, less, maximum, select, splat
from foo_ops.kernels.simd.memory import address_of, load, load_vector, pointer_to, shift, store
from foo_ops.kernels.simd.transpose import make_fill, round_up, transpose_square
from foo_ops.kernels.simd.types import ELEMENTS, compute_dtype, lanes_of

# The facts of each query of a block, as rows of QUERY_BLOCK elements: its place in the block as a
# number of the compute type, its ALiBi slope, and as int32 query and head.
POSITIONS, SLOPES, QUERIES, HEADS = (row * QUERY_BLOCK for row in range(4))
ROW_FACTS = 4


@functools.cache
def make_row_facts_filler(dtype: str) -> Callable:
    """Make ``fill_row_facts(parameters, piece, row_facts, columns)``, to be called once for a
    block.
    """
    fill = make_fill(compute_dtype(dtype))
    as_int32 = pointer_to("int32")

    @njit
    def fill_row_facts(parameters, piece, row_facts, columns):
        for row in range(ROW_FACTS):
            fill(shift(row_facts, row * QUERY_BLOCK), columns, 0.0)
        queries = as_int32(address_of(shift(row_facts, QUERIES)))
        heads = as_int32(address_of(shift(row_facts, HEADS)))
        for index in range(piece.heads):
            head = piece.head + index
            slope = 0.0
            if parameters.has_alibi_slopes:
                slope = load(row_of(parameters, "alibi_slopes", piece.batch, head, 0), 0)
            number = piece.batch * parameters.query_heads + head
            if parameters.has_dropout_heads:
                number = load(row_of(parameters, "dropout_heads", piece.batch, head, 0), 0)
            for row in range(piece.query_count):
                block_row = index * piece.query_count + row
                store(row_facts, POSITIONS + block_row, row)
                store(row_facts, SLOPES + block_row, slope)
                store(queries, block_row, piece.query_start + row)
                store(heads, block_row, number)

    return fill_row_facts


@functools.cache
def make_transpose_to_tile(dtype: str, source_dtype: str) -> Callable:
    """Make ``transpose(target, source, row_stride, column_stride, rows, columns)`` for any strides.

    target[column * TILE_STRIDE + row] = source[row, column].
    """
    LANES = lanes_of(dtype)
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
def make_bias_adder(dtype: str) -> Callable:
    """Make ``add_bias(parameters, piece, target, scratch, key_start, columns, count)``."""
    compute, scalar = compute_dtype(dtype), ELEMENTS[dtype].compute
    LANES = lanes_of(compute)
    as_mask, as_own, as_float32 = pointer_to("mask"), pointer_to(dtype), pointer_to("float32")
    fill = make_fill(compute)
    transpose_mask, transpose_own, transpose_float32 = (
        make_transpose_to_tile(compute, source) for source in ("mask", dtype, "float32")
    )

    LOWEST = lowest_score(dtype)

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
def make_score_mod(dtype: str, differentiates: bool = False) -> Callable:
    """Make the function that turns products k.q into scores, but for the mask.

    ``apply_score_mod(parameters, piece, row_facts, target, scratch, slopes, key_start, columns,
    count)``. Scores are natural logarithms. If it ``differentiates`` and there is a soft cap, its
    derivative 1 - tanh^2 is written to ``slopes``, a tile; otherwise ``slopes`` may be ``scratch``.
    """
    compute = ELEMENTS[dtype].compute
    LANES = lanes_of(compute_dtype(dtype))
    add_bias, LOWEST = make_bias_adder(dtype), lowest_score(dtype)

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
    def subtract_distances(row_facts, target, first_distance, columns, count):
        """Subtract ALiBi; first_distance is that of the block's first query from the tile's first
        key.
        """
        for key in range(count):
            offset = splat(compute(first_distance - key), LANES)
            for column in range(0, columns, LANES):
                distance = absolute(load_vector(row_facts, POSITIONS + column, LANES) + offset)
                slope = load_vector(row_facts, SLOPES + column, LANES)
                index = key * TILE_STRIDE + column
                store(target, index, load_vector(target, index, LANES) - slope * distance)

    @njit
    def apply_score_mod(
        parameters, piece, row_facts, target, scratch, slopes, key_start, columns, count
    ):
        multiply(target, parameters.scale, columns, count)
        if parameters.softcap > 0.0:
            cap(target, slopes, parameters.softcap, columns, count)
        if parameters.bias_kind != BIAS_NONE:
            add_bias(parameters, piece, target, scratch, key_start, columns, count)
        if parameters.has_alibi_slopes:
            first_distance = piece.query_start + piece.alignment - key_start
            subtract_distances(row_facts, target, first_distance, columns, count)

    return apply_score_mod


@functools.cache
def make_mask(dtype: str) -> Callable:
    """Make ``hide(piece, row_facts, target, first_query, queries, key_start, columns, count)``.

    A score becomes -infinity where the query does not see the key. The columns hold ``queries``
    queries from ``first_query`` on.
    """
    compute = ELEMENTS[dtype].compute
    LANES = lanes_of(compute_dtype(dtype))

    @njit
    def hide_outside(row_facts, target, first, last, columns, count):
        """Hide all but the keys from first to last, as the block's first query sees them in this
        tile.
        """
        hidden = splat(compute(-math.inf), LANES)
        for key in range(count):
            smallest = splat(compute(key - last), LANES)
            largest = splat(compute(key - first), LANES)
            for column in range(0, columns, LANES):
                index = key * TILE_STRIDE + column
                position = load_vector(row_facts, POSITIONS + column, LANES)
                score = load_vector(target, index, LANES)
                score = select(less(position, smallest), hidden, score)
                store(target, index, select(less(largest, position), hidden, score))

    @njit
    def hide(piece, row_facts, target, first_query, queries, key_start, columns, count):
        first = piece.first_visible - key_start
        last = piece.last_visible - key_start
        if first_query + last < count - 1 or first_query + queries - 1 + first > 0:
            start = piece.query_start
            hide_outside(row_facts, target, start + first, start + last, columns, count)

    return hide


@functools.cache
def make_scores(
    dtype: str, has_options: bool, has_programs: bool, differentiates: bool = False
) -> Callable:
    """Make the function that computes a tile of scores.

    ``scores(parameters, piece, row_facts, target, scratch, slopes, keys, queries, are_small,
    first_query, query_count, key_start, columns, count)``: target[key, query] is the score before
    it is multiplied by parameters.factor (which is log2(e) and, without a score_mod, the scale),
    and -infinity where the query does not see the key. ``scratch`` has room for a tile, and so has
    ``slopes``: see `make_score_mod`. If programs modify the scores and have gradients, ``slopes``
    gets the products. The rows up to a multiple of what a product takes are undefined.
    """
    matmul, _, _ = make_products(dtype)
    steps, ROWS = make_step_counter(dtype), sizes_of(dtype).rows
    apply_score_mod, hide = make_score_mod(dtype, differentiates), make_mask(dtype)
    modify, _ = make_program_steps(dtype)
    copy = make_tile_operation(compute_dtype(dtype), second)

    @njit
    def scores(
        parameters, piece, row_facts, target, scratch, slopes, keys, queries, are_small,
        first_query, query_count, key_start, columns, count,
    ):  # fmt: skip
        matmul(
            target, TILE_STRIDE, keys, queries, round_up(count, ROWS), columns,
            steps(parameters.head_dim), False, are_small,
        )  # fmt: skip
        if has_options and parameters.modifies:
            apply_score_mod(
                parameters, piece, row_facts, target, scratch, slopes, key_start, columns, count
            )
        if has_programs:
            if differentiates and parameters.gradient_function != 0:
                copy(slopes, target, columns, count)
            modify(parameters, piece, target, first_query, query_count, key_start, columns, count)
        else:
            hide(piece, row_facts, target, first_query, query_count, key_start, columns, count)

    return scores


@functools.cache
def make_dropout_mask(dtype: str) -> Callable:
    """Make ``load_dropout_mask(parameters, row_facts, target, key_start, first_column, columns,
    count)``.

    The mask is a tile of 1.0 where dropout keeps a weight and of 0.0 where it does not.
    ``key_start`` must be a multiple of WORDS.
    """
    LANES = lanes_of(compute_dtype(dtype))
    as_int32 = pointer_to("int32")

    @njit
    def load_dropout_mask(parameters, row_facts, target, key_start, first_column, columns, count):
        queries = shift(as_int32(address_of(shift(row_facts, QUERIES))), first_column)
        heads = shift(as_int32(address_of(shift(row_facts, HEADS))), first_column)
        for key in range(0, count, WORDS):
            for column in range(0, columns, LANES):
                store_dropout_mask(
                    shift(target, key * TILE_STRIDE + column), TILE_STRIDE,
                    (key_start + key) // WORDS, shift(queries, column), shift(heads, column),
                    parameters.seed, parameters.dropout_threshold, LANES,
                )  # fmt: skip

    return load_dropout_mask
