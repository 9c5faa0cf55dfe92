"""The functions of flash_attn in graphs without a break, for one size and for any."""

import re

import pytest
import torch
from support.flash_attn_exact import make
from support.parts import whole

from foo_ops.integrations import flash_attn

BATCH, HEADS, SIZE, CAPACITY = 3, 4, 16, 20


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32)


def dense(queries):
    q, k, v = make(*[(BATCH, queries, HEADS, SIZE)] * 3)
    return {"q": q, "k": k, "v": v, "causal": True}


def key_value_packed(queries):
    q, kv = make((BATCH, queries, HEADS, SIZE), (BATCH, queries + 2, 2, 2, SIZE))
    return {"q": q, "kv": kv, "window_size": (2, 1), "softcap": 5.0, "return_attn_probs": True}


def all_packed(queries):
    slopes = make((HEADS,), seed=1).abs()
    return {"qkv": make((BATCH, queries, 3, HEADS, SIZE)), "alibi_slopes": slopes}


def starts(queries):
    return lengths(0, queries - 1, queries, 3 * queries)


def varlen(queries):
    q, k, v = make(*[(3 * queries, HEADS, SIZE)] * 3)
    tensors = {"q": q, "k": k, "v": v, "cu_seqlens_q": starts(queries)}
    longest = {"max_seqlen_q": 2 * queries, "max_seqlen_k": 2 * queries}
    return tensors | longest | {"cu_seqlens_k": starts(queries), "causal": True}


def varlen_pages(queries):
    keys, values = make(*[(9, 4, 2, SIZE)] * 2)
    blocks = torch.arange(9, dtype=torch.int32).view(3, 3)
    given = varlen(queries) | {"k": keys, "v": values, "block_table": blocks}
    return given | {"cu_seqlens_k": lengths(0, 5, 17, 20), "max_seqlen_k": 12}


def varlen_key_value_packed(queries):
    given = varlen(queries) | {"kv": make((3 * queries, 2, 2, SIZE))}
    return {name: it for name, it in given.items() if name not in ("k", "v")}


def varlen_all_packed(queries):
    rows = make((3 * queries, 3, HEADS, SIZE))
    return {"qkv": rows, "cu_seqlens": starts(queries), "max_seqlen": 2 * queries}


def read_only(queries):
    q, keys, values = make((BATCH, queries, HEADS, SIZE), *[(BATCH, CAPACITY, 2, SIZE)] * 2)
    return {"q": q, "k_cache": keys, "v_cache": values, "return_softmax_lse": True}


def appended(queries):
    k, v = make(*[(BATCH, queries, 2, SIZE)] * 2, seed=1)
    return read_only(queries) | {"k": k, "v": v, "cache_seqlens": lengths(5, 0, 9), "causal": True}


def appended_behind_one_length(queries):
    return appended(queries) | {"cache_seqlens": 6}


def appended_to_rows(queries):
    return appended(queries) | {"cache_batch_idx": lengths(2, 0, 1)}


def appended_behind_padding(queries):
    return appended(queries) | {"cache_leftpad": lengths(1, 0, 7)}


def appended_to_pages(queries):
    keys, values = make(*[(15, 4, 2, SIZE)] * 2)
    blocks = torch.arange(14, -1, -1, dtype=torch.int32).view(3, 5)
    return appended(queries) | {"k_cache": keys, "v_cache": values, "block_table": blocks}


def rotated(queries):
    angles = make((CAPACITY, 4), seed=3)
    return appended(queries) | {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}


CALLS = (
    (flash_attn.flash_attn_func, dense),
    (flash_attn.flash_attn_kvpacked_func, key_value_packed),
    (flash_attn.flash_attn_qkvpacked_func, all_packed),
    (flash_attn.flash_attn_varlen_func, varlen),
    (flash_attn.flash_attn_varlen_func, varlen_pages),
    (flash_attn.flash_attn_varlen_kvpacked_func, varlen_key_value_packed),
    (flash_attn.flash_attn_varlen_qkvpacked_func, varlen_all_packed),
    (flash_attn.flash_attn_with_kvcache, read_only),
    (flash_attn.flash_attn_with_kvcache, appended),
    (flash_attn.flash_attn_with_kvcache, appended_behind_one_length),
    (flash_attn.flash_attn_with_kvcache, appended_to_rows),
    (flash_attn.flash_attn_with_kvcache, appended_behind_padding),
    (flash_attn.flash_attn_with_kvcache, appended_to_pages),
    (flash_attn.flash_attn_with_kvcache, rotated),
)


def moved(given, device):
    return {
        name: it.to(device) if isinstance(it, torch.Tensor) else it for name, it in given.items()
    }


REFUSED = {
    "length": (
        {"cache_seqlens": lengths(5, 0, 14)},
        "cache_seqlens must be in [0, 13], since the cache has 20 positions, got 14",
    ),
    "row": (
        {"cache_batch_idx": lengths(2, 0, 5)},
        "cache_batch_idx must be in [0, 4], since k_cache has 5 rows, got 5",
    ),
    "padding": (
        {"cache_leftpad": lengths(1, 8, 7)},
        "cache_leftpad must be in [0, 7], since the sequence has 7 keys in the cache, got 8",
    ),
    "block": (
        {"block_table": torch.tensor([[14, -1, 2, 13, 4], [3, 0, 5, 6, 7], [8, 9, 10, 11, 12]])},
        "block_table must be in [0, 14], since k_cache has 15 rows, got -1",
    ),
    "block that is read": (
        {"block_table": torch.tensor([[13, 1, 2, 14, 4], [3, 0, 5, 6, 7], [15, 9, 10, 11, 12]])},
        "block_table must be in [0, 14], since k_cache has 15 rows, got 15",
    ),
    "angles": (
        {"rotary_cos": torch.ones(15, 4), "rotary_sin": torch.ones(15, 4)},
        "cache_seqlens must be in [0, 8], since rotary_cos has 15 positions, got 9",
    ),
}
IN_ORDER = [("eager", name) for name in REFUSED]


@pytest.mark.parametrize(
    ("backend", "name"),
    [*IN_ORDER, *whole(("inductor", "padding"), ("inductor", "block that is read"))],
)
def test_what_a_graph_refuses_is_not_written(backend, name, device):
    """These backends write in program order, not at the end."""
    torch.compiler.reset()
    changes, message = REFUSED[name]
    arguments = appended_to_pages if "block_table" in changes else appended
    given = moved(arguments(7) | changes, device)
    if "cache_batch_idx" in changes:
        given["k_cache"], given["v_cache"] = (
            torch.cat([given[it], given[it][:2]]) for it in ("k_cache", "v_cache")
        )
    before = [given[it].clone() for it in ("k_cache", "v_cache")]
    graph = torch.compile(flash_attn.flash_attn_with_kvcache, backend=backend, fullgraph=True)
    message = rf"\Aflash_attn_with_kvcache: {re.escape(message)}\Z"
    for function in (graph, flash_attn.flash_attn_with_kvcache):
        # PyTorch's eager backend leaves gradients off if a graph raises.
        with torch.no_grad(), pytest.raises(ValueError, match=message):
            function(**given)
        assert given["k_cache"].equal(before[0])
        assert given["v_cache"].equal(before[1])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("function", "arguments"), CALLS, ids=lambda it: it.__name__)
@pytest.mark.parametrize("device", ["foo", *whole("cpu")])
def test_all_compile(function, arguments, dynamic, device):
    torch.compiler.reset()
    graph = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    # No other size is 7 at first: a graph merges sizes that are equal.
    for queries in (7, 8, 6) if dynamic else (7,):
        given, compiled = (moved(arguments(queries), device) for _ in range(2))
        with torch.compiler.set_stance("default" if queries == 7 else "fail_on_recompile"):
            found = graph(**compiled)
        torch.testing.assert_close(found, function(**given), rtol=0, atol=0)
        torch.testing.assert_close(compiled, given, rtol=0, atol=0)
