"""Read the arguments of a user's function from what a launcher hands over: elements of tensors, and
eight bytes for each other argument, which are a number or the address of what is larger.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, errors, types
from numba.extending import intrinsic

from foo_ops.kernels.compiler.numba_target.texts import Text
from foo_ops.kernels.vectors.elements import ELEMENTS
from foo_ops.kernels.vectors.instructions import DOUBLE, INT32, INT64
from foo_ops.kernels.vectors.lists import List
from foo_ops.kernels.vectors.memory import load_element, store_element
from foo_ops.kernels.vectors.pairs import emit_first_of_pairs, emit_pair, emit_second_of_pairs
from foo_ops.kernels.vectors.values import Pointer
from foo_ops.kernels.vectors.views import View


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument of the scalar function: an element of an input, another value, or None."""

    type: types.Type
    # Among the inputs or the other arguments, of which missing ones have a place as well.
    position: int
    # Of an input.
    dtype: str | None = None


def make_scalar_reader(arguments: list[Argument]) -> Callable:
    """Make the function that gives a tuple with the values of a call that are no elements."""
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
    """Convert the eight bytes that a launcher hands over into a value of a type."""
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
    """Make the function that gives a tuple with the scalar function's arguments for an element."""
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
    """Make the function that gives two such tuples, for a pair of adjacent elements of bfloat16.

    Read at once, they are taken apart by a shift and a mask. Elements that are read one by one, and
    rounded so, take two more instructions each where loops are vectorised.
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
    """Put the elements of inputs among the other arguments, in the order of the function's."""
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
    """Read ``count`` numbers at a pointer into a tuple: once, and not in every step."""
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
    """Make the function that gives a tuple with operands' pointers at the start of a row."""
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


def _values_for(pointers: types.BaseTuple, values: types.Type) -> types.Type:
    """Return the type in which a function's values are stored, one or several."""
    computed = types.Tuple([ELEMENTS[pointer.dtype].compute for pointer in pointers])
    several = isinstance(values, types.BaseTuple)
    if (len(values) if several else 1) != len(computed):
        raise errors.TypingError(
            f"the kernel returns {len(values) if several else 1} values, "
            f"and the operator {len(computed)}"
        )
    for value, pointer in zip(values if several else (values,), pointers):
        if not isinstance(value, (types.Number, types.Boolean)):
            raise errors.TypingError(f"the kernel returns {value}, which is no number")
        if not _can_hold(ELEMENTS[pointer.dtype].compute, value):
            is_rounded = isinstance(value, types.Float) and pointer.dtype.startswith(
                ("int", "uint")
            )
            advice = "; int(...) makes an integer of a float" if is_rounded else ""
            raise errors.TypingError(
                f"the kernel returns {types.unliteral(value)}, and the operator {pointer.dtype}, "
                f"which cannot hold it{advice}"
            )
    return computed if several else computed[0]


def _value_of(
    builder: ir.IRBuilder, given: types.Type, values: ir.Value, position: int
) -> ir.Value:
    is_tuple = isinstance(given, types.BaseTuple)
    return builder.extract_value(values, position) if is_tuple else values


def make_picker(chosen: Sequence[int], count: int) -> Callable:
    """Make the function that gives some of the values that a scalar function returns."""

    @intrinsic
    def picked(typing_context, values):
        if len(chosen) == count:
            return values(values), lambda context, builder, signature, args: args[0]
        if not isinstance(values, types.BaseTuple) or len(values) != count:
            given = len(values) if isinstance(values, types.BaseTuple) else 1
            raise errors.TypingError(f"the kernel returns {given} values, and the operator {count}")
        types_ = [values[position] for position in chosen]

        def generate(context, builder, signature, args):
            taken = [builder.extract_value(args[0], position) for position in chosen]
            return context.make_tuple(builder, types.Tuple(types_), taken)

        return types.Tuple(types_)(values), generate

    return picked


def _can_hold(target: types.Type, value: types.Type) -> bool:
    """Whether a result takes a number; an integer one takes no fractions, a real one no complex."""
    if isinstance(value, types.Complex):
        return isinstance(target, types.Complex)
    # Numba promotes uint64 and int64 to float64.
    takes_fractions = isinstance(target, (types.Float, types.Complex)) or target == types.uint64
    return takes_fractions or not isinstance(value, types.Float)


def make_argument_reader(
    argument_types: Sequence[types.Type], positions: Sequence[int]
) -> Callable:
    """Make the function that gives a tuple with the values of some arguments."""
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
