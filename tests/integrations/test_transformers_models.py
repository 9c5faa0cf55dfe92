"""Models of Hugging Face transformers run with ``attn_implementation="foo"``.

Their errors against the same model in float64 are hardly larger than with transformers' own
"eager".
"""

import pytest
import torch
import transformers
from support.exact import RATIO, Doubles, assert_as_near, exact_copy
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
from transformers import DynamicCache, StaticCache

pytestmark = pytest.mark.usefixtures("one_thread")

ROUNDINGS = 128
"""Roundings of float32, for results of a few layers; a wrong mask makes thousands."""
BFLOAT16_ROUNDINGS = 16


def check(model, *inputs, shown=..., **options):
    """Compare the outputs selected by ``shown``; the others belong to padding."""
    ours, theirs = ([run(model, each, *inputs, **options)[shown]] for each in ("foo", "eager"))
    assert_as_near(ours, theirs, [run_exactly(model, *inputs, **options)[shown]], ROUNDINGS)


def check_written(model, **options):
    """Check generated tokens, where the best leads by much more than rounding errors."""

    def write(model, implementation):
        model.set_attn_implementation(implementation)
        inputs = {
            name: each.to(model.device) if isinstance(each, torch.Tensor) else each
            for name, each in options.items()
        }
        return model.generate(
            **inputs,
            max_new_tokens=6,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )

    twin = exact_copy(model)
    with Doubles():
        exact = write(twin, "eager")
    best, second = torch.stack(exact.logits).topk(2).values.unbind(-1)
    assert (best - second).min() > 1e-4 * best.abs().max()
    assert torch.equal(write(model, "foo").sequences.cpu(), exact.sequences)


@pytest.mark.parametrize("name", DECODERS)
def test_prefill(name, device, attention_calls):
    model = decoder(name, device)
    check(model, tokens(2, 20))
    assert len(attention_calls) == model.config.num_hidden_layers


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_padded_batch(name, side, device):
    mask = padding(side, 20)
    check(decoder(name, device), tokens(3, 20), attention_mask=mask.long(), shown=mask)


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoder(name, side, device, attention_calls):
    model = encoder(name, device)
    mask = torch.ones(3, 20, dtype=torch.bool) if side is None else padding(side, 20)
    check(model, tokens(3, 20), attention_mask=mask.long(), shown=mask)
    assert len(attention_calls) == model.config.num_hidden_layers


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("name", DECODERS)
def test_cached_decoding(name, kind, device, attention_calls):
    """A prompt is read, more of it at once, then token by token, beyond window and chunk."""
    model, inputs = decoder(name, device), tokens(2, 18)
    options = {"max_cache_len": 24} if kind is StaticCache else {}
    cache = kind(config=model.config, **options)
    parts = [
        run(model, "foo", part, past_key_values=cache, use_cache=True)
        for part in inputs.split([4, 9, 1, 1, 1, 1, 1], dim=1)
    ]
    assert len(attention_calls) == 7 * model.config.num_hidden_layers
    theirs, exact = run(model, "eager", inputs), run_exactly(model, inputs)
    assert_as_near([torch.cat(parts, 1)], [theirs], [exact], ROUNDINGS)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generate(name, cache, device):
    mask = padding("left", 10).long()
    options = {"cache_implementation": cache, "disable_compile": True}
    check_written(decoder(name, device), inputs=tokens(3, 10), attention_mask=mask, **options)


def gradients(model, implementation, inputs, **options):
    """Return the gradients of all parameters that have one, by name."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    device = model.device
    model(inputs.to(device), **{key: it.to(device) for key, it in options.items()}).loss.backward()
    parameters = model.named_parameters()
    return {key: each.grad.cpu() for key, each in parameters if each.grad is not None}


@pytest.mark.parametrize("name", DECODERS)
def test_training_gradients(name, device):
    model, inputs, mask = decoder(name, device), tokens(3, 20), padding("right", 20)
    options = {"attention_mask": mask.long(), "labels": inputs.masked_fill(~mask, -100)}
    ours, theirs = (gradients(model, each, inputs, **options) for each in ("foo", "eager"))
    twin = exact_copy(model)
    with Doubles():
        exact = gradients(twin, "eager", inputs, **options)
    assert ours.keys() == theirs.keys() == exact.keys()
    assert any("sinks" in key for key in ours) == ("sinks" in name)
    assert_as_near(ours.values(), theirs.values(), exact.values(), ROUNDINGS)


@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_bfloat16(name, device):
    """Compares the median token: a rounding may send one to another expert."""
    make = decoder if name in DECODERS else encoder
    model, inputs = make(name, device, torch.bfloat16), tokens(2, 20)
    exact = run_exactly(model, inputs)
    differences = [run(model, each, inputs).double() - exact for each in ("foo", "eager")]
    ours, theirs = (difference.norm(dim=-1).median() for difference in differences)
    rounding = torch.finfo(torch.bfloat16).eps * exact.norm(dim=-1).median()
    assert ours <= BFLOAT16_ROUNDINGS * rounding
    assert ours <= RATIO * theirs


def test_encoder_and_decoder_with_position_bias(device, attention_calls):
    """T5 has a learned bias, cross attention, and a decoder with two caches."""
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
    check(model, source, **options)
    assert len(attention_calls) == 2 + 2 * 2
    check_written(model, input_ids=source, attention_mask=mask.long())


def test_packed_sequences(device):
    """Positions that restart tell transformers that a row holds several sequences."""
    model, inputs = decoder("llama", device), tokens(1, 17)
    lengths = [5, 9, 3]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = run(model, "foo", inputs, position_ids=positions, use_cache=False)
    parts = inputs.split(lengths, dim=1)
    theirs = torch.cat([run(model, "eager", part) for part in parts], 1)
    exact = torch.cat([run_exactly(model, part) for part in parts], 1)
    assert_as_near([packed], [theirs], [exact], ROUNDINGS)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_mask_of_the_users_own(dtype, device):
    """A mask of four dimensions is used as it is, and need not be causal."""
    model, inputs = decoder("llama", device), tokens(2, 9)
    mask = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(0)) < 0.6
    mask |= torch.eye(9, dtype=torch.bool)
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    given = mask if dtype == torch.bool else added
    ours = run(model, "foo", inputs, attention_mask=given)
    theirs = run(model, "eager", inputs, attention_mask=added)
    exact = run_exactly(model, inputs, attention_mask=added.double())
    assert_as_near([ours], [theirs], [exact], ROUNDINGS)


@pytest.mark.parametrize("padded", [False, True])
def test_compiled(padded, fresh_compiler):
    model, inputs = decoder("mistral: windows"), tokens(3, 12)
    mask = padding("left", 12) if padded else torch.ones(3, 12, dtype=torch.bool)
    options = {"attention_mask": mask.long()} if padded else {}
    theirs, exact = run(model, "eager", inputs, **options), run_exactly(model, inputs, **options)
    model.set_attn_implementation("foo")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        output = compiled(inputs, **options)[0]
    assert_as_near([output[mask]], [theirs[mask]], [exact[mask]], ROUNDINGS)
