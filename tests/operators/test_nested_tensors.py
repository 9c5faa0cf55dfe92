"""Nested tensors are refused by every operator, where PyTorch would speak of its own inside."""

import re

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from foo_ops import library, testing

LAYOUTS = (torch.strided, torch.jagged)


def nested(layout, device="cpu"):
    rows = [torch.ones(count, 4, device=device) for count in (2, 3)]
    return torch.nested.nested_tensor(rows, layout=layout)


def refused(operator, name, *inputs, **keywords):
    function = operator.name().partition("::")[2].partition(".")[0]
    message = f"{function}: {name} must be a dense tensor, got a nested one"
    with pytest.raises(NotImplementedError, match=rf"\A{re.escape(message)}\Z"):
        operator(*inputs, **keywords)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("spec", testing.OPERATORS, ids=lambda it: it.name)
def test_every_operator(spec, layout, device):
    sample = spec.samples[spec.essential[-1]](torch.float32).to(device)
    names = [argument.name for argument in spec.operator._schema.arguments]
    for place, (name, given) in enumerate(zip(names, sample.inputs)):
        if isinstance(given, torch.Tensor):
            inputs = [*sample.inputs]
            inputs[place] = nested(layout, device)
            outs = [it.name for it in spec.operator._schema.arguments if it.is_out]
            keywords = sample.keywords | dict.fromkeys(outs, torch.ones(2, 4, device=device))
            refused(spec.operator, name, *inputs, **keywords)


def test_where_gradients_are_recorded():
    input, weight = nested(torch.jagged).requires_grad_(), torch.ones(2, 4, requires_grad=True)
    refused(torch.ops.foo.linear.default, "input", input, weight)
    refused(torch.ops.foo.linear.default, "weight", weight, input)
    refused(torch.ops.foo.abs.default, "input", input)


def test_in_inference_mode(device):
    with torch.inference_mode():
        input = nested(torch.strided, device)
        refused(torch.ops.foo.abs.default, "input", input)
        refused(torch.ops.foo.abs_.default, "input", input)
        refused(torch.ops.foo.linear.default, "input", input, torch.ones(2, 4, device=device))


def test_fake_tensors():
    """Strided nested tensors have no fakes."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        input, weight = mode.from_tensor(nested(torch.jagged)), torch.ones(2, 4)
        refused(torch.ops.foo.abs.default, "input", input)
        refused(torch.ops.foo.linear.default, "weight", weight, input)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_lists(layout, device):
    library.define("foo_nested::first", "(Tensor[] tensors) -> Tensor")
    library.register_fake("foo_nested::first", lambda tensors: tensors[0].new_empty(3))
    kernel = library.tile_kernel(
        lambda tensors, output, rows: None, tiles=lambda output: output.size
    )
    library.register_kernel("foo_nested::first", ("cpu", "foo"), kernel)
    tensors = [torch.ones(3, device=device), nested(layout, device)]
    refused(torch.ops.foo_nested.first.default, "tensors", tensors)
