"""Gradients of weights of few tokens: sums are rounded in registers, by the processor's rules."""

import pytest
import torch
from torch.testing import assert_close

DTYPES = (torch.bfloat16, torch.float16)
TOKENS = (2, 3, 96, 385)
SHAPES = ((9, 1), (12, 32), (13, 31), (25, 48), (131, 133), (600, 40), (17, 1030))


def grad_weight(grad, input, counts=None):
    """Compute the gradients of the weights of groups, of all tokens by default."""
    counts = [len(input)] if counts is None else counts
    weight = input.new_empty(len(counts), grad.shape[1], input.shape[1])
    offsets = torch.tensor(counts).cumsum(0)
    return torch.ops.foo.grouped_linear_backward(
        grad, input, weight, offsets, input_requires_grad=False
    )[1]


def integers(seed, *shape, most):
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("outputs", "width"), SHAPES)
def test_exact_sums_are_rounded_once(dtype, tokens, outputs, width):
    """Sums of integers are exact in float32, so each result is that sum to nearest even."""
    most = 100 if dtype == torch.bfloat16 else 12
    counts = [tokens, 0, tokens - 1]
    grad = integers(0, sum(counts), outputs, most=most)
    input = integers(1, sum(counts), width, most=most)
    actual = grad_weight(grad.to(dtype), input.to(dtype), counts)
    for result, one, other in zip(actual, grad.split(counts), input.split(counts), strict=True):
        exact = one.double().mT @ other.double()
        assert exact.abs().max() < 2**24
        assert result.equal(exact.float().to(dtype))


@pytest.mark.parametrize("tokens", TOKENS)
def test_numbers_that_are_not_finite_stay_in_their_rows_and_columns(tokens):
    for dtype in DTYPES:
        grad, input = torch.ones(tokens, 40, dtype=dtype), torch.ones(tokens, 50, dtype=dtype)
        grad[0, 3], grad[-1, 14], input[0, 40], input[-1, 5] = torch.nan, torch.inf, torch.nan, 0
        exact = grad.double().mT @ input.double()
        # Infinity times zero is NaN, and a NaN is no infinity after rounding.
        assert exact[14, 5].isnan()
        assert exact[14, 6].isinf()
        assert_close(grad_weight(grad, input)[0], exact.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_sums_beyond_the_dtype_are_infinite():
    grad, input = torch.full((64, 16), 3e38), torch.full((64, 33), -2.0)
    assert grad_weight(grad.bfloat16(), input.bfloat16()).eq(-torch.inf).all()
    halves = grad.clamp(max=6e4).half()
    assert grad_weight(halves, input.half()).eq(-torch.inf).all()


def test_subnormal_numbers_count_as_zero_at_most():
    smallest = torch.finfo(torch.bfloat16).smallest_normal
    grad, input = torch.full((10, 16), smallest), torch.full((10, 33), 0.25)
    off = grad_weight(grad.bfloat16(), input.bfloat16()).double() - 10 * smallest / 4
    assert off.abs().max() <= 10 * smallest


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_last_odd_token_has_no_part_in_the_next_group(dtype):
    grad, input = torch.full((8, 40), torch.nan), torch.full((8, 33), torch.nan)
    grad[:5], input[:5] = 2, 3
    assert grad_weight(grad.to(dtype), input.to(dtype), [5, 3])[0].eq(30).all()
