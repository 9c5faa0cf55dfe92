"""foo's operators as attention implementations of transformers: ``"foo"`` and ``"foo_flex"``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import (
    add_offsets_to_mask_function,
    and_masks,
    causal_mask_function,
    padding_mask_function,
    prepare_padding_mask,
    sdpa_mask,
    sliding_window_overlay,
)
from transformers.utils.import_utils import is_tracing

from foo_ops.integrations.transformers.cache import Integers
from foo_ops.integrations.transformers.replacement import has_numbers
from foo_ops.ops.attention.formula import given_options
from foo_ops.ops.flex_attention.dense import flex_attention

# --------------------------------------------------------------------------- foo::attention, sparse

# Sparse attention: an indexer chooses the keys that each query sees, by index or by block.


FEWEST_KEYS = 2048
SHARE = 8
"""Keys are gathered if there are `FEWEST_KEYS`, and queries see at most 1 / `SHARE` of them.

Measured on two cores of an AVX-512 machine in float32 and bfloat16, with 1 to 16 key heads and
head_dim 64 to 576: where queries see 1 of 8 keys, gathering is 1.1 to 8 times as fast as the mask,
with 1 of 32 it is 3 to 16 times, with 1 of 4 between 0.8 and 4 times. Below 2048 keys, several
queries are slower.
"""


def chosen_keys(indices: Tensor, count: int) -> Tensor:
    """Return the mask, (B, 1, Sq, count), that shows each query the keys with these indices.

    Indices out of range are ignored, as in the kernels that models choose keys for.
    """
    return scattered(indices, count).unsqueeze(1)


def chosen_blocks(indices: Tensor, block_size: int, count: int, heads: int) -> Tensor:
    """Return the mask, (B, heads, Sq, count), that shows each query the blocks with these indices.

    Args:
        indices: (B, groups, Sq, blocks); adjacent heads are a group.
        block_size: keys per block.
        count: the number of keys.
        heads: the number of query heads.
    """
    blocks = scattered(indices, -(-count // block_size))
    keys = blocks.repeat_interleave(block_size, dim=-1)[..., :count]
    return keys.repeat_interleave(heads // indices.shape[1], dim=1)


def scattered(indices: Tensor, count: int) -> Tensor:
    """Return bool (..., count), True at the indices in range."""
    # Indices out of range go to an extra column, which is cut off.
    is_none = (indices < 0) | (indices >= count)
    places = indices.long().masked_fill(is_none, count)
    shape = (*indices.shape[:-1], count + 1)
    return torch.zeros(shape, dtype=torch.bool, device=indices.device).scatter_(-1, places, True)[
        ..., :count
    ]


def shows_few(mask: Tensor, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a mask shows so few keys that they are gathered.

    The answer depends on the mask's values, so it is False while a graph is traced.
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
    """Call ``attend`` for each query with the keys that it sees; return (B, Sq, Hq, Dv)."""
    batch, _, queries, _ = mask.shape
    rows = []
    for row in range(batch):
        of_row = slice(row, row + 1)
        for place in range(queries):
            seen = mask[row, 0, place].nonzero().squeeze(-1)
            keys, values = (it[of_row].index_select(2, seen) for it in (key, value))
            rows.append(attend(query[of_row, :, place : place + 1], keys, values))
    return torch.cat(rows).unflatten(0, (batch, queries)).squeeze(2)


# --------------------------------------------------------------------------- foo::attention_varlen

# Sequences one behind the other, without padding between them.


class PackedSequences:
    """Takes the place of a mask in layers that are called with all sequences in one row.

    No tensor, so that other functions of attention refuse it.

    Attributes:
        starts: (B + 1,), int32: where the sequences start, and the end of the last one.
        longest: the largest of their lengths.
        window: of layers that see so many tokens on each side; None for all tokens.
    """

    def __init__(self, starts: Tensor, longest: int, window: int | None = None) -> None:
        self.starts, self.longest, self.window = starts, longest, window

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        dropout: float,
        others: Mapping[str, Any],
    ) -> Tensor:
        """Return the output, (1, tokens, H, D), of tensors (1, H, tokens, D).

        Raises:
            NotImplementedError: for dropout and other options; `apply` tries a layer first.
        """
        given = {**others, "dropout": dropout or None}
        if self.window is not None:
            given.pop("sliding_window", None)
        refuse_unsupported(given, "packed sequences")
        window = -1 if self.window is None else self.window
        rows = (it.transpose(1, 2).squeeze(0) for it in (query, key, value))
        output, _ = torch.ops.foo.attention_varlen.default(
            *rows, self.starts, self.starts,
            max_seqlen_q=self.longest, max_seqlen_k=self.longest, scale=scaling,
            window_left=window, window_right=window,
        )  # fmt: skip
        return output.unsqueeze(0)


# ----------------------------------------------------------------------------------- foo::attention

# foo::attention as an implementation of attention in transformers: ``attn_implementation="foo"``.
#
# transformers needs two functions of each implementation. One makes a mask, once per forward pass.
# The other computes attention, once per layer. It sees neither the cache nor the padding, so
# whatever its arguments do not contain must be in the mask.


NAME = "foo"

UNSUPPORTED = {
    "output_attentions": (
        "must be False, since the attention weights are never in memory as a whole"
    ),
    "cache": "must be None, since the pages of continuous batching are not supported",
    "sinks": "must be None; pass one sink for each head as s_aux",
}
"""Options that would change the result, and the reasons why they are not supported."""

HARMLESS = frozenset(
    {
        # For implementations without masks; our mask already contains this information.
        *("position_ids", "cache_position", "seq_idx"),
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
        # They select further outputs of a model, and how its loss is divided.
        *("output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch"),
        *("use_cache", "logits_to_keep"),
        # Inputs of a model that no attention reads.
        *("input_ids", "image_sizes", "grid_thw"),
        # Only flash-attn's gradients depend on it.
        "deterministic",
    }
)
"""Keywords that models pass to every implementation, and that do not change our results."""


def register() -> None:
    """Register ``attn_implementation="foo"`` with transformers; importing this package does it.

    The mask must be registered, too: otherwise a model gets no mask, and no error.
    """
    AttentionInterface.register(NAME, foo_attention_forward)
    AttentionMaskInterface.register(NAME, foo_mask)


def foo_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer, with the signature that transformers expects.

    Args:
        module: the layer; its attribute ``is_causal`` counts if the argument is None.
        query: (B, Hq, Sq, D), or (1, Hq, Sq, D) for the same queries in all of the batch.
        key: (B, Hkv, Sk, D), Hq a multiple of Hkv. The queries are the last of the Sk positions.
            `Integers` are read as int8 directly, unless there is a mask.
        value: (B, Hkv, Sk, Dv).
        attention_mask: bool, True = take part, or added to the scores; broadcasts to
            (B, Hq, Sq, Sk). It is complete: only without it do causality and window count.
        dropout: probability that a weight becomes zero.
        scaling: factor of the scores, by default 1 / sqrt(D).
        is_causal: a query sees no key behind its own position.
        sliding_window: the most keys that a causal query sees, the last at its own position.
        softcap: bounds the scores by a tanh.
        s_aux: (Hq,), the attention sinks: a logit of each head in the denominator only.
        position_bias: added to the scores, like the mask; broadcasts to (B, Hq, Sq, Sk).
        indices: (B, Sq, count), the keys that a query sees, among those that are not hidden from
            it; indices out of range are ignored.
        block_indices: (B, groups, Sq, count), the same by blocks of keys and groups of heads. The
            layer's ``indexer.block_size`` is the size of a block.
        others: further keywords from transformers. All but those in `HARMLESS` must be None or
            False.

    Returns:
        The output, (B, Sq, Hq, Dv) and contiguous, and None in place of the weights.

    Raises:
        NotImplementedError: for other keywords.
        ValueError, TypeError: as `foo_ops.attention`.
    """
    if isinstance(attention_mask, PackedSequences):
        unknown = (softcap, s_aux, position_bias, indices, block_indices)
        given = {"softcap, sinks, bias or indices": any(it is not None for it in unknown)}
        given["sliding_window"] = sliding_window
        return attention_mask.attend(query, key, value, scaling, dropout, {**others, **given}), None
    refuse_unsupported(others, NAME)
    chosen = keys_chosen(module, query, key, indices, block_indices)
    options: Mapping[str, Any]
    if attention_mask is None:
        causal = is_causal_without_mask(module, is_causal)
        options = lower_right(query.shape[2], key.shape[2], sliding_window) if causal else {}
    else:
        options, exact = getattr(attention_mask, BOUNDS, UNBOUNDED)
        attention_mask = None if exact else attention_mask
    bias = combine(combine(position_bias, attention_mask), chosen)
    # Gathered keys lose their positions, so the mask must contain everything that is hidden.
    has_all = chosen is not None and (attention_mask is not None or not options)
    attend = compute_sparse if has_all else compute
    softcap = softcap or 0.0
    return attend(query, key, value, bias, s_aux, scaling, dropout, softcap, options), None


def keys_chosen(
    module: Any,
    query: Tensor,
    key: Tensor,
    indices: Tensor | None,
    block_indices: Tensor | None,
) -> Tensor | None:
    """Return the mask of the keys that an indexer has chosen, or None if there is no indexer."""
    chosen = None if indices is None else chosen_keys(indices, key.shape[2])
    if block_indices is None:
        return chosen
    size = getattr(getattr(module, "indexer", None), "block_size", None)
    if size is None:
        raise NotImplementedError(
            f"attention of implementation {NAME!r}: block_indices must be None if the layer has "
            f"no indexer.block_size, got {type(block_indices).__name__}"
        )
    blocks = chosen_blocks(block_indices, size, key.shape[2], query.shape[1])
    return combine(chosen, blocks)


def compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float,
    options: Mapping[str, Any],
) -> Tensor:
    """Return the output of foo::attention as (B, Sq, Hq, Dv), contiguous."""
    heads = query.expand(key.shape[0], -1, -1, -1)
    given = given_options(scale=scaling, dropout_p=dropout, softcap=softcap, **options)
    if isinstance(key, Integers) and isinstance(value, Integers):
        if bias is None and not given.keys() & {"dropout_p", "is_causal"}:
            tensors = key.integers, value.integers, key.scales, value.scales
            output, _ = torch.ops.foo.attention_int8_cache.default(heads, *tensors, sinks, **given)
            return output.transpose(1, 2).contiguous()
        key, value = key.numbers(), value.numbers()
    output, _ = torch.ops.foo.attention.default(heads, key, value, bias, sinks=sinks, **given)
    return output.transpose(1, 2).contiguous()


def compute_sparse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float,
    options: Mapping[str, Any],
) -> Tensor:
    """Compute the same; if the mask shows few keys, gather them and read no others.

    Args:
        options: must hide nothing that the mask does not hide.
    """
    if mask is None or dropout or not shows_few(mask, query, key, value):
        return compute(query, key, value, mask, sinks, scaling, dropout, softcap, options)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return compute(query, key, value, None, sinks, scaling, 0.0, softcap, {})

    return attend_to_shown(attend, query.expand(key.shape[0], -1, -1, -1), key, value, mask)


def refuse_unsupported(options: Mapping[str, Any], implementation: str) -> None:
    """Raise NotImplementedError for the first option that may change the result."""
    for name, value in options.items():
        if value is None or value is False or name in HARMLESS:
            continue
        requirement = UNSUPPORTED.get(
            name, "must be None, since this option is unknown and may change the result"
        )
        came = "True" if value is True else type(value).__name__
        raise NotImplementedError(
            f"attention of implementation {implementation!r}: {name} {requirement}, got {came}"
        )


def is_causal_without_mask(module: torch.nn.Module, is_causal: bool | None) -> bool:
    """Whether a layer that gets no mask is causal, by the argument or else its own attribute."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return bool(causal) and leaves_masks_out(getattr(module, "config", None))


def leaves_masks_out(config: Any) -> bool:
    """Whether layers with this configuration treat a missing mask as a causal one.

    They do if a model class with this configuration supports PyTorch's ``sdpa``, or declares that
    it supports any implementation. All others get every mask; without one nothing is hidden.
    """
    config_class: Any = type(config)
    return class_leaves_masks_out(config_class)


@cache
def class_leaves_masks_out(config_class: Any) -> bool:
    models = [it for it in subclasses(PreTrainedModel) if it.config_class is config_class]
    return not models or any(
        it._supports_sdpa or getattr(it, "_supports_attention_backend", False) for it in models
    )


def subclasses(base: Any) -> Iterator[Any]:
    for each in base.__subclasses__():
        yield each
        yield from subclasses(each)


def combine(position_bias: Tensor | None, attention_mask: Tensor | None) -> Tensor | None:
    """Return one attn_bias with the effect of both."""
    if position_bias is None:
        return attention_mask
    if attention_mask is None:
        return position_bias
    if attention_mask.dtype == torch.bool and position_bias.dtype == torch.bool:
        return attention_mask & position_bias
    if attention_mask.dtype == torch.bool:
        return torch.where(attention_mask, position_bias, -math.inf)
    return position_bias + attention_mask


class Bounds(NamedTuple):
    """Bounds of a mask, so that a kernel need not visit the keys that it hides.

    Attributes:
        options: arguments for `foo_ops.attention` that show at least what the mask shows.
        exact: they show nothing more, so the mask need not be read.
    """

    options: Mapping[str, Any]
    exact: bool


BOUNDS = "_foo_bounds"
"""Attribute of a mask. Tensors that a model derives from it (a slice, a sum) do not have it."""

UNBOUNDED = Bounds({}, exact=False)


def lower_right(q_length: int, kv_length: int, window: int | None) -> dict[str, Any]:
    """Return options of a causal pattern whose last query and last key share a position."""
    if window is None and q_length == kv_length:
        return {"is_causal": True}
    if window is None and q_length == 1:
        return {}
    return {"window_left": -1 if window is None else window - 1, "window_right": 0}


def foo_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    **others: Any,
) -> Tensor | None:
    """Return the mask of a forward pass for transformers, or None where none is needed.

    Args:
        batch_size: B.
        q_length: Sq; the queries have the positions from ``q_offset`` on.
        kv_length: Sk; the keys have the positions from ``kv_offset`` on.
        q_offset: how many positions the cache has seen; a tensor for a static cache.
        kv_offset: how many positions a sliding cache has dropped.
        attention_mask: (B, positions), bool: False for padding. Positions behind it are hidden.
        local_size: length of the window or of the chunks that a query sees; None if it sees all.
        allow_is_causal_skip: the pattern is causal, and the model accepts None for it.
        allow_is_bidirectional_skip: the pattern is not causal, and the model accepts None for it.
        config: the model's configuration, which distinguishes windows and chunks.
        others: for `transformers.masking_utils.sdpa_mask`, mainly ``mask_function``.

    Returns:
        None, or bool of shape (B, 1, Sq, Sk), True = take part.
    """
    if not leaves_masks_out(config):
        allow_is_causal_skip = allow_is_bidirectional_skip = False
    inputs = [each for each in (q_offset, attention_mask) if isinstance(each, Tensor)]
    # A traced graph must not depend on values.
    readable = not any(is_tracing(each) for each in inputs)
    bounds = UNBOUNDED
    if readable and allow_is_bidirectional_skip:
        end = kv_offset + kv_length
        if reaches(local_size, end) and shows_all(attention_mask, kv_offset, end):
            return None
    elif readable and allow_is_causal_skip:
        bounds = causal_bounds(
            int(q_offset), q_length, kv_offset, kv_length, attention_mask, local_size, config
        )
        if bounds == Bounds(lower_right(q_length, kv_length, None), exact=True):
            return None
    mask = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,  # type: ignore[arg-type]  # the annotation lacks the tensor
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        **others,
    )
    if not is_tracing(mask):
        setattr(mask, BOUNDS, bounds)
    return mask


def causal_bounds(
    q_offset: int,
    q_length: int,
    kv_offset: int,
    kv_length: int,
    attention_mask: Tensor | None,
    local_size: int | None,
    config: Any,
) -> Bounds:
    """Return the bounds of a causal mask; the arguments are those of `foo_mask`."""
    end = q_offset + q_length
    shown = shows_all(attention_mask, kv_offset, end)
    if reaches(local_size, end):
        local_size = None
    if end == kv_offset + kv_length:
        exact = shown and (local_size is None or is_window(local_size, config))
        return Bounds(lower_right(q_length, kv_length, local_size), exact)
    if q_offset == kv_offset:
        # The first tokens in a static cache; the keys behind them are free places.
        return Bounds({"is_causal": True}, exact=shown and local_size is None)
    return UNBOUNDED


def reaches(local_size: int | None, end: int) -> bool:
    """Whether a window or chunk of this length contains all positions before ``end``."""
    return local_size is None or end <= local_size


def is_window(local_size: int, config: Any) -> bool:
    """Whether ``local_size`` is the length of a sliding window, and not of chunks."""
    chunk_size = getattr(config, "attention_chunk_size", None)
    return local_size == getattr(config, "sliding_window", None) and local_size != chunk_size


def shows_all(attention_mask: Tensor | None, start: int, end: int) -> bool:
    """Whether no position from ``start`` to ``end`` is padding."""
    if attention_mask is None:
        return True
    seen = attention_mask[:, start:end]
    return seen.shape[1] == end - start and bool(seen.all())


# --------------------------------------------------------------------------- foo_ops.flex_attention

# Masks stay functions, as transformers composes them, and are never in memory: kernels compute from
# positions, padding and offsets which keys a query sees, and skip blocks that are all hidden.


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
            f"attention of implementation {FLEX_NAME!r}: dropout must be 0, since a score_mod "
            f"cannot draw random numbers, got {dropout}"
        )
    shape = (key.shape[0], query.shape[1], query.shape[2], key.shape[2])
    biases = [] if position_bias is None else [position_bias]
    block_mask: BlockMask | Function | None
    if attention_mask is None:
        causal = is_causal_without_mask(module, is_causal)
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


# ------------------------------------------------------------ foo_ops.flex_attention, the functions


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
