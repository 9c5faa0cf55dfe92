"""Index views and rows: ``x[i, j]``, ``x.flat[i]``, ``row[i]`` and ``x.shape[d]``.

A number of indices other than that of the dimensions does not compile. A negative constant counts
from the end, as in Python. A variable does not, as that would cost each access a comparison: where
it is negative, it is outside. Only a kernel that is checked notices (see bounds.py); any other one
reads and writes what lies there.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, errors, types
from numba.core.typing.templates import AbstractTemplate, infer, infer_global, signature
from numba.extending import lower_builtin

from foo_ops.kernels.compiler.kernel import WRONG_INDEX
from foo_ops.kernels.vectors.bounds import (
    OF_ELEMENT,
    OF_FLAT,
    OF_SHAPE,
    SIZE,
    SIZES,
    address_in,
    guarded,
    is_in,
    record_unless,
)
from foo_ops.kernels.vectors.elements import ELEMENTS
from foo_ops.kernels.vectors.instructions import INT64
from foo_ops.kernels.vectors.matrices import Matrix, emit_slice
from foo_ops.kernels.vectors.memory import load_element, store_element
from foo_ops.kernels.vectors.values import Pointer, Row
from foo_ops.kernels.vectors.views import (
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

NOT_INDEXED = (
    "x.data is memory, and not indexed, since that would ignore strides: x[i, j] and x.flat[i] are "
    "elements, and language.load(x.data, offset) is what lies there"
)

NOT_INTEGER = "an index must be an integer, got {}; int(...) makes one of a float"

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
    """Return the type of what an index gives, or None where it cannot be one."""
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
    """Say that an array cannot be given so many indices."""
    if not isinstance(array, View):
        return f"a row or x.flat must be given one index, got {count}"
    name = array.argument or "x"
    return (
        f"{array.described()} and must be given as many indices, got {count} "
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
    """Refuse a constant that is no dimension, before `_GetItem` finds out what the others are."""

    key = "static_getitem"

    def generic(self, args, kws):
        extents, dimension = args
        if not isinstance(extents, Extents) or not isinstance(dimension, int):
            return
        # A view without dimensions has a row, of one element.
        if not -max(extents.view.ndim, 1) <= dimension < extents.view.ndim:
            raise refusal(f"{extents.view.described()}, and none at {dimension}")


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
    """Return a size or a stride at a constant."""
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
