"""The loop around a scalar function, of which every elementwise kernel is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from numba import njit
from numba.core import types

from foo_ops.kernels.compiler.kernel import CHECKED, Kernel
from foo_ops.kernels.lang.arguments import (
    ABSENT,
    Argument,
    code_of,
    make_element_reader,
    make_pair_reader,
    make_picker,
    make_row_pointers,
    make_scalar_reader,
    moved,
    store_each,
    store_pair,
    take,
    type_of_value,
)
from foo_ops.kernels.simd.types import ELEMENTS

# char** data, int64_t* strides, int64_t size0, int64_t size1: TensorIterator's 2-d loop; and
# int64_t* for all other arguments. Data and strides are in the order outputs, inputs; strides are
# in bytes, the inner loop's first.
ARGUMENT_TYPES = (
    types.CPointer(types.intp),
    types.CPointer(types.int64),
    types.int64,
    types.int64,
    types.CPointer(types.int64),
)


def make_elementwise_kernel(
    signature: str,
    kinds: tuple[str, ...],
    variants: Mapping[str, tuple[int, str, tuple[str, ...]]],
    depends_on: tuple[int, ...],
    *functions: Callable,
) -> Kernel:
    """Make the kernel that applies a scalar function to every element.

    Args:
        signature: the inputs' common dtype, then the codes of the arguments; at the end "checked"
            if indices of lists are checked. kernels/lang/arguments.py has the codes and the kinds.
        kinds: the kind of each argument of the function.
        variants: for each common dtype the position of its function, the dtype in which elements
            are read, and the dtypes in which the outputs are written.
        depends_on: for each output, the argument without which it is missing, or -1; empty if no
            output is ever missing.
        functions: each takes one scalar for each argument and returns one for each output, in the
            compute types of their dtypes (see foo_ops/kernels/simd/types.py). A float has the
            inputs' compute type, if that is a floating-point type.
    """
    dtype, *given = signature.split(",")
    position, input_dtype, all_outputs = variants[dtype]
    scalar = functions[position]
    arguments = describe_arguments(kinds, given, input_dtype)
    present = present_outputs(depends_on, arguments, len(all_outputs))
    picked = make_picker(present, len(all_outputs))
    output_dtypes = tuple(all_outputs[output] for output in present)
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
    arguments_of, pair_of = make_element_reader(arguments), make_pair_reader(arguments)

    @njit
    def elements(to, of, scalars, size):
        for index in range(size):
            store_each(to, index, picked(scalar(*arguments_of(of, scalars, index))))
        return size

    @njit
    def pairs(to, of, scalars, size):
        for pair in range(size // 2):
            first, second = pair_of(of, scalars, pair)
            store_pair(to, pair, picked(scalar(*first)), picked(scalar(*second)))
        return size // 2 * 2

    # Returns the number of elements computed.
    contiguous = pairs if set(dtypes) == {"bfloat16"} else elements

    @njit
    def strided(to, of, scalars, to_strides, of_strides, start, size):
        for index in range(start, size):
            values = scalar(*arguments_of(moved(of, of_strides, index), scalars, 0))
            store_each(moved(to, to_strides, index), 0, picked(values))

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
            done = 0
            if to_strides == dense_outputs and of_strides == dense_inputs:
                if may_be_in_place and is_in_place(data):
                    # Writing through the first inputs' own pointers shows LLVM that an element
                    # overlaps only itself, so that it vectorises this loop too.
                    done = contiguous(in_place_at(data, strides, row), of, scalars, size0)
                else:
                    done = contiguous(to, of, scalars, size0)
            strided(to, of, scalars, to_strides, of_strides, done, size0)

    return Kernel(loop, ARGUMENT_TYPES, vectorizes=True)


def present_outputs(
    depends_on: tuple[int, ...], arguments: list[Argument], count: int
) -> list[int]:
    """Return the outputs that are not missing for these arguments."""
    if not depends_on:
        return list(range(count))
    missing = {place for place, it in enumerate(arguments) if it.type == types.none}
    return [output for output, place in enumerate(depends_on) if place not in missing]


def describe_arguments(kinds: tuple[str, ...], codes: list[str], common: str) -> list[Argument]:
    """Describe the arguments of a call with these codes."""
    compute = ELEMENTS[common].compute
    floats = compute if isinstance(compute, types.Float) else types.float64
    is_checked = CHECKED in codes
    inputs = numbers = 0
    arguments, rest = [], iter(codes)
    for kind in kinds:
        code = code_of(kind, rest)
        base_kind = kind.removesuffix("?")
        is_tensor = base_kind in ("own", "tensor")
        if code == ABSENT:
            arguments.append(Argument(types.none, 0))
        elif is_tensor:
            dtype = code if base_kind == "own" else common
            arguments.append(Argument(ELEMENTS[dtype].compute, inputs, dtype))
        else:
            type_ = type_of_value(base_kind, code, floats, compute, is_checked)
            arguments.append(Argument(type_, numbers))
        inputs += is_tensor and code != ABSENT
        numbers += not is_tensor
    return arguments
