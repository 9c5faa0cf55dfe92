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

from llvmlite import ir
from numba import njit
from numba.core import cgutils, errors, types
from numba.extending import intrinsic

from foo_ops.kernels.compiler.processor import use_pairs
from foo_ops.kernels.products.on_vectors import make_matmul
from foo_ops.kernels.vectors.bounds import OF_PRODUCT, record_unless
from foo_ops.kernels.vectors.elements import ELEMENTS, lanes_of
from foo_ops.kernels.vectors.instructions import INT64
from foo_ops.kernels.vectors.matrices import Matrix, as_matrix, emit_whole
from foo_ops.kernels.vectors.memory import address_of, load, pointer_to, shift, store
from foo_ops.kernels.vectors.pairs import PAIRS
from foo_ops.kernels.vectors.reduction import accumulate
from foo_ops.kernels.vectors.transpose import transpose_square
from foo_ops.kernels.vectors.values import Pointer
from foo_ops.kernels.vectors.views import View

ROWS, DEPTH = 128, 256
# Vectors of a panel of b: those of the widest register tile.
VECTORS = 4
# Rows that are too few to copy b for.
FEW_ROWS = 3


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
            _check(context, builder, matrices, values)
        call = context.get_function(function, called)
        context.add_linking_libs(getattr(call, "libs", ()))
        call(builder, values)
        return context.get_dummy_value()

    return types.void(*given), generate


def _check(context: Any, builder: ir.IRBuilder, types_: list[Matrix], values: list[Any]) -> None:
    """Record sizes that do not fit: what there is of all of them is multiplied."""
    target, a, b = (
        cgutils.create_struct_proxy(type_)(context, builder, value=value)
        for type_, value in zip(types_, values)
    )
    pairs = [(target.rows, a.rows), (target.columns, b.columns), (a.columns, b.rows)]
    fits = [builder.icmp_signed("==", one, other) for one, other in pairs]
    view = builder.inttoptr(target.view, INT64.as_pointer())
    sizes = [size for it in (target, a, b) for size in (it.rows, it.columns)]
    are_equal = builder.and_(builder.and_(*fits[:2]), fits[2])
    record_unless(context, builder, are_equal, view, OF_PRODUCT, sizes)


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
    in_pairs = a == b == "bfloat16" and use_pairs()
    operand = PAIRS if in_pairs else compute
    step = 2 if in_pairs else 1
    lanes = lanes_of(compute)
    width = VECTORS * lanes
    stored = "bfloat16" if in_pairs else compute
    matmul = make_matmul(compute, operand, operand)
    pack_rows, pack_panel = _make_pack_rows(stored, a), _make_pack_panel(stored, b, width)
    write, few_rows = _make_write(compute, adds), _make_few_rows(compute, a, b, width)
    factors_of, panel_of = _stack_memory(stored, ROWS * DEPTH), _stack_memory(stored, DEPTH * width)
    sums_of = _stack_memory(compute, ROWS * width)
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


@intrinsic
def moved(typing_context, matrix, row, column):
    """Return the matrix that begins at a row and a column; its sizes stay."""

    def generate(context, builder, signature, args):
        result = cgutils.create_struct_proxy(matrix)(context, builder, value=args[0])
        rows = builder.mul(args[1], result.row_stride)
        columns = builder.mul(args[2], result.column_stride)
        result.data = builder.gep(result.data, [builder.add(rows, columns)])
        return result._getvalue()

    return matrix(matrix, types.int64, types.int64), generate


def _stack_memory(dtype: str, count: int) -> Callable:
    """Make what returns a pointer to memory of the function that calls it."""
    pointer = Pointer(dtype)

    @intrinsic
    def stack_memory(typing_context):
        def generate(context, builder, signature, args):
            array = ir.ArrayType(ELEMENTS[dtype].storage, count)
            # alloca_once would fill it with zeros.
            with builder.goto_entry_block():
                memory = builder.alloca(array)
            memory.align = 64
            return builder.bitcast(memory, context.get_value_type(pointer))

        return pointer(), generate

    return stack_memory


# -------------------------------------------------------------------------------- copies of factors


@functools.cache
def _make_copy(stored: str, source: str) -> Callable:
    """Make ``copy(target, source, stride, count, width)``: elements at a stride become adjacent.

    Those that are missing to ``width`` are zeros. bfloat16 stays as it is.
    """
    kind = ELEMENTS[stored].compute
    is_same = stored == source
    bits = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}[ELEMENTS[source].size]
    to_bits = pointer_to(bits)

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

    copy_some = copy_bits if is_same else copy_converted

    @njit
    def copy(target, source, stride, count, width):
        copy_some(target, source, stride, count)
        for i in range(count, width):
            store(target, i, kind(0))

    return copy


@functools.cache
def _make_pack_rows(stored: str, a: str) -> Callable:
    """Make ``pack_rows(target, source, row_stride, column_stride, rows, depth)``."""
    copy = _make_copy(stored, a)

    @njit
    def pack_rows(target, source, row_stride, column_stride, rows, depth):
        for row in range(rows):
            line = shift(source, row * row_stride)
            copy(shift(target, row * DEPTH), line, column_stride, depth, depth + depth % 2)

    return pack_rows


@functools.cache
def _make_pack_panel(stored: str, b: str, WIDTH: int) -> Callable:
    """Make ``pack_panel(panel, source, row_stride, column_stride, depth, columns, padded)``.

    A step is a row of the panel: of elements, or of pairs of bfloat16. Where columns are adjacent
    they are copied; else some columns at a time are copied as rows, and transposed.
    """
    in_pairs = stored == "bfloat16"
    unit = PAIRS if in_pairs else stored
    LANES = lanes_of("float32" if in_pairs else stored)
    as_units = pointer_to(unit)
    copy, pack_pairs = _make_copy(stored, b), _make_pack_pairs()
    strip_of = _stack_memory(stored, LANES * DEPTH)
    PER_STEP = 2 if in_pairs else 1
    HEIGHT = DEPTH // PER_STEP

    @njit
    def pack_adjacent(panel, source, row_stride, depth, columns, padded):
        if in_pairs:
            pack_pairs(panel, source, row_stride, depth, columns, padded, WIDTH)
        else:
            for row in range(depth):
                line = shift(source, row * row_stride)
                copy(shift(panel, row * WIDTH), line, 1, columns, padded)

    @njit
    def pack_transposed(panel, source, row_stride, column_stride, depth, columns, padded):
        strip, units = strip_of(), as_units(address_of(panel))
        rows = as_units(address_of(strip))
        block = LANES * PER_STEP
        whole = (depth + block - 1) // block * block
        for column in range(0, padded, LANES):
            for lane in range(LANES):
                count = depth if column + lane < columns else 0
                line = shift(source, (column + lane) * column_stride)
                copy(shift(strip, lane * DEPTH), line, row_stride, count, whole)
            for step in range(0, whole // PER_STEP, LANES):
                target = shift(units, step * WIDTH + column)
                transpose_square(target, WIDTH, shift(rows, step), HEIGHT, LANES)

    @njit
    def pack_panel(panel, source, row_stride, column_stride, depth, columns, padded):
        if column_stride == 1:
            pack_adjacent(panel, source, row_stride, depth, columns, padded)
        else:
            pack_transposed(panel, source, row_stride, column_stride, depth, columns, padded)

    return pack_panel


@functools.cache
def _make_pack_pairs() -> Callable:
    """Make the copy of adjacent columns of bfloat16 into pairs of two rows."""
    as_bits, as_pairs = pointer_to("uint16"), pointer_to(PAIRS)

    @njit
    def pack_pairs(panel, source, row_stride, depth, columns, padded, width):
        pairs = as_pairs(address_of(panel))
        for row in range(0, depth, 2):
            low = as_bits(address_of(shift(source, row * row_stride)))
            target = shift(pairs, row // 2 * width)
            if row + 1 < depth:
                high = shift(low, row_stride)
                for i in range(columns):
                    upper = types.uint32(load(high, i)) << types.uint32(16)
                    store(target, i, types.int32(types.uint32(load(low, i)) | upper))
            else:
                for i in range(columns):
                    store(target, i, types.int32(load(low, i)))
            for i in range(columns, padded):
                store(target, i, types.int32(0))

    return pack_pairs


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


@functools.cache
def _make_few_rows(compute: str, a: str, b: str, WIDTH: int) -> Callable:
    """Make the product of few rows, along the adjacent elements of b."""
    kind = ELEMENTS[compute].compute

    @njit
    def inner(a, a_stride, b, b_stride, depth):
        total = kind(0)
        for k in range(depth):
            total = accumulate(total, kind(load(a, k * a_stride)) * kind(load(b, k * b_stride)))
        return total

    @njit
    def add_row(sums, factor, b, columns):
        for i in range(columns):
            store(sums, i, load(sums, i) + factor * kind(load(b, i)))

    @njit
    def few_rows(sums, a, b, rows, columns, depth):
        for row in range(rows):
            line, target = shift(a.data, row * a.row_stride), shift(sums, row * WIDTH)
            if b.column_stride == 1 and b.row_stride != 1:
                for i in range(columns):
                    store(target, i, kind(0))
                for k in range(depth):
                    factor = kind(load(line, k * a.column_stride))
                    add_row(target, factor, shift(b.data, k * b.row_stride), columns)
            elif b.row_stride == 1 and a.column_stride == 1:
                for i in range(columns):
                    column = shift(b.data, i * b.column_stride)
                    store(target, i, inner(line, 1, column, 1, depth))
            else:
                for i in range(columns):
                    column = shift(b.data, i * b.column_stride)
                    store(target, i, inner(line, a.column_stride, column, b.row_stride, depth))

    return few_rows
