"""The loop around a scalar function: what every elementwise kernel is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import errors, types
from numba.extending import intrinsic

from foo_ops.kernels.jit import Kernel
from foo_ops.kernels.simd import ELEMENTS, INT64, Pointer, load_element
from foo_ops.kernels.view import store_element

# char** data, int64_t* strides, int64_t size0, int64_t size1: TensorIterator's 2-d loop; and
# int64_t* scalars. Data and strides stand in the order outputs, inputs; strides count bytes, first
# those of the inner loop.
ARGUMENT_TYPES = (
    types.CPointer(types.intp),
    types.CPointer(types.int64),
    types.int64,
    types.int64,
    types.CPointer(types.int64),
)
# What stands in a signature for an argument that is optional, see csrc/kernel_table.h.
ABSENT, GIVEN = "none", "given"
SCALARS = {"int": types.int64, "bool": types.boolean}


def elementwise(
    signature: str,
    kinds: tuple[str, ...],
    variants: Mapping[str, tuple[int, str, tuple[str, ...]]],
    *functions: Callable,
) -> Kernel:
    """Kernel that applies a scalar function to every element.

    Args:
        signature: the inputs' common dtype, then the dtype of each tensor that has its own, and
            "none" or "given" for each other argument that is optional.
        kinds: "tensor", "own" for a tensor that has its own dtype, "float", "int" or "bool" for
            each argument of the function, with "?" after it where it is optional.
        variants: for each common dtype which of the functions it is, as what dtype elements are
            read, and as what those of each output are written.
        functions: each takes one scalar for each argument and returns one for each output, in the
            compute types of their dtypes (see simd.py). A float is in the inputs' compute type,
            where that is a floating-point type.
    """
    dtype, *given = signature.split(",")
    position, input_dtype, output_dtypes = variants[dtype]
    scalar = functions[position]
    arguments = _arguments(kinds, given, input_dtype)
    outputs = len(output_dtypes)
    dtypes = (*output_dtypes, *(a.dtype for a in arguments if a.dtype is not None))
    inputs = len(dtypes) - outputs
    outputs_at = _pointers_at(dtypes, range(outputs))
    inputs_at = _pointers_at(dtypes, range(outputs, len(dtypes)))
    sizes = tuple(ELEMENTS[dtype].size for dtype in dtypes)
    dense_outputs, dense_inputs = sizes[:outputs], sizes[outputs:]
    may_be_in_place = outputs == 1 and dtypes[0] == dtypes[1]
    scalars_at = _scalars_at(arguments)
    arguments_of = _arguments_of(arguments)

    @njit
    def contiguous(to, of, scalars, size):
        for index in range(size):
            _store_each(to, index, scalar(*arguments_of(of, scalars, index)))

    @njit
    def strided(to, of, scalars, to_strides, of_strides, size):
        for index in range(size):
            values = scalar(*arguments_of(_moved(of, of_strides, index), scalars, 0))
            _store_each(_moved(to, to_strides, index), 0, values)

    def loop(data, strides, size0, size1, numbers):
        to_strides = _take(strides, 0, outputs)
        of_strides = _take(strides, outputs, inputs)
        scalars = scalars_at(numbers)
        for row in range(size1):
            to = outputs_at(data, strides, row)
            of = inputs_at(data, strides, row)
            if to_strides != dense_outputs or of_strides != dense_inputs:
                strided(to, of, scalars, to_strides, of_strides, size0)
            elif may_be_in_place and data[0] == data[1]:
                # The output is written through the first input's own pointer, so that LLVM sees
                # that an element overlaps only itself, and vectorises the in-place loop too.
                contiguous((of[0],), of, scalars, size0)
            else:
                contiguous(to, of, scalars, size0)

    return Kernel(loop, ARGUMENT_TYPES, vectorizes=True)


# ------------------------------------------------------------------------------------ arguments


@dataclasses.dataclass(frozen=True)
class _Argument:
    """What the scalar function gets: an element of an input, a number, or None."""

    type: types.Type
    # Among the inputs or the numbers of the call, of which missing ones have a place as well.
    position: int
    # Of an input.
    dtype: str | None = None


def _arguments(kinds: tuple[str, ...], codes: list[str], common: str) -> list[_Argument]:
    """Of a call whose signature goes on with these codes."""
    compute = ELEMENTS[common].compute
    numbers_types = {"float": compute if isinstance(compute, types.Float) else types.float64}
    numbers_types |= SCALARS
    inputs = numbers = 0
    arguments, rest = [], iter(codes)
    for kind in kinds:
        plain = kind.removesuffix("?")
        code = next(rest) if plain == "own" or plain != kind else GIVEN
        is_tensor = plain in ("own", "tensor")
        if code == ABSENT:
            arguments.append(_Argument(types.none, 0))
        elif is_tensor:
            dtype = code if plain == "own" else common
            arguments.append(_Argument(ELEMENTS[dtype].compute, inputs, dtype))
        else:
            arguments.append(_Argument(numbers_types[plain], numbers))
        inputs += is_tensor and code != ABSENT
        numbers += not is_tensor
    return arguments


def _scalars_at(arguments: list[_Argument]) -> Callable:
    """The function that gives a tuple with the numbers of a call."""
    scalars = [a for a in arguments if a.dtype is None and a.type != types.none]
    values_type = types.Tuple([a.type for a in scalars])

    @intrinsic
    def scalars_at(typing_context, numbers):
        def generate(context, builder, signature, args):
            values = []
            for scalar in scalars:
                bits = builder.load(builder.gep(args[0], [INT64(scalar.position)]))
                values.append(scalar_of(context, builder, scalar.type, bits))
            return context.make_tuple(builder, values_type, values)

        return values_type(numbers), generate

    return scalars_at


def scalar_of(context: Any, builder: ir.IRBuilder, type_: types.Type, bits: ir.Value) -> ir.Value:
    """A number out of the eight bytes that a launcher hands over, in the type it is wanted in."""
    if type_ == types.boolean:
        return builder.icmp_unsigned("!=", bits, bits.type(0))
    if isinstance(type_, types.Float):
        double = builder.bitcast(bits, ir.DoubleType())
        return context.cast(builder, double, types.float64, type_)
    return bits


def _arguments_of(arguments: list[_Argument]) -> Callable:
    """The function that gives a tuple with the scalar function's arguments for an element."""
    values_type = types.Tuple([a.type for a in arguments])

    @intrinsic
    def arguments_of(typing_context, inputs, scalars, index):
        def generate(context, builder, signature, args):
            values = []
            scalars = iter(range(len(signature.args[1])))
            for argument in arguments:
                if argument.dtype is not None:
                    pointer = builder.extract_value(args[0], argument.position)
                    address = builder.gep(pointer, [args[2]])
                    dtype = signature.args[0][argument.position].dtype
                    values.append(load_element(context, builder, dtype, address))
                elif argument.type == types.none:
                    values.append(context.get_dummy_value())
                else:
                    values.append(builder.extract_value(args[1], next(scalars)))
            return context.make_tuple(builder, values_type, values)

        return values_type(inputs, scalars, types.intp), generate

    return arguments_of


# ------------------------------------------------------------------------------------- operands


@intrinsic(prefer_literal=True)
def _take(typing_context, pointer, start, count):
    """``count`` numbers at a pointer, as a tuple: read once, and not in every step."""
    numbers = types.UniTuple(pointer.dtype, count.literal_value)

    def generate(context, builder, signature, args):
        first = start.literal_value
        values = [
            builder.load(builder.gep(args[0], [INT64(position)]))
            for position in range(first, first + numbers.count)
        ]
        return context.make_tuple(builder, numbers, values)

    return numbers(pointer, start, count), generate


def _pointers_at(dtypes: tuple[str, ...], chosen: range) -> Callable:
    """The function that gives a tuple with some operands' pointers at the start of a row."""
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
def _moved(typing_context, pointers, strides, index):
    """The pointers, each moved on by ``index`` times its stride in bytes."""

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
def _store_each(typing_context, pointers, index, values):
    """One value for each pointer, rounded to its dtype."""
    computed = types.Tuple([ELEMENTS[pointer.dtype].compute for pointer in pointers])
    several = isinstance(values, types.BaseTuple)
    if (len(values) if several else 1) != len(computed):
        raise errors.TypingError(
            f"the kernel returns {len(values) if several else 1} values, "
            f"and the operator {len(computed)}"
        )
    for value in values if several else (values,):
        if not isinstance(value, (types.Number, types.Boolean)):
            raise errors.TypingError(f"the kernel returns {value}, which is no number")

    def generate(context, builder, signature, args):
        for position, pointer in enumerate(pointers):
            address = builder.gep(builder.extract_value(args[0], position), [args[1]])
            value = builder.extract_value(args[2], position) if several else args[2]
            store_element(context, builder, pointer.dtype, address, value)
        return context.get_dummy_value()

    given = computed if several else computed[0]
    return types.void(pointers, types.intp, given), generate
