"""foo::attention_varlen packs sequences, reads blocks, and does not read unused memory."""

import math

import pytest
import torch
import torch.nn.functional as F
from support.exact import assert_near
from torch.nn.utils.rnn import pad_sequence

import foo_ops
from foo_ops.testing import ATTENTION_VARLEN, reference
from foo_ops.testing.spec import random
from foo_ops.testing.specs.attention import random_bias, random_slopes
from foo_ops.testing.specs.attention_varlen import Pages, cumulative_lengths, varlen_sample

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = ATTENTION_VARLEN.dtypes
OPTIONS = {"window_left": 40, "window_right": 0, "softcap": 2.0, "scale": 0.5}


def call(sample, device):
    return sample.to(device).call(ATTENTION_VARLEN.operator)


def test_public_function(device):
    sample = varlen_sample(
        [(3, 5), (4, 2)], slopes=random_slopes(2), sinks=random_bias(2), used=(4, 2), **OPTIONS
    )(torch.float32).to(device)
    expected = sample.call(ATTENTION_VARLEN.operator)
    output = foo_ops.attention_varlen(*sample.inputs, **sample.keywords)
    assert torch.equal(output, expected[0])
    both = foo_ops.attention_varlen(*sample.inputs, **sample.keywords, return_logsumexp=True)
    assert isinstance(both, tuple)
    assert all(map(torch.equal, both, expected))


def test_by_hand(device):
    """One sequence has one key with any score; the other has two with scores 0 and ln 3."""
    query = torch.tensor([[[1.0]], [[1.0]]], device=device)
    key = torch.tensor([[[5.0]], [[0.0]], [[math.log(3.0)]]], device=device)
    value = torch.tensor([[[7.0]], [[4.0]], [[8.0]]], device=device)
    cu_seqlens_q, cu_seqlens_k = (
        torch.tensor(list_, dtype=torch.int32, device=device) for list_ in ([0, 1, 2], [0, 1, 3])
    )
    output, logsumexp = torch.ops.foo.attention_varlen(
        query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=1, max_seqlen_k=2, scale=1.0
    )
    assert output.flatten().tolist() == pytest.approx([7.0, 7.0], rel=1e-6)
    assert logsumexp.tolist() == [pytest.approx([5.0, math.log(4.0)], rel=1e-6)]


@pytest.mark.parametrize("window_right", [-1, 0])
def test_agrees_with_torch_on_padded_sequences(window_right, device):
    lengths = (7, 1, 70, 30)
    query, key, value = random("padded", *[(sum(lengths), 2, 8)] * 3, dtype=torch.float64)
    padded = [
        pad_sequence(tensor.split(lengths), batch_first=True).transpose(1, 2)
        for tensor in (query, key, value)
    ]
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None, None, None]
    if window_right == 0:
        mask = mask & torch.ones(max(lengths), max(lengths), dtype=torch.bool).tril()
    expected = F.scaled_dot_product_attention(*padded, attn_mask=mask).transpose(1, 2)
    starts = cumulative_lengths(lengths).to(device)
    output, _ = torch.ops.foo.attention_varlen(
        *(tensor.to(device) for tensor in (query, key, value)),
        *(starts, starts),
        max_seqlen_q=max(lengths),
        max_seqlen_k=max(lengths),
        window_right=window_right,
    )
    for rows, actual, length in zip(expected, output.cpu().split(lengths), lengths):
        torch.testing.assert_close(actual, rows[:length], rtol=0, atol=1e-13)


@pytest.mark.parametrize("queries", [1, 20])
def test_keys_of_sequences_are_split_at_their_own_places(queries, device):
    """With this many sequences, only those with many keys are split, in two."""
    lengths = (2100, 3000, 1030, *range(1, 18))
    starts = [cumulative_lengths(it).to(device) for it in ([queries] * len(lengths), lengths)]
    query, key, value = random(
        "split keys",
        *((rows, 2, 8) for rows in (queries * len(lengths), sum(lengths), sum(lengths))),
        dtype=torch.float64,
    )
    output, logsumexp = torch.ops.foo.attention_varlen(
        *(tensor.float().to(device) for tensor in (query, key, value)),
        *starts,
        max_seqlen_q=queries,
        max_seqlen_k=max(lengths),
    )
    parts = zip(query.split(queries), key.split(lengths), value.split(lengths), strict=True)
    scores = [torch.einsum("ihd,jhd->hij", part[0], part[1]) / 8**0.5 for part in parts]
    values = value.split(lengths)
    expected = [
        torch.einsum("hij,jhd->ihd", it.softmax(-1), v)
        for it, v in zip(scores, values, strict=True)
    ]
    torch.testing.assert_close(output.double().cpu(), torch.cat(expected), rtol=1e-5, atol=1e-5)
    sums = torch.cat([it.logsumexp(-1) for it in scores], 1)
    torch.testing.assert_close(logsumexp.double().cpu(), sums, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_sequence_is_what_attention_computes(dtype, device):
    sample = varlen_sample(
        [(70, 130)],
        heads=4,
        key_heads=2,
        slopes=random_slopes(1, 4),
        sinks=random_bias(4),
        **OPTIONS,
    )(dtype)
    query, key, value, *_, slopes, sinks = sample.exact().inputs
    expected = reference.attention(
        *(tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value)),
        *(None, slopes, sinks),
        **OPTIONS,
    )
    output, logsumexp = sample.to(device).call(ATTENTION_VARLEN.operator)
    assert_near(output.transpose(0, 1), expected[0][0], roundings=8)
    assert_near(logsumexp, expected[1][0], roundings=8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_contiguous_and_of_the_right_dtype(dtype, device):
    sample = varlen_sample([(5, 7), (3, 2)], heads=3, value_dim=4)(dtype)
    output, logsumexp = call(sample, device)
    assert (output.shape, output.dtype) == ((8, 3, 4), dtype)
    assert logsumexp.shape == (3, 8)
    assert logsumexp.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert output.is_contiguous()
    assert logsumexp.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pages", [None, *map(Pages, (1, 16, 64, 100))], ids=str)
def test_junk_beyond_the_keys_in_use_is_not_read(pages, dtype, device):
    """Unused keys are read neither forward nor backward, and their gradient is zero."""
    lengths, used = ((3, 20), (1, 70), (9, 5)), (10, 65, 0)
    sample = varlen_sample(lengths, used=used, pages=pages)(dtype).to(device).requiring_grad()
    outputs = sample.call(ATTENTION_VARLEN.operator)
    assert outputs[0].isfinite().all()
    (outputs[0].sum() + outputs[1].where(outputs[1].isfinite(), 0).sum()).backward()
    for tensor in sample.inputs[1:3]:
        assert tensor.isnan().any()
        assert (tensor.grad[tensor.isnan()] == 0).all()
        assert tensor.grad.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_see_nothing_are_zero(dtype, device):
    """Freed memory full of NaN shows whether these rows are written at all."""
    sample = varlen_sample([(5, 0), (0, 4), (70, 3), (2, 2)], window_right=0)(dtype).to(device)
    for _ in range(3):
        junk = [torch.full((77, 2, 16), math.nan, dtype=dtype, device=device) for _ in range(4)]
        del junk
        leaves = sample.requiring_grad()
        output, logsumexp = leaves.call(ATTENTION_VARLEN.operator)
        blind = torch.zeros(77, dtype=torch.bool, device=device)
        blind[: 5 + 67] = True
        assert (output[blind] == 0).all()
        assert (logsumexp[:, blind] == -math.inf).all()
        assert logsumexp[:, ~blind].isfinite().all()
        output.sum().backward()
        assert (leaves.inputs[0].grad[blind] == 0).all()
        assert all(tensor.grad.isfinite().all() for tensor in leaves.differentiable())


@pytest.mark.parametrize("paged", [False, True])
def test_no_sequences(paged, device):
    """Without sequences there are no queries, but there may be unused blocks."""
    query = torch.zeros(0, 2, 8, device=device, requires_grad=True)
    key = torch.randn((3, 4, 2, 8) if paged else (0, 2, 8), device=device, requires_grad=True)
    starts = torch.zeros(1, dtype=torch.int32, device=device)
    table = torch.zeros(0, 5, dtype=torch.int32, device=device) if paged else None
    output, logsumexp = torch.ops.foo.attention_varlen(
        query, key, key, starts, starts, None, table, max_seqlen_q=0, max_seqlen_k=0
    )
    assert output.shape == (0, 2, 8)
    assert logsumexp.shape == (2, 0)
    first = torch.autograd.grad(output.sum(), (query, key), create_graph=True)
    second = torch.autograd.grad(sum(gradient.sum() for gradient in first), (query, key))
    for gradients in (first, second):
        assert gradients[0].shape == query.shape
        assert torch.equal(gradients[1], torch.zeros_like(key))


def test_no_blocks(device):
    """A cache without blocks holds the keys of sequences without keys."""
    query = torch.randn(3, 2, 8, dtype=torch.float64, device=device, requires_grad=True)
    key = torch.zeros(0, 4, 2, 8, dtype=torch.float64, device=device, requires_grad=True)
    sinks = torch.zeros(2, dtype=torch.float64, device=device, requires_grad=True)
    starts_q, starts_k = (torch.tensor([0, end], device=device).int() for end in (3, 0))
    table = torch.full((1, 3), -1, dtype=torch.int32, device=device)
    output, logsumexp = torch.ops.foo.attention_varlen(
        *(query, key, key, starts_q, starts_k, None, table, None, sinks),
        max_seqlen_q=3,
        max_seqlen_k=0,
    )
    assert torch.equal(output, torch.zeros_like(output))
    inputs = (query, key, sinks)
    first = torch.autograd.grad(logsumexp.sum() + output.sum(), inputs, create_graph=True)
    assert first[0].eq(0).all()
    assert first[1].shape == key.shape
    assert first[2].tolist() == [3.0, 3.0]
    second = torch.autograd.grad(first[2].sum(), inputs)
    assert all((gradient == 0).all() for gradient in second)


def test_maxima_do_not_change_the_result(device):
    sample = varlen_sample([(3, 5), (70, 66), (1, 130)])(torch.float32)
    expected = call(sample, device)
    larger = varlen_sample([(3, 5), (70, 66), (1, 130)], max_seqlen_q=10_000, max_seqlen_k=2**31)(
        torch.float32
    )
    assert all(map(torch.equal, call(larger, device), expected))


def test_cache_that_grows(device):
    """Decoding token by token equals one causal pass over the whole sequence."""
    length, block_size = 23, 4
    query, key, value = random("decode", *[(length, 2, 8)] * 3, dtype=torch.float64)
    whole = torch.ops.foo.attention(
        *(tensor.transpose(0, 1).unsqueeze(0).to(device) for tensor in (query, key, value)),
        is_causal=True,
    )[0][0].transpose(0, 1)
    cache = torch.full((2, 9, block_size, 2, 8), math.nan, dtype=torch.float64, device=device)
    table = torch.tensor([[7, 2, 5, 0, 8, 1]], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    for position in range(length):
        block = int(table[0, position // block_size])
        cache[0, block, position % block_size] = key[position].to(device)
        cache[1, block, position % block_size] = value[position].to(device)
        output, _ = torch.ops.foo.attention_varlen(
            query[position : position + 1].to(device),
            *cache,
            *(starts, starts * 24),
            torch.tensor([position + 1], dtype=torch.int32, device=device),
            table,
            max_seqlen_q=1,
            max_seqlen_k=24,
            window_right=0,
        )
        torch.testing.assert_close(output[0], whole[position], rtol=0, atol=1e-13)


@pytest.mark.parametrize("position", range(3), ids=["query", "key", "value"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_stays_in_its_sequence(position, value, device):
    sample = varlen_sample([(5, 70), (66, 67), (3, 3)])(torch.float32)
    sample.inputs[position][10] = value
    output, _ = call(sample, device)
    rows = output.split([5, 66, 3])
    affected = 1 if position == 0 else 0
    for index, part in enumerate(rows):
        assert part.isfinite().all() == (index != affected)


# ------------------------------------------------------------------------------------- autograd


def test_change_of_a_saved_tensor_is_noticed(device):
    make = varlen_sample([(3, 5), (2, 4)], slopes=random_slopes(2), sinks=random_bias(2))
    for position in range(10):
        sample = make(torch.float32).to(device)
        inputs = [
            tensor.requires_grad_() * 1
            if tensor is not None and tensor.is_floating_point()
            else tensor
            for tensor in sample.inputs
        ]
        output, _ = torch.ops.foo.attention_varlen(*inputs, **sample.keywords)
        changed = [*inputs, output][position]
        if changed is None:
            continue
        with torch.no_grad():
            changed.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_changed_sequences_are_not_read_in_backward(device):
    """A detached alias changes unnoticed, so backward checks the sequences again."""
    sample = varlen_sample([(3, 5), (2, 4)])(torch.float32).to(device).requiring_grad()
    output, _ = sample.call(ATTENTION_VARLEN.operator)
    sample.inputs[4].data[1] = 1000
    with pytest.raises(ValueError, match=r"attention_varlen: cu_seqlens_k must not decrease"):
        output.sum().backward()
