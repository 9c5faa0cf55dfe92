"""Make floating-point numbers of integers of 8 and of 4 bits, as weights are stored.

Of 4 bits there are two in a byte. Those of LANES adjacent bytes are two vectors: the lower ones are
LANES adjacent numbers, the upper ones as many numbers half a group further on. A number is the
integer, less a zero, times a scale.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from foo_ops.kernels.compiler.processor import has_bfloat16_dot
from foo_ops.kernels.vectors.elements import ELEMENTS, narrow
from foo_ops.kernels.vectors.instructions import (
    INT8,
    INT16,
    INT32,
    constant_of,
    emit_splat,
)
from foo_ops.kernels.vectors.pairs import BFLOAT


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
def unpack_int4(typing_context, target, half, source, scale, zero, lanes):
    """Store the lower numbers of LANES adjacent bytes, and ``half`` elements further the upper."""
    compute = ELEMENTS[target.dtype].compute

    def generate(context, builder, signature, args):
        target_pointer, distance, source_pointer, *factors, _ = args
        count = lanes.literal_value
        scales, zeros = (emit_splat(builder, factor, count) for factor in factors)
        wide = ir.VectorType(INT32, count)
        both = builder.zext(_load_bytes(builder, source_pointer, count), wide)
        lower = builder.and_(both, constant_of(wide, 15))
        upper = builder.lshr(both, constant_of(wide, 4))
        lower, upper = (
            builder.fmul(builder.fsub(builder.sitofp(integer, scales.type), zeros), scales)
            for integer in (lower, upper)
        )
        _store_numbers(builder, target.dtype, target_pointer, lower)
        _store_numbers(builder, target.dtype, builder.gep(target_pointer, [distance]), upper)
        return context.get_dummy_value()

    return types.void(target, types.intp, source, compute, compute, lanes), generate


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
