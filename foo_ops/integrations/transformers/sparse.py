"""Sparse attention: an indexer chooses the keys that each query sees, by numbers or by blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foo_ops.integrations.transformers.replacement import has_numbers

FEWEST_KEYS = 2048
SHARE = 8
"""Keys are gathered where the queries see one of so many, or fewer.

Measured on two cores of an AVX-512 machine in float32 and bfloat16, with 1 to 16 heads of keys of
64 to 576 numbers: with one of 8 keys that is 1.1 to 8 times as fast as the mask, with one of 32
from 3 to 16 times, with one of 4 between 0.8 and 4 times. Below 2048 keys several queries lose.
"""


def chosen_keys(indices: Tensor, count: int) -> Tensor:
    """Return the mask, (B, 1, Sq, count), of queries that see the keys with these numbers.

    Numbers that no key has stand for none, as for the kernels that models choose keys for.
    """
    return scattered(indices, count).unsqueeze(1)


def chosen_blocks(indices: Tensor, block_size: int, count: int, heads: int) -> Tensor:
    """Return the mask, (B, heads, Sq, count), of queries that see blocks with these numbers.

    Args:
        indices: (B, groups, Sq, blocks); adjacent heads are a group.
        block_size: keys in a block.
        count: of all keys.
        heads: of the queries.
    """
    blocks = scattered(indices, -(-count // block_size))
    keys = blocks.repeat_interleave(block_size, dim=-1)[..., :count]
    return keys.repeat_interleave(heads // indices.shape[1], dim=1)


def scattered(indices: Tensor, count: int) -> Tensor:
    """Return bool (..., count), True at the indices that are in range."""
    # Indices that are not are written behind the rest.
    is_none = (indices < 0) | (indices >= count)
    places = indices.long().masked_fill(is_none, count)
    shape = (*indices.shape[:-1], count + 1)
    return torch.zeros(shape, dtype=torch.bool, device=indices.device).scatter_(-1, places, True)[
        ..., :count
    ]


def shows_few(mask: Tensor, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the keys that a mask shows are so few that they are gathered.

    The values tell, so they are not in graphs that are being traced.
    """
    if torch.compiler.is_compiling():
        return False
    batch, _, keys, _ = key.shape
    queries = query.shape[2]
    return (
        mask.dtype == torch.bool
        and mask.shape == (batch, 1, queries, keys)
        and key.shape[:3] == value.shape[:3]
        and keys >= max(FEWEST_KEYS, SHARE * queries)
        and has_numbers(mask)
        and SHARE * int(mask.count_nonzero()) <= batch * keys
    )


def attend_to_shown(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
) -> Tensor:
    """Return (B, Sq, Hq, Dv) of ``attend``, called for each query with the keys that it sees."""
    batch, _, queries, _ = mask.shape
    rows = []
    for row in range(batch):
        of_row = slice(row, row + 1)
        for place in range(queries):
            seen = mask[row, 0, place].nonzero().squeeze(-1)
            keys, values = (it[of_row].index_select(2, seen) for it in (key, value))
            rows.append(attend(query[of_row, :, place : place + 1], keys, values))
    return torch.cat(rows).unflatten(0, (batch, queries)).squeeze(2)
