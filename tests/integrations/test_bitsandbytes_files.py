"""Checkpoints of bitsandbytes are loaded without it: 8 bits as they are, 4 bits as 8."""

import re
from functools import partial

import pytest
import torch
from support.exact import assert_near

pytest.importorskip("transformers")
from safetensors.torch import load_file
from support.quantized_files import in_4_bits, in_8_bits, write_checkpoint
from transformers import AutoModelForCausalLM

import foo_ops
from foo_ops.integrations.transformers import apply, left_alone, replaced, save_quantized
from foo_ops.integrations.transformers.packed import FooPackedLinear

KINDS = {
    "nf4": in_4_bits,
    "nf4, double": partial(in_4_bits, is_nested=True),
    "fp4": partial(in_4_bits, kind="fp4"),
    "fp4, blocks of 128, double": partial(in_4_bits, kind="fp4", block=128, is_nested=True),
    "nf4, as bfloat16": partial(in_4_bits, storage=torch.bfloat16),
    "8 bits": in_8_bits,
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def described(bits):
    return {"quant_method": "bitsandbytes", f"load_in_{bits}bit": True}


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request, tmp_path_factory):
    folder, bits = tmp_path_factory.mktemp("checkpoint"), 8 if request.param == "8 bits" else 4
    exact, tensors = write_checkpoint(folder, KINDS[request.param], described(bits))
    return folder, exact, tensors, bits


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def logits_of(model):
    tokens = torch.arange(18).reshape(2, 9).to(model.lm_head.weight.device)
    with torch.no_grad():
        return model(tokens).logits


def packed_layers(model):
    return {name: it for name, it in model.named_modules() if isinstance(it, FooPackedLinear)}


@pytest.mark.parametrize("device", ["cpu", "foo"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights(checkpoint, dtype, device):
    folder, exact, _, bits = checkpoint
    layers = packed_layers(load(folder, dtype=dtype, device_map=device))
    assert len(layers) == 14
    eps = torch.finfo(dtype).eps
    for name, layer in layers.items():
        assert layer.bits == 8
        assert layer.weight.device.type == device
        found = foo_ops.dequantize_weight(layer.weight.cpu(), layer.scale.double().cpu())
        weight = exact.get_submodule(name).weight.detach()
        if bits == 8:
            assert bool(((found - weight).abs() <= eps * weight.abs()).all()), name
            continue
        groups = weight.unflatten(1, (-1, 32))
        largest = groups.abs().amax(-1, keepdim=True)
        room = largest / 254 * (1 + 2 * eps) + 4 * torch.finfo(torch.float32).eps * largest
        assert bool(((found - weight).unflatten(1, (-1, 32)).abs() <= room).all()), name


@pytest.mark.parametrize("is_applied", [False, True])
def test_logits_are_those_of_the_weights(checkpoint, is_applied):
    folder, exact, _, _ = checkpoint
    model = load(folder, dtype=torch.float32)
    for name, layer in packed_layers(model).items():
        weight = foo_ops.dequantize_weight(layer.weight, layer.scale.double())
        exact.get_submodule(name).weight.data = weight
    if is_applied:
        apply(model)
        assert not left_alone(model)
    assert replaced(model)["quantize"] == 14
    assert_near(logits_of(model), logits_of(exact), roundings=64)


def test_saving(checkpoint, tmp_path):
    folder, _, tensors, bits = checkpoint
    model = load(folder, dtype=torch.float32)
    if bits == 4:
        message = (
            "bitsandbytes: foo_ops cannot write the weights of model.layers.0.self_attn.q_proj: "
            "its 4 bits have become 8, which bitsandbytes does not have; save_quantized writes them"
        )
        with pytest.raises(NotImplementedError, match=f"^{re.escape(message)}$"):
            model.save_pretrained(tmp_path)
        save_quantized(model, tmp_path)
    else:
        model.save_pretrained(tmp_path)
        written = load_file(tmp_path / "model.safetensors")
        name = "model.layers.1.mlp.up_proj"
        assert torch.equal(written[f"{name}.weight"], tensors[f"{name}.weight"])
        torch.testing.assert_close(written[f"{name}.SCB"], tensors[f"{name}.SCB"])
    again = load(tmp_path, dtype=torch.float32)
    assert torch.equal(logits_of(again), logits_of(model))


def without(make_layer, name):
    def make(rows, columns):
        tensors, weight = make_layer(rows, columns)
        return {last: it for last, it in tensors.items() if last != name}, weight

    return make


def with_large_blocks(rows, columns):
    """Blocks are as large as two rows."""
    return in_4_bits(rows, columns, block=2 * columns)


def in_other_layout(rows, columns):
    tensors, weight = in_8_bits(rows, columns)
    return tensors | {"weight_format": torch.tensor(1, dtype=torch.uint8)}, weight


def of_another_shape(rows, columns):
    tensors, weight = in_4_bits(rows, columns)
    other, _ = in_4_bits(rows, 2 * columns)
    name = "weight.quant_state.bitsandbytes__nf4"
    return tensors | {name: other[name]}, weight


REFUSED = {
    "blocks": (
        with_large_blocks,
        4,
        "blocks must be parts of rows, got blocks of 512 for 256 inputs",
    ),
    "small blocks": (
        partial(in_4_bits, block=16),
        4,
        "weight.absmax must have a number for each block of 32, 64 or more weights, got 2048 for "
        "32768 weights",
    ),
    "no blocks": (without(in_4_bits, "weight.absmax"), 4, "weight.absmax is missing"),
    "no description": (
        without(in_4_bits, "weight.quant_state.bitsandbytes__nf4"),
        4,
        "weight.quant_state is missing",
    ),
    "size": (
        lambda rows, columns: in_4_bits(rows // 2, columns),
        4,
        "weight must have 16384 bytes, got 8192",
    ),
    "shape": (
        of_another_shape,
        4,
        "weight.quant_state must have the shape of weight, got [128, 256]",
    ),
    "layout": (in_other_layout, 8, "weight_format must be row"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what, tmp_path):
    make_layer, bits, reason = REFUSED[what]
    layer = "self_attn.q_proj" if what in ("layout", "shape") else "mlp.down_proj"
    write_checkpoint(tmp_path, make_layer, described(bits))
    message = f"bitsandbytes: foo_ops cannot read the weights of model.layers.0.{layer}: {reason}"
    with pytest.raises(NotImplementedError, match=f"^{re.escape(message)}$"):
        load(tmp_path)
