"""Multiply matrices in users' kernels: `dot` and `add_dot`, on parts of views."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core import errors, types
from numba.extending import intrinsic

from foo_ops.kernels.compiler.processor import use_matrix_unit, use_pairs
from foo_ops.kernels.lang.indexing import (
    Matrix,
    as_matrix,
    emit_whole,
    moved,
    record_unless_fitting,
)
from foo_ops.kernels.lang.reduction import accumulate
from foo_ops.kernels.lang.scratch import stack_memory
from foo_ops.kernels.lang.views import View
from foo_ops.kernels.products.on_amx import GROUP, make_amx_products, make_amx_products_of_bytes
from foo_ops.kernels.products.on_vectors import make_matmul
from foo_ops.kernels.products.operands import make_products_on_vectors
from foo_ops.kernels.simd.memory import address_of, load, pointer_to, shift, store
from foo_ops.kernels.simd.narrow import INTEGER_PAIRS, PAIRS
from foo_ops.kernels.simd.transpose import round_up, transpose_square
from foo_ops.kernels.simd.types import ELEMENTS, lanes_of

# --------------------------------------------------------------------------------- forms of factors

# Chooses the form in which a product's factors are packed, and the instructions that multiply them.
#
# A matrix unit multiplies bfloat16 and 8-bit integers, and is faster for all sizes (64 x 64 x 64 in
# bfloat16 1.4 times, 256 x 256 x 256 six times; 8 rows 1.5 times). Without one, integers of 8 and
# 16 bits are multiplied in pairs of 16 bits, and bfloat16 in pairs where the processor is fast at
# it. All others are multiplied in the compute type of the sums.


# Bytes of a row of a block, at most: a panel of such columns fits L1. With twice as many,
# 128 x 256 x 1024 in float32 takes 1.1 times as long.
BLOCK_BYTES = 512
_BYTES = {"bool", "int8", "uint8"}
# Dtypes that bfloat16 or int16 represents exactly, and that can be paired with it in products.
_EXACT_IN_BFLOAT16, _EXACT_IN_INT16 = {"bfloat16"} | _BYTES, {"int16"} | _BYTES


@dataclasses.dataclass(frozen=True)
class Form:
    """Layout of the packed factors.

    Attributes:
        compute: the dtype of the sums.
        left, right: the dtypes of the elements of both factors.
        unit: the dtype of a step, of one or several elements.
        on_unit: a matrix unit multiplies.
    """

    compute: str
    left: str
    right: str
    unit: str
    on_unit: bool

    @property
    def step(self) -> int:
        """The number of elements that a step sums over."""
        return ELEMENTS[self.unit].parts

    @property
    def depth(self) -> int:
        """The number of elements of a block that are summed over."""
        return BLOCK_BYTES // ELEMENTS[self.left].size

    @property
    def row_multiple(self) -> int:
        return GROUP if self.on_unit else 1

    @property
    def column_multiple(self) -> int:
        return GROUP if self.on_unit else lanes_of(self.compute)

    @property
    def depth_multiple(self) -> int:
        return self.step * (GROUP if self.on_unit else 1)

    def make_products(self) -> tuple[Callable, Callable, Callable]:
        """Like `foo_ops.kernels.products.operands.make_products`, for this form."""
        if not self.on_unit:
            return make_products_on_vectors(self.compute, self.unit)
        if self.unit == PAIRS:
            return make_amx_products(1)
        return make_amx_products_of_bytes(self.left, self.right)


@functools.cache
def form_of(a: str, b: str) -> Form:
    """Return the form for factors of two dtypes."""
    both, compute, on_unit = {a, b}, _sums_dtype(a, b), use_matrix_unit()
    if "bfloat16" in both and both <= _EXACT_IN_BFLOAT16 and (on_unit or use_pairs()):
        return Form(compute, "bfloat16", "bfloat16", PAIRS, on_unit)
    if both <= _BYTES and on_unit:
        left, right = (str(ELEMENTS[dtype].compute) for dtype in (a, b))
        return Form(compute, left, right, "int8x4", True)
    if both <= _EXACT_IN_INT16:
        return Form(compute, "int16", "int16", INTEGER_PAIRS, False)
    return Form(compute, compute, compute, compute, False)


def _sums_dtype(a: str, b: str) -> str:
    """Return the dtype in which products of two dtypes are summed."""
    computed = [ELEMENTS[dtype].compute for dtype in (a, b)]
    for type_ in computed:
        if not isinstance(type_, (types.Float, types.Integer)):
            raise errors.TypingError(f"dot: a and b must have a real dtype, got {type_}")
    floats = [type_ for type_ in computed if isinstance(type_, types.Float)]
    if floats:
        return str(max(floats))
    return "int32" if all(type_.bitwidth <= 16 for type_ in computed) else "int64"


# ------------------------------------------------------------------------------------------- panels

# Copies blocks of matrices into the form that products need: converted, padded, transposed.


_BITS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


def is_copied_as_it_is(stored: str, source: str) -> bool:
    """Whether elements have the same bits in both dtypes."""
    return source == stored or {source, stored} == {"bool", "uint8"}


@functools.cache
def _make_copy(stored: str, source: str) -> Callable:
    """Make ``copy(target, source, stride, count, width)``: elements at a stride become adjacent.

    The target is padded to ``width`` with zeros. bfloat16 is copied bit by bit.
    """
    kind = ELEMENTS[stored].compute
    to_bits = pointer_to(_BITS[ELEMENTS[source].size])

    @njit
    def copy_bits(target, source, stride, count):
        to, of = to_bits(address_of(target)), to_bits(address_of(source))
        if stride == 1:
            for i in range(count):
                store(to, i, load(of, i))
        else:
            for i in range(count):
                store(to, i, load(of, i * stride))

    @njit
    def copy_converted(target, source, stride, count):
        if stride == 1:
            for i in range(count):
                store(target, i, kind(load(source, i)))
        else:
            for i in range(count):
                store(target, i, kind(load(source, i * stride)))

    copy_some = copy_bits if is_copied_as_it_is(stored, source) else copy_converted

    @njit
    def copy(target, source, stride, count, width):
        copy_some(target, source, stride, count)
        for i in range(count, width):
            store(target, i, kind(0))

    return copy


@functools.cache
def make_pack_rows(form: Form, a: str) -> Callable:
    """Make ``pack_rows(target, source, row_stride, column_stride, rows, depth)``."""
    DEPTH, MULTIPLE = form.depth, form.depth_multiple
    copy = _make_copy(form.left, a)

    @njit
    def pack_rows(target, source, row_stride, column_stride, rows, depth):
        for row in range(rows):
            line = shift(source, row * row_stride)
            copy(shift(target, row * DEPTH), line, column_stride, depth, round_up(depth, MULTIPLE))

    return pack_rows


@functools.cache
def make_pack_panel(form: Form, b: str, WIDTH: int) -> Callable:
    """Make ``pack_panel(panel, source, row_stride, column_stride, depth, columns, padded)``.

    A step is a row of the panel. Adjacent columns are copied; others are transposed, some columns
    at a time.
    """
    # Integers that become bfloat16 are converted on the way to the strip, so always transposed.
    is_copied = form.right != "bfloat16" or b == "bfloat16"
    pack_adjacent = _make_pack_adjacent(form, b, WIDTH) if is_copied else _pack_nothing
    pack_transposed = _make_pack_transposed(form, b, WIDTH)

    @njit
    def pack_panel(panel, source, row_stride, column_stride, depth, columns, padded):
        if is_copied and column_stride == 1:
            pack_adjacent(panel, source, row_stride, depth, columns, padded)
        else:
            pack_transposed(panel, source, row_stride, column_stride, depth, columns, padded)

    return pack_panel


@njit
def _pack_nothing(panel, source, row_stride, depth, columns, padded):
    """Placeholder for a copy that is never called."""


def _make_pack_transposed(form: Form, b: str, WIDTH: int) -> Callable:
    LANES, DEPTH, STEP = lanes_of(form.unit), form.depth, form.step
    BLOCK = LANES * STEP
    MULTIPLE, HEIGHT = max(BLOCK, form.depth_multiple), DEPTH // STEP
    copy, strip_of = _make_copy(form.right, b), stack_memory(form.right, LANES * DEPTH)
    as_units, is_same = pointer_to(form.unit), is_copied_as_it_is(form.right, b)

    @njit
    def pack_transposed(panel, source, row_stride, column_stride, depth, columns, padded):
        strip, units = strip_of(), as_units(address_of(panel))
        rows = as_units(address_of(strip))
        # Whole squares of adjacent elements are transposed straight from the source.
        adjacent = is_same and row_stride == 1 and column_stride % STEP == 0
        first = depth // BLOCK * BLOCK if adjacent else 0
        for column in range(0, padded, LANES):
            start = first if column + LANES <= columns else 0
            columns_of = as_units(address_of(shift(source, column * column_stride)))
            for step in range(0, start // STEP, LANES):
                target = shift(units, step * WIDTH + column)
                place = shift(columns_of, step)
                transpose_square(target, WIDTH, place, column_stride // STEP, LANES)
            rest = round_up(depth, MULTIPLE) - start
            for lane in range(LANES):
                count = depth - start if column + lane < columns else 0
                line = shift(source, (column + lane) * column_stride + start * row_stride)
                copy(shift(strip, lane * DEPTH), line, row_stride, count, rest)
            for step in range(0, rest // STEP, LANES):
                target = shift(units, (start // STEP + step) * WIDTH + column)
                transpose_square(target, WIDTH, shift(rows, step), HEIGHT, LANES)

    return pack_transposed


def _make_pack_adjacent(form: Form, b: str, WIDTH: int) -> Callable:
    """Make the copy of adjacent columns; a step joins one or several rows."""
    STEP, MULTIPLE = form.step, form.depth_multiple
    if STEP == 1:
        copy = _make_copy(form.right, b)

        @njit
        def pack_rows(panel, source, row_stride, depth, columns, padded):
            for row in range(depth):
                line = shift(source, row * row_stride)
                copy(shift(panel, row * WIDTH), line, 1, columns, padded)

        return pack_rows

    size = ELEMENTS[form.right].size
    bits, is_pair, WIDE = ELEMENTS[_BITS[size]].compute, STEP == 2, types.uint32(8 * size)
    as_units = pointer_to(form.unit)
    as_source = pointer_to("uint16" if b == "bfloat16" else b)

    @njit
    def element(line, i):
        return types.uint32(bits(load(line, i)))

    @njit
    def join_pairs(target, line, stride, columns):
        second = shift(line, stride)
        for i in range(columns):
            store(target, i, types.int32(element(line, i) | element(second, i) << WIDE))

    @njit
    def join_fours(target, line, stride, columns):
        second, third, fourth = (
            shift(line, stride),
            shift(line, 2 * stride),
            shift(line, 3 * stride),
        )
        for i in range(columns):
            low = element(line, i) | element(second, i) << WIDE
            high = element(third, i) | element(fourth, i) << WIDE
            store(target, i, types.int32(low | high << (WIDE + WIDE)))

    join = join_pairs if is_pair else join_fours

    @njit
    def join_some(target, line, stride, columns, count):
        """Join fewer rows than STEP, for the last step."""
        for i in range(columns):
            joined = types.uint32(0)
            for row in range(count):
                joined |= element(line, row * stride + i) << types.uint32(row * WIDE)
            store(target, i, types.int32(joined))

    @njit
    def pack_steps(panel, source, row_stride, depth, columns, padded):
        units, rows = as_units(address_of(panel)), as_source(address_of(source))
        for row in range(0, round_up(depth, MULTIPLE), STEP):
            target, line = shift(units, row // STEP * WIDTH), shift(rows, row * row_stride)
            if row + STEP <= depth:
                join(target, line, row_stride, columns)
            else:
                join_some(target, line, row_stride, columns, max(depth - row, 0))
            for i in range(columns, padded):
                store(target, i, 0)

    return pack_steps


# ---------------------------------------------------------------------------------- dot and add_dot

# A part of the result, of at most ROWS x COLUMNS elements, is summed in the compute type, in blocks
# of DEPTH elements of the factors, which are copied for register tiles or for the registers of a
# matrix unit:
#
#                      b   DEPTH x COLUMNS  ->  a panel of vectors, converted or transposed
#     a  BAND x DEPTH  ->  sums (ROWS x COLUMNS), which are written when all of the depth is summed
#
# Each block of b is copied once for ROWS rows. A few rows are multiplied without a copy of b.


# Rows for which a block of b is copied once.
ROWS = 512
# Rows multiplied at a time: whole register tiles of all shapes.
BAND = 32
# Vectors of a panel of b, as in the widest register tile.
VECTORS = 4
# Up to this many rows are multiplied without a copy of b.
FEW_ROWS = 4


@intrinsic
def dot(typing_context, target, a, b):
    """Compute target = a b for matrices: views of two dimensions, or slices of views.

    Sums are float64 if a factor is, float32 if one is another floating-point dtype, int32 for
    integers of 8 and 16 bits, and int64 for others. They are rounded once, to the target.

    Example:
        >>> language.dot(output[i : i + 64], a[i : i + 64], b)
        >>> language.dot(output[i : i + 64, j : j + 64], a[i : i + 64], b[j : j + 64].T)
    """
    return _product(typing_context, target, a, b, False)


@intrinsic
def add_dot(typing_context, target, a, b):
    """Compute target += a b; otherwise like `dot`.

    Example:
        >>> language.add_dot(output[i : i + 64], a[i : i + 64], b)
    """
    return _product(typing_context, target, a, b, True)


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
        """Compute a part of the result of at most ROWS x width elements."""
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

    It multiplies a band of rows by a panel. The band is copied to ``factors`` unless a product can
    read it in place.
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
    """Make ``write(target, sums, width, rows, columns)``: round sums to the target."""

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
    """Placeholder for a product that is never called."""


@functools.cache
def _make_few_rows(compute: str, a: str, b: str, WIDTH: int) -> Callable:
    """Make the product of few rows, along the adjacent elements of b."""
    kind = ELEMENTS[compute].compute
    lanes = lanes_of(compute)
    # Register tiles read such factors in place.
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
        """Multiply four rows, converting each element of b once."""
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
