"""Checkpoints with linear layers of 4 and 8 bits are loaded, run and saved as they are."""

import copy
import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from support.exact import assert_near

pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file
from support.memory_of_loading import check_peak
from support.quantized_files import (
    awq,
    float_quantized,
    fp8,
    gptq,
    int_quantized,
    load,
    logits_of,
    pack_quantized,
    tokens,
    write_checkpoint,
    write_large,
)
from transformers import (
    AutoModel,
    CompressedTensorsConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from foo_ops.integrations.transformers import (
    apply,
    checkpoints,
    left_alone,
    replaced,
    save_quantized,
)
from foo_ops.integrations.transformers import compressed as compressed_files
from foo_ops.integrations.transformers.formats import Awq, CompressedTensors, Gptq
from foo_ops.integrations.transformers.packed import FooPackedLinear
from foo_ops.integrations.transformers.packed_experts import FooPackedExperts

AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}


def awq_files(group_size):
    described = AWQ | {"group_size": group_size}
    return lambda rows, columns: awq(rows, columns, group_size), described


def gptq_files(version=1, bits=4, group_size=128, **options):
    format = "gptq" if version == 1 else "gptq_v2"
    described = {"quant_method": "gptq", "bits": bits, "group_size": group_size}
    described |= {"checkpoint_format": format, "desc_act": options.get("has_order", False)}

    def make_layer(rows, columns):
        return gptq(rows, columns, group_size, bits, offset=2 - version, **options)

    return make_layer, described


PACKED = "pack-quantized"


def compressed(
    make_layer,
    bits=4,
    group_size=None,
    symmetric=True,
    format="pack-quantized",
    ignore=("lm_head",),
):
    strategy = "channel" if group_size is None else "group"
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy}
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": weights | {"group_size": group_size},
        "input_activations": activations if format == "int-quantized" else None,
    }
    described = {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }
    return make_layer, described


def pack_quantized_files(bits=4, group_size=None, symmetric=True, ignore=("lm_head",)):
    def make_layer(rows, columns):
        return pack_quantized(rows, columns, group_size or -1, bits, symmetric)

    return compressed(make_layer, bits, group_size, symmetric, ignore=ignore)


def with_act_order(group_size):
    make_layer, described = compressed(
        lambda rows, columns: pack_quantized(rows, columns, group_size, has_order=True),
        group_size=group_size,
    )
    described["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    return make_layer, described


def float_quantized_files(strategy):
    make_layer, described = compressed(
        lambda rows, columns: float_quantized(rows, columns, strategy == "channel"),
        bits=8,
        format="float-quantized",
    )
    weights = described["config_groups"]["group_0"]["weights"]
    weights |= {"type": "float", "strategy": strategy}
    return make_layer, described


def fp8_files(block, exponents=None):
    described = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
    if exponents is not None:
        described["scale_fmt"] = "ue8m0"
    return lambda rows, columns: fp8(rows, columns, block, exponents), described


KINDS = {
    "awq": awq_files(128),
    "awq, 64": awq_files(64),
    "awq, a row": awq_files(-1),
    "gptq": gptq_files(is_symmetric=True),
    "gptq, asymmetric, 32": gptq_files(group_size=32),
    "gptq v2, asymmetric, a row": gptq_files(version=2, group_size=-1),
    "gptq, act-order": gptq_files(group_size=64, has_order=True),
    "gptq, 8 bits": gptq_files(bits=8, group_size=-1, is_symmetric=True),
    "gptq v2, 8 bits": gptq_files(2, bits=8, group_size=-1, is_symmetric=True),
    "compressed": pack_quantized_files(group_size=128),
    # The head has 50 rows, no multiple of the 8 zeros of a word.
    "compressed, asymmetric, 32": pack_quantized_files(group_size=32, symmetric=False, ignore=()),
    "older compressed, act-order": with_act_order(64),
    "compressed, a row": pack_quantized_files(),
    "compressed, 8 bits, packed": pack_quantized_files(bits=8),
    "compressed, W8A8": compressed(int_quantized, 8, format="int-quantized"),
    "gptq, 8 bits, 64": gptq_files(bits=8, group_size=64, is_symmetric=True),
    "gptq, 8 bits, act-order": gptq_files(bits=8, group_size=32, is_symmetric=True, has_order=True),
    "compressed, 8 bits, 32": pack_quantized_files(bits=8, group_size=32),
    "compressed, FP8": float_quantized_files("channel"),
    "compressed, FP8, one scale": float_quantized_files("tensor"),
    "fp8": fp8_files([128, 128]),
    "fp8, parts of blocks": fp8_files([48, 96]),
    "fp8, one scale": fp8_files(None),
    "fp8, exponents": fp8_files([128, 128], torch.float8_e8m0fnu),
    "fp8, exponents in bytes": fp8_files([1, 32], torch.uint8),
}
"""A function that makes a layer, and the description in config.json, by kind."""


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    exact, tensors = write_checkpoint(folder, *KINDS[request.param])
    return folder, exact, tensors


def bits_of(tensor):
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


@pytest.mark.parametrize("is_applied", [False, True])
def test_logits(checkpoint, is_applied):
    folder, exact, tensors = checkpoint
    model = load(folder, dtype=torch.float32)
    if is_applied:
        apply(model)
        assert not left_alone(model)
    assert replaced(model)["quantize"] == sum("scale" in name for name in tensors)
    # Few rows, and many.
    for count in (1, 30):
        assert_near(logits_of(model, count), logits_of(exact, count), roundings=64)


def test_float16_on_foo(checkpoint):
    folder, exact, _ = checkpoint
    model = load(folder, device_map="foo")
    assert model.dtype == torch.float16
    assert model.model.layers[0].mlp.up_proj.weight.device.type == "foo"
    assert_near(logits_of(model), logits_of(exact), roundings=64)


def test_file_is_written_back(checkpoint, tmp_path):
    folder, _, tensors = checkpoint
    model = load(folder)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert saved[name].dtype == tensor.dtype
        assert torch.equal(bits_of(saved[name]), bits_of(tensor)), name
    assert torch.equal(logits_of(load(tmp_path)), logits_of(model))


@pytest.mark.parametrize("checkpoint", ["awq", "older compressed, act-order"], indirect=True)
def test_shards_pickles_and_parts(checkpoint, tmp_path):
    folder, _, tensors = checkpoint
    model = load(folder)
    expected = logits_of(model)
    model.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert torch.equal(logits_of(load(tmp_path / "shards")), expected)
    shutil.copy(folder / "config.json", tmp_path)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert torch.equal(logits_of(load(tmp_path)), expected)
    part = AutoModel.from_pretrained(folder)
    hidden = part(tokens()).last_hidden_state
    assert torch.equal(hidden, model.model(tokens()).last_hidden_state)


def test_gradient_of_the_input(checkpoint):
    folder, exact, _ = checkpoint
    gradients = []
    for model in (load(folder, dtype=torch.float32), exact):
        weight = model.get_input_embeddings().weight.requires_grad_()
        loss = model(tokens(), labels=tokens()).loss
        gradients += torch.autograd.grad(loss, weight)
    assert_near(*gradients, roundings=256)


@pytest.mark.parametrize("prepares", [False, True])
@pytest.mark.parametrize("checkpoint", ["awq", "gptq, act-order", "compressed"], indirect=True)
def test_adapters_of_peft(checkpoint, prepares):
    """`prepare_model_for_kbit_training` makes what is not quantised float32."""
    peft = pytest.importorskip("peft")
    model = load(checkpoint[0], dtype=torch.bfloat16)
    before = logits_of(model)
    if prepares:
        options = {"use_gradient_checkpointing": False}
        model = peft.prepare_model_for_kbit_training(model, **options)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    after = model(tokens()).logits.detach()
    torch.testing.assert_close(after.bfloat16(), before, rtol=0, atol=0.1)
    optimizer = torch.optim.AdamW([it for it in model.parameters() if it.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_layers_are_buffers(checkpoint):
    folder, _, _ = checkpoint
    layer = load(folder).model.layers[0].mlp.down_proj
    assert isinstance(layer, FooPackedLinear)
    assert not list(layer.parameters())
    assert {"weight", "scale"} <= set(layer.state_dict())


@pytest.mark.parametrize(
    ("kind", "make_layer", "options"),
    [
        (Awq, awq, {}),
        (Gptq, gptq, {}),
        (Gptq, gptq, {"has_order": True}),
        (CompressedTensors, pack_quantized, {"is_symmetric": False}),
    ],
)
def test_groups_that_the_kernels_do_not_have(kind, make_layer, options):
    """A group of 96 becomes three of 32."""
    torch.manual_seed(0)
    stored, weight = make_layer(24, 192, 96, **options)
    config = SimpleNamespace(bits=4, format="gemm" if kind is Awq else "gptq", to_dict=dict)
    format = kind.find(stored, 24, 192, config)
    layer = FooPackedLinear(format.read(stored, torch.float32))
    assert layer.group_size == 32
    assert_near(layer(torch.eye(192)), weight.t(), roundings=4)
    written = format.write(layer)
    assert written.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(written[name].to(tensor.dtype), tensor), name


REFUSED = {
    "version": (
        AWQ | {"group_size": 32, "version": "gemv"},
        lambda rows, columns: awq(rows, columns, 32),
        "awq: foo_ops cannot read the weights of model.layers.0.mlp.down_proj: "
        "its version must be gemm, got gemv",
    ),
    "bits": (
        gptq_files(group_size=32)[1] | {"bits": 3},
        lambda rows, columns: gptq(rows, columns, 32),
        "gptq: foo_ops cannot read the weights of model.layers.0.mlp.down_proj: "
        "it must have 4 or 8 bits, got 3",
    ),
    "marlin": (
        gptq_files(group_size=32)[1] | {"checkpoint_format": "marlin"},
        lambda rows, columns: gptq(rows, columns, 32),
        "gptq: foo_ops cannot read the weights of model.layers.0.mlp.down_proj: "
        "its checkpoint_format must be gptq or gptq_v2, got marlin",
    ),
    "blocks of FP8": (
        *reversed(fp8_files([128, 48])),
        "fp8: foo_ops cannot read the weights of model.layers.0.mlp.down_proj: "
        "blocks and inputs must be multiples of 32, got 48 and 256",
    ),
    "zeros of 8 bits": (
        *reversed(gptq_files(bits=8, group_size=-1)),
        "gptq: foo_ops cannot read the weights of model.layers.0.self_attn.q_proj: "
        "qzeros must be 128 with 8 bits",
    ),
    "shape": (
        AWQ,
        lambda rows, columns: gptq(rows, columns, 32),
        "awq: foo_ops cannot read the weights of model.layers.0.mlp.down_proj: "
        "qweight must be int32 (256, 16), got int32 (32, 128)",
    ),
    "groups": (
        AWQ | {"group_size": 16},
        lambda rows, columns: awq(rows, columns, 16),
        "awq: foo_ops cannot read the weights of model.layers.0.mlp.down_proj: scales must have "
        "groups whose size is a multiple of 32, got shape (16, 128) for 256 inputs",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what, tmp_path):
    described, make_layer, message = REFUSED[what]
    write_checkpoint(tmp_path, make_layer, described, num_hidden_layers=1)
    with pytest.raises(NotImplementedError) as error:
        load(tmp_path)
    assert str(error.value) == message


def test_layer_that_the_model_does_not_have(tmp_path):
    write_checkpoint(tmp_path, *awq_files(32), num_hidden_layers=2)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(NotImplementedError) as error:
        load(tmp_path)
    assert str(error.value) == (
        "awq: foo_ops cannot read the weights of model.layers.1.mlp.down_proj: "
        "the model has no such layer"
    )


def test_layer_that_the_model_leaves_out(tmp_path, monkeypatch):
    exact, _ = write_checkpoint(tmp_path, *awq_files(32), num_hidden_layers=2)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    monkeypatch.setattr(
        type(exact), "_keys_to_ignore_on_load_unexpected", [r"layers\.1\."], raising=False
    )
    assert replaced(load(tmp_path))["quantize"] == 7


@pytest.mark.parametrize(
    "checkpoint", [it for it in KINDS if it.startswith("compressed")], indirect=True
)
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_compressed_tensors_reads_what_is_written(checkpoint, tmp_path, monkeypatch):
    pytest.importorskip("compressed_tensors")
    folder, exact, tensors = checkpoint
    load(folder, dtype=torch.float32).save_pretrained(tmp_path)
    own = AUTO_QUANTIZER_MAPPING["compressed-tensors"].args[0]
    monkeypatch.setitem(AUTO_QUANTIZER_MAPPING, "compressed-tensors", own)
    # Without dequantize, transformers 5.23 takes no packed zeros.
    options = {}
    if any("zero_point" in name for name in tensors):
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    theirs = load(tmp_path, **options)
    assert not replaced(theirs)
    assert_near(logits_of(theirs), logits_of(exact), roundings=64)


@pytest.mark.parametrize("checkpoint", ["compressed", "compressed, W8A8"], indirect=True)
def test_compressed_tensors_is_not_needed(checkpoint, monkeypatch):
    monkeypatch.setattr(compressed_files, "is_compressed_tensors_available", lambda: False)
    monkeypatch.setattr(checkpoints, "is_compressed_tensors_available", lambda: False)
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    folder, exact, _ = checkpoint
    assert_near(logits_of(load(folder)), logits_of(exact), roundings=64)


# --------------------------------------------------------------------------------------- experts


EXPERTS = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
QWEN = Qwen3MoeConfig(**EXPERTS, num_experts=4, moe_intermediate_size=96, head_dim=16)
MIXTRAL = MixtralConfig(**EXPERTS, num_local_experts=4)
MIXTURES = {
    "awq": (*awq_files(32), QWEN),
    "gptq": (*gptq_files(group_size=32), MIXTRAL),
    "gptq, 8 bits": (*gptq_files(bits=8, group_size=-1, is_symmetric=True), QWEN),
    "compressed": (*pack_quantized_files(group_size=32, symmetric=False), MIXTRAL),
    "compressed, W8A8": (*compressed(int_quantized, 8, format="int-quantized"), MIXTRAL),
    "gptq, 8 bits, 32": (*gptq_files(bits=8, group_size=32, is_symmetric=True), MIXTRAL),
    "fp8": (*fp8_files([64, 32]), QWEN),
    "compressed, FP8": (*float_quantized_files("channel"), QWEN),
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts(kind, tmp_path):
    """Files have a layer for each expert, which models fuse."""
    exact, tensors = write_checkpoint(tmp_path, *MIXTURES[kind])
    exact.set_experts_implementation("eager")
    model = load(tmp_path, dtype=torch.float32)
    experts = [layer.mlp.experts for layer in model.model.layers]
    assert [type(it) for it in experts] == [FooPackedExperts] * 2
    assert not list(experts[0].parameters())
    expected = logits_of(exact)
    assert_near(logits_of(model), expected, roundings=64)
    assert replaced(apply(model))["quantize"] == 2 * 4 + 2
    assert not left_alone(model)
    assert_near(logits_of(model), expected, roundings=64)
    assert_near(logits_of(copy.deepcopy(model).to("foo")), expected, roundings=64)
    gradients = []
    for it in (model, exact):
        weight = it.get_input_embeddings().weight.requires_grad_()
        gradients += torch.autograd.grad(it(tokens(), labels=tokens()).loss, weight)
    assert_near(*gradients, roundings=256)
    load(tmp_path).save_pretrained(tmp_path / "again")
    saved = load_file(tmp_path / "again/model.safetensors")
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(bits_of(saved[name]), bits_of(it)) for name, it in tensors.items())
    save_quantized(load(tmp_path), tmp_path / "compressed")
    again = load(tmp_path / "compressed", dtype=torch.float32)
    assert_near(logits_of(again), expected, roundings=64)


@pytest.mark.parametrize("kind", ["awq", "gptq, 8 bits", "fp8", "compressed, FP8"])
def test_experts_of_other_dtypes(kind, tmp_path):
    """Models are converted, run under autocast, and have norms of float32 beside their experts."""
    write_checkpoint(tmp_path, *MIXTURES[kind])
    model = load(tmp_path, dtype=torch.float32)
    experts = model.model.layers[0].mlp.experts
    scale = experts.gate_up_proj_scale.clone()
    with torch.autocast("cpu", torch.bfloat16):
        assert bool(logits_of(model).isfinite().all())
    model.bfloat16()
    is_float = "fp8" in kind.lower()
    expected = scale if is_float else scale.bfloat16()
    assert experts.gate_up_proj_scale.dtype == expected.dtype
    assert torch.equal(experts.gate_up_proj_scale, expected)
    hidden, index = torch.randn(3, 64), torch.tensor([[0, 1], [2, 3], [1, 3]])
    weights = torch.rand(3, 2)
    found = experts(hidden.bfloat16(), index, weights.bfloat16())
    assert found.dtype == torch.bfloat16
    wide = experts(hidden, index, weights)
    assert wide.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert experts(hidden, index, weights).dtype == torch.bfloat16
    torch.testing.assert_close(wide, found.float(), rtol=0.05, atol=0.05)
    # The other way round, FP8's scales are of the dtype in which sums are kept.
    assert bool(logits_of(model.double()).isfinite().all())
    assert experts.gate_up_proj_scale.dtype == torch.float64


def without(folder, ending):
    """Leave tensors out of a file."""
    tensors = load_file(folder / "model.safetensors")
    kept = {name: it for name, it in tensors.items() if not name.endswith(ending)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        (("experts.2.up_proj.qweight",), "2.up_proj is not quantised as others are"),
        (("down_proj.qweight",), "only gate_up_proj is quantised"),
    ],
)
def test_experts_of_which_some_are_missing(ending, message, tmp_path):
    write_checkpoint(tmp_path, *MIXTURES["awq"])
    without(tmp_path, ending)
    with pytest.raises(NotImplementedError) as error:
        load(tmp_path)
    assert str(error.value) == (
        f"awq: foo_ops cannot read the weights of model.layers.0.mlp.experts: {message}"
    )


def test_experts_in_act_order(tmp_path):
    write_checkpoint(tmp_path, *gptq_files(group_size=32, has_order=True), QWEN)
    with pytest.raises(NotImplementedError, match=r"experts must not have act-order$"):
        load(tmp_path)


# ---------------------------------------------------------------------------------------- memory


def awq_shapes(rows, columns):
    groups = columns // 128
    return {
        "qweight": (columns, rows // 8),
        "qzeros": (groups, rows // 8),
        "scales": (groups, rows),
    }


def packed_shapes(rows, columns):
    return {"weight_packed": (rows, columns // 8), "weight_scale": (rows, columns // 128)}


LARGE = {"awq": (awq_files(128)[1], awq_shapes)}
LARGE["compressed"] = (pack_quantized_files(group_size=128)[1], packed_shapes)


@pytest.mark.whole
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", LARGE)
def test_memory_of_loading(kind, tmp_path):
    """Neither the file nor temporary tensors stay in memory beside the layers."""
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8}
    write_large(tmp_path, *LARGE[kind], **sizes)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert 180e6 < size < 220e6
    check_peak(tmp_path, size, 1.25)
