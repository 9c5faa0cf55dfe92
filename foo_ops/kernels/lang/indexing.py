"""Index views and rows: elements as ``x[i, j]``, ``x.flat[i]``, ``row[i]``; matrices as slices."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, errors, types
from numba.core.imputils import lower_getattr_generic
from numba.core.typing.templates import (
    AbstractTemplate,
    AttributeTemplate,
    infer,
    infer_getattr,
    infer_global,
    signature,
)

# Registers slices.
from numba.cpython import slicing  # noqa: F401
from numba.extending import intrinsic, lower_builtin, models, register_model

from foo_ops.kernels.compiler.kernel import WRONG_INDEX
from foo_ops.kernels.lang.views import (
    Extents,
    Flat,
    View,
    data_of,
    from_start,
    index_type,
    number_of,
    numbers_of,
    offset_of_number,
    stride_of,
)
from foo_ops.kernels.simd.memory import (
    OF_ELEMENT,
    OF_FLAT,
    OF_PRODUCT,
    OF_SHAPE,
    SIZE,
    SIZES,
    address_in,
    guarded,
    is_in,
    load_element,
    record_unless,
    store_element,
)
from foo_ops.kernels.simd.types import ELEMENTS, INT64, Pointer, Row

# ----------------------------------------------------------------------------------------- matrices

# Takes matrices out of views, for products: ``x[i:j, k:l]``, ``x[i:j]`` and ``x[b, :, h]``.
#
# An index with two slices is a `Matrix` over their dimensions; the last one may be left out, and is
# then taken whole. Slices follow Python: negative bounds count from the end, and bounds outside are
# clipped. So the last tile of a matrix is written like the others, and is smaller.
#
#     m.rows, m.columns       sizes
#     m.T                     the transpose, of the same elements


SLICED = (
    "a matrix of {} takes one or two slices without steps, and an index for each other dimension"
)
ONE_SLICE = (
    "slices have no arithmetic: compute with elements, for i in range({0}.shape[-1]): "
    "... {0}[r, i] ..., or take {0}.row(r); for language.dot, "
)


def not_a_matrix(name: str, ndim: int, slices: int) -> str:
    """Return the message that an index is not a matrix, with advice if it has one slice."""
    words = SLICED.format(f"{name or 'a tensor'} with {ndim} dimensions")
    return ONE_SLICE.format(name or "x") + words if slices == 1 else WRONG_INDEX + words


class Matrix(types.Type):
    """Elements of a view in rows and columns, at any strides.

    Attributes:
        dtype: the dtype of the elements.
        is_checked: sizes that do not fit are recorded: see foo_ops/kernels/simd/memory.py.
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


def _index_of_each_dimension(view: View, index: types.Type) -> list[types.Type]:
    """Return an index for each dimension; a missing last one is a whole slice."""
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
        parts = _index_of_each_dimension(view, index)
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
    parts = _index_of_each_dimension(type_, index)
    values = [*values, None] if len(values) < len(parts) else values
    view = args[0]
    offset, is_inside, numbers, kept = INT64(0), ir.Constant(ir.IntType(1), 1), [], []
    for dimension, (part, value) in enumerate(zip(parts, values)):
        size = number_of(builder, numbers_of(builder, view, SIZES), dimension)
        stride = stride_of(builder, type_, view, dimension)
        if _is_slice(part):
            place, count = _range_of_slice(context, builder, part, value, size)
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


def _range_of_slice(
    context: Any, builder: ir.IRBuilder, type_: types.Type, value: ir.Value | None, size: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Return the start of a slice, and its number of elements."""
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
    """Return the matrix type of a whole view of two dimensions."""
    if view.ndim != 2:
        raise errors.TypingError(f"dot: target, a and b must be matrices, but {view.described()}")
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
    """Return the matrix that begins at a row and a column; its sizes do not change."""

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
    """Record sizes that do not fit; the product then uses the smaller of each two sizes."""
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


# ----------------------------------------------------------------------------------------- elements

# Indexes views and rows: ``x[i, j]``, ``x.flat[i]``, ``row[i]`` and ``x.shape[d]``.
#
# The number of indices must be the number of dimensions, or the kernel does not compile. A negative
# constant counts from the end, as in Python. A variable does not, since that would cost each access
# a comparison: a negative variable is outside. Only a checked kernel notices (see
# foo_ops/kernels/simd/memory.py); any other accesses the memory there.


NOT_INDEXED = (
    "x.data cannot be indexed, since that would ignore strides: write x[i, j] or x.flat[i] for an "
    "element, or language.load(x.data, offset) to read memory"
)

NOT_INTEGER = "an index must be an integer, got {}; int(...) converts a float"

_ARRAYS = (Pointer, Row, View, Flat)


def refusal(message: str) -> errors.TypingError:
    return errors.TypingError(WRONG_INDEX + message)


def _parts(index: types.Type) -> Sequence[types.Type]:
    return tuple(index) if isinstance(index, types.BaseTuple) else (index,)


def _dtype(array: types.Type) -> str:
    if isinstance(array, Row):
        return array.element
    return array.view.dtype if isinstance(array, Flat) else array.dtype


def _element_type(array: types.Type, index: types.Type) -> types.Type | None:
    """Return the type of an indexed element, or None if the index is invalid."""
    if not isinstance(array, (*_ARRAYS, Extents)):
        return None
    for part in _parts(index):
        if isinstance(part, types.Float):
            raise refusal(NOT_INTEGER.format(part))
    if not all(isinstance(part, types.Integer) for part in _parts(index)):
        return None
    if isinstance(array, Extents):
        return types.int64 if isinstance(index, types.Integer) else None
    count, wanted = len(_parts(index)), array.ndim if isinstance(array, View) else 1
    if count != wanted:
        raise refusal(wrong_count(array, count))
    if isinstance(array, Row) and not array.is_indexable:
        raise refusal(NOT_INDEXED)
    return ELEMENTS[_dtype(array)].compute


def wrong_count(array: types.Type, count: int) -> str:
    """Return the message that an array does not take ``count`` indices."""
    if not isinstance(array, View):
        return f"a row or x.flat must be given one index, got {count}"
    name = array.argument or "x"
    return (
        f"{array.described()} and must be given one index for each, got {count} "
        f"({name}.row(i) is a row, {name}.flat[i] the i-th element)"
    )


def _index_type(array: types.Type, index: types.Type) -> types.Type:
    if isinstance(array, Extents) and isinstance(index, types.IntegerLiteral):
        return index
    if isinstance(index, types.BaseTuple):
        return types.BaseTuple.from_types([index_type(part) for part in index])
    return index_type(index)


@infer_global(operator.getitem)
class _GetItem(AbstractTemplate):
    prefer_literal = True

    def generic(self, args, kws):
        result = _element_type(*args)
        return signature(result, args[0], _index_type(*args)) if result is not None else None


@infer
class _RefuseDimension(AbstractTemplate):
    """Refuse a constant that is not a dimension; this is resolved before `_GetItem`."""

    key = "static_getitem"

    def generic(self, args, kws):
        extents, dimension = args
        if not isinstance(extents, Extents) or not isinstance(dimension, int):
            return
        # A view without dimensions has one row, of one element.
        if not -max(extents.view.ndim, 1) <= dimension < extents.view.ndim:
            raise refusal(f"{extents.view.described()}, got dimension {dimension}")


@infer_global(operator.setitem)
class _SetItem(AbstractTemplate):
    prefer_literal = True

    def generic(self, args, kws):
        array, index, _ = args
        if not isinstance(array, _ARRAYS):
            return None
        element = _element_type(array, index)
        if element is None:
            return None
        return signature(types.none, array, _index_type(array, index), element)


@lower_builtin(operator.getitem, Extents, types.Integer)
def _extent(context, builder, signature, args):
    view, index_type = signature.args[0].view, signature.args[1]
    if isinstance(index_type, types.IntegerLiteral):
        return _extent_at(context, builder, signature.args[0], args[0], index_type.literal_value)
    extents = cgutils.create_struct_proxy(signature.args[0])(context, builder, value=args[0])
    is_negative = builder.icmp_signed("<", args[1], INT64(0))
    index = builder.select(is_negative, builder.add(args[1], INT64(view.ndim)), args[1])
    if view.is_checked:
        is_inside = is_in(builder, index, INT64(view.ndim))
        record_unless(context, builder, is_inside, extents.view, OF_SHAPE, [args[1]])
        index = builder.select(is_inside, index, INT64(0))
    return number_of(builder, extents.numbers, index)


def _extent_at(
    context: Any, builder: ir.IRBuilder, type_: Extents, value: ir.Value, dimension: int
) -> ir.Value:
    """Return the size or stride of a constant dimension."""
    view = type_.view
    if view.ndim == 0 and dimension == -1:
        return INT64(1)
    extents = cgutils.create_struct_proxy(type_)(context, builder, value=value)
    return number_of(builder, extents.numbers, dimension % view.ndim)


# ------------------------------------------------------------------------------------- addresses


def _address(context: Any, builder: ir.IRBuilder, array: Any, index: Any, args: Any) -> ir.Value:
    value, indices = args
    is_tuple = isinstance(index, types.BaseTuple)
    given = cgutils.unpack_tuple(builder, indices) if is_tuple else [indices]
    index_types = _parts(index)
    if isinstance(array, View):
        return address_in_view(context, builder, array, value, index_types, given)
    if isinstance(array, Flat):
        return _address_in_flat(context, builder, array.view, value, index_types[0], given[0])
    place, told = given[0], None
    if isinstance(array, Row) and isinstance(index_types[0], types.IntegerLiteral):
        row = cgutils.create_struct_proxy(array)(context, builder, value=value)
        place, told = from_start(builder, index_types[0], place, row.stop), place
    return address_in(context, builder, array, value, place, told=told)


def address_in_view(
    context: Any,
    builder: ir.IRBuilder,
    array: View,
    view: ir.Value,
    index_types: Sequence[types.Type],
    given: Sequence[ir.Value],
) -> ir.Value:
    offset, is_inside = INT64(0), ir.Constant(ir.IntType(1), 1)
    for dimension, (type_, value) in enumerate(zip(index_types, given)):
        size = number_of(builder, numbers_of(builder, view, SIZES), dimension)
        index = from_start(builder, type_, value, size)
        stride = stride_of(builder, array, view, dimension)
        offset = builder.add(offset, builder.mul(index, stride))
        is_inside = builder.and_(is_inside, is_in(builder, index, size))
    address = builder.gep(data_of(context, builder, array, view), [offset])
    if not array.is_checked:
        return address
    record_unless(context, builder, is_inside, view, OF_ELEMENT, given)
    return guarded(builder, is_inside, address)


def _address_in_flat(
    context: Any,
    builder: ir.IRBuilder,
    array: View,
    view: ir.Value,
    index_type: types.Type,
    given: ir.Value,
) -> ir.Value:
    size = number_of(builder, view, SIZE)
    number = from_start(builder, index_type, given, size)
    offset = offset_of_number(builder, array, view, number, range(array.ndim))
    address = builder.gep(data_of(context, builder, array, view), [offset])
    if not array.is_checked:
        return address
    is_inside = is_in(builder, number, size)
    record_unless(context, builder, is_inside, view, OF_FLAT, [given])
    return guarded(builder, is_inside, address)


def _get_item(context, builder, signature, args):
    array, index = signature.args
    if isinstance(signature.return_type, Matrix):
        return emit_slice(context, builder, signature, args)
    address = _address(context, builder, array, index, args)
    return load_element(context, builder, _dtype(array), address)


def _set_item(context, builder, signature, args):
    array, index, _ = signature.args
    address = _address(context, builder, array, index, args[:2])
    store_element(context, builder, _dtype(array), address, args[2])
    return context.get_dummy_value()


for _array in _ARRAYS:
    for _index in (types.Integer, types.BaseTuple):
        lower_builtin(operator.getitem, _array, _index)(_get_item)
        lower_builtin(operator.setitem, _array, _index, types.Any)(_set_item)
