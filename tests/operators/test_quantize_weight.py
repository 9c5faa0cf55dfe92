"""quantize_weight rounds to the nearest integers, in the layout that the operators read."""

import re

import pytest
import torch
from torch._subclasses import FakeTensorMode

import foo_ops
from foo_ops.testing import random
from foo_ops.testing.reference import linear, numbers_of_mxfp4

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
GROUP_SIZES = (32, 64, 128)
BYTES = torch.ones(2, 1, dtype=torch.uint8)


def weights(dtype, magnitude=1.0):
    """Return rows of all kinds: random, zeros, positive, constant, one with a huge element."""
    (weight,) = random("weights", (300, 256), dtype=torch.float64)
    weight[1] = 0
    weight[2, :128] = 0
    weight[3] = weight[3].abs()
    weight[4] = -2.5
    weight[5, 7] = 1000
    return (weight * magnitude).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [None, *GROUP_SIZES])
@pytest.mark.parametrize("magnitude", [1e-5, 1.0, 50.0])
def test_int8_is_nearest(dtype, group_size, magnitude):
    weight = weights(dtype, magnitude).double()
    integers, scale = foo_ops.quantize_weight(weight.to(dtype), 8, group_size)
    assert (integers.dtype, scale.dtype) == (torch.int8, dtype)
    assert integers.shape == weight.shape
    if group_size is None:
        assert scale.shape == weight.shape[:1]
    else:
        assert scale.shape == (300, 256 // group_size)
        # Each group is quantised as a row of its own.
        weight, integers = (it.reshape(-1, group_size) for it in (weight, integers))
        scale = scale.flatten()
    # The scale maps the largest magnitude to 127, and is rounded up to the dtype.
    exact, smallest = weight.abs().amax(1) / 127, torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    wide = scale.double()[exact > 0]
    assert (wide >= exact[exact > 0]).all()
    assert (wide <= exact[exact > 0] * (1 + 3 * torch.finfo(dtype).eps) + 2 * smallest).all()
    errors = (integers * scale.double()[:, None] - weight).abs()
    assert (errors <= 0.5 * scale.double()[:, None] * (1 + 1e-9)).all()
    assert (integers[weight == 0] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 50.0])
def test_int4_is_nearest(dtype, group_size, magnitude):
    weight = weights(dtype, magnitude).double()
    packed, scale, zero = foo_ops.quantize_weight(weight.to(dtype), 4, group_size=group_size)
    groups = 256 // group_size
    assert (packed.dtype, scale.dtype, zero.dtype) == (torch.uint8, dtype, dtype)
    assert packed.shape == (300, 128)
    assert scale.shape == zero.shape == (300, groups)
    assert torch.equal(zero, zero.round().clamp(0, 15))
    # Byte j of a group holds elements j and j + group_size / 2.
    found = torch.empty(300, 256, dtype=torch.float64)
    for column in range(256):
        group, place = divmod(column, group_size)
        half, byte = divmod(place, group_size // 2)
        integer = packed[:, group * group_size // 2 + byte].int() >> 4 * half & 15
        steps = integer.double() - zero[:, group].double()
        found[:, column] = steps * scale[:, group].double()
    # A rounded zero moves a group's extremes by another half step.
    limit = scale.double().repeat_interleave(group_size, 1) * (1 + 1e-9)
    assert ((found - weight).abs() <= limit).all()
    inside = (found - weight).abs() <= 0.5 * limit
    assert inside.double().mean() > 0.98
    assert (found[weight == 0] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_stay_finite(dtype):
    """Errors are as for other numbers: half a step, at a group's extremes up to a whole one."""
    info = torch.finfo(dtype)
    low, high = torch.meshgrid(*[torch.linspace(0, 1, 129, dtype=torch.float64)] * 2, indexing="ij")
    weight = torch.stack((low, -high), -1).repeat_interleave(16, -1).flatten(0, 1)
    largest = torch.full((1, 32), info.max, dtype=dtype)
    weight = torch.cat(((weight * info.max).to(dtype), largest, -largest))
    for arguments, steps in (((8,), 0.5), ((8, 32), 0.5), ((4, 32), 1.0)):
        quantized = foo_ops.quantize_weight(weight, *arguments)
        found = foo_ops.dequantize_weight(*quantized)
        assert found.isfinite().all()
        # Halved, since the difference may exceed the dtype's largest number.
        error = (found.double() / 2 - weight.double() / 2).abs()
        scale = quantized[1].double().reshape(-1, 1)
        rounding = weight.double().abs() * info.eps / 2
        assert (error <= 0.5 * steps * scale * (1 + 1e-9) + rounding / 2).all()
    for row in (-2, -1):
        torch.testing.assert_close(found[row], weight[row], rtol=info.eps, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_come_back(dtype):
    weight = weights(dtype)
    for arguments in ((8,), *((bits, size) for bits in (8, 4) for size in GROUP_SIZES)):
        quantized = foo_ops.quantize_weight(weight, *arguments)
        found = foo_ops.dequantize_weight(*quantized)
        assert found.dtype == dtype
        again = foo_ops.dequantize_weight(*(it.to("foo") for it in quantized))
        assert torch.equal(again.cpu(), found)
        # The product with the identity matrix is the weight, rounded once.
        unit = torch.eye(256, dtype=torch.float64)
        exact = foo_ops.dequantize_weight(
            *(it.double() if it.is_floating_point() else it for it in quantized)
        )
        rounded = linear(unit, exact).t().to(dtype)
        torch.testing.assert_close(found, rounded, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("device", ["cpu", "foo"])
def test_what_is_returned_follows_input(device):
    """Products of a weight that is quantized without error are exact."""
    weight = torch.randint(0, 16, (6, 128)).float()
    weight[:, ::32], weight[:, 1::32] = 15, 0
    of_int8 = weight.clone()
    of_int8[:, 2] = 127
    input, bias = torch.randint(-3, 4, (2, 3, 128)).float(), torch.arange(6.0)
    input, weight, of_int8, bias = (it.to(device) for it in (input, weight, of_int8, bias))
    found = foo_ops.linear_int8(input, *foo_ops.quantize_weight(of_int8, 8), bias)
    assert torch.equal(found, torch.nn.functional.linear(input, of_int8, bias))
    of_groups = weight.clone()
    of_groups[:, ::32] = 127
    for size in GROUP_SIZES:
        found = foo_ops.linear_int8(input, *foo_ops.quantize_weight(of_groups, 8, size), bias)
        assert torch.equal(found, torch.nn.functional.linear(input, of_groups, bias))
        quantized = foo_ops.quantize_weight(weight, 4, group_size=size)
        found = foo_ops.linear_int4(input, *quantized, bias, group_size=size)
        assert torch.equal(found, torch.nn.functional.linear(input, weight, bias))


def test_empty():
    for shape in ((0, 64), (3, 0), (0, 0)):
        weight = torch.zeros(shape)
        for arguments in ((8,), (8, 32), (4, 32)):
            quantized = foo_ops.quantize_weight(weight, *arguments)
            assert foo_ops.dequantize_weight(*quantized).shape == shape


def test_a_parameter_is_quantized():
    weight = torch.nn.Parameter(torch.randn(3, 32))
    assert not any(it.requires_grad for it in foo_ops.quantize_weight(weight, 8))


@pytest.mark.parametrize("arguments", [(8,), (8, 32), (4, 32)])
def test_weights_without_numbers_are_quantized(arguments):
    """Meta tensors, fake tensors and graphs give shapes and dtypes."""
    weight = torch.randn(3, 64).bfloat16()
    wanted = foo_ops.quantize_weight(weight, *arguments)
    with FakeTensorMode() as mode:
        fake = foo_ops.quantize_weight(mode.from_tensor(weight), *arguments)
    for quantized in (foo_ops.quantize_weight(weight.to("meta"), *arguments), fake):
        found = [(it.shape, it.dtype, it.stride()) for it in quantized]
        assert found == [(it.shape, it.dtype, it.stride()) for it in wanted]
    graph = torch.compile(foo_ops.quantize_weight, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(graph(weight, *arguments), wanted, rtol=0, atol=0)


def with_nan():
    weight = torch.zeros(600, 32)
    weight[599, 3] = torch.nan
    return weight


REFUSED = (
    (
        lambda: (torch.zeros(3, 32, dtype=torch.int32), 8),
        TypeError,
        "quantize_weight: weight must be float16, bfloat16, float32 or float64, got int32",
    ),
    (
        lambda: (torch.zeros(3, 32).to(torch.float8_e4m3fn), 8),
        TypeError,
        "quantize_weight: weight must be float16, bfloat16, float32 or float64, got float8_e4m3fn",
    ),
    (
        lambda: (torch.zeros(3, 32), 8.0),
        TypeError,
        "quantize_weight: bits must be an int, got float",
    ),
    (
        lambda: (torch.zeros(3, 32), 4, 32.0),
        TypeError,
        "quantize_weight: group_size must be an int, got float",
    ),
    (
        lambda: (torch.zeros(32), 8),
        ValueError,
        "quantize_weight: weight must have 2 dimensions (N, K), got 1",
    ),
    (lambda: (torch.zeros(3, 32), 2), ValueError, "quantize_weight: bits must be 8 or 4, got 2"),
    (
        lambda: (torch.zeros(3, 32), 8, 16),
        ValueError,
        "quantize_weight: group_size must be None, 32, 64 or 128 for 8 bits, got 16",
    ),
    (
        lambda: (torch.zeros(3, 48), 8, 32),
        ValueError,
        "quantize_weight: weight must have whole groups of 32 columns, got 48",
    ),
    (
        lambda: (torch.zeros(3, 32), 4),
        ValueError,
        "quantize_weight: group_size must be 32, 64 or 128 for 4 bits, got None",
    ),
    (
        lambda: (torch.zeros(3, 48), 4, 32),
        ValueError,
        "quantize_weight: weight must have whole groups of 32 columns, got 48",
    ),
    (
        lambda: (with_nan(), 8),
        ValueError,
        "quantize_weight: weight must be finite, got infinities or NaN",
    ),
    (
        lambda: (torch.full((3, 32), -torch.inf), 4, 32),
        ValueError,
        "quantize_weight: weight must be finite, got infinities or NaN",
    ),
)


@pytest.mark.parametrize(("make", "error", "message"), REFUSED)
def test_refused(make, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        foo_ops.quantize_weight(*make())


# Invalid variants of 6 quantized rows of 64 weights, in 8 bits and in 4, with groups of 32.
OTHERS = (
    (
        8,
        lambda weight, scale: (weight.view(torch.uint8), scale),
        TypeError,
        "weight must be int8 if zero is None, got uint8",
    ),
    (
        8,
        lambda weight, scale: (weight[0], scale),
        ValueError,
        "weight must have 2 dimensions (N, K), got 1",
    ),
    (
        8,
        lambda weight, scale: (weight, scale[:, None, None]),
        ValueError,
        "scale must have 1 dimension (N) or 2 (N, K / group_size), got 3",
    ),
    (
        8,
        lambda weight, scale: (weight, scale.expand(4, 6).t()),
        ValueError,
        "scale must have a column for each 32, 64 or 128 of the 64 elements of a row, got 4",
    ),
    (
        8,
        lambda weight, scale: (weight, scale[:1, None]),
        ValueError,
        "scale must have 6 rows, one for each row of weight, got 1",
    ),
    (
        8,
        lambda weight, scale: (weight, scale[:1]),
        ValueError,
        "scale must have 6 elements, one for each row of weight, got 1",
    ),
    (
        8,
        lambda weight, scale: (weight, scale.int()),
        TypeError,
        "scale must be float16, bfloat16, float32 or float64, got int32",
    ),
    (
        8,
        lambda weight, scale: (weight, scale.to("foo")),
        ValueError,
        "scale must be on cpu as weight is, got foo:0",
    ),
    (
        4,
        lambda weight, scale, zero: (weight.view(torch.int8), scale, zero),
        TypeError,
        "weight must be uint8 if zero is given, got int8",
    ),
    (
        4,
        lambda weight, scale, zero: (weight[None], scale, zero),
        ValueError,
        "weight must have 2 dimensions (N, K / 2), got 3",
    ),
    (
        4,
        lambda weight, scale, zero: (weight, scale[:, 0], zero[:, 0]),
        ValueError,
        "scale must have 2 dimensions (N, K / group_size), got 1",
    ),
    (
        4,
        lambda weight, scale, zero: (weight, scale[:1], zero),
        ValueError,
        "scale must have 6 rows, one for each row of weight, got 1",
    ),
    (
        4,
        lambda weight, scale, zero: (weight, scale.repeat(1, 2), zero.repeat(1, 2)),
        ValueError,
        "scale must have a column for each 32, 64 or 128 of the 64 elements of a row, got 4",
    ),
    (
        4,
        lambda weight, scale, zero: (weight, scale, zero[:1]),
        ValueError,
        "zero must have shape [6, 2] as scale has, got [1, 2]",
    ),
    (
        4,
        lambda weight, scale, zero: (weight, scale, zero.byte()),
        TypeError,
        "zero must be float32 as scale is, got uint8",
    ),
)


@pytest.mark.parametrize(("bits", "change", "error", "message"), OTHERS)
def test_what_does_not_come_back(bits, change, error, message):
    quantized = foo_ops.quantize_weight(torch.randn(6, 64), bits, 32 if bits == 4 else None)
    with pytest.raises(error, match=f"^{re.escape(f'dequantize_weight: {message}')}$"):
        foo_ops.dequantize_weight(*change(*quantized))


# ------------------------------------------------------------------------------------------- MXFP4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 50.0])
def test_mxfp4_is_nearest(dtype, magnitude):
    weight = weights(dtype, magnitude)
    codes, scale = foo_ops.quantize_mxfp4(weight)
    assert (codes.shape, scale.shape) == ((300, 128), (300, 8))
    found = numbers_of_mxfp4(codes, scale)
    powers = 2.0 ** (scale.double() - 127).repeat_interleave(32, 1)
    # The largest magnitude is 4 to 8 times the scale, and 6 the largest number.
    groups = weight.double().abs().unflatten(1, (-1, 32)).amax(-1) / 2.0 ** (scale.double() - 127)
    assert bool(((groups >= 4) & (groups < 8))[groups > 0].all())
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    distance = (weight.double().abs().unsqueeze(-1) - numbers * powers.unsqueeze(-1)).abs()
    assert torch.equal((found - weight.double()).abs(), distance.amin(-1))
    assert torch.equal(foo_ops.dequantize_mxfp4(codes, scale, torch.float64), found)


def test_mxfp4_rounds_ties_to_even_codes():
    halfway = torch.tensor([4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    weight = torch.cat((halfway, -halfway)).repeat(2)
    found = foo_ops.dequantize_mxfp4(*foo_ops.quantize_mxfp4(weight))
    expected = torch.tensor([4.0, 0, 1, 1, 2, 2, 4, 4])
    assert torch.equal(found, torch.cat((expected, -expected)).repeat(2))


def test_mxfp4_of_numbers_that_are_not_finite():
    weight = torch.ones(3, 64)
    weight[0, 3], weight[1, 40] = torch.inf, torch.nan
    codes, scale = foo_ops.quantize_mxfp4(weight)
    assert scale.tolist() == [[255, 125], [125, 255], [125, 125]]
    found = foo_ops.dequantize_mxfp4(codes, scale).unflatten(1, (2, 32))
    assert found.isnan().all(-1).tolist() == [[True, False], [False, True], [False, False]]


def test_mxfp4_lies_in_pairs_as_checkpoints_have_it():
    weight = torch.zeros(2, 32)
    weight[:, 0], weight[:, 1], weight[:, 31] = 4, -1, 6
    codes, scale = foo_ops.quantize_mxfp4(weight)
    assert scale.tolist() == [[127], [127]]
    assert codes[0].tolist() == [0xA6, *[0] * 14, 0x70]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: foo_ops.quantize_mxfp4(torch.ones(3, 33)),
            ValueError,
            "quantize_mxfp4: weight must have whole groups of 32 columns, got 33",
        ),
        (
            lambda: foo_ops.quantize_mxfp4(torch.ones(32, dtype=torch.int64)),
            TypeError,
            "quantize_mxfp4: weight must be float16, bfloat16, float32 or float64, got int64",
        ),
        (
            lambda: foo_ops.dequantize_mxfp4(torch.ones(2, 16), BYTES),
            TypeError,
            "dequantize_mxfp4: weight must be uint8, got float32",
        ),
        (
            lambda: foo_ops.dequantize_mxfp4(BYTES.expand(2, 16), BYTES.expand(2, 2)),
            ValueError,
            "dequantize_mxfp4: scale must have a column for each 32 of the numbers of weight, "
            "got shapes [2, 2] and [2, 16]",
        ),
        (
            lambda: foo_ops.dequantize_mxfp4(BYTES.expand(2, 16), BYTES, torch.int8),
            TypeError,
            "dequantize_mxfp4: dtype must be float16, bfloat16, float32 or float64, got int8",
        ),
    ],
)
def test_mxfp4_refuses(call, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call()
