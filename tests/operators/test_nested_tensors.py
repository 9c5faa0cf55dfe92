"""Operators that do not work on rows refuse nested tensors with their own message."""

import re

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from foo_ops import library, testing

LAYOUTS = (torch.strided, torch.jagged)
ops = torch.ops.foo
# These arguments may be nested: see test_jagged_tensors.py.
ROWS = {
    ops.abs.default: ("input",),
    ops.silu_mul.default: ("gate", "up"),
    ops.rms_norm.default: ("input",),
    ops.add_rms_norm.default: ("input", "residual"),
    ops.layer_norm.default: ("input",),
    ops.add_layer_norm.default: ("input", "residual"),
    ops.linear.default: ("input",),
    ops.linear_activation.default: ("input",),
    ops.linear_silu_mul.default: ("input",),
    ops.linear_silu_mul_quantized.default: ("input",),
    ops.linear_int8.default: ("input",),
    ops.linear_fp8.default: ("input",),
    ops.linear_int4.default: ("input",),
    ops.linear_mxfp4.default: ("input",),
    ops.linear_table4.default: ("input",),
}


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
        if isinstance(given, torch.Tensor) and name not in ROWS.get(spec.operator, ()):
            inputs = [*sample.inputs]
            inputs[place] = nested(layout, device)
            outs = [it.name for it in spec.operator._schema.arguments if it.is_out]
            keywords = sample.keywords | dict.fromkeys(outs, torch.ones(2, 4, device=device))
            refused(spec.operator, name, *inputs, **keywords)


def test_where_gradients_are_recorded():
    query = nested(torch.jagged).requires_grad_()
    refused(ops.linear.default, "weight", torch.ones(2, 4, requires_grad=True), query)
    refused(ops.attention.default, "query", query, torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4))
    refused(ops.softmax_cross_entropy.default, "logits", query, torch.zeros(5, dtype=torch.int64))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_in_inference_mode(layout, device):
    with torch.inference_mode():
        input = nested(layout, device)
        refused(ops.abs_.default, "input", input)
        refused(ops.linear.default, "weight", torch.ones(2, 4, device=device), input)


def test_fake_tensors():
    """Only jagged tensors: strided nested tensors have no fakes."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        input, weight = mode.from_tensor(nested(torch.jagged)), torch.ones(2, 4)
        refused(ops.abs_.default, "input", input)
        refused(ops.linear.default, "weight", weight, input)


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


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(context, input):
        return input * 3

    @staticmethod
    def backward(context, grad):
        return grad * 3


def define_triple(name):
    library.define(name, "(Tensor input) -> Tensor")
    for device in ("cpu", "foo"):
        library.register_kernel(name, device, library.elementwise_kernel(lambda x: 3 * x))
    return getattr(torch.ops.foo_nested, name.partition("::")[2]).default


@pytest.mark.parametrize("key", ["Autograd", "AutogradNestedTensor"])
def test_kernels_of_authors_go_first(key):
    operator = define_triple(f"foo_nested::of_{key.lower()}")
    own = torch.library.Library("foo_nested", "FRAGMENT")
    own.impl(operator, Tripled.apply, key)
    input = nested(torch.jagged).requires_grad_()
    operator(input).values().sum().backward()
    torch.testing.assert_close(input.grad.values(), torch.full([5, 4], 3.0))


def test_composites_take_what_kernels_take():
    """A composite of PyTorch's operators alone would accept this tensor."""
    operator = define_triple("foo_nested::with_composite")
    library.register_autograd(operator.name(), composite=lambda input: input * 3)
    refused(operator, "input", nested(torch.jagged).requires_grad_())


def test_the_refusal_is_registered_once():
    """A second registration would print a warning."""
    dump = torch._C._dispatch_dump(define_triple("foo_nested::of_two_devices").name())
    assert dump.count("CompositeImplicitAutogradNestedTensor") == 1


def test_rows_are_arguments():
    define_triple("foo_nested::misspelt")
    message = r"\Afoo_nested::misspelt: rows must be among the arguments \['input'\], got 'inptu'\Z"
    with pytest.raises(ValueError, match=message):
        library.register_nested_rows("foo_nested::misspelt", "inptu")


def test_operators_without_a_kernel_of_numba():
    library.define("foo_nested::in_python", "(Tensor input, Tensor[] others) -> Tensor")
    library.impl("foo_nested::in_python", "cpu", lambda input, others: input * 2)
    library.register_nested_rows("foo_nested::in_python", "input")
    operator = torch.ops.foo_nested.in_python.default
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            input = nested(torch.jagged)
            assert operator(input, []).values().eq(2).all()
    refused(operator, "others", torch.ones(2, 4), [nested(torch.jagged)])
