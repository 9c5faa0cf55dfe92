"""exp2, exp and tanh on vectors and scalars.

Both rest on 2^x = 2^n * 2^f with n = round(x) (with AVX-512 floor(x), for exp2) and f = x - n, and
on 2^f = 1 + f * growth(f), where growth is a polynomial: so 2^0 is exactly 1, and 2^f - 1 keeps all
its digits. LLVM's own intrinsics call libm lane by lane.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from llvmlite import ir
from numba.extending import intrinsic
from numpy.polynomial import Chebyshev, Polynomial

from foo_ops.kernels.simd import (
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
from foo_ops.kernels.target import target


@dataclasses.dataclass(frozen=True)
class _Format:
    """A binary floating-point format, and the coefficients of growth, the highest power first."""

    integer: ir.Type
    mantissa_bits: int
    exponent_bias: int
    growth: tuple[float, ...]

    @property
    def magic(self) -> float:
        """Adding it to an integer n leaves n + bias in the lower bits of the sum."""
        return 1.5 * 2**self.mantissa_bits + self.exponent_bias


def _growth(f: np.ndarray) -> np.ndarray:
    """(2^f - 1) / f, and its limit where f is zero."""
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
    FLOAT: _Format(INT32, 23, 127, _interpolated(5)),
    DOUBLE: _Format(INT64, 52, 1023, _taylor(12)),
}


# Of a vector of AVX-512, where f is from 0 to 1.
_WIDE, _GROWTH_ABOVE = ir.VectorType(FLOAT, 16), _interpolated(5, least=0.0)


def _format_of(x: ir.Value) -> _Format:
    return _FORMATS[x.type.element if isinstance(x.type, ir.VectorType) else x.type]


def _split(builder: ir.IRBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """f and 2^n of x = n + f."""
    format_ = _format_of(x)
    name = f"llvm.roundeven.{suffix(x.type)}"
    rounded = call_intrinsic(builder, name, x.type, [x])
    integer = shaped(format_.integer, x.type)
    biased = builder.fadd(rounded, constant_of(x.type, format_.magic))
    bits = builder.shl(
        builder.bitcast(biased, integer), constant_of(integer, format_.mantissa_bits)
    )
    return builder.fsub(x, rounded), builder.bitcast(bits, x.type)


def _emit_growth(builder: ir.IRBuilder, f: ir.Value) -> ir.Value:
    first, *others = _format_of(f).growth
    result = constant_of(f.type, first)
    for coefficient in others:
        result = emit_fma(builder, result, f, constant_of(f.type, coefficient))
    return result


def _exp2(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    if x.type == _WIDE and "+avx512dq" in target()[2].split(","):
        return _exp2_of_avx512(builder, x)
    # From here on 2^n is the number whose exponent bits are all zero, which is zero.
    smallest = constant_of(x.type, float(-_format_of(x).exponent_bias))
    is_small = builder.fcmp_ordered(">", smallest, x)
    fraction, power = _split(builder, builder.select(is_small, smallest, x))
    value = emit_fma(builder, fraction, _emit_growth(builder, fraction), constant_of(x.type, 1.0))
    # The multiplication, and not an addition to the exponent bits, is what keeps a NaN a NaN.
    return builder.fmul(value, power)


def _exp2_of_avx512(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """11 instructions and not 14: one takes the part behind the point, one multiplies by 2^n."""
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


@intrinsic
def exp2(typing_context, x):
    """2^x, within 1.5 units in the last place, for x below 128 (float64: 1024).

    Zero below -126.5 (with AVX-512 -126, float64: -1022.5), and so for -infinity; NaN for NaN.
    """

    def generate(context, builder, signature, args):
        return _exp2(builder, args[0])

    return x(x), generate


def _exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """2^(x log2(e)), with the digits that the product of the two loses."""
    log2e = 1.0 / math.log(2.0)
    upper = float(np.float32(log2e)) if _format_of(x).integer == INT32 else log2e
    # Of log2(e) = 0x1.71547652b82fe1777d0f...
    lower = log2e - upper if upper != log2e else float.fromhex("0x1.777d0ffda0d24p-56")
    bias = _format_of(x).exponent_bias
    lowest, highest = (constant_of(x.type, power / log2e) for power in (-bias, bias + 1))
    x = builder.select(builder.fcmp_ordered(">", lowest, x), lowest, x)
    x = builder.select(builder.fcmp_ordered("<", highest, x), highest, x)
    product = builder.fmul(x, constant_of(x.type, upper))
    lost = emit_fma(builder, x, constant_of(x.type, upper), builder.fneg(product))
    lost = emit_fma(builder, x, constant_of(x.type, lower), lost)
    fraction, power = _split(builder, product)
    fraction = builder.fadd(fraction, lost)
    value = emit_fma(builder, fraction, _emit_growth(builder, fraction), constant_of(x.type, 1.0))
    return builder.fmul(value, power)


@intrinsic
def exp(typing_context, x):
    """e^x, within 2 units in the last place.

    Zero below -87.7 (float64: -708.7), infinity above 88.4 (709.4); NaN for NaN.
    """

    def generate(context, builder, signature, args):
        return _exp(builder, args[0])

    return x(x), generate


def _tanh(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """(e^2|x| - 1) / (e^2|x| + 1) with the sign of x, where e^2|x| - 1 keeps all its digits."""

    def constant(value: float) -> ir.Constant:
        return constant_of(x.type, value)

    magnitude = call_intrinsic(builder, f"llvm.fabs.{suffix(x.type)}", x.type, [x])
    # tanh(20) is 1 in both formats.
    is_large = builder.fcmp_ordered(">", magnitude, constant(20.0))
    magnitude = builder.select(is_large, constant(20.0), magnitude)
    doubled = builder.fmul(magnitude, constant(2.0 / math.log(2.0)))
    fraction, power = _split(builder, doubled)
    growth = builder.fmul(fraction, _emit_growth(builder, fraction))
    above_one = emit_fma(builder, power, growth, builder.fsub(power, constant(1.0)))
    result = builder.fdiv(above_one, builder.fadd(above_one, constant(2.0)))
    return call_intrinsic(builder, f"llvm.copysign.{suffix(x.type)}", x.type, [result, x])


@intrinsic
def tanh(typing_context, x):
    """Within 4 units in the last place; NaN for NaN."""

    def generate(context, builder, signature, args):
        return _tanh(builder, args[0])

    return x(x), generate
