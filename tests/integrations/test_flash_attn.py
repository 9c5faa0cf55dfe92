"""The functions of flash_attn against softmax(scale q k^T) v in float64, one head at a time."""

import importlib.util
import itertools
import math
import re

import pytest
import torch

from foo_ops.integrations import flash_attn
from foo_ops.integrations.flash_attn import bert_padding, flash_attn_with_kvcache

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
OPTIONS = (
    {},
    {"causal": True},
    {"window_size": (3, 0)},
    {"window_size": (2, 4)},
    {"window_size": (-1, 2), "softcap": 5.0},
    {"causal": True, "window_size": (5, 5), "softmax_scale": 0.3},
)


def make(*shapes, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    return made if len(made) > 1 else made[0]


def expected(
    q, k, v, causal=False, window_size=(-1, -1), softcap=0.0, softmax_scale=None, alibi_slopes=None
):
    """Return what one sequence gives: q (Sq, H, D), k and v (Sk, Hkv, D), slopes (H,)."""
    q, k, v = (tensor.cpu().double() for tensor in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k)
    scores = scores * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.cpu().double()[:, None, None] * distance.abs()
    left, right = window_size
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        right = 0
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= -distance > right
    scores = scores.masked_fill(hidden, -math.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("hij,jhd->ihd", weights, v), scores.logsumexp(-1)


def assert_near(found, wanted, dtype):
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=tolerance, atol=tolerance)


# --------------------------------------------------------------------------------- dense and packed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (3, 11), (1, 9), (6, 4)])
def test_dense(queries, keys, options, dtype, device):
    q, k, v = make(
        (2, queries, 4, 16), (2, keys, 2, 16), (2, keys, 2, 16), dtype=dtype, device=device
    )
    out, logsumexp, weights = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    assert out.is_contiguous()
    assert (out.dtype, logsumexp.dtype) == (dtype, torch.float32)
    assert weights.numel() == 0
    for b in range(2):
        wanted, wanted_logsumexp = expected(q[b], k[b], v[b], **options)
        assert_near(out[b], wanted, dtype)
        assert_near(logsumexp[b], wanted_logsumexp, torch.float32)
    packed = torch.stack((k, v), 2)
    assert flash_attn.flash_attn_kvpacked_func(q, packed, **options).equal(out)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_all_in_one_tensor(options, device):
    qkv = make((2, 7, 3, 4, 16), device=device)
    out = flash_attn.flash_attn_qkvpacked_func(qkv, **options)
    assert out.equal(flash_attn.flash_attn_func(*qkv.unbind(2), **options))
    starts = torch.tensor([0, 3, 3, 14], dtype=torch.int32, device=device)
    rows = qkv.flatten(0, 1)
    out = flash_attn.flash_attn_varlen_qkvpacked_func(rows, starts, 11, **options)
    for start, end in ((0, 3), (3, 14)):
        wanted, _ = expected(*rows[start:end].unbind(1), **options)
        assert_near(out[start:end], wanted, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_packed(options, dtype, device):
    lengths_q, lengths_k = (3, 0, 5), (4, 2, 9)
    starts_q, starts_k = (
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
        for lengths in (lengths_q, lengths_k)
    )
    q, kv = make((8, 4, 16), (15, 2, 2, 16), dtype=dtype, device=device)
    arguments = (starts_q, starts_k, 5, 9)
    out, logsumexp, _ = flash_attn.flash_attn_varlen_func(
        q, *kv.unbind(1), *arguments, return_attn_probs=True, **options
    )
    assert flash_attn.flash_attn_varlen_kvpacked_func(q, kv, *arguments, **options).equal(out)
    for b in range(3):
        rows, keys = (slice(starts[b], starts[b + 1]) for starts in (starts_q, starts_k))
        wanted, wanted_logsumexp = expected(q[rows], *kv[keys].unbind(1), **options)
        assert_near(out[rows], wanted, dtype)
        assert_near(logsumexp[:, rows], wanted_logsumexp, torch.float32)


@pytest.mark.parametrize("batched", [False, True])
def test_slopes(batched, device):
    q, k, v = make((2, 5, 4, 16), (2, 9, 4, 16), (2, 9, 4, 16), device=device)
    slopes = make((2, 4) if batched else (4,), device=device, seed=1).abs()
    out = flash_attn.flash_attn_func(q, k, v, alibi_slopes=slopes, causal=True)
    for b in range(2):
        own = slopes[b] if batched else slopes
        wanted, _ = expected(q[b], k[b], v[b], alibi_slopes=own, causal=True)
        assert_near(out[b], wanted, torch.float32)


def test_gradients(device):
    """They are those of the formula, also through both packed forms."""
    qkv = make((1, 6, 3, 2, 8), device=device).requires_grad_()
    flash_attn.flash_attn_qkvpacked_func(qkv, causal=True).sin().sum().backward()
    exact = qkv.detach().cpu().double().requires_grad_()
    expected(*exact[0].unbind(1), causal=True)[0].sin().sum().backward()
    torch.testing.assert_close(qkv.grad.cpu().double(), exact.grad, rtol=1e-4, atol=1e-5)
    rows = qkv.detach()[0].requires_grad_()
    starts = torch.tensor([0, 6], dtype=torch.int32, device=device)
    out = flash_attn.flash_attn_varlen_qkvpacked_func(rows, starts, 6, causal=True)
    out.sin().sum().backward()
    torch.testing.assert_close(rows.grad.cpu().double(), exact.grad[0], rtol=1e-4, atol=1e-5)


def test_dropout_follows_the_seed(device):
    q, k, v = make(*[(1, 32, 2, 16)] * 3, device=device)

    def call():
        torch.manual_seed(3)
        return flash_attn.flash_attn_func(q, k, v, 0.4)

    assert call().equal(call())
    assert not call().equal(flash_attn.flash_attn_func(q, k, v))
    message = (
        "flash_attn_func: return_attn_probs must be False where dropout_p is above 0, since the "
        "weights are never in memory as a whole, got True"
    )
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        flash_attn.flash_attn_func(q, k, v, 0.4, return_attn_probs=True)


def test_compiled(device):
    q, k, v = make(*[(2, 5, 2, 16)] * 3, device=device)
    graph = torch.compile(flash_attn.flash_attn_func, backend="aot_eager", fullgraph=True)
    assert graph(q, k, v, causal=True).equal(flash_attn.flash_attn_func(q, k, v, causal=True))


# -------------------------------------------------------------------------------------------- cache


def rotated(rows, positions, cosine, sine, interleaved):
    """Turn rows (n, H, D) pair by pair in float64."""
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
            "k and v must be given both or not at all, got one of them",
        ),
        (
            {"cache_seqlens": None},
            ValueError,
            "cache_seqlens must be given where k is, got None",
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
            "cache_seqlens must be (2,) as q's batch tells, got (1,)",
        ),
        (
            {"cache_batch_idx": lengths(0, 3)},
            ValueError,
            "cache_batch_idx must be in [0, 2], since k_cache has 3 rows, got 3",
        ),
        (
            {"cache_leftpad": lengths(0, 6)},
            ValueError,
            "cache_leftpad must be in [0, 5], since the keys in the cache are so many, got 6",
        ),
        (
            {"block_table": lengths(0, 9).view(2, 1)},
            ValueError,
            "block_table must be in [0, 2], since k_cache has 3 rows, got 9",
        ),
        (
            {"block_table": lengths(0, 1).view(2, 1), "cache_leftpad": lengths(0, 0)},
            NotImplementedError,
            "cache_leftpad must be None where block_table is given, got a tensor",
        ),
        (
            {"k": torch.ones(2, 2, 3, 16)},
            ValueError,
            "k must be (2, 2, 2, 16) as q, k and k_cache tells, got (2, 2, 3, 16)",
        ),
        (
            {"v": torch.ones(2, 2, 2, 16).half()},
            TypeError,
            "v must be torch.float32 as v_cache is, got torch.float16",
        ),
        (
            {"v_cache": torch.zeros(3, 7, 2, 16)},
            ValueError,
            "v_cache must be (3, 8, 2, 16) as k_cache tells, got (3, 7, 2, 16)",
        ),
        (
            {"rotary_cos": torch.ones(8, 4)},
            ValueError,
            "rotary_cos and rotary_sin must be given both or not at all, got one of them",
        ),
        (
            {"rotary_cos": torch.ones(4, 4), "rotary_sin": torch.ones(4, 4)},
            ValueError,
            "cache_seqlens must be in [0, 2], since rotary_cos has 4 positions, got 3",
        ),
        (
            {"k": None, "v": None, "rotary_cos": torch.ones(8, 4), "rotary_sin": torch.ones(8, 4)},
            ValueError,
            "k must be given where rotary_cos is, got None",
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


def test_what_attention_refuses_is_not_written():
    keys, values = torch.zeros(2, 1, 8, 2, 16)
    k = torch.ones(1, 1, 2, 16)
    with pytest.raises(ValueError, match="query must have"):
        flash_attn_with_kvcache(torch.ones(1, 1, 3, 16), keys, values, k, k, cache_seqlens=0)
    assert not keys.any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: flash_attn.flash_attn_func(*torch.ones(3, 2, 4, 16)),
            "flash_attn_func: q must be (batch, seqlen, heads, head_dim), got (2, 4, 16)",
        ),
        (
            lambda: flash_attn.flash_attn_qkvpacked_func(torch.ones(1, 2, 2, 4, 16)),
            "flash_attn_qkvpacked_func: qkv must be (batch, seqlen, 3, heads, head_dim), "
            "got (1, 2, 2, 4, 16)",
        ),
        (
            lambda: flash_attn.flash_attn_varlen_kvpacked_func(
                torch.ones(1, 4, 16), torch.ones(1, 4, 16), *lengths(0, 1, 0, 1).view(2, 2), 1, 1
            ),
            "flash_attn_varlen_kvpacked_func: kv must be (total, 2, heads, head_dim), "
            "got (1, 4, 16)",
        ),
    ],
)
def test_layouts_are_refused(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


# ------------------------------------------------------------------------------ the package's place


def test_install():
    flash_attn.install()
    try:
        import flash_attn as package
        from flash_attn.bert_padding import pad_input
        from flash_attn.flash_attn_interface import flash_attn_varlen_func

        assert package.flash_attn_func is flash_attn.flash_attn_func
        assert package.flash_attn_with_kvcache is flash_attn_with_kvcache
        assert flash_attn_varlen_func is flash_attn.flash_attn_varlen_func
        assert pad_input is bert_padding.pad_input
        assert package.__version__.startswith("2.8")
    finally:
        flash_attn.uninstall()
    assert importlib.util.find_spec("flash_attn") is None


def test_install_beside_the_package(tmp_path, monkeypatch):
    (tmp_path / "flash_attn.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="flash_attn must not be installed, and it is"):
        flash_attn.install()


def test_padding(device):
    hidden = make((3, 5, 2), device=device).requires_grad_()
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]], device=device)
    packed, indices, starts, longest, used = bert_padding.unpad_input(hidden, mask)
    assert indices.tolist() == [0, 1, 6, 7, 8, 9]
    assert (starts.tolist(), longest, used.tolist()) == ([0, 2, 6, 6], 4, [2, 4, 0])
    assert starts.dtype == torch.int32
    restored = bert_padding.pad_input(packed, indices, 3, 5)
    assert restored.equal(hidden * mask[..., None])
    restored.sum().backward()
    assert hidden.grad.equal(mask[..., None].expand_as(hidden).to(hidden.dtype))
    unused = torch.zeros_like(mask)
    unused[2, 4] = 1
    _, indices, starts, longest, used = bert_padding.unpad_input(hidden, mask, unused)
    assert indices.tolist() == [0, 1, 6, 7, 8, 9, 14]
    assert (starts.tolist(), used.tolist()) == ([0, 2, 6, 7], [2, 4, 0])
