"""Functions that make scores infinite, NaN, or as large as the dtype allows."""

import math

import pytest
import torch
from support.flex_exact import qkv

import foo_ops

SIZES = QUERIES, KEYS = 37, 150
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def call(score_mod, dtype, device):
    inputs = qkv((1, 2, *SIZES), dtype, device)
    output, lse = foo_ops.flex_attention(*inputs, score_mod, return_lse=True)
    finite = torch.where(lse.isfinite(), lse, 0.0)
    gradients = torch.autograd.grad(output.float().sum() + finite.sum(), inputs)
    return inputs, output, lse, gradients


@every_dtype
def test_rows_of_minus_infinity_see_nothing(dtype, device):
    """A score of -infinity acts as a mask."""

    def score_mod(score, b, h, q, k):
        return torch.where(q % 3 == 1, -math.inf, score)

    _, output, lse, gradients = call(score_mod, dtype, device)
    is_blind = torch.arange(QUERIES) % 3 == 1
    assert torch.equal(lse[0, 0].isneginf().cpu(), is_blind)
    assert not output[:, :, is_blind].any()
    assert output[:, :, ~is_blind].any(-1).all()
    assert not gradients[0][:, :, is_blind].any()
    assert all(it.isfinite().all() for it in gradients)


@every_dtype
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_numbers_are_finite_scores(sign, dtype, device):
    """All keys then have equal weights."""
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    largest = sign * torch.finfo(compute).max

    def score_mod(score, b, h, q, k):
        return 0 * score + largest

    inputs, output, lse, gradients = call(score_mod, dtype, device)
    exact = inputs[2].detach().double().mean(2, keepdim=True).expand(1, 2, QUERIES, -1)
    room = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), exact, rtol=0, atol=room)
    assert lse.isfinite().all()
    assert (lse * sign > 1e38).all()
    assert not gradients[0].any()
    assert all(it.isfinite().all() for it in gradients)


def test_nan_stays_in_its_row(device):
    def score_mod(score, b, h, q, k):
        return torch.where((q == 5) & (k == 140), math.nan, score)

    _, output, lse, _ = call(score_mod, torch.float32, device)
    rows = torch.arange(QUERIES) == 5
    assert output[:, :, rows].isnan().all()
    assert output[:, :, ~rows].isfinite().all()
    assert torch.equal(lse[0, 0].isnan().cpu(), rows)


@pytest.mark.parametrize("scale", [-1.0, -1e4, 1e4])
def test_large_scores_of_either_sign(scale, device):
    """A row's weights sum to one, whichever of its products gives the largest score."""
    query, key, value = (it.detach() for it in qkv((1, 2, *SIZES), torch.float32, device))
    output, lse = foo_ops.flex_attention(
        100 * query, key, torch.ones_like(value), scale=scale, return_lse=True
    )
    ones = torch.ones_like(output)
    torch.testing.assert_close(output, ones, rtol=0, atol=1e-5)
    exact = (scale * 100 * (query.double() @ key.double().mT)).logsumexp(-1)
    torch.testing.assert_close(lse.double(), exact, rtol=1e-5, atol=0)
