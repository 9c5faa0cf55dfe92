"""Compute the gamma function of vectors and scalars, and its logarithm, in float64.

Gamma is Lanczos's formula with Godfrey's coefficients, whose power is computed with more digits.
Its logarithm is a polynomial about 2, to which others up to 8.5 are moved by the logarithm of a
product, and Stirling's series above. Numbers below 0 are reflected, which is rare.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from foo_ops.kernels.vectors.functions import emit_log, growth, scale
from foo_ops.kernels.vectors.number import Number, make_function
from foo_ops.kernels.vectors.periodic import sine_of
from foo_ops.kernels.vectors.powers import LOG2E, LOG2E_LOSS, log2_exactly
from foo_ops.kernels.vectors.rare_branches import RareBranch
from foo_ops.kernels.vectors.whole_functions import WholeFunction

# log(gamma(2 + t)) / t up to 1/2 from 0, the highest power first, by interpolation with 50 digits.
_ABOUT_TWO = (
    *(6.379047507619774e-08, -1.3412819758517287e-07, 2.0304806751615227e-07),
    *(-4.303558760359961e-07, 9.578663334114758e-07, -2.0449201467015115e-06),
    *(4.374374916915131e-06, -9.438458716242811e-06, 2.050726741605779e-05),
    *(-4.4926351103833334e-05, 9.945750909889392e-05, -0.00022315475074520367),
    *(0.0005096695248853096, -0.0011927539120010226, 0.002890510330738737),
    *(-0.0073855510286681535, 0.02058080842778457, -0.06735230105319814),
    *(0.3224670334241132, 0.42278433509846713),
)
# Of Stirling's series in 1 / x, the highest power first.
_STIRLING = (
    *(0.00641025641025641, -0.0019175269175269176, 0.0008417508417508417),
    *(-0.0005952380952380953, 0.0007936507936507937, -0.002777777777777778, 0.08333333333333333),
)
# Where Stirling's series begins: whole steps from numbers about 2.
_STEPS = 6
_FAR = 2.5 + _STEPS

_LANCZOS_G = 6.024680040776729583740234375
_LANCZOS = (
    *(2.5066282746310002, 210.82427775157934, 8071.672002365816, 186056.26539522348),
    *(2876370.6289353725, 31426415.5854002, 248874557.86205417, 1439720407.3117216),
    *(6039542586.352028, 17921034426.037209, 35711959237.355664, 42919803642.6491),
    23531376880.41076,
)
# Of x (x + 1) ... (x + 11).
_RISING = (
    *(1.0, 66.0, 1925.0, 32670.0, 357423.0, 2637558.0, 13339535.0, 45995730.0, 105258076.0),
    *(150917976.0, 120543840.0, 39916800.0, 0.0),
)


def _log(x: Number) -> Number:
    return x.made(emit_log(x.builder, x.value))


def _sine_of_half_turns(x: Number) -> Number:
    """Compute sin(pi x) with all its digits where x is next to an integer."""
    rest = x - 2 * (0.5 * x).nearest()
    magnitude = abs(rest)
    near = (magnitude > 0.5).choose(1.0 - magnitude, magnitude)
    return sine_of(math.pi * near).with_sign_of(rest)


def _log_gamma_above_zero(x: Number) -> Number:
    is_far, one = ~(x < _FAR), x.constant(1.0)
    # As many steps down as lead next to 2, or up.
    near, product = x - 2.0, one
    for step in range(1, _STEPS + 1):
        is_above = x > step + 1.5
        product = is_above.choose(product * (x - float(step)), product)
        near = is_above.choose(x - (step + 2.0), near)
    is_below, is_tiny = x < 1.5, x < 0.5
    near = is_tiny.choose(x, is_below.choose(x - 1.0, near))
    product = is_tiny.choose(x.fma(x, x), is_below.choose(x, product))
    logarithm = _log(is_far.choose(x, product))
    about_two = near * near.polynomial(_ABOUT_TWO)
    moved = about_two + is_below.choose(-logarithm, logarithm)
    inverse = 1.0 / x
    series = inverse * (inverse * inverse).polynomial(_STIRLING)
    # log(2 pi) / 2 - 1 / 2.
    rest = series + (0.5 * math.log(2 * math.pi) - 0.5)
    return is_far.choose((x - 0.5).fma(logarithm - 1.0, rest), moved)


def _log_gamma_of_any(x: Number) -> Number:
    magnitude = abs(x)
    above = _log_gamma_above_zero(magnitude)
    sine = abs(_sine_of_half_turns(magnitude))
    below = _log(math.pi / (magnitude * sine)) - above
    below = magnitude.equals(math.inf).choose(magnitude, below)
    return ((x > 0.0) | (magnitude < 2.0**-60)).choose(above, below)


def _exponent(magnitude: Number, is_narrow: bool) -> tuple[Number, Number]:
    """Return the exponent to base 2 of Lanczos's power, and what it loses; 0 for float32."""
    y, y_loss = magnitude.plus_exactly(magnitude.constant(_LANCZOS_G - 0.5))
    power = magnitude - 0.5
    if is_narrow:
        return (power * _log(y) - y) * LOG2E, y.constant(0.0)
    upper, lower = log2_exactly(y)
    first, first_loss = upper.times_exactly(power)
    second, second_loss = y.times_exactly(LOG2E)
    exponent, loss = first.plus_exactly(-second)
    loss = loss + (lower.fma(power, first_loss) - y.fma(LOG2E_LOSS, second_loss))
    return exponent, loss + y_loss * (power / y - 1.0) * LOG2E


def _gamma_of_any(x: Number, is_narrow: bool) -> Number:
    # Beyond it is infinite or 0.
    magnitude = abs(x).clamped(0.0, 200.0)
    exponent, loss = _exponent(magnitude, is_narrow)
    factor = magnitude.polynomial(_LANCZOS) / magnitude.polynomial(_RISING)
    is_below = x < 0.0
    whole = exponent.nearest()
    reflected = (-math.pi) / (_sine_of_half_turns(abs(x)) * (magnitude * factor))
    factor = is_below.choose(reflected, factor)
    fraction = (exponent - whole) + loss
    fraction = is_below.choose(-fraction, fraction)
    result = scale((1.0 + growth(fraction)) * factor, is_below.choose(-whole, whole))
    is_whole = x.truncated().equals(x)
    is_exact = is_whole & (abs(result) < 2.0**50)
    result = is_exact.choose(result.nearest(), result)
    result = (is_below & is_whole).choose(x.constant(math.nan), result)
    return (abs(x) < 2.0**-500).choose(1.0 / x, result)


def _computed(formula: Callable[..., Number], x: Number, *options: bool) -> Number:
    return formula(x, *options) if x.is_double else formula(x.widened(), *options).narrowed()


_LOG_GAMMA = RareBranch(
    "lgamma",
    lambda x: (_computed(_log_gamma_above_zero, x), ~(x.has_minus())),
    lambda x: _computed(_log_gamma_of_any, x),
)


@dataclass(frozen=True)
class _Gamma(WholeFunction):
    def formula(self, *numbers: Number) -> Number:
        (x,) = numbers
        return _computed(_gamma_of_any, x, not x.is_double)


_GAMMA = _Gamma("gamma")


@make_function
def lgamma(x: Number) -> Number:
    """Compute log(|gamma(x)|) within 5 units in the last place for positive numbers.

    Below 0 the error is that of numbers as large as x log(|x|), also next to a zero. The result is
    infinity for 0, for negative integers and where x is infinite.

    Example:
        >>> y[i] = language.lgamma(1 + x[i] * x[i])
    """
    return _LOG_GAMMA.of(x)


@make_function
def gamma(x: Number) -> Number:
    """Compute the gamma function within 6 units in the last place, and factorials exactly.

    The result is NaN for negative integers, and infinity for 0 with the sign of it.

    Example:
        >>> y[i] = language.gamma(1 + x[i] * x[i])
    """
    return _GAMMA.of(x)
