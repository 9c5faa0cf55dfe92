"""Formulas of vectors and scalars, written with Python's operators on `Number`s, and emitted."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, errors, types
from numba.extending import intrinsic
from numpy.polynomial import Chebyshev, Polynomial

from foo_ops.kernels.compiler.numba_target.constants import let_fold
from foo_ops.kernels.compiler.processor import has_table_of_registers, vector_bits
from foo_ops.kernels.compiler.python_math import MATH, round_whole
from foo_ops.kernels.simd.types import (
    DOUBLE,
    FLOAT,
    INT32,
    INT64,
    Vector,
    bits_of,
    call_intrinsic,
    constant_of,
    emit_fma,
    emit_splat,
    shaped,
    suffix,
)

# ------------------------------------------------------------------------------------------ numbers

# Formulas of vectors and scalars use Python's operators, which emit instructions as they run.
#
# A formula has no branches, so that LLVM can vectorise the loop around it: where some numbers need
# another formula, both results are computed and one is chosen.


class Mask:
    """A truth value in each lane."""

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
    """A floating-point number, or a vector of them."""

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
        """Split ``value + loss``, of which float64 holds ``value``, into this type and the rest."""
        if self.is_double:
            return value, loss
        upper = float(np.float32(value))
        return upper, value - upper

    def has_minus(self) -> Mask:
        """Whether the sign bit is set, also for a zero."""
        bits = self.bits()
        zero = constant_of(bits.type, 0)
        return Mask(self.builder, self.builder.icmp_signed("<", bits, zero))

    def is_constant(self) -> Mask:
        """Whether LLVM knows the number, after inlining and before vectorisation."""
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
        """Round to the nearest integer, halves to even."""
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
        """Clamp to two constants; a NaN stays NaN."""
        lifted = (self < least).choose(self.constant(least), self)
        return (lifted > most).choose(self.constant(most), lifted)

    def polynomial(self, coefficients: Iterable[float]) -> Number:
        """Evaluate a polynomial in self; the coefficient of the highest power comes first."""
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
        """Return the rounded sum and its rounding error (Knuth 1969, 4.2.2, theorem C)."""
        total = self + other
        part = total - self
        return total, (self - (total - part)) + (other - part)

    def plus_smaller_exactly(self, other: Number) -> tuple[Number, Number]:
        """Add a smaller number exactly, or any to zero (Dekker 1971)."""
        total = self + other
        return total, other - (total - self)

    def times_exactly(self, other: Number | float) -> tuple[Number, Number]:
        """Return the rounded product and its rounding error."""
        product = self * other
        return product, self.fma(other, -product)


def make_function(formula: Callable[..., Number]) -> Any:
    """Turn a formula into a function for kernels, of floating-point scalars and vectors.

    The arguments and the result have the same type.
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
    # The cache on disk identifies functions by these.
    function.__module__, function.__qualname__ = formula.__module__, formula.__qualname__
    made = intrinsic(function)
    made.emit = emit
    evaluate = MATH.get(formula.__name__, round_whole if formula.__name__ == "round" else None)
    if evaluate is not None:
        let_fold(made, evaluate)
    return made


def _emitter_of(formula: Callable[..., Number]) -> Callable[..., ir.Value]:
    """Make the function with which Numba lowers a call of a formula's function."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return formula(*(Number(builder, value) for value in args)).value

    return emit


# ------------------------------------------------------------------------ functions that stay whole

# Functions that are not inlined until LLVM has vectorised the loops that call them.
#
# LLVM knows a vector version of such a function. So the function may have a branch, or instructions
# that LLVM would not make of scalars. Afterwards the vector version is inlined, and loop-invariant
# code leaves the loop: erf reads six tables; reading them inside the loop, gelu of float32 takes
# 1.4 times as long.


@dataclass(frozen=True)
class WholeFunction(ABC):
    """A function whose arguments and result have the same type.

    Attributes:
        name: the function's name, unique among all.
    """

    name: str

    @abstractmethod
    def formula(self, *numbers: Number) -> Number:
        """Emit the function's body, for scalars and vectors alike; it may add blocks."""

    def of(self, *numbers: Number) -> Number:
        """Emit a call."""
        first = numbers[0]
        function = self.function(first.builder.module, first.type, len(numbers))
        is_vector = isinstance(first.type, ir.VectorType)
        if not is_vector:
            self._let_vectorise(function, first.type, len(numbers))
        attributes = () if is_vector else ("noinline",)
        values = [number.value for number in numbers]
        return first.made(first.builder.call(function, values, attrs=attributes))

    def function(self, module: ir.Module, type_: ir.Type, count: int) -> ir.Function:
        """Return the LLVM function of ``count`` scalars or vectors of a type."""
        is_vector = isinstance(type_, ir.VectorType)
        name = f"foo_ops_{self.name}_{suffix(type_)}"
        known = module.globals.get(name)
        if known is not None:
            return known
        function = ir.Function(module, ir.FunctionType(type_, [type_] * count), name)
        # Weak: all modules that call the function define it, and LLVM keeps it until it has
        # vectorised their loops. Only scalar calls must not be inlined before that.
        function.linkage = "weak_odr"
        function.attributes.add("alwaysinline" if is_vector else "noinline")
        for attribute in ("nounwind", "willreturn", "memory(none)"):
            set.add(function.attributes, attribute)
        builder = ir.IRBuilder(function.append_basic_block("start"))
        result = self.formula(*(Number(builder, argument) for argument in function.args))
        builder.ret(result.value)
        return function

    def _let_vectorise(self, function: ir.Function, type_: ir.Type, count: int) -> None:
        """Declare vector versions to LLVM: for whole vectors, and for halves beside wider types."""
        lanes = vector_bits() // bits_of(type_)
        vectors = [
            self.function(function.module, ir.VectorType(type_, lanes), count)
            for lanes in (lanes, lanes // 2)
        ]
        # Names of the "vector function ABI".
        variants = ",".join(
            f"_ZGV_LLVM_N{it.args[0].type.count}{'v' * count}_{function.name}({it.name})"
            for it in vectors
        )
        set.add(function.attributes, f'"vector-function-abi-variant"="{variants}"')


# ------------------------------------------------------------------------------------ rare branches

# Functions with a branch that is rarely taken, for loops that LLVM vectorises.
#
# A loop with a branch would not be vectorised, or would compute both sides. The vector version of
# such a function has one branch for all lanes.


@dataclass(frozen=True)
class RareBranch(WholeFunction):
    """A function with a fast formula for usual numbers, and a slow one for all.

    Attributes:
        usual: returns the result, and a mask of the lanes where it is right.
        rare: returns the result for any numbers.
    """

    usual: Callable[..., tuple[Number, Mask]]
    rare: Callable[..., Number]

    def formula(self, *numbers: Number) -> Number:
        # Inlining after vectorisation is no faster: the calls of the rare branch leave no registers
        # for the loop's constants.
        x, builder = numbers[0], numbers[0].builder
        usual, is_right = self.usual(*numbers)
        start, rare, end = (
            builder.block,
            *(builder.append_basic_block(it) for it in ("rare", "end")),
        )
        builder.cbranch(_in_all_lanes(builder, is_right.value), end, rare)
        builder.position_at_end(rare)
        is_vector = isinstance(x.type, ir.VectorType)
        result = self.rare_of_lanes(*numbers) if is_vector else self.rare(*numbers).value
        stop = builder.block
        builder.branch(end)
        builder.position_at_end(end)
        value = builder.phi(x.type)
        value.add_incoming(usual.value, start)
        value.add_incoming(result, stop)
        return x.made(value)

    def rare_of_lanes(self, *numbers: Number) -> ir.Value:
        """Call the scalar function for each lane, so that no result depends on other lanes."""
        builder, vector = numbers[0].builder, numbers[0].type
        function = self.function(builder.module, vector.element, len(numbers))
        result = numbers[0].value
        for lane in map(INT32, range(vector.count)):
            values = [builder.extract_element(number.value, lane) for number in numbers]
            result = builder.insert_element(result, builder.call(function, values), lane)
        return result


def _in_all_lanes(builder: ir.IRBuilder, mask: ir.Value) -> ir.Value:
    if not isinstance(mask.type, ir.VectorType):
        return mask
    bits = ir.IntType(mask.type.count)
    return builder.icmp_unsigned("==", builder.bitcast(mask, bits), ir.Constant(bits, -1))


# ---------------------------------------------------------------------------- polynomials on pieces

# Functions of float32 as polynomials on 16 pieces, whose coefficients are looked up.
#
# With AVX-512 one instruction looks up the coefficients of all lanes, in a table in a register. So
# a polynomial of low degree is enough, without the exponentials and quotients that functions over a
# wide domain otherwise need.


PIECES = 16
# Adding it to a number leaves the nearest integer in the lower bits of the sum.
_MAGIC = 1.5 * 2**23


def has_quick_tables() -> bool:
    """Whether a table fits a vector of float32, and one instruction looks it up."""
    return has_table_of_registers() and vector_bits() == 32 * PIECES


def fit(function: Callable[[float], float], centre: float, width: float, degree: int) -> np.ndarray:
    """Return the coefficients of a polynomial in x - centre, the highest power first."""
    offsets = [-width / 2, width / 2]
    moved = np.vectorize(lambda offset: function(centre + offset))
    interpolant = Chebyshev.interpolate(moved, degree, domain=offsets)
    coefficients = np.zeros(degree + 1)
    found = interpolant.convert(kind=Polynomial).coef[::-1]
    coefficients[degree + 1 - len(found) :] = found
    return coefficients


def piecewise(x: Number, width: float, tables: Sequence[Sequence[float]]) -> Number:
    """Evaluate the polynomial of a number's piece.

    Args:
        x: the number, from 0 to 15.49 widths; NaN gives NaN.
        width: a piece's width; the centres of the pieces are its multiples.
        tables: for each power, the highest first, the coefficients of the pieces.
    """
    shifted = x.fma(1 / width, _MAGIC)
    offset = (shifted - _MAGIC).fma(-width, x)
    piece = shifted.bits()
    result = _look_up(x, piece, tables[0])
    for table in tables[1:]:
        result = result.fma(offset, _look_up(x, piece, table))
    return result


def _look_up(x: Number, place: ir.Value, table: Sequence[float]) -> Number:
    """Return the elements of a table at places modulo 16, in the shape of ``x``."""
    builder = x.builder
    if not isinstance(x.type, ir.VectorType):
        return x.made(_load(builder, builder.and_(place, INT32(PIECES - 1)), table))
    if x.type.count == PIECES:
        values = ir.Constant(x.type, list(table))
        name = "llvm.x86.avx512.permvar.sf.512"
        return x.made(call_intrinsic(builder, name, x.type, [values, place]))
    result = x.value
    for lane in range(x.type.count):
        lane = INT32(lane)
        number = Number(builder, builder.extract_element(x.value, lane))
        value = _look_up(number, builder.extract_element(place, lane), table)
        result = builder.insert_element(result, value.value, lane)
    return x.made(result)


def _load(builder: ir.IRBuilder, place: ir.Value, table: Sequence[float]) -> ir.Value:
    """Load an element of a table that is part of the object code."""
    constant = ir.Constant(ir.ArrayType(FLOAT, len(table)), list(table))
    name = f"foo_ops.pieces.{zlib.crc32(str(table).encode()):x}"
    known = builder.module.globals.get(name)
    if known is None:
        known = cgutils.global_constant(builder.module, name, constant)
    return builder.load(builder.gep(known, [INT32(0), place], inbounds=True))
