"""Take matrices out of views, for products: ``x[i:j, k:l]``, ``x[i:j]`` and ``x[b, :, h]``.

An index with one or two slices is a `Matrix` over these dimensions; one with a single slice of a
view of two dimensions takes all of the other one. Slices are those of Python: negative bounds count
from the end, and none is outside, since what there is not is left out. So the last tile of a matrix
is written as the others are, and is smaller.

    m.rows, m.columns       sizes
    m.T                     the transpose, of the same elements
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba.core import cgutils, errors, types
from numba.core.imputils import lower_getattr_generic
from numba.core.typing.templates import (
    AbstractTemplate,
    AttributeTemplate,
    infer_getattr,
    infer_global,
    signature,
)
from numba.cpython import slicing  # noqa: F401
from numba.extending import intrinsic, lower_builtin, models, register_model

from foo_ops.kernels.compiler.kernel import WRONG_INDEX
from foo_ops.kernels.vectors.bounds import OF_ELEMENT, OF_PRODUCT, SIZES, is_in, record_unless
from foo_ops.kernels.vectors.instructions import INT64
from foo_ops.kernels.vectors.values import Pointer
from foo_ops.kernels.vectors.views import (
    View,
    data_of,
    from_start,
    index_type,
    number_of,
    numbers_of,
    stride_of,
)

SLICED = "a matrix is one or two slices without steps of {}, and an index for each other dimension"
ONE_SLICE = (
    "slices have no arithmetic: compute with elements, for i in range({0}.shape[-1]): "
    "... {0}[r, i] ..., or take {0}.row(r); for language.dot, "
)


def not_a_matrix(name: str, ndim: int, slices: int) -> str:
    """Say that an index with so many slices is no matrix, and what else it may be meant for."""
    words = SLICED.format(f"{name or 'a tensor'} with {ndim} dimensions")
    return ONE_SLICE.format(name or "x") + words if slices == 1 else WRONG_INDEX + words


class Matrix(types.Type):
    """Elements of a view in rows and columns, at any strides.

    Attributes:
        dtype: of the elements.
        is_checked: sizes that do not fit are recorded; see bounds.py.
    """

    def __init__(self, dtype: str, is_checked: bool) -> None:
        self.dtype = dtype
        self.is_checked = is_checked
        super().__init__(f"Matrix({dtype}{', checked' * is_checked})")


@register_model(Matrix)
class _MatrixModel(models.StructModel):
    def __init__(self, manager: Any, type_: Matrix) -> None:
        numbers = ("rows", "columns", "row_stride", "column_stride", "view")
        fields = [("data", Pointer(type_.dtype)), *((name, types.int64) for name in numbers)]
        super().__init__(manager, type_, fields)


@infer_getattr
class _MatrixAttributes(AttributeTemplate):
    key = Matrix

    def generic_resolve(self, matrix: Matrix, name: str) -> types.Type | None:
        if name == "T":
            return matrix
        if name == "data":
            return Pointer(matrix.dtype)
        is_number = name in ("rows", "columns", "row_stride", "column_stride")
        return types.int64 if is_number else None


@lower_getattr_generic(Matrix)
def _get_attribute(context, builder, type_, value, name):
    matrix = cgutils.create_struct_proxy(type_)(context, builder, value=value)
    if name != "T":
        return getattr(matrix, name)
    matrix.rows, matrix.columns = matrix.columns, matrix.rows
    matrix.row_stride, matrix.column_stride = matrix.column_stride, matrix.row_stride
    return matrix._getvalue()


def _parts(view: View, index: types.Type) -> list[types.Type]:
    """Return an index for each dimension; where the last is left out, it is a whole one."""
    parts = list(index) if isinstance(index, types.BaseTuple) else [index]
    return [*parts, types.none] if len(parts) == view.ndim - 1 else parts


def _is_slice(part: types.Type) -> bool:
    return isinstance(part, types.SliceType) or part == types.none


@infer_global(operator.getitem)
class _Slice(AbstractTemplate):
    prefer_literal = True

    def generic(self, args, kws):
        view, index = args
        given = list(index) if isinstance(index, types.BaseTuple) else [index]
        if not isinstance(view, View) or not any(isinstance(it, types.SliceType) for it in given):
            return None
        parts = _parts(view, index)
        slices = [part for part in parts if _is_slice(part)]
        are_right = all(_is_slice(part) or isinstance(part, types.Integer) for part in parts)
        has_steps = any(getattr(part, "has_step", False) for part in slices)
        if len(parts) != view.ndim or len(slices) != 2 or not are_right or has_steps:
            raise errors.TypingError(not_a_matrix(view.argument, view.ndim, len(slices)))
        taken = [it if isinstance(it, types.SliceType) else index_type(it) for it in given]
        is_tuple = isinstance(index, types.BaseTuple)
        taken_type = types.BaseTuple.from_types(taken) if is_tuple else taken[0]
        return signature(Matrix(view.dtype, view.is_checked), view, taken_type)


@lower_builtin(operator.getitem, View, types.SliceType)
def emit_slice(context, builder, signature, args):
    type_, index = signature.args
    is_tuple = isinstance(index, types.BaseTuple)
    values = cgutils.unpack_tuple(builder, args[1]) if is_tuple else [args[1]]
    parts = _parts(type_, index)
    values = [*values, None] if len(values) < len(parts) else values
    view = args[0]
    offset, is_inside, numbers, kept = INT64(0), ir.Constant(ir.IntType(1), 1), [], []
    for dimension, (part, value) in enumerate(zip(parts, values)):
        size = number_of(builder, numbers_of(builder, view, SIZES), dimension)
        stride = stride_of(builder, type_, view, dimension)
        if _is_slice(part):
            place, count = _extent(context, builder, part, value, size)
            kept.append((count, stride))
            numbers.append(place)
        else:
            place = from_start(builder, part, value, size)
            numbers.append(value)
            is_inside = builder.and_(is_inside, is_in(builder, place, size))
        offset = builder.add(offset, builder.mul(place, stride))
    (rows, row_stride), (columns, column_stride) = kept
    if type_.is_checked:
        record_unless(context, builder, is_inside, view, OF_ELEMENT, numbers)
        rows = builder.select(is_inside, rows, INT64(0))
    matrix = cgutils.create_struct_proxy(signature.return_type)(context, builder)
    matrix.data = builder.gep(data_of(context, builder, type_, view), [offset])
    matrix.rows, matrix.columns = rows, columns
    matrix.row_stride, matrix.column_stride = row_stride, column_stride
    matrix.view = builder.ptrtoint(view, INT64)
    return matrix._getvalue()


def _extent(
    context: Any, builder: ir.IRBuilder, type_: types.Type, value: ir.Value | None, size: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Return where a slice begins, and how many there are."""
    if value is None:
        return INT64(0), size
    bounds = context.make_helper(builder, type_, value)

    def inside(bound: ir.Value) -> ir.Value:
        is_negative = builder.icmp_signed("<", bound, INT64(0))
        bound = builder.select(is_negative, builder.add(bound, size), bound)
        is_low = builder.icmp_signed("<", bound, INT64(0))
        is_high = builder.icmp_signed(">", bound, size)
        return builder.select(is_low, INT64(0), builder.select(is_high, size, bound))

    start, stop = inside(bounds.start), inside(bounds.stop)
    is_empty = builder.icmp_signed("<", stop, start)
    return start, builder.select(is_empty, INT64(0), builder.sub(stop, start))


def as_matrix(view: View) -> Matrix:
    """Return the type of a whole view of two dimensions as a matrix."""
    if view.ndim != 2:
        raise errors.TypingError(f"dot: a factor must be a matrix, got {view.described()}")
    return Matrix(view.dtype, view.is_checked)


def emit_whole(context: Any, builder: ir.IRBuilder, view: View, value: ir.Value) -> ir.Value:
    """Return a whole view of two dimensions as a matrix."""
    matrix = cgutils.create_struct_proxy(as_matrix(view))(context, builder)
    matrix.data = data_of(context, builder, view, value)
    sizes = numbers_of(builder, value, SIZES)
    matrix.rows, matrix.columns = (number_of(builder, sizes, d) for d in range(2))
    matrix.row_stride, matrix.column_stride = (stride_of(builder, view, value, d) for d in range(2))
    matrix.view = builder.ptrtoint(value, INT64)
    return matrix._getvalue()


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


def record_unless_fitting(
    context: Any, builder: ir.IRBuilder, types_: list[Matrix], values: list[Any]
) -> None:
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
