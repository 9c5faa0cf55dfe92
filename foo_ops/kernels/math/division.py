"""Quotients, remainders, rounding, square and cube roots, as Python and torch define them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from foo_ops.kernels.math.exponential import format_of, fraction_and_power, power_of_two
from foo_ops.kernels.math.formula import Mask, Number, RareBranch, make_function
from foo_ops.kernels.simd.types import DOUBLE, INT64, bits_of, constant_of, shaped

# ----------------------------------------------------------------------------------------- integers

# Divides integers like Python, rounded down; division by 0 gives 0.
#
# No vector unit divides integers. In float64 the quotient of integers below 2^51 is never too close
# to a larger integer, so that it is rounded down correctly. The quotient of larger integers lacks
# digits: its remainder is divided once more.


# The largest float64 below 2^63.
_LARGEST = 2.0**63 - 1024
# Adding it to a number below 2^51 leaves the integer in the lower bits of the sum.
_MAGIC = 1.5 * 2**52
_MAGIC_BITS = (1023 + 52) << 52 | 1 << 51


@dataclass(frozen=True)
class _Division(RareBranch):
    """A division of signed integers.

    Attributes:
        gives_quotient: the result is the quotient, not the remainder.
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
    # A quotient too large for the type wraps around to x, like products and sums.
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


_INTEGER_FLOOR_DIVIDE = _make_division("floor_divide", gives_quotient=True)
_INTEGER_REMAINDER = _make_division("remainder", gives_quotient=False)


def emit_floor_divide(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
    """Emit x // y for integers of 32 or 64 bits, as a 64-bit integer."""
    x, y = args
    if not signature.args[0].signed:
        return _unsigned(builder, "udiv", x, y)
    quotient = _emit(context, builder, x, y, _INTEGER_FLOOR_DIVIDE)
    if bits_of(x.type) == 64:
        return quotient
    least = x.type(-(2**31))
    is_too_large = builder.and_(
        builder.icmp_signed("==", x, least), builder.icmp_signed("==", y, x.type(-1))
    )
    return builder.select(is_too_large, INT64(2**31), builder.sext(quotient, INT64))


def emit_remainder(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
    """Emit x % y for integers of 32 or 64 bits, as a 64-bit integer."""
    x, y = args
    if not signature.args[0].signed:
        return _unsigned(builder, "urem", x, y)
    rest = _emit(context, builder, x, y, _INTEGER_REMAINDER)
    return rest if bits_of(rest.type) == 64 else builder.sext(rest, INT64)


def _unsigned(builder: ir.IRBuilder, instruction: str, x: ir.Value, y: ir.Value) -> ir.Value:
    """Divide unsigned integers, one by one."""
    is_zero = builder.icmp_unsigned("==", y, y.type(0))
    result = getattr(builder, instruction)(x, builder.select(is_zero, y.type(1), y))
    return builder.select(is_zero, y.type(0), result)


def _emit(
    context: Any, builder: ir.IRBuilder, x: ir.Value, y: ir.Value, division: _Division
) -> ir.Value:
    """Divide by a constant inline: LLVM turns it into shifts and products, also of vectors."""
    numbers = Number(builder, x), Number(builder, y)
    if isinstance(y, ir.Constant) or not context.vectorizes:
        return division.rare(*numbers).value
    # The divisor may become a constant when functions are inlined.
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


# ----------------------------------------------------------------------------- remainders of floats

# Divides floating-point numbers like Python, with an exact remainder.
#
# If a quotient has fewer digits than the type, its integer part is right, or too large by one. One
# fma computes the remainder, whose sign tells which. Larger quotients are left to the C library.


def _divided(x: Number, y: Number) -> tuple[Number, Number, Mask]:
    """Return the integer part of |x / y|, the remainder of |x|, and a mask of right results."""
    x, y = abs(x), abs(y)
    quotient = (x / y).truncated()
    rest = (-quotient).fma(y, x)
    is_too_large = rest < 0.0
    rest = is_too_large.choose(rest + y, rest)
    # Also correct for an infinite y.
    rest = (x < y).choose(x, rest)
    is_huge = ~(quotient < 2.0 ** (format_of(x.value).mantissa_bits + 1))
    is_undefined = ~((x < math.inf) & (y > 0.0))
    return is_too_large.choose(quotient - 1.0, quotient), rest, ~is_huge | is_undefined


def _usual_fmod(x: Number, y: Number) -> tuple[Number, Mask]:
    _, rest, is_right = _divided(x, y)
    return rest.with_sign_of(x), is_right


def _rare_fmod(x: Number, y: Number) -> Number:
    return x.made(x.builder.frem(x.value, y.value))


def _usual_remainder(x: Number, y: Number) -> tuple[Number, Mask]:
    _, rest, is_right = _divided(x, y)
    return _turned(rest, x, y), is_right


def _turned(rest: Number, x: Number, y: Number) -> Number:
    """Turn the remainder of the magnitudes into the remainder with the sign of y."""
    is_turned = x.differs_in_sign(y) & ~rest.equals(0.0)
    return is_turned.choose(abs(y) - rest, rest).with_sign_of(y)


def _rare_remainder(x: Number, y: Number) -> Number:
    return _turned(abs(_rare_fmod(x, y)), x, y)


def _usual_floor_divide(x: Number, y: Number) -> tuple[Number, Mask]:
    quotient, rest, is_right = _divided(x, y)
    differ = x.differs_in_sign(y)
    quotient = (differ & ~rest.equals(0.0)).choose(quotient + 1.0, quotient)
    quotient = differ.choose(-quotient, quotient)
    # An infinite x has no quotient.
    is_lost = abs(x).equals(math.inf) & ~y.equals(0.0)
    return is_lost.choose(x.constant(math.nan), quotient), is_right


def _rare_floor_divide(x: Number, y: Number) -> Number:
    # The quotient is so large that it is always an integer.
    return (x - _rare_remainder(x, y)) / y


_FMOD = RareBranch("fmod", _usual_fmod, _rare_fmod)
_FLOAT_REMAINDER = RareBranch("remainder", _usual_remainder, _rare_remainder)
_FLOAT_FLOOR_DIVIDE = RareBranch("floor_divide", _usual_floor_divide, _rare_floor_divide)


@make_function
def fmod(x: Number, y: Number) -> Number:
    """Compute x minus the nearest multiple of y towards zero, exactly.

    The result has the sign of x. It is NaN if x is infinite or y is 0, and x if y is infinite.

    Example:
        >>> y[i] = language.fmod(x[i], language.cast(2.5, x))
    """
    return _FMOD.of(x, y)


@make_function
def remainder(x: Number, y: Number) -> Number:
    """Compute x % y like Python: x minus the multiple of y next below.

    The result has the sign of y; if x has the other sign, its error is at most half a unit in the
    last place. It is NaN if x is infinite or y is 0.

    Example:
        >>> y[i] = language.remainder(x[i], language.cast(2.5, x))
    """
    return _FLOAT_REMAINDER.of(x, y)


@make_function
def floor_divide(x: Number, y: Number) -> Number:
    """Compute x // y like Python: the exact quotient, rounded down to an integer.

    The result is x / y if y is 0, else NaN if x is infinite.

    Example:
        >>> y[i] = language.floor_divide(x[i], language.cast(2.5, x))
    """
    return _FLOAT_FLOOR_DIVIDE.of(x, y)


# ----------------------------------------------------------------------------------------- rounding

# Rounds floating-point numbers to integers of the same floating-point type, and takes roots.
#
# Python's ``math.floor`` returns an int, which can hold every float. A kernel's integers have 64
# bits, and cannot hold 1e30, infinity and NaN. A result of the argument's type is right for all of
# them, and later operations on float32 stay float32.


@make_function
def floor(x: Number) -> Number:
    """Return the largest integer that is not above x, in x's type; NaN for NaN.

    Example:
        >>> y[i] = x[i] - language.floor(x[i])
    """
    return x.floor()


@make_function
def ceil(x: Number) -> Number:
    """Return the smallest integer that is not below x, in x's type; NaN for NaN.

    Example:
        >>> y[i] = language.ceil(x[i])
    """
    return x.ceil()


@make_function
def trunc(x: Number) -> Number:
    """Return the integer part of x, in x's type; NaN for NaN.

    Example:
        >>> y[i] = x[i] - language.trunc(x[i])
    """
    return x.truncated()


@make_function
def round(x: Number) -> Number:
    """Return the integer nearest to x, halves rounded to even, in x's type; NaN for NaN.

    Example:
        >>> y[i] = language.round(x[i] * 127)
    """
    return x.nearest()


@make_function
def sqrt(x: Number) -> Number:
    """Compute the square root, within half a unit in the last place; NaN below zero.

    Example:
        >>> y[i] = language.sqrt(x[i] * x[i] + 1)
    """
    return x.square_root()


# -------------------------------------------------------------------------------------------- roots

# Computes the length of a vector of two numbers, and cube roots.


# A polynomial for the cube root from sqrt(1/2) to sqrt(2), to 19 bits; the highest power first.
_CUBE_ROOT = (
    *(0.025563650239939707, -0.17217607026882265, 0.495520725788132, -0.8201430628513885),
    *(1.0479258711331414, 0.4233082672241438),
)


@make_function
def hypot(x: Number, y: Number) -> Number:
    """Compute the square root of x^2 + y^2 within 1 unit in the last place, also of huge numbers.

    The result is infinity if a number is infinite, even if the other is NaN.

    Example:
        >>> y[i] = language.hypot(x[i], x[i] - 1)
    """
    a, b = abs(x), abs(y)
    is_infinite = a.equals(math.inf) | b.equals(math.inf)
    if x.is_double:
        length = _scaled_length(a, b)
    else:
        wide, other = a.widened(), b.widened()
        length = wide.fma(wide, other * other).square_root().narrowed()
    return is_infinite.choose(x.constant(math.inf), length)


def _scaled_length(a: Number, b: Number) -> Number:
    """Compute the length in float64, scaled so that squares are neither infinite nor subnormal."""
    is_steep = b > a
    a, b = is_steep.choose(b, a), is_steep.choose(a, b)
    is_huge, is_tiny = a > 2.0**500, a < 2.0**-500
    one = a.constant(1.0)
    scale = is_huge.choose(a.constant(2.0**-600), is_tiny.choose(a.constant(2.0**600), one))
    back = is_huge.choose(a.constant(2.0**600), is_tiny.choose(a.constant(2.0**-600), one))
    a, b = a * scale, b * scale
    return a.fma(a, b * b).square_root() * back


@make_function
def cbrt(x: Number) -> Number:
    """Compute the cube root within 1 unit in the last place, also of negative numbers.

    Example:
        >>> y[i] = language.cbrt(x[i])
    """
    magnitude = abs(x)
    fraction, power = map(x.made, fraction_and_power(x.builder, magnitude.value))
    third = (power * (1 / 3)).nearest()
    rest = power - 3 * third
    mantissa = 1.0 + fraction
    root = mantissa.polynomial(_CUBE_ROOT)
    is_above, is_below = rest > 0.5, rest < -0.5
    one = x.constant(1.0)
    root = root * is_above.choose(
        x.constant(2 ** (1 / 3)), is_below.choose(x.constant(2 ** (-1 / 3)), one)
    )
    mantissa = mantissa * is_above.choose(x.constant(2.0), is_below.choose(x.constant(0.5), one))
    if x.is_double:
        # Halley's iteration triples the digits.
        cube = root * root * root
        root = root * (cube + 2 * mantissa) / (2 * cube + mantissa)
    square, square_loss = root.times_exactly(root)
    cube, cube_loss = square.times_exactly(root)
    error = (mantissa - cube) - square_loss.fma(root, cube_loss)
    root = root + error / (3 * square)
    is_usual = (magnitude > 0.0) & (magnitude < math.inf)
    return is_usual.choose(root * power_of_two(third), x).with_sign_of(x)
