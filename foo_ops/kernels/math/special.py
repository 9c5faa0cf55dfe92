"""The gamma function, its logarithm, and the error function, of vectors and scalars."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from foo_ops.kernels.math.exponential import (
    LOG2E,
    LOG2E_LOSS,
    emit_exp2,
    emit_log,
    growth,
    log2_exactly,
    scale,
    split_exponent,
)
from foo_ops.kernels.math.formula import (
    PIECES,
    Number,
    RareBranch,
    WholeFunction,
    fit,
    has_quick_tables,
    make_function,
    piecewise,
)
from foo_ops.kernels.math.trigonometric import sine_of

# ----------------------------------------------------------------------------------- gamma function

# Computes the gamma function of vectors and scalars, and its logarithm, in float64.
#
# Gamma is Lanczos's formula with Godfrey's coefficients; its power is computed with extra
# precision. The logarithm is a polynomial about 2, with the logarithm of a product to move numbers
# up to 8.5 there, and Stirling's series above. Negative numbers, which are rare, are reflected.


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
# Coefficients of Stirling's series in 1 / x, the highest power first.
_STIRLING = (
    *(0.00641025641025641, -0.0019175269175269176, 0.0008417508417508417),
    *(-0.0005952380952380953, 0.0007936507936507937, -0.002777777777777778, 0.08333333333333333),
)
# Stirling's series begins this many whole steps above the numbers about 2.
_STEPS = 6
_FAR = 2.5 + _STEPS

_LANCZOS_G = 6.024680040776729583740234375
_LANCZOS = (
    *(2.5066282746310002, 210.82427775157934, 8071.672002365816, 186056.26539522348),
    *(2876370.6289353725, 31426415.5854002, 248874557.86205417, 1439720407.3117216),
    *(6039542586.352028, 17921034426.037209, 35711959237.355664, 42919803642.6491),
    23531376880.41076,
)
# Coefficients of x (x + 1) ... (x + 11).
_RISING = (
    *(1.0, 66.0, 1925.0, 32670.0, 357423.0, 2637558.0, 13339535.0, 45995730.0, 105258076.0),
    *(150917976.0, 120543840.0, 39916800.0, 0.0),
)


def _log(x: Number) -> Number:
    return x.made(emit_log(x.builder, x.value))


def _sine_of_half_turns(x: Number) -> Number:
    """Compute sin(pi x) at full precision for x near an integer."""
    rest = x - 2 * (0.5 * x).nearest()
    magnitude = abs(rest)
    near = (magnitude > 0.5).choose(1.0 - magnitude, magnitude)
    return sine_of(math.pi * near).with_sign_of(rest)


def _log_gamma_above_zero(x: Number) -> Number:
    is_far, one = ~(x < _FAR), x.constant(1.0)
    # Step down, or up, to a number near 2.
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
    """Return the exponent to base 2 of Lanczos's power, and its error (0 for float32)."""
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
    # Beyond 200 the result is infinite or 0.
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

    Below 0 the error is relative to numbers as large as x log(|x|), also near a zero. The result is
    infinity for 0, for negative integers and for infinite x.

    Example:
        >>> y[i] = language.lgamma(1 + x[i] * x[i])
    """
    return _LOG_GAMMA.of(x)


@make_function
def gamma(x: Number) -> Number:
    """Compute the gamma function within 6 units in the last place, and factorials exactly.

    The result is NaN for negative integers, and infinity for 0, with the sign of the zero.

    Example:
        >>> y[i] = language.gamma(1 + x[i] * x[i])
    """
    return _GAMMA.of(x)


# ----------------------------------------------------------------------------------- error function

# Computes the error function of vectors and scalars, and its complement.
#
# If a register holds a table, erf(x) is m (1 + p(x)) in float32: m is x up to the end of a piece,
# and that end above, and p is a polynomial for each piece. Otherwise erf(x) is x + x p(x^2) up to
# 1, and 1 - 2^q(x) above. These polynomials were found with 50 digits by interpolation at
# Chebyshev's nodes, and q by least squares, weighted with 2^q(x) until the largest error of the
# result was smallest (Lawson 1961).
#
# The complement is e^(-x^2) g((x - k) / (x + k)) / (1 + 2x) with a polynomial g (Shepherd and
# Laframboise 1981), found like p.


# The coefficients of p and q, the highest powers first, and the bound above which erf is 1.
_FLOAT32 = (
    (
        *(7.875875062685488e-05, -0.000801686428716587, 0.005189087423433974),
        *(-0.026854212010626412, 0.11283594715160218, -0.37612626666720334, 0.1283791658483509),
    ),
    (
        *(0.000267756468005465, -0.004241240971622503, 0.03145953059618622, -0.14865375034166212),
        *(-0.9207624966204823, -1.625976551701813, -0.0005099536424569936),
    ),
    4.0,
)
_FLOAT64 = (
    (
        *(5.957176147748911e-11, -1.1372848856791674e-09, 1.4659775274047436e-08),
        *(-1.6350312701054695e-07, 1.6461000484121368e-06, -1.4925595266831182e-05),
        *(0.0001205533111164271, -0.000854832698083379, 0.0052239776248180145),
        *(-0.026866170645076792, 0.11283791670954879, -0.3761263890318375, 0.1283791670955126),
    ),
    (
        *(2.510056652070858e-11, -9.246137256613171e-10, 1.5470480731832615e-08),
        *(-1.535067380618451e-07, 9.740509517331851e-07, -3.7648504176586958e-06),
        *(4.8633876763645686e-06, 4.139688759247265e-05, -0.00033501323969256235),
        *(0.001331151838006306, -0.00303326611737422, 0.0008482362464826951),
        *(0.027212585850183706, -0.14807230401078544, -0.9185181505553158, -1.6278917062413931),
        *(-1.561091743814852e-06,),
    ),
    6.0,
)

# The width of a piece: 15.5 of them reach to where erf is 1, and m ends where the fifth begins.
_WIDTH, _END, _LAST = 33 / 128, 3.5 * 33 / 128, 3.99


def _part_below(x: float) -> float:
    """Return p where m is x; the piece around zero includes negative numbers."""
    return (math.erf(x) / x if x else 2 / math.sqrt(math.pi)) - 1


def _part_above(x: float) -> float:
    return math.erf(x) / _END - 1


@functools.cache
def _tables() -> list[list[float]]:
    """Return the coefficients of p: for each power, the highest first, one of each piece."""
    centres = [piece * _WIDTH for piece in range(PIECES)]
    pieces = [fit(_part_below if it < _END else _part_above, it, _WIDTH, 5) for it in centres]
    return np.array(pieces, np.float32).T.tolist()


class _Tabled(WholeFunction):
    """The error function of float32, within 0.7 units in the last place.

    gelu of bfloat16 takes 0.63 of its time with the exponential.
    """

    def formula(self, *numbers: Number) -> Number:
        (x,) = numbers
        magnitude = abs(x)
        part = piecewise(magnitude.clamped(0.0, _LAST), _WIDTH, _tables())
        m = magnitude.clamped(0.0, _END)
        return m.fma(part, m).with_sign_of(x)


_TABLED = _Tabled("erf")


@make_function
def erf(x: Number) -> Number:
    """Compute the error function within 1.5 units in the last place; NaN for NaN.

    Example:
        >>> y[i] = 0.5 * x[i] * (1 + language.erf(x[i] * 0.7071067811865476))
    """
    if not x.is_double and has_quick_tables():
        return _TABLED.of(x)
    near, far, end = _FLOAT64 if x.is_double else _FLOAT32
    magnitude = abs(x).clamped(0.0, end)
    exponent = magnitude.polynomial(far)
    complement = x.made(emit_exp2(x.builder, exponent.value))
    small = x.fma((x * x).polynomial(near), x)
    return (magnitude < 1.0).choose(small, (1.0 - complement).with_sign_of(x))


# k, the bound above which the result is 0, and the coefficients of g, the highest powers first.
_COMPLEMENT = (
    (
        *(3.0, 10.5),
        (
            *(-0.00027359599926303436, -0.0007881207530374105, 0.0020017712255442632),
            *(0.002576856516801767, -0.02379466453419944, 0.06829302905525306),
            *(-0.11927191933722657, 0.12964671485294685, -0.047562318168041816),
            *(-0.13562114905995368, 1.2530080581370375),
        ),
    ),
    (
        *(4.0, 28.0),
        (
            *(-1.8206098680308682e-09, -1.3670989863347383e-08, -7.71541861441783e-09),
            *(1.1534943745754157e-07, 6.270727157198311e-08, -8.351619688696847e-07),
            *(3.0135049944875397e-07, 5.7178872846321855e-06, -1.1224789135154701e-05),
            *(-2.4403169244974074e-05, 0.000150622243948303, -0.00019925550755614952),
            *(-0.00075777334141333, 0.005031969755895426, -0.016197734059115006),
            *(0.03716751556249286, -0.06633036581152939, 0.09373283499679412),
            *(-0.10103906603635213, 0.06809705425473732, 0.01537965210262074),
            *(-0.1396211168405629, 1.2329951186255526),
        ),
    ),
)


@make_function
def erfc(x: Number) -> Number:
    """Compute 1 - erf(x) within 5 units in the last place, also tiny results; NaN for NaN.

    Example:
        >>> y[i] = 0.5 * language.erfc(-x[i] * 0.7071067811865476)
    """
    middle, end, coefficients = _COMPLEMENT[x.is_double]
    magnitude = abs(x).clamped(0.0, end)
    factor = ((magnitude - middle) / (magnitude + middle)).polynomial(coefficients)
    square, lost = magnitude.times_exactly(magnitude)
    whole, fraction = split_exponent(-square)
    fraction = lost.fma(-1.0 / math.log(2.0), fraction)
    exponential = 1.0 + growth(fraction)
    result = scale(exponential * (factor / (1.0 + 2 * magnitude)), whole)
    result = (x < 0.0).choose(2.0 - result, result)
    near, _, _ = _FLOAT64 if x.is_double else _FLOAT32
    return (abs(x) < 0.5).choose(1.0 - x.fma((x * x).polynomial(near), x), result)
