"""The examples in docstrings run unchanged and print the shown output."""

import doctest
import gc
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch
import torch._dynamo  # before foo_ops.device._dynamo, which it imports

import foo_ops
import foo_ops.distributed
from foo_ops import language
from foo_ops.kernels.interpret import language as interpreted
from foo_ops.kernels.interpret.views import Pointer, View
from foo_ops.kernels.lang import views

# Programs, modules that need a separate process, and modules that need a missing library.
LEFT_OUT = (
    *("foo_ops.demo.__main__", "foo_ops.testing.pytest_plugin"),
    *("foo_ops.testing.conformance.", "foo_ops.integrations.lightning"),
)
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(foo_ops.__path__, "foo_ops.")
    if not module.name.startswith(LEFT_OUT)
)
PUBLIC = (
    *(foo_ops, foo_ops.custom_ops, foo_ops.device, foo_ops.distributed, foo_ops.library),
    foo_ops.testing,
)


PARSER = doctest.DocTestParser()


def lines_of_a_kernel():
    """Return the names that examples of foo_ops.language use. They run interpreted."""
    memory = [torch.arange(start, start + 64.0) for start in (1, 2)]
    x, y = (Pointer(tensor.data_ptr(), "float32", 0, 64) for tensor in memory)
    names = {"x": x, "y": y, "i": 1, "size": 64, "total": x[0], "memory": memory}
    matrices = [torch.zeros(64, 64) for _ in range(3)]
    type_ = views.View("float32", 2, False, False)
    for name, matrix in zip(("output", "a", "b"), matrices):
        names[name] = View(type_, matrix.data_ptr(), matrix.shape, matrix.stride())
    return names | {"language": interpreted, "matrices": matrices, "j": 1}


@pytest.fixture(autouse=True)
def no_garbage(quick_collections):
    """Keep other tests' garbage from being freed within an example that counts memory."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def run(name):
    torch.manual_seed(0)
    vocabulary = tuple(f"foo_ops.kernels.{it}." for it in ("interpret", "lang", "math", "simd"))
    is_vocabulary = name.startswith(vocabulary)
    return doctest.testmod(
        importlib.import_module(name),
        extraglobs={"torch": torch, "foo_ops": foo_ops}
        | (lines_of_a_kernel() if is_vocabulary else {}),
        optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS,
    )


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    assert run(name).failed == 0


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_every_public_function_has_an_example(module):
    values = [getattr(module, name) for name in module.__all__ if not name.startswith("_")]
    ours = [it for it in values if inspect.isfunction(it) and it.__module__.startswith("foo_ops.")]
    assert ours
    assert [it.__name__ for it in ours if not has_example(it)] == []


def has_example(function):
    (found,) = doctest.DocTestFinder(exclude_empty=False).find(function)
    return len(found.examples) > 0


@pytest.mark.parametrize("name", foo_ops.__all__)
def test_reference_has_every_operator(name):
    page = (Path(__file__).parents[2] / "docs/api/operators.md").read_text()
    assert re.search(rf"^::: \S+\.{name}$", page, re.MULTILINE)


@pytest.mark.parametrize("name", language.__all__)
def test_each_name_of_the_language_has_an_example(name):
    """Interpreted functions have the same docstrings."""
    text = getattr(language, name).__doc__
    assert any(f"language.{name}(" in example.source for example in PARSER.get_examples(text))
    assert getattr(interpreted, name).__doc__ == text
