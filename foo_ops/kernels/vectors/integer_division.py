"""Divide integers as Python does, rounded down; what is divided by 0 gives 0.

No vector unit divides integers. In float64 the quotient of integers below 2^51, which is never next
to a larger integer, is rounded down rightly. That of larger ones lacks digits: the remainder that
it leaves is divided once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from foo_ops.kernels.vectors.instructions import (
    DOUBLE,
    INT64,
    bits_of,
    constant_of,
    shaped,
)
from foo_ops.kernels.vectors.number import Mask, Number
from foo_ops.kernels.vectors.rare_branches import RareBranch

# The largest float64 below 2^63.
_LARGEST = 2.0**63 - 1024
# Added to a number below 2^51 it leaves the integer in the lower bits of the sum.
_MAGIC = 1.5 * 2**52
_MAGIC_BITS = (1023 + 52) << 52 | 1 << 51


@dataclass(frozen=True)
class _Division(RareBranch):
    """A division of signed integers.

    Attributes:
        gives_quotient: as the result, and not the remainder.
    """

    gives_quotient: bool = True

    def formula(self, *numbers: Number) -> Number:
        x, y = numbers
        if not isinstance(x.type, ir.VectorType):
            return self.rare(x, y)
        if bits_of(x.type) == 32:
            return x.made(self.rare_of_lanes(x, y))
        return super().formula(x, y)

    def rare_of_lanes(self, *numbers: Number) -> ir.Value:
        x, y = numbers
        return _rounded_down(x.builder, x.value, y.value, _divide_lanes, self.gives_quotient)


def _make_division(name: str, gives_quotient: bool) -> _Division:
    def usual(x: Number, y: Number) -> tuple[Number, Mask]:
        return _divide_below_51_bits(x, y, gives_quotient)

    def rare(x: Number, y: Number) -> Number:
        values = x.value, y.value
        return x.made(_rounded_down(x.builder, *values, _divide_alone, gives_quotient))

    return _Division(name, usual, rare, gives_quotient)


def _divide_below_51_bits(x: Number, y: Number, gives_quotient: bool) -> tuple[Number, Mask]:
    builder, integer = x.builder, x.type
    double = shaped(DOUBLE, integer)

    def constant(value: int) -> ir.Constant:
        return constant_of(integer, value)

    def as_float64(value: ir.Value) -> Number:
        bits = builder.add(value, constant(_MAGIC_BITS))
        return Number(builder, builder.bitcast(bits, double)) - _MAGIC

    shifted = [builder.add(number.value, constant(1 << 51)) for number in (x, y)]
    beyond = builder.lshr(builder.or_(*shifted), constant(52))
    is_right = Mask(builder, builder.icmp_signed("==", beyond, constant(0)))
    dividend, divisor = as_float64(x.value), as_float64(y.value)
    is_zero = divisor.equals(0.0)
    quotient = (dividend / divisor).floor()
    result = quotient if gives_quotient else (-quotient).fma(divisor, dividend)
    bits = (is_zero.choose(result.constant(0.0), result) + _MAGIC).bits()
    return x.made(builder.sub(bits, constant(_MAGIC_BITS))), is_right


def _rounded_down(
    builder: ir.IRBuilder, x: ir.Value, y: ir.Value, divide: Any, gives_quotient: bool
) -> ir.Value:
    """Divide with a function whose quotient may be one too large or too small."""
    zero, one = constant_of(x.type, 0), constant_of(x.type, 1)
    least, last = constant_of(x.type, -(1 << (bits_of(x.type) - 1))), constant_of(x.type, -1)
    is_zero = builder.icmp_signed("==", y, zero)
    # A quotient too large for the type becomes x, as with all products and sums.
    is_too_large = builder.and_(
        builder.icmp_signed("==", x, least), builder.icmp_signed("==", y, last)
    )
    divisor = builder.select(builder.or_(is_zero, is_too_large), one, y)
    quotient, rest = divide(builder, x, divisor)
    is_beyond = builder.and_(
        builder.icmp_signed("!=", rest, zero),
        builder.icmp_signed("<", builder.xor(rest, y), zero),
    )
    if gives_quotient:
        result = builder.select(is_beyond, builder.sub(quotient, one), quotient)
    else:
        result = builder.select(is_beyond, builder.add(rest, y), rest)
    return builder.select(is_zero, zero, result)


def _divide_alone(builder: ir.IRBuilder, x: ir.Value, y: ir.Value) -> tuple[ir.Value, ir.Value]:
    return builder.sdiv(x, y), builder.srem(x, y)


def _divide_lanes(builder: ir.IRBuilder, x: ir.Value, y: ir.Value) -> tuple[ir.Value, ir.Value]:
    double = shaped(DOUBLE, x.type)
    divisor = builder.sitofp(y, double)

    def cut_off(number: ir.Value) -> ir.Value:
        quotient = Number(builder, builder.fdiv(builder.sitofp(number, double), divisor))
        if bits_of(x.type) == 64:
            quotient = quotient.clamped(-_LARGEST, _LARGEST)
        return builder.fptosi(quotient.value, x.type)

    quotient = cut_off(x)
    rest = builder.sub(x, builder.mul(quotient, y))
    if bits_of(x.type) == 64:
        more = cut_off(rest)
        quotient, rest = builder.add(quotient, more), builder.sub(rest, builder.mul(more, y))
    return quotient, rest


_FLOOR_DIVIDE = _make_division("floor_divide", gives_quotient=True)
_REMAINDER = _make_division("remainder", gives_quotient=False)


def emit_floor_divide(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
    """Emit x // y of integers of 32 or of 64 bits, as an integer of 64."""
    x, y = args
    if not signature.args[0].signed:
        return _unsigned(builder, "udiv", x, y)
    quotient = _emit(context, builder, x, y, _FLOOR_DIVIDE)
    if bits_of(x.type) == 64:
        return quotient
    least = x.type(-(2**31))
    is_too_large = builder.and_(
        builder.icmp_signed("==", x, least), builder.icmp_signed("==", y, x.type(-1))
    )
    return builder.select(is_too_large, INT64(2**31), builder.sext(quotient, INT64))


def emit_remainder(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
    """Emit x % y of integers of 32 or of 64 bits, as an integer of 64."""
    x, y = args
    if not signature.args[0].signed:
        return _unsigned(builder, "urem", x, y)
    rest = _emit(context, builder, x, y, _REMAINDER)
    return rest if bits_of(rest.type) == 64 else builder.sext(rest, INT64)


def _unsigned(builder: ir.IRBuilder, instruction: str, x: ir.Value, y: ir.Value) -> ir.Value:
    """Divide integers above those that are signed, one by one."""
    is_zero = builder.icmp_unsigned("==", y, y.type(0))
    result = getattr(builder, instruction)(x, builder.select(is_zero, y.type(1), y))
    return builder.select(is_zero, y.type(0), result)


def _emit(
    context: Any, builder: ir.IRBuilder, x: ir.Value, y: ir.Value, division: _Division
) -> ir.Value:
    """Divide by a constant in place, which LLVM makes shifts and products of, with vectors too."""
    numbers = Number(builder, x), Number(builder, y)
    if isinstance(y, ir.Constant) or not context.vectorizes:
        return division.rare(*numbers).value
    # It may become one when functions are inlined.
    is_constant = numbers[1].is_constant().value
    constant, other, end = map(builder.append_basic_block, ("constant", "other", "end"))
    builder.cbranch(is_constant, constant, other)
    builder.position_at_end(constant)
    in_place = division.rare(*numbers).value
    builder.branch(end)
    builder.position_at_end(other)
    called = division.of(*numbers).value
    builder.branch(end)
    builder.position_at_end(end)
    result = builder.phi(x.type)
    result.add_incoming(in_place, constant)
    result.add_incoming(called, other)
    return result
