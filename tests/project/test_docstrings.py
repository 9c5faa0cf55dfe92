"""The examples in docstrings run as they stand and print what they say."""

import doctest
import importlib

import pytest

MODULES = (
    "foo_ops.custom_ops",
    "foo_ops.testing.checks.matrix",
    "foo_ops.testing.checks.verdict",
    "foo_ops.testing.spec",
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    results = doctest.testmod(
        importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert results.attempted > 0
    assert results.failed == 0
