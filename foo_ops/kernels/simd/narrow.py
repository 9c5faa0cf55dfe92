"""Narrow numbers: pairs of 16 bits, four bytes, and limbs of bfloat16."""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from foo_ops.kernels.compiler.processor import (
    has_bfloat16_dot,
    has_byte_dot,
    has_integer_dot,
)
from foo_ops.kernels.simd.memory import emit_load_vector
from foo_ops.kernels.simd.types import (
    FLOAT,
    INT16,
    INT32,
    INT64,
    Vector,
    bits_of,
    call_intrinsic,
    constant_of,
    emit_fma,
    emit_multiply_add,
    emit_shuffle,
    narrow,
    round_upper_half,
    shaped,
)

# -------------------------------------------------------------------------------------------- pairs

# Multiplies and packs pairs in 32 bits, of bfloat16 (dtype bfloat16x2) or int16 (int16x2): two
# products at once; and four bytes in 32 bits (int8x4, uint8x4).


PAIRS, INTEGER_PAIRS = "bfloat16x2", "int16x2"
QUADS, UNSIGNED_QUADS = "int8x4", "uint8x4"
"""Four bytes in 32 bits. Products are of bytes with a sign and bytes without one."""
BYTE_OFFSET = 128
"""Added to bytes with a sign, it makes them bytes without one."""
UPPER_HALF = 0xFFFF0000
_INTEGER_DOTS = {4: "sse2.pmadd.wd", 8: "avx2.pmadd.wd", 16: "avx512.pmaddw.d.512"}


class _BFloat(ir.Type):
    """LLVM's type bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"


BFLOAT = _BFloat()


def emit_pair_fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, total: ir.Value) -> ir.Value:
    """Compute total + a[0] * b[0] + a[1] * b[1] for vectors of pairs."""
    lanes = total.type.count
    if has_bfloat16_dot():
        pairs = ir.VectorType(BFLOAT, 2 * lanes)
        name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}"
        factors = [builder.bitcast(a, pairs), builder.bitcast(b, pairs)]
        return call_intrinsic(builder, name, total.type, [total, *factors])
    for part in (emit_first_of_pairs, emit_second_of_pairs):
        total = emit_fma(builder, part(builder, a), part(builder, b), total)
    return total


def emit_integer_pair_fma(
    builder: ir.IRBuilder, a: ir.Value, b: ir.Value, total: ir.Value
) -> ir.Value:
    """Compute total + a[0] * b[0] + a[1] * b[1] for vectors of pairs of int16.

    With VNNI, LLVM fuses it to one instruction.
    """
    lanes = total.type.count
    if has_integer_dot(lanes):
        halves = ir.VectorType(INT16, 2 * lanes)
        factors = [builder.bitcast(value, halves) for value in (a, b)]
        name = f"llvm.x86.{_INTEGER_DOTS[lanes]}"
        return builder.add(total, call_intrinsic(builder, name, total.type, factors))
    half = constant_of(total.type, 16)
    for shift in (0, 16):
        # The lower half is shifted up first, so that the arithmetic shift extends its sign.
        x, y = (builder.shl(it, constant_of(it.type, 16 - shift)) for it in (a, b))
        x, y = builder.ashr(x, half), builder.ashr(y, half)
        total = emit_multiply_add(builder, x, y, total)
    return total


def emit_quad_fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, total: ir.Value) -> ir.Value:
    """Compute total plus the four products of a's bytes with a sign and b's without one.

    Sums wrap around, and never saturate.
    """
    lanes = total.type.count
    if has_byte_dot(lanes):
        name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
        return call_intrinsic(builder, name, total.type, [total, b, a])
    # The even and then the odd bytes, as int16: a product of two bytes fits, but not a sum of two.
    halves = ir.VectorType(INT16, 2 * lanes)
    a, b = builder.bitcast(a, halves), builder.bitcast(b, halves)
    eight = constant_of(halves, 8)
    signed = (builder.ashr(builder.shl(a, eight), eight), builder.ashr(a, eight))
    unsigned = (builder.and_(b, constant_of(halves, 0xFF)), builder.lshr(b, eight))
    for first, second in zip(signed, unsigned, strict=True):
        pairs = builder.bitcast(first, total.type), builder.bitcast(second, total.type)
        total = emit_integer_pair_fma(builder, *pairs, total)
    return total


def emit_unsigned_quad_fma(
    builder: ir.IRBuilder, a: ir.Value, b: ir.Value, total: ir.Value
) -> ir.Value:
    """Like `emit_quad_fma`, for a's bytes without a sign and b's with one."""
    return emit_quad_fma(builder, b, a, total)


def emit_unsigned_bytes(builder: ir.IRBuilder, signed: ir.Value) -> ir.Value:
    """Add BYTE_OFFSET to each byte of a vector; others than bytes are read as bytes."""
    return builder.xor(signed, constant_of(signed.type, _offsets(signed.type)))


def _offsets(type_: ir.Type) -> int:
    """Return an integer of BYTE_OFFSET in all bytes."""
    return sum(BYTE_OFFSET << shift for shift in range(0, bits_of(type_), 8))


@intrinsic
def subtract_offsets(typing_context, totals, pointer, index):
    """Subtract from each lane BYTE_OFFSET times the four bytes of a quad with a sign."""

    def generate(context, builder, signature, args):
        before, place, start = args
        quads = emit_load_vector(builder, pointer.dtype, place, start, totals.lanes)
        offsets = constant_of(before.type, _offsets(before.type))
        products = emit_quad_fma(builder, quads, offsets, ir.Constant(before.type, None))
        return builder.sub(before, products)

    return totals(totals, pointer, types.intp), generate


def emit_first_of_pairs(builder: ir.IRBuilder, pairs: ir.Value) -> ir.Value:
    upper = builder.shl(pairs, constant_of(pairs.type, 16))
    return builder.bitcast(upper, shaped(FLOAT, pairs.type))


def emit_second_of_pairs(builder: ir.IRBuilder, pairs: ir.Value) -> ir.Value:
    upper = builder.and_(pairs, constant_of(pairs.type, UPPER_HALF))
    return builder.bitcast(upper, shaped(FLOAT, pairs.type))


def emit_pair(builder: ir.IRBuilder, first: ir.Value, second: ir.Value) -> ir.Value:
    """Round two numbers to a pair of bfloat16; scalars and vectors alike."""
    lower, upper = (round_upper_half(builder, value) for value in (first, second))
    lower = builder.lshr(lower, constant_of(lower.type, 16))
    return builder.or_(lower, builder.and_(upper, constant_of(upper.type, UPPER_HALF)))


@intrinsic
def pack_pairs(typing_context, a, b):
    result = Vector(types.int32, a.lanes)

    def generate(context, builder, signature, args):
        if has_bfloat16_dot():
            return _pack_natively(builder, *args)
        return emit_pair(builder, *args)

    return result(a, a), generate


def _pack_natively(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    lanes = a.type.count
    name = f"llvm.x86.avx512bf16.cvtne2ps2bf16.{32 * lanes}"
    halves = call_intrinsic(builder, name, ir.VectorType(BFLOAT, 2 * lanes), [b, a])
    halves = builder.bitcast(halves, ir.VectorType(INT16, 2 * lanes))
    order = [half for lane in range(lanes) for half in (lane, lanes + lane)]
    return builder.bitcast(
        emit_shuffle(builder, halves, halves, order), ir.VectorType(INT32, lanes)
    )


def narrow_sums_of_pairs(builder: ir.IRBuilder, dtype: str, sums: ir.Value) -> ir.Value:
    """Convert like `narrow` what `emit_pair_fma` has added up.

    The instruction that rounds flushes subnormal numbers to zero; the one that adds leaves none.
    LLVM has it for 8 and 16 lanes.
    """
    lanes = sums.type.count
    if dtype != "bfloat16" or not has_bfloat16_dot() or lanes < 8:
        return narrow(builder, dtype, sums)
    name = f"llvm.x86.avx512bf16.cvtneps2bf16.{32 * lanes}"
    return call_intrinsic(builder, name, ir.VectorType(BFLOAT, lanes), [sums])


@intrinsic
def first_of_pairs(typing_context, pairs):
    result = Vector(types.float32, pairs.lanes)

    def generate(context, builder, signature, args):
        return emit_first_of_pairs(builder, args[0])

    return result(pairs), generate


@intrinsic
def second_of_pairs(typing_context, pairs):
    result = Vector(types.float32, pairs.lanes)

    def generate(context, builder, signature, args):
        return emit_second_of_pairs(builder, args[0])

    return result(pairs), generate


# -------------------------------------------------------------------------------------------- limbs

# Splits wider numbers into bfloat16 limbs, and stores and loads pairs of them.


_UPPER = 0xFFFF0000


@intrinsic
def bfloat16_limb(typing_context, x):
    """Round x to the nearest bfloat16 (halves away from zero), as float32.

    A NaN must be one that processors generate, whose last bits are not all ones.
    """

    def generate(context, builder, signature, args):
        bits = builder.bitcast(args[0], shaped(INT32, args[0].type))
        return _upper_half(builder, builder.add(bits, constant_of(bits.type, 0x8000)), args[0].type)

    return x(x), generate


@intrinsic
def bfloat16_limb_of_any(typing_context, x):
    """Round like `bfloat16_limb`, for any NaN."""

    def generate(context, builder, signature, args):
        bits = builder.bitcast(args[0], shaped(INT32, args[0].type))
        rounded = builder.add(bits, constant_of(bits.type, 0x8000))
        return _upper_half(builder, _select_nan(builder, args[0], bits, rounded), args[0].type)

    return x(x), generate


def _select_nan(builder: ir.IRBuilder, x: ir.Value, bits: ir.Value, others: ir.Value) -> ir.Value:
    """Return ``others``, but where x is NaN its bits, changed so that the upper half is a NaN."""
    quiet = builder.or_(bits, constant_of(bits.type, 0x400000))
    return builder.select(builder.fcmp_ordered("ord", x, x), others, quiet)


def _upper_half(builder: ir.IRBuilder, bits: ir.Value, type_: ir.Type) -> ir.Value:
    return builder.bitcast(builder.and_(bits, constant_of(bits.type, _UPPER)), type_)


@intrinsic
def pack_limbs(typing_context, a, b):
    """Pack the lanes of a and b, which are bfloat16 already, to a vector of bfloat16x2."""
    result = Vector(types.int32, a.lanes)

    def generate(context, builder, signature, args):
        wide = ir.VectorType(INT32, a.lanes)
        first, second = (builder.bitcast(value, wide) for value in args)
        first = builder.lshr(first, constant_of(wide, 16))
        return builder.or_(first, builder.and_(second, constant_of(wide, _UPPER)))

    return result(a, a), generate


@intrinsic
def store_halves(typing_context, pointer, index, a, b):
    """Store the lanes of a and then those of b, which are bfloat16 already, as bfloat16."""
    lanes = a.lanes

    def generate(context, builder, signature, args):
        halves = ir.VectorType(INT16, 2 * lanes)
        first, second = (builder.bitcast(value, halves) for value in args[2:])
        order = ir.Constant(ir.VectorType(INT32, 2 * lanes), list(range(1, 4 * lanes, 2)))
        value = builder.shuffle_vector(first, second, order)
        address = builder.gep(args[0], [args[1]])
        builder.store(value, builder.bitcast(address, halves.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(pointer, types.intp, a, a), generate


@intrinsic(prefer_literal=True)
def interleave(typing_context, target, index, first, second, lanes):
    """Store, as bfloat16x2, the pairs of 2 * LANES adjacent bfloat16 from each of two pointers."""
    count = 2 * lanes.literal_value

    def generate(context, builder, signature, args):
        halves = ir.VectorType(INT16, count)
        upper, lower = (
            builder.load(builder.bitcast(place, halves.as_pointer()), align=2)
            for place in args[2:4]
        )
        for number in range(2):
            lanes_of_half = range(number * count // 2, (number + 1) * count // 2)
            order = [lane for each in lanes_of_half for lane in (each, count + each)]
            mask = ir.Constant(ir.VectorType(INT32, count), order)
            pairs = builder.shuffle_vector(upper, lower, mask)
            place = builder.gep(args[0], [builder.add(args[1], INT64(number * count // 2))])
            builder.store(pairs, builder.bitcast(place, halves.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(target, types.intp, first, second, lanes), generate


@intrinsic(prefer_literal=True)
def load_interleaved(typing_context, first, second, lanes):
    """Return the pairs of LANES adjacent bfloat16 from each of two pointers."""
    result = Vector(types.int32, lanes.literal_value)

    def generate(context, builder, signature, args):
        halves = ir.VectorType(INT16, result.lanes)
        lower, upper = (
            builder.zext(
                builder.load(builder.bitcast(place, halves.as_pointer()), align=2),
                ir.VectorType(INT32, result.lanes),
            )
            for place in args[:2]
        )
        return builder.or_(lower, builder.shl(upper, constant_of(upper.type, 16)))

    return result(first, second, lanes), generate


@intrinsic
def truncated_limb(typing_context, x):
    """Round x towards zero to a bfloat16, as float32; NaN for NaN."""

    def generate(context, builder, signature, args):
        bits = builder.bitcast(args[0], shaped(INT32, args[0].type))
        return _upper_half(builder, _select_nan(builder, args[0], bits, bits), args[0].type)

    return x(x), generate
