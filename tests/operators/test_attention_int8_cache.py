"""foo::attention_int8_cache: errors, memory that it must not read, and how caches are made."""

import re

import pytest
import torch
from support.exact import assert_near
from support.refusals import assert_refused

import foo_ops

DENSE = {"key": (2, 2, 7, 4), "value": (2, 2, 7, 5)}
PAGED = {"key": (6, 3, 2, 4), "value": (6, 3, 2, 5)}


def arguments(shapes=DENSE, device="cpu", **changes):
    """Return valid arguments, with some replaced."""
    given = {"query": torch.randn(2, 4, 1, 4, device=device)}
    for name, shape in shapes.items():
        given[name] = torch.ones(shape, dtype=torch.int8, device=device)
        given[f"{name}_scale"] = torch.ones(shape[:3], device=device)
    if shapes is PAGED:
        given["block_table"] = torch.arange(6, dtype=torch.int32, device=device).view(2, 3)
    return given | changes


def integers(*values):
    return torch.tensor(values, dtype=torch.int32)


NAME = "attention_int8_cache"
WRONG = {
    "query's dtype": (
        TypeError, "query must be float16, bfloat16, float32 or float64, got int8",
        {"query": torch.ones(2, 4, 1, 4, dtype=torch.int8)}, DENSE,
    ),
    "query's dimensions": (
        ValueError, "query must have 4 dimensions (B, Hq, Sq, D), got 3",
        {"query": torch.ones(2, 4, 4)}, DENSE,
    ),
    "head dimension": (
        ValueError, "query must have a head dimension of at least 1, got 0",
        {"query": torch.ones(2, 4, 1, 0)}, DENSE,
    ),
    "numbers": (TypeError, "key must be int8, got float32", {"key": torch.ones(2, 2, 7, 4)}, DENSE),
    "key's shape": (
        ValueError, "key must have shape (B, Hkv, Sk, D) = [2, 2, 7, 4], got [2, 2, 7, 3]",
        {"key": torch.ones(2, 2, 7, 3, dtype=torch.int8)}, DENSE,
    ),
    "value's dimensions": (
        ValueError, "value must have 4 dimensions (B, Hkv, Sk, D), got 2",
        {"value": torch.ones(2, 2, dtype=torch.int8)}, DENSE,
    ),
    "value's rows": (
        ValueError, "value must have shape (B, Hkv, Sk, D) = [2, 2, 7, 5], got [2, 2, 8, 5]",
        {"value": torch.ones(2, 2, 8, 5, dtype=torch.int8)}, DENSE,
    ),
    "heads": (
        ValueError, "query must have a multiple of key's 2 heads, got 3",
        {"query": torch.ones(2, 3, 1, 4)}, DENSE,
    ),
    "scale's dtype": (
        TypeError, "key_scale must be float32, got float64",
        {"key_scale": torch.ones(2, 2, 7).double()}, DENSE,
    ),
    "scale's shape": (
        ValueError, "value_scale must have shape (B, Hkv, Sk) = [2, 2, 7], got [2, 2]",
        {"value_scale": torch.ones(2, 2)}, DENSE,
    ),
    "sinks": (
        ValueError, "sinks must have shape (Hq) = [4], got [2]", {"sinks": torch.ones(2)}, DENSE,
    ),
    "lengths": (
        TypeError, "seqused_k must be int32, got int64", {"seqused_k": torch.ones(2).long()}, DENSE,
    ),
    "count of lengths": (
        ValueError, "seqused_k must have shape (B) = [2], got [1]", {"seqused_k": integers(1)},
        DENSE,
    ),
    "pages": (
        ValueError,
        "key must have shape (num_blocks, block_size, Hkv, D) = [6, 3, 2, 4], got [6, 3, 2, 9]",
        {"key": torch.ones(6, 3, 2, 9, dtype=torch.int8)}, PAGED,
    ),
    "table's dimensions": (
        ValueError, "block_table must have 2 dimensions (B, max_blocks), got 1",
        {"block_table": integers(1, 2)}, PAGED,
    ),
    "table's rows": (
        ValueError, "block_table must have shape (B, max_blocks) = [2, 2], got [1, 2]",
        {"block_table": integers([1, 2])}, PAGED,
    ),
    "window": (
        ValueError, "window_left must be at least 0, or -1 for no bound, got -2",
        {"window_left": -2}, DENSE,
    ),
    "other window": (
        ValueError, "window_right must be at least 0, or -1 for no bound, got -3",
        {"window_right": -3}, DENSE,
    ),
    "softcap": (
        ValueError, "softcap must be positive and finite, or 0 for none, got -1",
        {"softcap": -1.0}, DENSE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_refusals(name):
    error, message, changes, shapes = WRONG[name]
    given = arguments(shapes, **changes)
    assert_refused(foo_ops.attention_int8_cache, error, f"{NAME}: {message}", given)


@pytest.mark.parametrize(
    ("shapes", "changes", "message"),
    [
        (DENSE, {"seqused_k": integers(3, 8)},
         "seqused_k must be from 0 to 7 for sequence 1, got 8"),
        (DENSE, {"seqused_k": integers(-1, 2)},
         "seqused_k must be from 0 to 7 for sequence 0, got -1"),
        (PAGED, {"block_table": integers([0, 1, 2], [3, 6, 0])},
         "block_table must have block numbers from 0 to 5, got 6 for sequence 1"),
        (PAGED, {"block_table": integers([-1, 1, 2], [3, 6, 0])},
         "block_table must have block numbers from 0 to 5, got -1 for sequence 0"),
    ],
)  # fmt: skip
def test_nothing_outside_is_read(shapes, changes, message, device):
    changes = {name: it.to(device) for name, it in changes.items()}
    with pytest.raises(ValueError, match=rf"\A{re.escape(f'{NAME}: {message}')}\Z"):
        foo_ops.attention_int8_cache(**arguments(shapes, device, **changes))


def test_mixed_devices():
    given = arguments(device="foo", key_scale=torch.ones(2, 2, 7))
    message = f"{NAME}: key_scale must be on foo:0 as query is, got cpu"
    with pytest.raises(ValueError, match=rf"\A{re.escape(message)}\Z"):
        foo_ops.attention_int8_cache(**given)


@pytest.mark.parametrize("shapes", [DENSE, PAGED], ids=["dense", "paged"])
def test_what_is_not_in_use_is_not_read(shapes, device):
    """Neither free places of a cache nor pages that no sequence owns."""
    used = integers(4, 2).to(device)
    given = arguments(shapes, device, seqused_k=used)
    expected = foo_ops.attention_int8_cache(**given)
    for name in ("key_scale", "value_scale"):
        if shapes is DENSE:
            given[name][0, :, 4:] = given[name][1, :, 2:] = torch.nan
        else:
            given[name][[2, 4, 5]] = torch.nan
            given[name][1, 1:] = given[name][3, 2:] = torch.nan
    if shapes is PAGED:
        given["block_table"] = integers([0, 1, 99], [3, -5, 2**30]).to(device)
    results = foo_ops.attention_int8_cache(**given)
    assert all(map(torch.equal, results, expected))


def test_empty(device):
    for batch, heads, queries, keys in ((0, 4, 1, 7), (2, 0, 1, 7), (2, 4, 0, 7), (2, 4, 1, 0)):
        shapes = {"key": (batch, heads // 2, keys, 4), "value": (batch, heads // 2, keys, 5)}
        query = torch.randn(batch, heads, queries, 4, device=device)
        output, logsumexp = foo_ops.attention_int8_cache(**arguments(shapes, device, query=query))
        assert output.shape == (batch, heads, queries, 5)
        assert logsumexp.shape == (batch, heads, queries)
        assert not output.any()
        assert (logsumexp == -torch.inf).all() or keys


def test_gradients_are_refused():
    query = torch.randn(2, 4, 1, 4, requires_grad=True)
    output, _ = foo_ops.attention_int8_cache(**arguments(query=query))
    message = "gradients are not supported, since integers have none: use foo_ops.attention"
    with pytest.raises(NotImplementedError, match=rf"\A{NAME}: {message}\Z"):
        output.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_quantize_cache(dtype, device):
    torch.manual_seed(0)
    input = (torch.randn(3, 4, 5, 33) * torch.rand(3, 4, 5, 1)).to(device, dtype)
    input[0, 0, 0] = 0
    integers_, scale = foo_ops.quantize_cache(input)
    assert integers_.dtype == torch.int8
    assert scale.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert scale.shape == input.shape[:-1]
    exact, scale = input.cpu().double(), scale.cpu().double()
    off = (integers_.cpu() * scale[..., None] - exact).abs()
    assert (off <= scale[..., None] * (0.5 + 1e-5)).all()
    assert integers_[0, 0, 0].count_nonzero() == 0
    largest = integers_.cpu().abs().amax(-1).flatten()[1:]
    assert (largest == 127).all()


@pytest.mark.parametrize("is_paged", [False, True], ids=["dense", "paged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decoding(dtype, is_paged, device):
    """A cache is filled step by step with cache_append, and read after each step."""
    torch.manual_seed(0)
    batch, heads, room, dim = 2, 2, 12, 16
    shape = (6, 4, heads) if is_paged else (batch, heads, room)
    caches = torch.zeros(2, *shape, dim, dtype=torch.int8, device=device).unbind()
    scales = torch.zeros(2, *shape, 1, device=device).unbind()
    table = integers([4, 0, 2], [1, 5, 3]).to(device) if is_paged else None
    rows = 1 if is_paged else 2
    seen = [[], []]
    for position in range(room):
        new = [torch.randn(batch, heads, 1, dim).to(dtype) for _ in range(2)]
        given = [(it.transpose(1, 2) if is_paged else it).to(device) for it in new]
        quantised = [foo_ops.quantize_cache(it) for it in given]
        places = torch.full((batch,), position, device=device)
        foo_ops.cache_append(*caches, *(it[0] for it in quantised), places, table)
        scale = [it[1].unsqueeze(-1) for it in quantised]
        foo_ops.cache_append(*scales, *scale, places, table)
        for list_, (numbers, factor) in zip(seen, quantised):
            exact = numbers.cpu() * factor.cpu().double().unsqueeze(-1)
            list_.append(exact.transpose(1, 2) if is_paged else exact)
        assert quantised[0][0].shape[rows] == 1
        query = torch.randn(batch, 4, 1, dim).to(dtype)
        used = torch.full((batch,), position + 1, dtype=torch.int32, device=device)
        output, _ = foo_ops.attention_int8_cache(
            query.to(device), *caches, *(it.squeeze(-1) for it in scales), None, used, table
        )
        keys, values = (torch.cat(it, 2).repeat_interleave(2, 1) for it in seen)
        weights = (query.double() @ keys.mT / dim**0.5).softmax(-1)
        assert_near(output, weights @ values)
