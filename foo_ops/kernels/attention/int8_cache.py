"""Keys and values of 8 bits, with a scale for each head and position.

An integer is exact in every dtype, so tiles of them become numbers as they are. The scale of a key
is a factor of its scores, and that of a value one of its weights.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention.key_tiles import lie_together, make_key_row
from foo_ops.kernels.attention.parameters import TILE_STRIDE, dim_name_of
from foo_ops.kernels.products.operands import step_of, vector_product_dtype
from foo_ops.kernels.vectors.arithmetic import splat
from foo_ops.kernels.vectors.elements import ELEMENTS, compute_dtype, lanes_of
from foo_ops.kernels.vectors.integers import unpack_int8
from foo_ops.kernels.vectors.memory import (
    address_of,
    load,
    load_vector,
    pointer_to,
    prefetch,
    shift,
    store,
)
from foo_ops.kernels.vectors.rows import round_up
from foo_ops.kernels.vectors.struct import field

LINE = 64
# Rows of the cache that are fetched before they are unpacked.
AHEAD = 8


def make_int8_rows(dtype: str, operand: str) -> Callable:
    """Make ``rows(parameters, piece, scratch, key_start, count)``: a pointer and the stride of a
    key.

    The integers become numbers of the dtype in scratch memory, filled up with zeros.
    """
    LANES = lanes_of(compute_dtype(dtype))
    width_multiple = LANES * step_of(vector_product_dtype(dtype))
    as_stored, key_row = pointer_to(dtype), make_key_row(operand)
    row_stride_name, column_stride_name = f"{operand}_row_stride", f"{operand}_column_stride"
    dim_name, number = dim_name_of(operand), ELEMENTS[dtype].compute

    @njit
    def rows(parameters, piece, scratch, key_start, count):
        columns = field(parameters, dim_name)
        column_stride = field(parameters, column_stride_name)
        width = round_up(columns, width_multiple)
        whole = columns // LANES * LANES if column_stride == 1 else 0
        start, row_stride = as_stored(address_of(scratch)), field(parameters, row_stride_name)
        # A row in its page is found by divisions, which take longer than to unpack it.
        together = lie_together(parameters, key_start, count)
        first = key_row(parameters, piece, key_start)
        for row in range(count):
            if together:
                source = shift(first, row * row_stride)
                for column in range(0, whole, LINE):
                    prefetch(source, AHEAD * row_stride + column)
            else:
                source = key_row(parameters, piece, key_start + row)
            target = shift(start, row * width)
            for column in range(0, whole, LANES):
                unpack_int8(shift(target, column), shift(source, column), LANES)
            for column in range(whole, columns):
                store(target, column, number(load(source, column * column_stride)))
            for column in range(columns, width):
                store(target, column, number(0))
        return start, width

    return rows


def make_tile_scaler(dtype: str, operand: str) -> Callable:
    """Make ``scale(parameters, piece, tile, key_start, columns, count)`` for scores or weights."""
    LANES, scale_row = lanes_of(compute_dtype(dtype)), make_key_row(f"{operand}_scale")
    scalar, row_stride_name = ELEMENTS[dtype].compute, f"{operand}_scale_row_stride"

    @njit
    def scale(parameters, piece, tile, key_start, columns, count):
        together = lie_together(parameters, key_start, count)
        first, stride = scale_row(parameters, piece, key_start), field(parameters, row_stride_name)
        for key in range(count):
            place = shift(first, key * stride)
            if not together:
                place = scale_row(parameters, piece, key_start + key)
            factor = load(place, 0)
            row = shift(tile, key * TILE_STRIDE)
            for column in range(0, columns, LANES):
                store(row, column, load_vector(row, column, LANES) * splat(scalar(factor), LANES))

    return scale


def make_no_scaler() -> Callable:
    """Make the function of the same arguments for keys and values that are numbers."""

    @njit
    def leave(parameters, piece, tile, key_start, columns, count):
        pass

    return leave
