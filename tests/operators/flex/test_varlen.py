"""Functions of packed sequences, and of keys in pages: positions count within a sequence."""

import functools
import itertools

import pytest
import torch
from support.flex_exact import Tensors, assert_results, cotangents_of, exact_of, qkv, results_of

import foo_ops

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LENGTHS = ((3, 5), (70, 66), (0, 7), (1, 130), (7, 0), (0, 0), (129, 64))
HEADS = 4


def starts_of(lengths, device):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def causal(b, h, q, k):
    return q >= k


def of_sequence_and_head(b, h, q, k):
    return (q + 2 * b >= k) & (k % 5 != h)


def last_keys(lengths):
    return lambda b, h, q, k: k >= lengths[b] - 40


def with_table(new):
    table = new(len(LENGTHS), HEADS, 260)
    return lambda score, b, h, q, k: score + table[b, h, q - k]


def with_slopes(new):
    slopes = new(len(LENGTHS))
    return lambda score, b, h, q, k: score - slopes[b].abs() * (q - k).abs() / 8


def with_cap(new):
    cap = new()
    return lambda score, b, h, q, k: cap * torch.tanh(score / cap)


SCORE_MODS = {"none": lambda new: None, "table": with_table, "slopes": with_slopes, "cap": with_cap}
MASK_MODS = {
    "none": lambda device: None,
    "causal": lambda device: causal,
    "of sequence and head": lambda device: of_sequence_and_head,
    "last keys": lambda device: last_keys(torch.tensor([k for _, k in LENGTHS], device=device)),
}


def paged(tensor, lengths, size):
    """Return pages with the sequences in them, the last first, and the page table."""
    counts = [-(-length // size) for length in lengths]
    pages = tensor.new_full((sum(counts) + 1, size, *tensor.shape[1:]), float("nan"))
    table = torch.full((len(lengths), max(counts)), -1, dtype=torch.int32)
    free = sum(counts)
    for row, (count, sequence) in enumerate(zip(counts, tensor.split(list(lengths)))):
        for column in range(count):
            table[row, column] = free
            part = sequence[column * size : (column + 1) * size]
            pages[free, : len(part)] = part
            free -= 1
    return pages, table


def unpaged(pages, table, lengths):
    size = pages.shape[1]
    parts = []
    for row, length in zip(table.tolist(), lengths):
        blocks = pages[row[: -(-length // size)]].flatten(0, 1)
        parts.append(blocks[:length])
    return torch.cat(parts)


def check(score_mod, mask_mod, dtype, device, page=None, key_heads=2):
    ours, exact = Tensors(device, dtype), Tensors("cpu", torch.float64, dtype)
    functions = [SCORE_MODS[score_mod](it.new) for it in (ours, exact)]
    sees = MASK_MODS[mask_mod]("cpu")
    query_lengths, key_lengths = zip(*LENGTHS)
    sizes = (1, HEADS, sum(query_lengths), sum(key_lengths))
    packed = [
        it.detach().squeeze(0).transpose(0, 1).requires_grad_()
        for it in qkv(sizes, dtype, device, key_heads, value_dim=24)
    ]
    inputs, table = list(packed), None
    if page is not None:
        for place in (1, 2):
            pages, table = paged(packed[place].detach(), key_lengths, page)
            inputs[place] = pages.requires_grad_()
        table = table.to(device)
    call = functools.partial(
        foo_ops.flex_attention_varlen,
        cu_seqlens_q=starts_of(query_lengths, device),
        cu_seqlens_k=starts_of(key_lengths, device),
        score_mod=functions[0],
        mask_mod=MASK_MODS[mask_mod](device),
        block_table=table,
        max_seqlen_q=max(query_lengths),
        max_seqlen_k=max(key_lengths),
        return_lse=True,
    )
    grad_output, grad_lse = cotangents_of(*(it.transpose(0, 1) for it in packed[::2]), dtype)
    cotangents = [grad_output.transpose(0, 1), grad_lse]
    results = results_of(call, inputs, ours.made, cotangents)
    if page is not None:
        results[3:5] = [unpaged(it, table, key_lengths) for it in results[3:5]]

    expected, sums = [], [torch.zeros_like(it) for it in exact.made]
    squares = [0.0] * (5 + len(sums))
    queries = [it.split(list(query_lengths)) for it in (packed[0], cotangents[0], grad_lse.mT)]
    keys = [it.split(list(key_lengths)) for it in packed[1:]]
    for number, (query, grad, lse, key, value) in enumerate(zip(*queries, *keys)):
        own = [it.transpose(0, 1).unsqueeze(0) for it in (query, key, value, grad)]
        found = exact_of(
            own[:3],
            exact.made,
            (own[3], lse.mT.unsqueeze(0)),
            functions[1],
            sees,
            first_batch=number,
        )
        output, logsumexp, *gradients = (it.squeeze(0) for it in found.results[:5])
        parts = [it.transpose(0, 1) for it in (output, *gradients)]
        expected.append([parts[0], logsumexp.mT, *parts[1:]])
        sums = [total + it for total, it in zip(sums, found.results[5:])]
        squares = [total + size**2 for total, size in zip(squares, found.sizes)]
    joined = [torch.cat(it) for it in zip(*expected)]
    joined[1] = joined[1].mT
    found = type(found)([*joined, *sums], [it**0.5 for it in squares])
    assert_results(results, found, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask_mod", MASK_MODS)
@pytest.mark.parametrize("score_mod", SCORE_MODS)
def test_packed(score_mod, mask_mod, dtype, device):
    check(score_mod, mask_mod, dtype, device)


@pytest.mark.parametrize("page", [1, 16, 100, 128])
@pytest.mark.parametrize(
    ("score_mod", "mask_mod"),
    [("table", "causal"), ("slopes", "last keys"), ("none", "of sequence and head")],
)
def test_pages(score_mod, mask_mod, page, device):
    check(score_mod, mask_mod, torch.float32, device, page)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pages_in_every_dtype(dtype, device):
    check("table", "causal", dtype, device, 16)


@pytest.mark.parametrize("key_heads", [1, 4])
def test_key_heads(key_heads, device):
    check("table", "of sequence and head", torch.float32, device, key_heads=key_heads)


def test_keys_that_a_window_leaves_out_do_not_show(device):
    """Windows of 128 keys that a mask_mod hides are not read: they contain NaN."""
    length = 640
    tensors = [torch.randn(length, 2, 16, device=device) for _ in range(3)]
    for tensor in tensors[1:]:
        tensor[:384] = float("nan")
    starts = torch.tensor([0, length], dtype=torch.int32, device=device)
    output, lse = foo_ops.flex_attention_varlen(
        *tensors,
        starts,
        starts,
        mask_mod=lambda b, h, q, k: k >= 384,
        max_seqlen_q=length,
        max_seqlen_k=length,
        return_lse=True,
    )
    assert output.isfinite().all()
    assert lse.isfinite().all()
