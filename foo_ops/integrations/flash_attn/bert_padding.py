"""Remove padding from batches of sequences and restore it, as flash_attn.bert_padding does."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Return the rows of input (rows, ...) with these indices; has gradients."""
    return input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Return first_axis_dim rows: values in the rows with these indices, else 0; has gradients."""
    output = values.new_zeros(first_axis_dim, *values.shape[1:])
    return output.index_put((indices,), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the positions that are not padding.

    Args:
        hidden_states: (B, S, ...).
        attention_mask: (B, S), bool or int, 0 for padding.
        unused_mask: (B, S), not 0 for positions that are packed but unused.

    Returns:
        The packed rows, (total, ...); their indices among the B * S; where each sequence begins,
        (B + 1,) int32; the length of the longest; and how many of its rows each sequence uses.
    """
    kept = attention_mask != 0
    if unused_mask is not None:
        kept = kept | (unused_mask != 0)
    lengths = kept.sum(-1, dtype=torch.int32)
    used = (attention_mask != 0).sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    starts = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return hidden_states.flatten(0, 1)[indices], indices, starts, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put packed rows (total, ...) back into (batch, seqlen, ...), with zeros elsewhere."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.unflatten(0, (batch, seqlen))
