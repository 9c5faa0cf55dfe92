"""Different functions have different fingerprints, so that none gets another's object code."""

import enum
import math
import types

import numpy as np
import pytest

from foo_ops import language
from foo_ops.kernels import table
from foo_ops.kernels.compiler.fingerprint import fingerprint
from foo_ops.kernels.user.user_kernel import UserKernel


class Mode(enum.Enum):
    FAST = 1


class OtherMode(enum.Enum):
    FAST = 2


def made_of(code, **names):
    """Make a function ``f`` from its source, with globals."""
    namespace = dict(names)
    exec(code, namespace)
    return namespace["f"]


def closing_over(value):
    def f(x):
        return x * value

    return f


def module_with(**names):
    module = types.ModuleType("mine")
    vars(module).update(names)
    return module


NAMED = "def f(x):\n    return x * FACTOR"
QUALIFIED = "def f(x):\n    return mine.scale(x)"
DIFFERENT = {
    "operator": (made_of("f = lambda x, y: x + y"), made_of("f = lambda x, y: x - y")),
    "constant": (made_of("f = lambda x: x * 2"), made_of("f = lambda x: x * 3")),
    "type of a constant": (made_of("f = lambda x: x * 2"), made_of("f = lambda x: x * 2.0")),
    "sign of zero": (made_of("f = lambda x: x + 0.0"), made_of("f = lambda x: x + -0.0")),
    "default": (made_of("def f(x, y=1): return x * y"), made_of("def f(x, y=2): return x * y")),
    "closure": (closing_over(2), closing_over(3)),
    "function in a closure": (closing_over(math.sin), closing_over(math.cos)),
    "global": (made_of(NAMED, FACTOR=2), made_of(NAMED, FACTOR=3)),
    "array": (made_of(NAMED, FACTOR=np.ones(2)), made_of(NAMED, FACTOR=np.zeros(2))),
    "tuple": (made_of(NAMED, FACTOR=(1, 2)), made_of(NAMED, FACTOR=(12,))),
    "enum": (made_of(NAMED, FACTOR=Mode), made_of(NAMED, FACTOR=OtherMode)),
    "order of arguments": (made_of("f = lambda x, y: x"), made_of("f = lambda y, x: y - x")),
    "function that is called": (
        made_of(NAMED, FACTOR=closing_over(2)),
        made_of(NAMED, FACTOR=closing_over(3)),
    ),
    "function of a module": (
        made_of(QUALIFIED, mine=module_with(scale=closing_over(2))),
        made_of(QUALIFIED, mine=module_with(scale=closing_over(3))),
    ),
    "function that is inside": (
        made_of("def f(x):\n    def g(y): return y + 1\n    return g(x)"),
        made_of("def f(x):\n    def g(y): return y + 2\n    return g(x)"),
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_other_code(what):
    one, other = DIFFERENT[what]
    assert fingerprint(one) != fingerprint(other)


def test_comments_and_line_numbers_do_not_count():
    function = made_of("def f(x):\n    return x * 2")
    assert fingerprint(function) == fingerprint(made_of("\n\ndef f(x):\n    # ?\n    return x * 2"))


def test_functions_that_call_each_other():
    code = "def f(x): return g(x - 1) if x > 0 else {}\ndef g(x): return f(x)"
    assert fingerprint(made_of(code.format(1))) == fingerprint(made_of(code.format(1)))
    assert fingerprint(made_of(code.format(1))) != fingerprint(made_of(code.format(2)))


def test_what_makes_the_kernel_and_its_options_count():
    function = made_of("f = lambda x: x")
    kernels = [
        UserKernel("mylib::f", (function,), maker, options)
        for maker in (table.TILE, table.ELEMENTWISE)
        for options in ((("tensor",),), (("tensor?",),))
    ]
    assert len({kernel.fingerprint("float32") for kernel in kernels}) == len(kernels)


def test_the_functions_of_the_language_differ():
    """A kernel that closes over one of them has no other's object code."""
    parts = {fingerprint(closing_over(getattr(language, name))) for name in language.__all__}
    assert len(parts) == len(language.__all__)
