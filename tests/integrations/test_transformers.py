"""foo_ops gives Hugging Face transformers an attention function and masks that fit together."""

import math

import hypothesis
import pytest
import torch
import transformers
from hypothesis import strategies
from support.processes import python
from support.transformer_models import decoder, run, tokens
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache
from transformers import masking_utils as masks

import foo_ops.integrations.transformers as integration

pytestmark = pytest.mark.usefixtures("one_thread")

# ------------------------------------------------------------------- masks: which keys are seen


class Layer(torch.nn.Module):
    is_causal = True


def seen_keys(mask, queries, keys, *, batch=1, **options):
    """Return (batch, queries, keys): the keys that the attention function shows each query.

    All scores are equal and the values are the unit vectors, so a weight is nonzero where a key is
    seen.
    """
    query, key = torch.zeros(batch, 1, queries, 1), torch.zeros(batch, 1, keys, 1)
    value = torch.eye(keys).expand(batch, 1, keys, keys)
    output, weights = integration.foo_attention_forward(Layer(), query, key, value, mask, **options)
    assert weights is None
    assert output.shape == (batch, queries, 1, keys)
    return output[:, :, 0] > 0


@strategies.composite
def situations(draw):
    """Draw positions of queries and keys as in caches, padding, and a window or chunks."""
    past = draw(strategies.integers(0, 12))
    queries = draw(strategies.integers(1, 8))
    dropped = draw(strategies.integers(0, past))
    free = draw(strategies.integers(0, 3))
    local_size = draw(strategies.none() | strategies.integers(1, 12))
    hidden = draw(strategies.none() | strategies.sets(strategies.integers(0, past + queries - 1)))
    return past, queries, dropped, past + queries - dropped + free, local_size, hidden


@hypothesis.given(situations(), strategies.booleans(), strategies.booleans())
@hypothesis.settings(deadline=None, max_examples=200, derandomize=True)
def test_every_causal_mask_shows_the_right_keys(situation, chunked, static):
    """The mask, None, or bounds give the pattern together with the attention function."""
    past, queries, dropped, keys, local_size, hidden = situation
    padding_mask = None
    if hidden is not None:
        padding_mask = torch.ones(2, past + queries, dtype=torch.bool)
        padding_mask[0, list(hidden)] = False
    pattern, config = masks.causal_mask_function, transformers.PretrainedConfig()
    if local_size is not None and chunked:
        no_padding = torch.zeros(2, dtype=torch.long)
        pattern = masks.chunked_causal_mask_function(local_size, no_padding)
        # A model may have both, so that an equal length does not decide.
        config.attention_chunk_size = config.sliding_window = local_size
    elif local_size is not None:
        pattern = masks.sliding_window_causal_mask_function(local_size)
        config.sliding_window = local_size
    arguments = {
        "batch_size": 2,
        "q_length": queries,
        "kv_length": keys,
        "q_offset": torch.tensor(past) if static else past,
        "kv_offset": dropped,
        "mask_function": pattern,
        "attention_mask": padding_mask,
        "local_size": local_size,
    }
    mask = integration.foo_mask(**arguments, config=config)
    options = {} if chunked else {"sliding_window": local_size}
    actual = seen_keys(mask, queries, keys, batch=2, **options)
    expected = masks.sdpa_mask(**arguments, allow_is_causal_skip=False)
    assert torch.equal(actual, expected[:, 0])


@pytest.mark.parametrize(
    ("past", "queries", "keys"), [(0, 8, 8), (5, 3, 8), (7, 1, 8)], ids=["prompt", "more", "one"]
)
@pytest.mark.parametrize("padding_mask", [None, torch.ones(2, 8, dtype=torch.bool)])
def test_no_mask_without_padding(past, queries, keys, padding_mask):
    mask = integration.foo_mask(2, queries, keys, q_offset=past, attention_mask=padding_mask)
    assert mask is None


def test_no_mask_for_an_encoder_without_padding():
    options = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}
    pattern = {"mask_function": masks.bidirectional_mask_function}
    everything = torch.ones(2, 9, dtype=torch.bool)
    assert integration.foo_mask(2, 4, 9, **options, **pattern) is None
    assert integration.foo_mask(2, 4, 9, attention_mask=everything, **options, **pattern) is None
    everything[1, 8] = False
    mask = integration.foo_mask(2, 4, 9, attention_mask=everything, **options, **pattern)
    assert torch.equal(mask, everything[:, None, None].expand(2, 1, 4, 9))


@pytest.mark.parametrize("name", ["mistral: windows", "llama"])
def test_kernels_get_no_mask_where_bounds_tell_all(name, attention_calls):
    """With windows, a longer prompt in a cache, and the first tokens in a static cache."""
    model, inputs = decoder(name), tokens(2, 12)
    cache = DynamicCache(config=model.config)
    for part in inputs.split([8, 4], dim=1):
        run(model, "foo", part, past_key_values=cache, use_cache=True)
    static = StaticCache(config=model.config, max_cache_len=16)
    run(model, "foo", inputs[:, :5], past_key_values=static, use_cache=True)
    assert len(attention_calls) == 3 * model.config.num_hidden_layers
    assert not any(given for _, _, given in attention_calls)


def test_changed_mask_loses_its_bounds():
    mask = integration.foo_mask(1, 5, 5, attention_mask=torch.tensor([[False] + [True] * 4]))
    assert getattr(mask, integration.BOUNDS).options == {"is_causal": True}
    wider = mask | torch.ones(5, 5, dtype=torch.bool)
    assert torch.equal(seen_keys(wider, 5, 5)[0], wider[0, 0])


# ------------------------------------------------------------------------ the attention function


def call(module=None, *, queries=4, keys=4, mask=None, **options):
    """Call with one head, and return the output as (batch, queries, head_dim)."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 1, queries, 8, generator=generator)
    key, value = torch.randn(2, 2, 1, keys, 8, generator=generator).unbind()
    layer = Layer() if module is None else module
    return integration.foo_attention_forward(layer, query, key, value, mask, **options)[0][:, :, 0]


def test_layout():
    query, key = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 7, 8)
    value = torch.randn(2, 2, 7, 4)
    output, weights = integration.foo_attention_forward(Layer(), query, key, value, None)
    assert output.shape == (2, 5, 6, 4)
    assert output.is_contiguous()
    assert weights is None


def test_queries_of_one_batch_serve_all():
    assert call().shape == (2, 4, 8)


@pytest.mark.parametrize("argument", [None, False, True])
@pytest.mark.parametrize("attribute", [None, False, True])
def test_argument_overrides_attribute_is_causal(attribute, argument):
    layer = torch.nn.Identity()
    if attribute is not None:
        layer.is_causal = attribute
    causal = argument if argument is not None else attribute in (None, True)
    expected = torch.ones(4, 4, dtype=torch.bool).tril() if causal else None
    output = call(layer, is_causal=argument)
    torch.testing.assert_close(output, call(mask=expected, is_causal=False))


def test_mask_overrides_causality_and_window():
    mask = torch.ones(4, 4, dtype=torch.bool)
    expected = call(torch.nn.Identity(), is_causal=False)
    torch.testing.assert_close(call(mask=mask, sliding_window=2), expected)


@pytest.mark.parametrize("kind", [None, "bool", "float"])
def test_position_bias_and_mask_are_combined(kind):
    bias = torch.randn(1, 1, 4, 4, generator=torch.Generator().manual_seed(2))
    triangle = torch.ones(4, 4, dtype=torch.bool).tril()
    added = torch.zeros(4, 4).masked_fill(~triangle, -math.inf)
    mask = {None: None, "bool": triangle, "float": added}[kind]
    torch.testing.assert_close(call(mask=mask, position_bias=bias), call(mask=bias + added))


def test_dropout():
    """Each weight is dropped with the probability, or scaled to keep the mean."""
    query = torch.zeros(1, 1, 1000, 4)
    key, value = torch.zeros(1, 1, 100, 4), torch.eye(100)[None, None]
    options = {"is_causal": False, "dropout": 0.25}
    torch.manual_seed(0)
    output, _ = integration.foo_attention_forward(Layer(), query, key, value, None, **options)
    weights = output * 100
    kept = weights != 0
    assert kept.float().mean().item() == pytest.approx(0.75, abs=5 * math.sqrt(0.19 / 1e5))
    torch.testing.assert_close(weights[kept], torch.full((int(kept.sum()),), 4 / 3))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            {"output_attentions": True},
            "output_attentions must be False, since the attention weights are never in memory as "
            "a whole, got True",
        ),
        (
            {"sinks": torch.zeros(1, 1, 4, 1)},
            "sinks must be None; pass one sink for each head as s_aux, got Tensor",
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
    assert str(caught.value) == f"attention of implementation 'foo': {message}"


def test_model_refuses_to_output_attentions():
    model = decoder("llama")
    with pytest.raises(NotImplementedError, match="output_attentions must be False"):
        run(model, "foo", tokens(1, 4), output_attentions=True)


# ----------------------------------------------------------------------------------- registration


def test_both_interfaces_know_foo():
    assert AttentionInterface()["foo"] is integration.foo_attention_forward
    assert AttentionMaskInterface()["foo"] is integration.foo_mask


def test_transformers_is_not_imported_by_foo_ops():
    process = python("import foo_ops, sys; print('transformers' in sys.modules)")
    assert process.stdout == "False\n", process.stderr


def test_missing_transformers_is_named():
    hide = "import sys; sys.modules['transformers'] = None"
    process = python(f"{hide}; import foo_ops.integrations.transformers")
    assert process.stderr.endswith(
        "ImportError: foo_ops.integrations.transformers needs transformers: "
        "pip install foo_ops[transformers]\n"
    )
