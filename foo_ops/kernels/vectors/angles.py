"""Compute angles of vectors and scalars: the inverses of sine, cosine and tangent.

asin(x) and atan(x) are x + x^3 p(x^2), up to 1/2 and up to 1, where p was found with 40 digits by
interpolation at Chebyshev's nodes. Above, asin(x) = pi/2 - 2 asin(sqrt((1 - x) / 2)), and atan(x) =
pi/2 - atan(1 / x).
"""

from __future__ import annotations

import math

from foo_ops.kernels.vectors.number import Mask, Number, make_function

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
# What rounding to float64 loses of pi.
_PI_LOSS = float.fromhex("0x1.1a62633145c07p-53")


def _quarters(x: Number, count: int) -> tuple[float, float]:
    """Return so many quarters of a turn, and what rounding loses."""
    return x.in_two_parts(count * math.pi / 2, count * _PI_LOSS / 2)


def _less(upper_and_lower: tuple[float, float], x: Number, rest: Number) -> Number:
    """Subtract two numbers, of which the second is the smaller one, from two constants."""
    upper, lower = upper_and_lower
    return (upper - x) - (rest - lower)


def _arcsine_of_half(x: Number) -> tuple[Number, Number, Mask]:
    """Return asin(|x|) up to 1/2, else asin(sqrt((1 - |x|) / 2)), and where it is the latter.

    It is a sum of two numbers, of which the second is the smaller one.
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
    large = _less(_quarters(x, 1), 2 * sine, 2 * rest)
    return is_large.choose(large, sine + rest).with_sign_of(x)


@make_function
def acos(x: Number) -> Number:
    """Compute the angle of a cosine within 1.5 units in the last place; NaN above 1 and below -1.

    Example:
        >>> y[i] = language.acos(x[i] / 30)
    """
    sine, rest, is_large = _arcsine_of_half(x)
    behind = _less(_quarters(x, 2), 2 * sine, 2 * rest)
    large = (x < 0.0).choose(behind, 2 * (sine + rest))
    small = _less(_quarters(x, 1), x, rest.with_sign_of(x))
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
    upper, lower = _quarters(x, 1)
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
    # Of two zeros and of two infinities the quotient is not a number.
    same = large.equals(0.0).choose(large, 1.0)
    angle = _arctangent(small.equals(large).choose(same, small / large))
    angle = (is_steep ^ is_left).choose(-angle, angle)
    (quarter, quarter_loss), (half, half_loss) = _quarters(x, 1), _quarters(x, 2)
    zero = x.constant(0.0)
    upper = is_steep.choose(x.constant(quarter), is_left.choose(x.constant(half), zero))
    lower = is_steep.choose(x.constant(quarter_loss), is_left.choose(x.constant(half_loss), zero))
    return (upper + (angle + lower)).with_sign_of(y)
