"""`FooPackedLinear`, the layer of quantised checkpoints: values, gradients, adapters, copies."""

import copy
import io

import pytest
import torch
from support.exact import assert_near
from torch import nn

pytest.importorskip("transformers")

import foo_ops
from foo_ops.integrations.transformers.packed import FooPackedLinear, Integers
from foo_ops.testing.reference import numbers_of_int4, numbers_of_table4

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
KINDS = ("int4", "int4, ordered", "int8", "table4")


def random_layer(kind, dtype, rows=24, columns=64):
    """Return a layer, and its weight and bias in float64."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator, dtype=dtype)
    bias = nn.Parameter(torch.randn(rows, generator=generator).to(dtype), requires_grad=False)
    if kind == "int8":
        integers = Integers(*foo_ops.quantize_weight(weight, 8))
        exact = integers.weight * integers.scale.double()[:, None]
    elif kind == "table4":
        wide = torch.promote_types(dtype, torch.float32)
        codes, _ = foo_ops.quantize_mxfp4(weight)
        scale = torch.rand(rows, columns // 32, generator=generator).to(wide)
        table = torch.linspace(-1, 1, 16, dtype=wide)
        integers = Integers(codes, scale, table=table)
        exact = numbers_of_table4(codes, scale.double(), table.double())
    else:
        integers = Integers(*foo_ops.quantize_weight(weight, 4, 32))
        exact = numbers_of_int4(*(it.double() for it in integers[:3]), 32)
    if kind.endswith("ordered"):
        order = torch.randperm(columns, generator=generator)
        integers, exact = integers._replace(order=order), exact[:, order.argsort()]
    return FooPackedLinear(integers, bias), exact, bias.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(64,), (1, 64), (3, 5, 64), (0, 64), (70, 64)])
def test_values_and_gradients(shape, kind, dtype):
    layer, weight, bias = random_layer(kind, dtype)
    input = torch.randn(shape).to(dtype).requires_grad_()
    output = layer(input)
    assert output.dtype == dtype
    exact = input.detach().double().requires_grad_()
    expected = exact @ weight.t() + bias
    assert_near(output.detach(), expected.detach(), roundings=32)
    cotangent = torch.randn(output.shape).to(dtype)
    (grad,) = torch.autograd.grad(output, input, cotangent)
    (expected,) = torch.autograd.grad(expected, exact, cotangent.double())
    assert_near(grad, expected, roundings=32)


def test_strided_input():
    layer, weight, bias = random_layer("int4, ordered", torch.float32)
    input = torch.randn(64, 9).t()
    assert_near(layer(input), input.double() @ weight.t() + bias)


def test_input_of_another_dtype():
    """As after `peft.prepare_model_for_kbit_training`, which makes norms float32."""
    layer, *_ = random_layer("int4", torch.bfloat16)
    input = torch.randn(3, 64).bfloat16()
    output = layer(input.float())
    assert output.dtype == torch.float32
    assert torch.equal(output, layer(input).float())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(input.float()), layer(input))


def test_nan_stays_in_its_row():
    layer, *_ = random_layer("int4", torch.float32)
    input = torch.randn(3, 64)
    input[1, 5] = torch.nan
    output = layer(input)
    assert output[1].isnan().all()
    assert output[[0, 2]].isfinite().all()


def test_another_width():
    layer, *_ = random_layer("int4", torch.float32)
    with pytest.raises(ValueError, match="linear_int4: weight must have 16 columns"):
        layer(torch.randn(3, 32))


@pytest.mark.parametrize("kind", KINDS)
def test_copies(kind):
    layer, *_ = random_layer(kind, torch.float32)
    input = torch.randn(3, 64)
    expected = layer(input)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    other, *_ = random_layer(kind, torch.float32)
    for buffer in other.buffers():
        buffer.zero_()
    other.load_state_dict(layer.state_dict())
    for twin in (copy.deepcopy(layer), torch.load(file, weights_only=False), other):
        assert torch.equal(twin(input), expected)
    assert torch.equal(layer.to("foo")(input.to("foo")).cpu(), expected)
    assert layer.to("cpu", torch.float64).scale.dtype == torch.float64


def test_compiled():
    layer, *_ = random_layer("int4, ordered", torch.float32)
    input = torch.randn(3, 64)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(input), layer(input))


# --------------------------------------------------------------------------------------- adapters


class Model(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, input):
        return self.layers(input)


def with_adapters(kind, dtype):
    peft = pytest.importorskip("peft")
    layer, weight, bias = random_layer(kind, dtype, rows=64)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False
    )
    torch.manual_seed(0)
    return peft.get_peft_model(Model(layer, nn.GELU()), config), weight, bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters(kind, dtype):
    """QLoRA: peft wraps the layer by itself, and trains matrices beside it."""
    model, weight, bias = with_adapters(kind, dtype)
    wrapper = model.base_model.model.layers[0]
    assert isinstance(wrapper.base_layer, FooPackedLinear)
    trained = [it for it in model.parameters() if it.requires_grad]
    assert len(trained) == 2
    input = torch.randn(20, 64).to(dtype).requires_grad_()
    gradients = torch.autograd.grad(model(input).float().square().sum(), [input, *trained])
    doubles = [it.detach().double().requires_grad_() for it in (input, *trained)]
    exact, down, up = doubles
    hidden = exact @ weight.t() + bias + 2 * (exact @ down.t() @ up.t())
    expected = torch.autograd.grad(nn.functional.gelu(hidden).square().sum(), doubles)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert_near(ours.to(dtype), theirs, roundings=64)


def test_adapters_are_not_merged():
    """Integers have no room for them; nothing is changed."""
    model, *_ = with_adapters("int4", torch.float32)
    layer = model.base_model.model.layers[0].base_layer
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(RuntimeError):
        model.merge_and_unload()
    assert all(torch.equal(it, before[name]) for name, it in layer.state_dict().items())
