"""Compute exp2, exp, tanh and log of vectors and scalars.

The first three rest on 2^x = 2^n * 2^f with n = round(x) (with AVX-512 floor(x), for exp2) and f =
x - n, and on 2^f = 1 + f * growth(f), where growth is a polynomial: so 2^0 is exactly 1, and 2^f -
1 keeps all its digits. LLVM's own intrinsics call libm lane by lane.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from llvmlite import ir
from numpy.polynomial import Chebyshev, Polynomial

from foo_ops.kernels.compiler.processor import target
from foo_ops.kernels.vectors.instructions import (
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
from foo_ops.kernels.vectors.number import Number, make_function


@dataclasses.dataclass(frozen=True)
class _Format:
    """A binary floating-point format, and how its functions are approximated.

    Attributes:
        growth: the coefficients of the polynomial, the highest power first.
        log_terms: the terms of the series for the logarithm, behind the first.
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


# Interpolation saves float32 a degree. In float64 its own roundings would show.
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
    # From here on 2^n is the number whose exponent bits are all zero, which is zero.
    smallest = constant_of(x.type, float(-format_of(x).exponent_bias))
    is_small = builder.fcmp_ordered(">", smallest, x)
    fraction, power = _split(builder, builder.select(is_small, smallest, x))
    value = emit_fma(builder, fraction, emit_growth(builder, fraction), constant_of(x.type, 1.0))
    # The multiplication, and not an addition to the exponent bits, is what keeps a NaN a NaN.
    return builder.fmul(value, power)


def _exp2_of_avx512(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Take 11 instructions, not 14: one takes the fraction, and one multiplies by 2^n."""
    zero = constant_of(x.type, 0.0)
    all_lanes, current = ir.Constant(ir.IntType(16), -1), INT32(4)

    def call(name: str, *operands: ir.Value) -> ir.Value:
        name = f"llvm.x86.avx512.mask.{name}.ps.512"
        return call_intrinsic(builder, name, x.type, [*operands, zero, all_lanes, current])

    # Above floor(x), as the other instruction rounds x.
    fraction = call("reduce", x, INT32(1))
    growth = constant_of(x.type, _GROWTH_ABOVE[0])
    for coefficient in _GROWTH_ABOVE[1:]:
        growth = emit_fma(builder, growth, fraction, constant_of(x.type, coefficient))
    value = emit_fma(builder, fraction, growth, constant_of(x.type, 1.0))
    # Processors are slow with subnormal numbers. A NaN is not less.
    is_small = builder.fcmp_ordered("<", x, constant_of(x.type, -126.0))
    return builder.select(is_small, zero, call("scalef", value, x))


@make_function
def exp2(x: Number) -> Number:
    """Compute 2^x within 1.5 units in the last place, for x below 128 (float64: 1024).

    The result is zero below -126.5 (with AVX-512 -126, float64: -1022.5), and so for -infinity; NaN
    for NaN.

    Example:
        >>> y[i] = language.exp2(x[i] - 3)
    """
    return x.made(emit_exp2(x.builder, x.value))


@make_function
def exp2_of_all(x: Number) -> Number:
    """Compute 2^x within 1.5 units in the last place for all x, which takes longer than exp2."""
    format_ = format_of(x.value)
    # From there on the result is zero, or infinity.
    lowest = -float(format_.exponent_bias + format_.mantissa_bits + 2)
    clamped = x.clamped(lowest, format_.exponent_bias + 2.0)
    whole = clamped.nearest()
    return scale(1.0 + growth(clamped - whole), whole)


def split_exponent(x: Number) -> tuple[Number, Number]:
    """Return n and f of e^x = 2^(n + f), with the digits that the product x log2(e) loses."""
    # Of log2(e) = 0x1.71547652b82fe1777d0f...
    loss = float.fromhex("0x1.777d0ffda0d24p-56")
    upper, lower = x.in_two_parts(1.0 / math.log(2.0), loss)
    product, lost = x.times_exactly(upper)
    whole = product.nearest()
    return whole, (product - whole) + x.fma(lower, lost)


def growth(f: Number) -> Number:
    """Compute 2^f - 1, for f from -1/2 to 1/2."""
    return f * f.polynomial(format_of(f.value).growth)


def scale(x: Number, n: Number) -> Number:
    """Multiply by 2^n in two steps, of which each is a normal number where the product is."""
    magic = format_of(x.value).magic
    shifted = n.fma(0.5, magic)
    rest = n - (shifted - magic)
    return x * _power_of_shifted(shifted) * _power_of_shifted(rest + magic)


def power_of_two(n: Number) -> Number:
    """Return 2^n for an integer n, zero for the least exponent."""
    return _power_of_shifted(n + format_of(n.value).magic)


def _power_of_shifted(n: Number) -> Number:
    bits = n.bits()
    shift = constant_of(bits.type, format_of(n.value).mantissa_bits)
    return n.made(n.builder.bitcast(n.builder.shl(bits, shift), n.type))


@make_function
def exp(x: Number) -> Number:
    """Compute e^x within 1.5 units in the last place, also where the result is subnormal.

    The result is infinity where it is too large for the type, and NaN for NaN.

    Example:
        >>> y[i] = x[i] / (1 + language.exp(-x[i]))
    """
    format_ = format_of(x.value)
    # From there on the result is zero, or infinity.
    lowest = -(format_.exponent_bias + format_.mantissa_bits + 2) * math.log(2.0)
    whole, fraction = split_exponent(x.clamped(lowest, (format_.exponent_bias + 2) * math.log(2.0)))
    return scale(1.0 + growth(fraction), whole)


def _decay(builder: ir.IRBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Compute e^(-2|x|), and the same less one with all its digits: 0 and -1 where x is large."""
    magnitude = call_intrinsic(builder, f"llvm.fabs.{suffix(x.type)}", x.type, [x])
    exponent = builder.fmul(magnitude, constant_of(x.type, -2.0 / math.log(2.0)))
    # From here on 2^n is the number whose exponent bits are all zero, which is zero.
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
    """Compute 1 - tanh(x)^2 = 4 e^(-2|x|) / (1 + e^(-2|x|))^2, whose digits do not cancel.

    Beside tanh(x) it takes four instructions more.
    """

    builder = x.builder
    decay, less_one = _decay(builder, x.value)
    doubled = builder.fmul(_quotient_of_decay(builder, less_one), constant_of(decay.type, 2.0))
    return x.made(builder.fmul(builder.fmul(decay, doubled), doubled))


# Rounding loses this of log(2).
LOG2_LOSS = float.fromhex("0x1.abc9e3b39803fp-56")


def emit_log(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Compute n log(2) + log(1 + f), where x = 2^n (1 + f), and 1 + f is near 1."""
    number = Number(builder, x)
    fraction, power = map(number.made, fraction_and_power(builder, x))
    half, s, series = parts_of_log(fraction)
    # log(2) in two parts, of which the product with n and the first is exact.
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
    """Return the logarithm of a finite positive number, and what those of others are."""
    of_others = x.equals(0.0).choose(x.constant(-math.inf), x.constant(math.nan))
    return x.equals(math.inf).choose(x, (x > 0.0).choose(result, of_others))


def fraction_and_power(builder: ir.IRBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Find f and n of x = 2^n (1 + f), with 1 + f from sqrt(1/2) to sqrt(2), also for
    subnormals.
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

    The result is -infinity for 0, NaN for less and for NaN, and infinity for infinity.

    Example:
        >>> y[i] = language.log(1 + x[i] * x[i])
    """
    return x.made(emit_log(x.builder, x.value))
