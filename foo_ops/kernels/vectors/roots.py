"""Compute the length of a vector of two numbers, and cube roots."""

from __future__ import annotations

import math

from foo_ops.kernels.vectors.functions import fraction_and_power, power_of_two
from foo_ops.kernels.vectors.number import Number, make_function

# The cube root of a number from sqrt(1/2) to sqrt(2), to 19 bits; the highest power first.
_CUBE_ROOT = (
    *(0.025563650239939707, -0.17217607026882265, 0.495520725788132, -0.8201430628513885),
    *(1.0479258711331414, 0.4233082672241438),
)


@make_function
def hypot(x: Number, y: Number) -> Number:
    """Compute the square root of x^2 + y^2 within 1 unit in the last place, also of huge numbers.

    The result is infinity where a number is infinite, even beside NaN.

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
    """Compute the length of float64, whose squares must be neither infinite nor subnormal."""
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
    """Compute the cube root within 1 unit in the last place, that of a negative number, too.

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
