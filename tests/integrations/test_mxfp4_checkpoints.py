"""Checkpoints of gpt-oss with MXFP4 experts are loaded, run and saved as they are."""

import json

import pytest
import torch
from support.exact import assert_near
from torch import nn

pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file
from support.quantized_files import load, tokens
from transformers import AutoModelForCausalLM, GptOssConfig, Mxfp4Config

from foo_ops.integrations.transformers import apply, left_alone, replaced
from foo_ops.integrations.transformers.mxfp4 import FooMxfp4Experts
from foo_ops.testing.reference import numbers_of_mxfp4

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 50,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}
KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Make a folder as gpt-oss is published, and the model in float64 that it stands for."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    torch.manual_seed(0)
    config = GptOssConfig(**SIZES)
    exact = AutoModelForCausalLM.from_config(config).double()
    tensors = {}
    for name, weight in exact.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, depth, columns = weight.shape
            blocks = torch.randint(256, (experts, columns, depth // 32, 16), dtype=torch.uint8)
            scales = torch.randint(120, 125, (experts, columns, depth // 32), dtype=torch.uint8)
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
            weight.data = numbers_of_mxfp4(blocks.flatten(-2), scales).mT.contiguous()
        else:
            nn.init.normal_(weight, std=0.2)
            tensors[name] = weight.detach().bfloat16()
            weight.data = tensors[name].double()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": KEPT}
    described = config.to_dict() | {
        "architectures": ["GptOssForCausalLM"],
        "dtype": "bfloat16",
        "quantization_config": quantization,
    }
    (folder / "config.json").write_text(json.dumps(described))
    exact.set_experts_implementation("eager")
    return folder, exact, tensors


@pytest.mark.parametrize("device", ["cpu", "foo"])
@pytest.mark.parametrize("is_applied", [False, True])
def test_logits(checkpoint, is_applied, device):
    folder, exact, _ = checkpoint
    model = load(folder)
    if is_applied:
        apply(model)
        assert not left_alone(model)
    expected = exact(tokens()).logits.detach()
    with torch.no_grad():
        assert_near(model.to(device)(tokens().to(device)).logits, expected, roundings=64)


def test_weights_stay_as_they_are(checkpoint, tmp_path):
    folder, _, tensors = checkpoint
    model = load(folder)
    kinds = [type(layer.mlp.experts) for layer in model.model.layers]
    assert kinds == [FooMxfp4Experts] * 2
    counts = replaced(apply(model))
    assert counts["quantize"] == 2
    assert "experts" not in counts
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(saved[name], it) for name, it in tensors.items())
    again = apply(load(tmp_path))
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)


def test_generate(checkpoint):
    folder, exact, _ = checkpoint
    model = apply(load(folder))
    found = model.generate(tokens()[:1], max_new_tokens=4, do_sample=False)
    # Each token has the largest logit, but for the errors of bfloat16.
    logits = exact(found[:, :-1]).logits[0, 8:].detach()
    chosen = logits.gather(1, found[0, 9:, None])[:, 0]
    assert bool((logits.amax(1) - chosen <= 0.05 * logits.abs().amax(1)).all())


def test_gradients_flow_through_experts(checkpoint):
    """As adapters of attention need them."""
    folder, exact, _ = checkpoint
    model = load(folder)
    name = "model.layers.0.self_attn.q_proj.weight"
    gradients = []
    for it in (model, exact):
        weight = it.get_parameter(name)
        loss = it(tokens(), labels=tokens()).loss
        gradients += torch.autograd.grad(loss, weight)
    assert_near(gradients[0], gradients[1], roundings=256)


def test_dequantize_is_transformers_own(checkpoint):
    folder, _, _ = checkpoint
    model = load(folder, quantization_config=Mxfp4Config(dequantize=True))
    weight = model.model.layers[0].mlp.experts.gate_up_proj
    assert (weight.dtype, weight.shape) == (torch.bfloat16, (6, 64, 192))
