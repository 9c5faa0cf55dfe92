"""foo::attention_int8_cache in the table of operators.

It is attention to integers times their scales, sequence by sequence. A score and a weight are
rounded once more each, for their scales, so twice the bounds of attention suffice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from foo_ops.testing import reference
from foo_ops.testing.rounding import compute_type
from foo_ops.testing.spec import Maker, OpSpec, Sample, Tensors, random
from foo_ops.testing.specs.attention_error import output_budget
from foo_ops.testing.specs.quantized_linear import integers


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


def parts(sample: Sample) -> Iterator[Sample]:
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
    return tuple(torch.cat(tensors) for tensors in zip(*map(function, parts(sample))))


def exact(*inputs: Any, **options: Any) -> Tensors:
    return for_each(lambda part: part.call(reference.attention), Sample(inputs, options))


def budget(sample: Sample, dtype: torch.dtype) -> Tensors:
    return tuple(2 * it for it in for_each(lambda part: output_budget(part, dtype), sample))


ATTENTION_INT8_CACHE = OpSpec(
    operator=torch.ops.foo.attention_int8_cache.default,
    reference=exact,
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
    output_budget=budget,
)  # fmt: skip
