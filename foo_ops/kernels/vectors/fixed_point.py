"""Numbers as integers of several bytes, and their products with integers of 4 bits.

A number is digits of base 256, from -128 to 127, the highest first, times a scale that it has in
common with others, a power of two. Products of digits and of integers of 4 bits are added up
exactly, four in a lane of 32 bits, and become numbers at the end.
"""

from __future__ import annotations

import struct

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from foo_ops.kernels.compiler.processor import has_byte_dot, has_byte_pairs
from foo_ops.kernels.vectors.instructions import (
    FLOAT,
    INT8,
    INT16,
    INT32,
    INT64,
    call_intrinsic,
    constant_of,
    emit_fma,
    emit_multiply_add,
    emit_shuffle,
    emit_splat,
    suffix,
)
from foo_ops.kernels.vectors.memory import emit_load_first, emit_load_vector
from foo_ops.kernels.vectors.pairs import emit_integer_pair_fma
from foo_ops.kernels.vectors.values import vector_ir

DIGIT_BITS = 8
# The bits of a float32 that are not its sign, those of its mantissa, and one of its exponent.
MAGNITUDE, MANTISSA, EXPONENT_STEP = 0x7FFF_FFFF, 0x007F_FFFF, 0x0080_0000
_BYTE_DOTS = {4: "ssse3.pmadd.ub.sw.128", 8: "avx2.pmadd.ub.sw", 16: "avx512.pmaddubs.w.512"}


def bits_of_float(number: float) -> int:
    """Return the bits of a float32; those of magnitudes have their order, NaN the last."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


@intrinsic(prefer_literal=True)
def largest_magnitude(typing_context, line, count, lanes):
    """Return the bits of the largest of ``count`` adjacent magnitudes, in float32."""

    def generate(context, builder, signature, args):
        words, largest = ir.VectorType(INT32, lanes.literal_value), None
        for index in range(0, count.literal_value, lanes.literal_value):
            number = emit_load_vector(builder, line.dtype, args[0], INT64(index), words.count)
            bits = builder.and_(builder.bitcast(number, words), constant_of(words, MAGNITUDE))
            name = f"llvm.smax.{suffix(words)}"
            largest = bits if index == 0 else call_intrinsic(builder, name, words, [largest, bits])
        return call_intrinsic(builder, f"llvm.vector.reduce.smax.{suffix(words)}", INT32, [largest])

    return types.int32(line, count, lanes), generate


@intrinsic(prefer_literal=True)
def scale_of_digits(typing_context, bits, digits):
    """Return the power of two that numbers up to one with these bits are so many digits times, and
    1 over it.

    The highest digit of the largest is of 64 to 127.
    """
    below = DIGIT_BITS * digits.literal_value - 2

    def generate(context, builder, signature, args):
        # Of a mantissa of 127 / 64 and more the highest digit would be 128.
        above = builder.add(args[0], INT32(EXPONENT_STEP - (bits_of_float(127 / 64) & MANTISSA)))
        exponent = builder.and_(above, INT32(~MANTISSA))
        scale = builder.sub(exponent, INT32(below * EXPONENT_STEP))
        inverse = builder.sub(INT32(2 * bits_of_float(1.0)), scale)
        numbers = (builder.bitcast(it, FLOAT) for it in (scale, inverse))
        return context.make_tuple(builder, signature.return_type, numbers)

    return types.UniTuple(types.float32, 2)(types.int32, digits), generate


@intrinsic(prefer_literal=True)
def store_digits(typing_context, target, line, count, factor, digits, lanes):
    """Round numbers times a factor to integers, store their digits, and return their sum.

    The digits of the first half of ``count`` numbers lie in the order of a vector of bytes, those
    of the second half behind it, and then come those of the next place: as `tile_dot_int4` reads
    them. Halves that are shorter than a vector are a part of one.
    """
    size, half = 4 * lanes.literal_value, count.literal_value // 2
    rounding = constant_of(ir.VectorType(INT32, lanes.literal_value), 1 << DIGIT_BITS - 1)

    def generate(context, builder, signature, args):
        target_pointer, line_pointer, _, scalar, *_ = args
        words, total = rounding.type, ir.Constant(rounding.type, None)
        factors = emit_splat(builder, scalar, words.count)
        for index in range(0, 2 * half, words.count):
            number = emit_load_vector(builder, line.dtype, line_pointer, INT64(index), words.count)
            name = f"llvm.lrint.{suffix(words)}.{suffix(number.type)}"
            rest = call_intrinsic(builder, name, words, [builder.fmul(number, factors)])
            total = builder.add(total, rest)
            vector, inside = divmod(index % half, size)
            start = 2 * size * digits.literal_value * vector + inside + index // half * size
            for digit in reversed(range(digits.literal_value)):
                byte = builder.trunc(rest, ir.VectorType(INT8, words.count))
                place = builder.gep(target_pointer, [INT64(start + 2 * size * digit)])
                builder.store(byte, builder.bitcast(place, byte.type.as_pointer()), align=1)
                # A digit is of -128 to 127: the rest is what is nearest.
                rest = builder.add(rest, rounding)
                rest = builder.ashr(rest, constant_of(words, DIGIT_BITS))
        return call_intrinsic(builder, f"llvm.vector.reduce.add.{suffix(words)}", INT32, [total])

    return types.int32(target, line, count, types.float32, digits, lanes), generate


@intrinsic(prefer_literal=True)
def tile_dot_int4(typing_context, tile, a, a_stride, b, b_stride, count, factors, groups, digits):
    """Add to tile[i, j] the products of a's i-th row of digits and of integers of b's j-th row,
    times factors.

    A lane takes the integers of its own 32 bits of b, first the lower ones of each byte, and then
    the upper ones, as digits of a lie: all of the highest, and then the next. As many adjacent
    lanes as there are to one of ``groups`` share a factor. Those of tile[i, j] are
    ``i * columns + j`` vectors of factors on, of which the first ones are taken. ``count`` is how
    many bytes of b there are, or None for a whole vector. Strides are in bytes.
    """
    rows, columns, lanes = tile.rows, tile.columns, tile.vector.lanes
    sharing = [lane * groups.literal_value // lanes for lane in range(lanes)]
    size, words = 4 * lanes, ir.VectorType(INT32, lanes)
    is_whole = isinstance(count, types.NoneType)

    def load_halves(builder, pointer, index, given):
        if is_whole:
            both = emit_load_vector(builder, b.dtype, pointer, index, size)
        else:
            both = emit_load_first(builder, b.dtype, builder.gep(pointer, [index]), given, size)
        # No processor shifts bytes.
        both, mask = builder.bitcast(both, words), constant_of(words, 0x0F0F0F0F)
        upper = builder.lshr(both, constant_of(words, 4))
        return [builder.and_(half, mask) for half in (both, upper)]

    def dot_row(builder, integers, pointer, start):
        totals = [ir.Constant(words, None)] * columns
        for digit in range(digits.literal_value):
            if digit:
                up = constant_of(words, DIGIT_BITS)
                totals = [builder.shl(total, up) for total in totals]
            places = (builder.add(start, INT64((2 * digit + half) * size)) for half in range(2))
            parts = [emit_load_vector(builder, a.dtype, pointer, it, size) for it in places]
            parts = [builder.bitcast(part, words) for part in parts]
            totals = emit_nibble_dots(builder, integers, parts, totals)
        return totals

    def generate(context, builder, signature, args):
        result, a_pointer, a_step, b_pointer, b_step, given, factors_pointer, *_ = args
        integers = [
            load_halves(builder, b_pointer, builder.mul(b_step, INT64(column)), given)
            for column in range(columns)
        ]
        for row in range(rows):
            products = dot_row(builder, integers, a_pointer, builder.mul(a_step, INT64(row)))
            for position, product in enumerate(products, row * columns):
                # A whole vector, which the instruction that shuffles reads from memory itself.
                index = INT64(position * lanes)
                factor = emit_load_vector(builder, factors.dtype, factors_pointer, index, lanes)
                factor = emit_shuffle(builder, factor, factor, sharing)
                number = builder.sitofp(product, vector_ir(tile.vector))
                total = builder.extract_value(result, position)
                total = emit_fma(builder, number, factor, total)
                result = builder.insert_value(result, total, position)
        return result

    arguments = (tile, a, types.intp, b, types.intp, count, factors, groups, digits)
    return tile(*arguments), generate


def emit_nibble_dots(
    builder: ir.IRBuilder,
    columns: list[list[ir.Value]],
    digits: list[ir.Value],
    totals: list[ir.Value],
) -> list[ir.Value]:
    """Add the products of four bytes each to a lane of each column's total: of its integers of 4
    bits, in two halves, and of the digits of these.
    """
    lanes = totals[0].type.count
    if has_byte_dot(lanes):
        # Column by column, so that a product need not wait for the one before it: processors look
        # for others only so far ahead (1.04 to 1.24 times as fast on a Zen 4).
        name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
        for half, digit in enumerate(digits):
            totals = [
                call_intrinsic(builder, name, total.type, [total, column[half], digit])
                for column, total in zip(columns, totals, strict=True)
            ]
        return totals
    emit = _emit_byte_pairs if has_byte_pairs(lanes) else _emit_bytes
    return [
        emit(builder, column, digits, total) for column, total in zip(columns, totals, strict=True)
    ]


def _emit_byte_pairs(
    builder: ir.IRBuilder, integers: list[ir.Value], digits: list[ir.Value], total: ir.Value
) -> ir.Value:
    lanes = total.type.count
    # 16 bits have room for 17 times two such products.
    halves, ones = ir.VectorType(INT16, 2 * lanes), constant_of(total.type, 0x00010001)
    sums = ir.Constant(halves, None)
    for pair in zip(integers, digits, strict=True):
        bytes_ = [builder.bitcast(it, ir.VectorType(INT8, 4 * lanes)) for it in pair]
        name = f"llvm.x86.{_BYTE_DOTS[lanes]}"
        sums = builder.add(sums, call_intrinsic(builder, name, halves, bytes_))
    return emit_integer_pair_fma(builder, builder.bitcast(sums, total.type), ones, total)


def _emit_bytes(
    builder: ir.IRBuilder, integers: list[ir.Value], digits: list[ir.Value], total: ir.Value
) -> ir.Value:
    top = constant_of(total.type, 24)
    for integer_bytes, digit_bytes in zip(integers, digits, strict=True):
        for byte in range(4):
            up = constant_of(total.type, 24 - 8 * byte)
            integer = builder.lshr(builder.shl(integer_bytes, up), top)
            digit = builder.ashr(builder.shl(digit_bytes, up), top)
            total = emit_multiply_add(builder, integer, digit, total)
    return total
