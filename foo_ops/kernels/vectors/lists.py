"""Lists of numbers and of tensors as a kernel sees them: ``items[i]``, ``len(items)``, loops.

One of numbers whose length the schema says is unpacked, too: ``rows, columns = kernel_size``. An
index is that of a view: a negative constant counts from the end, and only a kernel that is checked
notices one that is outside (see items.py).
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba.core import cgutils, errors, types
from numba.core.imputils import RefType, iternext_impl
from numba.core.typing.templates import AbstractTemplate, infer, infer_global, signature
from numba.extending import lower_builtin, models, register_model

from foo_ops.kernels.vectors.bounds import OF_LIST, OUTSIDE, SIZE, is_in, record_unless
from foo_ops.kernels.vectors.instructions import INT64
from foo_ops.kernels.vectors.items import NOT_INTEGER, address_in_view, refusal
from foo_ops.kernels.vectors.views import View, from_start, index_type, number_of, numbers_of

# The fields of the C++ struct ViewList.
FIRST, LENGTH = range(2)


class List(types.Type):
    """A list whose items are only read.

    Attributes:
        view: the type of its own view, or of a tensor's.
        element: what an item is.
        count: how many there are, where that is known.
    """

    def __init__(self, view: View, element: types.Type, count: int | None = None) -> None:
        self.view = view
        self.element = element
        self.count = count
        size = "" if count is None else f" x {count}"
        super().__init__(f"{type(self).__name__}({view}, {element}{size})")


class Numbers(List):
    """A pointer to the C++ struct ``View`` of a list, whose numbers are of eight bytes."""


class FixedNumbers(Numbers, types.IterableType):
    """A list whose length is known, which Numba unpacks."""

    @property
    def iterator_type(self) -> ListIterator:
        return ListIterator(self)


class Tensors(List):
    """A pointer to the C++ struct ``ViewList``: views of one dtype and number of dimensions."""

    def __init__(self, view: View) -> None:
        super().__init__(view, view)


class ListIterator(types.SimpleIteratorType):
    """What a loop over a list takes its items from."""

    def __init__(self, list_: List) -> None:
        self.list = list_
        super().__init__(f"iterator of {list_}", list_.element)


def numbers_type(
    dtype: str, element: types.Type, count: int | None, checked: bool, name: str
) -> Any:
    """Make the type of a list of int64 or float64."""
    view = View(dtype, 1, True, checked, name)
    return Numbers(view, element, None) if count is None else FixedNumbers(view, element, count)


class _ListModel(models.PrimitiveModel):
    def __init__(self, manager: Any, type_: List) -> None:
        super().__init__(manager, type_, INT64.as_pointer())


for _list in (Numbers, FixedNumbers, Tensors):
    register_model(_list)(_ListModel)


@register_model(ListIterator)
class _IteratorModel(models.StructModel):
    def __init__(self, manager: Any, type_: ListIterator) -> None:
        members = [("list", type_.list), ("next", types.CPointer(types.int64))]
        super().__init__(manager, type_, members)


@infer_global(operator.getitem)
class _GetItem(AbstractTemplate):
    prefer_literal = True

    def generic(self, args, kws):
        list_, index = args
        if not isinstance(list_, List):
            return None
        if isinstance(index, types.Float):
            raise refusal(NOT_INTEGER.format(index))
        if not isinstance(index, types.Integer):
            return None
        return signature(list_.element, list_, index_type(index))


@infer
class _RefuseConstant(AbstractTemplate):
    """Refuse a constant that is no index, before `_GetItem` finds out what the others are."""

    key = "static_getitem"

    def generic(self, args, kws):
        list_, index = args
        if not isinstance(list_, List) or not isinstance(index, int) or list_.count is None:
            return
        if not -list_.count <= index < list_.count:
            name = list_.view.argument or "the list"
            raise refusal(f"{name} has {list_.count} numbers, and none at {index}")


@infer_global(operator.setitem)
class _RefuseToWrite(AbstractTemplate):
    def generic(self, args, kws):
        if isinstance(args[0], List):
            raise errors.TypingError("the items of a list are only read")


@infer_global(len)
class _Length(AbstractTemplate):
    def generic(self, args, kws):
        return signature(types.int64, *args) if isinstance(args[0], List) else None


@infer
class _Iterate(AbstractTemplate):
    key = "getiter"

    def generic(self, args, kws):
        return signature(ListIterator(args[0]), *args) if isinstance(args[0], List) else None


def _length_of(builder: ir.IRBuilder, type_: List, value: ir.Value) -> ir.Value:
    if type_.count is not None:
        return INT64(type_.count)
    return number_of(builder, value, LENGTH if isinstance(type_, Tensors) else SIZE)


def _item_at(
    context: Any,
    builder: ir.IRBuilder,
    type_: List,
    value: ir.Value,
    index_type: types.Type,
    index: ir.Value,
) -> ir.Value:
    if isinstance(type_, Tensors):
        return _view_at(context, builder, type_, value, index_type, index)
    address = address_in_view(context, builder, type_.view, value, [index_type], [index])
    number = builder.load(address)
    number.set_metadata("invariant.load", builder.module.add_metadata([]))
    return context.cast(builder, number, getattr(types, type_.view.dtype), type_.element)


def _view_at(
    context: Any,
    builder: ir.IRBuilder,
    type_: Tensors,
    value: ir.Value,
    index_type: types.Type,
    index: ir.Value,
) -> ir.Value:
    size = _length_of(builder, type_, value)
    position = from_start(builder, index_type, index, size)
    first = numbers_of(builder, value, FIRST)
    if type_.view.is_checked:
        is_inside = is_in(builder, position, size)
        record_unless(context, builder, is_inside, first, OF_LIST, [index, size])
        position = builder.select(is_inside, position, INT64(0))
    return builder.gep(first, [builder.mul(position, INT64(OUTSIDE + 1))])


@lower_builtin(len, List)
def _length(context, builder, signature, args):
    return _length_of(builder, signature.args[0], args[0])


@lower_builtin(operator.getitem, List, types.Integer)
def _get_item(context, builder, signature, args):
    list_, index = signature.args
    return _item_at(context, builder, list_, args[0], index, args[1])


@lower_builtin("getiter", List)
def _get_iterator(context, builder, signature, args):
    iterator = cgutils.create_struct_proxy(signature.return_type)(context, builder)
    iterator.list = args[0]
    iterator.next = cgutils.alloca_once_value(builder, INT64(0))
    builder.store(INT64(0), iterator.next)
    return iterator._getvalue()


@lower_builtin("iternext", ListIterator)
@iternext_impl(RefType.UNTRACKED)
def _next(context, builder, signature, args, result):
    list_ = signature.args[0].list
    iterator = cgutils.create_struct_proxy(signature.args[0])(context, builder, value=args[0])
    index = builder.load(iterator.next)
    is_valid = builder.icmp_signed("<", index, _length_of(builder, list_, iterator.list))
    result.set_valid(is_valid)
    with builder.if_then(is_valid):
        builder.store(builder.add(index, INT64(1)), iterator.next)
        result.yield_(_item_at(context, builder, list_, iterator.list, types.int64, index))
