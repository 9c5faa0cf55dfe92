"""The operators of examples/operators refuse bad input in one sentence, in eager and in fake."""

import importlib
import re

import pytest
import torch
from torch import Tensor

f32, i64 = torch.ones, lambda *shape: torch.ones(*shape, dtype=torch.int64)

WRONG = [
    (
        "layer_norm",
        (i64(2, 3),),
        TypeError("layer_norm: input must be floating-point, got torch.int64"),
    ),
    (
        "layer_norm",
        (f32(()),),
        ValueError("layer_norm: input must have at least 1 dimension, got 0"),
    ),
    (
        "layer_norm",
        (f32(2, 3), i64(3)),
        TypeError("layer_norm: weight must be floating-point, got torch.int64"),
    ),
    (
        "layer_norm",
        (f32(2, 3), f32(3), f32(2)),
        ValueError("layer_norm: bias must have shape [3] as input's rows have, got [2]"),
    ),
]


def function_of(name):
    module = importlib.import_module(f"examples.operators.{name}")
    return getattr(module, name)


def split(arguments):
    *inputs, last = arguments
    return (inputs, last) if isinstance(last, dict) else (arguments, {})


@pytest.mark.parametrize("where", ["cpu", "foo", "meta"])
@pytest.mark.parametrize(("name", "arguments", "error"), WRONG, ids=lambda it: str(it)[:60])
def test_wrong_input(name, arguments, error, where):
    inputs, options = split(arguments)
    moved = [it.to(where) if isinstance(it, Tensor) else it for it in inputs]
    with pytest.raises(type(error), match=f"^{re.escape(str(error))}$"):
        function_of(name)(*moved, **options)
