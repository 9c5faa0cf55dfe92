"""Emit the operations of a program, on scalars and vectors alike.

See foo_ops/kernels/flex/program.py for their meaning. A value is a torch dtype and an LLVM value.
16-bit floats are float32 here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.typing.templates import signature

from foo_ops.kernels.flex.program import COMPARISONS, FLOATS, FUNCTIONS
from foo_ops.kernels.math import division, exponential, special, trigonometric
from foo_ops.kernels.math.formula import Mask, Number
from foo_ops.kernels.simd.types import (
    DOUBLE,
    FLOAT,
    INT8,
    INT16,
    INT32,
    INT64,
    bits_of,
    call_intrinsic,
    constant_of,
    shaped,
    suffix,
)

TRUTH = ir.IntType(1)

ELEMENT_TYPES = {
    "bool": TRUTH,
    "uint8": INT8,
    "int8": INT8,
    "int16": INT16,
    "int32": INT32,
    "int64": INT64,
    "float16": FLOAT,
    "bfloat16": FLOAT,
    "float32": FLOAT,
    "float64": DOUBLE,
}

_MODULES = (exponential, trigonometric, special, division, exponential)
_RELATIONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_OF_TWO = {
    "pow": exponential.pow,
    "fmod": division.fmod,
    "floor_divide": division.floor_divide,
}
# For floats and for integers.
_SIMPLE = {
    "add": ("fadd", "add"),
    "sub": ("fsub", "sub"),
    "mul": ("fmul", "mul"),
    "and": ("", "and_"),
    "or": ("", "or_"),
    "xor": ("", "xor"),
}


def emit_operation(
    builder: ir.IRBuilder, operation: str, dtype: str, operands: list[tuple[str, ir.Value]]
) -> ir.Value:
    """Emit an operation whose result has the dtype; its operands are (dtype, value)."""
    dtypes, values = zip(*operands)
    if operation == "cast":
        return emit_cast(builder, dtypes[0], values[0], dtype)
    if operation == "where":
        return builder.select(*values)
    if operation in COMPARISONS:
        return _compare(builder, _RELATIONS[operation], dtypes[0], *values)
    if operation in _SIMPLE:
        name = _SIMPLE[operation][0 if is_float(dtype) else 1]
        return getattr(builder, name)(*values)
    if is_float(dtype):
        return _of_floats(builder, operation, values)
    return _Integers(builder, dtype).emit(operation, values)


def is_float(dtype: str) -> bool:
    return dtype in FLOATS


def emit_cast(builder: ir.IRBuilder, source: str, value: ir.Value, target: str) -> ir.Value:
    """Convert a value like torch; numbers that do not fit an integer become the nearest one."""
    type_ = shaped(ELEMENT_TYPES[target], value.type)
    if type_ == value.type and (source == "bool") == (target == "bool"):
        return value
    if target == "bool":
        return _compare(builder, "!=", source, value, constant_of(value.type, 0))
    if is_float(source):
        if is_float(target):
            is_wider = ELEMENT_TYPES[target] == DOUBLE
            return builder.fpext(value, type_) if is_wider else builder.fptrunc(value, type_)
        return _to_integer(builder, value, type_, is_signed=target != "uint8")
    is_signed = source not in ("bool", "uint8")
    if is_float(target):
        return builder.sitofp(value, type_) if is_signed else builder.uitofp(value, type_)
    if bits_of(type_) <= bits_of(value.type):
        return builder.trunc(value, type_) if type_ != value.type else value
    return builder.sext(value, type_) if is_signed else builder.zext(value, type_)


def _to_integer(
    builder: ir.IRBuilder, value: ir.Value, type_: ir.Type, is_signed: bool
) -> ir.Value:
    sign = "s" if is_signed else "u"
    name = f"llvm.fpto{sign}i.sat.{suffix(type_)}.{suffix(value.type)}"
    return call_intrinsic(builder, name, type_, [value])


def _compare(
    builder: ir.IRBuilder, relation: str, dtype: str, a: ir.Value, b: ir.Value
) -> ir.Value:
    if is_float(dtype):
        compare = builder.fcmp_unordered if relation == "!=" else builder.fcmp_ordered
        return compare(relation, a, b)
    if dtype in ("bool", "uint8"):
        return builder.icmp_unsigned(relation, a, b)
    return builder.icmp_signed(relation, a, b)


def _of_floats(builder: ir.IRBuilder, operation: str, values: tuple[ir.Value, ...]) -> ir.Value:
    numbers = [Number(builder, value) for value in values]
    if operation in FUNCTIONS:
        return _function(operation, builder, *values)
    if operation in _OF_TWO:
        return _call(_OF_TWO[operation], builder, *values)
    return _FORMULAS[operation](*numbers).value


def _function(name: str, builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    name = {"exp2": "exp2_of_all"}.get(name, name)
    function = next(getattr(module, name) for module in _MODULES if hasattr(module, name))
    return _call(function, builder, value)


def _call(function: Any, builder: ir.IRBuilder, *values: ir.Value) -> ir.Value:
    number = types.float64 if shaped(DOUBLE, values[0].type) == values[0].type else types.float32
    return function.emit(None, builder, signature(number, *[number] * len(values)), values)


def _propagating(x: Number, y: Number, is_first: Mask) -> Number:
    is_nan = ~x.equals(x)
    return (is_first | is_nan).choose(x, y)


def _differ_in_sign(remainder: Number, divisor: Number) -> Mask:
    zero = remainder.constant(0.0)
    below, divisor_below = remainder < zero, divisor < zero
    differ = (below & ~divisor_below) | (~below & divisor_below)
    return differ & ~remainder.equals(0.0)


def _remainder(x: Number, y: Number) -> Number:
    """Compute torch.remainder; unlike in Python, a zero keeps the sign of x."""
    rest = x.made(_call(division.fmod, x.builder, x.value, y.value))
    return _differ_in_sign(rest, y).choose(rest + y, rest)


def _sign(x: Number) -> Number:
    below = (x < 0.0).choose(x.constant(-1.0), x.constant(0.0))
    return (x > 0.0).choose(x.constant(1.0), below)


_FORMULAS: dict[str, Callable[..., Number]] = {
    "div": lambda x, y: x / y,
    "neg": lambda x: -x,
    "abs": abs,
    "sign": _sign,
    "minimum": lambda x, y: _propagating(x, y, x < y),
    "maximum": lambda x, y: _propagating(x, y, x > y),
    "remainder": _remainder,
    "trunc_divide": lambda x, y: (x / y).truncated(),
}


class _Integers:
    """Operations on integers of a dtype, and on bools."""

    def __init__(self, builder: ir.IRBuilder, dtype: str) -> None:
        self.builder, self.is_signed = builder, dtype not in ("bool", "uint8")

    def emit(self, operation: str, values: tuple[ir.Value, ...]) -> ir.Value:
        return getattr(self, f"_{operation}")(*values)

    def _less(self, a: ir.Value, b: ir.Value) -> ir.Value:
        compare = self.builder.icmp_signed if self.is_signed else self.builder.icmp_unsigned
        return compare("<", a, b)

    def _neg(self, a: ir.Value) -> ir.Value:
        return self.builder.neg(a)

    def _not(self, a: ir.Value) -> ir.Value:
        return self.builder.not_(a)

    def _abs(self, a: ir.Value) -> ir.Value:
        if not self.is_signed:
            return a
        is_below = self._less(a, constant_of(a.type, 0))
        return self.builder.select(is_below, self.builder.neg(a), a)

    def _sign(self, a: ir.Value) -> ir.Value:
        zero, one = constant_of(a.type, 0), constant_of(a.type, 1)
        below = self.builder.select(self._less(a, zero), self.builder.neg(one), zero)
        return self.builder.select(self._less(zero, a), one, below)

    def _minimum(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.select(self._less(a, b), a, b)

    def _maximum(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.select(self._less(a, b), b, a)

    def _shift_left(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self._shifted(self.builder.shl(a, self._in_range(b)), b, constant_of(a.type, 0))

    def _shift_right(self, a: ir.Value, b: ir.Value) -> ir.Value:
        last = constant_of(a.type, bits_of(a.type) - 1)
        if not self.is_signed:
            shifted = self.builder.lshr(a, self._in_range(b))
            return self._shifted(shifted, b, constant_of(a.type, 0))
        return self._shifted(self.builder.ashr(a, self._in_range(b)), b, self.builder.ashr(a, last))

    def _in_range(self, count: ir.Value) -> ir.Value:
        return self.builder.and_(count, constant_of(count.type, bits_of(count.type) - 1))

    def _shifted(self, value: ir.Value, count: ir.Value, beyond: ir.Value) -> ir.Value:
        """Return ``beyond`` for counts of all bits and more, which processors take modulo."""
        bits = constant_of(count.type, bits_of(count.type))
        return self.builder.select(self.builder.icmp_unsigned("<", count, bits), value, beyond)

    def _trunc_divide(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self._divided(a, b, rounds_down=False)

    def _floor_divide(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self._divided(a, b, rounds_down=True)

    def _fmod(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self._rest(a, b, self._trunc_divide(a, b))

    def _remainder(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self._rest(a, b, self._floor_divide(a, b))

    def _rest(self, a: ir.Value, b: ir.Value, quotient: ir.Value) -> ir.Value:
        rest = self.builder.sub(a, self.builder.mul(quotient, b))
        is_zero = self.builder.icmp_unsigned("==", b, constant_of(b.type, 0))
        return self.builder.select(is_zero, constant_of(b.type, 0), rest)

    def _divided(self, a: ir.Value, b: ir.Value, rounds_down: bool) -> ir.Value:
        """Divide by way of float64, exact up to 32 bits: processors divide no integer vectors."""
        builder, zero = self.builder, constant_of(b.type, 0)
        is_zero = builder.icmp_unsigned("==", b, zero)
        if bits_of(a.type) > 32:
            return builder.select(is_zero, zero, self._divided_exactly(a, b, rounds_down))
        wide = shaped(DOUBLE, a.type)
        convert = builder.sitofp if self.is_signed else builder.uitofp
        quotient = Number(builder, builder.fdiv(convert(a, wide), convert(b, wide)))
        rounded = quotient.floor() if rounds_down else quotient.truncated()
        result = _to_integer(builder, rounded.value, a.type, self.is_signed)
        return builder.select(is_zero, zero, result)

    def _divided_exactly(self, a: ir.Value, b: ir.Value, rounds_down: bool) -> ir.Value:
        """Divide 64 bits; the processor traps on x / 0, and on the lowest number / -1."""
        builder, zero = self.builder, constant_of(b.type, 0)
        one, minus_one = constant_of(b.type, 1), constant_of(b.type, -1)
        is_minus_one = builder.icmp_signed("==", b, minus_one)
        is_refused = builder.or_(builder.icmp_signed("==", b, zero), is_minus_one)
        quotient = builder.sdiv(a, builder.select(is_refused, one, b))
        quotient = builder.select(is_minus_one, builder.neg(a), quotient)
        if not rounds_down:
            return quotient
        rest = builder.sub(a, builder.mul(quotient, b))
        differ = builder.icmp_signed("<", builder.xor(rest, b), zero)
        is_inexact = builder.icmp_signed("!=", rest, zero)
        lower = builder.and_(differ, is_inexact)
        return builder.select(lower, builder.sub(quotient, one), quotient)
