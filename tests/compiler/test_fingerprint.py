"""Different functions have different fingerprints, so that none gets another's object code."""

import collections
import dataclasses
import enum
import functools
import math
import re
import sys
import types

import numpy as np
import pytest
from numba import njit
from numba import types as numba_types
from numba.extending import intrinsic, overload

from foo_ops import language
from foo_ops.kernels.compiler.fingerprint import fingerprint
from foo_ops.kernels.compiler.kernel import Maker
from foo_ops.kernels.user.sources import UserKernel


class Mode(enum.Enum):
    FAST = 1


class OtherMode(enum.Enum):
    FAST = 2


def made_of(code, **names):
    """Make a function ``f`` from its source, with these globals."""
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


def object_with(**attributes):
    """Make an object whose class has no readable text."""
    made = type("Options", (), {})()
    vars(made).update(attributes)
    return made


def emitting(helper):
    @intrinsic
    def add(typing_context, x):
        def generate(context, builder, signature, args):
            return helper(builder, args[0])

        return x(x), generate

    return add


def calling_overloaded(factor):
    def scale(x):
        raise NotImplementedError

    @overload(scale)
    def made(x):
        return lambda x: x * factor

    return njit(lambda x: scale(x))


def keyword_default(value):
    def f(x, *, y=value):
        return x * y

    return f


def importing_inside(attribute):
    return made_of(f"def f(x):\n    import math\n    return math.{attribute}")


@dataclasses.dataclass
class Shape:
    rows: int
    columns: list = dataclasses.field(default_factory=list)

    def size(self):
        return self.rows


class WiderShape(Shape):
    def size(self):
        return self.rows * 2


class Whole(int):
    __slots__ = ()


class Slotted:
    __slots__ = ("rows",)

    def __init__(self, rows):
        self.rows = rows

    def __repr__(self):
        return "rows"


class Kind(numba_types.Type):
    pass


Pair = collections.namedtuple("Pair", "first second")
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
    "keyword default": (keyword_default(1), keyword_default(2)),
    "table": (closing_over({"rows": 1}), closing_over({"rows": 2})),
    "named tuple": (closing_over(Pair(1, 2)), closing_over(Pair(2, 1))),
    "attribute of an object": (
        closing_over(object_with(rows=1)),
        closing_over(object_with(rows=2)),
    ),
    "slot of an object": (closing_over(Slotted(1)), closing_over(Slotted(2))),
    "number of a class": (closing_over(Whole(1)), closing_over(Whole(2))),
    "method": (closing_over(Shape(1).size), closing_over(Shape(2).size)),
    "method of a class": (closing_over(Shape), closing_over(WiderShape)),
    "type of Numba": (closing_over(Kind), closing_over(numba_types.Type)),
    "partial": (
        closing_over(functools.partial(math.pow, 2)),
        closing_over(functools.partial(math.pow, 3)),
    ),
    "cached function": (
        closing_over(functools.cache(closing_over(2))),
        closing_over(functools.cache(closing_over(3))),
    ),
    "function of a module that is closed over": (
        made_of(
            "def g(m):\n    return lambda x: m.scale(x)\nf = g(mine)",
            mine=module_with(scale=closing_over(2)),
        ),
        made_of(
            "def g(m):\n    return lambda x: m.scale(x)\nf = g(mine)",
            mine=module_with(scale=closing_over(3)),
        ),
    ),
    "module that is imported inside": (importing_inside("pi"), importing_inside("e")),
    "helper of an intrinsic": (
        closing_over(emitting(made_of("f = lambda b, x: b.fadd(x, x)"))),
        closing_over(emitting(made_of("f = lambda b, x: b.fmul(x, x)"))),
    ),
    "option of njit": (
        closing_over(njit(closing_over(2))),
        closing_over(njit(fastmath=True)(closing_over(2))),
    ),
    "overload": (closing_over(calling_overloaded(2)), closing_over(calling_overloaded(3))),
    "function that is inside": (
        made_of("def f(x):\n    def g(y): return y + 1\n    return g(x)"),
        made_of("def f(x):\n    def g(y): return y + 2\n    return g(x)"),
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_other_code(what):
    one, other = DIFFERENT[what]
    assert fingerprint(one) != fingerprint(other)
    # No address: it is the same in each process.
    assert not re.search(rb"0x[0-9a-f]{6}", fingerprint(one).content)


def test_comments_and_line_numbers_do_not_count():
    function = made_of("def f(x):\n    return x * 2")
    assert fingerprint(function) == fingerprint(made_of("\n\ndef f(x):\n    # ?\n    return x * 2"))


def test_functions_that_call_each_other():
    code = "def f(x): return g(x - 1) if x > 0 else {}\ndef g(x): return f(x)"
    assert fingerprint(made_of(code.format(1))) == fingerprint(made_of(code.format(1)))
    assert fingerprint(made_of(code.format(1))) != fingerprint(made_of(code.format(2)))


MAKERS = tuple(
    Maker(f"foo_ops.kernels.user.{kind}", f"make_{kind}_kernel") for kind in ("elementwise", "tile")
)


def test_what_makes_the_kernel_and_its_options_count():
    function = made_of("f = lambda x: x")
    kernels = [
        UserKernel("mylib::f", (function,), maker, options)
        for maker in MAKERS
        for options in ((("tensor",),), (("tensor?",),))
    ]
    assert len({kernel.fingerprint("float32") for kernel in kernels}) == len(kernels)


def test_the_functions_of_the_language_differ():
    """A kernel that closes over one of them never gets another one's object code."""
    parts = {fingerprint(closing_over(getattr(language, name))) for name in language.__all__}
    assert len(parts) == len(language.__all__)


def test_the_modules_of_the_language_are_those_that_its_names_are_loaded_from():
    """Whether a kernel has a name as an attribute, or as the function itself."""
    for name in language.__all__:
        function = getattr(language, name)
        assert function.__module__ == language.MODULE_OF[name]
        named = made_of(f"f = lambda x: language.{name}(x)", language=language)
        for kernel in (named, closing_over(function)):
            assert language.MODULE_OF[name] in fingerprint(kernel).modules


def test_what_is_registered_beside_a_type_of_numba_counts(monkeypatch, tmp_path):
    path = tmp_path / "kinds.py"
    module = types.ModuleType("kinds")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "kinds", module)
    kind = type("Kind", (numba_types.Type,), {"__module__": "kinds"})
    path.write_text("register_model(Kind)(OneModel)")
    before = fingerprint(closing_over(kind))
    path.write_text("register_model(Kind)(AnotherModel)")
    assert fingerprint(closing_over(kind)) != before


class Picky:
    """Raises on missing attributes, as pytest.mark does."""

    def __getattr__(self, name):
        raise RuntimeError(name)


def test_values_that_refuse_to_be_asked():
    picky = Picky()

    def kernel():
        return picky

    assert fingerprint(kernel) == fingerprint(kernel)
