"""foo::attention is right where scores are large: masks of large numbers, softmaxes of one key.

Beside a score of 1e9, the logsumexp has no digit left of the sum of weights; the weights must not
depend on it.
"""

import math

import pytest
import torch

from foo_ops import testing
from foo_ops.ops.arguments import compute_type
from foo_ops.testing import ATTENTION, Sample
from foo_ops.testing.specs.attention import attention_sample

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = ATTENTION.dtypes
LENGTHS = [(1, 70), (5, 1501), (70, 70), (150, 1100), (9, 2500)]


def large_number(hiding, dtype):
    if isinstance(hiding, str):
        return getattr(torch.finfo(dtype), hiding.removeprefix("finfo."))
    return hiding * 1e20 if dtype == torch.float64 else hiding


def rows_of(value, queries, keys, dtype):
    """Make a mask (queries, keys) with ``value`` in its first and last row."""
    mask = torch.zeros(queries, keys, dtype=dtype)
    mask[0] = mask[-1] = value
    return mask


def results_of(sample, function, cotangents):
    """Return outputs and gradients."""
    sample = sample.requiring_grad()
    outputs = sample.call(function)
    gradients = torch.autograd.grad(outputs, sample.differentiable(), cotangents)
    return [*(output.detach() for output in outputs), *gradients]


def actual_and_expected(sample, device):
    """Return the results on a device and the reference's, all in float64 on the cpu."""
    cotangents = testing.cotangents_for(sample.call(ATTENTION.operator))
    exact_cotangents = [tensor.double() for tensor in cotangents]
    expected = results_of(sample.exact(), ATTENTION.reference, exact_cotangents)
    cotangents = [tensor.to(device) for tensor in cotangents]
    actual = results_of(sample.to(device), ATTENTION.operator, cotangents)
    return [result.cpu().double() for result in actual], expected


def check(sample, device):
    """Compare with the reference, relative to the largest element of each result.

    The tolerances of other tests would grow with the scores.
    """
    tolerance = 16 * torch.finfo(sample.inputs[0].dtype).eps
    for result, exact in zip(*actual_and_expected(sample, device), strict=True):
        assert result.isfinite().all()
        room = tolerance * float(exact.abs().max())
        torch.testing.assert_close(result, exact, rtol=tolerance, atol=room)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_overflows_at_the_largest_scores(dtype, device):
    """One score is 3e4 and all others are far below: the softmax picks one value.

    Backward recomputes exp(3e4 - logsumexp), where numbers of that size round.
    """
    query = torch.full((1, 1, 3, 4), 173.0, dtype=dtype)
    key = torch.zeros(1, 1, 80, 4, dtype=dtype)
    key[:, :, 77] = 86.5
    value = torch.randn(1, 1, 80, 5).to(dtype)
    sample = Sample((query, key, value, *[None] * 3)).to(device).requiring_grad()
    outputs = output, logsumexp = sample.call(ATTENTION.operator)
    chosen = value[:, :, 77:78].expand(1, 1, 3, 5)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.cpu(), chosen, rtol=tolerance, atol=0)
    assert (logsumexp > 2e4).all()
    cotangents = tuple(torch.ones_like(tensor) for tensor in outputs)
    gradients = torch.autograd.grad(outputs, sample.differentiable(), cotangents)
    assert all(gradient.isfinite().all() for gradient in gradients)
    testing.check_gradients(ATTENTION, sample, gradients, cotangents)


@pytest.mark.parametrize("hiding", [-1e9, -1e10, -3e10, -1e20, -3e20, -1e30])
@pytest.mark.parametrize("queries", [2, 70])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_query_whose_keys_a_mask_of_large_numbers_hides(dtype, queries, hiding, device):
    """Padding creates such rows: their scores are all equal, so that the query sees all keys alike.

    A row without an output gradient has no gradients: 0 times infinity must not occur.
    """
    compute = compute_type(dtype)
    hiding = large_number(hiding, compute)

    def leaves_with(value):
        mask = torch.zeros(queries, 70, dtype=compute)
        mask[0] = value
        sample = attention_sample(queries=queries, keys=70, bias=lambda _: mask)(dtype)
        return sample.to(device).requiring_grad()

    leaves, others = leaves_with(hiding), leaves_with(-math.inf)
    outputs, expected = leaves.call(ATTENTION.operator), others.call(ATTENTION.operator)
    output, logsumexp = outputs
    mean = leaves.inputs[2].detach().double().mean(2)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(output[:, :, 0].double(), mean, rtol=0, atol=tolerance)
    tolerance = 4 * torch.finfo(compute).eps
    hidden = torch.full_like(logsumexp[:, :, 0], hiding)
    torch.testing.assert_close(logsumexp[:, :, 0], hidden, rtol=tolerance, atol=0)
    assert torch.equal(output[:, :, 1:], expected[0][:, :, 1:])

    cotangents = testing.cotangents_for(outputs)
    gradients = torch.autograd.grad(outputs, leaves.differentiable(), cotangents, retain_graph=True)
    assert all(gradient.isfinite().all() for gradient in gradients)
    for cotangent in cotangents:
        cotangent[:, :, 0] = 0
    gradients = torch.autograd.grad(outputs, leaves.differentiable(), cotangents)
    others = torch.autograd.grad(expected, others.differentiable(), cotangents)
    torch.testing.assert_close(gradients, others)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("hiding", ["finfo.min", "finfo.max", -1e20, 1e20])
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_that_a_mask_of_large_numbers_hides_weigh_the_same(
    dtype, queries, keys, hiding, has_sinks, device
):
    """Each key weighs 1 / n, forward and backward, and so does a sink of the same size."""
    compute = compute_type(dtype)
    number = large_number(hiding, compute)
    sinks = torch.tensor([number, 0.5], dtype=compute)
    sample = attention_sample(
        queries=queries,
        keys=keys,
        bias=lambda _: rows_of(number, queries, keys, compute),
        sinks=(lambda _: sinks) if has_sinks else None,
    )(dtype)
    check(sample, device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_lowest_number_of_the_dtype_of_the_query(dtype, device):
    """Masks of Hugging Face's models hide padding with this number."""
    lowest = torch.finfo(dtype).min
    sample = attention_sample(queries=70, keys=90, bias=lambda _: rows_of(lowest, 70, 90, dtype))
    check(sample(dtype), device)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("size", [1e3, 1e8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores_that_are_all_the_same(dtype, size, is_causal, device):
    """All tokens have the same key; only the gradient of value is compared."""
    sample = attention_sample(queries=150, keys=1200, scale=size, is_causal=is_causal)(dtype)
    query, key, value, *others = sample.inputs
    sample = Sample((torch.ones_like(query), torch.ones_like(key), value, *others), sample.keywords)
    actual, expected = (results[4] for results in actual_and_expected(sample, device))
    room = 4 * torch.finfo(dtype).eps * float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=room)


def test_second_derivatives_beside_a_mask_of_large_numbers(device):
    sample = attention_sample(
        queries=3, keys=5, bias=lambda dtype: rows_of(-1e30, 3, 5, dtype), head_dim=4
    )(torch.float64)

    def second(function, place):
        leaves = sample.to(place).requiring_grad()
        inputs = leaves.differentiable()
        outputs = leaves.call(function)
        weights = [tensor.to(place) for tensor in testing.cotangents_for(sample.call(function))]
        gradients = torch.autograd.grad(outputs, inputs, weights, create_graph=True)
        return torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), inputs)

    expected = second(ATTENTION.reference, "cpu")
    actual = [tensor.cpu() for tensor in second(ATTENTION.operator, device)]
    torch.testing.assert_close(actual, list(expected), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("queries", [1, 70])
@pytest.mark.parametrize("scale", [1e9, 1e12, 1e20])
def test_the_largest_of_huge_scores_takes_all(scale, queries, device):
    sample = attention_sample(queries=queries, keys=70, scale=scale)(torch.float32)
    sample = sample.to(device).requiring_grad()
    output, logsumexp = outputs = sample.call(ATTENTION.operator)
    query, key, value, *_ = (
        tensor.detach().cpu().double() for tensor in sample.inputs if tensor is not None
    )
    scores = torch.einsum(
        "bhqd,bhkd->bhqk", query, key.repeat_interleave(query.size(1) // key.size(1), 1)
    )
    largest, places = scores.max(-1)
    value = value.repeat_interleave(query.size(1) // value.size(1), 1)
    chosen = value.gather(2, places[..., None].expand(*places.shape, value.size(3)))
    torch.testing.assert_close(output.cpu().double(), chosen, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logsumexp.cpu().double(), scale * largest, rtol=1e-5, atol=0)
    cotangents = testing.cotangents_for(outputs)
    gradients = torch.autograd.grad(outputs, sample.differentiable(), cotangents)
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("softcap", [1e-39, 1e-45, 1e-30])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tiny_softcap_makes_all_scores_zero(dtype, softcap, device):
    sample = attention_sample(queries=5, keys=70, softcap=softcap)(dtype)
    outputs = sample.call(ATTENTION.operator)
    cotangents = testing.cotangents_for(outputs)
    mean = sample.inputs[2].double().mean(2, keepdim=True).expand(outputs[0].shape)
    output, _, *gradients = results_of(
        sample.to(device), ATTENTION.operator, [tensor.to(device) for tensor in cotangents]
    )
    torch.testing.assert_close(output.cpu().double(), mean, rtol=0, atol=4 * torch.finfo(dtype).eps)
    assert all(gradient.isfinite().all() for gradient in gradients)
