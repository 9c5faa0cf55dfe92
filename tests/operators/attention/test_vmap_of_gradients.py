"""Gradients inside torch.vmap, of foo::attention and of torch's own on foo: one call for all."""

import functools

import pytest
import torch
import torch.nn.functional as F
from support.math_attention import math_attention

import foo_ops
from foo_ops.testing.spec import random

DOUBLE = torch.float64
BACKWARD = "foo::attention_backward"
SHAPES = {"query": (3, 2, 4, 5, 8), "key": (3, 2, 2, 7, 8), "value": (3, 2, 2, 7, 6)}
close = functools.partial(torch.testing.assert_close, rtol=1e-11, atol=1e-11)


def calls_of_backward(function, operator=BACKWARD):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = function()
    return result, sum(event.name == operator for event in profile.events())


def gradients_of(function, *places):
    """Return a function for the gradients of the sum of squares of a result."""
    return torch.func.grad(lambda *inputs: function(*inputs).square().sum(), argnums=places)


def check(function, of_torch, in_dims, tensors, places, operator=BACKWARD):
    """Compare mapped gradients with those of a loop over torch's own operators in float64."""
    mapped = torch.vmap(gradients_of(function, *places), in_dims)
    actual, calls = calls_of_backward(lambda: mapped(*tensors), operator)
    # The mapped call, and the one that vmap turns it into.
    assert calls == 2
    expected = gradients_of(of_torch, *places)
    for index in range(3):
        chosen = [
            tensor.cpu() if dim is None else tensor.select(dim, index).cpu()
            for tensor, dim in zip(tensors, in_dims)
        ]
        for found, wanted in zip(actual, expected(*chosen)):
            close(found[index].cpu(), wanted)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, 3), (None, 2, None)], ids=str)
def test_gradients_of_every_call(in_dims, device):
    tensors = [
        tensor.to(device) if dim is not None else tensor[0].to(device)
        for tensor, dim in zip(random("every", *SHAPES.values(), dtype=DOUBLE), in_dims)
    ]
    tensors = [t if dim is None else t.movedim(0, dim) for t, dim in zip(tensors, in_dims)]
    function = functools.partial(foo_ops.attention, is_causal=True)
    of_torch = functools.partial(math_attention, is_causal=True)
    check(function, of_torch, in_dims, tensors, (0, 1, 2))


@pytest.mark.parametrize("bias_dim", [None, 0, 1], ids=str)
@pytest.mark.parametrize(
    "shape", [(), (7,), (5, 1), (4, 1, 7), (1, 4, 5, 7), (2, 1, 5, 1)], ids=str
)
def test_gradients_of_biases(shape, bias_dim, device):
    if bias_dim == 1 and not shape:
        pytest.skip("it has one dimension")
    tensors = list(random("bias", *SHAPES.values(), (3, *shape), dtype=DOUBLE))
    tensors[3] = tensors[3][0] if bias_dim is None else tensors[3].movedim(0, bias_dim)
    tensors = [tensor.to(device) for tensor in tensors]
    in_dims = (0, 0, 0, bias_dim)
    check(foo_ops.attention, math_attention, in_dims, tensors, (0, 3))


@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=str)
def test_gradients_of_slopes(shape, device):
    tensors = [
        tensor.to(device)
        for tensor in random("slopes", *SHAPES.values(), (3, *shape), dtype=DOUBLE)
    ]

    def function(query, key, value, slopes):
        return foo_ops.attention(query, key, value, None, slopes)

    def of_torch(query, key, value, slopes):
        distance = (torch.arange(5)[:, None] + 2 - torch.arange(7)).abs()
        slopes = slopes.expand(2, 4)[..., None, None]
        return math_attention(query, key, value, -slopes * distance)

    check(function, of_torch, (0,) * 4, tensors, (0, 1, 2, 3))


@pytest.mark.parametrize("sinks_dim", [0, 1, None], ids=str)
@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=str)
def test_gradients_of_sinks(shape, sinks_dim, device):
    tensors = list(random("sinks", *SHAPES.values(), (3, *shape), dtype=DOUBLE))
    tensors[3] = tensors[3][0] if sinks_dim is None else tensors[3].movedim(0, sinks_dim)
    tensors = [tensor.to(device) for tensor in tensors]

    def function(query, key, value, sinks):
        return foo_ops.attention(query, key, value, None, None, sinks)

    def of_torch(query, key, value, sinks):
        return attention_of_sinks(query, key, value, sinks.expand(2, 4))

    check(function, of_torch, (0, 0, 0, sinks_dim), tensors, (0, 1, 2, 3))


def attention_of_sinks(query, key, value, sinks):
    key, value = (it.repeat_interleave(2, 1) for it in (key, value))
    scores = query @ key.mT / 8**0.5
    column = sinks[..., None, None].expand(*scores.shape[:3], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ value


# ------------------------------------------------------------------------------ packed sequences

STARTS, KEY_STARTS = (torch.tensor(it, dtype=torch.int32) for it in ([0, 2, 2, 5], [0, 3, 4, 9]))
PACKED = {"query": (3, 5, 4, 8), "key": (3, 9, 2, 8), "value": (3, 9, 2, 6)}


def packed(query, key, value, sinks):
    starts = [it.to(query.device) for it in (STARTS, KEY_STARTS)]
    return foo_ops.attention_varlen(
        query, key, value, *starts, sinks=sinks, max_seqlen_q=3, max_seqlen_k=5
    )


def packed_of_torch(query, key, value, sinks):
    rows = [slice(*it) for it in ((0, 2), (2, 2), (2, 5))]
    key_rows = [slice(*it) for it in ((0, 3), (3, 4), (4, 9))]
    outputs = []
    for own, own_keys, its in zip(rows, key_rows, sinks.expand(3, 4)):
        parts = (query[own], key[own_keys], value[own_keys])
        batch = (it.transpose(0, 1).unsqueeze(0) for it in parts)
        outputs.append(attention_of_sinks(*batch, its).squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("in_dims", [(0, 0, 0, 0), (1, None, 3, 1), (None, 2, None, None)], ids=str)
@pytest.mark.parametrize("shape", [(4,), (3, 4)], ids=str)
def test_gradients_of_packed_sequences(shape, in_dims, device):
    tensors = random("packed", *PACKED.values(), (3, *shape), dtype=DOUBLE)
    tensors = [it[0] if dim is None else it.movedim(0, dim) for it, dim in zip(tensors, in_dims)]
    tensors = [it.to(device) for it in tensors]
    operator = "foo::attention_varlen_backward"
    check(packed, packed_of_torch, in_dims, tensors, (0, 1, 2, 3), operator)


# ---------------------------------------------------------------- scaled_dot_product_attention

fused = functools.partial(F.scaled_dot_product_attention, enable_gqa=True)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, 3), (None, 2, None)], ids=str)
def test_fused_attention_is_mapped(in_dims):
    tensors = [
        tensor.to("foo") if dim is not None else tensor[0].to("foo")
        for tensor, dim in zip(random("fused", *SHAPES.values(), dtype=DOUBLE), in_dims)
    ]
    tensors = [t if dim is None else t.movedim(0, dim) for t, dim in zip(tensors, in_dims)]
    check(fused, math_attention, in_dims, tensors, (0, 1, 2))


@pytest.mark.parametrize("bias_dim", [None, 0], ids=str)
@pytest.mark.parametrize("shape", [(7,), (5, 1), (4, 1, 7), (1, 4, 5, 7), (2, 1, 5, 1)], ids=str)
def test_fused_attention_with_a_bias(shape, bias_dim):
    tensors = list(random("fused bias", *SHAPES.values(), (3, *shape), dtype=DOUBLE))
    tensors[3] = tensors[3][0] if bias_dim is None else tensors[3].movedim(0, bias_dim)
    tensors = [tensor.to("foo") for tensor in tensors]
    check(fused, math_attention, (0, 0, 0, bias_dim), tensors, (0, 3))


def kept(randomness, count=3):
    """Return which weights dropout keeps, and the gradients of the values."""
    query = torch.zeros(count, 1, 1, 50, 8, device="foo")
    value = torch.eye(60, device="foo").expand(count, 1, 1, -1, -1)

    def function(query, value):
        key = torch.zeros_like(value[..., :8])
        output = F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
        return output.sum(), output

    gradient = torch.func.grad(function, argnums=1, has_aux=True)
    of_values, output = torch.vmap(gradient, randomness=randomness)(query, value)
    return output != 0, of_values


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_fused_attention_with_dropout(randomness):
    mask, of_values = kept(randomness)
    assert 0.4 < mask.double().mean() < 0.6
    assert torch.equal(mask[0], mask[1]) == (randomness == "same")
    # The backward pass drops the same weights.
    expected = mask.sum(-2).double() * 2 / 60
    close(of_values[..., 0].double(), expected, rtol=1e-5)
    again, _ = kept(randomness)
    assert not torch.equal(again, mask)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_several_gradients_of_fused_attention_at_once(dropout_p):
    tensors = [
        tensor[0].to("foo").requires_grad_()
        for tensor in random("several", *SHAPES.values(), (3, 4, 1, 7), dtype=DOUBLE)
    ]
    output = fused(*tensors, dropout_p=dropout_p)
    several = torch.stack([output.detach(), output.detach() ** 2, torch.ones_like(output)])

    def gradients(cotangent):
        return torch.autograd.grad(output, tensors, cotangent, retain_graph=True)

    batched, calls = calls_of_backward(lambda: torch.vmap(gradients)(several))
    assert calls == (1 if dropout_p == 0.0 else 3)
    for gradient, expected in zip(batched, zip(*map(gradients, several))):
        close(gradient, torch.stack(expected))


def test_dropout_must_be_told_how():
    with pytest.raises(RuntimeError, match="random operation while in randomness error mode"):
        kept("error")


def test_fused_attention_over_nothing():
    query = torch.zeros(0, 1, 2, 3, 8, device="foo")
    assert torch.vmap(F.scaled_dot_product_attention)(query, query, query).shape == query.shape
