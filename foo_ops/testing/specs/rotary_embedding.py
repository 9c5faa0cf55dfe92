"""foo::rotary_embedding and its in-place variant in the table of operators."""

from __future__ import annotations

from typing import Any

import torch

from foo_ops.testing import reference
from foo_ops.testing.spec import Maker, OpSpec, Sample, random


def rotary_sample(
    name: str, input: tuple[int, ...], table: tuple[int, ...], **keywords: Any
) -> Maker:
    def make(dtype: torch.dtype) -> Sample:
        return Sample(tuple(random(name, input, table, table, dtype=dtype)), keywords)

    return make


def sized(dtype: torch.dtype, size: int) -> Sample:
    return rotary_sample("sized", (2, size, 2 * size + 3), (size, size + 1))(dtype)


def wide_tables(dtype: torch.dtype) -> Sample:
    """Use float32 cosines and sines for a query in half precision."""
    input, cosine, sine = rotary_sample("wide tables", (2, 5, 34), (5, 17))(dtype).inputs
    wide = torch.promote_types(dtype, torch.float32)
    return Sample((input, cosine.to(wide), sine.to(wide)))


ROTARY_EMBEDDING = OpSpec(
    operator=torch.ops.foo.rotary_embedding.default,
    reference=reference.rotary_embedding,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sized=sized,
    samples={
        "vector": rotary_sample("vector", (38,), (19,)),
        "interleaved": rotary_sample("interleaved", (2, 3, 5, 34), (5, 17), interleaved=True),
        "heads inside": rotary_sample("heads inside", (2, 5, 3, 34), (5, 1, 17)),
        "a table for each sequence": rotary_sample("tables", (2, 3, 5, 16), (2, 1, 5, 8)),
        "part of a row": rotary_sample("part", (3, 5, 33), (5, 7), interleaved=True),
        "nothing turns": rotary_sample("nothing", (3, 5), (3, 0)),
        "inverse": rotary_sample("inverse", (3, 34), (3, 17), inverse=True),
        "interleaved inverse": rotary_sample(
            "both", (3, 34), (3, 17), interleaved=True, inverse=True
        ),
        "wide tables": wide_tables,
    },
    essential=("size7", "heads inside", "interleaved inverse"),
    large=rotary_sample("large", (3, 301, 130), (301, 64)),
)
ROTARY_EMBEDDING_IN_PLACE = ROTARY_EMBEDDING.variant(torch.ops.foo.rotary_embedding_)
