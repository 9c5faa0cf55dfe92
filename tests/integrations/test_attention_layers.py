"""Attention layers that `apply` gave foo::attention compute the same as with their own function."""

import copy
import types

import pytest
import torch
import transformers
from support.exact import assert_as_near
from support.transformer_models import (
    SIZES,
    VOCABULARY,
    WINDOW,
    decoder,
    encoder,
    run,
    run_exactly,
    tokens,
)
from transformers import AttentionInterface, DynamicCache
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from foo_ops.integrations.transformers import apply, left_alone, replaced, restore
from foo_ops.integrations.transformers.attention_layers import (
    FooAttention,
)

pytestmark = pytest.mark.usefixtures("one_thread")

ROUNDINGS = 128
LLAMA = "llama"


def applied(model):
    return apply(copy.deepcopy(model))


# ------------------------------------------------------- models whose masks mean something else


def splinter():
    torch.manual_seed(0)
    config = transformers.SplinterConfig(**SIZES)
    return transformers.SplinterModel(config).eval()


@pytest.mark.parametrize("change", [applied, lambda it: it], ids=["applied", "by name"])
@pytest.mark.parametrize("padded", [False, True])
def test_without_a_mask_an_encoder_sees_all(change, padded):
    """The class only supports eager attention, so its layers treat a missing mask as no mask."""
    model, inputs = splinter(), tokens(2, 14)
    mask = torch.ones(2, 14, dtype=torch.long)
    mask[0, :3] = 1 - padded
    options = {"attention_mask": mask}
    exact = run_exactly(model, inputs, **options)
    theirs = run(model, "eager", inputs, **options)
    ours = run(change(model), None if change is applied else "foo", inputs, **options)
    shown = mask.bool()
    assert_as_near([ours[shown]], [theirs[shown]], [exact[shown]], ROUNDINGS)


def test_a_model_keeps_its_implementation_and_counts_its_layers():
    for model, name in ((decoder(LLAMA), "sdpa"), (splinter(), "eager")):
        assert replaced(apply(model))["attention"] == 2
        assert model.config._attn_implementation == name
        assert replaced(restore(model)) == {}


def test_models_without_attention_have_none():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    mamba = transformers.MambaModel(transformers.MambaConfig(**sizes, state_size=8))
    fnet = transformers.FNetModel(transformers.FNetConfig(**sizes, intermediate_size=32))
    for model in (mamba, fnet):
        assert not {"attention", "cache"} & replaced(apply(model)).keys()
    assert "cache" not in replaced(apply(encoder("bert")))


@pytest.mark.parametrize("name", [LLAMA, "gpt_oss: sinks, windows in every second layer"])
def test_continuous_batching(name):
    model, prompts = applied(decoder(name)), [tokens(1, it)[0].tolist() for it in (5, 9, 3)]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
    results = model.generate_batch(
        prompts,
        generation_config=transformers.GenerationConfig(**options),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=16, block_size=16, max_batch_tokens=64
        ),
    )
    expected = [model.generate(torch.tensor([it]), **options)[0, len(it) :] for it in prompts]
    generated = {tuple(it.prompt_ids): it.generated_tokens for it in results.values()}
    assert [generated[tuple(it)] for it in prompts] == [it.tolist() for it in expected]


def test_layers_that_turn_only_with_a_window_decode_by_their_own_forward():
    config = transformers.Cohere2Config(
        **SIZES, num_key_value_heads=2, sliding_window=WINDOW, layer_types=["full_attention"] * 2
    )
    torch.manual_seed(0)
    model, inputs = transformers.Cohere2ForCausalLM(config).eval(), tokens(1, 10)
    exact, cache = run_exactly(model, inputs), DynamicCache(config=config)
    ours = applied(model)
    with torch.no_grad():
        parts = [
            ours(it, past_key_values=cache)[0] for it in inputs.split([4, 1, 1, 1, 1, 1, 1], 1)
        ]
    assert_as_near([torch.cat(parts, 1)], [run(model, None, inputs)], [exact], ROUNDINGS)


def test_weights_come_from_the_model_itself():
    model, inputs = decoder(LLAMA), tokens(1, 6)
    model.set_attn_implementation("eager")
    ours = applied(model)
    with torch.no_grad():
        expected = model(inputs, output_attentions=True).attentions
        results = ours(inputs, output_attentions=True).attentions
    torch.testing.assert_close(results, expected)


def test_layers_with_another_forward_are_left_alone():
    model = decoder(LLAMA)
    layer = model.model.layers[0].self_attn
    layer.forward = types.MethodType(type(layer).forward, layer)
    assert replaced(apply(model))["attention"] == 1
    reason = "its forward has been replaced by another one"
    assert left_alone(model) == {
        "": "tokens are not run as graphs: the forward of model.layers.0.self_attn has been "
        "replaced by another one",
        "model.layers.0.self_attn": reason,
    }


def test_functions_of_others_are_called():
    """A function registered later under our name, or another table, counts as the model's own."""
    model, inputs = applied(decoder(LLAMA)), tokens(1, 5)
    seen = []

    def other(module, query, key, value, mask, **options):
        seen.append(module)
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    AttentionInterface.register("other", other)
    try:
        model.set_attn_implementation("other")
        run(model, None, inputs)
    finally:
        del AttentionInterface._global_mapping["other"]
    assert len(seen) == 2
    assert all(isinstance(it, FooAttention) for it in seen)


def test_assisted_decoding():
    model, inputs = decoder(LLAMA), tokens(1, 9)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assistant = apply(decoder(LLAMA, num_hidden_layers=1))
    results = applied(model).generate(inputs, assistant_model=assistant, **options)
    assert torch.equal(results, model.generate(inputs, **options))


def test_exported():
    model, inputs = decoder(LLAMA), tokens(1, 9)
    program = torch.export.export(applied(model), (inputs,), {"use_cache": False})
    assert torch.ops.foo.attention.default in {it.target for it in program.graph.nodes}
    result = program.module()(inputs, use_cache=False).logits
    exact = run_exactly(model, inputs)
    assert_as_near([result.detach()], [run(model, None, inputs)], [exact], ROUNDINGS)
