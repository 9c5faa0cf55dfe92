"""foo::flex_attention_varlen in the table of operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from foo_ops.testing import reference
from foo_ops.testing.spec import Dtypes, OpSpec, Sample, Tensors, random
from foo_ops.testing.specs.attention_error import output_budget
from foo_ops.testing.specs.attention_varlen import MIXED, WITH_EMPTY, Pages, varlen_sample
from foo_ops.testing.specs.flex_attention import Part, as_attention, budget_of_parts, programs


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


SMALL = ((2, 3), (0, 2), (3, 4))

SAMPLES: dict[str, Callable[[torch.dtype], Sample]] = {
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
    "small": flex_varlen_sample(SMALL, heads=4, key_heads=2, head_dim=3, value_dim=2),
    "small, blocks": flex_varlen_sample(
        SMALL, heads=2, key_heads=1, head_dim=3, used=(3, 1, 2), pages=Pages(2)
    ),
}


def parts(sample: Sample) -> Iterator[tuple[reference.Sequence, Sample]]:
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
    for sequence, part in parts(sample):
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
        for sequence, part in parts(leaves):
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
    samples=SAMPLES,
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
