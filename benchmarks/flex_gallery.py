"""Measures the variants in docs/flex_attention.md, with the code printed there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

import foo_ops
from benchmarks import flex, gallery
from benchmarks.measure import OURS, Case, Contenders
from foo_ops.ops.attention.dense import attention

SECTION = "flex gallery"
HEADS = 4
"""Heads in the tensors that some variants capture."""


def cases(length: int, dtypes: Sequence[str]) -> Iterator[Case]:
    """Compare each variant, forward and backward, with attention that sees all keys."""
    for variant in gallery.variants():
        for direction in ("forward", "backward"):
            for dtype in dtypes:
                row = flex.Row(variant.title, direction, dtype, length, HEADS, flex.DENSE, 0.0)
                yield Case(SECTION, row.name, partial(contenders, variant, row), headline=True)


def contenders(variant: gallery.Variant, row: flex.Row) -> Contenders:
    names = variant.run(row.length)
    row = replace(row, batch=len(names["query"]))
    score_mod, mask_mod = names.get("score_mod"), names.get("mask_mod")
    mask = mask_mod and flex.blocks(mask_mod, row.length, row.batch)
    learned = [it for it in names.values() if is_learned(it)]

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Any:
        output = foo_ops.flex_attention(query, key, value, score_mod, mask)
        return (output, *learned) if row.direction == "backward" else output

    inputs = row.inputs()
    functions = {OURS: ours, row.peer: attention}
    return {name: partial(flex.local, row, name, it, inputs) for name, it in functions.items()}


def is_learned(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_leaf and value.requires_grad
