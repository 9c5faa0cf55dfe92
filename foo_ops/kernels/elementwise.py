"""The loop around a scalar function: what every elementwise kernel is made of."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from foo_ops.kernels.jit import Kernel
from foo_ops.kernels.simd import (
    ELEMENTS,
    Pointer,
    load_element,
    pointer_to,
    shift_bytes,
    store,
)

# char** data, int64_t* strides, int64_t size0, int64_t size1: TensorIterator's 2-d loop. Data and
# strides stand in the order output, inputs; strides count bytes, first those of the inner loop.
ARGUMENT_TYPES = (
    types.CPointer(types.intp),
    types.CPointer(types.int64),
    types.int64,
    types.int64,
)


def elementwise(function: Callable, input_dtypes: tuple[str, ...], output_dtype: str) -> Kernel:
    """Kernel that applies a scalar function of Numba to every element.

    The function takes one scalar for each input and returns one for the output, in the compute
    types of their dtypes (see simd.py).
    """
    scalar = njit(function)
    operands = 1 + len(input_dtypes)
    output_pointer = pointer_to(output_dtype)
    inputs_at = _inputs_at(input_dtypes)
    dense_strides = tuple(ELEMENTS[dtype].size for dtype in (output_dtype, *input_dtypes))
    may_be_in_place = input_dtypes[0] == output_dtype

    @njit
    def contiguous(output, inputs, size):
        for index in range(size):
            store(output, index, scalar(*_load_each(inputs, index)))

    @njit
    def strided(output, inputs, strides, size):
        for index in range(size):
            value = scalar(*_load_each_strided(inputs, strides, index))
            store(shift_bytes(output, index * strides[0]), 0, value)

    def loop(data, strides, size0, size1):
        inner_strides = _take(strides, operands)
        for row in range(size1):
            output = output_pointer(data[0] + row * strides[operands])
            inputs = inputs_at(data, strides, row)
            if inner_strides != dense_strides:
                strided(output, inputs, inner_strides, size0)
            elif may_be_in_place and data[0] == data[1]:
                # The output is written through the first input's own pointer, so that LLVM sees
                # that an element overlaps only itself, and vectorises the in-place loop too.
                contiguous(inputs[0], inputs, size0)
            else:
                contiguous(output, inputs, size0)

    return Kernel(loop, ARGUMENT_TYPES, vectorizes=True)


@intrinsic(prefer_literal=True)
def _take(typing_context, pointer, count):
    """The first ``count`` numbers at a pointer, as a tuple: read once, and not in every step."""
    numbers = types.UniTuple(pointer.dtype, count.literal_value)

    def generate(context, builder, signature, args):
        values = [
            builder.load(builder.gep(args[0], [ir.IntType(64)(position)]))
            for position in range(numbers.count)
        ]
        return context.make_tuple(builder, numbers, values)

    return numbers(pointer, count), generate


def _inputs_at(dtypes: tuple[str, ...]) -> Callable:
    """The function that gives a tuple with each input's pointer at the start of a row."""
    pointers = types.Tuple([Pointer(dtype) for dtype in dtypes])
    operands = 1 + len(dtypes)

    @intrinsic
    def inputs_at(typing_context, data, strides, row):
        def generate(context, builder, signature, args):
            data, strides, row = args
            values = []
            for operand, pointer in enumerate(pointers, start=1):
                start = builder.load(builder.gep(data, [row.type(operand)]))
                stride = builder.load(builder.gep(strides, [row.type(operands + operand)]))
                address = builder.add(start, builder.mul(row, stride))
                values.append(builder.inttoptr(address, context.get_value_type(pointer)))
            return context.make_tuple(builder, pointers, values)

        return pointers(data, strides, types.int64), generate

    return inputs_at


def _values_type(pointers: types.BaseTuple) -> types.BaseTuple:
    return types.Tuple([ELEMENTS[pointer.dtype].compute for pointer in pointers])


@intrinsic
def _load_each(typing_context, pointers, index):
    def generate(context, builder, signature, args):
        values = [
            load_element(
                context,
                builder,
                pointer.dtype,
                builder.gep(builder.extract_value(args[0], position), [args[1]]),
            )
            for position, pointer in enumerate(pointers)
        ]
        return context.make_tuple(builder, signature.return_type, values)

    return _values_type(pointers)(pointers, types.intp), generate


@intrinsic
def _load_each_strided(typing_context, pointers, strides, index):
    """``strides`` are in bytes, the output's first."""

    def generate(context, builder, signature, args):
        values = []
        for position, pointer in enumerate(pointers):
            start = builder.extract_value(args[0], position)
            offset = builder.mul(args[2], builder.extract_value(args[1], position + 1))
            address = builder.add(builder.ptrtoint(start, offset.type), offset)
            address = builder.inttoptr(address, start.type)
            values.append(load_element(context, builder, pointer.dtype, address))
        return context.make_tuple(builder, signature.return_type, values)

    return _values_type(pointers)(pointers, strides, types.intp), generate
