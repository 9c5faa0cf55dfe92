"""Multiply matrices in users' kernels: `dot` and `add_dot`, on tiles of views.

A tile of the result, of at most ROWS x COLUMNS elements, is summed in the compute type, block by
block of DEPTH elements of the factors, which are copied so that register tiles can take them::

                     b   DEPTH x COLUMNS  ->  a panel of vectors, converted or transposed
    a  ROWS x DEPTH  ->  sums (ROWS x COLUMNS), which are written when all of the depth is summed

Each block of b is copied once for ROWS rows, at a tenth of what their products take. A few rows are
multiplied without a copy of b.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core import errors, types
from numba.extending import intrinsic

from foo_ops.kernels.compiler.processor import use_pairs
from foo_ops.kernels.products.on_vectors import make_matmul
from foo_ops.kernels.products.panels import DEPTH, make_pack_panel, make_pack_rows
from foo_ops.kernels.vectors import plain_language
from foo_ops.kernels.vectors.elements import ELEMENTS, lanes_of
from foo_ops.kernels.vectors.matrices import (
    Matrix,
    as_matrix,
    emit_whole,
    moved,
    record_unless_fitting,
)
from foo_ops.kernels.vectors.memory import address_of, load, pointer_to, shift, store
from foo_ops.kernels.vectors.pairs import PAIRS
from foo_ops.kernels.vectors.reduction import accumulate
from foo_ops.kernels.vectors.stack import stack_memory
from foo_ops.kernels.vectors.views import View

ROWS = 128
# Vectors of a panel of b: those of the widest register tile.
VECTORS = 4
# Rows that are too few to copy b for.
FEW_ROWS = 4
# What bfloat16 holds exactly, so that it enters products in pairs beside bfloat16.
_EXACT_IN_BFLOAT16 = {"bfloat16", "bool", "int8", "uint8"}


@intrinsic
def dot(typing_context, target, a, b):
    """Compute target = a b, of matrices: views of two dimensions, or slices of views.

    Sums are float64 where a factor is, float32 where one is floating-point, int32 for integers of 8
    and 16 bits, and int64 for others; the target gets them rounded once.

    Example:
        >>> language.dot(output[i : i + 64], a[i : i + 64], b)
        >>> language.dot(output[i : i + 64, j : j + 64], a[i : i + 64], b[j : j + 64].T)
    """
    return _product(typing_context, target, a, b, False)


@intrinsic
def add_dot(typing_context, target, a, b):
    """Compute target += a b, as `dot` does.

    Example:
        >>> language.add_dot(output[i : i + 64], a[i : i + 64], b)
    """
    return _product(typing_context, target, a, b, True)


for _function in (dot, add_dot):
    getattr(plain_language, _function.__name__).__doc__ = _function.__doc__


def _product(typing_context: Any, target: Any, a: Any, b: Any, adds: bool) -> Any:
    given = (target, a, b)
    for name, it in zip(("target", "a", "b"), given):
        if not isinstance(it, (Matrix, View)):
            raise errors.TypingError(
                f"dot: {name} must be a view of two dimensions or slices of a view, got {it}"
            )
    matrices = [as_matrix(it) if isinstance(it, View) else it for it in given]
    function = typing_context.resolve_value_type(_make_dot(*(it.dtype for it in matrices), adds))
    called = function.get_call_type(typing_context, tuple(matrices), {})

    def generate(context, builder, signature, args):
        values = [
            emit_whole(context, builder, it, value) if isinstance(it, View) else value
            for it, value in zip(given, args)
        ]
        if target.is_checked:
            record_unless_fitting(context, builder, matrices, values)
        call = context.get_function(function, called)
        context.add_linking_libs(getattr(call, "libs", ()))
        call(builder, values)
        return context.get_dummy_value()

    return types.void(*given), generate


def sums_dtype(a: str, b: str) -> str:
    """Return the dtype in which products of two dtypes are summed."""
    computed = [ELEMENTS[dtype].compute for dtype in (a, b)]
    for type_ in computed:
        if not isinstance(type_, (types.Float, types.Integer)):
            raise errors.TypingError(f"dot: a factor must be of real numbers, got {type_}")
    floats = [type_ for type_ in computed if isinstance(type_, types.Float)]
    if floats:
        return str(max(floats))
    return "int32" if all(type_.bitwidth <= 16 for type_ in computed) else "int64"


# ------------------------------------------------------------------------------------- the product


@functools.cache
def _make_dot(target: str, a: str, b: str, adds: bool) -> Callable:
    """Make ``dot(target, a, b)`` for matrices of these dtypes."""
    compute = sums_dtype(a, b)
    wanted = ELEMENTS[target].compute
    if isinstance(wanted, types.Integer) and compute.startswith("float"):
        raise errors.TypingError(
            f"dot: target must be floating-point as the products are, got {target}"
        )
    in_pairs = "bfloat16" in (a, b) and {a, b} <= _EXACT_IN_BFLOAT16 and use_pairs()
    operand = PAIRS if in_pairs else compute
    step = 2 if in_pairs else 1
    lanes = lanes_of(compute)
    width = VECTORS * lanes
    stored = "bfloat16" if in_pairs else compute
    matmul = make_matmul(compute, operand, operand)
    pack_rows, pack_panel = make_pack_rows(stored, a), make_pack_panel(stored, b, width)
    write, few_rows = _make_write(compute, adds), _make_few_rows(compute, a, b, width)
    factors_of, panel_of = stack_memory(stored, ROWS * DEPTH), stack_memory(stored, DEPTH * width)
    sums_of = stack_memory(compute, ROWS * width)
    is_direct = a == compute
    as_operand = pointer_to(operand)

    @njit
    def tile(target, a, b, sums, panel, factors, rows, columns, depth):
        """Sum a tile of at most ROWS x width elements."""
        padded = (columns + lanes - 1) // lanes * lanes
        for start in range(0, depth, DEPTH):
            count = min(DEPTH, depth - start)
            steps = (count + step - 1) // step
            left = shift(a.data, start * a.column_stride)
            pack_panel(
                panel, shift(b.data, start * b.row_stride), b.row_stride, b.column_stride,
                count, columns, padded,
            )  # fmt: skip
            right = as_operand(address_of(panel))
            if is_direct:
                matmul(
                    sums, width, as_operand(address_of(left)), a.row_stride, a.column_stride,
                    right, width, rows, padded, steps, start > 0,
                )  # fmt: skip
            else:
                pack_rows(factors, left, a.row_stride, a.column_stride, rows, count)
                matmul(
                    sums, width, as_operand(address_of(factors)), DEPTH // step, 1,
                    right, width, rows, padded, steps, start > 0,
                )  # fmt: skip
        write(target, sums, width, rows, columns)

    @njit
    def dot(target, a, b):
        rows, columns = min(target.rows, a.rows), min(target.columns, b.columns)
        depth = min(a.columns, b.rows)
        sums, panel, factors = sums_of(), panel_of(), factors_of()
        if depth == 0:
            for i in range(min(rows, ROWS) * width):
                store(sums, i, 0)
        for column in range(0, columns, width):
            some_columns = min(width, columns - column)
            b_part = moved(b, 0, column)
            for row in range(0, rows, ROWS):
                some_rows = min(ROWS, rows - row)
                a_part, part = moved(a, row, 0), moved(target, row, column)
                if some_rows <= FEW_ROWS:
                    few_rows(sums, a_part, b_part, some_rows, some_columns, depth)
                    write(part, sums, width, some_rows, some_columns)
                else:
                    tile(part, a_part, b_part, sums, panel, factors, some_rows, some_columns, depth)

    return dot


# --------------------------------------------------------------------------------- sums and results


@functools.cache
def _make_write(compute: str, adds: bool) -> Callable:
    """Make ``write(target, sums, width, rows, columns)``, which rounds sums to the target."""

    @njit
    def write_row(target, stride, sums, columns):
        if adds:
            for i in range(columns):
                target[i * stride] = target[i * stride] + sums[i]
        else:
            for i in range(columns):
                target[i * stride] = sums[i]

    @njit
    def write(target, sums, width, rows, columns):
        for row in range(rows):
            line = shift(target.data, row * target.row_stride)
            if target.column_stride == 1:
                write_row(line, 1, shift(sums, row * width), columns)
            else:
                write_row(line, target.column_stride, shift(sums, row * width), columns)

    return write


@njit
def _multiply_nothing(c, c_stride, a, a_row, a_step, b, b_stride, rows, columns, steps, adds):
    """Stand for a product that is never called."""


@functools.cache
def _make_few_rows(compute: str, a: str, b: str, WIDTH: int) -> Callable:
    """Make the product of few rows, along the adjacent elements of b."""
    kind = ELEMENTS[compute].compute
    lanes = lanes_of(compute)
    # Register tiles read such factors where they are.
    is_direct = kind == ELEMENTS[a].compute == ELEMENTS[b].compute
    matmul = make_matmul(compute, a, b) if is_direct else _multiply_nothing

    @njit
    def inner(a, a_stride, b, b_stride, depth):
        total = kind(0)
        for k in range(depth):
            total = accumulate(total, kind(load(a, k * a_stride)) * kind(load(b, k * b_stride)))
        return total

    @njit
    def four_rows(sums, a, a_row, b, depth):
        """Convert an element of b once for four rows."""
        a1, a2, a3 = shift(a, a_row), shift(a, 2 * a_row), shift(a, 3 * a_row)
        first = kind(0)
        second, third, fourth = first, first, first
        for k in range(depth):
            factor = kind(load(b, k))
            first = accumulate(first, kind(load(a, k)) * factor)
            second = accumulate(second, kind(load(a1, k)) * factor)
            third = accumulate(third, kind(load(a2, k)) * factor)
            fourth = accumulate(fourth, kind(load(a3, k)) * factor)
        store(sums, 0, first)
        store(sums, WIDTH, second)
        store(sums, 2 * WIDTH, third)
        store(sums, 3 * WIDTH, fourth)

    @njit
    def add_row(sums, factor, b, columns):
        for i in range(columns):
            store(sums, i, load(sums, i) + factor * kind(load(b, i)))

    @njit
    def few_rows(sums, a, b, rows, columns, depth):
        if rows == 4 and b.row_stride == 1 and a.column_stride == 1:
            for i in range(columns):
                column = shift(b.data, i * b.column_stride)
                four_rows(shift(sums, i), a.data, a.row_stride, column, depth)
            return
        first = 0
        if is_direct and b.column_stride == 1:
            first = columns // lanes * lanes
            matmul(
                sums, WIDTH, a.data, a.row_stride, a.column_stride,
                b.data, b.row_stride, rows, first, depth, False,
            )  # fmt: skip
        for row in range(rows):
            line, target = shift(a.data, row * a.row_stride), shift(sums, row * WIDTH)
            if b.column_stride == 1 and b.row_stride != 1 and not is_direct:
                for i in range(columns):
                    store(target, i, kind(0))
                for k in range(depth):
                    factor = kind(load(line, k * a.column_stride))
                    add_row(target, factor, shift(b.data, k * b.row_stride), columns)
            elif b.row_stride == 1 and a.column_stride == 1:
                for i in range(first, columns):
                    column = shift(b.data, i * b.column_stride)
                    store(target, i, inner(line, 1, column, 1, depth))
            else:
                for i in range(first, columns):
                    column = shift(b.data, i * b.column_stride)
                    store(target, i, inner(line, a.column_stride, column, b.row_stride, depth))

    return few_rows
