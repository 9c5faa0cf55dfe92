"""Write formulas of vectors and scalars with Python's operators, and emit them as they are written.

A formula has no branches, so that LLVM can vectorise the loop around it: where numbers need another
treatment, both results are computed and one is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import errors, types
from numba.extending import intrinsic

from foo_ops.kernels.compiler.numba_target.constants import let_fold
from foo_ops.kernels.compiler.plain_math import MATH, round_whole
from foo_ops.kernels.vectors.instructions import (
    DOUBLE,
    FLOAT,
    INT32,
    INT64,
    call_intrinsic,
    constant_of,
    emit_fma,
    emit_splat,
    shaped,
    suffix,
)
from foo_ops.kernels.vectors.values import Vector


class Mask:
    """Truth, in each lane."""

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self.builder, self.value = builder, value

    def __and__(self, other: Mask) -> Mask:
        return Mask(self.builder, self.builder.and_(self.value, other.value))

    def __or__(self, other: Mask) -> Mask:
        return Mask(self.builder, self.builder.or_(self.value, other.value))

    def __xor__(self, other: Mask) -> Mask:
        return Mask(self.builder, self.builder.xor(self.value, other.value))

    def __invert__(self) -> Mask:
        return Mask(self.builder, self.builder.not_(self.value))

    def choose(self, a: Number, b: Number | float) -> Number:
        """Return a where the mask is true, and b elsewhere."""
        return a.made(self.builder.select(self.value, a.value, a.operand(b)))


class Number:
    """A floating-point number, or as many as a vector has lanes."""

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self.builder, self.value, self.type = builder, value, value.type

    @property
    def is_double(self) -> bool:
        return shaped(DOUBLE, self.type) == self.type

    def made(self, value: ir.Value) -> Number:
        return Number(self.builder, value)

    def operand(self, other: Number | float) -> ir.Value:
        return other.value if isinstance(other, Number) else constant_of(self.type, float(other))

    def constant(self, value: float) -> Number:
        return self.made(self.operand(value))

    def __add__(self, other: Number | float) -> Number:
        return self.made(self.builder.fadd(self.value, self.operand(other)))

    def __radd__(self, other: float) -> Number:
        return self + other

    def __sub__(self, other: Number | float) -> Number:
        return self.made(self.builder.fsub(self.value, self.operand(other)))

    def __rsub__(self, other: float) -> Number:
        return self.constant(other) - self

    def __mul__(self, other: Number | float) -> Number:
        return self.made(self.builder.fmul(self.value, self.operand(other)))

    def __rmul__(self, other: float) -> Number:
        return self * other

    def __truediv__(self, other: Number | float) -> Number:
        return self.made(self.builder.fdiv(self.value, self.operand(other)))

    def __rtruediv__(self, other: float) -> Number:
        return self.constant(other) / self

    def __neg__(self) -> Number:
        return self.made(self.builder.fneg(self.value))

    def _compared(self, relation: str, other: Number | float) -> Mask:
        compare = self.builder.fcmp_ordered
        return Mask(self.builder, compare(relation, self.value, self.operand(other)))

    def __lt__(self, other: Number | float) -> Mask:
        return self._compared("<", other)

    def __gt__(self, other: Number | float) -> Mask:
        return self._compared(">", other)

    def equals(self, other: Number | float) -> Mask:
        return self._compared("==", other)

    def in_two_parts(self, value: float, loss: float) -> tuple[float, float]:
        """Split a constant, of which float64 loses a part, into one of this type and the rest."""
        if self.is_double:
            return value, loss
        upper = float(np.float32(value))
        return upper, value - upper

    def has_minus(self) -> Mask:
        """Whether there is a minus, also where it is zero."""
        bits = self.bits()
        zero = constant_of(bits.type, 0)
        return Mask(self.builder, self.builder.icmp_signed("<", bits, zero))

    def is_constant(self) -> Mask:
        """Whether LLVM knows the number when it has inlined functions, and before it vectorises."""
        truth = shaped(ir.IntType(1), self.type)
        name = f"llvm.is.constant.{suffix(self.type)}"
        known = call_intrinsic(self.builder, name, ir.IntType(1), [self.value])
        if truth != known.type:
            known = emit_splat(self.builder, known, truth.count)
        return Mask(self.builder, known)

    def differs_in_sign(self, other: Number) -> Mask:
        return self.has_minus() ^ other.has_minus()

    def _of_llvm(self, name: str, *others: Number | float) -> Number:
        operands = [self.value, *map(self.operand, others)]
        name = f"llvm.{name}.{suffix(self.type)}"
        return self.made(call_intrinsic(self.builder, name, self.type, operands))

    def __abs__(self) -> Number:
        return self._of_llvm("fabs")

    def with_sign_of(self, other: Number) -> Number:
        return self._of_llvm("copysign", other)

    def nearest(self) -> Number:
        """Round to an integer, halves to the even one."""
        return self._of_llvm("roundeven")

    def floor(self) -> Number:
        return self._of_llvm("floor")

    def ceil(self) -> Number:
        return self._of_llvm("ceil")

    def truncated(self) -> Number:
        return self._of_llvm("trunc")

    def square_root(self) -> Number:
        return self._of_llvm("sqrt")

    def fma(self, factor: Number | float, summand: Number | float) -> Number:
        """Return self * factor + summand, rounded once."""
        operands = self.value, self.operand(factor), self.operand(summand)
        return self.made(emit_fma(self.builder, *operands))

    def clamped(self, least: float, most: float) -> Number:
        """Keep it between two constants; a NaN stays one."""
        lifted = (self < least).choose(self.constant(least), self)
        return (lifted > most).choose(self.constant(most), lifted)

    def polynomial(self, coefficients: Iterable[float]) -> Number:
        """Evaluate a polynomial in self, whose coefficients begin with the highest power's."""
        first, *others = coefficients
        result = self.constant(first)
        for coefficient in others:
            result = result.fma(self, coefficient)
        return result

    def widened(self) -> Number:
        """Return a float32 as a float64."""
        return self.made(self.builder.fpext(self.value, shaped(DOUBLE, self.type)))

    def narrowed(self) -> Number:
        """Round a float64 to a float32."""
        return self.made(self.builder.fptrunc(self.value, shaped(FLOAT, self.type)))

    def bits(self) -> ir.Value:
        return self.builder.bitcast(
            self.value, shaped(INT64 if self.is_double else INT32, self.type)
        )

    def plus_exactly(self, other: Number) -> tuple[Number, Number]:
        """Return the rounded sum and what rounding has lost (Knuth 1969, 4.2.2, theorem C)."""
        total = self + other
        part = total - self
        return total, (self - (total - part)) + (other - part)

    def plus_smaller_exactly(self, other: Number) -> tuple[Number, Number]:
        """Add a smaller number exactly, or any to zero (Dekker 1971)."""
        total = self + other
        return total, other - (total - self)

    def times_exactly(self, other: Number | float) -> tuple[Number, Number]:
        """Return the rounded product and what rounding has lost."""
        product = self * other
        return product, self.fma(other, -product)


def make_function(formula: Callable[..., Number]) -> Any:
    """Make a function of kernels of a formula, for floating-point scalars and vectors.

    Its arguments have one type, which is that of the result.
    """
    emit, count = _emitter_of(formula), formula.__code__.co_argcount

    def check(arguments: tuple[types.Type, ...]) -> None:
        for argument in arguments:
            number = argument.element if isinstance(argument, Vector) else argument
            if not isinstance(number, types.Float) or argument != arguments[0]:
                raise errors.TypingError(
                    f"{formula.__name__} takes floating-point numbers of one type, "
                    f"got {', '.join(map(str, arguments))}"
                )

    def of_one(typing_context, x):
        check((x,))
        return x(x), emit

    def of_two(typing_context, x, y):
        check((x, y))
        return x(x, y), emit

    function = of_one if count == 1 else of_two
    function.__name__, function.__doc__ = formula.__name__, formula.__doc__
    # By which kernels on disk tell functions apart.
    function.__module__, function.__qualname__ = formula.__module__, formula.__qualname__
    made = intrinsic(function)
    made.emit = emit
    plain = MATH.get(formula.__name__, round_whole if formula.__name__ == "round" else None)
    if plain is not None:
        let_fold(made, plain)
    return made


def _emitter_of(formula: Callable[..., Number]) -> Callable[..., ir.Value]:
    """Make what Numba calls to lower a call of a formula's function."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return formula(*(Number(builder, value) for value in args)).value

    return emit
