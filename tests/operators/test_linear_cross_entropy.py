"""foo::linear_cross_entropy: sizes around blocks and chunks, memory, targets, and errors.

Properties of every operator are tested in test_matrix.py.
"""

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from support.exact import assert_near
from support.parts import whole
from torch._subclasses.fake_tensor import FakeTensorMode

import foo_ops
from foo_ops.testing import LINEAR_CROSS_ENTROPY as SPEC
from foo_ops.testing import Sample, check_gradients, check_outputs, cotangents_for, random

OPERATOR = torch.ops.foo.linear_cross_entropy
BACKWARD = torch.ops.foo.linear_cross_entropy_backward


def draw(rows, width, classes, dtype=torch.float32, device="cpu"):
    hidden, weight, bias = random("loss", (rows, width), (classes, width), (classes,), dtype=dtype)
    generator = torch.Generator().manual_seed(rows)
    target = torch.randint(classes, (rows,), generator=generator)
    return [it.to(device) for it in (hidden, weight, target, bias)]


SHAPES = [(31, 63, 255), (32, 64, 257), (241, 127, 511), (257, 33, 2049), (513, 9, 63)]
# The float64 gradients and their scale need half a gigabyte.
LARGE = (3, 513, 16_385)


@pytest.mark.parametrize("shapes", [SHAPES, *whole([LARGE])], ids=len)
@pytest.mark.parametrize("dtype", SPEC.dtypes)
def test_sizes_around_those_of_blocks(dtype, shapes):
    for rows, width, classes in shapes:
        sample = Sample(tuple(draw(rows, width, classes, dtype)), {"softcap": 20.0})
        sample = sample.requiring_grad()
        outputs = SPEC.call(sample)
        check_outputs(SPEC, sample, dtype, tuple(it.detach() for it in outputs))
        cotangents = cotangents_for(outputs)
        gradients = torch.autograd.grad(outputs, sample.differentiable(), cotangents)
        check_gradients(SPEC, sample, gradients, cotangents)


@pytest.mark.parametrize("dtype", SPEC.dtypes)
@pytest.mark.parametrize("shape", [(1, 70, 5000), (33, 30, 3000), (600, 40, 300)])
def test_threads_do_not_change_the_results(shape, dtype):
    hidden, weight, target, bias = draw(*shape, dtype)
    tensors = [it.requires_grad_() for it in (hidden, weight, bias)]
    threads, found = torch.get_num_threads(), []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        results = OPERATOR(hidden, weight, target, bias, label_smoothing=0.1)
        found.append([*results, *torch.autograd.grad(results[2], tensors)])
    torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def peak_of(function):
    torch.foo.synchronize()
    torch.foo.reset_peak_memory_stats()
    before = torch.foo.memory_allocated()
    result = function()
    return torch.foo.max_memory_allocated() - before, result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_does_not_grow_with_the_logits(dtype):
    """Besides the gradients: a chunk, and sums of hidden's gradient. Logits would need 65 MB.

    Between the passes, as many exponentials are kept as the weight has elements.
    """
    rows, width, classes = 256, 16, 64_000
    hidden, weight, target, _ = draw(rows, width, classes, dtype, "foo")
    hidden.requires_grad_()
    weight.requires_grad_()
    peak, loss = peak_of(lambda: foo_ops.linear_cross_entropy(hidden, weight, target))
    # Three numbers per row and split of the classes, of which there are at most 64.
    statistics = 3 * 64 * rows * 4 + 2**14
    bases = 4 * width * (classes // 256)
    assert peak <= statistics + weight.nbytes + bases
    with torch.no_grad():
        peak, _ = peak_of(lambda: foo_ops.linear_cross_entropy(hidden, weight, target))
    assert peak <= statistics
    peak, _ = peak_of(loss.backward)
    sums = 4 * hidden.numel()
    chunk = rows * 2048 * dtype.itemsize
    assert peak <= hidden.nbytes + weight.nbytes + sums + chunk + 2**15


@pytest.mark.parametrize("needed", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)])
def test_gradients_of_what_requires_one_alone(needed, device):
    hidden, weight, target, bias = draw(5, 7, 300, device=device)
    names = ("hidden_requires_grad", "weight_requires_grad", "bias_requires_grad")
    _, logsumexp, mean = OPERATOR(hidden, weight, target, bias)
    found = BACKWARD(
        None, None, torch.ones_like(mean), hidden, weight, target, bias, logsumexp,
        **dict(zip(names, map(bool, needed))),
    )  # fmt: skip
    tensors = [it.double().cpu().requires_grad_() for it in (hidden, weight, bias)]
    loss = F.cross_entropy(F.linear(*tensors), target.cpu())
    expected = torch.autograd.grad(loss, tensors)
    for gradient, value, is_needed in zip(found, expected, needed):
        if is_needed:
            assert_near(gradient, value)
        else:
            assert gradient.numel() == 0


def test_gradients_of_float16_may_be_smaller_than_its_numbers():
    """Gradients of the logits are 1e-9 here; the smallest float16 is 6e-8."""
    rows, classes = 1000, 4000
    hidden, weight = torch.ones(rows, 1).half(), torch.zeros(classes, 1).half().requires_grad_()
    target = torch.zeros(rows, dtype=torch.int64)
    foo_ops.linear_cross_entropy(hidden, weight, target).backward()
    torch.testing.assert_close(weight.grad[1:], torch.full((classes - 1, 1), 1 / classes).half())


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"ignore_index": 2}], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_reductions_are_those_of_torch(reduction, options):
    hidden, weight, target, bias = draw(9, 5, 6, torch.float64)
    tensors = [it.requires_grad_() for it in (hidden, weight, bias)]
    options["reduction"] = reduction
    ours = foo_ops.linear_cross_entropy(hidden, weight, target, bias, **options)
    theirs = F.linear_cross_entropy(hidden, weight, target, linear_bias=bias, **options)
    torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad(it.square().sum(), tensors) for it in (ours, theirs)]
    torch.testing.assert_close(*gradients)


def test_the_mean_of_nothing(device):
    hidden, weight, _, bias = draw(3, 4, 5, device=device)
    target = torch.full((3,), -100, device=device)
    assert foo_ops.linear_cross_entropy(hidden, weight, target, bias).isnan()
    nothing = hidden[:0].requires_grad_(), weight.requires_grad_(), target[:0]
    losses = foo_ops.linear_cross_entropy(*nothing, reduction="sum")
    gradients = torch.autograd.grad(losses, nothing[:2])
    assert losses == 0
    assert gradients[0].shape == (0, 4)
    assert gradients[1].eq(0).all()


def test_no_classes(device):
    hidden, weight, target, _ = draw(3, 4, 5, device=device)
    hidden.requires_grad_()
    target.fill_(-100)
    loss, logsumexp, _ = OPERATOR(hidden, weight[:0], target)
    assert loss.eq(0).all()
    assert logsumexp.eq(-torch.inf).all()
    assert torch.autograd.grad(loss.sum(), hidden)[0].eq(0).all()


def test_logsumexp_on_request():
    hidden, weight, target, bias = draw(4, 5, 6)
    value, logsumexp = foo_ops.linear_cross_entropy(
        hidden, weight, target, bias, return_logsumexp=True
    )
    logits = F.linear(*(it.double() for it in (hidden, weight, bias)))
    assert_near(value, F.cross_entropy(logits, target))
    assert_near(logsumexp, logits.logsumexp(-1))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize("places", [(2,), (30, 590), (599,)], ids=str)
def test_a_row_with_an_infinite_logit(places, records, smoothing, device):
    """As in torch, the row has neither loss nor gradients, with kept exponentials or without."""
    hidden, weight, target, _ = draw(40, 3, 600, torch.float64)
    # All other logits of the row are -inf.
    hidden[1, 0], hidden[39, 0], weight[:, 0] = torch.inf, torch.inf, -1.0
    weight[list(places), 0], target[39] = 1.0, places[0]
    exact = [it.requires_grad_(it.is_floating_point()) for it in (hidden, weight, target)]
    ours = [it.detach().to(torch.float32 if it.is_floating_point() else it.dtype) for it in exact]
    ours = [it.to(device).requires_grad_(records and it.is_floating_point()) for it in ours]
    options = {"reduction": "none", "label_smoothing": smoothing}
    expected = F.cross_entropy(F.linear(*exact[:2]), target, **options)
    loss, logsumexp = foo_ops.linear_cross_entropy(*ours, return_logsumexp=True, **options)
    assert expected.isnan().nonzero().flatten().tolist() == [1, 39]
    assert logsumexp.isinf().nonzero().flatten().tolist() == [1, 39]
    near = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5, equal_nan=True)
    near(loss.cpu().double(), expected)
    if records:
        gradients = torch.autograd.grad(loss.sum(), ours[:2])
        for own, exactly in zip(gradients, torch.autograd.grad(expected.sum(), exact[:2])):
            near(own.cpu().double(), exactly)


def test_a_row_with_infinity_and_nan():
    """An infinity does not hide a NaN, wherever the two are."""
    hidden, weight = torch.ones(1, 1), torch.zeros(600, 1)
    for first, second in ((3, 5), (5, 3), (3, 500), (500, 3)):
        bias = torch.zeros(600)
        bias[first], bias[second] = torch.inf, torch.nan
        loss, logsumexp, mean = OPERATOR(hidden, weight, torch.tensor([1]), bias)
        assert all(it.isnan().all() for it in (loss, logsumexp, mean))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("in_dims", [(0, None, 0), (1, None, None), (None, None, 0), (0, 0, 0)])
def test_each_element_of_a_map_has_a_mean_of_its_own(in_dims, reduction, device):
    function = functools.partial(foo_ops.linear_cross_entropy, reduction=reduction)
    hidden, weight, target, _ = draw(12, 5, 6, device=device)
    target[:2], target[5] = -100, -100
    inputs = [hidden.view(3, 4, 5), weight.expand(3, 6, 5) * torch.ones_like(weight)]
    inputs.append(target.view(3, 4))
    # Arguments that are not mapped are the first of three.
    inputs = [it[0] if d is None else it.movedim(0, d) for it, d in zip(inputs, in_dims)]
    found = torch.vmap(function, in_dims)(*inputs)
    for index in range(3):
        one = (it if d is None else it.select(d, index) for it, d in zip(inputs, in_dims))
        torch.testing.assert_close(found[index], function(*one))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(dtype, device):
    hidden, weight, target, bias = draw(6, 8, 9, device=device)
    with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
        found = foo_ops.linear_cross_entropy(hidden, weight, target, bias)
    cast = [it.to(dtype) for it in (hidden, weight, bias)]
    assert found.equal(foo_ops.linear_cross_entropy(*cast[:2], target, cast[2]))


@pytest.mark.parametrize("wrong", [-1, 4, 2**40])
def test_refuses_targets_that_are_no_classes(wrong, device):
    hidden, weight, target, _ = draw(3, 5, 4, device=device)
    hidden.requires_grad_()
    target[1] = wrong
    message = (
        f"linear_cross_entropy: target must be a class in [0, 4) or ignore_index -100, got {wrong}"
    )
    with pytest.raises(IndexError, match=rf"\A{re.escape(message)}\Z"):
        foo_ops.linear_cross_entropy(hidden, weight, target)
    # A class out of range is valid only as ignore_index.
    foo_ops.linear_cross_entropy(hidden, weight, target, ignore_index=wrong).backward()
    message = message.replace("entropy:", "entropy_backward:")
    per_row = torch.zeros(3, device=device)
    with pytest.raises(IndexError, match=rf"\A{re.escape(message)}\Z"):
        BACKWARD(per_row, None, None, hidden, weight, target, None, per_row)


def zeros(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def labels(*shape, device="cpu"):
    return zeros(*shape, dtype=torch.int64, device=device)


REFUSED = {
    "hidden must be float16, bfloat16, float32 or float64, got int64": (
        TypeError, (labels(2, 3), zeros(4, 3), labels(2)), {},
    ),
    "hidden must have at least 1 dimension, got 0": (
        ValueError, (zeros(), zeros(4, 3), labels()), {},
    ),
    "weight must have 2 dimensions (V, K), got 1": (
        ValueError, (zeros(2, 3), zeros(3), labels(2)), {},
    ),
    "weight must be float32 as hidden is, got float64": (
        TypeError, (zeros(2, 3), zeros(4, 3, dtype=torch.float64), labels(2)), {},
    ),
    "weight must have 3 columns as hidden has, got 5": (
        ValueError, (zeros(2, 3), zeros(4, 5), labels(2)), {},
    ),
    "weight must be on cpu as hidden is, got foo:0": (
        ValueError, (zeros(2, 3), zeros(4, 3, device="foo"), labels(2)), {},
    ),
    "target must be on cpu as hidden is, got foo:0": (
        ValueError, (zeros(2, 3), zeros(4, 3), labels(2, device="foo")), {},
    ),
    "target must be int64, got float32": (
        TypeError, (zeros(2, 3), zeros(4, 3), zeros(2)), {},
    ),
    "target must have shape [2] to match the rows of hidden, got [3]": (
        ValueError, (zeros(2, 3), zeros(4, 3), labels(3)), {},
    ),
    "bias must have 1 dimension (V), got 2": (
        ValueError, (zeros(2, 3), zeros(4, 3), labels(2), zeros(1, 4)), {},
    ),
    "bias must be float32 as hidden is, got float16": (
        TypeError, (zeros(2, 3), zeros(4, 3), labels(2), zeros(4, dtype=torch.float16)), {},
    ),
    "bias must have 4 elements, one for each row of weight, got 3": (
        ValueError, (zeros(2, 3), zeros(4, 3), labels(2), zeros(3)), {},
    ),
    "label_smoothing must be in [0, 1], got 1.5": (
        ValueError, (zeros(2, 3), zeros(4, 3), labels(2)), {"label_smoothing": 1.5},
    ),
    "softcap must be positive and finite, or 0 for none, got -1": (
        ValueError, (zeros(2, 3), zeros(4, 3), labels(2)), {"softcap": -1.0},
    ),
}  # fmt: skip
GIVEN = (zeros(2, 3), zeros(4, 3), labels(2), None, zeros(2))
REFUSED_BACKWARD = {
    "grad_loss must have shape [2] as target has, got [3]": (
        ValueError, (zeros(3), None, None, *GIVEN), {},
    ),
    "grad_logsumexp must be float32 where hidden is float32, got float64": (
        TypeError, (None, zeros(2, dtype=torch.float64), None, *GIVEN), {},
    ),
    "grad_mean must have shape [] as mean has, got [1]": (
        ValueError, (None, None, zeros(1), *GIVEN), {},
    ),
    "logsumexp must have shape [2] as target has, got [5]": (
        ValueError, (None, None, zeros(), *GIVEN[:4], zeros(5)), {},
    ),
    "logsumexp must be on cpu as hidden is, got foo:0": (
        ValueError, (None, None, zeros(), *GIVEN[:4], zeros(2, device="foo")), {},
    ),
    "bias must be given if bias_requires_grad is true, got None": (
        ValueError, (None, None, zeros(), *GIVEN), {"bias_requires_grad": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("is_fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize("message", [*REFUSED, *REFUSED_BACKWARD])
def test_refused(message, is_fake):
    is_backward = message in REFUSED_BACKWARD
    error, inputs, options = (REFUSED_BACKWARD if is_backward else REFUSED)[message]
    name = "linear_cross_entropy_backward" if is_backward else "linear_cross_entropy"
    mode = FakeTensorMode(allow_non_fake_inputs=True) if is_fake else torch.no_grad()
    with mode, pytest.raises(error, match=f"^{re.escape(f'{name}: {message}')}$"):
        (BACKWARD if is_backward else OPERATOR)(*inputs, **options)


def test_refuses_other_reductions():
    message = "linear_cross_entropy: reduction must be one of none, mean, sum, got 'max'"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        foo_ops.linear_cross_entropy(*draw(2, 3, 4)[:3], reduction="max")
