"""foo_ops.flex_attention as an implementation of attention in transformers: ``"foo_flex"``.

Masks stay functions, as transformers composes them, and are never in memory: kernels compute from
positions, padding and offsets which keys a query sees, and skip blocks that are all hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    add_offsets_to_mask_function,
    and_masks,
    causal_mask_function,
    padding_mask_function,
    prepare_padding_mask,
    sliding_window_overlay,
)
from transformers.utils.import_utils import is_tracing

from foo_ops.integrations.transformers.attention import (
    leaves_masks_out,
    refuse_unsupported,
    shows_all,
)
from foo_ops.ops.flex_attention.dense import flex_attention

FLEX_NAME = "foo_flex"
ANY_LENGTH = 1 << 30
"""Size of a block that contains all queries and keys."""

Function = Callable[..., Any]


def register_flex() -> None:
    """Register ``attn_implementation="foo_flex"``; importing the package does it."""
    AttentionInterface.register(FLEX_NAME, foo_flex_forward)
    AttentionMaskInterface.register(FLEX_NAME, foo_flex_mask)


class FunctionMask(BlockMask):
    """A mask function as a BlockMask, which models pass on unchanged.

    Seen as a BlockMask, it has a single block.
    """

    def __init__(self, mask_mod: Function, lengths: tuple[int, int], device: Any) -> None:
        one = torch.ones(1, 1, 1, dtype=torch.int32, device=device)
        first = torch.zeros(1, 1, 1, 1, dtype=torch.int32, device=device)
        blocks = (ANY_LENGTH, ANY_LENGTH)
        super().__init__(
            lengths, one, first, None, None, None, None, None, None, blocks, mask_mod=mask_mod
        )

    def contiguous(self) -> FunctionMask:
        """Return self, since generation calls this on every mask."""
        return self


def foo_flex_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Function = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: Any = "cpu",
    **others: Any,
) -> FunctionMask:
    """Compose the mask function of a forward pass, for transformers.

    Args:
        batch_size: unused, since the mask function gets the batch index.
        q_length: Sq; the queries have the positions from ``q_offset`` on.
        kv_length: Sk; the keys have the positions from ``kv_offset`` on.
        q_offset: how many positions the cache has seen; a tensor for a static cache.
        kv_offset: how many positions a sliding cache has dropped.
        mask_function: takes positions; returns whether a query sees a key that is not padding.
        attention_mask: (B, positions), bool: False for padding. Positions behind it are hidden.
        device: the model's device.
        others: unused; transformers passes them to all mask functions.
    """
    if attention_mask is not None and not shows_surely(attention_mask, kv_offset, kv_length):
        padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        assert padding is not None
        mask_function = and_masks(mask_function, padding_mask_function(padding))
    if isinstance(q_offset, Tensor):
        # The cache increments its tensor in place, before attention reads this one.
        q_offset = q_offset.clone()
    # The annotation lacks the tensor.
    shifted = add_offsets_to_mask_function(mask_function, q_offset, kv_offset)  # type: ignore[arg-type]
    return FunctionMask(shifted, (q_length, kv_length), device)


def shows_surely(attention_mask: Tensor, kv_offset: int, kv_length: int) -> bool:
    """Whether there is surely no padding; a traced graph must not depend on values."""
    return not is_tracing(attention_mask) and shows_all(
        attention_mask, kv_offset, kv_offset + kv_length
    )


def foo_flex_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer, with the signature that transformers expects.

    Args:
        module: the layer; its attribute ``is_causal`` counts if the argument is None.
        query: (B, Hq, Sq, D), or (1, Hq, Sq, D) for the same queries in all of the batch.
        key: (B, Hkv, Sk, D), Hq a multiple of Hkv. The queries are the last of the Sk positions.
        value: (B, Hkv, Sk, Dv).
        attention_mask: the result of `foo_flex_mask`, another BlockMask, or a tensor that
            broadcasts to (B, Hq, Sq, Sk): bool, True = take part, or added to the scores. It is
            complete: only without it do causality and window count.
        dropout: must be 0.
        scaling: factor of the scores, by default 1 / sqrt(D).
        is_causal: a query sees no key behind its own position.
        sliding_window: the most keys that a causal query sees, the last at its own position.
        softcap: bounds the scores by a tanh.
        s_aux: (Hq,), the attention sinks: a logit of each head in the denominator only.
        position_bias: added to the scores, like the mask; broadcasts to (B, Hq, Sq, Sk).
        others: further keywords from transformers.

    Returns:
        The output, (B, Sq, Hq, Dv) and contiguous, and None in place of the weights.

    Raises:
        NotImplementedError: for dropout, and keywords that may change the result.
        ValueError, TypeError: as `foo_ops.flex_attention`.
    """
    refuse_unsupported(others, FLEX_NAME)
    if dropout:
        raise NotImplementedError(
            f"attention of implementation {FLEX_NAME!r}: dropout must be 0, since no score_mod "
            f"draws numbers, got {dropout}"
        )
    shape = (key.shape[0], query.shape[1], query.shape[2], key.shape[2])
    biases = [] if position_bias is None else [position_bias]
    block_mask: BlockMask | Function | None
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal = causal and leaves_masks_out(getattr(module, "config", None))
        block_mask = lower_right_mask(shape[3] - shape[2], sliding_window) if causal else None
    elif isinstance(attention_mask, FunctionMask):
        block_mask = attention_mask.mask_mod
    elif isinstance(attention_mask, BlockMask):
        block_mask = attention_mask
    elif attention_mask.dtype == torch.bool:
        block_mask = table_mask(attention_mask.expand(shape))
    else:
        block_mask = None
        biases.append(attention_mask)
    output, logsumexp = flex_attention(
        query.expand(shape[0], -1, -1, -1), key, value,
        score_mod=score_function(softcap or None, [it.expand(shape) for it in biases]),
        block_mask=block_mask, scale=scaling, enable_gqa=True, return_lse=True,
    )  # fmt: skip
    assert isinstance(output, Tensor)
    if s_aux is not None:
        # The share of the keys beside a sink: exp(logsumexp) of exp(logsumexp) + exp(sink).
        share = torch.sigmoid(logsumexp - s_aux.to(logsumexp.dtype)[:, None])
        output = (output * share[..., None]).to(query.dtype)
    return output.transpose(1, 2).contiguous(), None


# --------------------------------------------------------------------------------- the functions


def lower_right_mask(offset: int, window: int | None) -> Function:
    """Make the mask_mod of a causal pattern whose last query and last key share a position."""
    pattern = causal_mask_function
    if window is not None:
        pattern = and_masks(pattern, sliding_window_overlay(window))
    return add_offsets_to_mask_function(pattern, offset, 0)


def table_mask(table: Tensor) -> Function:
    """Make the mask_mod that reads a user's mask, (B, Hq, Sq, Sk)."""
    return lambda batch, head, query, key: table[batch, head, query, key]


def score_function(softcap: float | None, biases: list[Tensor]) -> Function | None:
    """Make the score_mod of a softcap and of biases, (B, Hq, Sq, Sk) each."""
    if softcap is None and not biases:
        return None

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        for bias in biases:
            score = score + bias[batch, head, query, key]
        return score

    return score_mod
