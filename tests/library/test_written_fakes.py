"""Fake kernels of operators that write: which checks they make for the kernel."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from foo_ops import library

SCHEMA = "(Tensor(a!) input, Tensor(b!) other) -> ()"


def add_rows(input, other, rows):
    for row in rows:
        values, summands = input.row(row), other.row(row)
        for i in range(input.shape[-1]):
            values[i] += summands[i]


def add_in_python(input, other):
    input.add_(other)


def define(name, devices):
    library.define(name, SCHEMA)
    library.register_fake(name, lambda input, other: None)
    library.register_kernel(name, devices, library.tile_kernel(add_rows))


def calls(operator, device):
    """Pass one tensor as both the read and the written argument, real and fake."""
    input = torch.ones(3, device=device)
    operator(input, input)
    assert input.eq(2).all()
    with FakeTensorMode() as mode:
        operator(*[mode.from_tensor(input)] * 2)


def refused(operator, device):
    message = "must not share memory with"
    input = torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match=message):
        operator(input, input)
    with FakeTensorMode() as mode, pytest.raises(RuntimeError, match=message):
        operator(*[mode.from_tensor(input)] * 2)


def test_checks_end_with_the_kernel(device):
    define("foo_written_fakes::again_", device)
    refused(torch.ops.foo_written_fakes.again_.default, device)
    library.define("foo_written_fakes::again_", SCHEMA)
    library.register_fake("foo_written_fakes::again_", lambda input, other: None)
    library.register_kernel("foo_written_fakes::again_", device, add_in_python)
    # The checks belonged to the previous operator.
    calls(torch.ops.foo_written_fakes.again_.default, device)


def test_checks_are_of_the_device():
    define("foo_written_fakes::of_foo_", "foo")
    library.register_kernel("foo_written_fakes::of_foo_", "cpu", add_in_python)
    operator = torch.ops.foo_written_fakes.of_foo_.default
    refused(operator, "foo")
    calls(operator, "cpu")
