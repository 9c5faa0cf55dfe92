"""The operators of SyncBatchNorm in one process: dtypes, layouts, omitted arguments."""

import pytest
import torch

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def close(actual, expected, dtype):
    torch.testing.assert_close(
        actual.cpu().double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]
    )


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (2, 3, 4, 5)])
@pytest.mark.parametrize("affine", [True, False])
def test_against_float64(dtype, shape, affine):
    torch.manual_seed(0)
    x = (torch.rand(shape) * 2 + 1).to(dtype)
    grad = torch.randn(shape).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    weight, bias = torch.rand(2, 3, dtype=wide) if affine else (None, None)
    exact = [None if each is None else each.double().requires_grad_() for each in (x, weight, bias)]
    expected = torch.nn.functional.batch_norm(exact[0], None, None, *exact[1:], training=True)
    given = [each for each in exact if each is not None]
    expected_grads = torch.autograd.grad(expected, given, grad.double())

    x, grad, weight, bias = (
        each if each is None else each.foo() for each in (x, grad, weight, bias)
    )
    if x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    mean, invstd = torch.batch_norm_stats(x, 1e-5)
    assert mean.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    counts = torch.full((2,), x.numel() // 3, device="foo")
    for gathered in (
        torch.batch_norm_gather_stats_with_counts(
            x, mean.expand(2, 3), invstd.expand(2, 3), None, None, 0.1, 1e-5, counts
        ),
        torch.batch_norm_gather_stats(
            x, mean.expand(2, 3), invstd.expand(2, 3), None, None, 0.1, 1e-5, int(counts[0])
        ),
    ):
        torch.testing.assert_close(gathered, (mean, invstd))
    actual = torch.batch_norm_elemt(x, weight, bias, mean, invstd, 1e-5)
    assert actual.dtype == dtype
    assert actual.stride() == x.stride()
    close(actual, expected, dtype)
    sums = torch.batch_norm_backward_reduce(grad, x, mean, invstd, weight, True, affine, affine)
    grad_x = torch.batch_norm_backward_elemt(grad, x, mean, invstd, weight, *sums[:2], counts[:1])
    assert grad_x.dtype == dtype
    for one, other in zip((grad_x, *sums[2:]), expected_grads):
        close(one, other, dtype)
    assert affine or sums[2:] == (None, None)
    assert torch.batch_norm_backward_reduce(grad, x, mean, invstd, weight, False, False, False) == (
        (None,) * 4
    )


def test_a_variance_below_eps_is_not_lost():
    """1 / invstd^2 is slightly more than eps: float32 would lose the difference."""
    x = torch.tensor([[0.0], [1e-4]], device="foo", dtype=torch.float64)
    mean, invstd = torch.batch_norm_stats(x, 1e-5)
    running = torch.zeros(1, device="foo", dtype=torch.float64)
    torch.batch_norm_gather_stats(x, mean[None], invstd[None], None, running, 1.0, 1e-5, 2)
    torch.testing.assert_close(running.cpu(), x.cpu().var(0), rtol=1e-6, atol=0)


def test_errors():
    x, numbers = torch.ones(4, 3, device="foo"), torch.ones(2, 3, device="foo")
    with pytest.raises(ValueError, match=r"^foo: input must have at least 2 dimensions, got 1"):
        torch.batch_norm_stats(x[0], 1e-5)
    message = "^foo: counts must have 2 elements, one for each process, got 3"
    with pytest.raises(ValueError, match=message):
        torch.batch_norm_gather_stats_with_counts(
            x, numbers, numbers, None, None, 0.1, 1e-5, torch.ones(3, device="foo")
        )


def test_parts_of_different_sizes_are_one_batch():
    torch.manual_seed(0)
    x = torch.rand(7, 3, 5, dtype=torch.float64)
    x[2:] += 3  # different means
    parts = [x[:2].foo(), x[2:].foo()]
    means, invstds = zip(*(torch.batch_norm_stats(part, 1e-5) for part in parts), strict=True)
    running = [torch.full((3,), 2.0, dtype=torch.float64, device="foo") for _ in range(2)]
    counts = torch.tensor([10.0, 25.0], device="foo")
    mean, invstd = torch.batch_norm_gather_stats_with_counts(
        parts[0], torch.stack(means), torch.stack(invstds), *running, 0.1, 1e-5, counts
    )
    dimensions = (0, 2)
    exact = (
        x.mean(dimensions),
        (x.var(dimensions, unbiased=False) + 1e-5).rsqrt(),
        0.9 * 2 + 0.1 * x.mean(dimensions),
        0.9 * 2 + 0.1 * x.var(dimensions),
    )
    for actual, expected in zip((mean, invstd, *running), exact, strict=True):
        close(actual, expected, torch.float64)
