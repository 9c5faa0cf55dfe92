"""quantize_weight(method="awq") finds scales of columns that make errors of outputs small."""

import re

import numpy as np
import pytest
import torch

import foo_ops

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def layer(dtype=torch.float32, rows=70, columns=256, samples=200, outliers=4):
    """Return a weight, and inputs that are large in some columns."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    inputs = torch.randn(samples, columns, generator=generator, dtype=torch.float64)
    inputs *= torch.rand(columns, generator=generator, dtype=torch.float64) + 0.1
    inputs[:, torch.randperm(columns, generator=generator)[:outliers]] *= 30
    return weight.to(dtype), inputs.to(dtype)


def numbers_of(quantized):
    """Return the weights in float64, by the documented layout, for undivided inputs."""
    packed, scale, zero, *input_scale = (it.double() for it in quantized)
    groups = packed.unflatten(1, (scale.shape[1], -1))
    integers = torch.cat((groups % 16, groups // 16), -1).floor()
    numbers = ((integers - zero.unsqueeze(-1)) * scale.unsqueeze(-1)).flatten(1)
    return numbers / input_scale[0] if input_scale else numbers


def error(weight, inputs, quantized):
    weight, inputs = weight.double(), inputs.double()
    exact = inputs @ weight.t()
    return ((inputs @ numbers_of(quantized).t() - exact).norm() / exact.norm()).item()


def quantized(weight, group_size, inputs):
    return foo_ops.quantize_weight(weight, 4, group_size, method="awq", inputs=inputs)


# ----------------------------------------------------------------- the search, in NumPy, float64


def rounded(groups, shrinkage):
    """Round (..., group_size) to 16 steps that span the shrunk range and 0."""
    lowest = np.minimum(groups.min(-1, keepdims=True), 0) * shrinkage
    highest = np.maximum(groups.max(-1, keepdims=True), 0) * shrinkage
    scale = (highest - lowest) / 15
    zero = np.round(-lowest / scale)
    return (np.clip(np.round(groups / scale) + zero, 0, 15) - zero) * scale


def scales_of(inputs):
    means = np.abs(inputs).mean(0)
    for step in range(20):
        scale = means ** (step / 20)
        yield scale / np.sqrt(scale.max() * scale.min())


def errors_of_scales(weight, inputs, group_size):
    found = []
    for scale in scales_of(inputs):
        groups = (weight * scale).reshape(len(weight), -1, group_size)
        numbers = rounded(groups, 1.0).reshape(weight.shape) / scale
        found.append(np.square(inputs @ (numbers - weight).T).sum())
    return np.array(found)


@pytest.mark.parametrize("samples", [200, 700])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_scale_and_ranges_are_those_of_the_method(group_size, samples):
    """More rows than columns are replaced by fewer, which changes nothing."""
    weight, inputs = layer(torch.float64, samples=samples)
    packed, scale, zero, input_scale = quantized(weight, group_size, inputs)
    weight, inputs = weight.numpy(), inputs.numpy()
    errors = errors_of_scales(weight, inputs, group_size)
    best = list(scales_of(inputs))[errors.argmin()]
    assert 0 < errors.argmin() < 19
    np.testing.assert_allclose(input_scale[0].numpy(), best, rtol=1e-5)
    # Ranges are chosen for each group by itself.
    groups = (weight * input_scale.numpy()).reshape(len(weight), -1, group_size)
    parts = (inputs / input_scale.numpy()).reshape(len(inputs), -1, group_size)
    tried = np.stack([rounded(groups, 1 - 0.05 * step) for step in range(7)])
    squares = np.stack(
        [np.square(np.einsum("tgk,ngk->ngt", parts, it - groups)).sum(-1) for it in tried]
    )
    found = numbers_of((packed, scale, zero)).numpy().reshape(groups.shape)
    ours = np.square(np.einsum("tgk,ngk->ngt", parts, found - groups)).sum(-1)
    np.testing.assert_allclose(ours, squares.min(0), rtol=1e-3)
    assert (squares.argmin(0) > 0).mean() > 0.2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_errors_are_smaller(group_size, dtype):
    weight, inputs = layer(dtype)
    found = quantized(weight, group_size, inputs[:100])
    assert [it.dtype for it in found] == [torch.uint8, dtype, dtype, dtype]
    shapes = [(70, 128), (70, 256 // group_size), (70, 256 // group_size), (1, 256)]
    assert [tuple(it.shape) for it in found] == shapes
    nearest = foo_ops.quantize_weight(weight, 4, group_size)
    # The other inputs have not been seen by the search.
    assert error(weight, inputs[100:], found) < 0.6 * error(weight, inputs[100:], nearest)
    zero = found[2]
    assert torch.equal(zero, zero.round())
    assert 0 <= zero.min() <= zero.max() <= 15


@pytest.mark.parametrize("dtype", DTYPES)
def test_product(dtype, device):
    weight, inputs = (it.to(device) for it in layer(dtype, rows=256))
    *found, input_scale = quantized(weight, 64, inputs)
    product = foo_ops.linear_int4(inputs[:5] / input_scale, *found, group_size=64)
    exact = inputs[:5].double().cpu() @ numbers_of([it.cpu() for it in (*found, input_scale)]).t()
    room = 32 * torch.finfo(dtype).eps * exact.norm()
    assert (product.double().cpu() - exact).norm() <= room
    # The weight is square, and still its scale cannot be mistaken for a bias.
    with pytest.raises(ValueError, match="bias must have 1 dimension"):
        foo_ops.linear_int4(inputs[:5], *found, input_scale, group_size=64)


def test_inputs_of_any_shape():
    weight, inputs = layer()
    expected = quantized(weight, 64, inputs)
    strided = inputs.t().contiguous().t()
    for same in (inputs.unflatten(0, (2, -1)), strided, inputs.double()):
        torch.testing.assert_close(quantized(weight, 64, same), expected)
    assert error(weight, inputs[:1], quantized(weight, 64, inputs[0])) < 0.05


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-30, 1e25])
def test_inputs_that_say_nothing(value):
    """Columns that are alike keep their scale; squares of 1e25 are infinite in float32."""
    weight = layer()[0]
    *found, input_scale = quantized(weight, 64, torch.full((3, 256), value))
    assert torch.equal(input_scale, torch.ones(1, 256))
    if value != 1.0:
        for ours, nearest in zip(found, foo_ops.quantize_weight(weight, 4, 64)):
            assert torch.equal(ours, nearest)


def test_columns_without_inputs():
    weight, inputs = layer()
    inputs[:, :9] = 0
    found = quantized(weight, 64, inputs)
    nearest = foo_ops.quantize_weight(weight, 4, 64)
    assert error(weight, inputs, found) < 0.6 * error(weight, inputs, nearest)
    assert numbers_of(found).isfinite().all()
    # Its scales are not those of the exponent 0.
    assert found[3].min() < found[3].max()


@pytest.mark.parametrize(("dtype", "magnitude"), [(torch.float16, 6e4), (torch.bfloat16, 3e38)])
def test_huge_weights(dtype, magnitude):
    """Scales that are infinite in the dtype are not taken."""
    weight, inputs = layer(torch.float64)
    weight, inputs = (weight.clamp(-2, 2) / 2 * magnitude).to(dtype), inputs * 1e-30
    found = quantized(weight, 64, inputs)
    assert all(it.isfinite().all() for it in found)
    nearest = foo_ops.quantize_weight(weight, 4, 64)
    assert error(weight, inputs, found) <= error(weight, inputs, nearest)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)])
def test_empty(shape):
    found = quantized(torch.empty(shape), 32, torch.ones(5, shape[1]))
    expected = foo_ops.quantize_weight(torch.empty(shape), 4, 32)
    assert [it.shape for it in found] == [*(it.shape for it in expected), (1, shape[1])]


def test_without_numbers():
    weight, inputs = (it.to("meta") for it in layer())
    expected = quantized(*(it for it in (layer()[0], 64, layer()[1])))
    found = quantized(weight, 64, inputs)
    assert [(it.shape, it.dtype) for it in found] == [(it.shape, it.dtype) for it in expected]


def test_compiled():
    weight, inputs = layer(rows=4)
    graph = torch.compile(foo_ops.quantize_weight, backend="aot_eager", fullgraph=True)
    expected = quantized(weight, 64, inputs)
    found = graph(weight, 4, 64, method="awq", inputs=inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


WEIGHT = torch.ones(2, 64)


def refused(**options):
    options = {"method": "awq"} | options
    return lambda: foo_ops.quantize_weight(WEIGHT, 4, 32, **options)


REFUSED = [
    (refused(), ValueError, "inputs must be a tensor for method 'awq', got None"),
    (
        lambda: foo_ops.quantize_weight(WEIGHT, 8, method="awq", inputs=WEIGHT),
        ValueError,
        "method must be 'nearest' for 8 bits, got 'awq'",
    ),
    (
        refused(method="hqq", inputs=WEIGHT),
        ValueError,
        "inputs must be None for method 'hqq', got a tensor",
    ),
    (
        refused(importance=WEIGHT[0], inputs=WEIGHT),
        ValueError,
        "importance must be None for method 'awq', got a tensor",
    ),
    (
        refused(inputs=torch.ones(3, 64, dtype=torch.int64)),
        TypeError,
        "inputs must be float16, bfloat16, float32 or float64, got int64",
    ),
    (
        refused(inputs=torch.ones(64, 3)),
        ValueError,
        "inputs must have shape (..., 64), a number for each column of weight, got (64, 3)",
    ),
    (
        refused(inputs=torch.ones(())),
        ValueError,
        "inputs must have shape (..., 64), a number for each column of weight, got ()",
    ),
    (
        refused(inputs=torch.ones(2, 0, 64)),
        ValueError,
        "inputs must have a row or more, got (2, 0, 64)",
    ),
    (
        refused(inputs=torch.full((2, 64), torch.nan)),
        ValueError,
        "inputs must be finite, got infinities or NaN",
    ),
    (
        refused(inputs=torch.ones(2, 64, device="meta")),
        ValueError,
        "inputs must be on cpu as weight is, got meta",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_refused(call, error, message):
    with pytest.raises(error, match=f"^{re.escape(f'quantize_weight: {message}')}$"):
        call()
