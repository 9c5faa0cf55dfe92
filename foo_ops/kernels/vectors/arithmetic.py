"""Calculate with vectors, lane by lane."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin

from foo_ops.kernels.vectors.instructions import INT64, call_intrinsic, emit_fma, emit_splat, suffix
from foo_ops.kernels.vectors.values import Vector


@intrinsic(prefer_literal=True)
def splat(typing_context, value, lanes):
    """Return a vector with a scalar in each of its lanes, whose number is a constant.

    Example:
        >>> totals = language.splat(language.zero(x), language.lanes(x))
    """

    scalar = types.unliteral(value)

    def generate(context, builder, signature, args):
        return emit_splat(builder, args[0], lanes.literal_value)

    return Vector(scalar, lanes.literal_value)(scalar, lanes), generate


def _define_arithmetic(function: Callable[..., Any], instruction: str) -> None:
    """Make an operator of Python work on two vectors of one type."""

    @infer_global(function)
    class Template(AbstractTemplate):
        def generic(self, args, kws):
            if len(args) == 2 and isinstance(args[0], Vector) and args[0] == args[1]:
                return signature(args[0], *args)
            return None

    @lower_builtin(function, Vector, Vector)
    def generate(context, builder, signature, args):
        return getattr(builder, instruction)(*args)


for _function, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _define_arithmetic(_function, _instruction)


@intrinsic
def fma(typing_context, a, b, c):
    """Return a * b + c, rounded once, of vectors lane by lane.

    Example:
        >>> vector = language.load_vector(x, 0, language.lanes(x))
        >>> squares = language.fma(vector, vector, vector)
    """

    def generate(context, builder, signature, args):
        return emit_fma(builder, *args)

    return a(a, a, a), generate


@intrinsic
def absolute(typing_context, a):
    """Return |a|, of a vector lane by lane.

    Example:
        >>> vector = language.absolute(language.load_vector(x, 0, language.lanes(x)))
    """

    def generate(context, builder, signature, args):
        return call_intrinsic(builder, f"llvm.fabs.{suffix(args[0].type)}", args[0].type, [args[0]])

    return a(a), generate


@intrinsic
def maximum(typing_context, a, b):
    """Return the larger of two, of vectors lane by lane; where one is NaN, the second.

    Example:
        >>> vector = language.load_vector(x, 0, language.lanes(x))
        >>> positive = language.maximum(vector, language.splat(language.zero(x), language.lanes(x)))
    """

    def generate(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return a(a, a), generate


@intrinsic
def less(typing_context, a, b):
    """Return a mask that is true in the lanes where a < b.

    Example:
        >>> a, b = (language.load_vector(row, 0, language.lanes(x)) for row in (x, y))
        >>> mask = language.less(a, b)
    """

    mask = Vector(types.boolean, a.lanes)

    def generate(context, builder, signature, args):
        return builder.fcmp_ordered("<", *args)

    return mask(a, a), generate


@intrinsic
def select(typing_context, mask, a, b):
    """Return a in the lanes where a mask is true, and b in the others.

    Example:
        >>> a, b = (language.load_vector(row, 0, language.lanes(x)) for row in (x, y))
        >>> smaller = language.select(language.less(a, b), a, b)
    """

    def generate(context, builder, signature, args):
        return builder.select(*args)

    return a(mask, a, a), generate


@intrinsic
def any_lane(typing_context, mask):
    """Whether a mask is true in a lane.

    Example:
        >>> a, b = (language.load_vector(row, 0, language.lanes(x)) for row in (x, y))
        >>> if language.any_lane(language.less(a, b)):
        ...     language.store(y, 0, a)
    """

    def generate(context, builder, signature, args):
        bits = builder.bitcast(args[0], ir.IntType(mask.lanes))
        return builder.icmp_unsigned("!=", bits, bits.type(0))

    return types.boolean(mask), generate


@intrinsic
def next_lane(typing_context, mask, start):
    """Return the first lane, from one on, in which a mask is true, or the number of lanes.

    ``start`` is at most the number of lanes.

    Example:
        >>> found = language.less(zero, language.load_vector(x, 0, lanes))
        >>> lane = language.next_lane(found, 0)
        >>> while lane < lanes:
        ...     handle(lane)
        ...     lane = language.next_lane(found, lane + 1)
    """
    # There is room for a bit behind the lanes, which is always set.
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
