"""Exponentials, logarithms, powers and hyperbolic functions of vectors and scalars."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from llvmlite import ir
from numpy.polynomial import Chebyshev, Polynomial

from foo_ops.kernels.compiler.processor import target
from foo_ops.kernels.math.formula import Mask, Number, make_function
from foo_ops.kernels.simd.types import (
    DOUBLE,
    FLOAT,
    INT32,
    INT64,
    call_intrinsic,
    constant_of,
    emit_fma,
    shaped,
    suffix,
)

# ----------------------------------------------------------------------------- exp2, exp, tanh, log

# Computes exp2, exp, tanh and log of vectors and scalars.
#
# The first three use 2^x = 2^n * 2^f with n = round(x) (with AVX-512 floor(x), for exp2) and f = x
# - n, and 2^f = 1 + f * growth(f), where growth is a polynomial: so 2^0 is exactly 1, and 2^f - 1
# keeps full precision. LLVM's own intrinsics would call libm lane by lane.


@dataclasses.dataclass(frozen=True)
class _Format:
    """A binary floating-point format, and the approximations of its functions.

    Attributes:
        growth: the coefficients of the polynomial, the highest power first.
        log_terms: the number of terms of the logarithm's series, after the first.
    """

    integer: ir.Type
    mantissa_bits: int
    exponent_bias: int
    growth: tuple[float, ...]
    log_terms: int

    @property
    def magic(self) -> float:
        """Adding it to an integer n leaves n + bias in the lower bits of the sum."""
        return 1.5 * 2**self.mantissa_bits + self.exponent_bias


def _growth(f: np.ndarray) -> np.ndarray:
    """Compute (2^f - 1) / f, and its limit where f is zero."""
    safe = np.where(f == 0.0, 1.0, f)
    return np.where(f == 0.0, math.log(2.0), np.expm1(safe * math.log(2.0)) / safe)


def _interpolated(degree: int, least: float = -0.5) -> tuple[float, ...]:
    interpolant = Chebyshev.interpolate(_growth, degree, domain=[least, least + 1.0])
    return tuple(interpolant.convert(kind=Polynomial).coef[::-1])


def _taylor(degree: int) -> tuple[float, ...]:
    log2 = math.log(2.0)
    return tuple(log2 ** (k + 1) / math.factorial(k + 1) for k in range(degree, -1, -1))


# Interpolation saves float32 one degree. In float64 its own rounding errors would matter.
_FORMATS = {
    FLOAT: _Format(INT32, 23, 127, _interpolated(5), 4),
    DOUBLE: _Format(INT64, 52, 1023, _taylor(12), 10),
}


# For a vector of AVX-512, where f is from 0 to 1.
_WIDE, _GROWTH_ABOVE = ir.VectorType(FLOAT, 16), _interpolated(5, least=0.0)


def format_of(x: ir.Value) -> _Format:
    return _FORMATS[x.type.element if isinstance(x.type, ir.VectorType) else x.type]


def _split(builder: ir.IRBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Split x = n + f into f and 2^n."""
    format_ = format_of(x)
    name = f"llvm.roundeven.{suffix(x.type)}"
    rounded = call_intrinsic(builder, name, x.type, [x])
    integer = shaped(format_.integer, x.type)
    biased = builder.fadd(rounded, constant_of(x.type, format_.magic))
    bits = builder.shl(
        builder.bitcast(biased, integer), constant_of(integer, format_.mantissa_bits)
    )
    return builder.fsub(x, rounded), builder.bitcast(bits, x.type)


def emit_growth(builder: ir.IRBuilder, f: ir.Value) -> ir.Value:
    first, *others = format_of(f).growth
    result = constant_of(f.type, first)
    for coefficient in others:
        result = emit_fma(builder, result, f, constant_of(f.type, coefficient))
    return result


def emit_exp2(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    if x.type == _WIDE and "+avx512dq" in target()[2].split(","):
        return _exp2_of_avx512(builder, x)
    # Below this, 2^n has all exponent bits zero, and is zero.
    smallest = constant_of(x.type, float(-format_of(x).exponent_bias))
    is_small = builder.fcmp_ordered(">", smallest, x)
    fraction, power = _split(builder, builder.select(is_small, smallest, x))
    value = emit_fma(builder, fraction, emit_growth(builder, fraction), constant_of(x.type, 1.0))
    # A multiplication keeps NaN; adding to the exponent bits would not.
    return builder.fmul(value, power)


def _exp2_of_avx512(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Compute 2^x in 11 instructions, not 14: one for the fraction, one to multiply by 2^n."""
    zero = constant_of(x.type, 0.0)
    all_lanes, current = ir.Constant(ir.IntType(16), -1), INT32(4)

    def call(name: str, *operands: ir.Value) -> ir.Value:
        name = f"llvm.x86.avx512.mask.{name}.ps.512"
        return call_intrinsic(builder, name, x.type, [*operands, zero, all_lanes, current])

    # The fraction above floor(x), since scalef rounds x down.
    fraction = call("reduce", x, INT32(1))
    growth = constant_of(x.type, _GROWTH_ABOVE[0])
    for coefficient in _GROWTH_ABOVE[1:]:
        growth = emit_fma(builder, growth, fraction, constant_of(x.type, coefficient))
    value = emit_fma(builder, fraction, growth, constant_of(x.type, 1.0))
    # Processors are slow with subnormal numbers. The comparison is false for NaN.
    is_small = builder.fcmp_ordered("<", x, constant_of(x.type, -126.0))
    return builder.select(is_small, zero, call("scalef", value, x))


@make_function
def exp2(x: Number) -> Number:
    """Compute 2^x within 1.5 units in the last place, for x below 128 (float64: 1024).

    The result is zero below -126.5 (with AVX-512 -126, float64: -1022.5), including -infinity, and
    NaN for NaN.

    Example:
        >>> y[i] = language.exp2(x[i] - 3)
    """
    return x.made(emit_exp2(x.builder, x.value))


@make_function
def exp2_of_all(x: Number) -> Number:
    """Compute 2^x within 1.5 units in the last place for all x; slower than exp2."""
    format_ = format_of(x.value)
    # Beyond these bounds the result is zero or infinity.
    lowest = -float(format_.exponent_bias + format_.mantissa_bits + 2)
    clamped = x.clamped(lowest, format_.exponent_bias + 2.0)
    whole = clamped.nearest()
    return scale(1.0 + growth(clamped - whole), whole)


def split_exponent(x: Number) -> tuple[Number, Number]:
    """Return n and f of e^x = 2^(n + f), corrected for the rounding of x log2(e)."""
    # The rounding error of log2(e) = 0x1.71547652b82fe1777d0f...
    loss = float.fromhex("0x1.777d0ffda0d24p-56")
    upper, lower = x.in_two_parts(1.0 / math.log(2.0), loss)
    product, lost = x.times_exactly(upper)
    whole = product.nearest()
    return whole, (product - whole) + x.fma(lower, lost)


def growth(f: Number) -> Number:
    """Compute 2^f - 1, for f from -1/2 to 1/2."""
    return f * f.polynomial(format_of(f.value).growth)


def scale(x: Number, n: Number) -> Number:
    """Multiply by 2^n in two steps, whose factors are normal numbers if the product is."""
    magic = format_of(x.value).magic
    shifted = n.fma(0.5, magic)
    rest = n - (shifted - magic)
    return x * _power_of_shifted(shifted) * _power_of_shifted(rest + magic)


def power_of_two(n: Number) -> Number:
    """Return 2^n for an integer n; zero for the lowest exponent."""
    return _power_of_shifted(n + format_of(n.value).magic)


def _power_of_shifted(n: Number) -> Number:
    bits = n.bits()
    shift = constant_of(bits.type, format_of(n.value).mantissa_bits)
    return n.made(n.builder.bitcast(n.builder.shl(bits, shift), n.type))


@make_function
def exp(x: Number) -> Number:
    """Compute e^x within 1.5 units in the last place, also for subnormal results.

    The result is infinity if it is too large for the type, and NaN for NaN.

    Example:
        >>> y[i] = x[i] / (1 + language.exp(-x[i]))
    """
    format_ = format_of(x.value)
    # Beyond these bounds the result is zero or infinity.
    lowest = -(format_.exponent_bias + format_.mantissa_bits + 2) * math.log(2.0)
    whole, fraction = split_exponent(x.clamped(lowest, (format_.exponent_bias + 2) * math.log(2.0)))
    return scale(1.0 + growth(fraction), whole)


def _decay(builder: ir.IRBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Compute e^(-2|x|), and e^(-2|x|) - 1 at full precision: 0 and -1 if x is large."""
    magnitude = call_intrinsic(builder, f"llvm.fabs.{suffix(x.type)}", x.type, [x])
    exponent = builder.fmul(magnitude, constant_of(x.type, -2.0 / math.log(2.0)))
    # Below this, 2^n has all exponent bits zero, and is zero.
    lowest = constant_of(x.type, float(-format_of(x).exponent_bias))
    is_large = builder.fcmp_ordered(">", lowest, exponent)
    fraction, power = _split(builder, builder.select(is_large, lowest, exponent))
    growth = builder.fmul(fraction, emit_growth(builder, fraction))
    less_one = builder.fsub(power, constant_of(x.type, 1.0))
    return (
        emit_fma(builder, power, growth, power),
        emit_fma(builder, power, growth, less_one),
    )


def _quotient_of_decay(builder: ir.IRBuilder, less_one: ir.Value) -> ir.Value:
    """Compute 1 / (1 + e^(-2|x|)), which tanh and its derivative share."""
    one, two = (constant_of(less_one.type, number) for number in (1.0, 2.0))
    return builder.fdiv(one, builder.fadd(less_one, two))


def _tanh(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Compute (1 - e^(-2|x|)) / (1 + e^(-2|x|)) with the sign of x."""
    _, less_one = _decay(builder, x)
    result = builder.fmul(less_one, _quotient_of_decay(builder, less_one))
    return call_intrinsic(builder, f"llvm.copysign.{suffix(x.type)}", x.type, [result, x])


@make_function
def tanh(x: Number) -> Number:
    """Compute tanh(x) within 4 units in the last place; NaN for NaN.

    Example:
        >>> y[i] = 30 * language.tanh(x[i] / 30)
    """
    return x.made(_tanh(x.builder, x.value))


@make_function
def tanh_derivative(x: Number) -> Number:
    """Compute 1 - tanh(x)^2 = 4 e^(-2|x|) / (1 + e^(-2|x|))^2, without cancellation.

    It takes four more instructions beside tanh(x).
    """

    builder = x.builder
    decay, less_one = _decay(builder, x.value)
    doubled = builder.fmul(_quotient_of_decay(builder, less_one), constant_of(decay.type, 2.0))
    return x.made(builder.fmul(builder.fmul(decay, doubled), doubled))


# The rounding error of log(2) in float64.
LOG2_LOSS = float.fromhex("0x1.abc9e3b39803fp-56")


def emit_log(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Compute n log(2) + log(1 + f), where x = 2^n (1 + f), and 1 + f is near 1."""
    number = Number(builder, x)
    fraction, power = map(number.made, fraction_and_power(builder, x))
    half, s, series = parts_of_log(fraction)
    # log(2) in two parts; the product of n and the first is exact.
    bits = format_of(x).mantissa_bits - 11
    upper = math.floor(math.log(2.0) * 2.0**bits) / 2.0**bits
    lower = math.log(2.0) - upper + LOG2_LOSS
    rest = fraction - (half - s.fma(series, power * lower))
    return logarithm_or_limit(number, power.fma(upper, rest)).value


def parts_of_log(f: Number) -> tuple[Number, Number, Number]:
    """Return a, b and c of log(1 + f) = f - (a - b c).

    With s = f / (2 + f), log(1 + f) = f - f^2/2 + s (f^2/2 + 2/3 s^2 + 2/5 s^4 + ...).
    """
    s = f / (f + 2.0)
    square, half = s * s, 0.5 * f * f
    terms = range(format_of(f.value).log_terms, 0, -1)
    series = square.polynomial([2.0 / (2 * term + 1) for term in terms])
    return half, s, series.fma(square, half)


def logarithm_or_limit(x: Number, result: Number) -> Number:
    """Return ``result`` for finite positive numbers, and the logarithm's limits for others."""
    of_others = x.equals(0.0).choose(x.constant(-math.inf), x.constant(math.nan))
    return x.equals(math.inf).choose(x, (x > 0.0).choose(result, of_others))


def fraction_and_power(builder: ir.IRBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return f and n of x = 2^n (1 + f), with 1 + f from sqrt(1/2) to sqrt(2).

    This includes subnormal numbers.
    """
    format_ = format_of(x)
    integer, mantissa_bits = shaped(format_.integer, x.type), format_.mantissa_bits
    smallest = constant_of(x.type, 2.0 ** (1 - format_.exponent_bias))
    is_subnormal = builder.fcmp_ordered("<", x, smallest)
    scaled = builder.fmul(x, constant_of(x.type, 2.0**mantissa_bits))
    bits = builder.bitcast(builder.select(is_subnormal, scaled, x), integer)
    kind = np.float32 if format_.integer == INT32 else np.float64
    lowest = np.array(math.sqrt(0.5), kind).view(np.int32 if kind is np.float32 else np.int64)
    shift = constant_of(integer, mantissa_bits)
    exponent = builder.ashr(builder.sub(bits, constant_of(integer, int(lowest))), shift)
    mantissa = builder.bitcast(builder.sub(bits, builder.shl(exponent, shift)), x.type)
    lost = builder.select(
        is_subnormal, constant_of(x.type, -float(mantissa_bits)), constant_of(x.type, 0.0)
    )
    power = builder.fadd(builder.sitofp(exponent, x.type), lost)
    return builder.fsub(mantissa, constant_of(x.type, 1.0)), power


@make_function
def log(x: Number) -> Number:
    """Compute the natural logarithm, within 1 unit in the last place.

    The result is -infinity for 0, NaN for negative numbers and NaN, and infinity for infinity.

    Example:
        >>> y[i] = language.log(1 + x[i] * x[i])
    """
    return x.made(emit_log(x.builder, x.value))


# ---------------------------------------------------------------------------- powers and logarithms

# Computes powers of vectors and scalars, and e^x - 1, log(1 + x), log2 and log10.


# 1 / log(2), and its rounding error.
LOG2E, LOG2E_LOSS = 1 / math.log(2.0), float.fromhex("0x1.777d0ffda0d24p-56")

# log10(e) and log10(2), and their rounding errors.
_LOG10E, _LOG10E_LOSS = 0.4342944819032518, float.fromhex("0x1.95355baaafad3p-57")
_LOG10_2, _LOG10_2_LOSS = (
    float.fromhex("0x1.34413509f79ffp-2"),
    float.fromhex("-0x1.9dc1da994fd21p-59"),
)


@make_function
def expm1(x: Number) -> Number:
    """Compute e^x - 1 within 3 units in the last place, also near 0.

    Example:
        >>> y[i] = x[i] if x[i] > 0 else language.expm1(x[i])
    """
    format_ = format_of(x.value)
    # Beyond these bounds the result is -1 or infinity.
    lowest = -(format_.mantissa_bits + 4) * math.log(2.0)
    highest = (format_.exponent_bias + 1.25) * math.log(2.0)
    whole, fraction = split_exponent(x.clamped(lowest, highest))
    # Half of 2^n, which is finite where e^x is.
    power = power_of_two(whole - 1)
    result = 2 * growth(fraction).fma(power, power - 0.5)
    is_tiny = abs(x) < 2.0 ** -(format_.mantissa_bits + 2)
    return is_tiny.choose(x, result)


@make_function
def log1p(x: Number) -> Number:
    """Compute log(1 + x) within 2 units in the last place, also near 0.

    The result is -infinity for -1, and NaN below -1.

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


def _odd_series(z: Number, first: int, terms: int) -> Number:
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

    The result is -infinity for 0, NaN for negative numbers and NaN, and infinity for infinity.

    Example:
        >>> y[i] = language.log2(x[i])
    """
    one_more, power = _logarithm_and_power(x)
    return logarithm_or_limit(x, one_more.fma(LOG2E, power))


@make_function
def log10(x: Number) -> Number:
    """Compute the logarithm to base 10 within 2 units in the last place; exact for powers of 10.

    The result is -infinity for 0, NaN for negative numbers and NaN, and infinity for infinity.

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
    """Compute log2 of a positive float64 as a sum of two numbers.

    With s = f / (2 + f), log(1 + f) = 2 (s + s^3 / 3 + s^5 / 5 + ...).
    """
    f, n = _parts(x)
    divisor = f + 2.0
    inverse = 1.0 / divisor
    s = f * inverse
    # The rounding errors of the division, and of the addition before it.
    s_loss = (-s).fma(divisor, f) - s * (f - (divisor - 2.0))
    s_loss = s_loss * inverse
    z, z_loss = s.times_exactly(s)
    z_loss = (2 * s).fma(s_loss, z_loss)
    third = 1 / 3
    rest = z * _odd_series(z, 5, 11)
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
    # n is zero, or larger than the product.
    upper, lower = n.plus_smaller_exactly(product)
    return upper, lower + product_loss


def _log2_of_float32(x: Number) -> Number:
    """Compute log2 of a positive float32 as a float64, more precisely than float32."""
    f, n = (part.widened() for part in _parts(x))
    s = f / (f + 2.0)
    return (s * (2 * LOG2E)).fma(_odd_series(s * s, 1, 7), n)


def _power_of_magnitude(x: Number, y: Number) -> Number:
    """Compute |x|^y for finite numbers, of which x is not zero."""
    bound = 2.0 * format_of(x.value).exponent_bias
    if x.is_double:
        upper, lower = log2_exactly(x)
        exponent, loss = upper.times_exactly(y)
        loss = lower.fma(y, loss)
        # Beyond the bound the result is zero or infinity.
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

    For zero, infinity, NaN and negative numbers, the result is the same as C's pow: NaN for a
    negative x and a y that is not an integer, and 1 if x is 1 or y is 0, even if the other is NaN.

    Example:
        >>> y[i] = language.pow(abs(x[i]), language.cast(0.3, x))
    """
    magnitude = abs(x)
    is_nan = ~(x.equals(x) & y.equals(y))
    zero, infinity, nan = (x.constant(value) for value in (0.0, math.inf, math.nan))
    grows = _same(magnitude > 1.0, y > 0.0)
    result = _power_of_magnitude(magnitude, y)
    # LLVM keeps one of these if the exponent is such a constant, else neither.
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


# ----------------------------------------------------------------------------- hyperbolic functions

# Computes hyperbolic functions of vectors and scalars, and their inverses.
#
# With x = n log(2) + r, sinh(x) = sinh(n log(2)) cosh(r) + cosh(n log(2)) sinh(r), where sinh and
# cosh of n log(2) are sums of two powers of 2. The inverses are logarithms.


# Terms of the Taylor series of sinh(r) / r and of cosh(r), in float32 and in float64.
_TERMS = ((3, 4), (6, 7))


def _factorial_series(square: Number, first: int, terms: int) -> Number:
    """Return 1 / first! + square / (first + 2)! + ..."""
    powers = range(first, first + 2 * terms, 2)
    return square.polynomial([1 / math.factorial(power) for power in reversed(powers)])


def _quarters_of_both(x: Number) -> tuple[Number, Number]:
    """Compute half of sinh(x) and half of cosh(x), which are finite for larger x."""
    format_ = format_of(x.value)
    # Beyond this bound the doubled results are infinite.
    x = x.clamped(0.0, (format_.exponent_bias + 2.4) * math.log(2.0))
    whole = (x * (1 / math.log(2.0))).nearest()
    upper, lower = x.in_two_parts(math.log(2.0), LOG2_LOSS)
    rest = (-whole).fma(lower, (-whole).fma(upper, x))
    square = rest * rest
    sine_terms, cosine_terms = _TERMS[x.is_double]
    sine = (rest * square).fma(_factorial_series(square, 3, sine_terms), rest)
    # cosh(r) - 1.
    cosine = square * _factorial_series(square, 2, cosine_terms)
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
    # Halving a subnormal number would lose a bit.
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
    """Compute log(2 large) where ``is_large``, and log(1 + x) elsewhere."""
    total, lost = x.plus_exactly(x.constant(1.0))
    total = is_large.choose(large, total)
    logarithm = x.made(emit_log(x.builder, total.value))
    return logarithm + is_large.choose(x.constant(math.log(2.0)), lost / total)


def _bound_of_squares(x: Number) -> float:
    """Return the bound above which x^2 + 1 has the same logarithm as x^2, after rounding."""
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
