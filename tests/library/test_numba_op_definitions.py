"""numba_op defines an operator, caches its kernels, and refuses what cannot be one."""

import math
import re
import subprocess
import sys

import pytest
import torch
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
    """The key has its code, its constants and all that it calls in any file, but no comments."""
    helper = tmp_path / "helper.py"

    def run(factor=2, addend=3, comment="", offset="0.0"):
        helper.write_text(f"def offset(x):\n    return {offset}\n")
        program = PROGRAM.format(factor=factor, addend=addend, comment=comment or "pass")
        result = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={"FOO_CACHE_DIR": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"},
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.split()

    assert run() == ["8.0", "1", "True"]
    assert run() == ["8.0", "0", "False"]
    assert run(comment="pass  # nothing new") == ["8.0", "0", "False"]
    assert run(factor=3) == ["12.0", "1", "True"]
    assert run(addend=4) == ["10.0", "1", "True"]
    assert run(offset="1.5") == ["9.5", "1", "True"]
    assert run() == ["8.0", "0", "False"]


# Names, and what an operator cannot have.


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
        (takes_out, "must not call an argument out, as those of foo_numba::never.out are"),
        (
            defaults_to_infinity,
            "must give most a finite default, since schemas have no other, got inf; float | None = "
            "None may stand for it",
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
    """A notebook defines it again, and so does a module that is loaded again."""
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
    # A definition that fails leaves it as it was.
    with pytest.raises(TypeError, match="must annotate x"):
        library.numba_op("foo_numba::again", lambda x: x)
    assert torch.ops.foo_numba.again(torch.ones(1, device=device)).item() == factor
