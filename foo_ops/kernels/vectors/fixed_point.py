"""Numbers as integers of 16 or 24 bits, and their products with integers of 4 bits.

A number is such an integer times a scale that it has in common with others, a power of two. It is
kept as digits of base 256, from -128 to 127, the highest first, where the processor adds up four
products of bytes in a lane of 32 bits (VNNI); elsewhere they are of base 65536, and two products
are added up. Sums of products are exact, and become numbers at the end.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from foo_ops.kernels.compiler.processor import has_byte_dot
from foo_ops.kernels.vectors.instructions import (
    FLOAT,
    INT16,
    INT32,
    INT64,
    call_intrinsic,
    constant_of,
    emit_fma,
    emit_shuffle,
    emit_splat,
    suffix,
)
from foo_ops.kernels.vectors.memory import emit_load_first, emit_load_vector
from foo_ops.kernels.vectors.pairs import emit_integer_pair_fma

# The bits of a float32 that are not its sign, those of its mantissa, and one of its exponent.
MAGNITUDE, MANTISSA, EXPONENT_STEP = 0x7FFF_FFFF, 0x007F_FFFF, 0x0080_0000
LANE_BYTES = 4
"""Of a lane of integers, in which products are added up."""


@dataclass(frozen=True)
class Digits:
    """How numbers lie that are multiplied by integers of 4 bits in vectors of so many lanes.

    The digits of one place belong to ``parts`` vectors, of which each is multiplied by what a shift
    by 4 more bits brings out of the integers: lower and upper ones in turns, which belong to the
    first and second half of a group.

    Attributes:
        bits: of a number.
        lanes: of 32 bits.
        size: bytes of a digit.
    """

    bits: int
    lanes: int
    size: int

    @property
    def places(self) -> int:
        return -(-self.bits // self.base_bits)

    @property
    def parts(self) -> int:
        return 2 * self.size

    @property
    def per_byte(self) -> int:
        """How many bytes they take for each byte of integers."""
        return self.places * self.parts

    @property
    def base_bits(self) -> int:
        return 8 * self.size

    @property
    def vector_size(self) -> int:
        return LANE_BYTES * self.lanes


def digits_of(bits: int, lanes: int) -> Digits:
    """Return the digits of numbers of 16 or 24 bits that are quickest on the processor."""
    return Digits(bits, lanes, size=1 if has_byte_dot(lanes) else 2)


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
def scale_of_integers(typing_context, magnitude, bits):
    """Return the power of two that numbers up to one with this magnitude's bits are integers of so
    many bits times, and 1 over it.

    The highest 8 bits of the largest integer are 64 to 127.
    """
    below = bits.literal_value - 2

    def generate(context, builder, signature, args):
        # Of a mantissa of 127 / 64 and more the highest digit would be 128.
        above = builder.add(args[0], INT32(EXPONENT_STEP - (bits_of_float(127 / 64) & MANTISSA)))
        exponent = builder.and_(above, INT32(~MANTISSA))
        scale = builder.sub(exponent, INT32(below * EXPONENT_STEP))
        inverse = builder.sub(INT32(2 * bits_of_float(1.0)), scale)
        numbers = (builder.bitcast(it, FLOAT) for it in (scale, inverse))
        return context.make_tuple(builder, signature.return_type, numbers)

    return types.UniTuple(types.float32, 2)(types.int32, bits), generate


@intrinsic(prefer_literal=True)
def store_digits(typing_context, target, line, count, factor, bits, lanes):
    """Round numbers times a factor to integers, store their digits, and return their sum.

    They lie as `Digits` says and `tile_dot_int4` reads them. Where half of ``count`` numbers are
    fewer than the bytes of a vector, they take a part of one.
    """
    half = count.literal_value // 2

    def generate(context, builder, signature, args):
        target_pointer, line_pointer, _, scalar, *_ = args
        digits = digits_of(bits.literal_value, lanes.literal_value)
        words, vector_size = ir.VectorType(INT32, digits.lanes), digits.vector_size
        total, factors = ir.Constant(words, None), emit_splat(builder, scalar, words.count)
        for index in range(0, 2 * half, words.count):
            number = emit_load_vector(builder, line.dtype, line_pointer, INT64(index), words.count)
            name = f"llvm.lrint.{suffix(words)}.{suffix(number.type)}"
            integers = call_intrinsic(builder, name, words, [builder.fmul(number, factors)])
            total = builder.add(total, integers)
            vector, inside = divmod(index % half, vector_size)
            start = (digits.per_byte * vector + index // half) * vector_size + inside
            place = builder.gep(target_pointer, [INT64(start)])
            _store_digits_of_vector(builder, digits, place, integers)
        return call_intrinsic(builder, f"llvm.vector.reduce.add.{suffix(words)}", INT32, [total])

    return types.int32(target, line, count, types.float32, bits, lanes), generate


def _store_digits_of_vector(
    builder: ir.IRBuilder, digits: Digits, target: ir.Value, rest: ir.Value
) -> None:
    rounding = constant_of(rest.type, 1 << digits.base_bits - 1)
    for place in reversed(range(digits.places)):
        for offset in range(digits.size):
            some = range(offset, digits.lanes, digits.size)
            numbers = builder.trunc(
                emit_shuffle(builder, rest, rest, some),
                ir.VectorType(ir.IntType(digits.base_bits), len(some)),
            )
            start = (place * digits.parts + 2 * offset) * digits.vector_size
            address = builder.gep(target, [INT64(start)])
            builder.store(numbers, builder.bitcast(address, numbers.type.as_pointer()), align=1)
        # A digit is from minus half of the base on: the rest is what is nearest.
        rest = builder.add(rest, rounding)
        rest = builder.ashr(rest, constant_of(rest.type, digits.base_bits))


@intrinsic(prefer_literal=True)
def tile_dot_int4(typing_context, tile, a, a_stride, b, b_stride, count, factors, groups, bits):
    """Add to tile[i, j] the products of a's i-th row of digits and of integers of b's j-th row,
    times factors.

    A lane takes the integers of its own 32 bits of b. As many adjacent lanes as there are to one of
    ``groups`` share a factor. Those of tile[i, j] are ``i * columns + j`` vectors of factors on, of
    which the first ones are taken. ``count`` is how many bytes of b there are, or None for a whole
    vector. Strides are in bytes.
    """
    rows, columns, lanes = tile.rows, tile.columns, tile.vector.lanes
    sharing = [lane * groups.literal_value // lanes for lane in range(lanes)]
    is_whole = isinstance(count, types.NoneType)

    def load_integers(builder, digits, pointer, given):
        if is_whole:
            both = emit_load_vector(builder, b.dtype, pointer, INT64(0), digits.vector_size)
        else:
            both = emit_load_first(builder, b.dtype, pointer, given, digits.vector_size)
        return _split_integers(builder, digits, both)

    def add_product(builder, total, product, pointer, position):
        # A whole vector, which the instruction that shuffles reads from memory itself.
        factor = emit_load_vector(builder, factors.dtype, pointer, INT64(position * lanes), lanes)
        factor = emit_shuffle(builder, factor, factor, sharing)
        return emit_fma(builder, builder.sitofp(product, factor.type), factor, total)

    def generate(context, builder, signature, args):
        result, a_pointer, a_step, b_pointer, b_step, given, factors_pointer, *_ = args
        digits = digits_of(bits.literal_value, lanes)
        lines = [builder.gep(b_pointer, [builder.mul(b_step, INT64(it))]) for it in range(columns)]
        integers = [load_integers(builder, digits, line, given) for line in lines]
        for row in range(rows):
            line = builder.gep(a_pointer, [builder.mul(a_step, INT64(row))])
            products = _dot_columns(builder, digits, a.dtype, line, integers)
            for position, product in enumerate(products, row * columns):
                total = builder.extract_value(result, position)
                total = add_product(builder, total, product, factors_pointer, position)
                result = builder.insert_value(result, total, position)
        return result

    arguments = (tile, a, types.intp, b, types.intp, count, factors, groups, bits)
    return tile(*arguments), generate


def _split_integers(builder: ir.IRBuilder, digits: Digits, both: ir.Value) -> list[ir.Value]:
    """Return integers of 4 bits as parts of vectors, each as long as a digit."""
    # No processor shifts bytes.
    halves = ir.VectorType(INT16, 2 * digits.lanes)
    both, mask = (
        builder.bitcast(both, halves),
        constant_of(halves, 0x0F0F if digits.size == 1 else 15),
    )
    shifted = (builder.lshr(both, constant_of(halves, 4 * part)) for part in range(digits.parts))
    words = ir.VectorType(INT32, digits.lanes)
    return [builder.bitcast(builder.and_(part, mask), words) for part in shifted]


def _dot_columns(
    builder: ir.IRBuilder,
    digits: Digits,
    dtype: str,
    line: ir.Value,
    columns: list[list[ir.Value]],
) -> list[ir.Value]:
    """Return the sums of products of a row's digits and of each column's integers."""
    words = ir.VectorType(INT32, digits.lanes)
    totals = [ir.Constant(words, None)] * len(columns)
    for place in range(digits.places):
        if place:
            up = constant_of(words, digits.base_bits)
            totals = [builder.shl(total, up) for total in totals]
        for part in range(digits.parts):
            index = INT64((place * digits.parts + part) * digits.vector_size)
            digit = emit_load_vector(builder, dtype, line, index, digits.vector_size)
            digit = builder.bitcast(digit, words)
            # Column by column, so that a product need not wait for the one before it: processors
            # look for others only so far ahead (1.04 to 1.24 times as fast on a Zen 4).
            totals = [
                _emit_dot(builder, digits, column[part], digit, total)
                for column, total in zip(columns, totals, strict=True)
            ]
    return totals


def _emit_dot(
    builder: ir.IRBuilder, digits: Digits, integers: ir.Value, digit: ir.Value, total: ir.Value
) -> ir.Value:
    """Add the products of four bytes to a lane, or of two digits of two bytes."""
    if digits.size == 2:
        return emit_integer_pair_fma(builder, integers, digit, total)
    name = f"llvm.x86.avx512.vpdpbusd.{32 * digits.lanes}"
    return call_intrinsic(builder, name, total.type, [total, integers, digit])
