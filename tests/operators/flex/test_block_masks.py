"""Block masks of every size and kind; left-out blocks are not read."""

import functools

import pytest
import torch
from support.flex_exact import (
    Tensors,
    assert_results,
    cotangents_of,
    exact_of,
    places,
    qkv,
    results_of,
)
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import foo_ops

DTYPE = torch.float32


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return (q - k).abs() < 20


def of_batch_and_head(b, h, q, k):
    return (q + 3 * b >= k) & (k >= 5 * h)


def nothing_for_some(b, h, q, k):
    return (q % 3 != 1) & (q - k > 10)


MASKS = {it.__name__: it for it in (causal, window, of_batch_and_head, nothing_for_some)}


def check(sizes, mask, sees, device, dtype=DTYPE, score=True, **shapes):
    """Compare a call with float64; its score_mod has a table with a gradient."""
    ours, exact = Tensors(device, dtype), Tensors("cpu", torch.float64, dtype)
    inputs = qkv(sizes, dtype, device, **shapes)
    functions, made = [], []
    for tensors in (ours, exact):
        table = tensors.new(inputs[0].shape[1], sizes[2] + sizes[3] + 1)
        function = lambda score, b, h, q, k, table=table: score + table[h, q - k]  # noqa: E731
        functions.append(function if score else None)
        made.append(tensors.made if score else [])
    cotangents = cotangents_of(inputs[0], inputs[2], dtype)
    call = functools.partial(
        foo_ops.flex_attention,
        score_mod=functions[0],
        block_mask=mask,
        enable_gqa=True,
        return_lse=True,
    )
    results = results_of(call, inputs, made[0], cotangents)
    expected = exact_of(inputs, made[1], cotangents, functions[1], sees)
    assert_results(results, expected, dtype)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    "blocks", [(1, 1), (7, 13), (16, 64), (64, 16), (128, 128), (33, 200), (256, 8), (300, 300)]
)
def test_sizes_of_blocks(blocks, name, device):
    sizes = (2, 2, 150, 170)
    mask = create_block_mask(MASKS[name], *sizes, device=device, BLOCK_SIZE=blocks)
    check(sizes, mask, MASKS[name], device)


def mirrored(b, h, q, k):
    """The first queries see the last of the first 1024 keys; further keys follow."""
    return q // 200 + k // 200 == 4


def middle(b, h, q, k):
    """The first and the last keys are unseen, and some in between."""
    return (q - k - 300).abs() < 70


@pytest.mark.parametrize("sees", [mirrored, middle, window])
@pytest.mark.parametrize("heads", [(1, 1), (2, 1)])
def test_sums_of_keys_in_chunks(sees, heads, device):
    """A chunk of queries sums only the keys it sees; its memory holds numbers of earlier calls."""
    sizes = (1, heads[0], 1100, 1150)
    before = [it.requires_grad_() for it in qkv(sizes, DTYPE, device, key_heads=heads[1])]
    output = foo_ops.flex_attention(*before, scale=3.0, enable_gqa=True)
    output.backward(torch.full_like(output, 1e6))
    mask = create_block_mask(sees, None, None, *sizes[2:], device=device)
    check(sizes, mask, sees, device, key_heads=heads[1])


@pytest.mark.parametrize("places", ["none", "batch", "head", "both"])
def test_a_function_alone_is_asked_for_each_row_and_head(places, device):
    """A window of keys that one batch row or head does not see is seen by others."""

    def mask_mod(b, h, q, k):
        shift = {"none": 0 * b, "batch": b, "head": h, "both": b + h}[places]
        return (q // 128 + k // 128 + shift) % 2 == 0

    check((2, 2, 300, 390), mask_mod, mask_mod, device)


@pytest.mark.parametrize("of_all", [(1, 1), (1, 2), (2, 1), (None, None)], ids=str)
@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 1), (1, 300), (300, 1), (127, 257), (129, 128), (256, 256)]
)
def test_lengths_and_batches(queries, keys, of_all, device):
    """A mask shared by all batch rows or heads is evaluated for the first of them."""

    def mask_mod(b, h, q, k):
        return q + 2 >= k

    mask = create_block_mask(mask_mod, *of_all, queries, keys, device=device)
    check((2, 2, queries, keys), mask, mask_mod, device)


@pytest.mark.parametrize(("batch", "heads"), [(1, 4), (2, 1), (2, 4)])
def test_own_masks_of_rows_and_heads_with_shared_key_heads(batch, heads, device):
    sizes = (2, 4, 140, 150)

    def mask_mod(b, h, q, k):
        return (q + 30 * (b % batch) >= k) & (k >= 9 * (h % heads))

    mask = create_block_mask(mask_mod, *sizes, device=device, BLOCK_SIZE=32)
    check(sizes, mask, mask_mod, device, key_heads=2, value_dim=24)


@pytest.mark.parametrize("sizes", [(2, 2, 0, 5), (0, 2, 3, 5), (2, 0, 3, 5)], ids=str)
def test_no_queries_rows_or_heads(sizes, device):
    inputs = qkv(sizes, DTYPE, device, key_heads=sizes[1])
    table = torch.ones(3, device=device, requires_grad=True)
    output, lse = foo_ops.flex_attention(
        *inputs, lambda score, b, h, q, k: score + table[k % 3], causal, return_lse=True
    )
    assert output.shape == (*sizes[:3], 16)
    assert lse.shape == sizes[:3]
    grads = torch.autograd.grad((output.sum() + lse.sum()), (*inputs, table))
    assert all(not it.any() for it in grads)


def test_no_keys(device):
    inputs = qkv((2, 2, 3, 0), DTYPE, device)
    slopes = torch.ones(2, device=device, requires_grad=True)
    output, lse = foo_ops.flex_attention(
        *inputs, lambda score, b, h, q, k: score + slopes[h], causal, return_lse=True
    )
    assert not output.any()
    assert lse.isneginf().all()
    assert not any(it.any() for it in torch.autograd.grad(output.sum(), (*inputs, slopes)))


@pytest.mark.parametrize("blocks", [None, 16, 128])
def test_queries_that_see_nothing(blocks, device):
    sizes = (1, 2, 140, 130)

    def sees_nothing(b, h, q, k):
        return (q >= 1000) & (k >= 0)

    mask = sees_nothing
    if blocks is not None:
        mask = create_block_mask(sees_nothing, *sizes, device=device, BLOCK_SIZE=blocks)
    inputs = qkv(sizes, DTYPE, device)
    output, lse = foo_ops.flex_attention(*inputs, block_mask=mask, return_lse=True)
    assert not output.any()
    assert lse.isneginf().all()
    grads = torch.autograd.grad((output.sum(), lse.exp().sum()), inputs)
    assert not any(it.any() for it in grads)


def listed(rows, device, columns=None):
    """Return counts (1, 1, rows) and indices (1, 1, rows, columns) of lists of blocks."""
    columns = columns or max(1, *map(len, rows))
    indices = torch.zeros(1, 1, len(rows), columns, dtype=torch.int32)
    for place, row in enumerate(rows):
        indices[0, 0, place, : len(row)] = torch.tensor(row)
    counts = torch.tensor([[list(map(len, rows))]], dtype=torch.int32)
    return counts.to(device), indices.to(device)


def covered(rows, blocks, queries, keys):
    sees = torch.zeros(queries, keys, dtype=torch.bool)
    for place, row in enumerate(rows):
        for block in row:
            own = slice(place * blocks[0], (place + 1) * blocks[0])
            sees[own, block * blocks[1] : (block + 1) * blocks[1]] = True
    return sees


@pytest.mark.parametrize("blocks", [(16, 32), (48, 20), (128, 64)])
def test_masks_made_by_hand(blocks, device):
    """Without a mask_mod, listed blocks are seen whole, in whatever order."""
    queries, keys = 5 * blocks[0] - 3, 4 * blocks[1] - 5
    rows = [[2, 0], [], [3], [1, 3, 0, 2], [1]]
    counts, indices = listed(rows, device, columns=4)
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=blocks, seq_lengths=(queries, keys))
    check((2, 2, queries, keys), mask, covered(rows, blocks, queries, keys), device)


@pytest.mark.parametrize("blocks", [(16, 16), (48, 20), (128, 128)])
def test_full_blocks_are_not_asked_and_others_not_visited(blocks, device):
    """mask_mod is False in full blocks, and NaN and infinities fill the blocks left out."""
    queries, keys = 4 * blocks[0] - 1, 5 * blocks[1] - 2
    partial, full = [[0], [0, 1], [], [3]], [[1], [], [0], [1, 0]]

    def mask_mod(b, h, q, k):
        is_partial = torch.zeros_like(q, dtype=torch.bool)
        for row, columns in enumerate(partial):
            for column in columns:
                own = (q // blocks[0] == row) & (k // blocks[1] == column)
                is_partial = is_partial | own
        return is_partial & ((q + k) % 3 != 0)

    mask = BlockMask.from_kv_blocks(
        *listed(partial, device, 5),
        *listed(full, device, 5),
        BLOCK_SIZE=blocks,
        mask_mod=mask_mod,
        seq_lengths=(queries, keys),
    )
    _, _, q, k = places(1, 1, queries, keys)
    sees = mask_mod(0, 0, q, k) | covered(full, blocks, queries, keys)
    check((2, 2, queries, keys), mask, sees, device)
    check((2, 2, queries, keys), mask, sees, device, score=False)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("by_blocks", [True, False])
def test_keys_of_blocks_that_are_left_out_do_not_show(by_blocks, poison, device):
    """Windows of 128 keys that no query sees are not read, and their gradients are zero."""
    sizes = (1, 2, 260, 512)

    def mask_mod(b, h, q, k):
        return (k < 128) | (k >= 384)

    mask = mask_mod
    if by_blocks:
        mask = create_block_mask(mask_mod, *sizes, device=device)
    inputs = qkv(sizes, DTYPE, device)
    with torch.no_grad():
        clean = [it.clone() for it in inputs]
        for tensor in inputs[1:]:
            tensor[:, :, 128:384] = poison
        for tensor in clean[1:]:
            tensor[:, :, 128:384] = 0
    cotangents = cotangents_of(inputs[0], inputs[2], DTYPE)

    def score_mod(score, b, h, q, k):
        return torch.tanh(score) * 2

    call = functools.partial(
        foo_ops.flex_attention, score_mod=score_mod, block_mask=mask, return_lse=True
    )
    results = results_of(call, inputs, [], cotangents)
    expected = exact_of(clean, [], cotangents, score_mod, mask_mod)
    assert_results(results, expected, DTYPE)
    assert not any(it[:, :, 128:384].any() for it in results[3:])


def test_masks_of_more_keys_and_queries_than_there_are(device):
    """Blocks behind the last key are ignored, and rows behind the last query are not read."""
    sizes, blocks = (1, 1, 20, 20), {"query_block": 16, "key_block": 16}
    counts, indices = listed([[0, 1, 7], [1, 9], [5]], device)
    query, key, value = qkv(sizes, DTYPE, device)
    cotangents = cotangents_of(query, value, DTYPE)

    def call(query, key, value):
        return torch.ops.foo.flex_attention(query, key, value, [], counts, indices, **blocks)

    results = results_of(call, (query, key, value), [], cotangents)
    sees = covered([[0, 1], [1]], (16, 16), 20, 20)
    expected = exact_of((query, key, value), [], cotangents, None, sees)
    assert_results(results, expected, DTYPE)
