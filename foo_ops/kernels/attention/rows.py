"""Rows in memory, and rows of tiles: fill, copy, transpose them, and find those of a block."""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention.parameters import TILE_STRIDE, compute_dtype
from foo_ops.kernels.vectors.arithmetic import splat
from foo_ops.kernels.vectors.elements import ELEMENTS, lanes_of
from foo_ops.kernels.vectors.memory import load, load_vector, shift, store
from foo_ops.kernels.vectors.struct import field, row_of
from foo_ops.kernels.vectors.transpose import transpose_square


@njit
def round_up(count, multiple):
    return (count + multiple - 1) // multiple * multiple


@functools.cache
def fill_of(dtype: str) -> Callable:
    """``fill(target, count, value)``, where the target is in the compute type ``dtype``."""
    LANES = lanes_of(dtype)  # noqa: N806
    compute = ELEMENTS[dtype].compute

    @njit
    def fill(target, count, value):
        values = splat(compute(value), LANES)
        whole = count // LANES * LANES
        for index in range(0, whole, LANES):
            store(target, index, values)
        for index in range(whole, count):
            store(target, index, value)

    return fill


@functools.cache
def sums_starter_of(dtype: str) -> Callable:
    """``start_sums(sums, stride, first_row, rows)``: zeros for a panel's rows from first_row on."""
    fill = fill_of(dtype)

    @njit
    def start_sums(sums, stride, first_row, rows):
        fill(shift(sums, first_row * stride), (rows - first_row) * stride, 0.0)

    return start_sums


@functools.cache
def tile_operation_of(dtype: str, operation: Callable) -> Callable:
    """``apply(target, source, columns, count)``, on tiles of the compute type ``dtype``.

    Each element of the target becomes operation(its own value, the source's).
    """
    LANES = lanes_of(dtype)  # noqa: N806

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


@functools.cache
def copy_row_of(dtype: str) -> Callable:
    """``copy_row(target, source, column_stride, columns, width)``, to adjacent elements.

    Converts between dtypes of the compute type ``dtype``, and writes zeros up to width.
    """
    LANES = lanes_of(dtype)  # noqa: N806

    @njit
    def copy_row(target, source, column_stride, columns, width):
        whole = columns // LANES * LANES if column_stride == 1 else 0
        for column in range(0, whole, LANES):
            store(target, column, load_vector(source, column, LANES))
        for column in range(whole, columns):
            store(target, column, load(source, column * column_stride))
        for column in range(columns, width):
            store(target, column, 0.0)

    return copy_row


@functools.cache
def lane_row_of(operand: str) -> Callable:
    """``lane_row(parameters, piece, lane)``: the pointer to the row of query, output or a gradient
    of these that belongs to a lane of a block.
    """

    @njit
    def lane_row(parameters, piece, lane):
        head, row = piece.head + lane // piece.query_count, lane % piece.query_count
        query = piece.query_offset + piece.query_start + row
        return row_of(parameters, operand, piece.batch, head, query)

    return lane_row


@functools.cache
def block_of(dtype: str, operand: str) -> Callable:
    """``load_block(parameters, piece, target, columns, rows, width)``: the rows of a block.

    Those of query, output or a gradient of these, as ``rows`` rows of ``width`` elements of the
    compute type, with zeros where the block has fewer.
    """
    copy_row, fill = copy_row_of(compute_dtype(dtype)), fill_of(compute_dtype(dtype))
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


@functools.cache
def turn_of(dtype: str) -> Callable:
    """``turn(target, target_stride, block, stride, rows, width)``: rows of the compute type
    ``dtype``, or of pairs, transposed.

    rows and width must be multiples of the lanes.
    """
    LANES = lanes_of(dtype)  # noqa: N806

    @njit
    def turn(target, target_stride, block, stride, rows, width):
        for row in range(0, rows, LANES):
            for column in range(0, width, LANES):
                transpose_square(
                    shift(target, column * target_stride + row), target_stride,
                    shift(block, row * stride + column), stride, LANES,
                )  # fmt: skip

    return turn


@njit
def queries_of(piece, start, columns):
    """The first query of a panel, and how many there are."""
    if piece.heads > 1:
        return piece.query_start, piece.query_count
    return piece.query_start + start, min(columns, piece.query_count - start)


@njit
def seen_keys(piece, first_query, query_count, key_start, count):
    """How many of a tile's keys, from its first on, a panel has to visit."""
    if first_query + piece.first_visible >= key_start + count:
        return 0
    stop = first_query + query_count + piece.last_visible - key_start
    return max(0, min(count, stop))
