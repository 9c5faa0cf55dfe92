"""Models of Hugging Face transformers with ``attn_implementation="foo"``, against "eager"."""

import math
import subprocess
import sys

import hypothesis
import pytest
import torch
import transformers
from hypothesis import strategies
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache
from transformers import masking_utils as masks

import foo_ops.integrations.transformers as integration

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 97
WINDOW = 6
"""Shorter than the sequences of these tests, so that windows and chunks matter."""

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    # Larger than is usual: with nearly equal scores, a wrong mask would hardly be seen.
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

# Each model brings another way to ask for a mask.
DECODERS = {
    "llama: plain": lambda: transformers.LlamaConfig(**GROUPED),
    "mistral: windows": lambda: transformers.MistralConfig(**GROUPED, sliding_window=WINDOW),
    "gemma2: softcap, windows in every second layer": lambda: transformers.Gemma2Config(
        **GROUPED, sliding_window=WINDOW, attn_logit_softcapping=2.0, query_pre_attn_scalar=8
    ),
    "gpt_oss: sinks, windows in every second layer": lambda: transformers.GptOssConfig(
        **GROUPED, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen2_moe: windows that only the mask tells of": lambda: transformers.Qwen2MoeConfig(
        **GROUPED,
        **EXPERTS,
        shared_expert_intermediate_size=32,
        sliding_window=WINDOW,
        use_sliding_window=True,
        max_window_layers=1,
    ),
    "llama4: chunks": lambda: transformers.Llama4TextConfig(
        **GROUPED, attention_chunk_size=WINDOW, num_local_experts=2, intermediate_size_mlp=64
    ),
}
ENCODERS = {
    "bert: plain": lambda: transformers.BertConfig(**SIZES, hidden_act="gelu"),
    "modernbert: windows on both sides": lambda: transformers.ModernBertConfig(
        **SIZES,
        local_attention=WINDOW,
        global_attn_every_n_layers=2,
        cls_token_id=None,
        sep_token_id=None,
    ),
}


def build(auto_class, config, device="cpu", dtype=torch.float32):
    """A model with random weights, the same for every device and dtype."""
    torch.manual_seed(0)
    # The other implementations of experts count integers with torch.histc, but not on the cpu.
    model = auto_class.from_config(config(), experts_implementation="eager")
    return model.to(device=device, dtype=dtype).eval()


def decoder(name, device="cpu", dtype=torch.float32):
    return build(transformers.AutoModelForCausalLM, DECODERS[name], device, dtype)


def encoder(name, device="cpu", dtype=torch.float32):
    return build(transformers.AutoModel, ENCODERS[name], device, dtype)


def tokens(*shape):
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def padding(side, length):
    """Which positions hold a token, for three sequences; the first has no padding."""
    counts = torch.tensor([length, length - 3, 4])[:, None]
    positions = torch.arange(length)
    return (positions >= length - counts) if side == "left" else (positions < counts)


def run(model, implementation, *inputs, **options):
    """The first output of a model, in float32 on the cpu."""
    model.set_attn_implementation(implementation)
    device = model.device
    options = {
        name: option.to(device) if isinstance(option, torch.Tensor) else option
        for name, option in options.items()
    }
    with torch.no_grad():
        output = model(*(each.to(device) for each in inputs), **options)[0]
    return output.float().cpu()


def assert_close(actual, expected):
    """For results of some float32 layers: sums in another order, and no more than that."""
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture
def calls(monkeypatch):
    """The calls that the attention function gets, as (queries, keys, attn_bias is given)."""
    operator = torch.ops.foo.attention.default
    seen = []

    def spy(query, key, value, attn_bias, **options):
        seen.append((query.shape[2], key.shape[2], attn_bias is not None))
        return operator(query, key, value, attn_bias, **options)

    monkeypatch.setattr(torch.ops.foo.attention, "default", spy)
    return seen


# ------------------------------------------------------------------------------- whole models


@pytest.mark.parametrize("name", DECODERS)
def test_prefill(name, device, calls):
    model, inputs = decoder(name, device), tokens(2, 20)
    assert_close(run(model, "foo", inputs), run(model, "eager", inputs))
    assert len(calls) == model.config.num_hidden_layers


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_padded_batch(name, side, device):
    model, inputs, mask = decoder(name, device), tokens(3, 20), padding(side, 20)
    outputs = [run(model, each, inputs, attention_mask=mask.long()) for each in ("foo", "eager")]
    assert_close(*(output[mask] for output in outputs))


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoder(name, side, device, calls):
    model, inputs = encoder(name, device), tokens(3, 20)
    mask = torch.ones(3, 20, dtype=torch.bool) if side is None else padding(side, 20)
    outputs = [run(model, each, inputs, attention_mask=mask.long()) for each in ("foo", "eager")]
    assert_close(*(output[mask] for output in outputs))
    assert len(calls) == model.config.num_hidden_layers


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("name", DECODERS)
def test_cached_decoding(name, kind, device, calls):
    """A prompt, more of it at once, then token by token, beyond window and chunk."""
    model, inputs = decoder(name, device), tokens(2, 18)
    options = {"max_cache_len": 24} if kind is StaticCache else {}
    cache = kind(config=model.config, **options)
    parts = [
        run(model, "foo", part, past_key_values=cache, use_cache=True)
        for part in inputs.split([4, 9, 1, 1, 1, 1, 1], dim=1)
    ]
    assert len(calls) == 7 * model.config.num_hidden_layers
    assert_close(torch.cat(parts, 1), run(model, "eager", inputs))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generate(name, cache, device):
    model, inputs, mask = decoder(name, device), tokens(3, 10), padding("left", 10)
    written = []
    for implementation in ("foo", "eager"):
        model.set_attn_implementation(implementation)
        written.append(
            model.generate(
                inputs.to(device),
                attention_mask=mask.long().to(device),
                max_new_tokens=6,
                do_sample=False,
                cache_implementation=cache,
                disable_compile=True,
            ).cpu()
        )
    assert written[0].shape == (3, 16)
    assert torch.equal(*written)


@pytest.mark.parametrize("name", DECODERS)
def test_training_gradients(name, device):
    inputs, mask = tokens(3, 20).to(device), padding("right", 20).to(device)
    labels = inputs.masked_fill(~mask, -100)
    gradients = []
    for implementation in ("foo", "eager"):
        model = decoder(name, device)
        model.set_attn_implementation(implementation)
        model(inputs, attention_mask=mask.long(), labels=labels).loss.backward()
        gradients.append(
            {key: p.grad.cpu() for key, p in model.named_parameters() if p.grad is not None}
        )
    actual, expected = gradients
    assert actual.keys() == expected.keys()
    assert any("sinks" in key for key in actual) == ("sinks" in name)
    for key, gradient in expected.items():
        torch.testing.assert_close(actual[key], gradient, rtol=1e-3, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_bfloat16_is_as_near_to_float32_as_eager(name, device):
    """Most tokens are: a rounding may send one to another expert."""
    make, inputs = (decoder if name in DECODERS else encoder), tokens(2, 20)
    exact = run(make(name), "eager", inputs)
    model = make(name, device, torch.bfloat16)
    differences = [run(model, each, inputs) - exact for each in ("foo", "eager")]
    errors = [difference.norm(dim=-1).median() for difference in differences]
    assert errors[0] < 1.25 * errors[1] < 0.25 * exact.norm(dim=-1).median()


def test_encoder_and_decoder_with_position_bias(device, calls):
    """T5: a learned bias, cross attention, and a decoder with two caches."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=48,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=6,
        decoder_start_token_id=0,
        initializer_factor=2.0,
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).to(device).eval()
    mask = padding("right", 14)
    source, target = tokens(3, 14), tokens(3, 11)
    options = {"attention_mask": mask.long(), "decoder_input_ids": target}
    outputs = [run(model, each, source, **options) for each in ("foo", "eager")]
    assert len(calls) == 2 + 2 * 2
    assert_close(*outputs)
    written = []
    for implementation in ("foo", "eager"):
        model.set_attn_implementation(implementation)
        inputs = {"input_ids": source.to(device), "attention_mask": mask.long().to(device)}
        written.append(model.generate(**inputs, max_new_tokens=6, do_sample=False).cpu())
    assert torch.equal(*written)


def test_packed_sequences(device):
    """Positions that start again tell transformers that several sequences lie in one row."""
    model, inputs = decoder("llama: plain", device), tokens(1, 17)
    lengths = [5, 9, 3]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = run(model, "foo", inputs, position_ids=positions, use_cache=False)
    alone = [run(model, "foo", part) for part in inputs.split(lengths, dim=1)]
    assert_close(packed, torch.cat(alone, 1))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_mask_of_the_users_own(dtype, device):
    """4-D, and not causal: it is complete."""
    model, inputs = decoder("llama: plain", device), tokens(2, 9)
    mask = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(0)) < 0.6
    mask |= torch.eye(9, dtype=torch.bool)
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    given = mask if dtype == torch.bool else added
    expected = run(model, "eager", inputs, attention_mask=added)
    assert_close(run(model, "foo", inputs, attention_mask=given), expected)


@pytest.mark.parametrize("padded", [False, True])
def test_compiled(padded, fresh_compiler):
    model, inputs = decoder("mistral: windows"), tokens(3, 12)
    mask = padding("left", 12) if padded else torch.ones(3, 12, dtype=torch.bool)
    options = {"attention_mask": mask.long()} if padded else {}
    expected = run(model, "eager", inputs, **options)
    model.set_attn_implementation("foo")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        output = compiled(inputs, **options)[0]
    assert_close(output[mask], expected[mask])


# ------------------------------------------------------------------- masks: which keys are seen


class Layer(torch.nn.Module):
    is_causal = True


def seen_keys(mask, queries, keys, *, batch=1, **options):
    """(batch, queries, keys): what the attention function lets each query see.

    All scores are equal and the values are the unit vectors, so a weight is not 0 where a key is
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
    """Positions of queries and keys as caches give them, padding, and a window or chunks."""
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
    """The mask, None, or the bounds on it: together with the attention function, the pattern."""
    past, queries, dropped, keys, local_size, hidden = situation
    padding_mask = None
    if hidden is not None:
        padding_mask = torch.ones(2, past + queries, dtype=torch.bool)
        padding_mask[0, list(hidden)] = False
    pattern, config = masks.causal_mask_function, transformers.PretrainedConfig()
    if local_size is not None and chunked:
        no_padding = torch.zeros(2, dtype=torch.long)
        pattern = masks.chunked_causal_mask_function(local_size, no_padding)
        # In a model that has both, the same length says nothing.
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


@pytest.mark.parametrize("name", ["mistral: windows", "llama: plain"])
def test_kernels_get_no_mask_where_bounds_tell_all(name, calls):
    """Windows, a longer prompt in a cache, and the first tokens in a static cache."""
    model, inputs = decoder(name), tokens(2, 12)
    cache = DynamicCache(config=model.config)
    for part in inputs.split([8, 4], dim=1):
        run(model, "foo", part, past_key_values=cache, use_cache=True)
    static = StaticCache(config=model.config, max_cache_len=16)
    run(model, "foo", inputs[:, :5], past_key_values=static, use_cache=True)
    assert len(calls) == 3 * model.config.num_hidden_layers
    assert not any(given for _, _, given in calls)


def test_changed_mask_loses_its_bounds():
    mask = integration.foo_mask(1, 5, 5, attention_mask=torch.tensor([[False] + [True] * 4]))
    assert getattr(mask, integration.BOUNDS).options == {"is_causal": True}
    wider = mask | torch.ones(5, 5, dtype=torch.bool)
    assert torch.equal(seen_keys(wider, 5, 5)[0], wider[0, 0])


# ------------------------------------------------------------------------ the attention function


def call(module=None, *, queries=4, keys=4, mask=None, **options):
    """With one head; returns the output as (batch, queries, head_dim)."""
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
    """Each weight is dropped with the probability, or grows so that the mean stays."""
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
            "output_attentions must be False, since the weights are never in memory as a whole, "
            "got True",
        ),
        (
            {"sinks": torch.zeros(1, 1, 4, 1)},
            "sinks must be None, since a sink is one logit for each head (s_aux), got Tensor",
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
    model = decoder("llama: plain")
    with pytest.raises(NotImplementedError, match="output_attentions must be False"):
        run(model, "foo", tokens(1, 4), output_attentions=True)


# ----------------------------------------------------------------------------------- registration


def test_both_interfaces_know_foo():
    assert AttentionInterface()["foo"] is integration.foo_attention_forward
    assert AttentionMaskInterface()["foo"] is integration.foo_mask


def python(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


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
