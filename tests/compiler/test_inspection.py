"""Users' functions are read without calling them."""

import math

import torch

from foo_ops.kernels.compiler import inspection

FACTOR = 2.0


def first_line(function):
    return function.__code__.co_firstlineno


def closing_over(scale):
    def function(x):
        import string

        squares = [torch.nn.functional.relu(it) for it in x.shape]
        return math.exp(scale.real) * FACTOR, squares, string

    return function


def test_names():
    """Include those in comprehensions."""
    code = closing_over(1.0).__code__
    assert inspection.global_names(code) == {"torch", "math", "FACTOR"}
    assert inspection.imported_names(code) == {"string"}
    assert inspection.attribute_names(code) == {"nn", "functional", "relu", "shape", "exp", "real"}
    assert not inspection.writes_globals(code)


def test_references():
    """A name comes with the attributes that are read from it, at their line."""
    function = closing_over(1.0)
    first = first_line(function)
    assert list(inspection.references(function.__code__)) == [
        (("torch", "nn", "functional", "relu"), first + 3),
        (("math", "exp"), first + 4),
        (("scale", "real"), first + 4),
        (("FACTOR",), first + 4),
    ]


def statements(x):
    with x:
        pass
    try:
        x()
    except ValueError:
        raise
    yield x


def test_statements():
    first = first_line(statements)
    lines = {
        kind: inspection.line_of(statements, kind)
        for kind in ("with", "except", "raise", "yield", "import")
    }
    assert lines["with"] == first + 1
    assert lines["raise"] in (first + 1, first + 6)
    assert lines["yield"] == first + 7
    assert lines["except"] is not None
    assert lines["import"] is None


def writes():
    def inner():
        global FACTOR
        FACTOR = 3.0

    return inner


def test_written_globals():
    assert inspection.writes_globals(writes.__code__)


def test_operations():
    assert inspection.count_operations(lambda x, y: math.exp(-x) * y[0] + 1.0) == 4


def returns(x):
    both = x, x + 1
    if x > 1:
        return both
    if x > 2:
        return x
    if x > 3:
        return 1, 2, 3
    return math.frexp(x)


def test_returned_counts():
    first = first_line(returns)
    assert list(inspection.returned_counts(returns)) == [
        (2, first + 3),
        (1, first + 5),
        (3, first + 7),
        (None, first + 8),
    ]


def test_equal_code_on_other_lines():
    texts = ("f = lambda x: (\n x.a\n .b)", "f = lambda x: (\n x.a\n\n .b)")
    codes = []
    for text in texts:
        scope = {}
        exec(compile(text, "here", "exec"), scope)
        codes.append(scope["f"].__code__)
    assert [inspection.events(code)[1].line for code in codes] == [3, 4]
