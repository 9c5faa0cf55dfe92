"""Write the gradient of the bias, a score tile at a time.

It is the gradient of the scores, summed over all that the bias was broadcast to. A block of queries
of one head writes its tiles itself if no other adds to them. Otherwise they are added to sums in
the compute dtype. Blocks that add to the same sums come one after the other, in an order that does
not depend on the threads; the launcher sees to that.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention.parameters import GRADIENT_STORED, TILE_STRIDE
from foo_ops.kernels.attention.row_sums import adds_row_sums
from foo_ops.kernels.attention.rows import second
from foo_ops.kernels.simd.arithmetic import splat
from foo_ops.kernels.simd.memory import address_of, load, load_vector, pointer_to, shift, store
from foo_ops.kernels.simd.transpose import transpose_square
from foo_ops.kernels.simd.types import ELEMENTS, compute_dtype, lanes_of


@functools.cache
def _make_tile_writers(dtype: str) -> tuple[Callable, Callable]:
    """Make ``store_tile(target, row_stride, tile, scratch, rows, columns)``, and the one that adds.

    target[row, column] becomes, or grows by, tile[column, row]. The target's columns are adjacent.
    """
    LANES = lanes_of(compute_dtype(dtype))

    @njit
    def store_square(target, row_stride, tile, scratch):
        transpose_square(target, row_stride, tile, TILE_STRIDE, LANES)

    @njit
    def add_square(target, row_stride, tile, scratch):
        transpose_square(scratch, LANES, tile, TILE_STRIDE, LANES)
        for row in range(LANES):
            sum_ = load_vector(target, row * row_stride, LANES)
            store(target, row * row_stride, sum_ + load_vector(scratch, row * LANES, LANES))

    def make_writer(write_square: Callable, combine: Callable) -> Callable:
        @njit
        def one_by_one(target, row_stride, tile, first_row, rows, first_column, columns):
            for row in range(first_row, rows):
                for column in range(first_column, columns):
                    index = row * row_stride + column
                    value = load(tile, column * TILE_STRIDE + row)
                    store(target, index, combine(load(target, index), value))

        @njit
        def write_tile(target, row_stride, tile, scratch, rows, columns):
            whole_rows, whole_columns = rows // LANES * LANES, columns // LANES * LANES
            for row in range(0, whole_rows, LANES):
                for column in range(0, whole_columns, LANES):
                    place = shift(target, row * row_stride + column)
                    source = shift(tile, column * TILE_STRIDE + row)
                    write_square(place, row_stride, source, scratch)
            one_by_one(target, row_stride, tile, 0, whole_rows, whole_columns, columns)
            one_by_one(target, row_stride, tile, whole_rows, rows, 0, columns)

        return write_tile

    return make_writer(store_square, second), make_writer(add_square, operator.add)


@functools.cache
def _make_row_adder(dtype: str) -> Callable:
    """Make ``add_rows(target, column_stride, tile, scratch, rows, columns)``.

    target[column] grows by the sum over the rows of tile[column, row].
    """
    LANES = lanes_of(compute_dtype(dtype))
    compute = ELEMENTS[dtype].compute

    @njit
    def add_lanes(target, stride, source, count):
        for block_row in range(count):
            store(
                target,
                block_row * stride,
                load(target, block_row * stride) + load(source, block_row),
            )

    @njit
    def add_rows(target, column_stride, tile, scratch, rows, columns):
        whole = rows // LANES * LANES
        for column in range(columns):
            line = shift(tile, column * TILE_STRIDE)
            sum_ = splat(compute(0.0), LANES)
            for row in range(0, whole, LANES):
                sum_ = sum_ + load_vector(line, row, LANES)
            store(scratch, 0, sum_)
            place = shift(target, column * column_stride)
            add_lanes(place, 0, scratch, LANES)
            add_lanes(place, 0, shift(line, whole), rows - whole)

    return add_rows


@functools.cache
def make_bias_gradient_writer(dtype: str) -> Callable:
    """Make ``write_bias(parameters, piece, grad_scores, scratch, key_start, count)``.

    ``grad_scores`` is the gradient of a score tile of ``count`` keys. ``scratch`` has room for
    another tile.
    """
    own_dtype, as_sums = pointer_to(dtype), pointer_to(compute_dtype(dtype))
    store_tile, add_tile = _make_tile_writers(dtype)
    add_rows = _make_row_adder(dtype)

    @njit
    def write_bias(parameters, piece, grad_scores, scratch, key_start, count):
        rows = piece.query_count
        row_stride = parameters.grad_attn_bias_row_stride
        column_stride = parameters.grad_attn_bias_column_stride
        address = address_of(parameters.grad_attn_bias)
        for index in range(piece.heads):
            tile = shift(grad_scores, index * rows)
            offset = piece.bias + index * parameters.grad_attn_bias_head_stride
            offset += key_start * column_stride
            sums = shift(as_sums(address), offset)
            if adds_row_sums(parameters):
                # Once for a block: write_row_sums in attention_row_sums.py.
                continue
            if parameters.bias_gradient == GRADIENT_STORED:
                own = shift(own_dtype(address), offset)
                store_tile(own, row_stride, tile, scratch, rows, count)
            elif parameters.bias_rows == 1:
                add_rows(sums, column_stride, tile, scratch, rows, count)
            else:
                add_tile(sums, row_stride, tile, scratch, rows, count)

    return write_bias
