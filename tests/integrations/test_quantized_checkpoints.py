"""Checkpoints with linear layers of 4 and 8 bits are loaded, run and saved as they are."""

import json

import pytest
import torch
from support.exact import assert_near

pytest.importorskip("transformers")
from safetensors.torch import load_file
from support.quantized_files import awq, write_checkpoint
from transformers import AutoModelForCausalLM

from foo_ops.integrations.transformers import apply, left_alone, replaced
from foo_ops.integrations.transformers.packed import FooPackedLinear

AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}


def awq_files(group_size):
    described = AWQ | {"group_size": group_size}
    return lambda rows, columns: awq(rows, columns, group_size), described


KINDS = {
    "awq": awq_files(128),
    "awq, 64": awq_files(64),
    "awq, 32": awq_files(32),
    "awq, a row": awq_files(-1),
}
"""What makes a layer, and what config.json says of it."""


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    exact, tensors = write_checkpoint(folder, *KINDS[request.param])
    return folder, exact, tensors


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def tokens(count=9):
    return torch.randint(50, (2, count), generator=torch.Generator().manual_seed(0))


def logits_of(model, count=9):
    device = model.lm_head.weight.device
    with torch.no_grad():
        return model(tokens(count).to(device)).logits


@pytest.mark.parametrize("is_applied", [False, True])
def test_logits(checkpoint, is_applied):
    folder, exact, _ = checkpoint
    model = load(folder, dtype=torch.float32)
    if is_applied:
        apply(model)
        assert not left_alone(model)
    assert replaced(model)["quantize"] == 14
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
        assert torch.equal(saved[name], tensor), name
    assert torch.equal(logits_of(load(tmp_path)), logits_of(model))


def test_gradient_of_the_input(checkpoint):
    folder, exact, _ = checkpoint
    gradients = []
    for model in (load(folder, dtype=torch.float32), exact):
        weight = model.get_input_embeddings().weight.requires_grad_()
        loss = model(tokens(), labels=tokens()).loss
        gradients += torch.autograd.grad(loss, weight)
    assert_near(*gradients, roundings=256)


def test_layers_are_buffers(checkpoint):
    folder, _, _ = checkpoint
    layer = load(folder).model.layers[0].mlp.down_proj
    assert isinstance(layer, FooPackedLinear)
    assert not list(layer.parameters())
    assert set(layer.state_dict()) >= {"weight", "scale", "zero"}


REFUSED = {
    "version": (
        AWQ | {"group_size": 32, "version": "gemv"},
        lambda rows, columns: awq(rows, columns, 32),
        "awq: foo_ops cannot read the weights of model.layers.0.mlp.down_proj: "
        "its version must be gemm, got gemv",
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
        "the model has no such layer, but maybe fused ones"
    )


def test_layer_that_the_model_leaves_out(tmp_path, monkeypatch):
    exact, _ = write_checkpoint(tmp_path, *awq_files(32), num_hidden_layers=2)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    monkeypatch.setattr(
        type(exact), "_keys_to_ignore_on_load_unexpected", [r"layers\.1\."], raising=False
    )
    assert replaced(load(tmp_path))["quantize"] == 7
