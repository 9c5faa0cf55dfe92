"""Make bfloat16 limbs of wider numbers, and store and load pairs of them."""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from foo_ops.kernels.vectors.instructions import INT16, INT32, INT64, constant_of, shaped
from foo_ops.kernels.vectors.values import Vector

_UPPER = 0xFFFF0000


@intrinsic
def bfloat16_limb(typing_context, x):
    """Round x to the nearest bfloat16 (halves away from zero), as float32.

    A NaN must be one that processors make, whose last bits are not all ones.
    """

    def generate(context, builder, signature, args):
        bits = builder.bitcast(args[0], shaped(INT32, args[0].type))
        return _upper_half(builder, builder.add(bits, constant_of(bits.type, 0x8000)), args[0].type)

    return x(x), generate


@intrinsic
def bfloat16_limb_of_any(typing_context, x):
    """Round as `bfloat16_limb` does, for any NaN."""

    def generate(context, builder, signature, args):
        bits = builder.bitcast(args[0], shaped(INT32, args[0].type))
        rounded = builder.add(bits, constant_of(bits.type, 0x8000))
        return _upper_half(builder, _select_nan(builder, args[0], bits, rounded), args[0].type)

    return x(x), generate


def _select_nan(builder: ir.IRBuilder, x: ir.Value, bits: ir.Value, others: ir.Value) -> ir.Value:
    """Select others, or where x is NaN its bits, such that their upper half is a NaN too."""
    quiet = builder.or_(bits, constant_of(bits.type, 0x400000))
    return builder.select(builder.fcmp_ordered("ord", x, x), others, quiet)


def _upper_half(builder: ir.IRBuilder, bits: ir.Value, type_: ir.Type) -> ir.Value:
    return builder.bitcast(builder.and_(bits, constant_of(bits.type, _UPPER)), type_)


@intrinsic
def pack_limbs(typing_context, a, b):
    """Pack a vector of bfloat16x2: each pair is a lane of a and of b, which are bfloat16
    already.
    """
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
    """Store, as bfloat16x2, the pairs of 2 * LANES adjacent bfloat16 from each of two places."""
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


@intrinsic
def truncated_limb(typing_context, x):
    """Round x towards zero to a bfloat16, as float32; NaN for NaN."""

    def generate(context, builder, signature, args):
        bits = builder.bitcast(args[0], shaped(INT32, args[0].type))
        return _upper_half(builder, _select_nan(builder, args[0], bits, bits), args[0].type)

    return x(x), generate
