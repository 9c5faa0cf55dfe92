"""The functions of flash_attn against softmax(scale q k^T) v in float64, one head at a time."""

import importlib.util
import itertools
import re

import pytest
import torch
from support.flash_attn_exact import DTYPES, assert_near, expected, make

from foo_ops.integrations import flash_attn
from foo_ops.integrations.flash_attn import bert_padding, flash_attn_with_kvcache

OPTIONS = (
    {},
    {"causal": True},
    {"window_size": (3, 0)},
    {"window_size": (2, 4)},
    {"window_size": (-1, 2), "softcap": 5.0},
    {"causal": True, "window_size": (5, 5), "softmax_scale": 0.3},
)


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
    """Gradients match the formula, also through both packed forms."""
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
        "flash_attn_func: return_attn_probs must be False if dropout_p is above 0, since the "
        "attention weights are never in memory as a whole, got True"
    )
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        flash_attn.flash_attn_func(q, k, v, 0.4, return_attn_probs=True)


def test_compiled(device):
    q, k, v = make(*[(2, 5, 2, 16)] * 3, device=device)
    graph = torch.compile(flash_attn.flash_attn_func, backend="aot_eager", fullgraph=True)
    assert graph(q, k, v, causal=True).equal(flash_attn.flash_attn_func(q, k, v, causal=True))


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32)


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
    with pytest.raises(RuntimeError, match="install: the flash_attn package is installed; "):
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
