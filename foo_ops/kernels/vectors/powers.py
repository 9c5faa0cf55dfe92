"""Compute powers of vectors and scalars, and exponentials and logarithms beside 1."""

from __future__ import annotations

import math

from foo_ops.kernels.vectors.functions import (
    emit_log,
    format_of,
    fraction_and_power,
    growth,
    logarithm_or_limit,
    parts_of_log,
    power_of_two,
    scale,
    split_exponent,
)
from foo_ops.kernels.vectors.number import Mask, Number, make_function

# 1 / log(2), and what rounding loses.
LOG2E, LOG2E_LOSS = 1 / math.log(2.0), float.fromhex("0x1.777d0ffda0d24p-56")

# log10(e) and log10(2) in the same way.
_LOG10E, _LOG10E_LOSS = 0.4342944819032518, float.fromhex("0x1.95355baaafad3p-57")
_LOG10_2, _LOG10_2_LOSS = (
    float.fromhex("0x1.34413509f79ffp-2"),
    float.fromhex("-0x1.9dc1da994fd21p-59"),
)


@make_function
def expm1(x: Number) -> Number:
    """Compute e^x - 1 within 3 units in the last place, also beside 0.

    Example:
        >>> y[i] = x[i] if x[i] > 0 else language.expm1(x[i])
    """
    format_ = format_of(x.value)
    # From there on the result is -1, or infinity.
    lowest = -(format_.mantissa_bits + 4) * math.log(2.0)
    highest = (format_.exponent_bias + 1.25) * math.log(2.0)
    whole, fraction = split_exponent(x.clamped(lowest, highest))
    # Half of it, which is finite where e^x is.
    power = power_of_two(whole - 1)
    result = 2 * growth(fraction).fma(power, power - 0.5)
    is_tiny = abs(x) < 2.0 ** -(format_.mantissa_bits + 2)
    return is_tiny.choose(x, result)


@make_function
def log1p(x: Number) -> Number:
    """Compute log(1 + x) within 2 units in the last place, also beside 0.

    The result is -infinity for -1, and NaN for less.

    Example:
        >>> y[i] = language.log1p(language.exp(x[i]))
    """
    return log_of_one_more(x)


def log_of_one_more(x: Number) -> Number:
    total, lost = x.plus_exactly(x.constant(1.0))
    logarithm = total.made(emit_log(total.builder, total.value))
    has_loss = (total > 0.0) & (total < math.inf)
    result = has_loss.choose(logarithm + lost / total, logarithm)
    return x.equals(0.0).choose(x, result)


def _series(z: Number, first: int, terms: int) -> Number:
    """Return 1 / first + z / (first + 2) + ..."""
    divisors = range(first, first + 2 * terms, 2)
    return z.polynomial([1 / divisor for divisor in reversed(divisors)])


def _parts(x: Number) -> tuple[Number, Number]:
    """Return f and n of x = 2^n (1 + f)."""
    fraction, power = fraction_and_power(x.builder, x.value)
    return x.made(fraction), x.made(power)


@make_function
def log2(x: Number) -> Number:
    """Compute the logarithm to base 2 within 2 units in the last place; exact for powers of 2.

    The result is -infinity for 0, NaN for less and for NaN, and infinity for infinity.

    Example:
        >>> y[i] = language.log2(x[i])
    """
    one_more, power = _logarithm_and_power(x)
    return logarithm_or_limit(x, one_more.fma(LOG2E, power))


@make_function
def log10(x: Number) -> Number:
    """Compute the logarithm to base 10 within 2 units in the last place; exact for powers of 10.

    The result is -infinity for 0, NaN for less and for NaN, and infinity for infinity.

    Example:
        >>> y[i] = 20 * language.log10(x[i])
    """
    one_more, power = _logarithm_and_power(x)
    upper, lower = x.in_two_parts(_LOG10_2, _LOG10_2_LOSS)
    factor, factor_loss = x.in_two_parts(_LOG10E, _LOG10E_LOSS)
    small = one_more.fma(factor, one_more * factor_loss)
    return logarithm_or_limit(x, power.fma(upper, power.fma(lower, small)))


def _logarithm_and_power(x: Number) -> tuple[Number, Number]:
    """Return log(1 + f) and n of x = 2^n (1 + f)."""
    fraction, power = _parts(x)
    half, s, series = parts_of_log(fraction)
    return fraction - (-s).fma(series, half), power


def log2_exactly(x: Number) -> tuple[Number, Number]:
    """Compute log2 of a positive float64 as a sum of two.

    With s = f / (2 + f), log(1 + f) = 2 (s + s^3 / 3 + s^5 / 5 + ...).
    """
    f, n = _parts(x)
    divisor = f + 2.0
    inverse = 1.0 / divisor
    s = f * inverse
    # What the division has lost, and the addition before.
    s_loss = (-s).fma(divisor, f) - s * (f - (divisor - 2.0))
    s_loss = s_loss * inverse
    z, z_loss = s.times_exactly(s)
    z_loss = (2 * s).fma(s_loss, z_loss)
    third = 1 / 3
    rest = z * _series(z, 5, 11)
    c = third + rest
    c_loss = rest - (c - third) + float.fromhex("0x1.5555555555555p-56")
    d, d_loss = z.times_exactly(c)
    d_loss = d_loss + z.fma(c_loss, z_loss * c)
    e, e_loss = s.times_exactly(d)
    e_loss = e_loss + s.fma(d_loss, s_loss * d)
    total, loss = s.plus_smaller_exactly(e)
    loss = loss + (s_loss + e_loss)
    product, product_loss = total.times_exactly(2 * LOG2E)
    product_loss = product_loss + total.fma(2 * LOG2E_LOSS, loss * (2 * LOG2E))
    # Zero, or more than the product.
    upper, lower = n.plus_smaller_exactly(product)
    return upper, lower + product_loss


def _log2_of_float32(x: Number) -> Number:
    """Compute log2 of a positive float32 as a float64, to more digits than that has."""
    f, n = (part.widened() for part in _parts(x))
    s = f / (f + 2.0)
    return (s * (2 * LOG2E)).fma(_series(s * s, 1, 7), n)


def _power_of_magnitude(x: Number, y: Number) -> Number:
    """Compute |x|^y where both are finite and x is not zero."""
    bound = 2.0 * format_of(x.value).exponent_bias
    if x.is_double:
        upper, lower = log2_exactly(x)
        exponent, loss = upper.times_exactly(y)
        loss = lower.fma(y, loss)
        # Beyond it is zero or infinity.
        loss = (abs(exponent) < bound).choose(loss, 0.0)
        exponent = exponent.clamped(-bound, bound)
        whole = exponent.nearest()
        return scale(1.0 + growth((exponent - whole) + loss), whole)
    exponent = (_log2_of_float32(x) * y.widened()).clamped(-bound, bound)
    whole = exponent.nearest()
    fraction = (exponent - whole).narrowed()
    return scale(1.0 + growth(fraction), whole.narrowed())


@make_function
def pow(x: Number, y: Number) -> Number:
    """Compute x^y within 1.5 units in the last place.

    Where a number is zero, infinity, NaN or negative the result is that of C's pow: NaN for a
    negative x and a y that is no integer, and 1 where x is 1 or y is 0, even beside NaN.

    Example:
        >>> y[i] = language.pow(abs(x[i]), language.cast(0.3, x))
    """
    magnitude = abs(x)
    is_nan = ~(x.equals(x) & y.equals(y))
    zero, infinity, nan = (x.constant(value) for value in (0.0, math.inf, math.nan))
    grows = _same(magnitude > 1.0, y > 0.0)
    result = _power_of_magnitude(magnitude, y)
    # Of a constant exponent LLVM keeps one of these, and none of others.
    root, is_constant = magnitude.square_root(), y.is_constant()
    result = (is_constant & y.equals(-0.5)).choose(1.0 / root, result)
    result = (is_constant & y.equals(0.5)).choose(root, result)
    is_extreme = x.equals(0.0) | magnitude.equals(math.inf) | abs(y).equals(math.inf)
    result = is_extreme.choose(grows.choose(infinity, zero), result)
    result = (y.equals(0.0) | magnitude.equals(1.0)).choose(x.constant(1.0), result)
    half = 0.5 * y
    is_integer = y.truncated().equals(y)
    is_odd = is_integer & ~half.truncated().equals(half)
    result = is_odd.choose(result.with_sign_of(x), result)
    is_undefined = (x < 0.0) & (magnitude < math.inf) & ~is_integer
    result = (is_undefined | is_nan).choose(nan, result)
    return (x.equals(1.0) | y.equals(0.0)).choose(x.constant(1.0), result)


def _same(a: Mask, b: Mask) -> Mask:
    return (a & b) | ~(a | b)
