"""Models of Hugging Face transformers run with ``attn_implementation="foo_flex"``.

Their errors against the same model in float64 are hardly larger than with transformers' own "sdpa",
or with "eager" for softcaps and sinks, which "sdpa" lacks.
"""

import pytest
import torch
import transformers
from support.exact import RATIO, Doubles, assert_as_near, assert_near, exact_copy
from support.transformer_models import (
    DECODERS,
    ENCODERS,
    VOCABULARY,
    decoder,
    encoder,
    padding,
    run,
    run_exactly,
    tokens,
)
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache
from transformers import masking_utils as masks

import foo_ops.integrations.transformers as integration

pytestmark = pytest.mark.usefixtures("one_thread")

ROUNDINGS = 128
"""Roundings of float32, for results of a few layers; a wrong mask makes thousands."""
BFLOAT16_ROUNDINGS = 16
LARGEST_MASK = 64
"""Elements that masks capture: padding and positions, but never Sq x Sk."""


def peer(name):
    return "eager" if "softcap" in name or "sinks" in name else "sdpa"


def check(model, name, *inputs, shown=..., **options):
    """Compare the outputs selected by ``shown``; the others belong to padding."""
    both = ("foo_flex", peer(name))
    ours, theirs = ([run(model, each, *inputs, **options)[shown]] for each in both)
    assert_as_near(ours, theirs, [run_exactly(model, *inputs, **options)[shown]], ROUNDINGS)


@pytest.fixture
def flex_calls(monkeypatch):
    """Record (queries, keys, size of the largest captured tensor) of calls of the operator."""
    operator = torch.ops.foo.flex_attention.default
    seen = []

    def spy(query, key, value, captured, *mask, **options):
        largest = max((it.numel() for it in captured), default=0)
        seen.append((query.shape[2], key.shape[2], largest))
        return operator(query, key, value, captured, *mask, **options)

    monkeypatch.setattr(torch.ops.foo.flex_attention, "default", spy)
    return seen


# ------------------------------------------------------------------------------------------ models


@pytest.mark.parametrize("name", [*DECODERS, "Gemma3Text"])
def test_prefill(name, device, flex_calls):
    model = decoder(name, device)
    check(model, name, tokens(2, 20))
    assert len(flex_calls) == model.config.num_hidden_layers


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_padded_batch(name, side, flex_calls):
    mask = padding(side, 20)
    check(decoder(name), name, tokens(3, 20), attention_mask=mask.long(), shown=mask)
    assert 0 < max(largest for _, _, largest in flex_calls) <= LARGEST_MASK


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoder(name, side, device, flex_calls):
    model = encoder(name, device)
    mask = torch.ones(3, 20, dtype=torch.bool) if side is None else padding(side, 20)
    check(model, name, tokens(3, 20), attention_mask=mask.long(), shown=mask)
    assert len(flex_calls) == model.config.num_hidden_layers


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("name", DECODERS)
def test_cached_decoding(name, kind, flex_calls):
    """A prompt is read, more of it at once, then token by token, beyond window and chunk."""
    model, inputs = decoder(name), tokens(2, 18)
    options = {"max_cache_len": 24} if kind is StaticCache else {}
    cache = kind(config=model.config, **options)
    parts = [
        run(model, "foo_flex", part, past_key_values=cache, use_cache=True)
        for part in inputs.split([4, 9, 1, 1, 1, 1, 1], dim=1)
    ]
    assert len(flex_calls) == 7 * model.config.num_hidden_layers
    theirs, exact = run(model, peer(name), inputs), run_exactly(model, inputs)
    assert_as_near([torch.cat(parts, 1)], [theirs], [exact], ROUNDINGS)


@pytest.mark.parametrize("name", ["llama", "mistral: windows"])
def test_compiled_with_the_usual_cache(name):
    torch._dynamo.reset()
    model, inputs = decoder(name), tokens(2, 12)
    model.set_attn_implementation("foo_flex")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        actual, expected = (it(inputs, use_cache=True) for it in (compiled, model))
    torch.testing.assert_close(actual.logits, expected.logits)
    for ours, eager in zip(actual.past_key_values, expected.past_key_values, strict=True):
        torch.testing.assert_close(ours[:2], eager[:2])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", [*DECODERS, "Gemma3Text"])
def test_generate(name, cache):
    """Greedy tokens match float64, whose best token leads by much more than rounding errors."""
    options = {"inputs": tokens(3, 10), "attention_mask": padding("left", 10).long()}
    options |= {"cache_implementation": cache, "disable_compile": True, "max_new_tokens": 6}
    options |= {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    model = decoder(name)
    twin = exact_copy(model)
    with Doubles():
        twin.set_attn_implementation("eager")
        exact = twin.generate(**options)
    best, second = torch.stack(exact.logits).topk(2).values.unbind(-1)
    assert (best - second).min() > 1e-4 * best.abs().max()
    model.set_attn_implementation("foo_flex")
    assert torch.equal(model.generate(**options).sequences, exact.sequences)


def gradients(model, implementation, inputs, **options):
    """Return the gradients of all parameters that have one, by name."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    model(inputs, **options).loss.backward()
    return {key: it.grad for key, it in model.named_parameters() if it.grad is not None}


@pytest.mark.parametrize("name", DECODERS)
def test_training_gradients(name):
    model, inputs, mask = decoder(name), tokens(3, 20), padding("right", 20)
    options = {"attention_mask": mask.long(), "labels": inputs.masked_fill(~mask, -100)}
    ours, theirs = (gradients(model, it, inputs, **options) for it in ("foo_flex", peer(name)))
    twin = exact_copy(model)
    with Doubles():
        exact = gradients(twin, "eager", inputs, **options)
    assert ours.keys() == theirs.keys() == exact.keys()
    assert any("sinks" in key for key in ours) == ("sinks" in name)
    assert_as_near(ours.values(), theirs.values(), exact.values(), ROUNDINGS)


def test_checkpoints_change_no_gradient():
    """The backward pass recomputes activations, with the same mask function."""
    model, inputs = decoder("mistral: windows").train(), tokens(2, 20)
    expected = gradients(model, "foo_flex", inputs, labels=inputs, use_cache=False)
    model.activation_checkpointing_enable()
    kept = gradients(model, "foo_flex", inputs, labels=inputs, use_cache=False)
    torch.testing.assert_close(kept, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["mistral: windows", *list(DECODERS)[2:4]])
def test_bfloat16(name):
    """Compares the median token: a rounding may send one to another expert."""
    model, inputs = decoder(name, dtype=torch.bfloat16), tokens(2, 20)
    exact = run_exactly(model, inputs)
    differences = [run(model, it, inputs).double() - exact for it in ("foo_flex", peer(name))]
    ours, theirs = (it.norm(dim=-1).median() for it in differences)
    assert (
        ours <= BFLOAT16_ROUNDINGS * torch.finfo(torch.bfloat16).eps * exact.norm(dim=-1).median()
    )
    assert ours <= RATIO * theirs


def test_encoder_and_decoder_with_position_bias(flex_calls):
    """T5 has a learned bias, cross attention, and a decoder with two caches."""
    sizes = {"d_model": 48, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 6}
    config = transformers.T5Config(
        vocab_size=VOCABULARY, **sizes, decoder_start_token_id=0, initializer_factor=2.0
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    source, target = tokens(3, 14), tokens(3, 11)
    options = {"attention_mask": padding("right", 14).long(), "decoder_input_ids": target}
    check(model, "T5", source, **options)
    assert len(flex_calls) == 2 + 2 * 2


def test_packed_sequences():
    """Positions that restart tell transformers that a row holds several sequences."""
    model, inputs = decoder("llama"), tokens(1, 17)
    lengths = [5, 9, 3]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = run(model, "foo_flex", inputs, position_ids=positions, use_cache=False)
    parts = inputs.split(lengths, dim=1)
    theirs = torch.cat([run(model, "sdpa", part) for part in parts], 1)
    exact = torch.cat([run_exactly(model, part) for part in parts], 1)
    assert_as_near([packed], [theirs], [exact], ROUNDINGS)


@pytest.mark.parametrize("kind", ["bool", "float", "BlockMask"])
def test_mask_of_the_users_own(kind):
    """A mask of four dimensions is used as it is, and need not be causal."""
    model, inputs = decoder("llama"), tokens(2, 9)
    mask = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(0)) < 0.6
    mask |= torch.eye(9, dtype=torch.bool)
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    blocks = create_block_mask(lambda b, h, q, k: mask[b, 0, q, k], 2, None, 9, 9, device="cpu")
    given = {"bool": mask, "float": added, "BlockMask": blocks}[kind]
    ours = run(model, "foo_flex", inputs, attention_mask=given)
    theirs = run(model, "sdpa", inputs, attention_mask=added)
    exact = run_exactly(model, inputs, attention_mask=added.double())
    assert_as_near([ours], [theirs], [exact], ROUNDINGS)


# ---------------------------------------------------------------------------- mask and attention


class Layer(torch.nn.Module):
    is_causal = True


def call(module=None, *, queries=4, keys=4, mask=None, dtype=torch.float32, **options):
    """Call with two heads, and return the output as (batch, queries, heads, head_dim)."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, queries, 8, generator=generator).to(dtype)
    key, value = torch.randn(2, 2, 2, keys, 8, generator=generator).to(dtype).unbind()
    layer = Layer() if module is None else module
    return integration.foo_flex_forward(layer, query, key, value, mask, **options)[0]


def test_mask_is_a_function():
    mask = integration.foo_flex_mask(2, 4096, 8192, q_offset=4096)
    assert mask.shape == (1, 1, 4096, 8192)
    assert mask.contiguous() is mask
    assert sum(it.numel() for it in mask.as_tuple() if isinstance(it, torch.Tensor)) == 2


@pytest.mark.parametrize(("past", "queries", "free"), [(0, 8, 0), (5, 3, 2), (7, 1, 4)])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_mask_sees_what_sdpas_does(past, queries, free, padded, static):
    keys = past + queries + free
    shown = torch.ones(2, past + queries, dtype=torch.bool)
    shown[1, :2] = not padded
    arguments = {
        "batch_size": 2,
        "q_length": queries,
        "kv_length": keys,
        "q_offset": torch.tensor(past) if static else past,
        "mask_function": masks.sliding_window_causal_mask_function(6),
        "attention_mask": shown,
    }
    expected = masks.sdpa_mask(**arguments, allow_is_causal_skip=False)
    sizes = {"queries": queries, "keys": keys}
    ours = call(**sizes, mask=integration.foo_flex_mask(**arguments))
    torch.testing.assert_close(ours, call(**sizes, mask=expected))


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("is_causal", [None, False, True])
def test_causality_and_window_count_without_a_mask(is_causal, window):
    everything = torch.ones(3, 5, dtype=torch.bool)
    seen = everything if is_causal is False else everything.tril(2)
    if window and is_causal is not False:
        seen = seen & everything.triu(3 - window)
    options = {"queries": 3, "keys": 5, "is_causal": is_causal, "sliding_window": window}
    torch.testing.assert_close(call(**options), call(queries=3, keys=5, mask=seen))


def test_softcap_bias_and_sinks():
    """All at once, against the formula in float64."""
    generator = torch.Generator().manual_seed(3)
    bias = torch.randn(1, 2, 4, 4, generator=generator)
    sinks = torch.randn(2, generator=generator)
    options = {"softcap": 1.5, "position_bias": bias, "s_aux": sinks, "scaling": 0.7}
    generator.manual_seed(0)
    query = torch.randn(1, 2, 4, 8, generator=generator).double()
    key, value = torch.randn(2, 2, 2, 4, 8, generator=generator).double().unbind()
    scores = 1.5 * torch.tanh(0.7 * query @ key.mT / 1.5) + bias.double()
    scores = scores.masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), -torch.inf)
    logits = torch.cat((scores, sinks.double().view(1, 2, 1, 1).expand(2, 2, 4, 1)), -1)
    expected = (logits.softmax(-1)[..., :-1] @ value).transpose(1, 2)
    assert_near(call(**options), expected)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            {"dropout": 0.1},
            "dropout must be 0, since a score_mod cannot draw random numbers, got 0.1",
        ),
        (
            {"output_attentions": True},
            "output_attentions must be False, since the attention weights are never in memory as "
            "a whole, got True",
        ),
        (
            {"cache": {}},
            "cache must be None, since the pages of continuous batching are not supported, "
            "got dict",
        ),
    ],
)
def test_unsupported_options_are_refused(option, message):
    with pytest.raises(NotImplementedError) as caught:
        call(**option)
    assert str(caught.value) == f"attention of implementation 'foo_flex': {message}"


def test_both_interfaces_know_foo_flex():
    assert AttentionInterface()["foo_flex"] is integration.foo_flex_forward
    assert AttentionMaskInterface()["foo_flex"] is integration.foo_flex_mask
