"""Arguments of a user's kernel: numbers, texts, elements of tensors, views and lists."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, errors, types
from numba.core.imputils import RefType, iternext_impl
from numba.core.typing.templates import AbstractTemplate, infer, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

from foo_ops.kernels.compiler.numba_target.constants import Text
from foo_ops.kernels.lang.indexing import NOT_INTEGER, address_in_view, refusal
from foo_ops.kernels.lang.views import View, from_start, index_type, number_of, numbers_of
from foo_ops.kernels.simd.memory import (
    OF_LIST,
    OUTSIDE,
    SIZE,
    is_in,
    load_element,
    record_unless,
    store_element,
)
from foo_ops.kernels.simd.narrow import emit_first_of_pairs, emit_pair, emit_second_of_pairs
from foo_ops.kernels.simd.types import DOUBLE, ELEMENTS, INT32, INT64, Pointer

# -------------------------------------------------------------------------------------------- lists

# Lists of numbers and of tensors as a kernel sees them: ``items[i]``, ``len(items)``, loops.
#
# A list of numbers whose length is in the schema can be unpacked: ``rows, columns = kernel_size``.
# Indices follow views: a negative constant counts from the end, and only a checked kernel notices
# an index that is outside (see foo_ops/kernels/lang/indexing.py).


# The fields of the C++ struct ViewList.
FIRST, LENGTH = range(2)


class List(types.Type):
    """A list whose items are only read.

    Attributes:
        view: the type of the list's own view, or of a tensor's.
        element: the type of an item.
        count: the number of items, if known at compile time.
    """

    def __init__(self, view: View, element: types.Type, count: int | None = None) -> None:
        self.view = view
        self.element = element
        self.count = count
        size = "" if count is None else f" x {count}"
        super().__init__(f"{type(self).__name__}({view}, {element}{size})")


class Numbers(List):
    """A pointer to the C++ struct ``View`` of a list of 8-byte numbers."""


class FixedNumbers(Numbers, types.IterableType):
    """A list of known length, which Numba can unpack."""

    @property
    def iterator_type(self) -> ListIterator:
        return ListIterator(self)


class Tensors(List):
    """A pointer to the C++ struct ``ViewList``: views of one dtype and number of dimensions."""

    def __init__(self, view: View) -> None:
        super().__init__(view, view)


class ListIterator(types.SimpleIteratorType):
    """The iterator of a loop over a list."""

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
    """Refuse a constant that is not an index; this is resolved before `_GetItem`."""

    key = "static_getitem"

    def generic(self, args, kws):
        list_, index = args
        if not isinstance(list_, List) or not isinstance(index, int) or list_.count is None:
            return
        if not -list_.count <= index < list_.count:
            name = list_.view.argument or "the list"
            raise refusal(f"{name} has {list_.count} numbers, got index {index}")


@infer_global(operator.setitem)
class _RefuseToWrite(AbstractTemplate):
    def generic(self, args, kws):
        if isinstance(args[0], List):
            raise errors.TypingError("the items of a list cannot be written")


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


# ---------------------------------------------------------------------------------------- arguments

# Reads the arguments of a user's function from those of a launcher: elements of tensors, and eight
# bytes for each other argument, which hold a number or the address of a larger value.


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument of the scalar function: an element of an input, another value, or None."""

    type: types.Type
    # Position among the inputs, or among the other arguments, where missing ones count too.
    position: int
    # The dtype of an input; None for other arguments.
    dtype: str | None = None


def make_scalar_reader(arguments: list[Argument]) -> Callable:
    """Make the function that returns a tuple of a call's arguments that are not elements."""
    scalars = [a for a in arguments if a.dtype is None and a.type != types.none]
    values_type = types.Tuple([a.type for a in scalars])

    @intrinsic
    def scalars_at(typing_context, numbers):
        def generate(context, builder, signature, args):
            values = []
            for scalar in scalars:
                bits = builder.load(builder.gep(args[0], [INT64(scalar.position)]))
                values.append(_value(context, builder, scalar.type, bits))
            return context.make_tuple(builder, values_type, values)

        return values_type(numbers), generate

    return scalars_at


def _value(context: Any, builder: ir.IRBuilder, type_: types.Type, bits: ir.Value) -> ir.Value:
    """Convert eight bytes from a launcher into a value of ``type_``."""
    if isinstance(type_, (types.NoneType, Text)):
        return context.get_constant_null(type_)
    if isinstance(type_, (View, List)):
        return builder.inttoptr(bits, context.get_value_type(type_))
    if type_ == types.boolean:
        return builder.icmp_unsigned("!=", bits, bits.type(0))
    if isinstance(type_, types.Float):
        double = builder.bitcast(bits, DOUBLE)
        return context.cast(builder, double, types.float64, type_)
    if isinstance(type_, types.Complex):
        return _complex_at(context, builder, type_, bits)
    return context.cast(builder, bits, types.int64, type_)


def _complex_at(
    context: Any, builder: ir.IRBuilder, type_: types.Type, address: ir.Value
) -> ir.Value:
    parts = builder.inttoptr(address, DOUBLE.as_pointer())
    number = cgutils.create_struct_proxy(types.complex128)(context, builder)
    number.real = builder.load(parts)
    number.imag = builder.load(builder.gep(parts, [INT64(1)]))
    return context.cast(builder, number._getvalue(), types.complex128, type_)


def make_element_reader(arguments: list[Argument]) -> Callable:
    """Make the function that returns the scalar function's arguments for an element, as a tuple."""
    values_type = types.Tuple([a.type for a in arguments])

    @intrinsic
    def arguments_of(typing_context, inputs, scalars, index):
        def generate(context, builder, signature, args):
            elements = []
            for position, pointer in enumerate(inputs):
                address = builder.gep(builder.extract_value(args[0], position), [args[2]])
                elements.append(load_element(context, builder, pointer.dtype, address))
            values = _with_scalars(context, builder, arguments, elements, args[1])
            return context.make_tuple(builder, values_type, values)

        return values_type(inputs, scalars, types.intp), generate

    return arguments_of


def make_pair_reader(arguments: list[Argument]) -> Callable:
    """Make the function that returns two such tuples, for a pair of adjacent bfloat16 elements.

    A pair is read at once and taken apart by a shift and a mask. Reading and rounding elements one
    by one would take two more instructions for each in vectorised loops.
    """
    values_type = types.Tuple([a.type for a in arguments])

    @intrinsic
    def pair_of(typing_context, inputs, scalars, pair):
        result = types.UniTuple(values_type, 2)

        def generate(context, builder, signature, args):
            pairs = [
                builder.load(_pair_at(builder, args[0], position, args[2]), align=2)
                for position in range(len(inputs))
            ]
            both = []
            for emit_part in (emit_first_of_pairs, emit_second_of_pairs):
                elements = [emit_part(builder, pair) for pair in pairs]
                values = _with_scalars(context, builder, arguments, elements, args[1])
                both.append(context.make_tuple(builder, values_type, values))
            return context.make_tuple(builder, result, both)

        return result(inputs, scalars, types.intp), generate

    return pair_of


def _pair_at(builder: ir.IRBuilder, pointers: ir.Value, position: int, pair: ir.Value) -> ir.Value:
    pairs = builder.bitcast(builder.extract_value(pointers, position), INT32.as_pointer())
    return builder.gep(pairs, [pair])


def _with_scalars(
    context: Any,
    builder: ir.IRBuilder,
    arguments: list[Argument],
    elements: Sequence[ir.Value],
    scalars: ir.Value,
) -> list[ir.Value]:
    """Merge the inputs' elements and the other arguments, in the function's order."""
    values, places = [], itertools.count()
    for argument in arguments:
        if argument.dtype is not None:
            values.append(elements[argument.position])
        elif argument.type == types.none:
            values.append(context.get_dummy_value())
        else:
            values.append(builder.extract_value(scalars, next(places)))
    return values


@intrinsic(prefer_literal=True)
def take(typing_context, pointer, start, count):
    """Read ``count`` numbers at a pointer into a tuple: once, not in every step of a loop."""
    numbers = types.UniTuple(pointer.dtype, count.literal_value)

    def generate(context, builder, signature, args):
        first = start.literal_value
        values = [
            builder.load(builder.gep(args[0], [INT64(position)]))
            for position in range(first, first + numbers.count)
        ]
        return context.make_tuple(builder, numbers, values)

    return numbers(pointer, start, count), generate


def make_row_pointers(dtypes: tuple[str, ...], chosen: range) -> Callable:
    """Make the function that returns a tuple of operands' pointers at the start of a row."""
    pointers = types.Tuple([Pointer(dtypes[position]) for position in chosen])

    @intrinsic
    def pointers_at(typing_context, data, strides, row):
        def generate(context, builder, signature, args):
            data, strides, row = args
            values = []
            for position, pointer in zip(chosen, pointers):
                start = builder.load(builder.gep(data, [row.type(position)]))
                stride = builder.load(builder.gep(strides, [row.type(len(dtypes) + position)]))
                address = builder.add(start, builder.mul(row, stride))
                values.append(builder.inttoptr(address, context.get_value_type(pointer)))
            return context.make_tuple(builder, pointers, values)

        return pointers(data, strides, types.int64), generate

    return pointers_at


@intrinsic
def moved(typing_context, pointers, strides, index):
    """Move each pointer on by ``index`` times its stride in bytes."""

    def generate(context, builder, signature, args):
        values = []
        for position in range(len(pointers)):
            start = builder.extract_value(args[0], position)
            offset = builder.mul(args[2], builder.extract_value(args[1], position))
            address = builder.add(builder.ptrtoint(start, offset.type), offset)
            values.append(builder.inttoptr(address, start.type))
        return context.make_tuple(builder, pointers, values)

    return pointers(pointers, strides, types.intp), generate


@intrinsic
def store_each(typing_context, pointers, index, values):
    """Store one value for each pointer, rounded to its dtype."""
    given = _values_for(pointers, values)

    def generate(context, builder, signature, args):
        for position, pointer in enumerate(pointers):
            address = builder.gep(builder.extract_value(args[0], position), [args[1]])
            value = _value_of(builder, given, args[2], position)
            store_element(context, builder, pointer.dtype, address, value)
        return context.get_dummy_value()

    return types.void(pointers, types.intp, given), generate


@intrinsic
def store_pair(typing_context, pointers, pair, firsts, seconds):
    """Store two adjacent values for each pointer to bfloat16."""
    given = _values_for(pointers, firsts)

    def generate(context, builder, signature, args):
        for position in range(len(pointers)):
            both = (_value_of(builder, given, values, position) for values in args[2:])
            address = _pair_at(builder, args[0], position, args[1])
            builder.store(emit_pair(builder, *both), address, align=2)
        return context.get_dummy_value()

    return types.void(pointers, types.intp, given, given), generate


def wrong_number(wanted: int, given: int) -> str:
    """Return the message that a kernel does not return one value for each result."""
    values = "1 value" if wanted == 1 else f"{wanted} values"
    return f"the kernel must return {values}, one for each result, got {given}"


def _values_for(pointers: types.BaseTuple, values: types.Type) -> types.Type:
    """Return the type in which a function's value, or each of several, is stored."""
    computed = types.Tuple([ELEMENTS[pointer.dtype].compute for pointer in pointers])
    several = isinstance(values, types.BaseTuple)
    if (len(values) if several else 1) != len(computed):
        raise errors.TypingError(wrong_number(len(computed), len(values) if several else 1))
    for value, pointer in zip(values if several else (values,), pointers):
        if not isinstance(value, (types.Number, types.Boolean)):
            raise errors.TypingError(f"the kernel must return numbers, got {value}")
        if not _can_hold(ELEMENTS[pointer.dtype].compute, value):
            is_rounded = isinstance(value, types.Float) and pointer.dtype.startswith(
                ("int", "uint")
            )
            advice = "; int(...) converts a float" if is_rounded else ""
            raise errors.TypingError(
                f"the kernel must return {pointer.dtype}, got {types.unliteral(value)}{advice}"
            )
    return computed if several else computed[0]


def _value_of(
    builder: ir.IRBuilder, given: types.Type, values: ir.Value, position: int
) -> ir.Value:
    is_tuple = isinstance(given, types.BaseTuple)
    return builder.extract_value(values, position) if is_tuple else values


def make_picker(chosen: Sequence[int], count: int) -> Callable:
    """Make the function that returns some of a scalar function's values."""

    @intrinsic
    def picked(typing_context, values):
        if len(chosen) == count:
            return values(values), lambda context, builder, signature, args: args[0]
        if not isinstance(values, types.BaseTuple) or len(values) != count:
            given = len(values) if isinstance(values, types.BaseTuple) else 1
            raise errors.TypingError(wrong_number(count, given))
        types_ = [values[position] for position in chosen]

        def generate(context, builder, signature, args):
            taken = [builder.extract_value(args[0], position) for position in chosen]
            return context.make_tuple(builder, types.Tuple(types_), taken)

        return types.Tuple(types_)(values), generate

    return picked


def _can_hold(target: types.Type, value: types.Type) -> bool:
    """Whether a result can hold a number: integers hold no fractions, reals no complex numbers."""
    if isinstance(value, types.Complex):
        return isinstance(target, types.Complex)
    # Numba promotes uint64 and int64 to float64.
    takes_fractions = isinstance(target, (types.Float, types.Complex)) or target == types.uint64
    return takes_fractions or not isinstance(value, types.Float)


def make_argument_reader(
    argument_types: Sequence[types.Type], positions: Sequence[int]
) -> Callable:
    """Make the function that returns a tuple of some arguments' values."""
    values_type = types.Tuple([argument_types[position] for position in positions])

    @intrinsic
    def arguments_at(typing_context, numbers):
        def generate(context, builder, signature, args):
            values = []
            for position, type_ in zip(positions, values_type):
                bits = builder.load(builder.gep(args[0], [INT64(position)]))
                values.append(_value(context, builder, type_, bits))
            return context.make_tuple(builder, values_type, values)

        return values_type(numbers), generate

    return arguments_at


# --------------------------------------------------------------------------------------- signatures

# Reads the arguments of a user's function from a signature.
#
# Each argument has a kind, followed by "?" if it may be missing:
#
#     tensor      a tensor of the common dtype in an elementwise kernel; a view in a tile kernel
#     tensors     a list of tensors of one dtype and number of dimensions in a tile kernel
#     own         a tensor that has its own dtype in an elementwise kernel
#     float int bool generator    a number; a generator is passed as a seed
#     scalar      a number in the compute type of the tensors
#     ints floats ints[2]         a list of numbers; [2] is its length
#     text dtype  a constant
#     scratch     scratch memory of a tile kernel
#
# A signature has a code for each property that a kernel is compiled for: see
# foo_ops/csrc/launch/kernel_table.h.


ABSENT, GIVEN = "none", "given"

_NUMBERS = {"int": types.int64, "bool": types.boolean, "generator": types.int64}
_LISTS = {"ints": "int64", "floats": "float64"}


def code_of(kind: str, rest: Iterator[str], coded: tuple[str, ...] = ("own",)) -> str:
    """Take the code of an argument from a signature, or return GIVEN if it has none.

    Args:
        kind: the argument's kind.
        rest: the codes from this argument on.
        coded: the kinds of tensors that have codes.
    """
    base_kind = kind.removesuffix("?")
    return next(rest) if base_kind != kind or base_kind in ("text", "dtype", *coded) else GIVEN


def type_of_value(
    kind: str,
    code: str,
    floats: types.Type,
    compute: types.Type | None,
    is_checked: bool,
    name: str = "",
) -> types.Type:
    """Return the type of an argument that is not missing and not a tensor.

    Args:
        kind: the argument's kind, without "?".
        code: its code in the signature.
        floats: the type in which floats are passed.
        compute: the type in which a Scalar is passed.
        is_checked: indices of lists are checked.
        name: the argument's name in the function, for messages.
    """
    if kind == "text":
        return Text(code[1:-1])
    if kind == "dtype":
        return Text(code)
    if kind == "scalar":
        return compute
    list_, _, count = kind.partition("[")
    if list_ in _LISTS:
        element = floats if list_ == "floats" else types.int64
        size = int(count[:-1]) if count else None
        return numbers_type(_LISTS[list_], element, size, is_checked, name)
    return floats if kind == "float" else _NUMBERS[kind]
