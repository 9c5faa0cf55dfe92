"""Fill, copy and transpose rows of adjacent elements, and squares of them in registers."""

from __future__ import annotations

import functools
from collections.abc import Callable

from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from foo_ops.kernels.compiler.processor import has_masks
from foo_ops.kernels.simd.arithmetic import splat
from foo_ops.kernels.simd.memory import (
    emit_load_vector,
    load,
    load_first,
    load_vector,
    shift,
    store,
)
from foo_ops.kernels.simd.types import (
    ELEMENTS,
    INT16,
    INT32,
    INT64,
    constant_of,
    emit_shuffle,
    lanes_of,
    narrow,
)

# ------------------------------------------------------------------------------------------ squares

# Transposes squares of LANES x LANES elements, in registers.


@intrinsic(prefer_literal=True)
def transpose_square(typing_context, target, target_stride, source, source_stride, lanes):
    """Set target[j, i] = source[i, j] for LANES x LANES elements, adjacent in each row."""

    def generate(context, builder, signature, args):
        target_pointer, target_step, *square, _ = args
        rows = _load_rows(builder, source, *square, lanes.literal_value)
        _store_transposed(builder, target, target_pointer, target_step, rows)
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp, lanes), generate


@intrinsic(prefer_literal=True)
def transpose_products(
    typing_context, target, target_stride, source, source_stride, factors, lanes
):
    """Like `transpose_square`, with target[j, i] = source[i, j] * factors[j]."""

    def generate(context, builder, signature, args):
        target_pointer, target_step, *square, factor_pointer, _ = args
        count = lanes.literal_value
        vector = emit_load_vector(builder, factors.dtype, factor_pointer, INT64(0), count)
        rows = _load_rows(builder, source, *square, count)
        rows = [builder.fmul(row, vector) for row in rows]
        _store_transposed(builder, target, target_pointer, target_step, rows)
        return context.get_dummy_value()

    arguments = (target, types.intp, source, types.intp, factors, lanes)
    return types.void(*arguments), generate


@intrinsic(prefer_literal=True)
def transpose_adjacent(typing_context, target, target_stride, source, source_stride, lanes):
    """Set target[j, i] to the adjacent numbers of source[i] that begin at parts * j.

    There are LANES x LANES elements of the target, each of ``parts`` numbers in 32 bits: pairs or
    quads. Strides are in elements of each.
    """
    count = lanes.literal_value

    def generate(context, builder, signature, args):
        target_pointer, target_step, source_pointer, source_step, _ = args
        elements = ir.VectorType(INT32, count).as_pointer()
        rows = []
        for row in range(count):
            place = builder.gep(source_pointer, [builder.mul(source_step, INT64(row))])
            address = builder.bitcast(place, elements)
            rows.append(builder.load(address, align=ELEMENTS[source.dtype].size))
        columns = _transposed(builder, rows)
        _store_rows(builder, target, target_pointer, target_step, columns)
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp, lanes), generate


def _load_rows(builder, source, pointer, stride, count: int) -> list[ir.Value]:
    indices = [builder.mul(stride, INT64(row)) for row in range(count)]
    return [emit_load_vector(builder, source.dtype, pointer, index, count) for index in indices]


def _store_transposed(builder, target, pointer, stride, rows: list[ir.Value]) -> None:
    columns = [narrow(builder, target.dtype, value) for value in _transposed(builder, rows)]
    _store_rows(builder, target, pointer, stride, columns)


@intrinsic(prefer_literal=True)
def transpose_pairs(typing_context, target, target_stride, source, source_stride, lanes):
    """Set target[j, i] to the pair of source[2 * i, j] and source[2 * i + 1, j].

    There are LANES x LANES pairs. The source is bfloat16, the target bfloat16x2. Strides are in
    elements of each.
    """
    count = lanes.literal_value

    def generate(context, builder, signature, args):
        target_pointer, target_step, source_pointer, source_step, _ = args
        half, wide = ir.VectorType(INT16, count), ir.VectorType(INT32, count)

        def load_half(row):
            place = builder.gep(source_pointer, [builder.mul(source_step, INT64(row))])
            value = builder.load(builder.bitcast(place, half.as_pointer()), align=2)
            return builder.zext(value, wide)

        pairs = [
            builder.or_(load_half(row), builder.shl(load_half(row + 1), constant_of(wide, 16)))
            for row in range(0, 2 * count, 2)
        ]
        rows = _transposed(builder, pairs)
        _store_rows(builder, target, target_pointer, target_step, rows)
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp, lanes), generate


def _store_rows(builder, target, pointer, stride, rows: list[ir.Value]) -> None:
    """Store vectors, each to a row of ``target``, in its storage type."""
    for row, value in enumerate(rows):
        address = builder.gep(pointer, [builder.mul(stride, INT64(row))])
        address = builder.bitcast(address, value.type.as_pointer())
        builder.store(value, address, align=ELEMENTS[target.dtype].size)


def _transposed(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """Transpose by swapping off-diagonal blocks of 2 x 2 blocks, of 1, 2, 4 ... elements."""
    count = len(rows)
    size = 1
    while size < count:
        # Numbers below count are lanes of the upper row, the others of the lower row.
        upper = [lane if lane & size == 0 else count + lane - size for lane in range(count)]
        lower = [lane + size if lane & size == 0 else count + lane for lane in range(count)]
        swapped = list(rows)
        for row in range(count):
            if row & size == 0:
                pair = (rows[row], rows[row + size])
                swapped[row] = emit_shuffle(builder, *pair, upper)
                swapped[row + size] = emit_shuffle(builder, *pair, lower)
        rows = swapped
        size *= 2
    return rows


# --------------------------------------------------------------------------------------------- rows

# Fills, copies and transposes rows of adjacent elements.


@njit
def round_up(count, multiple):
    return (count + multiple - 1) // multiple * multiple


@functools.cache
def make_fill(dtype: str) -> Callable:
    """Make ``fill(target, count, value)`` for targets in the compute dtype ``dtype``."""
    LANES = lanes_of(dtype)
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
def make_copy_row(dtype: str) -> Callable:
    """Make ``copy_row(target, source, column_stride, columns, width)``: copy to adjacent elements.

    It converts between dtypes with the compute dtype ``dtype``, and pads with zeros to ``width``.
    """
    LANES, HAS_MASKS = lanes_of(dtype), has_masks()

    @njit
    def copy_row(target, source, column_stride, columns, width):
        whole = columns // LANES * LANES if column_stride == 1 else 0
        for column in range(0, whole, LANES):
            store(target, column, load_vector(source, column, LANES))
        if HAS_MASKS and column_stride == 1 and columns <= width and width % LANES == 0:
            for column in range(whole, width, LANES):
                store(target, column, load_first(source, column, max(0, columns - column), LANES))
            return
        for column in range(whole, columns):
            store(target, column, load(source, column * column_stride))
        for column in range(columns, width):
            store(target, column, 0.0)

    return copy_row


@functools.cache
def make_transpose(dtype: str) -> Callable:
    """Make ``transpose(target, target_stride, block, stride, rows, width)``.

    The rows have the compute dtype ``dtype``, or are pairs. ``rows`` and ``width`` must be
    multiples of the vector's lanes.
    """
    LANES = lanes_of(dtype)

    @njit
    def transpose(target, target_stride, block, stride, rows, width):
        for row in range(0, rows, LANES):
            for column in range(0, width, LANES):
                transpose_square(
                    shift(target, column * target_stride + row), target_stride,
                    shift(block, row * stride + column), stride, LANES,
                )  # fmt: skip

    return transpose
