"""Caches of transformers in 8 bits: stored values, reads, and how closely logits agree."""

import re
from types import SimpleNamespace

import pytest
import torch
import transformers
from support.exact import assert_near
from support.transformer_models import EXPERTS, SIZES, build, decoder, padding, tokens
from transformers import DynamicCache

import foo_ops
from foo_ops.integrations.transformers import apply, foo_attention_forward, in_place_cache
from foo_ops.integrations.transformers.cache import Int8Layer

pytestmark = pytest.mark.usefixtures("one_thread")

LLAMA = "llama"
LOGITS = 0.02
"""Relative difference of logits in norm. A key is rounded to 1/254 of its largest number."""


def filled(lengths, dtype=torch.float32):
    """Return a cache, its last result and its inputs, given in parts of these lengths."""
    cache, given = in_place_cache(DynamicCache(), bits=8), []
    generator = torch.Generator().manual_seed(0)
    for length in lengths:
        given.append(torch.randn(2, 2, 3, length, 16, generator=generator).to(dtype))
        held = cache.update(*given[-1], 0)
    return cache, held, torch.cat(given, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_reads_what_was_given(dtype):
    _, (key, value), given = filled([70, *[1] * 5], dtype)
    assert key.dtype == value.dtype == dtype
    exact = []
    for tensor, numbers in zip((key, value), given):
        integers, scale = foo_ops.quantize_cache(numbers)
        assert torch.equal(tensor.integers, integers)
        assert torch.equal(tensor.scales, scale)
        exact.append(integers * scale.double().unsqueeze(-1))
    query = torch.randn(2, 6, 1, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    keys, values = (it.repeat_interleave(2, 1) for it in exact)
    weights = (query.double() @ keys.mT / 4).softmax(-1)
    expected = (weights @ values).transpose(1, 2)
    layer = SimpleNamespace(is_causal=True)
    for mask in (None, torch.ones(2, 1, 1, 75, dtype=torch.bool)):
        output, _ = foo_attention_forward(layer, query, key, value, mask)
        # With a mask, keys and values are rounded to the dtype first.
        assert_near(output, expected, roundings=16)


def test_first_prompt_is_read_as_it_is():
    _, held, given = filled([7])
    assert all(map(torch.equal, held, given))


CHANGES = {
    "crop": (lambda cache: cache.crop(-2), lambda it: it[..., :-2, :]),
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), lambda it: it[[1, 1]]),
    "repeat": (
        lambda cache: cache.batch_repeat_interleave(2), lambda it: it.repeat_interleave(2, 0)
    ),
    "select": (
        lambda cache: cache.batch_select_indices(torch.tensor([1])), lambda it: it[[1]]
    ),
    "reset": (lambda cache: cache.reset(), lambda it: it[..., :0, :]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_changes(name):
    cache, _, given = filled([5, 1])
    change, expected = CHANGES[name]
    change(cache)
    before = [expected(it) for it in given]
    assert cache.get_seq_length() == before[0].shape[2]
    for _ in range(2):
        more = torch.randn(2, len(before[0]), 3, 1, 16)
        held = cache.update(*more, 0)
        before = [torch.cat(pair, 2) for pair in zip(before, more)]
    for tensor, numbers in zip(held, before):
        integers, scale = foo_ops.quantize_cache(numbers)
        assert torch.equal(tensor.integers, integers)
        assert torch.equal(tensor.scales, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_agree(dtype):
    prompt = tokens(3, 40)
    attention_mask = padding("left", 40).long()
    for options in ({}, {"attention_mask": attention_mask}):
        logits, kinds = [], []
        for cache_argument in (True, 8):
            model = apply(decoder(LLAMA, dtype=dtype), cache=cache_argument)
            cache = DynamicCache(config=model.config)
            more = dict(options)
            with torch.no_grad():
                found = [model(prompt, past_key_values=cache, **more).logits[:, -1]]
                for step in range(6):
                    if more:
                        ones = torch.ones(3, step + 1, dtype=torch.long)
                        more = {"attention_mask": torch.cat([attention_mask, ones], 1)}
                    token = prompt[:, step : step + 1]
                    found.append(model(token, past_key_values=cache, **more).logits[:, -1])
            logits.append(torch.stack(found).double())
            kinds.append(type(cache.layers[0]).__name__)
        assert kinds == ["GrowingLayer", "Int8Layer"]
        assert torch.equal(*(it[0] for it in logits))
        assert (logits[0] - logits[1]).norm() / logits[0].norm() < LOGITS


HEADS = {"num_key_value_heads": 6}
LATENTS = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
LATENTS |= {"v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, **EXPERTS}
# Models with their own attention, or that use the cached tensors for more than attention.
OTHERS = {
    "Falcon": SIZES,
    "GPTJ": {**SIZES, "rotary_dim": 4},
    "Bloom": SIZES,
    "Mpt": {**SIZES, "d_model": 48, "n_heads": 6, "n_layers": 2},
    "GPTNeo": {**SIZES, "num_heads": 6, "num_layers": 2, "attention_types": [[["global"], 2]]},
    "CodeGen": {**SIZES, "num_attention_heads": 4, "rotary_dim": 4},
    "XGLM": {**SIZES, "ffn_dim": 64, "attention_heads": 6, "num_layers": 2},
    "DeepseekV2": {**SIZES, **HEADS, **LATENTS},
    "DeepseekV3": {**SIZES, **HEADS, **LATENTS},
    "Doge": {**SIZES, **HEADS},
    "DiffLlama": {**SIZES, **HEADS},
}


def decoded(model):
    """Return the logits of a prompt and of two tokens after it."""
    inputs, cache, found = tokens(2, 12).to(model.device), DynamicCache(), []
    with torch.no_grad():
        for part in (inputs[:, :10], inputs[:, 10:11], inputs[:, 11:]):
            found.append(model(part, past_key_values=cache).logits.cpu())
    assert type(cache.layers[-1]) is Int8Layer
    return torch.cat(found, 1)


def assert_logits_agree(model, **options):
    with torch.no_grad():
        expected = model(tokens(2, 12).to(model.device)).logits.cpu()
    found = decoded(apply(model, cache=8, **options))
    assert (found - expected).norm() / expected.norm() < LOGITS


@pytest.mark.parametrize("name", OTHERS)
def test_attention_that_reads_no_integers(name):
    config = getattr(transformers, f"{name}Config")(**OTHERS[name])
    assert_logits_agree(build(transformers.AutoModelForCausalLM, lambda: config))


def test_without_our_attention(device):
    for attention in (True, False):
        assert_logits_agree(decoder(LLAMA, device), attention=attention)


def test_cache_that_is_there_is_rounded():
    cache = DynamicCache()
    key, value = torch.randn(2, 1, 2, 9, 16).unbind()
    cache.update(key, value, 0)
    in_place_cache(cache, bits=8)
    assert type(cache.layers[0]) is Int8Layer
    assert torch.equal(cache.layers[0].keys, foo_ops.quantize_cache(key)[0])
    # A later apply without the argument leaves the 8 bits.
    model = apply(apply(decoder(LLAMA), cache=8))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(1, 3), past_key_values=cache)
    assert type(cache.layers[0]) is Int8Layer


def test_refusals():
    model = decoder(LLAMA)
    for error, message, function in (
        (ValueError, "apply: cache must be True, False or 8, got 4",
         lambda: apply(model, cache=4)),
        (ValueError, "in_place_cache: bits must be 8 or None, got 4",
         lambda: in_place_cache(DynamicCache(), bits=4)),
        (NotImplementedError,
         "cache of 8 bits: key and value must not require gradients, since integers have none; "
         "call the model under torch.no_grad()",
         lambda: in_place_cache(DynamicCache(), bits=8).update(
             *torch.ones(2, 1, 1, 1, 1, requires_grad=True), 0)),
    ):  # fmt: skip
        with pytest.raises(error, match=rf"\A{re.escape(message)}\Z"):
            function()
