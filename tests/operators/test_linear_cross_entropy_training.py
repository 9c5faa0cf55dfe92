"""foo::linear_cross_entropy_training: exponentials kept for the gradients."""

import dataclasses
import functools
import re

import pytest
import torch
import torch.nn.functional as F
from support.parts import whole
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import foo_ops
from foo_ops import library
from foo_ops.testing import (
    LINEAR_CROSS_ENTROPY,
    Sample,
    check_gradients,
    check_outputs,
    cotangents_for,
    random,
)
from foo_ops.testing.specs.cross_entropy import gradient_budget

FORWARD = torch.ops.foo.linear_cross_entropy.default
TRAINING = torch.ops.foo.linear_cross_entropy_training.default
BACKWARD = torch.ops.foo.linear_cross_entropy_training_backward.default
SPEC = dataclasses.replace(
    LINEAR_CROSS_ENTROPY, gradient_budget=functools.partial(gradient_budget, roundings_of_logits=2)
)


def draw(rows, width, classes, dtype=torch.float32, device="cpu"):
    hidden, weight, bias = random("kept", (rows, width), (classes, width), (classes,), dtype=dtype)
    generator = torch.Generator().manual_seed(rows)
    target = torch.randint(classes, (rows,), generator=generator)
    return [it.to(device) for it in (hidden, weight, target, bias)]


def check(sample, dtype, device):
    """Compare loss, statistics and gradients of the training operator with the reference."""
    own = sample.to(device).requiring_grad()
    outputs = own.call(TRAINING)[:3]
    cotangents = cotangents_for(outputs)
    gradients = torch.autograd.grad(outputs, own.differentiable(), cotangents)
    on_cpu = sample.requiring_grad()
    check_outputs(SPEC, on_cpu, dtype, tuple(it.detach().cpu() for it in outputs))
    gradients, cotangents = (tuple(it.cpu() for it in them) for them in (gradients, cotangents))
    check_gradients(SPEC, on_cpu, gradients, cotangents)


@pytest.mark.parametrize("dtype", SPEC.dtypes)
@pytest.mark.parametrize("name", SPEC.samples)
def test_gradients_are_those_of_the_reference(name, dtype, device):
    torch.manual_seed(0)
    check(SPEC.samples[name](dtype), dtype, device)


# The float64 gradients and their scale need half a gigabyte.
LARGE = (3, 513, 16_385)


@pytest.mark.parametrize(
    "shapes", [[(31, 63, 255), (257, 33, 2049), (700, 150, 4301)], *whole([LARGE])], ids=len
)
@pytest.mark.parametrize("dtype", SPEC.dtypes)
def test_sizes_around_those_of_blocks(dtype, shapes):
    """Some of these samples keep part of the rows, others whole bands."""
    for shape in shapes:
        check(Sample(tuple(draw(*shape, dtype)), {"label_smoothing": 0.1}), dtype, "cpu")


def test_an_infinite_logit(device):
    """All results are NaN, as where the backward pass recomputes the logits."""
    hidden, weight, target, bias = draw(8, 8, 300, device=device)
    bias[270] = torch.inf
    tensors = [it.requires_grad_() for it in (hidden, weight, bias)]
    found = []
    for operator in (TRAINING, FORWARD):
        loss = operator(*tensors[:2], target, bias)[0]
        found.append(torch.autograd.grad(loss, tensors[1:], torch.ones_like(loss)))
    for ours, expected in zip(*found):
        assert ours.isnan().all()
        torch.testing.assert_close(ours, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", SPEC.dtypes)
def test_what_is_kept(dtype, device):
    """Exponentials for as many rows as hidden has columns: exp(logit - base), at most 1."""
    hidden, weight, target, bias = draw(50, 37, 700, dtype, device)
    *loss, exponentials, bases = TRAINING(hidden, weight, target, bias)
    for found, expected in zip(loss, FORWARD(hidden, weight, target, bias)):
        assert found.equal(expected)
    assert exponentials.shape == (37, 700)
    assert bases.shape == (3, 37)
    assert exponentials.le(1).all()
    logits = F.linear(*(it.double().cpu() for it in (hidden, weight, bias)))[:37]
    kept = bases.double().cpu().repeat_interleave(256, 0)[:700].T
    torch.testing.assert_close(
        exponentials.double().cpu(),
        (logits - kept).exp(),
        rtol=2**-8 if dtype == torch.bfloat16 else 1e-4,
        atol=1e-30,
    )


@pytest.mark.parametrize("name", ["size7", "no bias", "ignored", "capped", "several chunks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(name, dtype, device):
    torch.manual_seed(0)
    sample = SPEC.samples[name](dtype).to(device)
    library.opcheck(TRAINING, sample.inputs, sample.keywords)
    library.opcheck(TRAINING, sample.requiring_grad().inputs, sample.keywords)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"ignore_index": 2}], ids=str)
def test_derivatives(options, device):
    hidden, weight, target, bias = draw(5, 4, 6, torch.float64, device)
    tensors = [it.requires_grad_() for it in (hidden, weight, bias)]

    def loss(hidden, weight, bias):
        return TRAINING(hidden, weight, target, bias, **options)[:3]

    assert torch.autograd.gradcheck(loss, tensors, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(loss, tensors)


def test_recorded_calls_keep_and_others_do_not():
    hidden, weight, target, _ = draw(5, 4, 6)
    calls = []

    class Calls(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            calls.append(function)
            return function(*args, **(kwargs or {}))

    with Calls():
        foo_ops.linear_cross_entropy(hidden, weight, target)
        foo_ops.linear_cross_entropy(hidden, weight.requires_grad_(), target, softcap=2.0)
        with torch.no_grad():
            foo_ops.linear_cross_entropy(hidden, weight, target)
        assert TRAINING not in calls
        foo_ops.linear_cross_entropy(hidden, weight, target).backward()
    assert TRAINING in calls
    assert BACKWARD in calls


def test_compiled_training_keeps(device):
    hidden, weight, target, _ = draw(8, 8, 300, device=device)
    found = []
    for function in (foo_ops.linear_cross_entropy, torch.compile(foo_ops.linear_cross_entropy)):
        tensors = [it.clone().requires_grad_() for it in (hidden, weight)]
        with FlopCounterMode(display=False) as counter:
            loss = function(*tensors, target)
            found.append([loss, *torch.autograd.grad(loss, tensors)])
        assert counter.get_total_flops() == 3 * 2 * 8 * 8 * 300
    for ours, expected in zip(*found):
        torch.testing.assert_close(ours, expected)


def test_each_element_of_a_map_has_gradients_of_its_own(device):
    hidden, weight, target, bias = draw(12, 5, 6, torch.float64, device)

    def gradients(hidden, target):
        return torch.func.grad(foo_ops.linear_cross_entropy, (0, 1, 3))(
            hidden, weight, target, bias
        )

    found = torch.vmap(gradients)(hidden.view(3, 4, 5), target.view(3, 4))
    for index in range(3):
        expected = gradients(hidden.view(3, 4, 5)[index], target.view(3, 4)[index])
        for ours, other in zip(found, expected):
            torch.testing.assert_close(ours[index], other)
    weights = torch.stack([weight, 2 * weight])
    found = torch.vmap(lambda it: TRAINING(hidden, it, target)[0])(weights)
    torch.testing.assert_close(found[1], FORWARD(hidden, 2 * weight, target)[0])


def test_autocast(device):
    tensors = draw(6, 8, 9, device=device)
    hidden, weight, target, bias = tensors
    for it in (hidden, weight, bias):
        it.requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16):
        found = foo_ops.linear_cross_entropy(hidden, weight, target, bias)
    cast = [it.detach().bfloat16() for it in (hidden, weight, bias)]
    assert found.equal(foo_ops.linear_cross_entropy(*cast[:2], target, cast[2]))
    found.backward()
    assert hidden.grad.dtype == torch.float32


def test_a_graph_is_differentiated_twice():
    """The backward pass does not write to the kept exponentials."""
    hidden, weight, target, _ = draw(9, 8, 300)
    tensors = [it.requires_grad_() for it in (hidden, weight)]
    loss = foo_ops.linear_cross_entropy(*tensors, target)
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    second = torch.autograd.grad(loss, tensors)
    assert all(map(torch.equal, first, second))


REFUSED = {
    "exponentials must have 2 dimensions (rows, V), got 1": (
        ValueError, torch.zeros(6), torch.zeros(1, 3), 0.0,
    ),
    "exponentials must have at most 3 rows, got 4": (
        ValueError, torch.zeros(4, 6), torch.zeros(1, 4), 0.0,
    ),
    "exponentials must have at most 0 rows, got 3": (
        ValueError, torch.zeros(3, 6), torch.zeros(1, 3), 2.0,
    ),
    "exponentials must have 6 columns, one for each row of weight, got 5": (
        ValueError, torch.zeros(3, 5), torch.zeros(1, 3), 0.0,
    ),
    "exponentials must be on cpu as hidden is, got foo:0": (
        ValueError, torch.zeros(3, 6, device="foo"), torch.zeros(1, 3), 0.0,
    ),
    "exponentials must be float32 where hidden is float32, got bfloat16": (
        TypeError, torch.zeros(3, 6).bfloat16(), torch.zeros(1, 3), 0.0,
    ),
    "bases must have shape [1, 3] for the blocks of columns and the rows of exponentials, got [2, "
    "3]": (
        ValueError, torch.zeros(3, 6), torch.zeros(2, 3), 0.0,
    ),
    "bases must be float32 where hidden is float32, got float64": (
        TypeError, torch.zeros(3, 6), torch.zeros(1, 3).double(), 0.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("is_fake", [False, True])
@pytest.mark.parametrize("message", REFUSED)
def test_refuses(message, is_fake):
    error, exponentials, bases, softcap = REFUSED[message]
    hidden, weight, target = torch.zeros(5, 3), torch.zeros(6, 3), torch.zeros(5).long()
    tensors = [None, None, torch.ones(()), hidden, weight, target, None, torch.zeros(5)]
    tensors += [exponentials, bases]
    mode = FakeTensorMode(allow_non_fake_inputs=True) if is_fake else torch.no_grad()
    whole = f"linear_cross_entropy_training_backward: {message}"
    with mode, pytest.raises(error, match=rf"\A{re.escape(whole)}\Z"):
        BACKWARD(*tensors, softcap=softcap)
