"""foo::flex_attention and foo::flex_attention_varlen in the table of operators."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from foo_ops.testing import reference
from foo_ops.testing.spec import Dtypes, OpSpec, Sample, Tensors, random
from foo_ops.testing.specs.attention import Rounding, Sum, gradient_sums, output_budget
from foo_ops.testing.specs.attention_varlen import MIXED, WITH_EMPTY, Pages, varlen_sample

# -------------------------------------------------------------------- foo::flex_attention, programs


# A softcap, and a table of relative positions, with or without a batch dimension; gradients.
SCORE_MOD = """\
{compute} input score
{compute} number 0
{compute} mul 0 1
{compute} tanh 2
{compute} number 1
{compute} mul 3 4
int32 input batch
int32 input head
int32 input query
int32 input key
int32 sub 8 9
{table} load 0 {indices}
{compute} cast 11
{compute} add 5 12
output 13"""
BACKWARD = """\
{compute} input score
{compute} number 0
{compute} mul 0 1
{compute} tanh 2
{compute} mul 3 3
{compute} input grad
int32 input batch
int32 input head
int32 input query
int32 input key
int32 sub 8 9
{compute} mul 5 4
{compute} sub 5 11
output 12
gradient 0 5 {indices}"""
# Causal, plus as many keys behind the query as the first of the integers.
MASK_MOD = """\
int32 input query
int32 input key
int32 integer 0
int32 add 0 2
bool ge 3 1
output 4"""
CAP, BEHIND = 2.0, 2


def programs(dtype: torch.dtype, of_batch: bool = False) -> dict[str, Any]:
    """Return the keywords of a call, for a table of the query's dtype."""
    words = {
        "compute": "float64" if dtype == torch.float64 else "float32",
        "table": str(dtype).removeprefix("torch."),
    }
    return {
        "score_mod": SCORE_MOD.format(**words, indices="6 7 10" if of_batch else "7 10"),
        "mask_mod": MASK_MOD,
        "backward": BACKWARD.format(**words, indices="6 7 10" if of_batch else "7 10"),
        "numbers": [1 / CAP, CAP],
        "integers": [BEHIND],
    }


# --------------------------------------------------------------------- foo::flex_attention, samples


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Partial and full blocks for each row of blocks, the same for all heads."""

    query_block: int
    key_block: int
    partial: Sequence[Sequence[int]]
    full: Sequence[Sequence[int]] = ()

    def lists(self) -> Tensors:
        return tuple(it for rows in (self.partial, self.full) if rows for it in listed(rows))


def listed(rows: Sequence[Sequence[int]]) -> Tensors:
    """Return counts and indices of blocks, as in torch's BlockMask."""
    indices = torch.zeros(1, 1, len(rows), max(1, *map(len, rows)), dtype=torch.int32)
    for place, row in enumerate(rows):
        indices[0, 0, place, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return torch.tensor([[[len(row) for row in rows]]], dtype=torch.int32), indices


def flex_sample(
    *,
    batch: int = 2,
    heads: int = 2,
    key_heads: int | None = None,
    queries: int = 9,
    keys: int = 11,
    head_dim: int = 16,
    value_dim: int | None = None,
    has_programs: bool = True,
    blocks: Blocks | None = None,
    **keywords: Any,
) -> Callable[[torch.dtype], Sample]:
    """Make a function that draws query, key, value and a table of these sizes."""
    key_heads, value_dim = key_heads or heads, value_dim or head_dim

    def make(dtype: torch.dtype) -> Sample:
        *tensors, table = random(
            f"flex_attention {batch} {heads} {key_heads} {queries} {keys} {head_dim} {value_dim}",
            (batch, heads, queries, head_dim),
            (batch, key_heads, keys, head_dim),
            (batch, key_heads, keys, value_dim),
            (heads, max(1, queries + keys)),
            dtype=dtype,
        )
        lists: Tensors = () if blocks is None else blocks.lists()
        options = dict(keywords)
        if blocks is not None:
            options |= {"query_block": blocks.query_block, "key_block": blocks.key_block}
        if has_programs:
            options |= programs(dtype)
        return Sample((*tensors, [table] if has_programs else [], *lists), options)

    return make


PARTIAL, FULL = ((0,), (1, 0), (), (3, 2)), ((2,), (), (1,), (0,))

SAMPLES: dict[str, Callable[[torch.dtype], Sample]] = {
    "programs": flex_sample(),
    "no programs": flex_sample(has_programs=False),
    "one query": flex_sample(queries=1, keys=300),
    "one key": flex_sample(queries=150, keys=1),
    "no queries": flex_sample(queries=0),
    "no keys": flex_sample(keys=0),
    "no rows of the batch": flex_sample(batch=0),
    "several tiles": flex_sample(queries=130, keys=200, head_dim=24, value_dim=40),
    "more queries than keys": flex_sample(queries=270, keys=140),
    "grouped heads": flex_sample(heads=6, key_heads=2, queries=70, keys=75, scale=0.3),
    "scale below zero": flex_sample(scale=-0.5),
    "scale below zero, no programs": flex_sample(scale=-0.5, has_programs=False),
    "scale 0, no programs": flex_sample(scale=0.0, has_programs=False),
    "blocks of 128": flex_sample(
        queries=400, keys=500, blocks=Blocks(128, 128, PARTIAL, FULL), heads=1
    ),
    "odd blocks": flex_sample(queries=50, keys=60, blocks=Blocks(13, 17, PARTIAL, FULL)),
    "blocks, no programs": flex_sample(
        queries=60, keys=70, blocks=Blocks(16, 20, PARTIAL), has_programs=False
    ),
    "small": flex_sample(
        heads=4, key_heads=2, queries=4, keys=5, head_dim=3, value_dim=2, scale=0.7
    ),
    "small, blocks": flex_sample(
        batch=1, queries=7, keys=7, head_dim=3, blocks=Blocks(2, 2, PARTIAL, FULL)
    ),
    "small, no programs": flex_sample(batch=1, queries=3, keys=4, head_dim=3, has_programs=False),
}


# -------------------------------------------------------- foo::flex_attention, reference and errors


def covered(lists: Sequence[Any], shape: Sequence[int], query_block: int, key_block: int) -> Tensor:
    """Return which scores (B, H, Sq, Sk) the blocks cover, given counts and indices."""
    counts, indices = lists
    is_covered = torch.zeros(*counts.shape[:2], *shape[2:], dtype=torch.bool)
    for batch in range(counts.shape[0]):
        for head in range(counts.shape[1]):
            for row, count in enumerate(counts[batch, head].tolist()):
                queries = slice(row * query_block, (row + 1) * query_block)
                for block in indices[batch, head, row, :count].tolist():
                    keys = slice(block * key_block, (block + 1) * key_block)
                    is_covered[batch, head, queries, keys] = True
    return is_covered


def as_attention(sample: Sample) -> Sample:
    """Return the sample of foo::attention that is equivalent to one of foo::flex_attention.

    The table and the mask become a bias, and the softcap an option.
    """
    query, key, value, captured, *lists = sample.inputs
    options = dict(sample.keywords)
    shape = (*query.shape[:3], key.shape[2])
    distance = torch.arange(shape[2])[:, None] - torch.arange(shape[3])
    has_programs = bool(options.get("score_mod"))
    sees = (distance + BEHIND >= 0) if has_programs else torch.ones_like(distance, dtype=torch.bool)
    blocks = (options.get("query_block", 128), options.get("key_block", 128))
    if lists:
        sees = sees & covered(lists[:2], shape, *blocks)
    if lists[2:]:
        sees = sees | covered(lists[2:], shape, *blocks)
    bias = captured[0][:, distance] if has_programs else query.new_zeros(())
    bias = bias.expand(shape).where(sees, -math.inf)
    own: dict[str, Any] = {"softcap": CAP} if has_programs else {}
    if options.get("scale") is not None:
        own["scale"] = options["scale"]
    return Sample((query, key, value, bias, None, None), own)


def flex_attention(*inputs: Any, **keywords: Any) -> Tensors:
    """Compute the samples' programs by the reference of attention."""
    return as_attention(Sample(inputs, keywords)).call(reference.attention)


def flex_output_budget(sample: Sample, dtype: torch.dtype) -> Tensors:
    return output_budget(as_attention(sample), dtype)


@dataclasses.dataclass(frozen=True)
class Part:
    """A sample of foo::attention as a part of a call, and its cotangents."""

    sample: Sample
    cotangents: Tensors


def budget_of_parts(sample: Sample, dtype: torch.dtype, parts: Iterable[Part]) -> Tensors:
    """Bound the errors of a sample's gradients by those of its parts."""
    selected, sums, terms = [], [], 0
    parts = list(parts)
    for part in parts:
        part_sums = gradient_sums(part.sample.map(Tensor.detach), dtype, part.cotangents)
        terms += part.sample.inputs[3].numel()
        for tensor, part_sum in zip(part.sample.inputs, part_sums):
            if tensor is not None and part_sum is not None and tensor.requires_grad:
                selected.append(tensor)
                sums.append(part_sum)
    leaves = sample.differentiable()

    def added(terms: list[Tensor]) -> Tensors:
        """Add the parts' gradients by autograd, through the selection of the parts."""
        options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        return torch.autograd.grad(selected, leaves, terms, **options)

    values, sizes, errors = (
        added([getattr(it, name) for it in sums]) for name in ("value", "size", "error")
    )
    rounding = Rounding.of(dtype)
    # An element of a table may contribute to every score.
    counts = [len(parts)] * 3 + [terms] * len(leaves[3:])
    return tuple(
        Sum(value, size, error + rounding.summing(count) * size).stored(dtype)
        for value, size, error, count in zip(values, sizes, errors, counts)
    )


def flex_gradient_budget(sample: Sample, dtypes: Dtypes, cotangents: Tensors) -> Tensors:
    assert dtypes[0] is not None
    leaves = sample.requiring_grad()
    with torch.enable_grad():
        part = Part(as_attention(leaves), cotangents)
    return budget_of_parts(leaves, dtypes[0], [part])


FLEX_ATTENTION = OpSpec(
    operator=torch.ops.foo.flex_attention.default,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sizes=(),
    samples=SAMPLES,
    essential=("small", "small, blocks", "small, no programs"),
    in_layouts=("small", "small, blocks", "several tiles", "odd blocks"),
    sized=lambda dtype, size: flex_sample(
        heads=4, key_heads=2, queries=size, keys=size + 3, head_dim=8, value_dim=4
    )(dtype),
    large=flex_sample(heads=4, key_heads=2, queries=200, keys=230),
    reference=flex_attention,
    output_budget=flex_output_budget,
    gradient_budget=flex_gradient_budget,
)


# ----------------------------------------------------------------------- foo::flex_attention_varlen


def flex_varlen_sample(
    lengths: Sequence[tuple[int, int]], *, has_programs: bool = True, **options: Any
) -> Callable[[torch.dtype], Sample]:
    """Make a function that draws packed tensors, and a table for each sequence and head."""
    make_packed = varlen_sample(lengths, **options)

    def make(dtype: torch.dtype) -> Sample:
        packed = make_packed(dtype)
        query, key, value, *sequences, _, _ = packed.inputs
        if not has_programs:
            return Sample((query, key, value, [], *sequences), packed.keywords)
        longest = max(queries + keys for queries, keys in lengths)
        shape = (max(1, len(lengths)), max(1, query.shape[1]), max(1, longest))
        (table,) = random(f"flex_attention_varlen {shape}", shape, dtype=dtype)
        keywords = {**packed.keywords, **programs(dtype, of_batch=True)}
        return Sample((query, key, value, [table], *sequences), keywords)

    return make


SMALL_VARLEN = ((2, 3), (0, 2), (3, 4))

VARLEN_SAMPLES: dict[str, Callable[[torch.dtype], Sample]] = {
    "one sequence": flex_varlen_sample([(9, 11)]),
    "several sequences": flex_varlen_sample(MIXED),
    "no programs": flex_varlen_sample(MIXED, has_programs=False),
    "maxima above the lengths": flex_varlen_sample(MIXED, max_seqlen_q=500, max_seqlen_k=1000),
    "empty sequences": flex_varlen_sample(WITH_EMPTY),
    "no queries": flex_varlen_sample([(0, 5), (0, 3)]),
    "no keys": flex_varlen_sample([(3, 0), (5, 0)]),
    "grouped heads": flex_varlen_sample(MIXED, heads=6, key_heads=2, scale=0.4),
    "seqused_k": flex_varlen_sample(MIXED, used=(5, 40, 65, 0, 63)),
    "blocks": flex_varlen_sample(MIXED, heads=4, key_heads=2, pages=Pages(16)),
    "blocks, seqused_k": flex_varlen_sample(MIXED, used=(4, 66, 100, 0, 1), pages=Pages(100)),
    "blocks that sequences share": flex_varlen_sample(
        ((9, 20), (3, 30), (6, 17)), pages=Pages(16, shared=True)
    ),
    "small": flex_varlen_sample(SMALL_VARLEN, heads=4, key_heads=2, head_dim=3, value_dim=2),
    "small, blocks": flex_varlen_sample(
        SMALL_VARLEN, heads=2, key_heads=1, head_dim=3, used=(3, 1, 2), pages=Pages(2)
    ),
}


def varlen_parts(sample: Sample) -> Iterator[tuple[reference.Sequence, Sample]]:
    """Yield each sequence, and its equivalent sample of foo::attention."""
    query, key, value, captured, *sequences = sample.inputs
    options = dict(sample.keywords)
    del options["max_seqlen_q"], options["max_seqlen_k"]
    starts_q, starts_k, used, table = (*sequences, None, None)[:4]
    for sequence in reference.sequences(starts_q, starts_k, used, table, key):
        own = [it[sequence.index] for it in captured]
        tensors = sequence.select(query, key, value)
        yield sequence, as_attention(Sample((*tensors, own), options))


def joined(sample: Sample, compute: Callable[[Sample], Tensors]) -> Tensors:
    """Compute each part's outputs, and pack them."""
    query, value = sample.inputs[0], sample.inputs[2]
    output = query.new_zeros(*query.shape[:2], value.shape[-1])
    logsumexp = query.new_zeros(query.shape[1], query.shape[0])
    for sequence, part in varlen_parts(sample):
        own_output, own_logsumexp = compute(part)
        places = sequence.queries
        output = output.index_copy(0, places, own_output.squeeze(0).transpose(0, 1))
        logsumexp = logsumexp.index_copy(1, places, own_logsumexp.squeeze(0))
    return output, logsumexp


def flex_attention_varlen(*inputs: Any, **keywords: Any) -> Tensors:
    """Compute the samples' programs by the reference of attention."""
    return joined(Sample(inputs, keywords), lambda part: part.call(reference.attention))


def flex_varlen_output_budget(sample: Sample, dtype: torch.dtype) -> Tensors:
    return joined(sample, lambda part: output_budget(part, dtype))


def flex_varlen_gradient_budget(sample: Sample, dtypes: Dtypes, cotangents: Tensors) -> Tensors:
    assert dtypes[0] is not None
    grad_output, grad_logsumexp = cotangents
    leaves = sample.requiring_grad()
    found = []
    with torch.enable_grad():
        for sequence, part in varlen_parts(leaves):
            own: list[Tensor] = [
                grad_output[sequence.queries].transpose(0, 1),
                grad_logsumexp[:, sequence.queries],
            ]
            found.append(Part(part, tuple(it.unsqueeze(0) for it in own)))
    return budget_of_parts(leaves, dtypes[0], found)


FLEX_ATTENTION_VARLEN = OpSpec(
    operator=torch.ops.foo.flex_attention_varlen.default,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sizes=(),
    samples=VARLEN_SAMPLES,
    essential=("small", "small, blocks"),
    in_layouts=("small", "small, blocks", "blocks that sequences share"),
    sized=lambda dtype, size: flex_varlen_sample(
        [(size, size + 3), (size // 2, size)], heads=4, key_heads=2, head_dim=8
    )(dtype),
    large=flex_varlen_sample(
        [(200, 230), (1, 700), (90, 90)], heads=4, key_heads=2, pages=Pages(16)
    ),
    reference=flex_attention_varlen,
    output_budget=flex_varlen_output_budget,
    gradient_budget=flex_varlen_gradient_budget,
)
