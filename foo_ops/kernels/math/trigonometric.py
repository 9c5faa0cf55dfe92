"""Sine, cosine and tangent of vectors and scalars, also of huge numbers, and their inverses."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from llvmlite import ir
from numba.core import cgutils
from numpy.polynomial import Chebyshev, Polynomial

from foo_ops.kernels.math.formula import Mask, Number, RareBranch, make_function
from foo_ops.kernels.simd.types import DOUBLE, INT64, constant_of, shaped

# ---------------------------------------------------------------------------- sine, cosine, tangent

# Computes the sine, the cosine and the tangent of vectors and scalars, also of huge numbers.
#
# Quarters of a turn are subtracted from a number that is not huge. A huge number x = m * 2^e, where
# m is an integer, is m * (2^e * 2/pi mod 4) quarters of a turn, up to whole turns. The factor is
# looked up for the exponent (Payne and Hanek 1983), as a sum of numbers whose products with m are
# exact, or are split into two exact parts.


_MANTISSA_BITS, _BIAS = 52, 1023
# pi/2, its rounding error, and the rounding error of that.
_QUARTER, _QUARTER_LOSS, _QUARTER_REST = (
    *(math.pi / 2, float.fromhex("0x1.1a62633145c07p-54")),
    float.fromhex("-0x1.f1976b7ed8fbcp-110"),
)
# The bits of pi that a reduction may need.
_PI_BITS = 1400
# Adding it to a number leaves the nearest integer in the lower bits of the sum.
_MAGIC = 1.5 * 2**_MANTISSA_BITS
# Below this, quarters are counted exactly, and the parts of pi/2 have enough digits.
_NEAR = 2.0**30


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
        mantissa_bits: the stored bits of the mantissa.
        widths: the bits of each part except the last, which is rounded.
        largest: the largest exponent of a number.
    """
    # Machin's formula for pi/4.
    pi = 4 * (4 * _arctangent_of_inverse(5, _PI_BITS) - _arctangent_of_inverse(239, _PI_BITS))
    ratio = (2 << (2 * _PI_BITS)) // pi
    parts: list[float] = []
    # For numbers of at least one half; smaller ones are not reduced.
    for exponent in range(-1 - mantissa_bits, largest - mantissa_bits + 1):
        # Bits after the binary point; before it are the integers from 0 to 3.
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
    """Return the integer mantissa, and the table's row, of a number of at least one half."""
    builder, stored = x.builder, x.bits()
    fraction = builder.and_(stored, INT64((1 << _MANTISSA_BITS) - 1))
    mantissa = builder.or_(fraction, INT64((_BIAS + bits) << _MANTISSA_BITS))
    row = builder.sub(builder.lshr(stored, INT64(_MANTISSA_BITS)), INT64(_BIAS - 1))
    # Infinity and NaN have no rows.
    last = INT64(len(table) // parts - 1)
    row = builder.select(builder.icmp_signed(">", row, last), last, row)
    first = builder.mul(row, INT64(parts))
    found = [_load(builder, table, builder.add(first, INT64(part))) for part in range(parts)]
    return [x.made(builder.bitcast(mantissa, x.type)), *map(x.made, found)]


def _load(builder: ir.IRBuilder, table: tuple[float, ...], place: ir.Value) -> ir.Value:
    """Load an element of a table that is part of the object code."""
    name = f"foo_ops.quarters.{len(table)}"
    array = ir.ArrayType(DOUBLE, len(table))
    known = builder.module.globals.get(name)
    if known is None:
        known = cgutils.global_constant(builder.module, name, ir.Constant(array, list(table)))
    return builder.load(builder.gep(known, [INT64(0), place], inbounds=True))


def _reduce_float32(x: Number) -> tuple[Number, Number]:
    """Return the quarters of a turn in x, which was a float32, and the remaining angle."""
    table = _quarters(23, (27,), 127)
    mantissa, upper, lower = _look_up(x, table, 2, 23)
    quarters = mantissa * upper
    quarters = quarters - 4 * (quarters * 0.25).nearest()
    quarters = mantissa.fma(lower, quarters)
    whole = quarters.nearest()
    return whole, (quarters - whole) * _QUARTER


def _reduce_float64(x: Number) -> tuple[Number, Number, Number]:
    """Return the quarters of a turn in x, the remaining angle, and its rounding error."""
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
    return whole, total, angle_loss - (total - angle)


def _near(x: Number, is_narrow: bool) -> tuple[Number, Number, Number | None]:
    """Reduce a number below _NEAR: return quarters, the remaining angle, and its error.

    Quarters are subtracted in parts of pi/2 (Cody and Waite 1980). The first difference is below
    one, and exact, as neither number has digits below those of a number below one.
    """
    whole = x.fma(2 / math.pi, _MAGIC) - _MAGIC
    angle = (-whole).fma(_QUARTER, x)
    if is_narrow:
        return whole, (-whole).fma(_QUARTER_LOSS, angle), None
    product, product_loss = whole.times_exactly(_QUARTER_LOSS)
    angle, loss = angle.plus_exactly(-product)
    return whole, angle, (-whole).fma(_QUARTER_REST, loss - product_loss)


def _taylor(first: int, terms: int) -> list[float]:
    """Return the coefficients of x^first, x^(first + 2) ... of the sine or the cosine."""
    powers = range(first, first + 2 * terms, 2)
    return [(-1) ** (power // 2) / math.factorial(power) for power in reversed(powers)]


def _interpolated(first: int, terms: int) -> list[float]:
    """Return coefficients like `_taylor`, for fewer terms.

    The error is less than a hundredth of a unit in the last place of float32.
    """
    series = Polynomial(_taylor(first, terms + 6)[::-1])
    domain = [0.0, (math.pi / 4) ** 2]
    shortened = Chebyshev.interpolate(series, terms - 1, domain=domain).convert(kind=Polynomial)
    return list(shortened.coef[::-1])


_SINE_TERMS, _COSINE_TERMS = _interpolated(3, 4), _interpolated(0, 5)


def _sine_and_cosine(angle: Number, loss: Number | None) -> tuple[Number, Number]:
    """Compute sine and cosine of an angle of at most an eighth of a turn; no loss for float32."""
    square = angle * angle
    if loss is None:
        sine = angle * square.polynomial([*_SINE_TERMS, 1.0])
        return sine, square.polynomial(_COSINE_TERMS)
    sine = (angle * square) * square.polynomial(_taylor(3, 8))
    cosine = (square * square) * square.polynomial(_taylor(4, 8))
    half = 0.5 * square
    less = 1.0 - half
    # Add the rounding error of the subtraction.
    cosine = cosine + ((1.0 - less) - half)
    sine, cosine = loss.fma(less, sine), cosine - angle * loss
    return angle + sine, less + cosine


def _in_quarter(whole: Number, angle: Number, loss: Number | None, quarters_ahead: int) -> Number:
    """Compute the sine of an angle plus ``whole + quarters_ahead`` quarters of a turn."""
    sine, cosine = _sine_and_cosine(angle, loss)
    builder = angle.builder
    integer = shaped(INT64, angle.type)
    # The sum's lower bits hold the integer.
    bits = (whole + (_MAGIC + quarters_ahead)).bits()
    one, two = (constant_of(integer, value) for value in (1, 2))
    zero = constant_of(integer, 0)
    is_odd = Mask(builder, builder.icmp_signed("!=", builder.and_(bits, one), zero))
    is_behind = Mask(builder, builder.icmp_signed("!=", builder.and_(bits, two), zero))
    result = is_odd.choose(cosine, sine)
    return is_behind.choose(-result, result)


def _tangent(whole: Number, angle: Number, loss: Number | None) -> Number:
    """Compute the tangent of an angle plus ``whole`` quarters of a turn."""
    sine, cosine = _sine_and_cosine(angle, loss)
    bits = (whole + _MAGIC).bits()
    one = constant_of(bits.type, 1)
    is_odd = Mask(
        angle.builder, angle.builder.icmp_signed("==", angle.builder.and_(bits, one), one)
    )
    return is_odd.choose(-cosine, sine) / is_odd.choose(sine, cosine)


def _make_periodic(
    name: str, compute: Callable[[Number, Number, Number | None], Number], is_even: bool
) -> RareBranch:
    """Make a periodic function from ``compute``, of quarters of a turn, an angle and its error."""

    def usual(x: Number) -> tuple[Number, Mask]:
        wide = x if x.is_double else x.widened()
        result = compute(*_near(wide, not x.is_double))
        result = result if x.is_double else result.narrowed()
        # A zero keeps its sign.
        return result if is_even else x.equals(0.0).choose(x, result), abs(x) < _NEAR

    def rare(x: Number) -> Number:
        magnitude = abs(x)
        if x.is_double:
            result = compute(*_reduce_float64(magnitude))
        else:
            whole, angle = _reduce_float32(magnitude.widened())
            result = compute(whole, angle, None).narrowed()
        result = result if is_even else (x < 0.0).choose(-result, result)
        return (magnitude < math.inf).choose(result, x - x)

    return RareBranch(name, usual, rare)


def _sine(whole: Number, angle: Number, loss: Number | None) -> Number:
    return _in_quarter(whole, angle, loss, 0)


def _cosine(whole: Number, angle: Number, loss: Number | None) -> Number:
    return _in_quarter(whole, angle, loss, 1)


_SINE = _make_periodic("sin", _sine, is_even=False)
_COSINE = _make_periodic("cos", _cosine, is_even=True)
_TANGENT = _make_periodic("tan", _tangent, is_even=False)


def sine_of(x: Number) -> Number:
    return _SINE.of(x)


@make_function
def sin(x: Number) -> Number:
    """Compute the sine of x radians within 1 unit in the last place, also of huge numbers.

    The result is NaN for infinity and NaN.

    Example:
        >>> y[i] = language.sin(x[i])
    """
    return sine_of(x)


@make_function
def cos(x: Number) -> Number:
    """Compute the cosine of x radians within 1 unit in the last place, also of huge numbers.

    The result is NaN for infinity and NaN.

    Example:
        >>> y[i] = language.cos(x[i])
    """
    return _COSINE.of(x)


@make_function
def tan(x: Number) -> Number:
    """Compute the tangent of x radians within 2 units in the last place, also of huge numbers.

    The result is NaN for infinity and NaN.

    Example:
        >>> y[i] = language.tan(x[i])
    """
    return _TANGENT.of(x)


# ----------------------------------------------------------------------------------- their inverses

# Computes the inverses of sine, cosine and tangent, of vectors and scalars.
#
# asin(x) and atan(x) are x + x^3 p(x^2), up to 1/2 and up to 1, where p was found with 40 digits by
# interpolation at Chebyshev's nodes. Above, asin(x) = pi/2 - 2 asin(sqrt((1 - x) / 2)), and atan(x)
# = pi/2 - atan(1 / x).


# The coefficients, the highest powers first, in float32 and in float64.
_ARCSINE = (
    (
        *(0.03369084720283012, 0.017149238357677253, 0.03110066273549457, 0.04459940152851218),
        *(0.07500094543497424, 0.16666666337430908),
    ),
    (
        *(0.02961201126495512, -0.01924167174674304, 0.019554513336123378, 0.0030448799094556773),
        *(0.009319560794767446, 0.009621842970100282, 0.011566459612121669, 0.01396378001220357),
        *(0.017352816540325496, 0.02237215744350722, 0.03038194447553234, 0.044642857142551895),
        *(0.07500000000000118, 0.16666666666666666),
    ),
)
_ARCTANGENT = (
    (
        *(0.0014886919393047597, -0.009144629760592396, 0.026305001110062377),
        *(-0.04896051402709067, 0.07031914250029966, -0.08931826777381315, 0.11088261628735159),
        *(-0.1428400379473353, 0.19999949321141888, -0.3333333308107325),
    ),
    (
        *(7.767624330289919e-06, -9.371186345052626e-05, 0.0005376839297396244),
        *(-0.0019612554271685326, 0.005140912856746939, -0.010412153260359241),
        *(0.01718398172211335, -0.024191345810140718, 0.030330719265790507, -0.035271331066871296),
        *(0.03938687540798632, -0.043306538430670664, 0.04758080083637821, -0.052624922290256754),
        *(0.05882264416776449, -0.06666657934573768, 0.07692307078827029, -0.0909090906193528),
        *(0.11111111110268297, -0.14285714285701234, 0.1999999999999992, -0.3333333333333333),
    ),
)
# The rounding error of pi in float64.
_PI_LOSS = float.fromhex("0x1.1a62633145c07p-53")


def _quarter_turns(x: Number, count: int) -> tuple[float, float]:
    """Return ``count`` quarters of a turn, and the rounding error."""
    return x.in_two_parts(count * math.pi / 2, count * _PI_LOSS / 2)


def _less(upper_and_lower: tuple[float, float], x: Number, rest: Number) -> Number:
    """Subtract x and the smaller rest from a constant in two parts."""
    upper, lower = upper_and_lower
    return (upper - x) - (rest - lower)


def _arcsine_of_half(x: Number) -> tuple[Number, Number, Mask]:
    """Return asin(|x|) up to 1/2, else asin(sqrt((1 - |x|) / 2)), and a mask of the latter.

    The result is a sum of two numbers; the second is the smaller one.
    """
    magnitude = abs(x)
    is_large = magnitude > 0.5
    square = is_large.choose(0.5 - 0.5 * magnitude, magnitude * magnitude)
    sine = is_large.choose(square.square_root(), magnitude)
    return sine, (sine * square) * square.polynomial(_ARCSINE[x.is_double]), is_large


@make_function
def asin(x: Number) -> Number:
    """Compute the angle of a sine within 1.5 units in the last place; NaN above 1 and below -1.

    Example:
        >>> y[i] = language.asin(x[i] / 30)
    """
    sine, rest, is_large = _arcsine_of_half(x)
    large = _less(_quarter_turns(x, 1), 2 * sine, 2 * rest)
    return is_large.choose(large, sine + rest).with_sign_of(x)


@make_function
def acos(x: Number) -> Number:
    """Compute the angle of a cosine within 1.5 units in the last place; NaN above 1 and below -1.

    Example:
        >>> y[i] = language.acos(x[i] / 30)
    """
    sine, rest, is_large = _arcsine_of_half(x)
    behind = _less(_quarter_turns(x, 2), 2 * sine, 2 * rest)
    large = (x < 0.0).choose(behind, 2 * (sine + rest))
    small = _less(_quarter_turns(x, 1), x, rest.with_sign_of(x))
    return is_large.choose(large, small)


def _arctangent(x: Number) -> Number:
    """Compute the angle of a tangent from 0 to 1."""
    square = x * x
    return (x * square).fma(square.polynomial(_ARCTANGENT[x.is_double]), x)


@make_function
def atan(x: Number) -> Number:
    """Compute the angle of a tangent within 1.5 units in the last place; NaN for NaN.

    Example:
        >>> y[i] = language.atan(x[i])
    """
    magnitude = abs(x)
    is_large = magnitude > 1.0
    angle = _arctangent(is_large.choose(1.0 / magnitude, magnitude))
    upper, lower = _quarter_turns(x, 1)
    return is_large.choose(upper - (angle - lower), angle).with_sign_of(x)


@make_function
def atan2(y: Number, x: Number) -> Number:
    """Compute the angle of the point (x, y), from -pi to pi, within 2 units in the last place.

    Signs of zeros count, and points at infinity have the angles of C's atan2.

    Example:
        >>> y[i] = language.atan2(x[i], x[i] + 1)
    """
    height, width = abs(y), abs(x)
    is_steep, is_left = height > width, x.has_minus()
    small, large = is_steep.choose(width, height), is_steep.choose(height, width)
    # The quotient of two zeros, or of two infinities, is NaN.
    same = large.equals(0.0).choose(large, 1.0)
    angle = _arctangent(small.equals(large).choose(same, small / large))
    angle = (is_steep ^ is_left).choose(-angle, angle)
    (quarter, quarter_loss), (half, half_loss) = _quarter_turns(x, 1), _quarter_turns(x, 2)
    zero = x.constant(0.0)
    upper = is_steep.choose(x.constant(quarter), is_left.choose(x.constant(half), zero))
    lower = is_steep.choose(x.constant(quarter_loss), is_left.choose(x.constant(half_loss), zero))
    return (upper + (angle + lower)).with_sign_of(y)
