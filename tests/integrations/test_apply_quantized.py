"""`apply(model, quantize=...)`: models compute with weights of 8 and 4 bits, and keep their own."""

import copy
import pickle

import pytest
import torch
from support.exact import Doubles, assert_near, exact_copy
from support.transformer_models import decoder, rounded, run, tokens
from torch import nn
from transformers import StaticCache
from transformers.pytorch_utils import Conv1D

from foo_ops.integrations.transformers import apply, replaced, restore

pytestmark = pytest.mark.usefixtures("one_thread")

# With the number of their modules that have weights of few bits.
MODELS = {"llama": 15, "GPT2": 9, "gpt_oss: sinks, windows in every second layer": 11}
LLAMA = "llama"


def wide(name, device="cpu", dtype=torch.float32):
    """Build a model whose layers are wide enough for groups of 4-bit weights."""
    return decoder(name, device, dtype, hidden_size=64, num_attention_heads=8)


def with_rounded_weights(model, bits):
    """Return the model in float64, with weights of linear layers and experts of few ``bits``."""
    twin = exact_copy(model)
    for name, layer in twin.named_modules():
        own = model.get_submodule(name)
        if type(layer) in (nn.Linear, Conv1D):
            layer.weight = rounded(own.weight, bits, type(layer) is Conv1D)
        elif hasattr(layer, "has_gate"):
            for weight in ("gate_up_proj", "down_proj"):
                setattr(layer, weight, rounded(getattr(own, weight), bits, own.is_transposed))
    return twin


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_rounded_weights(name, bits, device):
    model, inputs = wide(name, device), tokens(2, 12)
    twin = with_rounded_weights(model, bits)
    with Doubles():
        exact = run(twin, "eager", inputs)
    ours = apply(model, quantize=bits)
    assert replaced(ours)["quantize"] == MODELS[name]
    assert "linear" not in replaced(ours)
    assert_near(run(ours, None, inputs), exact, roundings=128)


def test_weights_and_stored_models_stay(tmp_path):
    model = wide(LLAMA)
    before = {name: it.clone() for name, it in model.state_dict().items()}
    apply(model, quantize=8)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], it) for name, it in before.items())
    model.save_pretrained(tmp_path)
    loaded = type(wide(LLAMA)).from_pretrained(tmp_path)
    assert all(torch.equal(loaded.state_dict()[name], it) for name, it in before.items())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies_are_quantised(copied):
    model = apply(wide(LLAMA), quantize=4)
    twin, inputs = copied(model), tokens(1, 7)
    assert replaced(twin) == replaced(model)
    assert torch.equal(run(twin, None, inputs), run(model, None, inputs))


def test_moves_to_foo():
    model, inputs = apply(wide(LLAMA), quantize=8), tokens(1, 7)
    expected = run(model, None, inputs)
    torch.testing.assert_close(run(model.to("foo"), None, inputs), expected)


def test_the_way_back():
    model, inputs = wide(LLAMA), tokens(1, 7)
    expected, buffers = run(model, None, inputs), dict(model.named_buffers())
    restore(apply(model, quantize=8))
    assert replaced(model) == {}
    assert dict(model.named_buffers()).keys() == buffers.keys()
    assert torch.equal(run(model, None, inputs), expected)


def test_quantised_after_it_was_applied_and_with_other_bits():
    inputs = tokens(1, 7)
    results = {bits: run(apply(wide(LLAMA), quantize=bits), None, inputs) for bits in (8, 4)}
    model = apply(wide(LLAMA))
    for bits in (4, 8, 8, 4):
        apply(model, quantize=bits)
        assert torch.equal(run(model, None, inputs), results[bits])
    # Without `quantize`, apply changes nothing.
    assert torch.equal(run(apply(model), None, inputs), results[4])


def test_changed_weights_are_quantised_anew():
    model, other = apply(wide(LLAMA), quantize=8), wide(LLAMA)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    model.load_state_dict(other.state_dict())
    expected = run(apply(other, quantize=8), None, tokens(1, 7))
    assert torch.equal(run(apply(model, quantize=8), None, tokens(1, 7)), expected)


def test_training_uses_the_weights():
    model, inputs = wide(LLAMA).train(), tokens(1, 7)
    expected = model(inputs, labels=inputs).loss
    loss = apply(model, quantize=4)(inputs, labels=inputs).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert model.lm_head.weight.grad is not None


def test_layers_that_no_group_divides_stay():
    layers = nn.Sequential(nn.Linear(96, 4), nn.Linear(4, 100), nn.Linear(100, 3))
    names = replaced(apply(copy.deepcopy(layers), quantize=4))
    assert names == {"linear": 2, "quantize": 1}
    assert replaced(apply(layers, quantize=8)) == {"quantize": 3}


def test_compiled_decoding(fresh_compiler):
    model, inputs = apply(wide(LLAMA), quantize=4), tokens(1, 9)
    expected = run(model, None, inputs)
    cache = StaticCache(config=model.config, max_cache_len=16)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        parts = [model(inputs[:, :6], past_key_values=cache)[0]]
        parts += [compiled(it, past_key_values=cache)[0] for it in inputs[:, 6:].split(1, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("bits", [0, 16])
def test_other_bits_are_refused(bits):
    model = nn.Sequential(nn.Linear(2, 2))
    message = f"^apply: quantize must be None, 8 or 4, got {bits}$"
    with pytest.raises(ValueError, match=message):
        apply(model, quantize=bits)
    assert replaced(model) == {}
