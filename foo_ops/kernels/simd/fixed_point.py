"""Numbers of few bits: fixed point, and weights of 8 and 4 bits."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from foo_ops.kernels.compiler.processor import (
    has_bfloat16_dot,
    has_byte_dot,
    has_byte_shuffle,
    has_float_shuffle,
)
from foo_ops.kernels.simd.memory import emit_load_first, emit_load_vector
from foo_ops.kernels.simd.narrow import (
    BFLOAT,
    emit_integer_pair_fma,
    emit_quad_fma,
    emit_unsigned_bytes,
)
from foo_ops.kernels.simd.types import (
    ELEMENTS,
    FLOAT,
    INT8,
    INT16,
    INT32,
    INT64,
    Tile,
    Vector,
    call_intrinsic,
    constant_of,
    emit_fma,
    emit_numbers_of_bytes,
    emit_shuffle,
    emit_splat,
    narrow,
    shaped,
    suffix,
)

# -------------------------------------------------------------------------------------- fixed point

# Numbers as integers of 8, 16 or 24 bits, and their products with weights of few bits: integers of
# 4 or 8 bits, or the codes of floating-point numbers of 4, which a table turns into integers. If
# the table has any numbers, products are of float32: a "digit" is a number as it is.
#
# A number is such an integer times a scale, a power of two that it shares with others. If the
# processor adds up four products of bytes in a 32-bit lane (VNNI), the integer is stored as digits
# of base 256, from -128 to 127, the highest first; otherwise the base is 65536, and two products
# are added up. Sums of products are exact, and are converted to floats at the end.


# The bits of a float32 except its sign, the bits of its mantissa, and the lowest of its exponent.
MAGNITUDE, MANTISSA, EXPONENT_STEP = 0x7FFF_FFFF, 0x007F_FFFF, 0x0080_0000
LANE_BYTES = 4
"""Bytes of a lane of integers, in which products are added up."""
INT4, FLOAT4, TABLE4, BYTE = "int4", "float4", "table4", "int8"
"""Codes of weights. Those of 4 bits are integers, half a group apart in a byte; adjacent numbers of
E2M1 (Open Compute Project 2023, "OCP Microscaling Formats (MX) Specification", 5.3.3); or adjacent
numbers of a table. Those of 8 bits are integers with a sign."""
CODE_BITS = {INT4: 4, FLOAT4: 4, TABLE4: 4, BYTE: 8}
RANGES = {INT4: (0, 15), BYTE: (-128, 127)}
"""The smallest and the largest code."""
TABLE_SIZE = 16
SMALLEST_ROUNDED = 2.0**-100
"""Numbers of 8 bits have a scale of 0 if their largest magnitude is smaller: its inverse would be
infinite."""
FLOAT4_ZERO = 12
# By code, FLOAT4_ZERO plus twice the number: bytes without a sign, for products of bytes.
_MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)
_FLOAT4_INTEGERS = tuple(FLOAT4_ZERO + it for it in (*_MAGNITUDES, *(-it for it in _MAGNITUDES)))
_BYTE_SHUFFLES = {16: "ssse3.pshuf.b.128", 32: "avx2.pshuf.b", 64: "avx512.pshuf.b.512"}


@dataclass(frozen=True)
class Digits:
    """The layout of numbers that are multiplied by integers of few bits.

    The digits of one place are in ``parts`` vectors. Each is multiplied by the integers shifted
    right by ``code_bits`` more bits: with 4, lower and upper integers in turn, of the first and
    second half of a group.

    Attributes:
        bits: the bits of a number.
        lanes: the 32-bit lanes of a vector.
        size: the bytes of a digit; 4 for numbers of float32.
        code_bits: the bits of an integer.
    """

    bits: int
    lanes: int
    size: int
    code_bits: int

    @property
    def places(self) -> int:
        return -(-self.bits // self.base_bits)

    @property
    def codes_per_byte(self) -> int:
        return 8 // self.code_bits

    @property
    def parts(self) -> int:
        return self.codes_per_byte * self.size

    @property
    def per_byte(self) -> int:
        """Bytes of digits for each byte of integers."""
        return self.places * self.parts

    @property
    def base_bits(self) -> int:
        return 8 * self.size

    @property
    def vector_size(self) -> int:
        return LANE_BYTES * self.lanes


def digits_of(bits: int, lanes: int, codes: str) -> Digits:
    """Return the fastest layout of numbers of 8, 16 or 24 bits on the processor, or of float32."""
    size = LANE_BYTES if codes == TABLE4 else 1 if has_byte_dot(lanes) else 2
    return Digits(bits, lanes, size, CODE_BITS[codes])


def bits_of_float(number: float) -> int:
    """Return the bits of a float32; bits of magnitudes compare like magnitudes, NaN is largest."""
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
    """Return the scale for numbers up to a magnitude, given by its bits, and the inverse.

    The scale is the power of two by which to divide, so that the numbers become integers of
    ``bits`` bits. The highest 8 bits of the largest integer are 64 to 127.
    """
    below = bits.literal_value - 2

    def generate(context, builder, signature, args):
        # With a mantissa of 127 / 64 or more, the highest digit would be 128.
        above = builder.add(args[0], INT32(EXPONENT_STEP - (bits_of_float(127 / 64) & MANTISSA)))
        exponent = builder.and_(above, INT32(~MANTISSA))
        scale = builder.sub(exponent, INT32(below * EXPONENT_STEP))
        inverse = builder.sub(INT32(2 * bits_of_float(1.0)), scale)
        numbers = (builder.bitcast(it, FLOAT) for it in (scale, inverse))
        return context.make_tuple(builder, signature.return_type, numbers)

    return types.UniTuple(types.float32, 2)(types.int32, bits), generate


@intrinsic
def scale_of_bytes(typing_context, magnitude):
    """Return the scale with which numbers up to a magnitude become -127 to 127, and the inverse.

    The magnitude is given by its bits; it may be a vector. Below SMALLEST_ROUNDED, the scale is 0.
    For infinities and NaN it is NaN, with inverse 0.
    """
    is_vector = isinstance(magnitude, Vector)
    result = Vector(types.float32, magnitude.lanes) if is_vector else types.float32

    def generate(context, builder, signature, args):
        bits = args[0]

        def constant(number: float) -> ir.Value:
            scalar = ir.Constant(FLOAT, number)
            return emit_splat(builder, scalar, magnitude.lanes) if is_vector else scalar

        def is_below(number: float) -> ir.Value:
            bound = builder.bitcast(constant(number), bits.type)
            return builder.icmp_signed("<", bits, bound)

        largest, most = builder.bitcast(bits, shaped(FLOAT, bits.type)), constant(127.0)
        is_small, is_finite = is_below(SMALLEST_ROUNDED), is_below(math.inf)
        scale = builder.select(is_small, constant(0.0), builder.fdiv(largest, most))
        scale = builder.select(is_finite, scale, constant(math.nan))
        inverse = builder.select(is_small, constant(0.0), builder.fdiv(most, largest))
        inverse = builder.select(is_finite, inverse, constant(0.0))
        return context.make_tuple(builder, signature.return_type, (scale, inverse))

    return types.UniTuple(result, 2)(magnitude), generate


@intrinsic
def larger_magnitudes(typing_context, largest, vector):
    """Return the larger of bits and those of a vector's magnitudes, lane by lane."""

    def generate(context, builder, signature, args):
        words = args[0].type
        bits = builder.and_(builder.bitcast(args[1], words), constant_of(words, MAGNITUDE))
        return call_intrinsic(builder, f"llvm.smax.{suffix(words)}", words, [args[0], bits])

    return largest(largest, vector), generate


def _make_reduction(operation: str) -> Any:
    """Make the intrinsic ``reduce(vector)`` for the lanes of a vector of int32."""

    @intrinsic
    def reduce(typing_context, vector):
        def generate(context, builder, signature, args):
            name = f"llvm.vector.reduce.{operation}.{suffix(args[0].type)}"
            return call_intrinsic(builder, name, INT32, [args[0]])

        return types.int32(vector), generate

    return reduce


largest_lane, sum_of_lanes = _make_reduction("smax"), _make_reduction("add")


@intrinsic
def store_bytes(typing_context, pointer, index, vector, factor):
    """Round numbers times a factor to integers, ties to even; store bytes and return int32.

    Bytes without a sign are BYTE_OFFSET more.
    """
    result = Vector(types.int32, vector.lanes)

    def generate(context, builder, signature, args):
        place, start, numbers, scalar = args
        integers = _round_products(builder, numbers, emit_splat(builder, scalar, vector.lanes))
        bytes_ = builder.trunc(integers, ir.VectorType(INT8, vector.lanes))
        if pointer.dtype == "uint8":
            bytes_ = emit_unsigned_bytes(builder, bytes_)
        address = builder.bitcast(builder.gep(place, [start]), bytes_.type.as_pointer())
        builder.store(bytes_, address, align=1)
        return integers

    return result(pointer, types.intp, vector, types.float32), generate


def _round_products(builder: ir.IRBuilder, numbers: ir.Value, factors: ir.Value) -> ir.Value:
    words = shaped(INT32, numbers.type)
    name = f"llvm.lrint.{suffix(words)}.{suffix(numbers.type)}"
    return call_intrinsic(builder, name, words, [builder.fmul(numbers, factors)])


@intrinsic(prefer_literal=True)
def store_digits(typing_context, target, line, count, factor, bits, lanes, codes):
    """Round numbers times a factor to integers, store their digits, and return their sum.

    The layout is that of `Digits`, as `tile_dot_codes` reads it. If the integers for ``count``
    numbers are fewer bytes than a vector has, the digits take part of a vector.
    """
    size = count.literal_value * CODE_BITS[codes.literal_value] // 8
    in_pairs = codes.literal_value == FLOAT4

    def load_numbers(builder, pointer, index, lanes):
        if not in_pairs:
            return emit_load_vector(builder, line.dtype, pointer, INT64(index), lanes)
        is_upper, start = divmod(index, size)
        first, second = (
            emit_load_vector(builder, line.dtype, pointer, INT64(2 * start + it), lanes)
            for it in (0, lanes)
        )
        return emit_shuffle(builder, first, second, range(is_upper, 2 * lanes, 2))

    def generate(context, builder, signature, args):
        target_pointer, line_pointer, _, scalar, *_ = args
        digits = digits_of(bits.literal_value, lanes.literal_value, codes.literal_value)
        words, vector_size = ir.VectorType(INT32, digits.lanes), digits.vector_size
        total, factors = ir.Constant(words, None), emit_splat(builder, scalar, words.count)
        for index in range(0, count.literal_value, words.count):
            number = load_numbers(builder, line_pointer, index, words.count)
            integers = _round_products(builder, number, factors)
            total = builder.add(total, integers)
            vector, inside = divmod(index % size, vector_size)
            start = (digits.per_byte * vector + index // size) * vector_size + inside
            place = builder.gep(target_pointer, [INT64(start)])
            _store_digits_of_vector(builder, digits, place, integers)
        return call_intrinsic(builder, f"llvm.vector.reduce.add.{suffix(words)}", INT32, [total])

    return types.int32(target, line, count, types.float32, bits, lanes, codes), generate


@intrinsic(prefer_literal=True)
def deinterleave_numbers(typing_context, line, lanes):
    """Reorder the ``8 * LANES`` float32 at a pointer, in place, to digits for TABLE4.

    A lane of codes has those of 8 adjacent numbers: vector ``i`` gets the numbers ``i``, ``8 + i``,
    ``16 + i``, ...
    """
    count = lanes.literal_value

    def generate(context, builder, signature, args):
        pointer, _ = args
        parts = digits_of(32, count, TABLE4).parts
        vectors = [
            emit_load_vector(builder, line.dtype, pointer, INT64(part * count), count)
            for part in range(parts)
        ]
        for part, vector in enumerate(_every_other(builder, vectors)):
            place = builder.gep(pointer, [INT64(part * count)])
            builder.store(vector, builder.bitcast(place, vector.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(line, lanes), generate


def _every_other(builder: ir.IRBuilder, vectors: list[ir.Value]) -> list[ir.Value]:
    """Sort the lanes of n adjacent vectors by the remainder of their index by n.

    Lanes of an even index, and those of an odd one, are sorted by the next bit of the index.
    """
    if len(vectors) == 1:
        return vectors
    count = vectors[0].type.count
    halves = [
        _every_other(
            builder,
            [
                emit_shuffle(builder, first, second, range(odd, 2 * count, 2))
                for first, second in zip(vectors[::2], vectors[1::2])
            ],
        )
        for odd in range(2)
    ]
    return [it for pair in zip(*halves) for it in pair]


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
            part = place * digits.parts + digits.codes_per_byte * offset
            start = part * digits.vector_size
            address = builder.gep(target, [INT64(start)])
            builder.store(numbers, builder.bitcast(address, numbers.type.as_pointer()), align=1)
        # A digit is at least minus half of the base, so the rest is rounded to nearest.
        rest = builder.add(rest, rounding)
        rest = builder.ashr(rest, constant_of(rest.type, digits.base_bits))


@intrinsic(prefer_literal=True)
def tile_dot_codes(
    typing_context, tile, a, a_stride, b, b_stride, count, factors, groups, bits, codes
):
    """Add to tile[i, j] the products of a's i-th row of digits and b's j-th row of integers.

    ``codes`` is INT4, FLOAT4 for the integers ``2 * number + FLOAT4_ZERO``, or BYTE for integers
    plus BYTE_OFFSET.

    The products are multiplied by factors. A lane takes the integers of its own 32 bits of b. The
    adjacent lanes of each of ``groups`` share a factor. The factors of tile[i, j] are the first
    ones of the vector ``i * columns + j``. ``count`` is the number of bytes of b, or None for a
    whole vector; but with INT4, the factors of others must be zeros. Strides are in bytes.
    """
    rows, columns, lanes = tile.rows, tile.columns, tile.vector.lanes

    def split_integers(builder, digits, both):
        if codes.literal_value == BYTE:
            both = emit_unsigned_bytes(builder, both)
        integers = _split_integers(builder, digits, both)
        if codes.literal_value == FLOAT4:
            integers = [_emit_integers_of_float4(builder, digits, it) for it in integers]
        return integers

    def generate(context, builder, signature, args):
        result, a_pointer, a_step, b_pointer, b_step, given, factors_pointer, *_ = args
        digits = digits_of(bits.literal_value, lanes, codes.literal_value)
        both = _load_lines(builder, b, b_pointer, b_step, (count, given), columns, lanes)
        integers = [split_integers(builder, digits, it) for it in both]
        for row in range(rows):
            line = builder.gep(a_pointer, [builder.mul(a_step, INT64(row))])
            products = _dot_columns(builder, digits, a.dtype, line, integers)
            for position, product in enumerate(products, row * columns):
                factor = _load_shared(builder, factors_pointer, position, lanes, groups)
                total = builder.extract_value(result, position)
                total = emit_fma(builder, builder.sitofp(product, factor.type), factor, total)
                result = builder.insert_value(result, total, position)
        return result

    return tile(tile, a, types.intp, b, types.intp, count, factors, groups, bits, codes), generate


def _load_shared(
    builder: ir.IRBuilder, factors: ir.Value, number: int, lanes: int, groups: types.Literal
) -> ir.Value:
    """Load a vector whose first factors are each shared by adjacent lanes."""
    # A whole vector, so that the shuffle instruction can read it from memory.
    factor = emit_load_vector(builder, "float32", factors, INT64(number * lanes), lanes)
    sharing = [lane * groups.literal_value // lanes for lane in range(lanes)]
    return emit_shuffle(builder, factor, factor, sharing)


@intrinsic(prefer_literal=True)
def tile_add_grouped(typing_context, tile, products, factors, groups):
    """Add products times factors to a tile.

    The adjacent lanes of each of ``groups`` share a factor. The factors of tile[i, j] are the first
    ones of the vector ``j``.
    """

    def generate(context, builder, signature, args):
        result, products_tile, pointer, _ = args
        for column in range(tile.columns):
            factor = _load_shared(builder, pointer, column, tile.vector.lanes, groups)
            for position in range(column, tile.rows * tile.columns, tile.columns):
                product = builder.extract_value(products_tile, position)
                total = builder.extract_value(result, position)
                total = emit_fma(builder, product, factor, total)
                result = builder.insert_value(result, total, position)
        return result

    return tile(tile, products, factors, groups), generate


def _load_lines(
    builder: ir.IRBuilder,
    b: types.Type,
    pointer: ir.Value,
    stride: ir.Value,
    count: tuple[types.Type, ir.Value],
    columns: int,
    lanes: int,
) -> list[ir.Value]:
    """Load a vector of bytes of each line, or the first ones if their count is not None."""
    count_type, given = count
    lines = [builder.gep(pointer, [builder.mul(stride, INT64(it))]) for it in range(columns)]
    if isinstance(count_type, types.NoneType):
        return [
            emit_load_vector(builder, b.dtype, it, INT64(0), LANE_BYTES * lanes) for it in lines
        ]
    return [emit_load_first(builder, b.dtype, it, given, LANE_BYTES * lanes) for it in lines]


@intrinsic(prefer_literal=True)
def tile_load_codes(typing_context, pointer, stride, count, columns, lanes):
    """Load a vector of codes of each of some rows of bytes, ``stride`` apart.

    ``count`` is the number of bytes, or None for a whole vector.
    """
    tile = Tile(columns.literal_value, 1, Vector(types.int32, lanes.literal_value))

    def generate(context, builder, signature, args):
        result, words = ir.Constant(context.get_value_type(tile), ir.Undefined), tile.vector.lanes
        lines = _load_lines(
            builder, pointer, *args[:2], (count, args[2]), tile.rows, tile.vector.lanes
        )
        for number, line in enumerate(lines):
            codes = builder.bitcast(line, ir.VectorType(INT32, words))
            result = builder.insert_value(result, codes, number)
        return result

    return tile(pointer, types.intp, count, columns, lanes), generate


@intrinsic
def tile_dot_table(typing_context, tile, a, a_stride, codes, table):
    """Add to tile[i, j] the products of a's i-th vector and the numbers of the j-th codes.

    The numbers are looked up in ``table`` by the lowest 4 bits. Returns also the next codes.
    """
    rows, columns, lanes = tile.rows, tile.columns, tile.vector.lanes

    def generate(context, builder, signature, args):
        result, a_pointer, a_step, tile_of_codes, numbers = args
        places = [builder.mul(a_step, INT64(row)) for row in range(rows)]
        factors = [emit_load_vector(builder, a.dtype, a_pointer, it, lanes) for it in places]
        for column in range(columns):
            of_column = builder.extract_value(tile_of_codes, column)
            number = _emit_numbers_of_table(builder, FLOAT, numbers, of_column)
            for row, factor in enumerate(factors):
                position = row * columns + column
                total = builder.extract_value(result, position)
                total = emit_fma(builder, factor, number, total)
                result = builder.insert_value(result, total, position)
            following = builder.lshr(of_column, constant_of(of_column.type, CODE_BITS[TABLE4]))
            tile_of_codes = builder.insert_value(tile_of_codes, following, column)
        return context.make_tuple(builder, signature.return_type, (result, tile_of_codes))

    return types.Tuple((tile, codes))(tile, a, types.intp, codes, table), generate


def _split_integers(builder: ir.IRBuilder, digits: Digits, both: ir.Value) -> list[ir.Value]:
    """Return vectors of integers, each widened to the size of a digit."""
    words = ir.VectorType(INT32, digits.lanes)
    if digits.parts == 1:
        return [builder.bitcast(both, words)]
    # No instruction shifts bytes, so at least 16 bits are shifted.
    size, bits = max(digits.size, 2), digits.code_bits
    wide = ir.VectorType(ir.IntType(8 * size), LANE_BYTES // size * digits.lanes)
    both, mask = (
        builder.bitcast(both, wide),
        constant_of(wide, 0x0F0F if digits.size == 1 else (1 << bits) - 1),
    )
    shifted = [builder.lshr(both, constant_of(wide, bits * part)) for part in range(digits.parts)]
    return [builder.bitcast(builder.and_(part, mask), words) for part in shifted]


def _emit_integers_of_float4(builder: ir.IRBuilder, digits: Digits, codes: ir.Value) -> ir.Value:
    """Return FLOAT4_ZERO plus twice the numbers of codes, each as wide as a digit."""
    in_bytes = ir.VectorType(INT8, digits.vector_size)
    codes, words = builder.bitcast(codes, in_bytes), codes.type
    if not has_byte_shuffle(digits.vector_size):
        integers = builder.add(
            _emit_doubled_float4(builder, codes), constant_of(in_bytes, FLOAT4_ZERO)
        )
    else:
        table = ir.Constant(in_bytes, [*_FLOAT4_INTEGERS] * (digits.vector_size // 16))
        name = _BYTE_SHUFFLES[digits.vector_size]
        integers = call_intrinsic(builder, f"llvm.x86.{name}", in_bytes, [table, codes])
    integers = builder.bitcast(integers, words)
    # The upper byte of a digit of two bytes is code 0.
    return integers if digits.size == 1 else builder.and_(integers, constant_of(words, 0x00FF00FF))


def _emit_numbers_of_table(
    builder: ir.IRBuilder, number: ir.Type, table: ir.Value, codes: ir.Value
) -> ir.Value:
    """Look up vectors of codes, the lower 4 bits of int32, in a table of numbers."""
    lanes = codes.type.count

    def lower_bits(mask: int) -> ir.Value:
        return builder.and_(codes, constant_of(codes.type, mask))

    def load_part(start: int) -> ir.Value:
        return emit_load_vector(builder, "float32", table, INT64(start), lanes)

    if number == FLOAT and has_float_shuffle(lanes):
        result = ir.VectorType(number, lanes)
        if lanes == TABLE_SIZE:
            name = "llvm.x86.avx512.permvar.sf.512"
            return call_intrinsic(builder, name, result, [load_part(0), codes])
        lower, upper = (
            call_intrinsic(builder, "llvm.x86.avx2.permps", result, [load_part(start), codes])
            for start in (0, lanes)
        )
        is_upper = builder.icmp_unsigned("!=", lower_bits(lanes), constant_of(codes.type, 0))
        return builder.select(is_upper, upper, lower)
    found = ir.Constant(ir.VectorType(number, lanes), ir.Undefined)
    codes = lower_bits(TABLE_SIZE - 1)
    for lane in range(lanes):
        code = builder.extract_element(codes, INT32(lane))
        loaded = builder.load(builder.gep(table, [builder.zext(code, INT64)]))
        found = builder.insert_element(found, loaded, INT32(lane))
    return found


def _dot_columns(
    builder: ir.IRBuilder,
    digits: Digits,
    dtype: str,
    line: ir.Value,
    columns: list[list[ir.Value]],
) -> list[ir.Value]:
    """Return the sums of products of a row's digits and each column's integers."""
    words = columns[0][0].type
    totals = [ir.Constant(words, None)] * len(columns)
    for place in range(digits.places):
        if place:
            up = constant_of(words, digits.base_bits)
            totals = [builder.shl(total, up) for total in totals]
        for part in range(digits.parts):
            index = INT64((place * digits.parts + part) * digits.vector_size)
            digit = emit_load_vector(builder, dtype, line, index, digits.vector_size)
            digit = builder.bitcast(digit, words)
            # Alternate columns, so that a product need not wait for the one before: a processor's
            # lookahead is limited (1.04 to 1.24 times as fast on a Zen 4).
            totals = [
                _emit_dot(builder, digits, column[part], digit, total)
                for column, total in zip(columns, totals, strict=True)
            ]
    return totals


def _emit_dot(
    builder: ir.IRBuilder, digits: Digits, integers: ir.Value, digit: ir.Value, total: ir.Value
) -> ir.Value:
    """Add the products of four bytes, or of two digits of two, to each lane."""
    multiply_add = emit_quad_fma if digits.size == 1 else emit_integer_pair_fma
    return multiply_add(builder, digit, integers, total)


# ------------------------------------------------------------------------- integers of 8 and 4 bits

# Converts 8-bit and 4-bit integers, as weights are stored, to floating-point numbers.
#
# A byte holds two 4-bit integers. LANES adjacent bytes hold two vectors: the lower integers are
# LANES adjacent numbers, the upper ones as many numbers half a group further on. A number is
# (integer - zero) * scale.
#
# The two numbers of 4 bits in a byte (FLOAT4) are adjacent.


@intrinsic(prefer_literal=True)
def unpack_bytes(typing_context, target, source, scale, lanes):
    """Store LANES adjacent numbers of 8 bits, times a scale, as numbers of the target's dtype."""
    compute = ELEMENTS[target.dtype].compute

    def generate(context, builder, signature, args):
        count = lanes.literal_value
        scales = emit_splat(builder, args[2], count)
        bytes_ = _load_bytes(builder, args[1], count)
        numbers = emit_numbers_of_bytes(builder, source.dtype, bytes_, scales.type)
        value = builder.fmul(numbers, scales)
        _store_numbers(builder, target.dtype, args[0], value)
        return context.get_dummy_value()

    return types.void(target, source, compute, lanes), generate


LARGEST_ZERO = 64
"""Magnitude up to which a zero's whole part is subtracted from integers of 4 bits, as bytes."""


@intrinsic
def split_zeros(typing_context, zeros):
    """Split zeros into integers, each four times in 32 bits, and what is left: integers - zeros.

    Zeros that are too large, and NaN, have the integer 0.
    """
    quads = Vector(types.int32, zeros.lanes)

    def generate(context, builder, signature, args):
        words, numbers = ir.VectorType(INT32, zeros.lanes), args[0]
        name = f"llvm.fabs.{suffix(numbers.type)}"
        magnitudes = call_intrinsic(builder, name, numbers.type, [numbers])
        is_small = builder.fcmp_ordered("<=", magnitudes, constant_of(numbers.type, LARGEST_ZERO))
        integers = builder.select(is_small, builder.fptosi(numbers, words), constant_of(words, 0))
        rests = builder.fsub(builder.sitofp(integers, numbers.type), numbers)
        lowest = builder.and_(integers, constant_of(words, 0xFF))
        repeated = builder.mul(lowest, constant_of(words, 0x01010101))
        return context.make_tuple(builder, signature.return_type, (repeated, rests))

    return types.Tuple((quads, zeros))(zeros), generate


@intrinsic
def split_codes(typing_context, target, half, codes, index, zeros):
    """Store the lower and the upper 4 bits of bytes, minus integers, as bytes with a sign.

    Bytes are quads, those of a vector at ``index`` of ``codes``. The upper ones follow ``half``
    elements on.
    """

    def generate(context, builder, signature, args):
        place, distance, source, start, integers = args
        bytes_ = ir.VectorType(INT8, LANE_BYTES * zeros.lanes)
        both = emit_load_vector(builder, codes.dtype, source, start, zeros.lanes)
        both, integers = (builder.bitcast(it, bytes_) for it in (both, integers))
        lower = builder.and_(both, constant_of(bytes_, 15))
        upper = builder.lshr(both, constant_of(bytes_, 4))
        for part, address in ((lower, place), (upper, builder.gep(place, [distance]))):
            address = builder.bitcast(address, bytes_.as_pointer())
            builder.store(builder.sub(part, integers), address, align=1)
        return context.get_dummy_value()

    return types.void(target, types.intp, codes, types.intp, zeros), generate


@intrinsic(prefer_literal=True)
def round_codes(typing_context, target, half, quads, zeros, factors, codes):
    """Store codes less a zero and times a factor, rounded to bytes with a sign, ties to even.

    A vector has four bytes of codes in each lane; from the upper bits of bytes, those of 4 bits are
    stored ``half`` elements on.
    """
    bits = CODE_BITS[codes.literal_value]

    def generate(context, builder, signature, args):
        place, distance, words, zero, factor, _ = args
        for shift in range(0, 8, bits):
            result = ir.Constant(words.type, None)
            for start in range(0, 32, 8):
                code = _code_at(builder, words, start + shift, codes.literal_value)
                number = builder.fsub(builder.sitofp(code, zero.type), zero)
                rounded = _round_products(builder, number, factor)
                byte = builder.and_(rounded, constant_of(words.type, 0xFF))
                result = builder.or_(result, builder.shl(byte, constant_of(words.type, start)))
            address = place if shift == 0 else builder.gep(place, [distance])
            builder.store(result, builder.bitcast(address, words.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(target, types.intp, quads, zeros, factors, codes), generate


def _code_at(builder: ir.IRBuilder, words: ir.Value, start: int, codes: str) -> ir.Value:
    """Return the code that begins at a bit of each lane, as int32."""
    if codes == BYTE:
        upper = builder.shl(words, constant_of(words.type, 24 - start))
        return builder.ashr(upper, constant_of(words.type, 24))
    lower = builder.lshr(words, constant_of(words.type, start))
    return builder.and_(lower, constant_of(words.type, 15))


@intrinsic(prefer_literal=True)
def unpack_int4(typing_context, target, half, source, scale, zero, lanes):
    """Store the lower numbers of LANES adjacent bytes, and the upper ones ``half`` elements on."""
    compute = ELEMENTS[target.dtype].compute

    def generate(context, builder, signature, args):
        target_pointer, distance, source_pointer, *factors, _ = args
        count = lanes.literal_value
        scales, zeros = (emit_splat(builder, factor, count) for factor in factors)
        lower, upper = (
            builder.fmul(builder.fsub(builder.sitofp(integer, scales.type), zeros), scales)
            for integer in _load_pairs(builder, source_pointer, count)
        )
        _store_numbers(builder, target.dtype, target_pointer, lower)
        _store_numbers(builder, target.dtype, builder.gep(target_pointer, [distance]), upper)
        return context.get_dummy_value()

    return types.void(target, types.intp, source, compute, compute, lanes), generate


@intrinsic(prefer_literal=True)
def unpack_float4(typing_context, target, source, scale, lanes):
    """Store the 2 * LANES numbers of adjacent bytes, times twice ``scale``."""
    compute = ELEMENTS[target.dtype].compute

    def generate(context, builder, signature, args):
        target_pointer, source_pointer, factor, _ = args
        scales = emit_splat(builder, factor, lanes.literal_value)
        numbers = [
            builder.fmul(builder.sitofp(_emit_doubled_float4(builder, codes), scales.type), scales)
            for codes in _load_pairs(builder, source_pointer, lanes.literal_value)
        ]
        _store_interleaved(builder, target.dtype, target_pointer, *numbers)
        return context.get_dummy_value()

    return types.void(target, source, compute, lanes), generate


@intrinsic(prefer_literal=True)
def unpack_table4(typing_context, target, source, scale, table, lanes):
    """Store the 2 * LANES numbers of adjacent bytes, times ``scale``."""
    compute = ELEMENTS[target.dtype].compute

    def generate(context, builder, signature, args):
        target_pointer, source_pointer, factor, numbers, _ = args
        scales = emit_splat(builder, factor, lanes.literal_value)
        pair = [
            builder.fmul(_emit_numbers_of_table(builder, scales.type.element, numbers, it), scales)
            for it in _load_pairs(builder, source_pointer, lanes.literal_value)
        ]
        _store_interleaved(builder, target.dtype, target_pointer, *pair)
        return context.get_dummy_value()

    return types.void(target, source, compute, table, lanes), generate


@intrinsic
def doubled_float4(typing_context, code):
    """Return twice the number of a code, from -12 to 12."""

    def generate(context, builder, signature, args):
        return _emit_doubled_float4(builder, builder.zext(args[0], INT32))

    return types.int32(types.uint8), generate


def _emit_doubled_float4(builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
    """Compute twice the numbers of codes without a table, in integers of the codes' width."""

    def above(number: int) -> ir.Value:
        name = f"llvm.usub.sat.{suffix(codes.type)}"
        bound = constant_of(codes.type, number)
        return call_intrinsic(builder, name, codes.type, [magnitude, bound])

    # Twice the magnitudes are 0, 1, 2, 3, 4, 6, 8, 12: steps of 1, then 2, then 4.
    magnitude = builder.and_(codes, constant_of(codes.type, 7))
    steps = builder.add(magnitude, above(4))
    doubled = builder.add(steps, builder.shl(above(6), constant_of(codes.type, 1)))
    is_negative = builder.icmp_unsigned(">=", codes, constant_of(codes.type, 8))
    return builder.select(is_negative, builder.neg(doubled), doubled)


@intrinsic
def half_power(typing_context, exponent):
    """Return half of the scale of an E8M0 exponent: 2^(exponent - 128), or NaN for 255."""

    def generate(context, builder, signature, args):
        return _emit_half_powers(builder, builder.zext(args[0], INT32))

    return types.float32(types.uint8), generate


@intrinsic(prefer_literal=True)
def load_half_powers(typing_context, pointer, index, count, lanes):
    """Load ``count`` exponents, at most LANES, as `half_power`; the other lanes are 2^-128."""
    result = Vector(types.float32, lanes.literal_value)

    def generate(context, builder, signature, args):
        data, start, most, _ = args
        place = builder.gep(data, [start])
        exponents = emit_load_first(builder, pointer.dtype, place, most, result.lanes)
        wide = builder.zext(exponents, ir.VectorType(INT32, result.lanes))
        return _emit_half_powers(builder, wide)

    return result(pointer, types.intp, types.intp, lanes), generate


def _emit_half_powers(builder: ir.IRBuilder, exponents: ir.Value) -> ir.Value:
    def constant(number: int) -> ir.Value:
        return constant_of(exponents.type, number)

    # 2^-128 and 2^-127 are subnormal.
    normal = builder.shl(builder.sub(exponents, constant(1)), constant(23))
    subnormal = builder.shl(constant(1 << 21), builder.and_(exponents, constant(1)))
    is_subnormal = builder.icmp_unsigned("<", exponents, constant(2))
    bits = builder.select(is_subnormal, subnormal, normal)
    is_nan = builder.icmp_unsigned("==", exponents, constant(255))
    bits = builder.select(is_nan, constant(bits_of_float(math.nan)), bits)
    return builder.bitcast(bits, shaped(FLOAT, exponents.type))


def _load_bytes(builder: ir.IRBuilder, pointer: ir.Value, lanes: int) -> ir.Value:
    return builder.load(builder.bitcast(pointer, ir.VectorType(INT8, lanes).as_pointer()), align=1)


def _load_pairs(builder: ir.IRBuilder, pointer: ir.Value, lanes: int) -> tuple[ir.Value, ir.Value]:
    """Return the lower and the upper 4 bits of adjacent bytes, as int32."""
    wide = ir.VectorType(INT32, lanes)
    both = builder.zext(_load_bytes(builder, pointer, lanes), wide)
    return builder.and_(both, constant_of(wide, 15)), builder.lshr(both, constant_of(wide, 4))


def _store_interleaved(
    builder: ir.IRBuilder, dtype: str, target: ir.Value, first: ir.Value, second: ir.Value
) -> None:
    """Store the lanes of two vectors in turn, rounded to the dtype."""
    count = first.type.count
    for half in range(2):
        lanes_of_half = range(half * count // 2, (half + 1) * count // 2)
        order = [it for lane in lanes_of_half for it in (lane, count + lane)]
        place = builder.gep(target, [INT64(half * count)])
        _store_numbers(builder, dtype, place, emit_shuffle(builder, first, second, order))


def _store_numbers(builder: ir.IRBuilder, dtype: str, pointer: ir.Value, value: ir.Value) -> None:
    """Store adjacent numbers, rounded to the dtype."""
    if dtype == "bfloat16" and has_bfloat16_dot():
        halves = builder.fptrunc(value, ir.VectorType(BFLOAT, value.type.count))
        stored = builder.bitcast(halves, ir.VectorType(INT16, value.type.count))
    else:
        stored = narrow(builder, dtype, value)
    address = builder.bitcast(pointer, stored.type.as_pointer())
    builder.store(stored, address, align=ELEMENTS[dtype].size)
