"""Find and load the rows of a block, and work on those of score tiles."""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention.parameters import TILE_STRIDE
from foo_ops.kernels.lang.scratch import field, row_of
from foo_ops.kernels.simd.memory import load_vector, shift, store
from foo_ops.kernels.simd.transpose import make_copy_row, make_fill
from foo_ops.kernels.simd.types import compute_dtype, lanes_of


@functools.cache
def make_sums_starter(dtype: str) -> Callable:
    """Make ``start_sums(sums, stride, first_row, rows)``: zeros for a panel's rows from first_row
    on.
    """
    fill = make_fill(dtype)

    @njit
    def start_sums(sums, stride, first_row, rows):
        fill(shift(sums, first_row * stride), (rows - first_row) * stride, 0.0)

    return start_sums


@functools.cache
def make_tile_operation(dtype: str, operation: Callable) -> Callable:
    """Make ``apply(target, source, columns, count)`` for score tiles of the compute dtype
    ``dtype``.

    Each element of the target becomes operation(its own value, the source's).
    """
    LANES = lanes_of(dtype)

    @njit
    def apply(target, source, columns, count):
        for key in range(count):
            for column in range(0, columns, LANES):
                index = key * TILE_STRIDE + column
                result = operation(
                    load_vector(target, index, LANES), load_vector(source, index, LANES)
                )
                store(target, index, result)

    return apply


@njit
def second(first, second):
    """The operation that copies."""
    return second


@functools.cache
def make_operand_row(operand: str) -> Callable:
    """Make ``operand_row(parameters, piece, block_row)``: the address of a row of a block.

    The operand is query, output, or the gradient of one of them. A block's rows are its queries,
    head after head.
    """

    @njit
    def operand_row(parameters, piece, block_row):
        head, row = piece.head + block_row // piece.query_count, block_row % piece.query_count
        query = piece.query_offset + piece.query_start + row
        return row_of(parameters, operand, piece.batch, head, query)

    return operand_row


@functools.cache
def make_block_loader(dtype: str, operand: str) -> Callable:
    """Make ``load_block(parameters, piece, target, columns, rows, width)``, which copies a block's
    rows.

    The operand is query, output, or the gradient of one of them. The copy has ``rows`` rows of
    ``width`` elements of the compute dtype, with zeros where the block has fewer.
    """
    copy_row, fill = make_copy_row(compute_dtype(dtype)), make_fill(compute_dtype(dtype))
    column_stride_name = f"{operand}_column_stride"

    @njit
    def load_block(parameters, piece, target, columns, rows, width):
        count = piece.query_count
        column_stride = field(parameters, column_stride_name)
        for head in range(piece.heads):
            for row in range(count):
                query = piece.query_offset + piece.query_start + row
                source = row_of(parameters, operand, piece.batch, piece.head + head, query)
                line = shift(target, (head * count + row) * width)
                copy_row(line, source, column_stride, columns, width)
        used = piece.heads * count
        fill(shift(target, used * width), (rows - used) * width, 0.0)

    return load_block


@njit
def queries_of(piece, start, columns):
    """The first query of a panel, and how many there are."""
    if piece.heads > 1:
        return piece.query_start, piece.query_count
    return piece.query_start + start, min(columns, piece.query_count - start)


@njit
def seen_keys(piece, first_query, query_count, key_start, count):
    """The number of a tile's keys, from its first on, that a panel has to visit."""
    if first_query + piece.first_visible >= key_start + count:
        return 0
    stop = first_query + query_count + piece.last_visible - key_start
    return max(0, min(count, stop))
