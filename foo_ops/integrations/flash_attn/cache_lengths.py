"""foo::flash_attn_cache_lengths copies the lengths in a cache, or refuses those that do not fit.

What writes to the cache takes the copy: in a compiled graph, too, all is checked before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foo_ops import library

CALLER = "flash_attn_with_kvcache"
NAME = "foo::flash_attn_cache_lengths"
library.define(
    NAME,
    "(Tensor lengths, Tensor blocks, Tensor? leftpad, *, SymInt new, SymInt queries, "
    "SymInt block_size, SymInt num_blocks, SymInt positions, bool is_paged) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def checked_lengths(
    lengths: Tensor,
    blocks: Tensor,
    leftpad: Tensor | None,
    *,
    new: int,
    queries: int,
    block_size: int,
    num_blocks: int,
    positions: int,
    is_paged: bool,
) -> Tensor:
    """Return a copy of the lengths, once all that a call writes and reads is in the cache.

    Args:
        lengths: (B,) int64, how many positions of the cache each sequence fills.
        blocks: (B, blocks) int64, those of each sequence; only those that it uses are looked at.
        leftpad: (B,) int64, or None.
        new, queries: how many keys are appended to each sequence, and how many queries it has.
        block_size, num_blocks: the cache's.
        positions: how many have angles, or -1 where nothing is turned.
        is_paged: whether the blocks are called block_table, else cache_batch_idx.
    """
    result: Tensor = torch.ops.foo.flash_attn_cache_lengths.default(
        lengths,
        blocks,
        leftpad,
        new=new,
        queries=queries,
        block_size=block_size,
        num_blocks=num_blocks,
        positions=positions,
        is_paged=is_paged,
    )
    return result


# ----------------------------------------------------------------------------------------- kernel


def are_inside(
    lengths: Any,
    blocks: Any,
    leftpad: Any,
    new: Any,
    queries: Any,
    block_size: Any,
    num_blocks: Any,
    positions: Any,
) -> bool:
    """Whether the cache and the tables have all that is written and read."""
    room = blocks.shape[1] * block_size - new
    if positions >= 0:
        room = min(room, positions - max(new, queries))
    for batch in range(lengths.size):
        if lengths[batch] < 0 or lengths[batch] > room:
            return False
        keys = lengths[batch] + new
        if leftpad is not None and (leftpad[batch] < 0 or leftpad[batch] > keys):
            return False
        for column in range(blocks.shape[1]):
            block = blocks[batch, column]
            if column * block_size < keys and (block < 0 or block >= num_blocks):
                return False
    return True


def refuse(
    lengths: Tensor,
    blocks: Tensor,
    leftpad: Tensor | None,
    new: int,
    queries: int,
    block_size: int,
    num_blocks: int,
    positions: int,
    is_paged: bool,
) -> None:
    """Raise what is wrong with a call that is not `are_inside`."""
    capacity, keys = blocks.shape[1] * block_size, lengths + new
    reason = f"the cache has {capacity} positions"
    _require_range("cache_seqlens", lengths, capacity - new, reason)
    if positions >= 0:
        reason = f"rotary_cos has {positions} positions"
        _require_range("cache_seqlens", lengths, positions - max(new, queries), reason)
    if leftpad is not None:
        # One by one: each sequence has its own number of keys.
        for pad, count in zip(leftpad, keys.tolist()):
            reason = "the keys in the cache are so many"
            _require_range("cache_leftpad", pad[None], count, reason)
    starts = torch.arange(blocks.shape[1], device=lengths.device) * block_size
    used, name = blocks[starts < keys[:, None]], "block_table" if is_paged else "cache_batch_idx"
    _require_range(name, used, num_blocks - 1, f"k_cache has {num_blocks} rows")


def _require_range(name: str, tensor: Tensor, most: int, reason: str) -> None:
    outside = tensor[(tensor < 0) | (tensor > most)]
    if outside.numel():
        raise ValueError(
            f"{CALLER}: {name} must be in [0, {most}], since {reason}, got {int(outside[0])}"
        )


@library.tile_kernel(tiles=lambda lengths: lengths.size, check=are_inside, refuse=refuse)
def kernel(
    lengths: Any,
    blocks: Any,
    leftpad: Any,
    new: Any,
    queries: Any,
    block_size: Any,
    num_blocks: Any,
    positions: Any,
    is_paged: Any,
    output: Any,
    tiles: Any,
) -> None:
    for batch in tiles:
        output[batch] = lengths[batch]


# ------------------------------------------------------------------------------------------- fake


@library.register_fake(NAME)
def fake(lengths: Tensor, blocks: Tensor, leftpad: Tensor | None, **options: Any) -> Tensor:
    _require_rows("lengths", lengths, 1, lengths)
    _require_rows("blocks", blocks, 2, lengths)
    if leftpad is not None:
        _require_rows("leftpad", leftpad, 1, lengths)
    return lengths.new_empty(lengths.shape)


def _require_rows(name: str, tensor: Tensor, dimensions: int, lengths: Tensor) -> None:
    if tensor.dim() != dimensions or tensor.shape[0] != lengths.shape[0]:
        shape = "(B,)" if dimensions == 1 else "(B, blocks)"
        raise ValueError(
            f"flash_attn_cache_lengths: {name} must be {shape} for the B of lengths, got "
            f"{list(tensor.shape)}"
        )


library.register_kernel(NAME, ("cpu", "foo"), kernel)


@library.register_flops(NAME)
def flops(*shapes: Any, **options: Any) -> int:
    """Count nothing: it compares integers."""
    return 0
