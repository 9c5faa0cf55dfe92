"""The kit refuses arguments that cannot make a kernel, where they are given."""

import functools
import math
import re

import numba
import pytest
import torch

from foo_ops import library


def half(x: float) -> float:
    return x / 2


def halves(x: float) -> float:
    if x > 0:
        yield x / 2


class Callable:
    def __call__(self, x: float) -> float:
        return x

    def method(self, x: float) -> float:
        return x


def number_of_rows():
    return 3


def fill(input, output, rows):
    for row in rows:
        output.flat[row] = 1.0


WRONG = {
    "builtin": math.exp,
    "partial": functools.partial(half),
    "callable": Callable(),
    "method": Callable().method,
    "class": Callable,
    "number": 3,
    "text": "half",
}


def refused(error, message, function, *arguments, **options):
    with pytest.raises(error, match=rf"\A{re.escape(message)}\Z"):
        function(*arguments, **options)


@pytest.mark.parametrize("function", WRONG.values(), ids=WRONG)
def test_what_is_no_function_of_python(function):
    end = f"a function written in Python, got {function!r}"
    message = f"foo_functions::never: numba_op must be given {end}"
    refused(TypeError, message, library.numba_op, "foo_functions::never", function)
    message = f"foo_functions::never: backward must be {end}"
    refused(TypeError, message, library.numba_op, "foo_functions::never", half, backward=function)
    assert not hasattr(torch.ops.foo_functions, "never")
    message = f"elementwise_kernel must be given {end}"
    refused(TypeError, message, library.elementwise_kernel, function)
    kernel = library.elementwise_kernel(half, dtypes=[torch.float32])
    refused(TypeError, message, kernel.overload, function, [torch.float64])
    message = f"elementwise_kernel: backward must be {end}"
    refused(TypeError, message, library.elementwise_kernel, half, backward=function)
    refused(TypeError, f"tile_kernel must be given {end}", library.tile_kernel, function)
    for name in ("tiles", "finish", "check"):
        options = {name: function, "refuse": half}
        refused(
            TypeError, f"tile_kernel: {name} must be {end}", library.tile_kernel, fill, **options
        )


def test_scratch_and_refuse_that_are_no_functions():
    message = f"scratch: sizes must be ints or functions, one for each dimension, got ({math.exp},)"
    refused(TypeError, message, library.scratch, math.exp, like="input")
    message = "tile_kernel: refuse must be a function, got 3"
    refused(TypeError, message, library.tile_kernel, fill, refuse=3)


def test_generators():
    line = halves.__code__.co_firstlineno
    end = (
        f"a function without yield, got halves ({__file__}:{line}), which yields in line {line + 2}"
    )
    message = f"foo_functions::never: numba_op must be given {end}"
    refused(TypeError, message, library.numba_op, "foo_functions::never", halves)
    message = f"elementwise_kernel must be given {end}"
    refused(TypeError, message, library.elementwise_kernel, halves)
    refused(TypeError, f"tile_kernel must be given {end}", library.tile_kernel, halves)
    message = f"tile_kernel: tiles must be {end}"
    refused(TypeError, message, library.tile_kernel, fill, tiles=halves)


def test_function_of_numba(device):
    operator = library.numba_op(f"foo_functions::half_{device}", numba.njit(half))
    assert operator(torch.ones(2, device=device)).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("dtypes", [("float32",), torch.float32, "float32", [torch.float32, 1]])
def test_what_is_no_dtype(dtypes):
    end = f"must be a sequence of torch.dtype, such as (torch.float32,), got {dtypes!r}"
    message = f"foo_functions::never: dtypes {end}"
    refused(TypeError, message, library.numba_op, "foo_functions::never", half, dtypes=dtypes)
    assert not hasattr(torch.ops.foo_functions, "never")
    refused(
        TypeError,
        f"elementwise_kernel: dtypes {end}",
        library.elementwise_kernel,
        half,
        dtypes=dtypes,
    )
    refused(
        TypeError,
        f"elementwise_kernel: own_dtypes of mask {end}",
        library.elementwise_kernel,
        half,
        own_dtypes={"mask": dtypes},
    )


def test_result_type_of_some_dtypes():
    message = (
        "elementwise_kernel: result_type must have an entry for each of dtypes, got none for "
        "torch.float16"
    )
    options = {"result_type": {torch.float32: torch.int64}}
    refused(TypeError, message, library.elementwise_kernel, half, **options)


@pytest.mark.parametrize("name", ["half", "", "::half", "foo_functions::", "a::b::c", "a::b.c.d"])
def test_names_without_a_namespace(name):
    message = f"the name of an operator must have the form mylib::f or mylib::f.out, got {name!r}"
    kernel = library.elementwise_kernel(half)
    refused(ValueError, message, library.register_kernel, name, "cpu", kernel)
    refused(ValueError, message, library.register_autocast, name)


def test_operators_that_are_not_there():
    library.define("foo_functions::there", "(Tensor x) -> Tensor")
    kernel = library.elementwise_kernel(half)
    for name in ("foo_functions::nowhere", "foo_functions::there.nowhere", "foo_nowhere::f"):
        message = f"{name}: there is no such operator; define it with foo_ops.library.define"
        refused(ValueError, message, library.register_kernel, name, "cpu", kernel)
