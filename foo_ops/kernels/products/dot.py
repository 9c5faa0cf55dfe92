"""Multiply matrices in users' kernels: `dot` and `add_dot`, on tiles of views.

A tile of the result, of at most ROWS x COLUMNS elements, is summed in the compute type, block by
block of DEPTH elements of the factors, which are copied so that register tiles, or the registers of
a matrix unit, can take them::

                     b   DEPTH x COLUMNS  ->  a panel of vectors, converted or transposed
    a  BAND x DEPTH  ->  sums (ROWS x COLUMNS), which are written when all of the depth is summed

Each block of b is copied once for ROWS rows. A few rows are multiplied without a copy of b.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core import errors, types
from numba.extending import intrinsic

from foo_ops.kernels.products.forms import Form, form_of
from foo_ops.kernels.products.on_vectors import make_matmul
from foo_ops.kernels.products.panels import is_copied_as_it_is, make_pack_panel, make_pack_rows
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
from foo_ops.kernels.vectors.reduction import accumulate
from foo_ops.kernels.vectors.rows import round_up
from foo_ops.kernels.vectors.stack import stack_memory
from foo_ops.kernels.vectors.views import View

# For so many rows a block of b is copied once.
ROWS = 512
# Rows that are multiplied at a time: whole tiles of all shapes.
BAND = 32
# Vectors of a panel of b: those of the widest register tile.
VECTORS = 4
# Rows that are too few to copy b for.
FEW_ROWS = 4


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


# ------------------------------------------------------------------------------------- the product


@functools.cache
def _make_dot(target: str, a: str, b: str, adds: bool) -> Callable:
    """Make ``dot(target, a, b)`` for matrices of these dtypes."""
    form = form_of(a, b)
    compute, wanted = form.compute, ELEMENTS[target].compute
    if isinstance(wanted, types.Integer) and compute.startswith("float"):
        raise errors.TypingError(
            f"dot: target must be floating-point as the products are, got {target}"
        )
    width = VECTORS * lanes_of(compute)
    DEPTH, COLUMN_MULTIPLE = form.depth, form.column_multiple
    _, begin_products, end_products = form.make_products()
    pack_panel, multiply = make_pack_panel(form, b, width), _make_multiply(form, a, width)
    write, few_rows = _make_write(compute, adds), _make_few_rows(compute, a, b, width)
    panel_of, sums_of = stack_memory(form.right, DEPTH * width), stack_memory(compute, ROWS * width)
    factors_of = stack_memory(form.left, BAND * DEPTH)

    @njit
    def tile(target, a, b, sums, panel, factors, rows, columns, depth):
        """Sum a tile of at most ROWS x width elements."""
        padded = round_up(columns, COLUMN_MULTIPLE)
        begin_products()
        for start in range(0, depth, DEPTH):
            count = min(DEPTH, depth - start)
            pack_panel(
                panel, shift(b.data, start * b.row_stride), b.row_stride, b.column_stride,
                count, columns, padded,
            )  # fmt: skip
            for row in range(0, rows, BAND):
                multiply(
                    shift(sums, row * width), moved(a, row, start), factors, panel,
                    min(BAND, rows - row), padded, count, start > 0,
                )  # fmt: skip
        end_products()
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


def _make_multiply(form: Form, a: str, width: int) -> Callable:
    """Make ``multiply(sums, a, factors, panel, rows, columns, count, accumulate)``.

    It multiplies a band of rows, which is copied to ``factors`` unless a product takes it where it
    is, by a panel.
    """
    DEPTH, STEP, DEPTH_MULTIPLE = form.depth, form.step, form.depth_multiple
    ROW_MULTIPLE, GROUP_STRIDE = form.row_multiple, form.row_multiple
    on_unit, is_same = form.on_unit, is_copied_as_it_is(form.left, a)
    pack_rows, as_units = make_pack_rows(form, a), pointer_to(form.unit)
    matmul, _, _ = form.make_products()

    @njit
    def is_taken(a, rows, count):
        if on_unit:
            is_whole = rows % ROW_MULTIPLE == 0 and count % DEPTH_MULTIPLE == 0
            return is_same and is_whole and a.column_stride == 1 and a.row_stride % STEP == 0
        return is_same and STEP == 1

    @njit
    def multiply(sums, a, factors, panel, rows, columns, count, accumulate):
        left, row_stride, group_stride = address_of(factors), DEPTH // STEP, GROUP_STRIDE
        if is_taken(a, rows, count):
            left, row_stride = address_of(a.data), a.row_stride // STEP
            group_stride = GROUP_STRIDE if on_unit else a.column_stride
        else:
            pack_rows(factors, a.data, a.row_stride, a.column_stride, rows, count)
        matmul(
            sums, width, (as_units(left), row_stride, group_stride, 0),
            (as_units(address_of(panel)), width, 0),
            round_up(rows, ROW_MULTIPLE), columns, round_up(count, DEPTH_MULTIPLE) // STEP,
            accumulate, True,
        )  # fmt: skip

    return multiply


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
