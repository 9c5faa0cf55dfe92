"""flash_attn_with_kvcache against a cache that is written and read one row at a time."""

import re

import pytest
import torch
from support.flash_attn_exact import DTYPES, assert_near, expected, make

from foo_ops.integrations import flash_attn
from foo_ops.integrations.flash_attn import flash_attn_with_kvcache


def rotated(rows, positions, cosine, sine, interleaved):
    """Rotate rows (n, H, D) pair by pair in float64."""
    rows, cosine, sine = (tensor.cpu().double() for tensor in (rows, cosine, sine))
    half = cosine.shape[-1]
    turned = rows.clone()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, half + i)
        c, s = cosine[positions, i][:, None], sine[positions, i][:, None]
        turned[..., a] = rows[..., a] * c - rows[..., b] * s
        turned[..., b] = rows[..., a] * s + rows[..., b] * c
    return turned


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (4, 1)}], ids=str)
@pytest.mark.parametrize("layout", ["rows", "other rows", "pages", "leftpad"])
@pytest.mark.parametrize(
    ("new", "rotation"), [(0, None), (1, None), (3, "neighbours"), (1, "halves"), (3, "halves")]
)
def test_cache(rotation, layout, options, new, dtype, device):
    batch, queries, capacity, size = 3, 2, 20, 16
    filled = [5, 17, 0]
    q, k, v = make((batch, queries, 4, size), *[(batch, new, 2, size)] * 2, dtype=dtype)
    rows = 15 if layout == "pages" else 5
    per_row = 4 if layout == "pages" else capacity
    keys, values = make(*[(rows, per_row, 2, size)] * 2, dtype=dtype, seed=1)
    keywords = dict(options)
    pads = [0] * batch
    if layout == "pages":
        blocks = torch.randperm(rows, generator=torch.Generator().manual_seed(2)).view(batch, -1)
        keywords["block_table"] = blocks.int()
    else:
        order = [3, 0, 4] if layout == "other rows" else range(batch)
        blocks = torch.tensor(order)[:, None]
        if layout == "other rows":
            keywords["cache_batch_idx"] = blocks[:, 0].int()
    if layout == "leftpad":
        pads = [2, 9, 0]
        keywords["cache_leftpad"] = torch.tensor(pads, dtype=torch.int32)
    if rotation:
        angles = make((capacity + 2, 4), seed=3)
        keywords |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
        keywords["rotary_interleaved"] = rotation == "neighbours"
    places = [[(b, j) for b in own for j in range(per_row)] for own in blocks.tolist()]
    wanted_keys, wanted_values = keys.clone().double(), values.clone().double()
    wanted = []
    for b in range(batch):
        own_q, own_k = q[b].double(), k[b].double()
        if rotation:
            tables = (angles.cos(), angles.sin(), rotation == "neighbours")
            own_k = rotated(own_k, torch.arange(new) + filled[b], *tables).to(dtype).double()
            ahead = torch.arange(queries) if options else torch.zeros(queries, dtype=torch.int64)
            own_q = rotated(own_q, ahead + filled[b], *tables).to(dtype).double()
        for i in range(new):
            wanted_keys[places[b][filled[b] + i]] = own_k[i]
            wanted_values[places[b][filled[b] + i]] = v[b, i].double()
        seen = places[b][pads[b] : filled[b] + new]
        own_keys = [wanted_keys[place] for place in seen]
        own_values = [wanted_values[place] for place in seen]
        empty = torch.zeros(0, 2, size, dtype=torch.float64)
        own_keys = torch.stack(own_keys) if seen else empty
        own_values = torch.stack(own_values) if seen else empty
        wanted.append(expected(own_q, own_keys, own_values, **options))
    tensors = {
        name: it.to(device) if isinstance(it, torch.Tensor) else it for name, it in keywords.items()
    }
    keys, values = keys.to(device), values.to(device)
    out, logsumexp = flash_attn_with_kvcache(
        q.to(device),
        keys,
        values,
        *((k.to(device), v.to(device)) if new else (None, None)),
        cache_seqlens=torch.tensor(filled, dtype=torch.int32, device=device),
        return_softmax_lse=True,
        **tensors,
    )
    assert_near(keys, wanted_keys, dtype)
    assert values.cpu().double().equal(wanted_values)
    assert (out.dtype, logsumexp.dtype) == (dtype, torch.float32)
    for b in range(batch):
        assert_near(out[b], wanted[b][0], dtype)
        assert_near(logsumexp[b], wanted[b][1], dtype)


def test_cache_of_one_length_and_of_all(device):
    q, keys, values = make((2, 1, 2, 16), *[(2, 8, 2, 16)] * 2, device=device)
    out = flash_attn_with_kvcache(q, keys, values, cache_seqlens=5)
    assert_near(out[1], expected(q[1], keys[1, :5], values[1, :5])[0], torch.float32)
    out = flash_attn_with_kvcache(q, keys, values)
    assert_near(out[1], expected(q[1], keys[1], values[1])[0], torch.float32)


def test_decoding_gives_what_the_whole_gives(device):
    q, k, v = make(*[(2, 9, 2, 16)] * 3, device=device)
    whole = flash_attn.flash_attn_func(q, k, v, causal=True)
    keys, values = torch.zeros(2, 2, 12, 2, 16, device=device)
    for i in range(9):
        now = slice(i, i + 1)
        out = flash_attn_with_kvcache(
            q[:, now], keys, values, k[:, now], v[:, now], cache_seqlens=i, causal=True
        )
        torch.testing.assert_close(out, whole[:, now], rtol=1e-5, atol=1e-5)


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"q": torch.ones(2, 4, 16)},
            ValueError,
            "q must be (batch, seqlen, heads, head_dim), got (2, 4, 16)",
        ),
        (
            {"v": None},
            ValueError,
            "k and v must be given together, got one of them",
        ),
        (
            {"cache_seqlens": None},
            ValueError,
            "cache_seqlens must be given if k is given, got None",
        ),
        (
            {"cache_seqlens": 7},
            ValueError,
            "cache_seqlens must be in [0, 6], since the cache has 8 positions, got 7",
        ),
        (
            {"cache_seqlens": lengths(3, -1)},
            ValueError,
            "cache_seqlens must be in [0, 6], since the cache has 8 positions, got -1",
        ),
        (
            {"cache_seqlens": lengths(3)},
            ValueError,
            "cache_seqlens must have shape (2,) to match q's batch, got (1,)",
        ),
        (
            {"cache_seqlens": torch.tensor([3.0, 4.9])},
            TypeError,
            "cache_seqlens must be int32 or int64, got float32",
        ),
        (
            {"cache_seqlens": torch.tensor([True, False])},
            TypeError,
            "cache_seqlens must be int32 or int64, got bool",
        ),
        (
            {"cache_seqlens": 3.7},
            TypeError,
            "cache_seqlens must be an int or a tensor, got float",
        ),
        (
            {"cache_batch_idx": torch.tensor([0.0, 1.0])},
            TypeError,
            "cache_batch_idx must be int32 or int64, got float32",
        ),
        (
            {"cache_leftpad": torch.tensor([0.0, 1.0])},
            TypeError,
            "cache_leftpad must be int32 or int64, got float32",
        ),
        (
            {"block_table": torch.tensor([[0.0], [1.0]])},
            TypeError,
            "block_table must be int32 or int64, got float32",
        ),
        (
            {"cache_batch_idx": lengths(0, 3)},
            ValueError,
            "cache_batch_idx must be in [0, 2], since k_cache has 3 rows, got 3",
        ),
        (
            {"cache_leftpad": lengths(0, 6)},
            ValueError,
            "cache_leftpad must be in [0, 5], since the sequence has 5 keys in the cache, got 6",
        ),
        (
            {"block_table": lengths(0, 9).view(2, 1)},
            ValueError,
            "block_table must be in [0, 2], since k_cache has 3 rows, got 9",
        ),
        (
            {"block_table": lengths(-3, 1, 0, 2).view(2, 2), "cache_seqlens": 8},
            ValueError,
            "block_table must be in [0, 2], since k_cache has 3 rows, got -3",
        ),
        (
            {"block_table": lengths(0, 1).view(2, 1), "cache_leftpad": lengths(0, 0)},
            NotImplementedError,
            "cache_leftpad must be None if block_table is given, got a tensor",
        ),
        (
            {"k": torch.ones(2, 2, 3, 16)},
            ValueError,
            "k must have shape (2, 2, 2, 16) to match q, k and k_cache, got (2, 2, 3, 16)",
        ),
        (
            {"v": torch.ones(2, 2, 2, 16).half()},
            TypeError,
            "v must be torch.float32 as v_cache is, got torch.float16",
        ),
        (
            {"v_cache": torch.zeros(3, 7, 2, 16)},
            ValueError,
            "v_cache must have shape (3, 8, 2, 16) to match k_cache, got (3, 7, 2, 16)",
        ),
        (
            {"rotary_cos": torch.ones(8, 4)},
            ValueError,
            "rotary_cos and rotary_sin must be given together, got one of them",
        ),
        (
            {"rotary_cos": torch.ones(4, 4), "rotary_sin": torch.ones(4, 4)},
            ValueError,
            "cache_seqlens must be in [0, 2], since rotary_cos has 4 positions, got 3",
        ),
        (
            {"k": None, "v": None, "rotary_cos": torch.ones(8, 4), "rotary_sin": torch.ones(8, 4)},
            ValueError,
            "k must be given if rotary_cos is given, got None",
        ),
    ],
)
def test_refused_before_anything_is_written(change, error, message):
    given = {
        "q": torch.ones(2, 2, 4, 16),
        "k_cache": torch.zeros(3, 8, 2, 16),
        "v_cache": torch.zeros(3, 8, 2, 16),
        "k": torch.ones(2, 2, 2, 16),
        "v": torch.ones(2, 2, 2, 16),
        "cache_seqlens": 3,
    } | change
    with pytest.raises(error, match=re.escape(f"flash_attn_with_kvcache: {message}")):
        flash_attn_with_kvcache(**given)
    assert not given["k_cache"].any()
    assert not given["v_cache"].any()


def test_blocks_that_are_not_read_may_be_any(device):
    table, anything = lengths(4, 1, 2, 3).view(2, 2), lengths(-1, 99).view(2, 1)
    q, k, v = make((2, 1, 4, 16), *[(2, 1, 2, 16)] * 2, device=device)
    results = []
    for blocks in (table, torch.cat((table, anything), 1)):
        pages = make(*[(5, 4, 2, 16)] * 2, device=device, seed=1)
        out = flash_attn_with_kvcache(
            q, *pages, k, v, cache_seqlens=6, block_table=blocks.to(device), causal=True
        )
        results.append((out, *pages))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_what_attention_refuses_is_not_written():
    keys, values = torch.zeros(2, 1, 8, 2, 16)
    k = torch.ones(1, 1, 2, 16)
    with pytest.raises(ValueError, match="query must have"):
        flash_attn_with_kvcache(torch.ones(1, 1, 3, 16), keys, values, k, k, cache_seqlens=0)
    assert not keys.any()


@pytest.mark.parametrize(
    "name", ["cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table"]
)
def test_tables_on_another_device(name):
    keys, values = torch.zeros(2, 1, 8, 2, 16, device="foo")
    k = torch.ones(1, 1, 2, 16, device="foo")
    given = {"cache_seqlens": 0, name: torch.zeros(1, *[1][: name == "block_table"]).int()}
    message = f"flash_attn_with_kvcache: {name} must be on foo:0 as q is, got cpu"
    with pytest.raises(ValueError, match=rf"\A{message}\Z"):
        flash_attn_with_kvcache(k, keys, values, k, k, **given)
    assert not keys.any()


@pytest.mark.parametrize("compiled", [False, True])
def test_lengths_and_blocks_of_other_shapes(compiled):
    """The function checks them first, but others may call the operator directly."""
    options = {"new": 1, "queries": 1, "block_size": 4, "num_blocks": 1, "positions": -1}
    operator = torch.ops.foo.flash_attn_cache_lengths.default
    for tables, message in (
        ((torch.ones(3), torch.zeros(1, 1), None), "blocks must be (B, blocks) for the B of"),
        ((torch.ones(3), torch.zeros(3), None), "blocks must be (B, blocks) for the B of"),
        ((torch.ones(3), torch.zeros(3, 1), torch.ones(1)), "leftpad must be (B,) for the B of"),
        ((torch.ones(3, 1), torch.zeros(3, 1), None), "lengths must be (B,) for the B of"),
    ):
        integers = [it if it is None else it.long() for it in tables]
        call = torch.compile(operator, backend="aot_eager") if compiled else operator
        with pytest.raises(Exception, match=re.escape(f"flash_attn_cache_lengths: {message}")):
            call(*integers, **options, is_paged=True)
