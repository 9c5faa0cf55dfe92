"""foo::cache_append in the table of operators."""

from __future__ import annotations

import torch

from foo_ops.testing import reference
from foo_ops.testing.spec import Maker, OpSpec, Sample, random


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


def sized(dtype: torch.dtype, size: int) -> Sample:
    return dense_sample("sized", 2, 3, 2 * size, size, (size, size + 1))(dtype)


CACHE_APPEND = OpSpec(
    operator=torch.ops.foo.cache_append.default,
    reference=reference.cache_append,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8),
    sized=sized,
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
