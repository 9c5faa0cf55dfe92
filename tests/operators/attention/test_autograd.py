"""foo::attention and foo::attention_varlen have derivatives of all orders."""

import sys

import pytest
import torch
from support.attention_samples import ALL, ONCE, finite, for_each_once

import foo_ops
from foo_ops import library, testing
from foo_ops.testing import ATTENTION, ATTENTION_VARLEN
from foo_ops.testing.spec import random
from foo_ops.testing.specs.attention import SMALL, attention_sample, random_bias, random_mask
from foo_ops.testing.specs.attention_varlen import Pages, varlen_sample

pytestmark = pytest.mark.usefixtures("one_thread")

attention = torch.ops.foo.attention


@for_each_once
def test_first_derivatives_do_not_enter_python(spec, make):
    """A call with 8 floats takes 12 us; through Python it took 200 us."""
    sample = make(torch.float32).requiring_grad()
    sample.call(spec.operator)[0].sum().backward()
    files = []
    sys.setprofile(lambda frame, event, argument: files.append(frame.f_code.co_filename))
    try:
        sample.call(spec.operator)[0].sum().backward()
    finally:
        sys.setprofile(None)
    assert any("torch" in file for file in files)
    assert not [file for file in files if "foo_ops/ops" in file or "foo_ops/library" in file]


TWICE = {
    "no options": (ATTENTION, attention_sample(**SMALL, batch=1)),
    "bias": (ATTENTION, attention_sample(**SMALL, batch=1, bias=random_bias(2, 1, 5), scale=0.7)),
    "mask, a row that sees nothing": (
        ATTENTION,
        attention_sample(**SMALL, batch=1, bias=random_mask(3, 5, blind=[1]), is_causal=True),
    ),
    "all options": (ATTENTION, attention_sample(**SMALL, **ALL, batch=1, bias=random_bias(3, 5))),
    "packed": (ATTENTION_VARLEN, varlen_sample([(2, 3), (1, 2)], **ALL, head_dim=2)),
    "blocks": (ATTENTION_VARLEN, varlen_sample([(2, 3), (1, 2)], pages=Pages(2), head_dim=2)),
}


@pytest.mark.parametrize(
    ("spec", "make"),
    [*ONCE.values(), TWICE["no options"], TWICE["packed"], TWICE["blocks"]],
    ids=[*ONCE, "no options", "packed twice", "blocks twice"],
)
def test_operators_of_the_backward_pass(spec, make, device):
    """The backward operators are public, with and without slopes and sinks."""
    sample = make(torch.bfloat16).to(device)
    outputs = sample.call(spec.operator)
    cotangents = [tensor.to(device) for tensor in testing.cotangents_for(outputs)]
    operator = getattr(torch.ops.foo, f"{spec.operator._schema.name.partition('::')[2]}_backward")
    arguments = (*cotangents, *sample.inputs, *outputs, None)
    library.opcheck(
        operator.default,
        arguments,
        sample.keywords,
        test_utils=("test_schema", "test_faketensor"),
    )


for_each_twice = pytest.mark.parametrize(("spec", "make"), TWICE.values(), ids=TWICE.keys())


@for_each_twice
def test_gradgradcheck(spec, make, device):
    sample = make(torch.float64).to(device).requiring_grad()
    tensors = sample.differentiable()

    def function(*values):
        replaced = dict(zip(map(id, tensors), values))
        return finite(sample.map(lambda t: replaced.get(id(t), t)).call(spec.operator))

    assert torch.autograd.gradgradcheck(function, tensors)


def second_derivatives(sample, function, cotangents):
    """Differentiate with respect to the inputs and to the first cotangents."""
    tensors = sample.differentiable()
    outputs = sample.call(function)
    cotangents = [tensor.to(outputs[0].device).requires_grad_() for tensor in cotangents]
    first = torch.autograd.grad(outputs, tensors, cotangents, create_graph=True)
    total = sum((index + 1) * grad.square().sum() for index, grad in enumerate(first))
    return torch.autograd.grad(total, (*tensors, *cotangents))


LARGER = [
    ATTENTION.samples["4 heads on 2, causal"],
    ATTENTION.samples["bias (B, 1, 1, Sk) over several tiles"],
    ATTENTION.samples["all options over several tiles"],
    ATTENTION.samples["sinks, rows that see nothing"],
]


@pytest.mark.parametrize("make", LARGER)
def test_second_derivatives_over_several_tiles(make, device):
    sample = make(torch.float64).to(device).requiring_grad()
    exact = sample.map(lambda t: testing.spec.exact(t).detach().requires_grad_(t.requires_grad))
    cotangents = testing.cotangents_for(exact.call(ATTENTION.reference))
    expected = second_derivatives(exact, ATTENTION.reference, cotangents)
    actual = second_derivatives(sample, ATTENTION.operator, cotangents)
    for gradient, value in zip(actual, expected):
        torch.testing.assert_close(
            gradient.cpu(), value, rtol=0, atol=1e-11 * value.abs().max().item()
        )


def test_second_derivatives_only_where_they_are_needed(device):
    """Neither backward pass computes the gradient of a key that needs none."""
    query, key, value = random("some", *[(1, 2, 5, 4)] * 3, dtype=torch.float64)
    query = query.to(device).requires_grad_()
    output = foo_ops.attention(query, key.to(device), value.to(device))
    (gradient,) = torch.autograd.grad(output.sum(), query, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), query)
    exact = query.detach().cpu().requires_grad_()
    output, _ = ATTENTION.reference(exact, key, value)
    (gradient,) = torch.autograd.grad(output.sum(), exact, create_graph=True)
    (expected,) = torch.autograd.grad(gradient.square().sum(), exact)
    torch.testing.assert_close(second.cpu(), expected, rtol=1e-10, atol=1e-12)


def test_third_derivatives(device):
    query, key, value = random("thrice", *[(1, 1, 4, 3)] * 3, dtype=torch.float64)
    results = []
    for place, function in ((device, attention), ("cpu", ATTENTION.reference)):
        x = query.to(place).requires_grad_()
        total = function(x, key.to(place), value.to(place))[0].square().sum()
        for _ in range(3):
            (gradient,) = torch.autograd.grad(total, x, create_graph=True)
            total = gradient.square().sum()
        results.append(gradient.detach().cpu())
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9 * results[1].abs().max().item())
