"""Arrays as a tile kernel sees them: where the data is, sizes and strides; and rows of them.

A `View` has any number of dimensions. Strides count elements.

    x.ndim, x.size, x.rows          the number of dimensions, of elements, and of rows
    x.shape[d], x.strides[d]        of one dimension; d may be negative
    x.data                          a `Pointer` to the first element
    x[i, j], x[i, j] = value        one element, with as many indices as dimensions
    x.row(i)                        a row: rows are what the last dimension spans, counted over all
                                    others

A row is indexed, too. With ``contiguous_rows=True`` it is a `Pointer`, to adjacent elements, which
can be read as vectors; else a `Row`, which follows the last stride. An element is read in the
compute type (see elements.py), and a value is converted to it and rounded when it is written. No
index is checked.
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
    bound_function,
    infer_getattr,
    infer_global,
    signature,
)
from numba.extending import lower_builtin, models, register_model

from foo_ops.kernels.vectors.elements import ELEMENTS
from foo_ops.kernels.vectors.instructions import INT64
from foo_ops.kernels.vectors.memory import load_element, store_element
from foo_ops.kernels.vectors.values import Pointer

# The fields of the C++ struct, each of eight bytes.
DATA, NDIM, SIZES, STRIDES, SIZE, ROWS = range(6)
NUMBERS = types.CPointer(types.int64)


class View(types.Type):
    """A pointer to the C++ struct ``View``, with elements of a dtype."""

    def __init__(self, dtype: str, contiguous_rows: bool) -> None:
        self.dtype = dtype
        self.row = Pointer(dtype) if contiguous_rows else Row(dtype)
        super().__init__(f"View({dtype}, {self.row})")


class Row(types.Type):
    """Elements of a dtype that are a stride apart."""

    def __init__(self, dtype: str) -> None:
        self.element = dtype
        super().__init__(f"Row({dtype})")

    @property
    def dtype(self) -> str:
        """Refuse functions of vectors, which ask a pointer for its dtype."""
        raise errors.TypingError(
            "a row has a stride, and is no pointer to vectors, unless tile_kernel is given "
            "contiguous_rows=True"
        )


class Extents(types.Type):
    """The sizes or the strides of a view."""

    def __init__(self) -> None:
        super().__init__("Extents")


EXTENTS = Extents()


@register_model(View)
class _ViewModel(models.PrimitiveModel):
    def __init__(self, manager: Any, type_: View) -> None:
        super().__init__(manager, type_, INT64.as_pointer())


@register_model(Row)
class _RowModel(models.StructModel):
    def __init__(self, manager: Any, type_: Row) -> None:
        super().__init__(
            manager, type_, [("data", Pointer(type_.element)), ("stride", types.int64)]
        )


@register_model(Extents)
class _ExtentsModel(models.StructModel):
    def __init__(self, manager: Any, type_: Extents) -> None:
        super().__init__(manager, type_, [("numbers", NUMBERS), ("count", types.int64)])


# ----------------------------------------------------------------------------------- attributes


@infer_getattr
class _ViewAttributes(AttributeTemplate):
    key = View

    def resolve_ndim(self, view: View) -> types.Type:
        return types.int64

    def resolve_size(self, view: View) -> types.Type:
        return types.int64

    def resolve_rows(self, view: View) -> types.Type:
        return types.int64

    def resolve_shape(self, view: View) -> types.Type:
        return EXTENTS

    def resolve_strides(self, view: View) -> types.Type:
        return EXTENTS

    def resolve_data(self, view: View) -> types.Type:
        return Pointer(view.dtype)

    @bound_function("foo_ops.View.row")
    def resolve_row(self, view: View, args: Any, kws: Any) -> Any:
        if len(args) != 1 or kws or not isinstance(args[0], types.Integer):
            return None
        return signature(view.row, types.int64, recvr=view)


def _field(builder: ir.IRBuilder, view: ir.Value, position: int) -> ir.Value:
    return _constant(builder, view, INT64(position))


def _constant(builder: ir.IRBuilder, numbers: ir.Value, index: ir.Value) -> ir.Value:
    """Load one of the numbers that describe an array, which stay the same during a call.

    LLVM has to be told so, or each element that is written might change them: a loop with
    ``weight.data[i]`` would not be vectorised, and take 5 to 10 times as long.
    """
    number = builder.load(builder.gep(numbers, [index]))
    number.set_metadata("invariant.load", builder.module.add_metadata([]))
    return number


def _numbers(builder: ir.IRBuilder, view: ir.Value, position: int) -> ir.Value:
    return builder.inttoptr(_field(builder, view, position), INT64.as_pointer())


def _data(context: Any, builder: ir.IRBuilder, type_: View, view: ir.Value) -> ir.Value:
    pointer = context.get_value_type(Pointer(type_.dtype))
    return builder.inttoptr(_field(builder, view, DATA), pointer)


@lower_getattr_generic(View)
def _get_attribute(context, builder, type_, view, name):
    number = {"ndim": NDIM, "size": SIZE, "rows": ROWS}.get(name)
    if number is not None:
        return _field(builder, view, number)
    if name == "data":
        return _data(context, builder, type_, view)
    extents = cgutils.create_struct_proxy(EXTENTS)(context, builder)
    extents.numbers = _numbers(builder, view, SIZES if name == "shape" else STRIDES)
    extents.count = _field(builder, view, NDIM)
    return extents._getvalue()


@lower_builtin("foo_ops.View.row", View, types.Integer)
def _row(context, builder, signature, args):
    view, row = args
    sizes, strides = (_numbers(builder, view, field) for field in (SIZES, STRIDES))
    rest = cgutils.alloca_once_value(builder, row)
    offset = cgutils.alloca_once_value(builder, INT64(0))
    outer = builder.sub(_field(builder, view, NDIM), INT64(1))

    def add(index: ir.Value, dimension: ir.Value) -> None:
        stride = _constant(builder, strides, dimension)
        builder.store(builder.add(builder.load(offset), builder.mul(index, stride)), offset)

    # From the last but one dimension on; the first needs no division, which takes 10 ns.
    with cgutils.for_range_slice(
        builder, builder.sub(outer, INT64(1)), INT64(0), INT64(-1), inc=False
    ) as (dimension, _):
        size = _constant(builder, sizes, dimension)
        number = builder.load(rest)
        add(builder.srem(number, size), dimension)
        builder.store(builder.sdiv(number, size), rest)
    with builder.if_then(builder.icmp_signed(">", outer, INT64(0))):
        add(builder.load(rest), INT64(0))
    data = builder.gep(_data(context, builder, signature.args[0], view), [builder.load(offset)])
    if isinstance(signature.return_type, Pointer):
        return data
    result = cgutils.create_struct_proxy(signature.return_type)(context, builder)
    result.data = data
    # A view without dimensions has one row, of one element.
    last = builder.select(builder.icmp_signed("<", outer, INT64(0)), INT64(0), outer)
    result.stride = _constant(builder, strides, last)
    return result._getvalue()


@infer_global(len)
class _ExtentsLength(AbstractTemplate):
    def generic(self, args, kws):
        return signature(types.int64, *args) if args == (EXTENTS,) else None


@lower_builtin(len, Extents)
def _length(context, builder, signature, args):
    return cgutils.create_struct_proxy(EXTENTS)(context, builder, value=args[0]).count


# ------------------------------------------------------------------------------------- elements


def _is_index(type_: types.Type) -> bool:
    if isinstance(type_, types.BaseTuple):
        return all(isinstance(part, types.Integer) for part in type_)
    return isinstance(type_, types.Integer)


def _element_type(array: types.Type, index: types.Type) -> types.Type | None:
    """Return the type of what an index gives, or None where it cannot be one."""
    if array == EXTENTS:
        return types.int64 if isinstance(index, types.Integer) else None
    if isinstance(array, (Pointer, Row)):
        return ELEMENTS[_dtype(array)].compute if isinstance(index, types.Integer) else None
    if isinstance(array, View) and _is_index(index):
        return ELEMENTS[array.dtype].compute
    return None


def _dtype(array: types.Type) -> str:
    return array.element if isinstance(array, Row) else array.dtype


def _index_type(index: types.Type) -> types.Type:
    if isinstance(index, types.BaseTuple):
        return types.UniTuple(types.int64, len(index))
    return types.int64


@infer_global(operator.getitem)
class _GetItem(AbstractTemplate):
    def generic(self, args, kws):
        result = _element_type(*args)
        return signature(result, args[0], _index_type(args[1])) if result is not None else None


@infer_global(operator.setitem)
class _SetItem(AbstractTemplate):
    def generic(self, args, kws):
        array, index, _ = args
        if not isinstance(array, (Pointer, Row, View)):
            return None
        element = _element_type(array, index)
        if element is None:
            return None
        return signature(types.none, array, _index_type(index), element)


@lower_builtin(operator.getitem, Extents, types.Integer)
def _extent(context, builder, signature, args):
    extents = cgutils.create_struct_proxy(EXTENTS)(context, builder, value=args[0])
    is_negative = builder.icmp_signed("<", args[1], INT64(0))
    index = builder.select(is_negative, builder.add(args[1], extents.count), args[1])
    return _constant(builder, extents.numbers, index)


def _address(context: Any, builder: ir.IRBuilder, array: Any, index: Any, args: Any) -> ir.Value:
    if isinstance(array, Pointer):
        return builder.gep(args[0], [args[1]])
    if isinstance(array, Row):
        row = cgutils.create_struct_proxy(array)(context, builder, value=args[0])
        return builder.gep(row.data, [builder.mul(args[1], row.stride)])
    strides = _numbers(builder, args[0], STRIDES)
    is_tuple = isinstance(index, types.BaseTuple)
    indices = cgutils.unpack_tuple(builder, args[1]) if is_tuple else [args[1]]
    offset = INT64(0)
    for dimension, value in enumerate(indices):
        stride = _constant(builder, strides, INT64(dimension))
        offset = builder.add(offset, builder.mul(value, stride))
    return builder.gep(_data(context, builder, array, args[0]), [offset])


def _get_item(context, builder, signature, args):
    array, index = signature.args
    address = _address(context, builder, array, index, args)
    return load_element(context, builder, _dtype(array), address)


def _set_item(context, builder, signature, args):
    array, index, _ = signature.args
    address = _address(context, builder, array, index, args)
    store_element(context, builder, _dtype(array), address, args[2])
    return context.get_dummy_value()


for _array in (Pointer, Row, View):
    for _index in (types.Integer, types.UniTuple):
        lower_builtin(operator.getitem, _array, _index)(_get_item)
        lower_builtin(operator.setitem, _array, _index, types.Any)(_set_item)
