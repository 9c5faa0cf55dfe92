"""Declarations of how processes share operators; tests/distributed runs them."""

import re

import pytest
import torch
from support.processes import python

from foo_ops import library
from foo_ops.library.operators import find
from foo_ops.library.rules import RULES, named_dimensions


@pytest.fixture
def lib():
    with torch.library._scoped_library("sharding_test", "FRAGMENT") as lib:
        lib.define("pair(Tensor a, Tensor? b, float c) -> (Tensor, Tensor)")
        lib.define("many(Tensor[] all) -> Tensor")
        yield lib


@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        (
            "rows -> rows, rows",
            "sharding_test::pair: sharding must name the dimensions of a, b -> 2 results, "
            "got 'rows -> rows, rows'",
        ),
        (
            "rows, rows",
            "sharding_test::pair: sharding must name the dimensions of a, b -> 2 results, "
            "got 'rows, rows'",
        ),
        (
            "rows ..., . -> rows, rows",
            "sharding_test::pair: sharding must have ... before other dimensions, got 'rows ...'",
        ),
    ],
)
def test_other_dimensions(lib, sharding, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        library.register_sharding("sharding_test::pair", sharding, lib=lib)


def test_lists(lib):
    with pytest.raises(TypeError) as error:
        library.register_sharding("sharding_test::many", ". -> .", lib=lib)
    assert str(error.value) == (
        "sharding_test::many: register_sharding does not support lists of tensors; use "
        "torch.distributed.tensor.experimental.register_sharding"
    )


def test_a_rule_ends_with_its_library():
    with torch.library._scoped_library("sharding_test", "FRAGMENT") as lib:
        lib.define("one(Tensor a) -> Tensor")
        library.register_sharding("sharding_test::one", lib=lib)(lambda a: "rows -> rows")
        operator = find("sharding_test::one")
        assert RULES[operator](None) == "rows -> rows"
        library.register_sharding("sharding_test::one", ". -> .", lib=lib)
        assert RULES[operator](None) == ". -> ."
    assert operator not in RULES


def test_a_kernel_leaves_a_declared_rule():
    with torch.library._scoped_library("sharding_test", "FRAGMENT") as lib:
        lib.define("one(Tensor a) -> Tensor")
        operator = find("sharding_test::one")
        kernel = library.elementwise_kernel(lambda a: -a)
        library.register_sharding(operator, ". -> .", lib=lib)
        library.register_kernel(operator, "cpu", kernel, lib=lib)
        assert RULES[operator]() == ". -> ."


def test_names_count_from_the_end():
    assert named_dimensions(("b", "h", ".", "."), 4) == {"b": 0, "h": 1}
    assert named_dimensions(("b", "h", ".", "."), 3) == {"h": 0}
    assert named_dimensions(("...", "."), 3) == {"...1": 1, "...2": 0}
    assert named_dimensions(("...", "."), 0) == {}
    assert named_dimensions(("h", "."), 3) == {"h": 1}


def test_operators_are_known_after_the_import():
    """Rules are registered when a program imports DTensors, before or after the definition."""
    program = """
import sys, torch, foo_ops
assert "torch.distributed.tensor" not in sys.modules
import torch.distributed.tensor as tensor
known = tensor.DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
names = ["abs", "attention_seeded", "attention_varlen_seeded"]
names += ["layer_norm", "rms_norm", "rotary_embedding", "silu_mul"]
assert all(getattr(torch.ops.foo, name).default in known for name in names)
foo_ops.library.define("sharding_test::later", "(Tensor a) -> Tensor")
foo_ops.library.register_kernel(
    "sharding_test::later", "cpu", foo_ops.library.elementwise_kernel(lambda a: -a)
)
assert torch.ops.sharding_test.later.default in known
"""
    result = python(program)
    assert result.returncode == 0, result.stderr
