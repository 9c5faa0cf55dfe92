"""Make floating-point numbers of integers of 8 and of 4 bits, as weights are stored.

Of 4 bits there are two in a byte. Those of LANES adjacent bytes are two vectors: the lower ones are
LANES adjacent numbers, the upper ones as many numbers half a group further on. A number is the
integer times a scale, plus an offset.
"""

from __future__ import annotations

import struct

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from foo_ops.kernels.compiler.processor import has_bfloat16_dot, has_table_of_registers
from foo_ops.kernels.vectors.elements import ELEMENTS, narrow
from foo_ops.kernels.vectors.instructions import (
    FLOAT,
    INT8,
    INT16,
    INT32,
    INT64,
    call_intrinsic,
    constant_of,
    emit_fma,
    emit_shuffle,
    emit_splat,
)
from foo_ops.kernels.vectors.memory import emit_load_vector
from foo_ops.kernels.vectors.pairs import BFLOAT, PAIRS, emit_pair_fma
from foo_ops.kernels.vectors.values import vector_ir

# Elements of a table in a register, which is looked up lane by lane.
TABLE = 16
# What kernels of few rows take integers of 4 bits less: sums of them stay smaller.
INT4_MIDDLE = 8


@intrinsic(prefer_literal=True)
def unpack_int8(typing_context, target, source, lanes):
    """Store LANES adjacent integers of 8 bits as numbers of the target's dtype."""
    compute = ELEMENTS[target.dtype].compute

    def generate(context, builder, signature, args):
        count = lanes.literal_value
        number = ir.VectorType(context.get_value_type(compute), count)
        value = builder.sitofp(_load_bytes(builder, args[1], count), number)
        _store_numbers(builder, target.dtype, args[0], value)
        return context.get_dummy_value()

    return types.void(target, source, lanes), generate


@intrinsic(prefer_literal=True)
def unpack_int4(typing_context, target, half, source, scale, offset, lanes):
    """Store the lower numbers of LANES adjacent bytes, and ``half`` elements further the upper."""
    compute = ELEMENTS[target.dtype].compute

    def generate(context, builder, signature, args):
        target_pointer, distance, source_pointer, *factors, _ = args
        count = lanes.literal_value
        scales, offsets = (emit_splat(builder, factor, count) for factor in factors)
        wide = ir.VectorType(INT32, count)
        both = builder.zext(_load_bytes(builder, source_pointer, count), wide)
        lower = builder.and_(both, constant_of(wide, 15))
        upper = builder.lshr(both, constant_of(wide, 4))
        lower, upper = (
            emit_fma(builder, builder.sitofp(integer, scales.type), scales, offsets)
            for integer in (lower, upper)
        )
        _store_numbers(builder, target.dtype, target_pointer, lower)
        _store_numbers(builder, target.dtype, builder.gep(target_pointer, [distance]), upper)
        return context.get_dummy_value()

    return types.void(target, types.intp, source, compute, compute, lanes), generate


@intrinsic(prefer_literal=True)
def tile_dot_int4(typing_context, tile, a, a_stride, b, b_stride, scales, stride, groups):
    """Add to tile[i, j] the products of a's i-th row and of integers of b's j-th row, times scales.

    A lane takes the integers of its own 32 bits of b, less `INT4_MIDDLE`. Those of a lie in the
    order in which shifts bring them out: first what belongs to the lowest integer of each 32 bits,
    or 16 bits where a is pairs. As many adjacent lanes as there are to one of ``groups`` share a
    scale; the scales of b's rows are ``stride`` elements apart.
    """
    rows, columns, lanes = tile.rows, tile.columns, tile.vector.lanes
    multiply_add, numbers_of = (
        (emit_pair_fma, _pairs_of_int4) if a.dtype == PAIRS else (emit_fma, _numbers_of_int4)
    )
    count = groups.literal_value

    def generate(context, builder, signature, args):
        total, a_pointer, a_step, b_pointer, b_step, scales_pointer, step, _ = args
        vector = vector_ir(tile.vector)
        sharing = [lane * count // lanes for lane in range(lanes)]
        numbers, factors = [], []
        for column in range(columns):
            start = builder.gep(b_pointer, [builder.mul(b_step, INT64(column))])
            address = builder.bitcast(start, ir.VectorType(INT32, lanes).as_pointer())
            numbers.append(numbers_of(builder, builder.load(address, align=1), vector))
            index = builder.mul(step, INT64(column))
            scale = emit_load_vector(builder, scales.dtype, scales_pointer, index, count)
            factors.append(emit_shuffle(builder, scale, scale, sharing))
        products = [ir.Constant(vector, None)] * (rows * columns)
        for part in range(len(numbers[0])):
            for row in range(rows):
                index = builder.add(builder.mul(a_step, INT64(row)), INT64(part * lanes))
                left = emit_load_vector(builder, a.dtype, a_pointer, index, lanes)
                for column in range(columns):
                    position = row * columns + column
                    products[position] = multiply_add(
                        builder, left, numbers[column][part], products[position]
                    )
        for position, product in enumerate(products):
            value = builder.extract_value(total, position)
            value = emit_fma(builder, product, factors[position % columns], value)
            total = builder.insert_value(total, value, position)
        return total

    arguments = (tile, a, types.intp, b, types.intp, scales, types.intp, groups)
    return tile(*arguments), generate


def _numbers_of_int4(builder: ir.IRBuilder, words: ir.Value, number: ir.Type) -> list[ir.Value]:
    """Return the 8 integers of each 32 bits as numbers, less the middle."""
    if has_table_of_registers() and number == ir.VectorType(FLOAT, TABLE):
        # A lookup, which takes the lowest bits, in place of three operations on each vector.
        table = ir.Constant(number, [float(place - INT4_MIDDLE) for place in range(TABLE)])
        name = "llvm.x86.avx512.permvar.sf.512"
        return [
            call_intrinsic(builder, name, number, [table, _shifted(builder, words, 4 * part)])
            for part in range(8)
        ]
    # The highest bit of four, once it is turned round, is the sign of what is less the middle.
    words = builder.xor(words, constant_of(words.type, 0x88888888))
    top = constant_of(words.type, 28)
    return [
        builder.sitofp(
            builder.ashr(builder.shl(words, constant_of(words.type, 28 - 4 * part)), top), number
        )
        for part in range(8)
    ]


def _pairs_of_int4(builder: ir.IRBuilder, words: ir.Value, number: ir.Type) -> list[ir.Value]:
    """Return the 4 integers of each 16 bits as bfloat16, less the middle."""
    count = 2 * number.count
    halves = builder.bitcast(words, ir.VectorType(INT16, count))
    codes = [_code_of_bfloat16(place % TABLE - INT4_MIDDLE) for place in range(count)]
    table = ir.Constant(halves.type, codes)
    name = f"llvm.x86.avx512.permvar.hi.{16 * count}"
    return [
        builder.bitcast(
            call_intrinsic(
                builder, name, halves.type, [table, _shifted(builder, halves, 4 * part)]
            ),
            words.type,
        )
        for part in range(4)
    ]


def _shifted(builder: ir.IRBuilder, value: ir.Value, bits: int) -> ir.Value:
    return builder.lshr(value, constant_of(value.type, bits))


def _code_of_bfloat16(number: int) -> int:
    """The bits of an integer that bfloat16 has exactly."""
    return struct.unpack("<I", struct.pack("<f", number))[0] >> 16


def _load_bytes(builder: ir.IRBuilder, pointer: ir.Value, lanes: int) -> ir.Value:
    return builder.load(builder.bitcast(pointer, ir.VectorType(INT8, lanes).as_pointer()), align=1)


def _store_numbers(builder: ir.IRBuilder, dtype: str, pointer: ir.Value, value: ir.Value) -> None:
    """Store adjacent numbers, rounded to the dtype."""
    if dtype == "bfloat16" and has_bfloat16_dot():
        halves = builder.fptrunc(value, ir.VectorType(BFLOAT, value.type.count))
        stored = builder.bitcast(halves, ir.VectorType(INT16, value.type.count))
    else:
        stored = narrow(builder, dtype, value)
    address = builder.bitcast(pointer, stored.type.as_pointer())
    builder.store(stored, address, align=ELEMENTS[dtype].size)
