"""Arithmetic of vectors, lane by lane."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin

from foo_ops.kernels.simd.types import INT64, Vector, call_intrinsic, emit_fma, emit_splat, suffix


@intrinsic(prefer_literal=True)
def splat(typing_context, value, lanes):
    """Return a vector with a scalar in each lane; the number of lanes is a constant.

    Example:
        >>> totals = language.splat(language.zero(x), language.lanes(x))
    """

    scalar = types.unliteral(value)

    def generate(context, builder, signature, args):
        return emit_splat(builder, args[0], lanes.literal_value)

    return Vector(scalar, lanes.literal_value)(scalar, lanes), generate


def _holds_integers(vector: Vector) -> bool:
    return isinstance(vector.element, types.Integer)


def _define_arithmetic(function: Callable[..., Any], of_floats: str, of_integers: str = "") -> None:
    """Define a Python operator for two vectors of the same type."""

    @infer_global(function)
    class Template(AbstractTemplate):
        def generic(self, args, kws):
            if len(args) != 2 or not isinstance(args[0], Vector) or args[0] != args[1]:
                return None
            return signature(args[0], *args) if _instruction_for(args[0]) else None

    def _instruction_for(vector: Vector) -> str:
        return of_integers if _holds_integers(vector) else of_floats

    @lower_builtin(function, Vector, Vector)
    def generate(context, builder, signature, args):
        return getattr(builder, _instruction_for(signature.args[0]))(*args)


for _arithmetic in (
    (operator.add, "fadd", "add"),
    (operator.sub, "fsub", "sub"),
    (operator.mul, "fmul", "mul"),
    (operator.truediv, "fdiv"),
):
    _define_arithmetic(*_arithmetic)


def _compare(builder: ir.IRBuilder, comparison: str, vector: Vector, *args: ir.Value) -> ir.Value:
    """Compare vectors lane by lane; comparisons with NaN are false."""
    if not _holds_integers(vector):
        return builder.fcmp_ordered(comparison, *args)
    name = "icmp_signed" if vector.element.signed else "icmp_unsigned"
    return getattr(builder, name)(comparison, *args)


@intrinsic
def fma(typing_context, a, b, c):
    """Return a * b + c, rounded once; vectors lane by lane.

    Example:
        >>> vector = language.load_vector(x, 0, language.lanes(x))
        >>> squares = language.fma(vector, vector, vector)
    """

    def generate(context, builder, signature, args):
        if _holds_integers(a):
            return builder.add(builder.mul(*args[:2]), args[2])
        return emit_fma(builder, *args)

    return a(a, a, a), generate


@intrinsic
def absolute(typing_context, a):
    """Return |a|; vectors lane by lane.

    Example:
        >>> vector = language.absolute(language.load_vector(x, 0, language.lanes(x)))
    """

    def generate(context, builder, signature, args):
        if _holds_integers(a):
            negative = _compare(builder, "<", a, args[0], args[0].type(None))
            return builder.select(negative, builder.neg(args[0]), args[0])
        return call_intrinsic(builder, f"llvm.fabs.{suffix(args[0].type)}", args[0].type, [args[0]])

    return a(a), generate


@intrinsic
def maximum(typing_context, a, b):
    """Return the larger of two, vectors lane by lane; the second if one is NaN.

    Example:
        >>> vector = language.load_vector(x, 0, language.lanes(x))
        >>> positive = language.maximum(vector, language.splat(language.zero(x), language.lanes(x)))
    """

    def generate(context, builder, signature, args):
        return builder.select(_compare(builder, ">", a, *args), *args)

    return a(a, a), generate


@intrinsic
def less(typing_context, a, b):
    """Return a mask that is true in the lanes where a < b.

    Example:
        >>> a = language.load_vector(x, 0, language.lanes(x))
        >>> b = language.load_vector(y, 0, language.lanes(x))
        >>> mask = language.less(a, b)
    """

    mask = Vector(types.boolean, a.lanes)

    def generate(context, builder, signature, args):
        return _compare(builder, "<", a, *args)

    return mask(a, a), generate


@intrinsic
def select(typing_context, mask, a, b):
    """Return a in the lanes where a mask is true, and b in the others.

    Example:
        >>> a = language.load_vector(x, 0, language.lanes(x))
        >>> b = language.load_vector(y, 0, language.lanes(x))
        >>> smaller = language.select(language.less(a, b), a, b)
    """

    def generate(context, builder, signature, args):
        return builder.select(*args)

    return a(mask, a, a), generate


@intrinsic
def any_lane(typing_context, mask):
    """Whether a mask is true in any lane.

    Example:
        >>> a = language.load_vector(x, 0, language.lanes(x))
        >>> b = language.load_vector(y, 0, language.lanes(x))
        >>> if language.any_lane(language.less(a, b)):
        ...     language.store(y, 0, a)
    """

    def generate(context, builder, signature, args):
        bits = builder.bitcast(args[0], ir.IntType(mask.lanes))
        return builder.icmp_unsigned("!=", bits, bits.type(0))

    return types.boolean(mask), generate


@intrinsic
def next_lane(typing_context, mask, start):
    """Return the first lane from ``start`` on in which a mask is true, or the number of lanes.

    ``start`` is at most the number of lanes.

    Example:
        >>> a = language.load_vector(x, 0, language.lanes(x))
        >>> b = language.load_vector(y, 0, language.lanes(x))
        >>> found = language.less(a, b)
        >>> lane = language.next_lane(found, 0)
        >>> while lane < language.lanes(x):
        ...     y[lane] = x[lane]
        ...     lane = language.next_lane(found, lane + 1)
    """
    # One more bit after the lanes is always set, so that the search ends there.
    width = 32 if mask.lanes < 32 else 64 if mask.lanes < 64 else 2 * mask.lanes

    def generate(context, builder, signature, args):
        bits_type = ir.IntType(width)
        bits = builder.zext(builder.bitcast(args[0], ir.IntType(mask.lanes)), bits_type)
        bits = builder.or_(bits, bits_type(1 << mask.lanes))
        first = builder.trunc(args[1], bits_type) if width < 64 else args[1]
        first = builder.zext(first, bits_type) if width > 64 else first
        ahead = builder.cttz(builder.lshr(bits, first), ir.IntType(1)(1))
        ahead = builder.zext(ahead, INT64) if width < 64 else ahead
        ahead = builder.trunc(ahead, INT64) if width > 64 else ahead
        return builder.add(args[1], ahead)

    return types.intp(mask, types.intp), generate
