"""Compute hyperbolic functions of vectors and scalars, and their inverses.

With x = n log(2) + r, sinh(x) = sinh(n log(2)) cosh(r) + cosh(n log(2)) sinh(r), where those of
n log(2) are sums of two powers of 2. Their inverses are logarithms.
"""

from __future__ import annotations

import math

from foo_ops.kernels.vectors.functions import LOG2_LOSS, emit_log, format_of, power_of_two
from foo_ops.kernels.vectors.number import Mask, Number, make_function
from foo_ops.kernels.vectors.powers import log_of_one_more

# Of Taylor's series of sinh(r) / r and of cosh(r), in float32 and in float64.
_TERMS = ((3, 4), (6, 7))


def _series(square: Number, first: int, terms: int) -> Number:
    """Return 1 / first! + square / (first + 2)! + ..."""
    powers = range(first, first + 2 * terms, 2)
    return square.polynomial([1 / math.factorial(power) for power in reversed(powers)])


def _quarters_of_both(x: Number) -> tuple[Number, Number]:
    """Compute a quarter of sinh(x) and of cosh(x) each twice, which both are finite for longer."""
    format_ = format_of(x.value)
    # From there on the doubled results are infinite.
    x = x.clamped(0.0, (format_.exponent_bias + 2.4) * math.log(2.0))
    whole = (x * (1 / math.log(2.0))).nearest()
    upper, lower = x.in_two_parts(math.log(2.0), LOG2_LOSS)
    rest = (-whole).fma(lower, (-whole).fma(upper, x))
    square = rest * rest
    sine_terms, cosine_terms = _TERMS[x.is_double]
    sine = (rest * square).fma(_series(square, 3, sine_terms), rest)
    # Less one.
    cosine = square * _series(square, 2, cosine_terms)
    power = power_of_two(whole - 2.0)
    least = -float(format_.exponent_bias)
    inverse = power_of_two((-2.0 - whole).clamped(least, 0.0))
    half_sine, half_cosine = power - inverse, power + inverse
    return (
        half_sine + half_sine.fma(cosine, half_cosine * sine),
        half_cosine + half_cosine.fma(cosine, half_sine * sine),
    )


@make_function
def sinh(x: Number) -> Number:
    """Compute the hyperbolic sine within 2 units in the last place; NaN for NaN.

    Example:
        >>> y[i] = language.sinh(x[i])
    """
    magnitude = abs(x)
    sine, _ = _quarters_of_both(magnitude)
    # Halves of subnormal numbers would lose a digit.
    is_tiny = magnitude < 2.0 ** -format_of(x.value).mantissa_bits
    return is_tiny.choose(x, (2 * sine).with_sign_of(x))


@make_function
def cosh(x: Number) -> Number:
    """Compute the hyperbolic cosine within 1.5 units in the last place; NaN for NaN.

    Example:
        >>> y[i] = 1 / language.cosh(x[i])
    """
    _, cosine = _quarters_of_both(abs(x))
    return 2 * cosine


def _log_of_either(is_large: Mask, large: Number, x: Number) -> Number:
    """Compute log(2 large) where that is to be taken, and log(1 + x) elsewhere."""
    total, lost = x.plus_exactly(x.constant(1.0))
    total = is_large.choose(large, total)
    logarithm = x.made(emit_log(x.builder, total.value))
    return logarithm + is_large.choose(x.constant(math.log(2.0)), lost / total)


def _bound_of_squares(x: Number) -> float:
    """Return from where on x^2 + 1 is x^2, but for what does not count for the logarithm."""
    return 2.0 ** (format_of(x.value).mantissa_bits // 2 + 2)


@make_function
def asinh(x: Number) -> Number:
    """Compute the inverse of sinh within 3 units in the last place; NaN for NaN.

    Example:
        >>> y[i] = language.asinh(x[i])
    """
    magnitude = abs(x)
    square = magnitude * magnitude
    excess = magnitude + square / (1.0 + (1.0 + square).square_root())
    is_large = magnitude > _bound_of_squares(x)
    return _log_of_either(is_large, magnitude, excess).with_sign_of(x)


@make_function
def acosh(x: Number) -> Number:
    """Compute the inverse of cosh, from 0 up, within 3 units in the last place; NaN below 1.

    Example:
        >>> y[i] = language.acosh(1 + x[i] * x[i])
    """
    more = x - 1.0
    excess = more + (more * (more + 2.0)).square_root()
    result = _log_of_either(x > _bound_of_squares(x), x, excess)
    return (x < 1.0).choose(x.constant(math.nan), result)


@make_function
def atanh(x: Number) -> Number:
    """Compute the inverse of tanh within 3 units in the last place.

    The result is infinity for 1, its negative for -1, and NaN beyond.

    Example:
        >>> y[i] = language.atanh(0.5 * language.sin(x[i]))
    """
    magnitude = abs(x)
    return (0.5 * log_of_one_more(2 * magnitude / (1.0 - magnitude))).with_sign_of(x)
