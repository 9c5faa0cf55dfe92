"""`apply(model, activations=8)` rounds the inputs of linear layers with weights of integers."""

import copy
import pickle
import re

import pytest
import torch
from support.transformer_models import decoder, tokens
from torch import nn

import foo_ops
from foo_ops.integrations.transformers import (
    apply,
    quantized,
    replaced,
    restore,
    save_quantized,
)
from foo_ops.integrations.transformers.quantized import MANY_ROWS

INPUTS, OUTPUTS = 128, 40


def wide(**options):
    return decoder("llama", hidden_size=64, num_attention_heads=8, **options)


def run(model, inputs):
    with torch.no_grad():
        return model(inputs).logits


def rounded(layer, bits, input):
    """Compute a layer as `apply` should, from its weight."""
    weight, bias = layer.weight.detach(), layer.bias
    if bits == 8:
        return foo_ops.linear_int8(input, *foo_ops.quantize_weight(weight, 8), bias, activations=8)
    quantized = foo_ops.quantize_weight(weight, 4, group_size=64)
    rounding = {"activations": 8, "by_section": len(input) >= MANY_ROWS}
    return foo_ops.linear_int4(input, *quantized, bias, group_size=64, **rounding)


@pytest.mark.parametrize("keep_weights", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [1, 3, 21, MANY_ROWS - 1, MANY_ROWS])
def test_a_layer(rows, bits, keep_weights):
    layer, input = nn.Linear(INPUTS, OUTPUTS).eval(), torch.randn(rows, INPUTS)
    expected = rounded(layer, bits, input)
    with torch.no_grad():
        exact = layer(input)
    apply(layer, quantize=bits, activations=8, keep_weights=keep_weights)
    assert torch.equal(layer(input), expected)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(input), expected)
    assert not torch.equal(expected, exact)
    # A second call without the option leaves packed weights as they are, and makes others anew.
    apply(layer, quantize=bits)
    assert torch.equal(layer(input), expected) is not keep_weights


@pytest.mark.parametrize("bits", [8, 4])
def test_a_model(bits):
    """An input is off by 0.7 % where the largest magnitude is 3 times the usual one."""
    inputs = tokens(2, 12)
    plain, ours = (apply(wide(), quantize=bits, activations=it) for it in (None, 8))
    assert replaced(ours) == replaced(plain)
    expected, found = run(plain, inputs), run(ours, inputs)
    off = (found - expected).norm() / expected.norm()
    assert 1e-3 < off < 0.06
    layers = [it for it in ours.modules() if hasattr(it, "foo_activations")]
    assert len(layers) == replaced(ours)["quantize"] == 15
    assert {it.foo_activations for it in layers} == {8}
    assert torch.equal(run(restore(ours), inputs), run(restore(plain), inputs))


def test_layers_with_the_same_input():
    """They are one product, unless some of them round their input and others do not."""
    model, inputs = apply(wide(), quantize=4, activations=8), tokens(1, 7)
    apart = copy.deepcopy(model)
    for layer in (it for it in apart.modules() if hasattr(it, "foo_activations")):
        layer.register_forward_hook(lambda *_: None)
    assert torch.equal(run(model, inputs), run(apart, inputs))
    for each in (model, apart):
        for layer in each.model.layers:
            layer.self_attn.k_proj.foo_activations = None
    assert torch.equal(run(model, inputs), run(apart, inputs))


@pytest.mark.parametrize("keep_weights", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", ["llama", "Phi3"])
def test_gates_of_many_rows(kind, bits, keep_weights, monkeypatch):
    """Both products and the gate are one operator; with hooks, each layer is called."""
    gates, operator = [], quantized.linear_silu_mul_quantized

    def counted(*arguments, **options):
        gates.append(arguments[0].shape)
        return operator(*arguments, **options)

    monkeypatch.setattr(quantized, "linear_silu_mul_quantized", counted)
    model = decoder(kind, hidden_size=64, num_attention_heads=8)
    apply(model, quantize=bits, activations=8, keep_weights=keep_weights)
    apart = copy.deepcopy(model)
    for layer in (it for it in apart.modules() if hasattr(it, "foo_activations")):
        layer.register_forward_hook(lambda *_: None)
    for length in (MANY_ROWS - 1, MANY_ROWS):
        inputs = tokens(1, length)
        expected = run(apart, inputs)
        assert not gates
        torch.testing.assert_close(run(model, inputs), expected, rtol=0.02, atol=0.002)
    assert gates == [(1, MANY_ROWS, 64)] * len(model.model.layers)


def test_a_packed_model_from_a_file(tmp_path):
    inputs = tokens(1, 7)
    save_quantized(apply(wide(), quantize=4, keep_weights=False), tmp_path)
    loaded = type(wide()).from_pretrained(tmp_path).eval()
    before = run(loaded, inputs)
    expected = run(apply(wide(), quantize=4, keep_weights=False, activations=8), inputs)
    apply(loaded, activations=8)
    torch.testing.assert_close(run(loaded, inputs), expected)
    assert not torch.equal(run(loaded, inputs), before)
    restore(loaded)
    assert not any("foo_activations" in vars(it) for it in loaded.modules())


def test_float64_is_not_rounded():
    layer, input = nn.Linear(INPUTS, OUTPUTS).double().eval(), torch.randn(3, INPUTS).double()
    twin = copy.deepcopy(layer)
    apply(layer, quantize=8, activations=8)
    assert torch.equal(layer(input), apply(twin, quantize=8)(input))


def test_gradients_are_those_without_rounding():
    layer, input = nn.Linear(INPUTS, OUTPUTS).eval(), torch.randn(3, INPUTS)
    twin, gradients = copy.deepcopy(layer), []
    for each, activations in ((layer, 8), (twin, None)):
        apply(each, quantize=8, activations=activations)
        rows = input.clone().requires_grad_()
        each(rows).sum().backward()
        gradients.append((rows.grad, each.weight.grad, each.bias.grad))
    for ours, others in zip(*gradients, strict=True):
        assert torch.equal(ours, others)


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled(dynamic):
    """A graph for any number of rows is compiled again for many."""
    layer, input = nn.Linear(INPUTS, OUTPUTS).eval(), torch.randn(MANY_ROWS, INPUTS)
    apply(layer, quantize=4, activations=8)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with torch.no_grad():
        for rows in (3, 7, MANY_ROWS):
            assert torch.equal(compiled(input[:rows]), layer(input[:rows]))


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict):
    """A program for any number of rows does not know that they are many."""
    layer, input = nn.Linear(INPUTS, OUTPUTS).eval(), torch.randn(2 * MANY_ROWS, INPUTS)
    apply(layer, quantize=4, activations=8)
    with torch.no_grad():
        halves = [layer(it) for it in input.split(MANY_ROWS // 2)]
        for example, rows in ((input[:3], torch.export.Dim("rows")), (input, None)):
            program = torch.export.export(
                layer, (example,), dynamic_shapes=({0: rows},), strict=strict
            )
            expected = layer(input) if rows is None else torch.cat(halves)
            torch.testing.assert_close(program.module()(input), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": 8, "activations": 4}, "apply: activations must be None or 8, got 4"),
        (
            {"activations": 8},
            "apply: activations=8 needs quantize=4 or 8, or a model with weights of integers, "
            "got quantize=None",
        ),
    ],
)
def test_refused(options, message):
    layer = nn.Linear(INPUTS, OUTPUTS)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        apply(layer, **options)
    assert replaced(layer) == {}
