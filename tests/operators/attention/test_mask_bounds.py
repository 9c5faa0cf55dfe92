"""Keys that a mask hides before and behind all keys that some queries see are not visited."""

import itertools
import math

import pytest
import torch
from support.exact import assert_near

import foo_ops

QUERIES, KEYS, HEADS = 150, 300, 2
LOWEST = "finfo.min"


def masks():
    """Return masks that show one range of keys to each query, by name; True is shown."""
    query, key = torch.arange(QUERIES)[:, None], torch.arange(KEYS)
    padding = torch.stack([key >= 130, key < 200])[:, None, None]
    blind = (key <= query + 100) & (query % 7 != 3)
    heads = torch.stack([key < query + 3, key > query + 40])
    return {
        "causal": key <= query + KEYS - QUERIES,
        "window": (key <= query + 60) & (key > query + 20),
        "padding": padding.expand(2, 1, QUERIES, KEYS),
        "padding, broadcast": padding,
        "blind queries": blind,
        "heads": heads[None],
        "nothing": torch.zeros(QUERIES, KEYS, dtype=torch.bool),
        "one column": (query % 3 != 0).expand(QUERIES, 1),
        "transposed": (key[:, None] <= query[:, 0]).t(),
        "holes": (key % 5 != 0) & (key > 100),
    }


def tensors(dtype, requires_grad=True):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, HEADS, QUERIES, 16), (2, HEADS, KEYS, 16), (2, HEADS, KEYS, 24)]
    made = [torch.randn(it, generator=generator, dtype=torch.float64) for it in shapes]
    return [it.to(dtype).requires_grad_(requires_grad) for it in made]


def as_bias(mask, kind, dtype):
    if kind == "bool":
        return mask
    hidden = -math.inf if kind == "-inf" else torch.finfo(dtype).min
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, hidden)


def exactly(query, key, value, bias, seen=None):
    """Return the output in float64; queries that see nothing get 0."""
    scores = query.double() @ key.double().mT / math.sqrt(query.shape[-1])
    if bias.dtype == torch.bool:
        scores = scores.masked_fill(~bias, -math.inf)
    else:
        scores = scores + bias.double()
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    blind = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
    return weights @ value.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", ["bool", "-inf", LOWEST])
def test_values_and_gradients(kind, dtype):
    """A query whose keys are all hidden by finite numbers sees all of them alike."""
    grad = torch.randn(2, HEADS, QUERIES, 24, generator=torch.Generator().manual_seed(1))
    for mask in masks().values():
        ours, exact = tensors(dtype), [it.detach().double() for it in tensors(dtype)]
        exact = [it.requires_grad_() for it in exact]
        bias = as_bias(mask, kind, dtype)
        output, _ = torch.ops.foo.attention(*ours, bias)
        expected = exactly(*exact, bias)
        assert_near(output, expected, roundings=16)
        output.backward(grad.to(dtype))
        expected.backward(grad.to(dtype).double())
        for one, other in zip(ours, exact):
            assert_near(one.grad, other.grad, roundings=32)


def test_finite_numbers_and_a_window():
    """If the window hides all keys that the bias shows, the other keys share the weight."""
    query, key, value = tensors(torch.float32, requires_grad=False)
    bias = torch.full((QUERIES, KEYS), torch.finfo(torch.float32).min)
    bias[:, 250:] = 0.0
    seen = torch.ones(QUERIES, KEYS, dtype=torch.bool).tril()
    output = foo_ops.attention(query, key, value, bias, is_causal=True)
    assert_near(output, exactly(query, key, value, bias, seen), roundings=16)


@pytest.mark.parametrize("kind", ["bool", "-inf", LOWEST])
@pytest.mark.parametrize("queries", [1, QUERIES])
def test_hidden_keys_are_not_read(queries, kind):
    query, key, value = tensors(torch.float32)
    query = query[:, :, :queries].detach().requires_grad_()
    with torch.no_grad():
        for tensor, place in itertools.product((key, value), (slice(0, 64), slice(160, None))):
            tensor[:, :, place] = math.nan
    shown = torch.zeros(queries, KEYS, dtype=torch.bool)
    shown[:, 64:160] = True
    output = foo_ops.attention(query, key, value, as_bias(shown, kind, torch.float32))
    assert output.isfinite().all()
    output.sum().backward()
    assert query.grad.isfinite().all()
    assert not key.grad[:, :, :64].any()
    assert not value.grad[:, :, 160:].any()


def test_all_of_a_bias_with_gradients_is_written():
    query, key, value = tensors(torch.float32, requires_grad=False)
    bias = as_bias(masks()["window"], "-inf", torch.float32).requires_grad_()
    foo_ops.attention(query, key, value, bias).sum().backward()
    assert not bias.grad[bias == -math.inf].any()
