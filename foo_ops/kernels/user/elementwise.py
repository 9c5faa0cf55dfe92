"""Loop around a scalar function: every elementwise kernel is made of this."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from numba import njit
from numba.core import types

from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.vectors.arguments import (
    Argument,
    make_element_reader,
    make_row_pointers,
    make_scalar_reader,
    moved,
    store_each,
    take,
)
from foo_ops.kernels.vectors.elements import ELEMENTS

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

# A signature has these for an optional argument, see foo_ops/csrc/launch/kernel_table.h.
ABSENT, GIVEN = "none", "given"

SCALARS = {"int": types.int64, "bool": types.boolean}


def make_elementwise_kernel(
    signature: str,
    kinds: tuple[str, ...],
    variants: Mapping[str, tuple[int, str, tuple[str, ...]]],
    *functions: Callable,
) -> Kernel:
    """Make the kernel that applies a scalar function to every element.

    Args:
        signature: the inputs' common dtype, then the dtype of each tensor that has its own, and
            "none" or "given" for each other argument that is optional.
        kinds: "tensor", "own" for a tensor that has its own dtype, "float", "int" or "bool" for
            each argument of the function, with "?" after it where it is optional.
        variants: for each common dtype the position of its function, the dtype in which elements
            are read, and the dtypes in which the outputs are written.
        functions: each takes one scalar for each argument and returns one for each output, in the
            compute types of their dtypes (see foo_ops/kernels/vectors/elements.py). A float is in
            the inputs' compute type, where that is a floating-point type.
    """
    dtype, *given = signature.split(",")
    position, input_dtype, output_dtypes = variants[dtype]
    scalar = functions[position]
    arguments = describe_arguments(kinds, given, input_dtype)
    outputs = len(output_dtypes)
    dtypes = (*output_dtypes, *(a.dtype for a in arguments if a.dtype is not None))
    inputs = len(dtypes) - outputs
    outputs_at = make_row_pointers(dtypes, range(outputs))
    inputs_at = make_row_pointers(dtypes, range(outputs, len(dtypes)))
    sizes = tuple(ELEMENTS[dtype].size for dtype in dtypes)
    dense_outputs, dense_inputs = sizes[:outputs], sizes[outputs:]
    may_be_in_place = dtypes[:outputs] == dtypes[outputs : 2 * outputs]
    in_place_at = inputs_at
    if may_be_in_place:
        in_place_at = make_row_pointers(dtypes, range(outputs, 2 * outputs))
    scalars_at = make_scalar_reader(arguments)
    arguments_of = make_element_reader(arguments)

    @njit
    def contiguous(to, of, scalars, size):
        for index in range(size):
            store_each(to, index, scalar(*arguments_of(of, scalars, index)))

    @njit
    def strided(to, of, scalars, to_strides, of_strides, size):
        for index in range(size):
            values = scalar(*arguments_of(moved(of, of_strides, index), scalars, 0))
            store_each(moved(to, to_strides, index), 0, values)

    @njit
    def is_in_place(data):
        others = 0
        for output in range(outputs):
            others += data[output] != data[outputs + output]
        return others == 0

    def loop(data, strides, size0, size1, numbers):
        to_strides = take(strides, 0, outputs)
        of_strides = take(strides, outputs, inputs)
        scalars = scalars_at(numbers)
        for row in range(size1):
            to = outputs_at(data, strides, row)
            of = inputs_at(data, strides, row)
            if to_strides != dense_outputs or of_strides != dense_inputs:
                strided(to, of, scalars, to_strides, of_strides, size0)
            elif may_be_in_place and is_in_place(data):
                # The outputs are written through the first inputs' own pointers, so that LLVM sees
                # that an element overlaps only itself, and vectorises the in-place loop too.
                contiguous(in_place_at(data, strides, row), of, scalars, size0)
            else:
                contiguous(to, of, scalars, size0)

    return Kernel(loop, ARGUMENT_TYPES, vectorizes=True)


def describe_arguments(kinds: tuple[str, ...], codes: list[str], common: str) -> list[Argument]:
    """Describe the arguments of a call whose signature goes on with these codes."""
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
            arguments.append(Argument(types.none, 0))
        elif is_tensor:
            dtype = code if plain == "own" else common
            arguments.append(Argument(ELEMENTS[dtype].compute, inputs, dtype))
        else:
            arguments.append(Argument(numbers_types[plain], numbers))
        inputs += is_tensor and code != ABSENT
        numbers += not is_tensor
    return arguments
