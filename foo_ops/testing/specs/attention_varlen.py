"""Attention over packed sequences and over caches in the table of operators."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from foo_ops.testing import reference
from foo_ops.testing.arguments import junk
from foo_ops.testing.spec import Dtypes, Maker, OpSpec, Sample, Tensors, random
from foo_ops.testing.specs.attention import (
    Rounding,
    Sum,
    TensorMaker,
    gradient_sums,
    output_budget,
    random_bias,
    random_slopes,
    stored_gradients,
    tensor_at,
)
from foo_ops.testing.specs.linear import integers
from foo_ops.testing.tolerance import compute_type

# ------------------------------------------------------------------- foo::attention_varlen, samples


@dataclasses.dataclass(frozen=True)
class Pages:
    """Blocks of a cache, assigned to sequences in random order; the last two stay unused.

    Attributes:
        block_size: how many keys a block holds.
        shared: whether all sequences share their first block.
    """

    block_size: int
    shared: bool = False

    def table(self, lengths: Sequence[int]) -> Tensor:
        """Return the block table of sequences of these lengths, -1 in unused entries."""
        counts = [-(-length // self.block_size) for length in lengths]
        generator = torch.Generator().manual_seed(sum(counts))
        order = torch.randperm(sum(counts), generator=generator).to(torch.int32)
        table = torch.full((len(lengths), max(counts)), -1, dtype=torch.int32)
        for row, blocks in zip(table, order.split(counts)):
            row[: len(blocks)] = blocks
        if self.shared:
            table[:, 0] = table[0, 0]
        return table

    def store(self, tensor: Tensor, table: Tensor, lengths: Sequence[int]) -> Tensor:
        """Store packed sequences in a cache (blocks, block_size, ...), with junk elsewhere."""
        blocks = int((table >= 0).sum()) + 2
        cache = junk(tensor, (blocks, self.block_size, *tensor.shape[1:]))
        for row, sequence in zip(table, tensor.split(list(lengths))):
            for block, part in zip(row, sequence.split(self.block_size)):
                cache[block, : len(part)] = part
        return cache


def varlen_sample(
    lengths: Sequence[tuple[int, int]],
    *,
    heads: int = 2,
    key_heads: int | None = None,
    head_dim: int = 16,
    value_dim: int | None = None,
    used: Sequence[int] | None = None,
    pages: Pages | None = None,
    slopes: TensorMaker | None = None,
    sinks: TensorMaker | None = None,
    **keywords: Any,
) -> Callable[[torch.dtype], Sample]:
    """Make a function that draws a sample of packed sequences.

    Args:
        lengths: the numbers of queries and keys of each sequence.
        used: how many of its keys each sequence uses; the others are junk.
        pages: stores the keys in blocks.
    """
    query_lengths, key_lengths = [queries for queries, _ in lengths], [keys for _, keys in lengths]
    key_heads = heads if key_heads is None else key_heads
    value_dim = head_dim if value_dim is None else value_dim
    longest = {
        "max_seqlen_q": max(query_lengths),
        "max_seqlen_k": max(key_lengths if used is None else used),
    }

    def make(dtype: torch.dtype) -> Sample:
        query, key, value = random(
            f"attention_varlen {lengths} {heads} {key_heads} {head_dim} {value_dim}",
            (sum(query_lengths), heads, head_dim),
            (sum(key_lengths), key_heads, head_dim),
            (sum(key_lengths), key_heads, value_dim),
            dtype=dtype,
        )
        table = seqused = None
        if used is not None:
            seqused = torch.tensor(used, dtype=torch.int32)
            for tensor in (key, value):
                for sequence, count in zip(tensor.split(key_lengths), used):
                    sequence[count:] = junk(sequence, sequence[count:].shape)
        if pages is not None:
            table = pages.table(key_lengths)
            key, value = (pages.store(tensor, table, key_lengths) for tensor in (key, value))
        cumulative = (cumulative_lengths(query_lengths), cumulative_lengths(key_lengths))
        others = (None if make is None else make(dtype) for make in (slopes, sinks))
        return Sample((query, key, value, *cumulative, seqused, table, *others), longest | keywords)

    return make


def cumulative_lengths(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


MIXED = ((3, 5), (70, 66), (1, 130), (7, 2), (129, 64))
WITH_EMPTY = ((0, 0), (4, 0), (5, 6), (0, 7), (3, 3), (0, 0))
DECODING = ((1, 1), (1, 511), (1, 513), (1, 1300), (2, 2100))
SAME_PAGES = ((9, 20), (3, 30), (6, 17))
SMALL = ((2, 3), (0, 2), (3, 4))
BLOCK_SIZES = (1, 16, 64, 100)
ALL: dict[str, Any] = {
    "heads": 4,
    "key_heads": 2,
    "sinks": random_bias(4),
    "softcap": 3.0,
    "window_left": 50,
    "window_right": 0,
}

SAMPLES: dict[str, Callable[[torch.dtype], Sample]] = {
    "one sequence": varlen_sample([(9, 11)]),
    "one token": varlen_sample([(1, 1)]),
    "several sequences": varlen_sample(MIXED),
    "maxima above the lengths": varlen_sample(MIXED, max_seqlen_q=500, max_seqlen_k=1000),
    "value dim 5 of 37": varlen_sample(MIXED, head_dim=37, value_dim=5),
    "head dim 128": varlen_sample(MIXED[:3], head_dim=128),
    "empty sequences": varlen_sample(WITH_EMPTY),
    "empty sequences, sinks": varlen_sample(WITH_EMPTY, sinks=random_bias(2)),
    "only empty sequences": varlen_sample([(0, 0), (0, 0)]),
    "no queries": varlen_sample([(0, 5), (0, 3)]),
    "no keys": varlen_sample([(3, 0), (5, 0)]),
    "no heads": varlen_sample(MIXED, heads=0),
    "grouped heads": varlen_sample(MIXED, heads=6, key_heads=2),
    "window": varlen_sample(MIXED, window_left=20, window_right=3),
    "window, causal": varlen_sample(MIXED, heads=4, key_heads=1, window_right=0),
    "softcap": varlen_sample(MIXED, softcap=2.0, scale=0.5),
    "slopes (H)": varlen_sample(MIXED, slopes=random_slopes(2)),
    "slopes (B, H)": varlen_sample(MIXED, slopes=random_slopes(5, 2), window_right=0),
    "sinks": varlen_sample(MIXED, sinks=random_bias(2, float32=True)),
    "sinks (B, H)": varlen_sample(MIXED, sinks=random_bias(5, 2), window_right=0),
    "all options": varlen_sample(MIXED, **ALL, slopes=random_slopes(5, 4)),
    "1 query, many keys": varlen_sample(DECODING, heads=4, key_heads=1),
    "1 query, many keys, all options": varlen_sample(
        DECODING, **(ALL | {"window_left": 1900}), slopes=random_slopes(4)
    ),
    "seqused_k": varlen_sample(MIXED, used=(5, 40, 65, 0, 63)),
    "seqused_k, all options": varlen_sample(
        MIXED, **ALL, slopes=random_slopes(4), used=(5, 40, 129, 1, 64)
    ),
    **{
        f"blocks of {size}": varlen_sample(MIXED, heads=4, key_heads=2, pages=Pages(size))
        for size in BLOCK_SIZES
    },
    **{
        f"blocks of {size}, seqused_k, all options": varlen_sample(
            MIXED, **ALL, slopes=random_slopes(5, 4), used=(4, 66, 100, 0, 1), pages=Pages(size)
        )
        for size in BLOCK_SIZES
    },
    **{
        f"blocks of {size}, 1 query, many keys": varlen_sample(
            DECODING, heads=4, key_heads=2, pages=Pages(size), window_right=0
        )
        for size in (16, 100)
    },
    "blocks, empty sequences": varlen_sample(WITH_EMPTY, pages=Pages(4)),
    "blocks, no keys": varlen_sample([(3, 0), (5, 0)], pages=Pages(4)),
    "blocks that sequences share": varlen_sample(SAME_PAGES, pages=Pages(16, shared=True)),
    "blocks of the same number": varlen_sample(
        SAME_PAGES, **ALL, slopes=random_slopes(3, 4), used=(17, 25, 17), pages=Pages(16)
    ),
    "small, all options": varlen_sample(
        SMALL, **(ALL | {"window_left": 2}), slopes=random_slopes(4), head_dim=3, value_dim=2
    ),
    "small, blocks": varlen_sample(
        SMALL, heads=2, key_heads=1, head_dim=3, used=(3, 1, 2), pages=Pages(2), window_right=0
    ),
}


# -------------------------------------------------------------------- foo::attention_varlen, errors


def parts(sample: Sample) -> Iterator[tuple[reference.Sequence, Sample]]:
    """Yield each sequence, and its equivalent sample of foo::attention."""
    *tensors, slopes, sinks = sample.inputs
    query, key, value, cu_seqlens_q, cu_seqlens_k, seqused, table = tensors
    assert query is not None
    assert key is not None
    assert value is not None
    assert cu_seqlens_q is not None
    assert cu_seqlens_k is not None
    options = dict(sample.keywords)
    del options["max_seqlen_q"], options["max_seqlen_k"]
    dropout_mask = options.pop("dropout_mask", None)
    for sequence in reference.sequences(cu_seqlens_q, cu_seqlens_k, seqused, table, key):
        if dropout_mask is not None:
            options["dropout_mask"] = dropout_mask[
                :, sequence.queries, : len(sequence.keys)
            ].unsqueeze(0)
        own = sequence.select(query, key, value)
        of_heads = map(sequence.of_heads, (slopes, sinks))
        yield sequence, Sample((*own, None, *of_heads), dict(options))


def varlen_output_budget(sample: Sample, dtype: torch.dtype) -> Tensors:
    query, value = tensor_at(sample, 0), tensor_at(sample, 2)
    output = query.new_zeros(*query.shape[:2], value.shape[-1])
    logsumexp = query.new_zeros(query.shape[1], query.shape[0])
    for sequence, part in parts(sample):
        output_part, logsumexp_part = output_budget(part, dtype)
        output[sequence.queries] = output_part.squeeze(0).transpose(0, 1)
        logsumexp[:, sequence.queries] = logsumexp_part.squeeze(0)
    return output, logsumexp


def varlen_gradient_budget(sample: Sample, dtypes: Dtypes, cotangents: Tensors) -> Tensors:
    """Bound the gradients by the sums of the sequences' bounds, where these share an input."""
    dtype, (grad_output, grad_logsumexp) = dtypes[0], cotangents
    assert dtype is not None
    leaves = sample.requiring_grad()
    with torch.enable_grad():
        sequences = list(parts(leaves))
    selected, sums = [], []
    for sequence, part in sequences:
        own = grad_output[sequence.queries].transpose(0, 1), grad_logsumexp[:, sequence.queries]
        part_sums = gradient_sums(part, dtype, tuple(tensor.unsqueeze(0) for tensor in own))
        for tensor, part_sum in zip(part.inputs, part_sums):
            if tensor is not None and part_sum is not None:
                selected.append(tensor)
                sums.append(part_sum)

    def added(terms: list[Tensor]) -> Tensors:
        """Add the parts' gradients by autograd, through the selection of the sequences."""
        return torch.autograd.grad(
            selected, leaves.differentiable(), terms, retain_graph=True, materialize_grads=True
        )

    values, sizes, errors = (
        added([getattr(sum_, name) for sum_ in sums]) for name in ("value", "size", "error")
    )
    adding = Rounding.of(dtype).summing(len(sequences))
    totals = (
        Sum(value, size, error + adding * size) for value, size, error in zip(values, sizes, errors)
    )
    return stored_gradients(
        sample,
        dtypes,
        [
            next(totals) if tensor is not None and tensor.requires_grad else None
            for tensor in leaves.inputs
        ],
    )


ATTENTION_VARLEN = OpSpec(
    operator=torch.ops.foo.attention_varlen.default,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sizes=(),
    samples=SAMPLES,
    essential=("small, all options", "small, blocks"),
    in_layouts=(
        "small, all options",
        "small, blocks",
        "value dim 5 of 37",
        "blocks of the same number",
    ),
    sized=lambda dtype, size: varlen_sample(
        [(size, size + 3), (size // 2, size)], **ALL, slopes=random_slopes(2, 4), head_dim=8
    )(dtype),
    large=varlen_sample(
        [(200, 230), (1, 700), (90, 90)], **ALL, slopes=random_slopes(4), pages=Pages(16)
    ),
    reference=reference.attention_varlen,
    output_budget=varlen_output_budget,
    gradient_budget=varlen_gradient_budget,
)


# ------------------------------------------------------------------------ foo::attention_int8_cache

# It is attention to integers times their scales, sequence by sequence. A score and a weight are
# rounded once more each, for their scales, so twice the bounds of attention suffice.


def cache_sample(
    name: str,
    *,
    batch: int = 2,
    heads: int = 4,
    key_heads: int = 2,
    queries: int = 1,
    keys: int = 11,
    head_dim: int = 16,
    value_dim: int | None = None,
    page_size: int = 0,
    has_sinks: bool = False,
    used: list[int] | None = None,
    **options: Any,
) -> Maker:
    """Make queries and a cache for ``keys`` keys per sequence, in pages if they have a size."""
    dims = head_dim, head_dim if value_dim is None else value_dim

    def make(dtype: torch.dtype) -> Sample:
        leading = (batch, key_heads, keys)
        if page_size:
            pages = -(-keys // page_size)
            leading = (batch * pages, page_size, key_heads)
        (query,) = random(name, (batch, heads, queries, head_dim), dtype=dtype)
        cache = [integers(name, (*leading, dim), torch.int8) for dim in dims]
        key_scale, value_scale = random(name, leading, leading, dtype=compute_type(dtype))
        inputs: list[Tensor | None] = [query, *cache, key_scale.abs() / 64, value_scale / 64]
        inputs.append(random(name, (heads,), dtype=dtype)[0] if has_sinks else None)
        inputs.append(None if used is None else torch.tensor(used, dtype=torch.int32))
        if page_size:
            table = torch.arange(batch * pages, dtype=torch.int32).flip(0)
            inputs.append(table.reshape(batch, pages))
        return Sample(tuple(inputs), options)

    return make


def cache_parts(sample: Sample) -> Iterator[Sample]:
    """Yield the equivalent sample of attention for each sequence."""
    query, *cache = sample.inputs[:5]
    sinks, used, table = (*sample.inputs, None, None, None)[5:8]
    for i in range(len(query)):
        own = [it[i] if table is None else reference.in_order(it, table[i]) for it in cache]
        length = own[0].shape[1] if used is None else int(used[i])
        key, value, key_scale, value_scale = (it[None, :, :length] for it in own)
        tensors = (key * key_scale.unsqueeze(-1), value * value_scale.unsqueeze(-1))
        yield Sample((query[i : i + 1], *tensors, None, None, sinks), sample.keywords)


def for_each(function: Callable[[Sample], Tensors], sample: Sample) -> Tensors:
    return tuple(torch.cat(tensors) for tensors in zip(*map(function, cache_parts(sample))))


def exact_cache(*inputs: Any, **options: Any) -> Tensors:
    return for_each(lambda part: part.call(reference.attention), Sample(inputs, options))


def cache_budget(sample: Sample, dtype: torch.dtype) -> Tensors:
    return tuple(2 * it for it in for_each(lambda part: output_budget(part, dtype), sample))


ATTENTION_INT8_CACHE = OpSpec(
    operator=torch.ops.foo.attention_int8_cache.default,
    reference=exact_cache,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sizes=(1, 7, 19),
    sized=lambda dtype, size: cache_sample(
        "sized", queries=size, keys=2 * size, has_sinks=True, used=[size, 2 * size], window_right=0
    )(dtype),
    samples={
        "one of one": cache_sample("one of one", batch=1, heads=1, key_heads=1),
        "heads of 37 and 5": cache_sample("37", head_dim=37, value_dim=5, keys=140),
        "twelve heads on one": cache_sample("twelve", heads=12, key_heads=1, keys=300, head_dim=64),
        "key splits": cache_sample("splits", batch=1, heads=2, keys=2100, head_dim=32),
        "many queries": cache_sample("many", queries=70, keys=150, window_right=0),
        "all options": cache_sample(
            "all", keys=200, has_sinks=True, used=[200, 0], window_left=90, window_right=0,
            softcap=3.0, scale=0.3,
        ),
        "pages": cache_sample("pages", keys=60, page_size=16, head_dim=24, used=[3, 60]),
        "small pages": cache_sample(
            "small pages", keys=150, page_size=5, queries=2, used=[150, 131], window_right=0
        ),
    },
    essential=("size7", "one of one", "pages"),
    large=cache_sample("large", keys=700, batch=3, used=[700, 13, 500]),
    differentiable=False,
    output_budget=cache_budget,
)  # fmt: skip


# -------------------------------------------------------------------------------- foo::cache_append


def dense_sample(
    name: str, batch: int, heads: int, capacity: int, new: int, sizes: tuple[int, int] = (5, 5)
) -> Maker:
    """Make a cache in which the first sequence becomes full, the next one key less, and so on."""

    def make(dtype: torch.dtype) -> Sample:
        leading = [(batch, heads, length) for length in (capacity, new)]
        shapes = [(*each, size) for each in leading for size in sizes]
        positions = (capacity - new - torch.arange(batch)).clamp(min=0)
        return Sample((*random(name, *shapes, dtype=dtype), positions))

    return make


def paged_sample(name: str, blocks: int, block_size: int, new: int, dtype_: torch.dtype) -> Maker:
    """Make two sequences with half of the blocks each, in reversed order."""

    def make(dtype: torch.dtype) -> Sample:
        leading = [(2 * blocks, block_size, 3), (2, new, 3)]
        shapes = [(*each, size) for each in leading for size in (7, 4)]
        table = torch.arange(2 * blocks).flip(0).reshape(2, blocks).to(dtype_)
        positions = torch.tensor([0, blocks * block_size - new]).to(dtype_)
        return Sample((*random(name, *shapes, dtype=dtype), positions, table))

    return make


def sized_caches(dtype: torch.dtype, size: int) -> Sample:
    return dense_sample("sized", 2, 3, 2 * size, size, (size, size + 1))(dtype)


CACHE_APPEND = OpSpec(
    operator=torch.ops.foo.cache_append.default,
    reference=reference.cache_append,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8),
    sized=sized_caches,
    samples={
        "one": dense_sample("one", 3, 2, 9, 1, (19, 35)),
        "nothing": dense_sample("nothing", 2, 2, 4, 0),
        "all": dense_sample("all", 1, 2, 6, 6),
        "pages": paged_sample("pages", 3, 4, 7, torch.int32),
        "one in pages": paged_sample("one in pages", 2, 5, 1, torch.int64),
        "nothing in pages": paged_sample("nothing in pages", 2, 3, 0, torch.int64),
    },
    essential=("size7", "one", "pages"),
    large=dense_sample("large", 4, 8, 200, 100, (64, 64)),
    differentiable=False,
)
