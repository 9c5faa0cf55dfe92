"""numba_op defines an operator, caches its kernels, and refuses invalid functions."""

import colorsys
import linecache
import math
import re
import types

import pytest
import torch
from support.processes import run
from torch._subclasses import FakeTensorMode

from foo_ops import library

pytestmark = pytest.mark.usefixtures("one_thread")


def test_it_ends_with_its_library():
    lib = library.Library("foo_numba_gone", "FRAGMENT")
    for factor in (2, 3):
        packet = library.numba_op(
            "foo_numba_gone::times", scaled_by(factor), backward=lambda g, x: g, lib=lib
        )
        assert packet(torch.ones(2)).tolist() == [factor, factor]
        x = torch.ones(2, requires_grad=True)
        packet(x).sum().backward()
        assert x.grad.tolist() == [1, 1]
        lib._destroy()
        assert not torch._C._dispatch_has_kernel("foo_numba_gone::times")
        lib = library.Library("foo_numba_gone", "FRAGMENT")


def scaled_by(factor):
    def scaled(x: float) -> float:
        return x * factor

    return scaled


PROGRAM = """
import sys, torch

# The helper changes more often than the times of files tell.
sys.dont_write_bytecode = True
from foo_ops import library
from foo_ops.kernels.compiler import emit
import helper

compiled = []
compile_kernel = emit.compile_kernel
emit.compile_kernel = lambda build: compiled.append(1) or compile_kernel(build)
FACTOR = {factor}

@library.numba_op("mylib::f", backward=lambda g, x: g)
def f(x: float) -> float:
    {comment}
    return inner(x) * FACTOR + helper.offset(x)

def inner(x):
    return x + {addend}

print(f(torch.ones(1)).item(), len(compiled), "numba" in sys.modules)
"""


def test_cache_knows_all_that_a_kernel_depends_on(tmp_path):
    """The key covers its code, its constants and all functions it calls, but no comments."""
    helper = tmp_path / "helper.py"

    def printed(factor=2, addend=3, comment="", offset="0.0"):
        helper.write_text(f"def offset(x):\n    return {offset}\n")
        program = PROGRAM.format(factor=factor, addend=addend, comment=comment or "pass")
        return run(program, tmp_path / "cache", folder=tmp_path)[0].split()

    assert printed() == ["8.0", "1", "True"]
    assert printed() == ["8.0", "0", "False"]
    assert printed(comment="pass  # nothing new") == ["8.0", "0", "False"]
    assert printed(factor=3) == ["12.0", "1", "True"]
    assert printed(addend=4) == ["10.0", "1", "True"]
    assert printed(offset="1.5") == ["9.5", "1", "True"]
    assert printed() == ["8.0", "0", "False"]


# Names, and functions that cannot be an operator.


@pytest.mark.parametrize(
    "name", ["f", "foo_numba::", "::f", "foo_numba::f.out", "foo numba::f", ""]
)
def test_wrong_names(name):
    message = f"numba_op: the name of the operator must have the form mylib::f, got {name!r}"
    with pytest.raises(ValueError, match=rf"\A{re.escape(message)}\Z"):
        library.numba_op(name)


def test_decorator_without_a_name():
    with pytest.raises(TypeError, match=r'the operator, @numba_op\("mylib::f"\), got f \(.*\.py:'):

        @library.numba_op
        def f(x: float) -> float:
            return x


def takes_any_number(*x: float) -> float:
    return x[0]


def takes_keywords(x: float, **options: float) -> float:
    return x


def takes_out(x: float, out: float) -> float:
    return x


def defaults_to_infinity(x: float, most: float = math.inf) -> float:
    return min(x, most)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (takes_any_number, "must take a fixed number of arguments, got *x: float"),
        (takes_keywords, "must take a fixed number of arguments, got **options: float"),
        (takes_out, "must not have an argument out, since foo_numba::never.out has one"),
        (
            defaults_to_infinity,
            "must give most a finite default, since schemas have no other, got inf; write float | "
            "None = None instead",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_arguments_that_no_operator_has(function, message):
    place = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
    message = f"foo_numba::never: {function.__name__} ({place}) {message}"
    with pytest.raises(TypeError, match=rf"\A{re.escape(message)}\Z"):
        library.numba_op("foo_numba::never", function)
    assert not hasattr(torch.ops.foo_numba, "never")


def test_defined_again(device):
    """A notebook or a reloaded module defines the operator again."""
    for factor in (2.0, 3.0):

        @library.numba_op("foo_numba::again", backward=lambda grad, x: factor * grad)
        def again(x: float) -> float:
            return factor * x  # noqa: B023

        x = torch.ones(2, device=device, requires_grad=True)
        result = again(x)
        assert result.tolist() == [factor] * 2
        (gradient,) = torch.autograd.grad(result.sum(), x)
        assert gradient.tolist() == [factor] * 2
        assert torch.ops.foo_numba.again_(torch.ones(1, device=device)).item() == factor
        with FakeTensorMode() as mode:
            assert again(mode.from_tensor(x)).shape == x.shape
    # A failed definition leaves the operator unchanged.
    with pytest.raises(TypeError, match="must annotate x"):
        library.numba_op("foo_numba::again", lambda x: x)
    assert torch.ops.foo_numba.again(torch.ones(1, device=device)).item() == factor


def half(x: float) -> int:
    return x / 2


def floored(x: float) -> int:
    y = math.floor(x)
    return y  # noqa: RET504


def is_half(x: float) -> bool:
    return x / 2


def as_real(x: complex) -> float:
    return -x


def half_or_none(x: int, by: float = 0.5) -> tuple[bool, int]:
    if x < 0:
        return False, 0
    y = x if x > 3 else by
    return True, y


def sum_of_halves(x: int) -> int:
    total = 0.0
    total += x * FACTOR
    return round(total)


@pytest.mark.parametrize(
    ("function", "dtype", "kinds", "line"),
    [
        (half, "float32", ("float32", "int64"), 1),
        (floored, "float64", ("float64", "int64"), 2),
        (is_half, "float32", ("float32", "bool"), 1),
        (as_real, "complex64", ("complex64", "float32"), 1),
        # The line of the function, since it has two returns.
        (half_or_none, "int64", ("float64", "int64"), 0),
        (sum_of_halves, "int64", ("float64", "int64"), 3),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_kinds_that_the_result_cannot_hold(function, dtype, kinds, line, device):
    """The compiler names the line that returns."""
    name = f"foo_numba::{function.__name__}_{device}"
    operator = library.numba_op(name, function)
    message = (
        f"{name}: its kernel cannot be compiled for {dtype}: the kernel must return {kinds[1]}, "
        f"got {kinds[0]}"
    )
    message += "; int(...) converts a float" * (kinds[1] == "int64")
    number = function.__code__.co_firstlineno + line
    message += f" ({__file__}:{number}: {linecache.getline(__file__, number).strip()})"
    with pytest.raises(RuntimeError, match=rf"\A{re.escape(message)}\Z"):
        operator(torch.ones(2, dtype=getattr(torch, dtype), device=device))


def either(x: float) -> int:
    y = 0
    if x > 1:
        y = y + 0.5
    return y


def is_either(x: float) -> bool:
    return x and True


def as_real_part(x: complex) -> float:
    return x and 1.0


@pytest.mark.parametrize(
    ("function", "dtype", "kinds"),
    [
        (either, torch.float32, ("float64", "int64")),
        (is_either, torch.float64, ("float64", "bool")),
        (as_real_part, torch.complex64, ("complex128", "float32")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_numbers_that_the_result_cannot_hold(function, dtype, kinds, device):
    """Types that the annotations do not fix are checked at compilation."""
    operator = library.numba_op(f"foo_numba::{function.__name__}_{device}", function)
    message = "the kernel must return {1}, got {0}".format(*kinds)
    message += "; int(...) converts a float" * (kinds[1] == "int64")
    with pytest.raises(RuntimeError, match=re.escape(f"{message} ({__file__}:")):
        operator(torch.ones(2, dtype=dtype, device=device))


def reused(x: float) -> int:
    y = x / 2
    y = int(y)
    return y  # noqa: RET504


def shadowed(x: float) -> int:
    def inner(x):
        return x / 2

    return int(inner(x))


def unpacked(x: int) -> int:
    y, _ = x, 0.5
    return y


def counted(x: int) -> int:
    total = 0
    for step in range(3):
        total += step * x
    return total if total > 0 else abs(-total)


@pytest.mark.parametrize(
    ("function", "value", "expected"),
    [(reused, 7.0, 3), (unpacked, 5, 5), (counted, 2, 6), (shadowed, 9.0, 4)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_kinds_that_fit(function, value, expected):
    operator = library.numba_op("foo_numba::fitting", function)
    assert operator(torch.tensor([value])).tolist() == [expected]


def product(a: float, b: float) -> float:
    return a * b


@pytest.mark.parametrize(
    ("backward", "count"),
    [
        (lambda g, a, b: g * b, 1),
        (lambda g, a, b: g, 1),
        (lambda g, a, b: (g * b, g * a, 0.0), 3),
    ],
)
def test_number_of_gradients(backward, count):
    line = backward.__code__.co_firstlineno
    message = (
        "foo_numba::product_backward: its kernel must return 2 values, one for each result, got "
        f"<lambda> ({__file__}:{line}), which returns {count} in line {line}"
    )
    with pytest.raises(TypeError, match=rf"\A{re.escape(message)}\Z"):
        library.numba_op("foo_numba::product", product, backward=backward)
    with pytest.raises(TypeError, match=r"one_gradient .* returns 1 in line"):
        library.numba_op("foo_numba::product", product, backward=one_gradient)
    packet = library.numba_op("foo_numba::product", product, backward=both_gradients)
    a, b = torch.tensor([[2.0], [3.0]], requires_grad=True)
    packet(a, b).sum().backward()


def one_gradient(g, a, b):
    gradient = g * b
    return gradient  # noqa: RET504


def both_gradients(g, a, b):
    gradients = g * b, g * a
    return gradients  # noqa: RET504


FACTOR = 2.0


def times_factor(x):
    return x * FACTOR


def test_globals_are_those_of_the_first_use(device, monkeypatch):
    """Later values do not count, even for other dtypes or in called functions."""
    settings = types.ModuleType("settings_of_a_user")
    settings.offset = 1.0

    def scaled(x: float) -> float:
        return times_factor(x) + settings.offset

    name = f"foo_numba::scaled_{device}"
    operator = library.numba_op(name, scaled)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert operator(torch.ones(1, device=device)).tolist() == [4]
    monkeypatch.setitem(globals(), "FACTOR", 4.0)
    settings.offset = 2.0
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert operator(torch.ones(1, dtype=dtype, device=device)).tolist() == [4]
    assert library.numba_op(name, scaled)(torch.ones(1, device=device)).tolist() == [6]


def test_function_of_a_module_of_python(device):
    """A Python function from a module is compiled like a user's own."""

    def luma(r: float, g: float, b: float) -> float:
        return colorsys.rgb_to_yiq(r, g, b)[0] + math.floor(r) * math.pi

    operator = library.numba_op(f"foo_numba::luma_{device}", luma)
    inputs = torch.tensor([[1.0], [0.5], [0.25]], device=device).unbind()
    expected = torch.tensor([colorsys.rgb_to_yiq(1.0, 0.5, 0.25)[0] + math.pi], device=device)
    torch.testing.assert_close(operator(*inputs), expected)


def test_a_failure_does_not_keep_globals(device, monkeypatch):
    """In a notebook, one defines the missing name and calls again."""

    def calls_later(x: float) -> float:
        return defined_later(x)  # noqa: F821

    operator = library.numba_op(f"foo_numba::later_{device}", calls_later)
    input = torch.ones(1, device=device)
    with pytest.raises(RuntimeError, match="name 'defined_later' is not defined"):
        operator(input)
    monkeypatch.setitem(globals(), "defined_later", lambda x: x + 5.0)
    assert operator(input).tolist() == [6]
