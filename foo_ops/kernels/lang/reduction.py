"""Sum rows and find their maxima, and other functions for row-wise kernels.

There are two ways, of the same speed. In a loop over elements, `accumulate` allows LLVM to keep a
sum in each lane of a vector:

    total = zero(x)
    for i in range(size):
        total = accumulate(total, x[i] * x[i])

With explicit vectors (foo_ops/kernels/simd/arithmetic.py) `reduce_add` sums a vector's lanes:

    step = lanes(x)
    totals = splat(zero(x), step) ... reduce_add(totals)

No other floating-point rule is relaxed. A sum depends on the processor's vector length, but not on
the number of threads or on the row's address.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from foo_ops.kernels.compiler.processor import vector_bits
from foo_ops.kernels.lang.views import View
from foo_ops.kernels.simd.types import ELEMENTS, INT32, Pointer, Row, Vector, call_intrinsic, suffix


def _compute_type(of: types.Type) -> types.Type:
    """Return a value's own type, or the compute type of a pointer's, row's or view's elements."""
    if isinstance(of, Row):
        return ELEMENTS[of.element].compute
    return ELEMENTS[of.dtype].compute if isinstance(of, (Pointer, View)) else types.unliteral(of)


@intrinsic
def zero(typing_context, like):
    """Return zero, in the compute type of a view or a pointer, or in the type of a value.

    Example:
        >>> total = language.zero(x)
    """
    type_ = _compute_type(like)

    def generate(context, builder, signature, args):
        return context.get_constant(type_, 0)

    return type_(like), generate


@intrinsic
def cast(typing_context, value, like):
    """Convert a number to the compute type of a view or a pointer, or to another number's type.

    Example:
        >>> mean = language.cast(total / size, x)
    """
    type_ = _compute_type(like)

    def generate(context, builder, signature, args):
        return context.cast(builder, args[0], signature.args[0], type_)

    return type_(types.unliteral(value), like), generate


@intrinsic
def lanes(typing_context, like):
    """Return the number of a view's or pointer's elements in a vector, as a constant.

    Pass it to `load_vector`.

    Example:
        >>> step = language.lanes(x)
        >>> for start in range(0, size - step + 1, step):
        ...     language.store(y, start, language.load_vector(x, start, step))
    """
    count = vector_bits() // _compute_type(like).bitwidth

    def generate(context, builder, signature, args):
        return context.get_constant(types.int64, count)

    return types.literal(count)(like), generate


@intrinsic
def accumulate(typing_context, total, value):
    """Add a value to a total, in its type; LLVM may reorder a loop's additions.

    Example:
        >>> for i in range(size):
        ...     total = language.accumulate(total, x[i] * x[i])
    """

    def generate(context, builder, signature, args):
        flags = () if isinstance(total, types.Integer) else ("reassoc",)
        add = builder.add if isinstance(total, types.Integer) else builder.fadd
        return add(*args, flags=flags)

    return total(total, total), generate


@intrinsic
def accumulate_maximum(typing_context, largest, value):
    """Return the larger of two floating-point numbers in the first's type; NaN if one is NaN.

    Example:
        >>> largest = x[0]
        >>> for i in range(1, size):
        ...     largest = language.accumulate_maximum(largest, x[i])
    """

    def generate(context, builder, signature, args):
        type_ = args[0].type
        return call_intrinsic(builder, f"llvm.maximum.{suffix(type_)}", type_, list(args))

    return largest(largest, largest), generate


def _emit_reduction(
    builder: ir.IRBuilder, vector: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]
) -> ir.Value:
    """Combine the vector's halves until one lane is left."""
    count = vector.type.count
    while count > 1:
        count //= 2
        halves = [
            builder.shuffle_vector(
                vector,
                vector,
                ir.Constant(ir.VectorType(INT32, count), list(range(start, start + count))),
            )
            for start in (0, count)
        ]
        vector = combine(*halves)
    return builder.extract_element(vector, INT32(0))


@intrinsic
def reduce_add(typing_context, vector):
    """Return the sum of a vector's lanes.

    Example:
        >>> total = language.reduce_add(language.load_vector(x, 0, language.lanes(x)))
    """

    def generate(context, builder, signature, args):
        return _emit_reduction(builder, args[0], builder.fadd)

    return _lane_type(vector)(vector), generate


@intrinsic
def reduce_maximum(typing_context, vector):
    """Return the largest of a vector's lanes; NaN if one is NaN.

    Example:
        >>> vector = language.load_vector(x, 0, language.lanes(x))
        >>> largest = language.reduce_maximum(vector)
    """

    def generate(context, builder, signature, args):
        def larger(a: ir.Value, b: ir.Value) -> ir.Value:
            return call_intrinsic(builder, f"llvm.maximum.{suffix(a.type)}", a.type, [a, b])

        return _emit_reduction(builder, args[0], larger)

    return _lane_type(vector)(vector), generate


def _lane_type(vector: types.Type) -> types.Type:
    if not isinstance(vector, Vector):
        raise TypeError(f"expected a vector, got {vector}")
    return vector.element
