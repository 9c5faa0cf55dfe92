"""foo::moe_experts, its kind of weights, and foo::grouped_linear: errors, and what is not read.

test_matrix.py has what holds for every operator.
"""

import math
import re

import pytest
import torch
from support.exact import assert_near
from support.refusals import assert_refused

import foo_ops
from foo_ops.ops.linear_fp8 import codes_of
from foo_ops.testing import (
    GROUPED_LINEAR,
    MOE_EXPERTS,
    Sample,
    check_outputs,
    random,
    reference,
)

GPT_OSS = {"is_interleaved": True, "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
TOKENS, EXPERTS, TOP_K, DEPTH, COLUMNS = 5, 3, 2, 8, 4


def arguments(**changed):
    """Make arguments that fit, some of them changed."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    given = {
        "hidden": random(TOKENS, DEPTH),
        "expert_index": torch.randint(EXPERTS, (TOKENS, TOP_K), generator=generator),
        "expert_weight": random(TOKENS, TOP_K),
        "gate_up": random(EXPERTS, 2 * COLUMNS, DEPTH),
        "down": random(EXPERTS, DEPTH, COLUMNS),
        "gate_up_bias": random(EXPERTS, 2 * COLUMNS),
        "down_bias": random(EXPERTS, DEPTH),
    }
    return given | changed


ERRORS = [
    ("hidden", torch.ones(2), ValueError, "hidden must have 2 dimensions (T, K), got 1"),
    ("hidden", torch.ones(TOKENS, DEPTH, dtype=torch.int64), TypeError,
     "hidden must be float16, bfloat16, float32 or float64, got int64"),
    ("expert_index", torch.zeros(TOKENS, dtype=torch.int64), ValueError,
     "expert_index must have 2 dimensions (T, top_k), got 1"),
    ("expert_index", torch.zeros(TOKENS - 1, TOP_K, dtype=torch.int64), ValueError,
     "expert_index must have 5 rows as hidden has, got 4"),
    ("expert_index", torch.zeros(TOKENS, TOP_K), TypeError,
     "expert_index must be int32 or int64, got float32"),
    ("expert_weight", torch.zeros(TOKENS, TOP_K + 1), ValueError,
     "expert_weight must have 2 columns as expert_index has, got 3"),
    ("expert_weight", torch.zeros(TOKENS, TOP_K, dtype=torch.float64), TypeError,
     "expert_weight must be float32, or float32 as hidden is, got float64"),
    ("gate_up", torch.ones(EXPERTS, 7, DEPTH), ValueError,
     "gate_up must have an even number of rows, gates and their factors, got 7"),
    ("gate_up", torch.ones(EXPERTS, 8, DEPTH + 1), ValueError,
     "gate_up must have 8 columns as hidden has, got 9"),
    ("gate_up", torch.ones(EXPERTS, 8, DEPTH, dtype=torch.float64), TypeError,
     "gate_up must be float32 as hidden is, got float64"),
    ("down", torch.ones(EXPERTS + 1, DEPTH, COLUMNS), ValueError,
     "down must have 3 matrices as gate_up has, got 4"),
    ("down", torch.ones(EXPERTS, DEPTH, COLUMNS + 1), ValueError,
     "down must have 4 columns, one for each two rows of gate_up, got 5"),
    ("gate_up_bias", torch.ones(EXPERTS, 7), ValueError,
     "gate_up_bias must have 8 columns, one for each row of gate_up, got 7"),
    ("down_bias", torch.ones(DEPTH), ValueError,
     "down_bias must have 2 dimensions (E, N), got 1"),
    ("activation", "swish", ValueError,
     "activation must be relu, relu2, silu, gelu or gelu_tanh, got swish"),
    ("limit", 0.0, ValueError, "limit must be positive, got 0"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "kind", "message"), ERRORS)
def test_errors(name, value, kind, message):
    assert_refused(foo_ops.moe_experts, kind, f"moe_experts: {message}", arguments(**{name: value}))


def test_alpha_is_of_silu():
    given = arguments(activation="gelu", alpha=1.5)
    assert_refused(
        foo_ops.moe_experts, ValueError, "moe_experts: alpha must be 1 for gelu, got 1.5", given
    )


@pytest.mark.parametrize("device", ["cpu", "foo"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("expert", [-1, EXPERTS + 1, 2**31 - 1])
def test_experts_that_do_not_exist(expert, dtype, device):
    index = arguments()["expert_index"].to(dtype)
    index[3, 1] = expert
    given = {name: it.to(device) for name, it in arguments(expert_index=index).items()}
    message = f"moe_experts: expert_index must be in [0, 3), or 3 for no expert, got {expert}"
    with pytest.raises(IndexError, match=re.escape(message)):
        foo_ops.moe_experts(**given)


def test_experts_that_nobody_chose_are_not_read():
    given = arguments(expert_index=torch.zeros(TOKENS, TOP_K, dtype=torch.int32))
    expected = foo_ops.moe_experts(**given)
    for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
        given[name][1:] = torch.nan
        given[name].requires_grad_()
    output = foo_ops.moe_experts(**given)
    assert torch.equal(output, expected)
    output.sum().backward()
    for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
        assert not given[name].grad[1:].any()
        assert given[name].grad[0].any()


def test_choices_of_no_expert():
    """They add nothing and have no gradients, even with weights that are NaN."""
    given = arguments()
    given["expert_index"][:, 1] = EXPERTS
    given["expert_weight"][:, 1] = torch.nan
    single = dict(given) | {
        "expert_index": given["expert_index"][:, :1],
        "expert_weight": given["expert_weight"][:, :1],
    }
    expected = foo_ops.moe_experts(**single)
    weight = given["expert_weight"].requires_grad_()
    output = foo_ops.moe_experts(**given)
    assert torch.equal(output, expected)
    output.sum().backward()
    assert not weight.grad[:, 1].any()
    assert weight.grad[:, 0].all()


@pytest.mark.parametrize("dtype", MOE_EXPERTS.dtypes)
def test_weights_of_the_router_in_float32(dtype):
    sample = MOE_EXPERTS.samples["gpt-oss"](dtype)
    hidden, index, weight, *others = sample.inputs
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    output = foo_ops.moe_experts(hidden, index, weight.to(wide), *others, **sample.keywords)
    check_outputs(MOE_EXPERTS, sample, dtype, (output,))


def test_gradients_lie_as_weights_do():
    """Autograd then accumulates them without a copy; gpt-oss's weights are transposed."""
    given = arguments()
    for name in ("gate_up", "down"):
        given[name] = given[name].mT.contiguous().mT.requires_grad_()
    foo_ops.moe_experts(**given).sum().backward()
    for name in ("gate_up", "down"):
        assert given[name].grad.stride() == given[name].stride()


MXFP4, FP8 = "mxfp4", "fp8"


def quantized(weight, bits, group_size):
    """Return the weights of all experts as integers with scales and zeros, and their numbers."""
    if bits == MXFP4:
        parts = foo_ops.quantize_mxfp4(weight)
        return (*parts, None), reference.numbers_of_mxfp4(*parts)
    if bits == FP8:
        codes = (100 * weight).to(torch.float8_e4m3fn)
        groups = () if group_size is None else (weight.shape[2] // group_size,)
        shape = (*weight.shape[:2], *groups)
        scale = torch.linspace(0.005, 0.02, math.prod(shape)).view(shape)
        scale = scale.double() if weight.dtype == torch.float64 else scale
        factors = scale.unsqueeze(-1) if group_size is None else scale
        factors = factors.repeat_interleave(group_size or 1, -1).double()
        numbers = reference.numbers_of_fp8(codes.view(torch.uint8)) * factors
        return (codes, scale, None), numbers
    parts = zip(*(foo_ops.quantize_weight(it, bits, group_size) for it in weight))
    integers, scale, *zero = (torch.stack(part) for part in parts)
    if bits == 8:
        factors = scale.double().unsqueeze(-1)
        if group_size:
            factors = scale.double().repeat_interleave(group_size, -1)
        return (integers, scale, None), integers.double() * factors
    numbers = [
        reference.numbers_of_int4(*(it.double() if it.is_floating_point() else it for it in each))
        for each in zip(integers, scale, *zero, [torch.tensor(group_size)] * len(weight))
    ]
    return (integers, scale, *zero), torch.stack(numbers)


@pytest.mark.parametrize("device", ["cpu", "foo"])
@pytest.mark.parametrize("dtype", MOE_EXPERTS.dtypes)
@pytest.mark.parametrize(
    ("bits", "group_size"),
    [(8, None), (8, 32), (4, 32), (4, 64), (MXFP4, None), (FP8, None), (FP8, 64)],
)
@pytest.mark.parametrize("tokens", [0, 1, 5, 60])
def test_weights_of_few_bits(tokens, bits, group_size, dtype, device):
    """Results and gradients are those of the numbers that the integers stand for."""
    hidden, weight, gate_up, down, up_bias, down_bias = random(
        "quantized",
        *((tokens, 128), (tokens, 2), (4, 2 * 64, 128), (4, 128, 64), (4, 128), (4, 128)),
        dtype=dtype,
    )
    index = torch.arange(2 * tokens).view(tokens, 2) % 3
    (up, up_numbers), (low, low_numbers) = (
        quantized(it / it.shape[-1] ** 0.5, bits, group_size) for it in (gate_up, down)
    )
    leaves = [hidden, weight, up_bias, down_bias]
    exact = [it.double().requires_grad_() for it in leaves]
    expected = reference.moe_experts(
        exact[0], index, exact[1], up_numbers, low_numbers, *exact[2:], **GPT_OSS
    )
    leaves = [it.to(device).requires_grad_() for it in leaves]
    integers = [None if it is None else it.to(device) for it in (*up, *low)]
    output = foo_ops.moe_experts_quantized(
        leaves[0], index.to(device), leaves[1], *integers, *leaves[2:], **GPT_OSS
    )
    assert_near(output.detach(), expected.detach(), roundings=64)
    grad = torch.ones_like(expected)
    gradients = torch.autograd.grad(output, leaves, grad.to(device, dtype))
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, exact, grad)):
        assert_near(ours, theirs, roundings=256)


@pytest.mark.parametrize("device", ["cpu", "foo"])
@pytest.mark.parametrize(("bits", "group_size"), [(8, 32), (4, 32), (MXFP4, None), (FP8, 32)])
def test_autocast_of_few_bits(bits, group_size, device):
    """Scales of integers are cast as other tensors, and those of FP8 keep their bits."""
    hidden, weight, gate_up, down = random(
        "autocast", (5, 64), (5, 2), (4, 64, 64), (4, 64, 32), dtype=torch.float32
    )
    index = torch.arange(10).view(5, 2) % 4
    parts = [quantized(it, bits, group_size)[0] for it in (gate_up, down)]
    given = [None if it is None else it.to(device) for part in parts for it in part]
    tokens = (hidden.to(device), index.to(device), weight.to(device))
    with torch.autocast(device, torch.bfloat16):
        output = foo_ops.moe_experts_quantized(*tokens, *given)
        by_name = torch.ops.foo.moe_experts_quantized(
            *tokens,
            gate_up=codes_of(given[0]),
            **dict(zip(("gate_up_scale", "gate_up_zero"), given[1:3])),
            down=codes_of(given[3]),
            **dict(zip(("down_scale", "down_zero"), given[4:])),
        )
    assert output.dtype == torch.bfloat16
    cast = [
        it.bfloat16() if it is not None and it.dtype == torch.float32 and bits != FP8 else it
        for it in given
    ]
    hidden, index, weight = tokens
    expected = foo_ops.moe_experts_quantized(hidden.bfloat16(), index, weight.bfloat16(), *cast)
    assert torch.equal(output, expected)
    assert torch.equal(by_name, expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_integers_need_fitting_scales(bits):
    size = 32 if bits == 4 else None
    weight, *scales = foo_ops.quantize_weight(torch.ones(8, 32), bits, size)
    up = [it[None] for it in (weight, *scales)] + [None] * (bits == 8)
    hidden, index, ones = torch.ones(2, 32), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    down = [it.contiguous()[None] for it in foo_ops.quantize_weight(torch.ones(32, 32), bits, size)]
    down += [None] * (bits == 8)
    with pytest.raises(
        ValueError, match=r"down must have 4 columns, one for each two rows of gate_up, got 32"
    ):
        foo_ops.moe_experts_quantized(hidden, index, ones, *up, *down)
    up[1] = up[1][:, :7]
    with pytest.raises(ValueError, match=r"gate_up_scale must have 8 rows as gate_up has, got 7"):
        foo_ops.moe_experts_quantized(hidden, index, ones, *up, *down)


def test_integers_of_8_bits_have_scales_of_rows_or_groups():
    up, down = torch.ones(1, 64, 32, dtype=torch.int8), torch.ones(1, 32, 32, dtype=torch.int8)
    hidden, index, ones = torch.ones(2, 32), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)

    def call(up_scale):
        foo_ops.moe_experts_quantized(
            hidden, index, ones, up, up_scale, None, down, torch.ones(1, 32), None
        )

    call(torch.ones(1, 64, 1))
    message = "gate_up_scale must have 2 dimensions (E, N) or 3 (E, N, K / group_size), got 1"
    with pytest.raises(ValueError, match=re.escape(message)):
        call(torch.ones(64))
    message = "gate_up_scale must have a column for each 32, 64 or 128 of the 32 steps of gate_up"
    with pytest.raises(ValueError, match=f"{message}, got 2"):
        call(torch.ones(1, 64, 2))


def test_exponents_need_fitting_weights():
    up, down = (
        foo_ops.quantize_mxfp4(torch.ones(1, 64, 32)),
        foo_ops.quantize_mxfp4(torch.ones(1, 32, 32)),
    )
    hidden, index, ones = torch.ones(2, 32), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)

    def call(gate_up, gate_up_scale):
        foo_ops.moe_experts_quantized(
            hidden, index, ones, gate_up, gate_up_scale, None, *down, None
        )

    refused = pytest.raises
    with refused(ValueError, match=r"gate_up_scale must have a column for each 32 of the 32 steps"):
        call(up[0], up[1].expand(1, 64, 2))
    with refused(ValueError, match=r"gate_up_scale must have 64 rows as gate_up has, got 63"):
        call(up[0], up[1][:, :63])
    with refused(ValueError, match=r"gate_up_scale must have 3 dimensions \(E, N, K / 32\), got 2"):
        call(up[0], up[1][0])
    with refused(TypeError, match=r"gate_up must be uint8 with exponents, got int8"):
        call(up[0].to(torch.int8), up[1])


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([3, 2], "offsets must not decrease, nor exceed the 4 rows of input, got 2 after 3"),
        ([3, 5], "offsets must not decrease, nor exceed the 4 rows of input, got 5 after 3"),
        ([-1, 2], "offsets must not decrease, nor exceed the 4 rows of input, got -1 after 0"),
        ([1], "offsets must have 2 elements, one for each matrix of weight, got 1"),
    ],
)
def test_offsets(offsets, message):
    input, weight = torch.ones(4, 3), torch.ones(2, 5, 3)
    with pytest.raises(ValueError, match=re.escape(f"grouped_linear: {message}")):
        foo_ops.grouped_linear(input, weight, torch.tensor(offsets))


@pytest.mark.parametrize("dtype", GROUPED_LINEAR.dtypes)
@pytest.mark.parametrize("lies", [lambda weight: weight, lambda weight: weight.mT.contiguous().mT])
def test_rows_around_those_of_kernels(lies, dtype):
    """Few rows, rows that are packed, and widths that are no whole vectors, in both layouts."""
    counts = (1, 8, 2, 17, 0, 9, 5, 33, 16)
    for depth, columns in ((1, 1), (3, 5), (70, 33), (64, 128), (515, 67)):
        input, weight, bias = random(
            "groups",
            (sum(counts), depth),
            (len(counts), columns, depth),
            (len(counts), columns),
            dtype=dtype,
        )
        offsets = torch.tensor(counts).cumsum(0)
        inputs = input, lies(weight), offsets, bias
        output = foo_ops.grouped_linear(*inputs)
        check_outputs(GROUPED_LINEAR, Sample(inputs), dtype, (output,))


def test_grouped_linear_is_that_of_torch():
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(30, 16, generator=generator, dtype=torch.float64)
    weight = torch.randn(3, 24, 16, generator=generator, dtype=torch.float64)
    offsets = torch.tensor([4, 4, 30], dtype=torch.int32)
    ours = foo_ops.grouped_linear(input.float(), weight.float(), offsets)
    exact = reference.grouped_linear(input, weight, offsets)
    assert (ours - exact).abs().max() < 1e-4
