"""foo::abs refuses bad input word for word, eager and fake."""

import pytest
import torch
from support.attention_errors import raises

import foo_ops


@pytest.mark.parametrize(
    ("operator", "allowed"),
    [
        ("abs", "an integer, floating-point or complex dtype"),
        ("abs_", "an integer or floating-point dtype"),
    ],
)
def test_abs_dtype(operator, allowed, mode, device):
    with mode, raises(TypeError, f"{operator}: input must have {allowed}, got bool"):
        getattr(torch.ops.foo, operator)(torch.zeros(3, dtype=torch.bool, device=device))


def test_abs_out_dtype(mode, device):
    message = "abs: out must have a dtype that float32 can be cast to, got int64"
    with mode, raises(TypeError, message):
        out = torch.zeros(3, dtype=torch.int64, device=device)
        foo_ops.abs(torch.zeros(3, device=device), out=out)
