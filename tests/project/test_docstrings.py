"""The examples in docstrings run as they stand and print what they say."""

import doctest
import importlib
import pkgutil

import pytest
import torch
import torch._dynamo  # before foo_ops.device._dynamo, which it imports

import foo_ops

# Programs, and what needs a process of its own.
LEFT_OUT = ("foo_ops.demo.__main__", "foo_ops.testing.pytest_plugin")
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(foo_ops.__path__, "foo_ops.")
    if not module.name.startswith(LEFT_OUT)
)
WITH_EXAMPLES = (
    *("foo_ops.custom_ops", "foo_ops.language", "foo_ops.library", "foo_ops.ops.attention"),
    *("foo_ops.testing.checks.matrix", "foo_ops.testing.checks.verdict", "foo_ops.testing.spec"),
)


def run(name):
    torch.manual_seed(0)
    return doctest.testmod(
        importlib.import_module(name),
        extraglobs={"torch": torch, "foo_ops": foo_ops},
        optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS,
    )


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    assert run(name).failed == 0


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_are_found(name):
    assert run(name).attempted > 0
