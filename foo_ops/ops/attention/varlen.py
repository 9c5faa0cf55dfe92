"""foo::attention_varlen computes attention for packed sequences and for keys in pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from foo_ops import _C, library
from foo_ops.compat import FakeTensor
from foo_ops.library.tensor_numbers import SEEDED
from foo_ops.ops.arguments import compute_type
from foo_ops.ops.attention.dense import NUMBERS, OUTPUTS, RANDOM_TAGS, TAGS, empty_gradient
from foo_ops.ops.attention.formula import (
    PACKED,
    AttentionOptions,
    composite,
    composite_gradients,
    given_options,
    make_dropout_mask,
    schema,
)
from foo_ops.ops.attention.rules import (
    make_packed_forward_rule,
    padded,
    register_heads,
    vmap_packed_backward,
)

OPTIONS = f"SymInt max_seqlen_q, SymInt max_seqlen_k, {schema(*PACKED)}"
INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "Tensor? seqused_k=None, Tensor? block_table=None, Tensor? alibi_slopes=None, "
    "Tensor? sinks=None"
)
library.define("foo::attention_varlen", f"({INPUTS}, *, {OPTIONS}) -> {OUTPUTS}", tags=RANDOM_TAGS)
library.define(
    "foo::attention_varlen_seeded",
    f"({INPUTS}, {NUMBERS}, *, {OPTIONS}) -> {OUTPUTS}",
    tags=TAGS,
)
library.define(
    "foo::attention_varlen_backward",
    "(Tensor grad_output, Tensor grad_logsumexp, Tensor query, Tensor key, Tensor value, "
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_k, Tensor? block_table, "
    "Tensor? alibi_slopes, Tensor? sinks, Tensor output, Tensor logsumexp, Tensor? seed, "
    f"Tensor? dropout_heads=None, *, {OPTIONS}) -> (Tensor grad_query, Tensor grad_key, "
    "Tensor grad_value, Tensor grad_alibi_slopes, Tensor grad_sinks)",
    tags=TAGS,
)


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None = None,
    dropout_p: float = 0.0,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    return_logsumexp: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention of packed sequences, each with its own lengths, or with keys in pages.

    Sequence b has the queries cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1, and its keys likewise.

    Args:
        query: (total_q, Hq, D), float16, bfloat16, float32 or float64, D up to 256.
        key: (total_k, Hkv, D); Hq must be a multiple of Hkv. With block_table
            (num_blocks, block_size, Hkv, D).
        value: (total_k, Hkv, Dv), or (num_blocks, block_size, Hkv, Dv).
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32, from 0 to total_q and total_k.
        seqused_k: (B,) int32, how many of its keys a sequence uses; by default all.
        block_table: (B, max_blocks) int32: key j of sequence b lies in block
            block_table[b, j // block_size], in its row j % block_size. The number of keys is that
            of seqused_k, or else of cu_seqlens_k.
        alibi_slopes, sinks: (Hq,) or (B, Hq).
        max_seqlen_q, max_seqlen_k: no sequence may be longer.
        scale, dropout_p, window_left, window_right, softcap, return_logsumexp: as in
            foo_ops.attention; windows and ALiBi are aligned to each sequence's last keys.

    Returns:
        The output, (total_q, Hq, Dv), and with ``return_logsumexp`` the logsumexp, (Hq, total_q).
        Both can be differentiated, as those of foo_ops.attention.

    Raises:
        ValueError: for shapes that do not fit together, options out of range, and for sequences
            and blocks that are not inside the tensors.
        TypeError: for dtypes.

    Example:
        >>> query, key, value = torch.randn(3, 12, 8, 64).unbind()
        >>> starts = torch.tensor([0, 5, 12], dtype=torch.int32)
        >>> foo_ops.attention_varlen(
        ...     query, key, value, starts, starts, max_seqlen_q=7, max_seqlen_k=7, window_right=0
        ... ).shape
        torch.Size([12, 8, 64])
    """
    options = given_options(
        scale=scale,
        dropout_p=dropout_p,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
    )
    output, logsumexp = torch.ops.foo.attention_varlen.default(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k,
        block_table,
        alibi_slopes,
        sinks,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        **options,
    )
    return (output, logsumexp) if return_logsumexp else output


# ------------------------------------------------------------------------------------ fake kernels


def check_inputs(*inputs: Any, **options: Any) -> None:
    """Refuse shapes, dtypes and options that do not fit, without reading the tensors' values."""
    _C.check_attention("foo::attention_varlen", inputs, options)


def make_fake(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def fake(*inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
        _C.check_attention(name, inputs, options)
        query, _, value = inputs[:3]
        total, heads = query.shape[:2]
        output = query.new_empty(total, heads, value.shape[-1])
        return output, query.new_empty((heads, total), dtype=compute_type(query.dtype))

    return fake


for name in ("foo::attention_varlen", "foo::attention_varlen_seeded"):
    library.register_fake(name, make_fake(name))


@library.register_fake("foo::attention_varlen_backward")
def fake_backward(*saved: Any, **options: Any) -> tuple[Tensor, ...]:
    _C.check_attention("foo::attention_varlen_backward", saved, options)
    query, key, value, *_, alibi_slopes, sinks = saved[2:11]
    tensors = (query, key, value, alibi_slopes, sinks)
    return tuple(empty_gradient(tensor, query) for tensor in tensors)


# ---------------------------------------------------------------------------------------- autograd


@dataclasses.dataclass(frozen=True)
class Sequence:
    """One of the packed sequences.

    Attributes:
        queries: the slice of its queries.
        keys: (count,) int64, the rows of its keys in `key_rows`.
        arguments: query, key, value, bias, slopes and sinks, as foo::attention takes them.
        options: the other arguments of the composites.
    """

    queries: slice
    keys: Tensor
    arguments: list[Any]
    options: dict[str, Any]


def sequences_of(*inputs: Any, **options: Any) -> Iterator[Sequence]:
    """Yield packed sequences one by one, with torch's own operators.

    The arguments are those of foo::attention_varlen_seeded.
    """
    query, key, value, starts_q, starts_k, used, block_table, *added = padded(inputs, 11)
    alibi_slopes, sinks, seed, dropout_heads = added
    given = AttentionOptions(**{name: options[name] for name in PACKED if name in options})
    offsets_q, offsets_k = starts_q.tolist(), starts_k.tolist()
    lengths = (starts_k.diff() if used is None else used).tolist()
    mask_shape = (len(lengths), query.shape[1], options["max_seqlen_q"], options["max_seqlen_k"])
    dropout_mask = make_dropout_mask(query, mask_shape, seed, dropout_heads, given.dropout_p)
    for index, (first, end, count) in enumerate(zip(offsets_q, offsets_q[1:], lengths)):
        if block_table is None:
            keys = torch.arange(offsets_k[index], offsets_k[index] + count, device=key.device)
        else:
            keys = rows_in_blocks(block_table[index], key.shape[1], count)
        tensors = (
            query[first:end],
            key_rows(key, block_table).index_select(0, keys),
            key_rows(value, block_table).index_select(0, keys),
        )
        of_heads = [
            it[index] if it is not None and it.dim() == 2 else it for it in (alibi_slopes, sinks)
        ]
        mask = dropout_mask
        if mask is not None:
            mask = mask[index : index + 1, :, : end - first, :count]
        yield Sequence(
            slice(first, end),
            keys,
            [*map(as_batch, tensors), None, *of_heads],
            {"dropout_mask": mask, "options": given},
        )


def as_batch(packed: Tensor) -> Tensor:
    """Turn (length, heads, dim) into (1, heads, length, dim)."""
    return packed.transpose(0, 1).unsqueeze(0)


def as_packed(batch: Tensor) -> Tensor:
    return batch.squeeze(0).transpose(0, 1)


def key_rows(tensor: Tensor, block_table: Tensor | None) -> Tensor:
    """Return keys or values as (rows, heads, dim), whether packed or in pages."""
    return tensor if block_table is None else tensor.flatten(0, 1)


def rows_in_blocks(blocks: Tensor, block_size: int, count: int) -> Tensor:
    """Return the rows of a sequence's first ``count`` keys, among the rows of all blocks."""
    used = blocks[: -(-count // block_size)].long().unsqueeze(-1)
    within = torch.arange(block_size, device=blocks.device)
    return (used * block_size + within).flatten()[:count]


def zeros_of(tensor: Tensor) -> Tensor:
    """Return zeros that are part of a graph, even if no sequence adds to them."""
    return torch.cat((torch.zeros_like(tensor), tensor[:0]))


def with_part(gradient: Tensor, part: Tensor | None, index: int) -> Tensor:
    """Add a sequence's gradient of slopes or sinks, which may be the sequence's own."""
    if part is None:
        return gradient
    return gradient.select_scatter(part, 0, index) if gradient.dim() == 2 else gradient + part


def composite_seeded(*inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Compute foo::attention_varlen_seeded with torch's own operators, a sequence at a time."""
    query, _, value, *_ = inputs
    outputs = [query.new_zeros((0, query.shape[1], value.shape[-1]))]
    sums = [query.new_zeros((query.shape[1], 0), dtype=compute_type(query.dtype))]
    for sequence in sequences_of(*inputs, **options):
        output, logsumexp = composite(*sequence.arguments, **sequence.options)
        outputs.append(as_packed(output))
        sums.append(logsumexp.squeeze(0))
    return torch.cat(outputs), torch.cat(sums, dim=-1)


def composite_backward(
    grad_output: Tensor, grad_logsumexp: Tensor, *saved: Any, **options: Any
) -> tuple[Tensor, ...]:
    """Compute foo::attention_varlen_backward with torch's own operators."""
    inputs, numbers = saved[:9], saved[11:]
    query, key, value, *_, block_table, alibi_slopes, sinks = inputs
    grad_query = [query[:0]]
    grad_key, grad_value = (zeros_of(key_rows(tensor, block_table)) for tensor in (key, value))
    grad_slopes = query.new_empty(0) if alibi_slopes is None else torch.zeros_like(alibi_slopes)
    grad_sinks = query.new_empty(0) if sinks is None else torch.zeros_like(sinks)
    for index, sequence in enumerate(sequences_of(*inputs, *numbers, **options)):
        rows = sequence.queries
        found = composite_gradients(
            as_batch(grad_output[rows]),
            grad_logsumexp[:, rows].unsqueeze(0),
            *sequence.arguments,
            **sequence.options,
        )
        grad_query.append(as_packed(found.query))
        grad_key = grad_key.index_add(0, sequence.keys, as_packed(found.key))
        grad_value = grad_value.index_add(0, sequence.keys, as_packed(found.value))
        grad_slopes = with_part(grad_slopes, found.alibi_slopes, index)
        grad_sinks = with_part(grad_sinks, found.sinks, index)
    return (
        torch.cat(grad_query),
        grad_key.view_as(key),
        grad_value.view_as(value),
        grad_slopes,
        grad_sinks,
    )


library.register_autograd(
    "foo::attention_varlen_seeded",
    "foo::attention_varlen_backward",
    composite=composite_seeded,
)
library.register_autograd("foo::attention_varlen_backward", composite=composite_backward)
SEEDED["foo::attention_varlen"] = "foo::attention_varlen_seeded"


# ----------------------------------------------------------------- sharding, vmap, autocast, FLOPs

HEADS = "h ., h ., h ., ., ., ., ., h, h"
register_heads(
    "foo::attention_varlen",
    tensors=9,
    sharding=f"{HEADS}, ., . h -> h ., h .",
    of_gradients=f"h ., h ., {HEADS}, h ., h ., ., . h -> h ., h ., h ., h, h",
)
library.register_autocast("foo::attention_varlen")
library.register_autocast("foo::attention_varlen_seeded")
for name in ("foo::attention_varlen", "foo::attention_varlen_seeded"):
    library.register_vmap(name, make_packed_forward_rule(name))
library.register_vmap("foo::attention_varlen_backward", vmap_packed_backward)


def _scores(starts_q: Tensor, starts_k: Tensor, used: Tensor | None, **options: Any) -> int:
    """Count the pairs of a query and a key of its sequence; for fake tensors, the most possible."""
    if starts_q.is_meta or isinstance(starts_q, FakeTensor):
        return (starts_q.shape[0] - 1) * options["max_seqlen_q"] * options["max_seqlen_k"]
    keys = starts_k.diff() if used is None else used
    return int((starts_q.diff().long() * keys.long()).sum())


@library.register_flops("foo::attention_varlen", "foo::attention_varlen_seeded", takes_tensors=True)
def flops(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    used: Tensor | None = None,
    *others: Any,
    out_val: Any = None,
    **options: Any,
) -> int:
    """Count 2 * heads * (D + Dv) operations for each pair of a query and a key."""
    pairs = _scores(starts_q, starts_k, used, **options)
    return 2 * query.shape[1] * pairs * (query.shape[2] + value.shape[-1])


@library.register_flops("foo::attention_varlen_backward", takes_tensors=True)
def backward_flops(
    grad_output: Tensor,
    grad_logsumexp: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    used: Tensor | None = None,
    *others: Any,
    out_val: Any = None,
    **options: Any,
) -> int:
    """Count three products over the head dimension and two over the value's."""
    pairs = _scores(starts_q, starts_k, used, **options)
    return 2 * query.shape[1] * pairs * (3 * query.shape[2] + 2 * value.shape[-1])
