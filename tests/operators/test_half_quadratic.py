"""quantize_weight(method="hqq") finds scales and zeros of 4 bits that leave smaller errors."""

import re

import numpy as np
import pytest
import torch

import foo_ops

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def weights(dtype, magnitude=1.0):
    """Return rows of all kinds: random, heavy tails, zeros, positive, constant."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(280, 256, generator=generator, dtype=torch.float64)
    weight[:20] = weight[:20] ** 3
    weight[20], weight[21], weight[22] = 0, -2.5, weight[22].abs() + 3
    weight[23, :128] = 0
    return (weight * magnitude).to(dtype)


def numbers_of(quantized, group_size):
    """Return the weights in float64, by the documented layout."""
    packed, scale, zero = (it.double() for it in quantized)
    groups = packed.unflatten(1, (-1, group_size // 2))
    integers = torch.cat((groups % 16, groups // 16), -1).floor()
    return (integers - zero.unsqueeze(-1)) * scale.unsqueeze(-1)


def errors_of(weight, quantized, group_size, importance=None):
    errors = numbers_of(quantized, group_size) - weight.double().unflatten(1, (-1, group_size))
    factors = 1.0 if importance is None else importance.double().unflatten(0, (-1, group_size))
    return (factors * errors.square()).sum(-1)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 5e4])
@pytest.mark.parametrize(
    "group_size", [64, *(pytest.param(it, marks=pytest.mark.whole) for it in (32, 128))]
)
def test_no_group_is_worse(group_size, magnitude, dtype, is_weighted):
    if dtype == torch.float16 and magnitude > 1:
        magnitude = 1e3
    weight = weights(dtype, magnitude)
    importance = torch.rand(256) ** 2 if is_weighted else None
    if is_weighted:
        importance[:group_size] = 0
    nearest = foo_ops.quantize_weight(weight, 4, group_size)
    found = foo_ops.quantize_weight(weight, 4, group_size, method="hqq", importance=importance)
    assert [it.dtype for it in found] == [torch.uint8, dtype, dtype]
    assert [it.shape for it in found] == [it.shape for it in nearest]
    before = errors_of(weight, nearest, group_size, importance)
    after = errors_of(weight, found, group_size, importance)
    # The search runs in float32, and numbers are rounded to the dtype.
    assert bool((after <= before * (1 + 8 * torch.finfo(dtype).eps) + 1e-12 * before.max()).all())
    if dtype != torch.float16 or magnitude >= 1:
        assert after[24:].sum() < 0.97 * before[24:].sum()


def split(group, factors):
    """Search for one group as Badri and Shaji (2023) do, in float64, with a scale as well."""
    scale, beta = (group.max() - group.min()) / 15, 10.0
    zero = -group.min() / scale
    total = factors.sum()
    for _ in range(20):
        steps = np.clip(np.round(group / scale + zero), 0, 15)
        errors = (group - (steps - zero) * scale) / scale
        sizes = np.abs(errors)
        powers = np.maximum(sizes, 1e-300) ** (0.7 - 1)
        shrunk = np.sign(errors) * np.maximum(sizes - powers / beta, 0)
        targets = group - shrunk * scale
        # Weighted least squares for targets = scale * (steps - zero).
        matrix = np.stack((steps, np.ones_like(steps)), 1) * np.sqrt(factors / total)[:, None]
        solution = np.linalg.lstsq(matrix, targets * np.sqrt(factors / total), rcond=None)[0]
        scale = solution[0]
        zero = -solution[1] / scale
        beta *= 1.01
    return scale, zero


@pytest.mark.parametrize("is_weighted", [False, True])
def test_scales_and_zeros_are_those_of_the_method(is_weighted):
    """Where rounding in float32 does not lead to other integers on the way."""
    weight, importance = weights(torch.float64)[:16, :64] * 0.02, torch.rand(64) + 0.1
    importance = importance if is_weighted else None
    found = foo_ops.quantize_weight(weight, 4, 64, method="hqq", importance=importance)
    nearest = foo_ops.quantize_weight(weight, 4, 64)
    factors = np.ones(64) if importance is None else importance.double().numpy()
    alike = 0
    for row in range(16):
        scale, zero = split(weight[row].numpy(), factors)
        ours = found[1][row, 0].item(), found[2][row, 0].item()
        if ours == (nearest[1][row, 0].item(), nearest[2][row, 0].item()):
            continue
        alike += np.allclose(ours, (scale, zero), rtol=1e-4)
    assert alike >= 12


def test_importance_is_that_of_inputs():
    """Errors of the output are smaller with the mean squares of a few inputs."""
    torch.manual_seed(0)
    weight, inputs = torch.randn(128, 256), torch.randn(1000, 256) * torch.rand(256) ** 2
    importance = inputs[::10].square().mean(0)

    def error(**options):
        quantized = foo_ops.quantize_weight(weight, 4, 64, **options)
        return (inputs.double() @ (numbers_of(quantized, 64).flatten(1) - weight).t()).norm()

    assert error(method="hqq") < 0.97 * error()
    assert error(method="hqq", importance=importance) < 0.96 * error(method="hqq")


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)])
def test_empty(shape):
    found = foo_ops.quantize_weight(torch.empty(shape), 4, 32, method="hqq")
    expected = foo_ops.quantize_weight(torch.empty(shape), 4, 32)
    assert [it.shape for it in found] == [it.shape for it in expected]


def test_compiled():
    weight, importance = weights(torch.float32)[:4], torch.rand(256)
    graph = torch.compile(foo_ops.quantize_weight, backend="aot_eager", fullgraph=True)
    options = {"method": "hqq", "importance": importance}
    expected = foo_ops.quantize_weight(weight, 4, 64, **options)
    torch.testing.assert_close(graph(weight, 4, 64, **options), expected, rtol=0, atol=0)


WEIGHT = torch.ones(2, 64)
REFUSED = [
    (
        lambda: foo_ops.quantize_weight(WEIGHT, 4, 32, method="gptq"),
        ValueError,
        "method must be 'nearest', 'hqq' or 'awq', got 'gptq'",
    ),
    (
        lambda: foo_ops.quantize_weight(WEIGHT, 8, method="hqq"),
        ValueError,
        "method must be 'nearest' for 8 bits, got 'hqq'",
    ),
    (
        lambda: foo_ops.quantize_weight(WEIGHT, 4, 32, importance=torch.ones(64)),
        ValueError,
        "importance must be None for method 'nearest', got a tensor",
    ),
    (
        lambda: foo_ops.quantize_weight(
            WEIGHT, 4, 32, method="hqq", importance=torch.ones(64, dtype=torch.int32)
        ),
        TypeError,
        "importance must be float16, bfloat16, float32 or float64, got int32",
    ),
    (
        lambda: foo_ops.quantize_weight(WEIGHT, 4, 32, method="hqq", importance=torch.ones(2, 64)),
        ValueError,
        "importance must have 1 dimension (K), got 2",
    ),
    (
        lambda: foo_ops.quantize_weight(WEIGHT, 4, 32, method="hqq", importance=torch.ones(63)),
        ValueError,
        "importance must have 64 elements, one for each column of weight, got 63",
    ),
    (
        lambda: foo_ops.quantize_weight(WEIGHT, 4, 32, method="hqq", importance=-torch.ones(64)),
        ValueError,
        "importance must not be negative, got numbers below 0 or NaN",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_refused(call, error, message):
    with pytest.raises(error, match=f"^{re.escape(f'quantize_weight: {message}')}$"):
        call()
