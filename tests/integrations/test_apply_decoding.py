"""Attention layers of decoding models, token by token, with little between the operators."""

import copy
import inspect
import pickle
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.exact import assert_near, exact_copy
from support.transformer_models import GROUPED, WINDOW, decoder, run_exactly, tokens
from torch import nn
from transformers import AttentionInterface, DynamicCache, LlamaConfig, MistralConfig, StaticCache
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention

from foo_ops.integrations.transformers import apply, decoding, in_place_cache, restore
from foo_ops.integrations.transformers.attention_layers import FooRotaryAttention
from foo_ops.integrations.transformers.cache import Integers
from foo_ops.integrations.transformers.decoding import PROJECTIONS
from foo_ops.integrations.transformers.quantized import JOINED, multiplied_together

pytestmark = pytest.mark.usefixtures("one_thread")

LLAMA = "llama"
NAMES = [LLAMA, "mistral: windows", "Qwen2", "Qwen3"]
PROMPT, LENGTH = 5, 12


@pytest.fixture
def steps(monkeypatch):
    """Record the layers that computed a token by `decoding.step`."""
    layers, own = [], decoding.step

    def step(module, *arguments):
        # Recognition calls `step` as well.
        if isinstance(module, decoding.FooDecodingAttention):
            layers.append(module)
        return own(module, *arguments)

    monkeypatch.setattr(decoding, "step", step)
    return layers


def decode(model, inputs, cache, **options):
    """Return the logits of all tokens after the prompt, computed one by one."""
    with torch.no_grad():
        model(inputs[:, :PROMPT], past_key_values=cache, **options)
        parts = [
            model(it, past_key_values=cache, **options).logits
            for it in inputs[:, PROMPT:].split(1, 1)
        ]
    return torch.cat(parts, 1).cpu()


def wide(name=LLAMA):
    """Build a model whose layers are wide enough for groups of 4-bit weights."""
    return decoder(name, hidden_size=64, num_attention_heads=8)


@pytest.mark.parametrize("name", NAMES)
def test_decoding_is_that_of_the_model(name, steps, device):
    model, inputs = decoder(name, device), tokens(2, LENGTH)
    assert LENGTH > WINDOW > PROMPT
    exact = run_exactly(model, inputs)[:, PROMPT:]
    ours = decode(apply(model, decode=False), inputs.to(device), DynamicCache(config=model.config))
    assert len(steps) == 2 * (LENGTH - PROMPT)
    assert_near(ours, exact, roundings=128)


@pytest.mark.parametrize("name", ["Cohere", "gpt_oss: sinks, windows in every second layer", "Glm"])
def test_layers_of_another_kind_decode_by_their_own_forward(name, steps):
    model, inputs = decoder(name), tokens(2, LENGTH)
    exact = run_exactly(model, inputs)[:, PROMPT:]
    ours = decode(apply(model, decode=False), inputs, DynamicCache(config=model.config))
    assert_near(ours, exact, roundings=128)


TWISTS = {
    "an input": ("self.v_proj(hidden_states)", "self.v_proj(2 * hidden_states)"),
    "the output": ("self.o_proj(attn_output)", "self.o_proj(2 * attn_output)"),
    "a bound": ("self.k_proj(hidden_states)", "self.k_proj(hidden_states).clamp(-0.1, 0.1)"),
    "the scale": ("scaling=self.scaling", "scaling=2 * self.scaling"),
    "dropout": ("dropout=0.0", "dropout=0.5"),
    "an option": ("scaling=self.scaling", "scaling=self.scaling, softcap=2.0"),
    "a window": ("scaling=self.scaling", "scaling=self.scaling, sliding_window=4"),
    "the configuration": ("self.head_dim)", "self.head_dim if self.config.hidden_size else 1)"),
    "the mask": ("        attention_mask,\n", "        None,\n"),
    "the cache's layer": ("value_states, self.layer_idx", "value_states, self.layer_idx + 1"),
    "what the cache gives": ("key_states, value_states = past", "key_states, _ = past"),
}


def twisted(own, other):
    """Return an attention class that differs from Llama's in one place of the source."""
    source = textwrap.dedent(inspect.getsource(LlamaAttention.forward))
    assert own in source
    names = dict(vars(sys.modules[LlamaAttention.__module__]))
    exec(source.replace(own, other), names)
    return type("Twisted", (LlamaAttention,), {"forward": names["forward"]})


def test_attention_layers_are_known_by_what_they_do():
    same = twisted("hidden_states", "hidden_states")(LlamaConfig(**GROUPED), 0)
    assert isinstance(apply(same), decoding.FooDecodingAttention)


@pytest.mark.parametrize("twist", TWISTS)
def test_other_attention_layers_stay(twist):
    other = apply(twisted(*TWISTS[twist])(LlamaConfig(**GROUPED), 0))
    assert isinstance(other, FooRotaryAttention)
    assert not isinstance(other, decoding.FooDecodingAttention)


def step_and_layer(length, **options):
    """Return an attention layer and its call after some tokens, without a mask."""
    config = MistralConfig(**GROUPED, **options)
    torch.manual_seed(0)
    layer, cache = MistralAttention(config, 0).eval(), DynamicCache()
    cache.update(torch.randn(1, 2, length, 8), torch.randn(1, 2, length, 8), 0)
    config._attn_implementation = "foo"
    angles = torch.randn(1, 1, 4).repeat(1, 1, 2)
    call = {"hidden_states": torch.randn(1, 1, 48), "past_key_values": cache}
    return layer, {**call, "position_embeddings": (angles.cos(), angles.sin())}


def test_windows_without_a_mask(steps):
    layer, call = step_and_layer(2 * WINDOW, sliding_window=WINDOW)
    twin, cache = copy.deepcopy(layer), copy.deepcopy(call["past_key_values"])
    with torch.no_grad():
        expected = twin(**call, attention_mask=None)[0]
        result = apply(layer)(**{**call, "past_key_values": cache}, attention_mask=None)[0]
    assert len(steps) == 1
    torch.testing.assert_close(result, expected)


def test_tables_with_gradients(steps):
    layer, call = step_and_layer(3, sliding_window=None)
    tables = tuple(it.requires_grad_() for it in call["position_embeddings"])
    call["position_embeddings"] = tables
    layer = apply(layer)
    with torch.no_grad():
        layer(**call, attention_mask=None)
    layer(**call, attention_mask=None)[0].sum().backward()
    assert len(steps) == 2
    assert all(it.grad.abs().max() > 0 for it in tables)


CASES = {
    "another implementation": lambda model, call: model.set_attn_implementation("eager"),
    "training": lambda model, call: model.train(),
    "keywords": lambda model, call: call.update(is_causal=True),
    "no cache": lambda model, call: call.update(past_key_values=None),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_known_is_computed_by_the_own_forward(case, steps):
    model, inputs = decoder(LLAMA), tokens(1, PROMPT + 1)
    ours = apply(copy.deepcopy(model), loss=False, fused_loss=False)
    results = []
    for it in (model, ours):
        cache = DynamicCache(config=model.config)
        call = {"past_key_values": cache, "use_cache": True}
        with torch.no_grad():
            it(inputs[:, :PROMPT], past_key_values=cache)
            CASES[case](it, call)
            if call["past_key_values"] is None:
                call["use_cache"] = False
            results.append(it(inputs[:, -1:], **call).logits)
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    assert steps == []


@pytest.mark.parametrize("name", ["foo", "sdpa"])
def test_another_function_of_this_name(name, steps, monkeypatch):
    model, inputs = apply(decoder(LLAMA), decode=False), tokens(1, LENGTH)
    model.set_attn_implementation(name)
    own = AttentionInterface()[name]

    def double(*given, **options):
        return 2 * own(*given, **options)[0], None

    expected = decode(model, inputs, DynamicCache())
    steps.clear()
    monkeypatch.setitem(AttentionInterface._global_mapping, name, double)
    assert not torch.allclose(decode(model, inputs, DynamicCache()), expected, atol=1e-2)
    assert steps == []


@pytest.mark.parametrize("kind", ["static", "8 bits", "padding"])
def test_caches_and_masks_of_other_kinds(kind, steps, monkeypatch):
    model, inputs = decoder(LLAMA), tokens(2, LENGTH)
    own, ours = DynamicCache(config=model.config), DynamicCache(config=model.config)
    options, bits = {}, None
    if kind == "static":
        ours = StaticCache(config=model.config, max_cache_len=LENGTH + 3)
    if kind == "8 bits":
        bits = 8
        # Another operator would need floats, made from the integers.
        monkeypatch.setattr(Integers, "numbers", None)
    if kind == "padding":
        options["attention_mask"] = torch.ones(2, LENGTH).long().index_fill_(1, torch.tensor(0), 0)

    def outputs(model, cache):
        results = []
        with torch.no_grad():
            for start, end in [(0, PROMPT), *((it, it + 1) for it in range(PROMPT, LENGTH))]:
                given = {name: it[:, :end] for name, it in options.items()}
                call = model(inputs[:, start:end], past_key_values=cache, **given)
                results.append(call.logits[:, -1])
        return torch.stack(results)

    expected = outputs(model, own)
    results = outputs(apply(model, decode=False), in_place_cache(ours, bits=bits))
    assert len(steps) == 2 * (LENGTH - PROMPT)
    tolerance = 0.2 if kind == "8 bits" else 1e-4
    torch.testing.assert_close(results, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("quantize", [None, 4])
def test_hooks_of_projections_run(quantize):
    model, inputs = apply(wide(), quantize=quantize), tokens(1, LENGTH)
    expected = decode(copy.deepcopy(model), inputs, DynamicCache())
    seen = []
    for name in ("self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj"):
        layer = model.model.layers[1].get_submodule(name)
        layer.register_forward_hook(lambda _, given, output: seen.append(output) or 2 * output)
    assert not torch.allclose(decode(model, inputs, DynamicCache()), expected, atol=1e-2)
    assert len(seen) == 3 * (1 + LENGTH - PROMPT)


@pytest.mark.parametrize("quantize", [None, 4])
def test_hooks_of_all_modules_run(quantize):
    model, inputs = apply(wide(), quantize=quantize), tokens(1, PROMPT + 1)
    cache, seen = DynamicCache(), []
    with torch.no_grad():
        model(inputs[:, :PROMPT], past_key_values=cache)
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, *_: seen.append(module)
        )
        try:
            model(inputs[:, -1:], past_key_values=cache)
        finally:
            handle.remove()
    layers = [it for it in model.modules() if isinstance(it, nn.Linear)]
    assert len(layers) == 15
    assert all(any(it is layer for it in seen) for layer in layers)


def test_gradients_go_through_a_step(steps):
    model, inputs = decoder(LLAMA), tokens(2, PROMPT + 1)
    gradients = []
    for it in (exact_copy(model), apply(copy.deepcopy(model))):
        cache = DynamicCache()
        with torch.no_grad():
            it(inputs[:, :PROMPT], past_key_values=cache)
        it(inputs[:, -1:], past_key_values=cache).logits.square().sum().backward()
        gradients.append([parameter.grad for parameter in it.parameters()])
    assert len(steps) == 2
    for exact, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-3, atol=1e-3)


# ------------------------------------------------------------------------------ joined weights


def joints(model):
    return [it for module in model.modules() if (it := vars(module).get(JOINED)) is not None]


def separate(model):
    """Return the model with its quantised layers separate."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        vars(module).pop(JOINED, None)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.clone()
    return twin


WAYS = {
    "as it is": lambda it: it,
    "copied": copy.deepcopy,
    "pickled": lambda it: pickle.loads(pickle.dumps(it)),
    "converted": lambda it: it.to(torch.bfloat16),
    "there and back": lambda it: it.to("foo").to("cpu"),
    "quantised twice": lambda it: apply(it, quantize=4),
    "with other bits": lambda it: apply(it, quantize=8),
    "applied again": apply,
}


@pytest.mark.parametrize("name", [LLAMA, "Qwen2"])
@pytest.mark.parametrize("way", WAYS)
def test_joined_layers_give_what_each_gives(name, way):
    """Also with biases, which Qwen 2 has."""
    model, inputs = WAYS[way](apply(wide(name), quantize=4)), tokens(1, LENGTH)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_()
    assert len(joints(model)) == 4
    for joint in joints(model):
        parts = [part for layer in joint.parts for part in layer if part is not None]
        memory = {part.untyped_storage().data_ptr() for part in parts}
        assert {id(it) for it in parts} <= {id(it) for it in model.buffers()}
        assert memory == {it.untyped_storage().data_ptr() for it in joint.tensors if it is not None}
    expected = decode(separate(model), inputs, DynamicCache())
    assert torch.equal(decode(model, inputs, DynamicCache()), expected)


def test_shared_memory_stays_shared():
    model = apply(wide(), quantize=4).train().share_memory()
    assert len(joints(model)) == 4
    assert all(joint.tensors[0].is_shared() for joint in joints(model))
    assert all(it.is_shared() for it in model.buffers())


def test_layers_are_joined_no_longer_when_one_changes():
    model, inputs = apply(wide(), quantize=4), tokens(1, LENGTH)
    before = decode(model, inputs, DynamicCache())
    layer = model.model.layers[0].self_attn.v_proj
    layer.foo_scale = 2 * layer.foo_scale
    expected = decode(separate(model), inputs, DynamicCache())
    results = decode(model, inputs, DynamicCache())
    assert torch.equal(results, expected)
    assert not torch.allclose(results, before, atol=1e-2)


def test_parametrized_weights_and_biases_are_used():
    class Doubled(nn.Module):
        def forward(self, input):
            return 2 * input

    for quantize, name in ((None, "weight"), (4, "bias")):
        model, inputs = wide("Qwen2"), tokens(1, LENGTH)
        twin = copy.deepcopy(model)
        layer = model.model.layers[0].self_attn.v_proj
        with torch.no_grad():
            for it in (layer, twin.model.layers[0].self_attn.v_proj):
                it.bias.normal_(generator=torch.Generator().manual_seed(0))
            twin.model.layers[0].self_attn.v_proj.get_parameter(name).mul_(2)
        apply(model, quantize=quantize)
        nn.utils.parametrize.register_parametrization(layer, name, Doubled(), unsafe=True)
        expected = decode(apply(twin, quantize=quantize), inputs, DynamicCache())
        results = decode(model, inputs, DynamicCache())
        torch.testing.assert_close(results, expected)


@pytest.mark.parametrize("keep_weights", [True, False])
def test_joined_layers_in_a_forward(keep_weights):
    """They return parts of one product for its input, and compute others themselves."""
    model = apply(wide(), quantize=4, keep_weights=keep_weights)
    attention = model.model.layers[0].self_attn
    layers = [attention.get_submodule(name) for name in PROJECTIONS]
    one, other = torch.randn(2, 5, 64)
    with torch.no_grad():
        of_one, of_other = ([layer(it) for layer in layers] for it in (one, other))

    def is_right(input, expected):
        return all(torch.equal(layer(input), it) for layer, it in zip(layers, expected))

    def take_other():
        with torch.no_grad(), multiplied_together(attention, PROJECTIONS, other):
            assert is_right(other, of_other)
            assert is_right(one, of_one)

    def parts():
        outputs = [layer(one) for layer in layers]
        return len({it.untyped_storage().data_ptr() for it in outputs})

    with torch.no_grad(), multiplied_together(attention, PROJECTIONS, one):
        assert parts() == 1
        assert is_right(one, of_one)
        assert is_right(other, of_other)
        assert is_right(one.clone(), of_one)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(take_other).result()
        assert is_right(one, of_one)
    with torch.no_grad():
        assert parts() == 3
        with pytest.raises(KeyError), multiplied_together(attention, PROJECTIONS, one):
            raise KeyError
        assert parts() == 3


@pytest.mark.parametrize("bits", [8, 4])
def test_joined_layers_of_prompts(bits):
    """Prompts, and further tokens of prompts, give the same as layers apart."""
    model, inputs = apply(wide("Qwen2"), quantize=bits), tokens(2, 9)
    apart = separate(model)
    assert (len(joints(model)), len(joints(apart))) == (4, 0)
    with torch.no_grad():
        for use_cache in (True, False):
            found, expected = (it(inputs, use_cache=use_cache).logits for it in (model, apart))
            assert torch.equal(found, expected)
        found, expected = (
            it(inputs[:, 4:], past_key_values=it(inputs[:, :4]).past_key_values).logits
            for it in (model, apart)
        )
    assert torch.equal(found, expected)


def test_layers_of_different_kinds_are_not_joined():
    model, inputs = wide(), tokens(1, LENGTH)
    apply(model.model.layers[0].self_attn.k_proj, quantize=8)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            apply(layer.self_attn.get_submodule(name), quantize=4)
    apply(model)
    assert joints(model) == []
    decode(model, inputs, DynamicCache())


def test_a_stored_model_has_each_weight_once():
    model = apply(wide(), quantize=4)
    sizes = [len(pickle.dumps(it)) for it in (model, separate(model))]
    assert sizes[0] < 1.02 * sizes[1]


def test_the_way_back_from_joined_layers():
    model = restore(apply(wide(), quantize=4))
    assert joints(model) == []
    assert not any(JOINED in vars(it) for it in model.modules())
