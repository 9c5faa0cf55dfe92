"""Operators on a part of attention's heads or keys compute that part of the whole."""

import pytest
import torch
from support.attention_errors import raises

from foo_ops.testing.spec import random

attention, packed = torch.ops.foo.attention_seeded, torch.ops.foo.attention_varlen_seeded
STARTS = torch.tensor([0, 3, 7], dtype=torch.int32)
LENGTHS = {"max_seqlen_q": 4, "max_seqlen_k": 4}


def inputs(device):
    shapes = (2, 4, 7, 8), (2, 2, 7, 8), (2, 2, 7, 6)
    return [it.to(device) for it in random("parts", *shapes, dtype=torch.float64)]


def numbers(batch, heads, device):
    return torch.arange(batch * heads, device=device).view(batch, heads)


def test_heads_drop_by_their_numbers(device):
    """A part of the batch and heads drops the same weights as within the whole, in both passes."""
    query, key, value = inputs(device)
    seed = torch.tensor([3], device=device)
    whole = attention(query, key, value, seed=seed, dropout_p=0.5)
    gradients = [torch.ones_like(it) for it in whole]
    none = (None, None, None)
    expected = torch.ops.foo.attention_backward(
        *gradients, query, key, value, *none, *whole, seed, dropout_p=0.5
    )
    heads, key_heads = slice(2, 4), slice(1, 2)
    own = query[1:, heads], key[1:, key_heads], value[1:, key_heads]
    its = numbers(2, 4, device)[1:, heads]
    results = attention(*own, *none, seed, its, dropout_p=0.5)
    for result, it in zip(results, whole):
        torch.testing.assert_close(result, it[1:, heads], rtol=1e-13, atol=1e-13)
    found = torch.ops.foo.attention_backward(
        *(it[1:, heads] for it in gradients), *own, *none, *results, seed, its, dropout_p=0.5
    )
    places = (heads, key_heads, key_heads)
    for gradient, it, place in zip(found, expected, places):
        torch.testing.assert_close(gradient, it[1:, place], rtol=1e-12, atol=1e-12)


def test_packed_heads_drop_by_their_numbers(device):
    query, key, value = (it[0].transpose(0, 1) for it in inputs(device))
    starts, seed = STARTS.to(device), torch.tensor([3], device=device)
    options = {"dropout_p": 0.5, **LENGTHS}
    whole = packed(query, key, value, starts, starts, seed=seed, **options)
    its = numbers(2, 4, device)[:, 2:]
    own = query[:, 2:], key[:, 1:], value[:, 1:]
    output, _ = packed(*own, starts, starts, seed=seed, dropout_heads=its, **options)
    torch.testing.assert_close(output, whole[0][:, 2:], rtol=1e-13, atol=1e-13)


def test_an_offset_moves_windows_and_slopes(device):
    """With part_offset=-2, the keys from the third on keep their distances to the queries."""
    query, key, value = inputs(device)
    slopes = torch.rand(4, dtype=torch.float64, device=device)
    mask = (torch.arange(7, device=device) >= 2).expand(7, 7)
    window = {"window_left": 3, "window_right": 1}
    expected = attention(query, key, value, mask, slopes, **window)
    results = attention(
        query, key[:, :, 2:], value[:, :, 2:], None, slopes, part_offset=-2, **window
    )
    for result, it in zip(results, expected):
        torch.testing.assert_close(result, it, rtol=1e-12, atol=1e-12)


def test_heads_with_numbers_are_differentiated_twice(device):
    query, key, value = (it.requires_grad_() for it in inputs(device))
    seed, heads = torch.tensor([3], device=device), numbers(2, 4, device).flip(1)

    def dropped(*tensors):
        return attention(*tensors, seed=seed, dropout_heads=heads, dropout_p=0.5)

    def dropped_and_packed(*tensors):
        rows = (it[0].transpose(0, 1) for it in tensors)
        starts = STARTS.to(device)
        options = {"dropout_p": 0.5, **LENGTHS}
        return packed(*rows, starts, starts, seed=seed, dropout_heads=heads, **options)

    for function in (dropped, dropped_and_packed):
        assert torch.autograd.gradcheck(function, (query, key, value), fast_mode=True)
        assert torch.autograd.gradgradcheck(function, (query, key, value), fast_mode=True)


def test_parts_of_keys_are_differentiated_once(device):
    query, key, value = (it.requires_grad_() for it in inputs(device))
    slopes = torch.rand(4, dtype=torch.float64, device=device).requires_grad_()

    def part(*tensors):
        return attention(*tensors[:3], None, tensors[3], window_left=3, part_offset=-2)

    tensors = query, key, value, slopes
    assert torch.autograd.gradcheck(part, tensors, fast_mode=True, check_forward_ad=True)
    output, logsumexp = part(*tensors)
    (first,) = torch.autograd.grad(output.sum() + logsumexp.sum(), query, create_graph=True)
    message = "attention_backward: second derivatives are not supported with part_offset"
    with raises(NotImplementedError, message):
        first.sum().backward()


def test_parts_are_mapped(device):
    query, key, value = inputs(device)
    seed, heads = torch.tensor([3], device=device), numbers(1, 4, device)

    def dropped(query, key, value):
        one = (it[None] for it in (query, key, value))
        return attention(*one, seed=seed, dropout_heads=heads, dropout_p=0.5)[0]

    def part(query, key, value):
        one = (it[None] for it in (query, key, value))
        return attention(*one, window_right=1, part_offset=-2)[0]

    for function in (dropped, part):
        mapped = torch.vmap(function)(query, key, value)
        for result, *own in zip(mapped, query, key, value):
            torch.testing.assert_close(result, function(*own), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("mode", ["eager", "fake"])
@pytest.mark.parametrize(
    ("heads", "error", "message"),
    [
        (torch.zeros(2, 4), TypeError, "dropout_heads must be int64, got float32"),
        (
            torch.zeros(2, 2, dtype=torch.int64),
            ValueError,
            "dropout_heads must have shape [B, Hq] = [2, 4], got [2, 2]",
        ),
        (
            torch.zeros(4, dtype=torch.int64),
            ValueError,
            "dropout_heads must have shape [B, Hq] = [2, 4], got [4]",
        ),
    ],
)
def test_numbers_that_do_not_fit(heads, error, message, mode, device):
    device = "meta" if mode == "fake" else device
    query, key, value = (it.to(device) for it in inputs("cpu"))
    seed, heads = torch.zeros(1, dtype=torch.int64, device=device), heads.to(device)
    with raises(error, f"attention: {message}"):
        attention(query, key, value, None, None, None, seed, heads, dropout_p=0.5)
    of_one = (it[0].transpose(0, 1) for it in (query, key, value))
    starts = STARTS.to(device)
    with raises(error, f"attention_varlen: {message}"):
        packed(*of_one, starts, starts, seed=seed, dropout_heads=heads, dropout_p=0.5, **LENGTHS)


def test_numbers_on_another_device():
    query, key, value = inputs("cpu")
    seed, heads = torch.zeros(1, dtype=torch.int64), numbers(2, 4, "foo")
    with raises(ValueError, "attention: dropout_heads must be on cpu as query is, got foo:0"):
        attention(query, key, value, None, None, None, seed, heads, dropout_p=0.5)


def test_fake_kernels_tell_what_parts_return(device):
    query, key, value = inputs(device)
    torch.library.opcheck(
        attention,
        (query, key, value, None, None, None, None, None),
        {"window_right": 1, "part_offset": -2},
        test_utils=("test_schema", "test_faketensor"),
    )
