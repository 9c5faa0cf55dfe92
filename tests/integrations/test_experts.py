"""Mixtures of experts of Hugging Face transformers train on foo, with any expert kernels."""

import copy

import pytest
import torch
import transformers
from support.transformer_models import EXPERTS, GROUPED, VOCABULARY

CONFIGS = {
    "mixtral": lambda: transformers.MixtralConfig(
        **GROUPED, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**GROUPED, **EXPERTS),
}


def logits_and_gradients(model, ids):
    output = model(ids, labels=ids)
    output.loss.backward()
    results = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: each.detach().cpu() for name, each in (results | {"": output.logits}).items()}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_training(name, experts):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    ids = torch.randint(1, VOCABULARY, (2, 9))
    model.set_experts_implementation("eager")
    exact = logits_and_gradients(copy.deepcopy(model).double(), ids)
    model.set_experts_implementation(experts)
    torch.foo.reset_operator_counts()
    found = logits_and_gradients(model.foo(), ids.foo())
    is_grouped = torch.foo.operator_counts().get("aten::_grouped_mm") is not None
    assert is_grouped == (experts == "grouped_mm")
    assert found.keys() == exact.keys()
    for key, expected in exact.items():
        error = (found[key].double() - expected).abs().max()
        assert error <= 1e-5 * expected.abs().max().clamp(min=1e-3), key
