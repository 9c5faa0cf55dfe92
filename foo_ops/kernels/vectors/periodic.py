"""Compute the sine and the cosine of vectors and scalars, also of huge ones.

A number x = m * 2^e, where m is an integer, is m * (2^e * 2/pi mod 4) quarters of a turn, but for
whole turns. The factor is looked up for the exponent (Payne and Hanek 1983), as a sum of numbers
whose products with m are exact, or are split in two parts that are.
"""

from __future__ import annotations

import functools
import math

from llvmlite import ir
from numba.core import cgutils

from foo_ops.kernels.vectors.instructions import (
    DOUBLE,
    INT32,
    INT64,
    constant_of,
    emit_constant_load,
    shaped,
)
from foo_ops.kernels.vectors.number import Mask, Number, make_function

_MANTISSA_BITS, _BIAS = 52, 1023
# pi/2 and what its rounding loses, and the bits of pi that a reduction may need.
_QUARTER, _QUARTER_LOSS, _PI_BITS = math.pi / 2, float.fromhex("0x1.1a62633145c07p-54"), 1400


def _arctangent_of_inverse(x: int, bits: int) -> int:
    """Return arctan(1 / x) * 2^bits."""
    power, total, divisor = (1 << bits) // x, 0, 1
    while power:
        total += power // divisor if divisor % 4 == 1 else -(power // divisor)
        power, divisor = power // (x * x), divisor + 2
    return total


@functools.cache
def _quarters(mantissa_bits: int, widths: tuple[int, ...], largest: int) -> tuple[float, ...]:
    """Return 2^e * 2/pi mod 4 for each exponent e of a unit in the last place, in parts.

    Args:
        mantissa_bits: without the one that is not stored.
        widths: the bits of each part but the last, which is rounded.
        largest: exponent of a number.
    """
    # Machin's formula for pi/4.
    pi = 4 * (4 * _arctangent_of_inverse(5, _PI_BITS) - _arctangent_of_inverse(239, _PI_BITS))
    ratio = (2 << (2 * _PI_BITS)) // pi
    parts: list[float] = []
    # A number of at least one half; smaller ones are not reduced.
    for exponent in range(-1 - mantissa_bits, largest - mantissa_bits + 1):
        # Bits behind the point, after the integers from 0 to 3.
        point = _PI_BITS - exponent
        rest = ratio % (1 << (point + 2))
        for width in widths:
            kept = point - width
            upper = rest >> kept << kept
            parts.append(_scaled(upper, point))
            rest -= upper
        parts.append(_scaled(rest, point))
    return tuple(parts)


def _scaled(number: int, bits: int) -> float:
    """Return number / 2^bits."""
    excess = max(0, number.bit_length() - 64)
    return math.ldexp(float(number >> excess), excess - bits)


def _look_up(x: Number, table: tuple[float, ...], parts: int, bits: int) -> list[Number]:
    """Return x's integer mantissa, and its row of a table."""
    builder, integer = x.builder, shaped(INT64, x.type)

    def constant(value: int) -> ir.Constant:
        return constant_of(integer, value)

    stored = x.bits()
    fraction = builder.and_(stored, constant((1 << _MANTISSA_BITS) - 1))
    mantissa = builder.or_(fraction, constant((_BIAS + bits) << _MANTISSA_BITS))
    row = builder.sub(builder.lshr(stored, constant(_MANTISSA_BITS)), constant(_BIAS - 1))
    # Neither numbers below one half nor infinity and NaN have rows; they are not looked up.
    for relation, bound in (("<", 0), (">", len(table) // parts - 1)):
        is_outside = builder.icmp_signed(relation, row, constant(bound))
        row = builder.select(is_outside, constant(bound), row)
    first = builder.mul(row, constant(parts))
    places = [builder.add(first, constant(part)) for part in range(parts)]
    found = [_load_each(builder, table, place) for place in places]
    return [x.made(builder.bitcast(mantissa, x.type)), *map(x.made, found)]


def _load_each(builder: ir.IRBuilder, table: tuple[float, ...], place: ir.Value) -> ir.Value:
    """Load elements of a table that is part of the object code."""
    name = f"foo_ops.quarters.{len(table)}"
    array = ir.ArrayType(DOUBLE, len(table))
    known = builder.module.globals.get(name)
    if known is None:
        known = cgutils.global_constant(builder.module, name, ir.Constant(array, list(table)))

    def load(index: ir.Value) -> ir.Value:
        return emit_constant_load(builder, builder.gep(known, [INT64(0), index], inbounds=True))

    if not isinstance(place.type, ir.VectorType):
        return load(place)
    result = ir.Constant(ir.VectorType(DOUBLE, place.type.count), ir.Undefined)
    for lane in range(place.type.count):
        loaded = load(builder.extract_element(place, INT32(lane)))
        result = builder.insert_element(result, loaded, INT32(lane))
    return result


def _reduce_float32(x: Number) -> tuple[Number, Number]:
    """Return the quarters of a turn in x, which was a float32, and the angle that is left."""
    table = _quarters(23, (27,), 127)
    mantissa, upper, lower = _look_up(x, table, 2, 23)
    quarters = mantissa * upper
    quarters = quarters - 4 * (quarters * 0.25).nearest()
    quarters = mantissa.fma(lower, quarters)
    whole = quarters.nearest()
    is_small = x < 0.5
    angle = is_small.choose(x, (quarters - whole) * _QUARTER)
    return is_small.choose(x.constant(0.0), whole), angle


def _reduce_float64(x: Number) -> tuple[Number, Number, Number]:
    """Return the quarters of a turn in x, the angle that is left, and what its rounding lost."""
    table = _quarters(_MANTISSA_BITS, (51, 104, 157), _BIAS)
    mantissa, *parts = _look_up(x, table, 4, _MANTISSA_BITS)
    (first, first_loss), (second, second_loss), (third, third_loss) = (
        mantissa.times_exactly(part) for part in parts[:3]
    )
    first = first - 4 * (first * 0.25).nearest() + first_loss
    quarters, loss = first.plus_exactly(second)
    whole = quarters.nearest()
    loss, rest = loss.plus_exactly(second_loss)
    loss, other_rest = loss.plus_exactly(third)
    upper, lower = (quarters - whole).plus_exactly(loss)
    lower = lower + (rest + other_rest + (mantissa.fma(parts[3], third_loss)))
    angle, angle_loss = upper.times_exactly(_QUARTER)
    angle_loss = lower.fma(_QUARTER, upper.fma(_QUARTER_LOSS, angle_loss))
    total = angle + angle_loss
    angle_loss = angle_loss - (total - angle)
    is_small, zero = x < 0.5, x.constant(0.0)
    return (
        is_small.choose(zero, whole),
        is_small.choose(x, total),
        is_small.choose(zero, angle_loss),
    )


def _taylor(first: int, terms: int) -> list[float]:
    """Return the coefficients of x^first, x^(first + 2) ... of the sine or the cosine."""
    powers = range(first, first + 2 * terms, 2)
    return [(-1) ** (power // 2) / math.factorial(power) for power in reversed(powers)]


def _turned(x: Number, quarters_ahead: int) -> Number:
    """Compute the sine of an angle that is so many quarters of a turn ahead of |x|."""
    magnitude = abs(x)
    if x.is_double:
        whole, angle, loss = _reduce_float64(magnitude)
        terms = 8
    else:
        (whole, angle), loss, terms = _reduce_float32(magnitude.widened()), None, 5
    square = angle * angle
    sine = (angle * square) * square.polynomial(_taylor(3, terms))
    cosine = (square * square) * square.polynomial(_taylor(4, terms))
    half = 0.5 * square
    less = 1.0 - half
    # What the subtraction has lost.
    cosine = cosine + ((1.0 - less) - half)
    if loss is not None:
        sine = loss.fma(less, sine)
        cosine = cosine - angle * loss
    sine, cosine = angle + sine, less + cosine
    builder = angle.builder
    integer = shaped(INT64, angle.type)
    # The sum's lower bits hold the integer.
    bits = (whole + (1.5 * 2**_MANTISSA_BITS + quarters_ahead)).bits()
    one, two = (constant_of(integer, value) for value in (1, 2))
    zero = constant_of(integer, 0)
    is_odd = Mask(builder, builder.icmp_signed("!=", builder.and_(bits, one), zero))
    is_behind = Mask(builder, builder.icmp_signed("!=", builder.and_(bits, two), zero))
    result = is_odd.choose(cosine, sine)
    result = is_behind.choose(-result, result)
    result = result if x.is_double else result.narrowed()
    return (magnitude < math.inf).choose(result, x - x)


@make_function
def sin(x: Number) -> Number:
    """Compute the sine of x radians within 1 unit in the last place, also of huge numbers.

    The result is NaN for infinity and NaN.

    Example:
        >>> y[i] = language.sin(x[i])
    """
    result = _turned(x, 0)
    is_negative = x < 0.0
    # A zero keeps its sign.
    return x.equals(0.0).choose(x, is_negative.choose(-result, result))


@make_function
def cos(x: Number) -> Number:
    """Compute the cosine of x radians within 1 unit in the last place, also of huge numbers.

    The result is NaN for infinity and NaN.

    Example:
        >>> y[i] = language.cos(x[i])
    """
    return _turned(x, 1)
