"""Models of many families compute the same after `apply`."""

import copy

import pytest
import torch
import transformers
from support.exact import RATIO, Doubles, assert_as_near, assert_near, exact_copy
from support.transformer_models import (
    DECODERS,
    ENCODERS,
    FAMILIES,
    build,
    decoder,
    encoder,
    padding,
    run,
    run_exactly,
    tokens,
)
from transformers import DynamicCache, StaticCache

from foo_ops.integrations.transformers import apply, replaced

pytestmark = pytest.mark.usefixtures("one_thread")

ROUNDINGS = 128
BFLOAT16_ROUNDINGS = 16
CACHED = [
    "llama",
    "mistral: windows",
    "Gemma3Text",
    "GPT2",
    "gpt_oss: sinks, windows in every second layer",
]

# Number of recognised norms, rotations, MLPs and linear layers in two blocks.
COUNTS = {
    "llama": (5, 2, 2, 15),
    "mistral: windows": (5, 2, 2, 15),
    "gemma2: softcap, windows in every second layer": (9, 2, 2, 15),
    "gpt_oss: sinks, windows in every second layer": (5, 2, 0, 9),
    "qwen2_moe: windows that only the mask tells of": (5, 2, 2, 17),
    "llama4: chunks": (5, 0, 2, 15),
    "Gemma": (5, 2, 2, 15),
    "Gemma3Text": (13, 2, 2, 15),
    "Qwen2": (5, 2, 2, 15),
    "Qwen3": (9, 2, 2, 15),
    "Mixtral": (5, 2, 0, 9),
    "Cohere": (0, 2, 2, 15),
    "Glm": (5, 2, 2, 13),
    "Phi": (0, 2, 2, 13),
    "Phi3": (5, 2, 2, 9),
    "GPT2": (0, 0, 2, 9),
}
LAYER_NORMS = {"Cohere": 3, "Phi": 3, "GPT2": 5}


def applied(model, **options):
    return apply(copy.deepcopy(model), **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_known_modules(name):
    counts = replaced(applied(decoder(name)))
    kinds = ("rms_norm", "rotary_embedding", "mlp", "linear")
    assert tuple(counts.get(kind, 0) for kind in kinds) == COUNTS[name]
    assert counts.get("layer_norm", 0) == LAYER_NORMS.get(name, 0)
    assert counts["attention"] == 2
    assert counts["loss"] == counts["fused_loss"] == 1
    assert counts["cache"] >= 1


@pytest.mark.parametrize("name", FAMILIES)
def test_prefill_with_padding(name, device):
    model, mask = decoder(name, device), padding("left", 20)
    options = {"attention_mask": mask.long()}
    exact = run_exactly(model, tokens(3, 20), **options)
    ours = run(applied(model), None, tokens(3, 20), **options)
    theirs = run(model, "eager", tokens(3, 20), **options)
    assert_as_near([ours[mask]], [theirs[mask]], [exact[mask]], ROUNDINGS)


@pytest.mark.parametrize("name", FAMILIES)
def test_float64(name):
    """No replaced module computes in less precision than its inputs have."""
    twin = exact_copy(decoder(name))
    with Doubles():
        exact = run(twin, "eager", tokens(2, 20))
    apply(twin)
    with Doubles():
        ours = run(twin, None, tokens(2, 20))
    assert_near(ours, exact, roundings=ROUNDINGS)


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16(name, device):
    """Compares the median token: a rounding may send one to another expert."""
    model, inputs = decoder(name, device, torch.bfloat16), tokens(2, 20)
    exact = run_exactly(model, inputs)
    results = run(applied(model), None, inputs), run(model, "eager", inputs)
    ours, theirs = ((it.double() - exact).norm(dim=-1).median() for it in results)
    rounding = torch.finfo(torch.bfloat16).eps * exact.norm(dim=-1).median()
    assert ours <= BFLOAT16_ROUNDINGS * rounding
    assert ours <= RATIO * theirs


@pytest.mark.parametrize("name", ENCODERS)
def test_encoder(name, device):
    model, mask = encoder(name, device), padding("right", 20)
    options = {"attention_mask": mask.long()}
    exact = run_exactly(model, tokens(3, 20), **options)
    ours = run(applied(model), None, tokens(3, 20), **options)
    theirs = run(model, "eager", tokens(3, 20), **options)
    assert_as_near([ours[mask]], [theirs[mask]], [exact[mask]], ROUNDINGS)


def step(model, inputs, **options):
    """Return the loss of a training step, and the gradients of all parameters, by name."""
    model.zero_grad()
    inputs = inputs.to(model.device)
    labels = inputs.masked_fill(inputs % 5 == 0, -100)
    loss = model(inputs, labels=labels, **options).loss
    loss.backward()
    gradients = {key: it.grad.cpu() for key, it in model.named_parameters() if it.grad is not None}
    return {"loss": loss.detach().cpu(), **gradients}


@pytest.mark.parametrize("name", FAMILIES)
def test_training_step(name, device):
    model, inputs = decoder(name, device).train(), tokens(2, 14)
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    ours = step(applied(model), inputs)
    model.set_attn_implementation("eager")
    theirs, twin = step(model, inputs), exact_copy(model)
    with Doubles():
        exact = step(twin, inputs)
    assert ours.keys() == theirs.keys() == exact.keys()
    assert_as_near(ours.values(), theirs.values(), exact.values(), ROUNDINGS)


def test_gradient_checkpointing(device):
    model, inputs = applied(decoder("llama", device)).train(), tokens(2, 14)
    expected = step(model, inputs)
    model.gradient_checkpointing_enable()
    result = step(model, inputs)
    assert all(torch.equal(result[name], it) for name, it in expected.items())


@pytest.mark.parametrize("count", [None, 7, torch.tensor(7)])
def test_loss_of_accumulated_steps(count, device):
    model, inputs = decoder("llama", device), tokens(2, 14)
    ours, theirs = (step(it, inputs, num_items_in_batch=count) for it in (applied(model), model))
    torch.testing.assert_close(ours["loss"], theirs["loss"])


def test_loss_with_shifted_labels():
    model, inputs = decoder("llama"), tokens(2, 14)
    options = {"labels": inputs, "shift_labels": inputs.roll(3, 1)}
    ours, theirs = (it(inputs, **options).loss for it in (applied(model), model))
    torch.testing.assert_close(ours, theirs)


def test_loss_of_masked_language_models(device):
    config = ENCODERS["bert"]
    model, inputs = build(transformers.AutoModelForMaskedLM, config, device), tokens(2, 14)
    ours = applied(model)
    assert replaced(ours)["loss"] == 1
    ours, theirs = step(ours, inputs), step(model, inputs)
    torch.testing.assert_close(ours["loss"], theirs["loss"])


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("name", CACHED)
def test_cached_decoding(name, kind, device):
    """A prompt is read, more of it at once, then token by token, beyond windows."""
    model, inputs = decoder(name, device), tokens(2, 18)
    ours = applied(model)
    options = {"max_cache_len": 24} if kind is StaticCache else {}
    cache = kind(config=model.config, **options)
    parts = [
        run(ours, None, part, past_key_values=cache, use_cache=True)
        for part in inputs.split([4, 9, 1, 1, 1, 1, 1], dim=1)
    ]
    theirs, exact = run(model, "eager", inputs), run_exactly(model, inputs)
    assert_as_near([torch.cat(parts, 1)], [theirs], [exact], ROUNDINGS)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "Gemma3Text"])
def test_generate(name, cache, options, device):
    """Tokens match the float64 model, whose best token leads by more than rounding errors."""
    model, inputs = decoder(name, device), tokens(3, 10)
    options = {**options, "max_new_tokens": 6, "do_sample": False}
    mask, twin = padding("left", 10).long(), exact_copy(model)
    twin.set_attn_implementation("sdpa")
    exact = twin.generate(inputs, attention_mask=mask, **options)
    options |= {"cache_implementation": cache, "disable_compile": True}
    ours = applied(model).generate(inputs.to(device), attention_mask=mask.to(device), **options)
    assert torch.equal(ours.cpu(), exact)


@pytest.mark.parametrize("name", ["llama", "Gemma", "GPT2", "Phi3"])
def test_compiled(name, fresh_compiler):
    model, inputs = decoder(name), tokens(3, 12)
    theirs, exact = run(model, "eager", inputs), run_exactly(model, inputs)
    compiled = torch.compile(applied(model), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        output = compiled(inputs)[0]
    assert_as_near([output], [theirs], [exact], ROUNDINGS)


def test_compiled_training_step(fresh_compiler):
    model, inputs = decoder("llama").train(), tokens(2, 12)
    expected = step(applied(model), inputs)
    compiled = torch.compile(applied(model), backend="aot_eager", fullgraph=True)
    result = step(compiled, inputs, use_cache=False)
    result = {name.removeprefix("_orig_mod."): it for name, it in result.items()}
    torch.testing.assert_close(result, expected)


def test_compiled_decoding_with_a_static_cache(fresh_compiler):
    model, inputs = decoder("llama"), tokens(2, 14)
    exact, theirs = run_exactly(model, inputs), run(model, "eager", inputs)
    ours, cache = applied(model), StaticCache(config=model.config, max_cache_len=16)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        parts = [ours(inputs[:, :9], past_key_values=cache)[0]]
        keys = cache.layers[0].keys
        parts += [compiled(it, past_key_values=cache)[0] for it in inputs[:, 9:].split(1, 1)]
    assert cache.layers[0].keys is keys
    assert_as_near([torch.cat(parts, 1)], [theirs], [exact], ROUNDINGS)


def test_every_decoder_is_a_family():
    assert DECODERS.keys() < FAMILIES.keys() == COUNTS.keys()
