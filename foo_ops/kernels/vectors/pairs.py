"""Multiply and pack pairs in 32 bits, of bfloat16 (dtype bfloat16x2) or int16 (int16x2): two
products at once.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from foo_ops.kernels.compiler.processor import has_bfloat16_dot, has_integer_dot
from foo_ops.kernels.vectors.elements import round_upper_half
from foo_ops.kernels.vectors.instructions import (
    FLOAT,
    INT16,
    INT32,
    call_intrinsic,
    constant_of,
    emit_fma,
    emit_multiply_add,
    emit_shuffle,
    shaped,
)
from foo_ops.kernels.vectors.values import Vector

PAIRS, INTEGER_PAIRS = "bfloat16x2", "int16x2"
UPPER_HALF = 0xFFFF0000
_INTEGER_DOTS = {4: "sse2.pmadd.wd", 8: "avx2.pmadd.wd", 16: "avx512.pmaddw.d.512"}


class _BFloat(ir.Type):
    """The bfloat of LLVM, which llvmlite lacks."""

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

    With VNNI, LLVM makes one instruction of it.
    """
    lanes = total.type.count
    if has_integer_dot(lanes):
        halves = ir.VectorType(INT16, 2 * lanes)
        factors = [builder.bitcast(value, halves) for value in (a, b)]
        name = f"llvm.x86.{_INTEGER_DOTS[lanes]}"
        return builder.add(total, call_intrinsic(builder, name, total.type, factors))
    half = constant_of(total.type, 16)
    for shift in (0, 16):
        # The lower half is moved up, so that the shift to the right keeps its sign.
        x, y = (builder.shl(it, constant_of(it.type, 16 - shift)) for it in (a, b))
        x, y = builder.ashr(x, half), builder.ashr(y, half)
        total = emit_multiply_add(builder, x, y, total)
    return total


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
