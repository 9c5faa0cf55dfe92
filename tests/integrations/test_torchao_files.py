"""Files of torchao are loaded without it, 4 and 8 bits as they are."""

import importlib.util
import json
import re
from functools import partial

import pytest
import torch
from support.exact import assert_near

pytest.importorskip("transformers")
from support.quantized_files import (
    SIZES,
    load,
    logits_of,
    packed_layers,
    torchao_bytes,
    torchao_floats,
    torchao_pairs,
    write_checkpoint,
)
from transformers import AutoModelForCausalLM, LlamaConfig

import foo_ops
from foo_ops.integrations.transformers import (
    apply,
    left_alone,
    replaced,
    save_quantized,
    torchao,
)
from foo_ops.integrations.transformers.formats import UnreadableError
from foo_ops.integrations.transformers.torchao import TorchAo
from foo_ops.ops.dequantize import numbers_of_fp8

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = {
    "Int4Tensor": (torchao_pairs, 4),
    "Int4Tensor, groups of 64": (partial(torchao_pairs, group_size=64), 4),
    "Int8Tensor": (torchao_bytes, 8),
    "Intx of 8 bits": (partial(torchao_bytes, group_size=32), 8),
    "Intx of 4 bits": (partial(torchao_bytes, group_size=32, bits=4, has_zeros=True), 4),
    "Intx of 4 bits, symmetric": (partial(torchao_bytes, group_size=128, bits=4), 4),
    "Intx of 3 bits, a row": (partial(torchao_bytes, bits=3, has_zeros=True), 4),
    "Float8Tensor": (torchao_floats, 8),
    "Float8Tensor, one scale": (partial(torchao_floats, has_rows=False), 8),
}


def described(name="Int8WeightOnlyConfig", version=2, **data):
    kind = {"_type": name, "_version": version, "_data": data}
    return {"quant_method": "torchao", "quant_type": {"default": kind}}


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request, tmp_path_factory):
    folder, (make_layer, bits) = tmp_path_factory.mktemp("checkpoint"), KINDS[request.param]
    exact, _ = write_checkpoint(folder, make_layer, described())
    return folder, exact, bits


def numbers_of(layer):
    parts = [None if it is None else it.cpu() for it in (layer.weight, layer.scale, layer.zero)]
    if layer.is_float:
        return numbers_of_fp8(parts[0], parts[1].double(), torch.float64)
    return foo_ops.dequantize_weight(
        parts[0], *(it if it is None else it.double() for it in parts[1:])
    )


@pytest.mark.parametrize("device", ["cpu", "foo"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights(checkpoint, dtype, device):
    folder, exact, bits = checkpoint
    layers = packed_layers(load(folder, dtype=dtype, device_map=device))
    assert len(layers) == 14
    eps = torch.finfo(dtype).eps
    for name, layer in layers.items():
        assert layer.bits == bits
        assert layer.weight.device.type == device
        weight = exact.get_submodule(name).weight.detach()
        # Scales are rounded, and zeros, which are at most 16 steps.
        steps = layer.scale.double().cpu().abs().max() if bits == 4 else 0
        room = 2 * eps * (weight.abs() + 16 * steps)
        assert bool(((numbers_of(layer) - weight).abs() <= room).all()), name


@pytest.mark.parametrize("is_applied", [False, True])
def test_logits_are_those_of_the_weights(checkpoint, is_applied):
    folder, exact, _ = checkpoint
    model = load(folder, dtype=torch.float32)
    for name, layer in packed_layers(model).items():
        exact.get_submodule(name).weight.data = numbers_of(layer)
    if is_applied:
        apply(model)
        assert not left_alone(model)
    assert replaced(model)["quantize"] == 14
    assert_near(logits_of(model), logits_of(exact), roundings=256)


def test_saving(tmp_path):
    write_checkpoint(tmp_path, torchao_bytes, described())
    model = load(tmp_path, dtype=torch.float32)
    message = (
        "torchao: foo_ops cannot write the weights of model.layers.0.self_attn.q_proj: "
        "save_quantized writes it as compressed-tensors does"
    )
    with pytest.raises(NotImplementedError, match=f"^{re.escape(message)}$"):
        model.save_pretrained(tmp_path / "other")
    save_quantized(model, tmp_path / "other")
    again = load(tmp_path / "other", dtype=torch.float32)
    assert torch.equal(logits_of(again), logits_of(model))


# -------------------------------------------------------------------------------- what is refused


def with_scaled_input(rows, columns):
    stored, weight = torchao_bytes(rows, columns)
    return stored | {"_weight_act_pre_scale": torch.ones(1)}, weight


def renamed(make_layer, source, target):
    def make(rows, columns):
        stored, weight = make_layer(rows, columns)
        return {target if name == source else name: it for name, it in stored.items()}, weight

    return make


def with_short_zeros(rows, columns):
    stored, weight = torchao_bytes(rows, columns, group_size=32, has_zeros=True)
    return stored | {"_weight_zero_point": stored["_weight_zero_point"][:, :1].clone()}, weight


def with_scale(change):
    def make(rows, columns):
        stored, weight = torchao_bytes(rows, columns)
        return stored | {"_weight_scale": change(stored["_weight_scale"])}, weight

    return make


def in_words(rows, columns):
    stored, weight = torchao_pairs(rows, columns)
    return stored | {"_weight_qdata": stored["_weight_qdata"].view(torch.int32)}, weight


REFUSED = {
    "scaled input": (
        with_scaled_input,
        "it must have no act_pre_scale",
    ),
    "tiles": (
        renamed(torchao_pairs, "_weight_scale", "_weight_scale_and_zero"),
        "its int4_packing_format must be plain, got tile_packed_to_4d",
    ),
    "words": (
        in_words,
        "qdata must be int8 or float8_e4m3fn (128, 256), or two integers in a byte, got int32 "
        "(128, 32)",
    ),
    "groups": (
        partial(torchao_bytes, group_size=16),
        "groups must have a multiple of 32 weights, got 16 groups for 256 inputs",
    ),
    "no scale": (
        renamed(torchao_bytes, "_weight_scale", "_weight_other"),
        "_weight_scale is missing",
    ),
    "one number as scale": (
        with_scale(lambda scale: scale[0, 0].clone()),
        "_weight_scale must have 2 dimensions, got float16 ()",
    ),
    "scales without groups": (
        with_scale(lambda scale: scale[:, 0].contiguous()),
        "_weight_scale must have 2 dimensions, got float16 (128,)",
    ),
    "short zeros": (
        with_short_zeros,
        "zero_point must have scale's shape (128, 8), got (128, 1)",
    ),
    "zeros": (
        partial(torchao_bytes, group_size=32, has_zeros=True),
        "zero_point must be 0 with 8 bits",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what, tmp_path):
    make_layer, reason = REFUSED[what]
    layer = "self_attn.q_proj" if what == "zeros" else "mlp.down_proj"
    write_checkpoint(tmp_path, make_layer, described())
    message = f"torchao: foo_ops cannot read the weights of model.layers.0.{layer}: {reason}"
    with pytest.raises(NotImplementedError, match=f"^{re.escape(message)}$"):
        load(tmp_path)


@pytest.mark.parametrize("columns", [20, 48])
def test_pairs_of_a_row_that_kernels_do_not_have(columns):
    """It is refused before anything is loaded."""
    stored, _ = torchao_pairs(16, columns, group_size=columns)
    message = f"groups must have a multiple of 32 weights, got 1 groups for {columns} inputs"
    with pytest.raises(UnreadableError, match=f"^{re.escape(message)}$"):
        TorchAo.find(stored, 16, columns, None)


def test_zeros_of_a_row_that_kernels_do_not_have():
    stored, _ = torchao_bytes(16, 48, bits=4, has_zeros=True)
    format = TorchAo.find(stored, 16, 48, None)
    message = "zero_point must be 0 in groups that are no multiple of 32 weights, got groups of 48"
    with pytest.raises(UnreadableError, match=f"^{re.escape(message)}$"):
        format.read(stored, torch.float32)


def test_a_row_of_8_bits_may_have_any_size():
    stored, weight = torchao_bytes(16, 20, bits=4)
    integers = TorchAo.find(stored, 16, 20, None).read(stored, torch.float32)
    numbers = foo_ops.dequantize_weight(integers.weight, integers.scale.double())
    assert torch.equal(numbers, weight)


def packing(name):
    return {"_type": "Int4PackingFormat", "_data": name}


OURS = [
    described("Int8WeightOnlyConfig"),
    described("Int4WeightOnlyConfig", int4_packing_format=packing("PLAIN")),
    described("Int4WeightOnlyConfig", int4_packing_format="plain"),
    described("IntxWeightOnlyConfig", intx_packing_format=packing("UNPACKED_TO_INT8")),
    described("Float8DynamicActivationFloat8WeightConfig", packing_format=packing("PLAIN")),
]
THEIRS = [
    described("Int8WeightOnlyConfig", version=1),
    described("Int4WeightOnlyConfig", int4_packing_format=packing("PLAIN_INT32")),
    described("Int4WeightOnlyConfig", int4_packing_format="tile_packed_to_4d"),
    described("NVFP4DynamicActivationNVFP4WeightConfig"),
    described("AWQConfig", base_config=described("Int8WeightOnlyConfig")),
    {"quant_method": "torchao", "quant_type": {"default": "int4_weight_only"}},
    {"quant_method": "torchao", "quant_type": "int4_weight_only", "group_size": 64},
    {"quant_method": "torchao"},
]


@pytest.mark.parametrize("settings", [*OURS, *THEIRS])
@pytest.mark.parametrize("has_torchao", [False, True])
def test_kinds_that_are_refused_are_left_to_torchao(has_torchao, settings, monkeypatch):
    monkeypatch.setattr(torchao, "is_torchao_available", lambda: has_torchao)
    assert torchao.StoredTorchAo.is_for(settings) == (not has_torchao or settings in OURS)


def test_pickles_are_refused(tmp_path):
    config = LlamaConfig(**SIZES)
    model = AutoModelForCausalLM.from_config(config)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    config.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    text |= {"quantization_config": described(), "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(text))
    message = (
        "torchao: foo_ops cannot read the weights of the model: pytorch_model.bin is a pickle of "
        "torchao's classes, which torchao alone reads"
    )
    with pytest.raises(NotImplementedError, match=f"^{re.escape(message)}$"):
        load(tmp_path)


# ---------------------------------------------------------------------------------------- torchao


def configs():
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
    )

    return {
        "int8": Int8WeightOnlyConfig(),
        "int4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
        "float8": Float8WeightOnlyConfig(),
    }


@pytest.mark.parametrize("kind", ["int8", "int4", "float8"])
@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
def test_files_that_torchao_writes(kind, tmp_path):
    from transformers import TorchAoConfig

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).bfloat16()
    model.save_pretrained(tmp_path / "dense")
    options = {"quantization_config": TorchAoConfig(configs()[kind]), "dtype": torch.bfloat16}
    theirs = load(tmp_path / "dense", **options)
    assert not packed_layers(theirs)
    theirs.save_pretrained(tmp_path / "quantized")
    ours = load(tmp_path / "quantized", dtype=torch.bfloat16)
    layers = packed_layers(ours)
    assert len(layers) == 14
    for name, layer in layers.items():
        assert layer.bits == (4 if kind == "int4" else 8)
        weight = theirs.get_submodule(name).weight.dequantize()
        assert torch.equal(numbers_of(layer).bfloat16(), weight.detach()), name
    loss = (logits_of(ours) - logits_of(theirs)).norm() / logits_of(theirs).norm()
    assert loss < 0.02
