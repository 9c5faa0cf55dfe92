"""Checkpoints of bitsandbytes are loaded without it, as they are, with 8 bits and with 4."""

import json
import re
from functools import partial

import pytest
import torch
from support.exact import assert_near

pytest.importorskip("transformers")
from safetensors.torch import load_file
from support.quantized_files import (
    in_4_bits,
    in_8_bits,
    load,
    logits_of,
    packed_layers,
    write_checkpoint,
)

import foo_ops
from foo_ops.integrations.transformers import apply, left_alone, replaced, save_quantized
from foo_ops.testing.reference import numbers_of_table4

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


def numbers_of(layer):
    if layer.bits == 8:
        return foo_ops.dequantize_weight(layer.weight.cpu(), layer.scale.double().cpu())
    parts = (layer.weight, layer.scale.double(), layer.table.double())
    return numbers_of_table4(*(it.cpu() for it in parts))


@pytest.mark.parametrize("device", ["cpu", "foo"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights(checkpoint, dtype, device):
    folder, exact, tensors, bits = checkpoint
    layers = packed_layers(load(folder, dtype=dtype, device_map=device))
    assert len(layers) == 14
    for name, layer in layers.items():
        assert layer.bits == bits
        assert layer.weight.device.type == device
        weight = exact.get_submodule(name).weight.detach()
        # Factors that are themselves codes are computed in float32, by a product and a sum.
        is_nested = f"{name}.weight.nested_absmax" in tensors
        roundings = {8: torch.finfo(dtype).eps, 4: 4 * is_nested * torch.finfo(torch.float32).eps}
        room = roundings[bits] * weight.abs()
        assert bool(((numbers_of(layer) - weight).abs() <= room).all()), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_4_bits_take_4_bits(checkpoint, dtype):
    folder, _, tensors, bits = checkpoint
    layers = packed_layers(load(folder, dtype=dtype))
    for name, layer in layers.items():
        assert layer.weight.nbytes == tensors[f"{name}.weight"].nbytes
        groups = layer.in_features // (128 if layer.group_size == 128 else 64)
        assert bits == 8 or layer.scale.shape == (layer.out_features, groups)


@pytest.mark.parametrize("is_applied", [False, True])
def test_logits_are_those_of_the_weights(checkpoint, is_applied):
    folder, exact, _, _ = checkpoint
    model = load(folder, dtype=torch.float32)
    for name, layer in packed_layers(model).items():
        exact.get_submodule(name).weight.data = numbers_of(layer)
    if is_applied:
        apply(model)
        assert not left_alone(model)
    assert replaced(model)["quantize"] == 14
    assert_near(logits_of(model), logits_of(exact), roundings=64)


def test_layers_of_one_table_are_joined(checkpoint):
    folder, _, _, bits = checkpoint
    model = apply(load(folder, dtype=torch.bfloat16))
    assert len({it.scale.dtype for it in packed_layers(model).values()}) == 1
    joined = [vars(it)["_foo_joined"] for it in model.modules() if "_foo_joined" in vars(it)]
    assert joined
    assert all((it.table is None) == (bits == 8) for it in joined)


def test_layers_of_other_tables_are_not_joined(tmp_path):
    exact, _ = write_checkpoint(tmp_path, in_4_bits, described(4))
    model = load(tmp_path, dtype=torch.float32)
    for some in (exact, model):
        some.model.layers[0].mlp.up_proj.weight.data.copy_(0)
    table = model.model.layers[0].mlp.up_proj.table
    model.model.layers[0].mlp.up_proj.table = torch.where(table == -1, 0, table)
    apply(model)
    assert_near(logits_of(model), logits_of(exact), roundings=64)


def test_a_conversion_keeps_scales(checkpoint):
    folder, _, _, bits = checkpoint
    model, again = load(folder, dtype=torch.float32), load(folder, dtype=torch.float32)
    model = model.to("foo").bfloat16()
    for name, layer in packed_layers(model).items():
        scale = again.get_submodule(name).scale
        expected = scale if bits == 4 else scale.bfloat16()
        assert torch.equal(layer.scale.cpu(), expected)
    assert logits_of(model).dtype == torch.bfloat16


def test_saving(checkpoint, tmp_path):
    folder, _, tensors, bits = checkpoint
    model = load(folder, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(written[name].view(torch.uint8), tensors[name].view(torch.uint8))
    if bits == 8:
        scale = f"{name.removesuffix('weight')}SCB"
        torch.testing.assert_close(written[scale], tensors[scale])
    else:
        (text,) = (it for it in tensors if it.startswith(f"{name}.quant_state"))
        state, expected = (json.loads(bytes(it[text].tolist())) for it in (written, tensors))
        for key in ("quant_type", "blocksize", "dtype", "shape"):
            assert state[key] == expected[key]
        assert torch.equal(written[f"{name}.quant_map"], tensors[f"{name}.quant_map"])
        if "nested_offset" not in expected:
            assert torch.equal(written[f"{name}.absmax"], tensors[f"{name}.absmax"])
    again = load(tmp_path, dtype=torch.float32)
    assert torch.equal(logits_of(again), logits_of(model))


def test_other_formats_have_no_tables(tmp_path):
    write_checkpoint(tmp_path, in_4_bits, described(4))
    model = load(tmp_path, dtype=torch.float32)
    message = (
        "save_quantized: no layer must have codes of a table, as of NF4 and FP4, got them in "
        "model.layers.0.self_attn.q_proj; save_pretrained writes the format that was read"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        save_quantized(model, tmp_path / "other")
    apply(model, quantize=4, keep_weights=False)
    message = (
        "bitsandbytes: foo_ops cannot write the weights of lm_head: they were quantised after the "
        "file had been read"
    )
    with pytest.raises(NotImplementedError, match=f"^{re.escape(message)}$"):
        model.save_pretrained(tmp_path / "other")


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
