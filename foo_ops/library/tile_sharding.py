"""Cut the rows of tile kernels among processes, where each is computed on its own."""

from __future__ import annotations

from typing import Any

import torch

from foo_ops.library.sharding import REST, WHOLE, Rule, make_uniform_rule
from foo_ops.library.tile_rows import RowReader


def make_tile_sharding(operator: torch._ops.OpOverload, read: RowReader) -> Rule:
    """Make the rule of a tile kernel: by its rows, or else on whole tensors."""
    whole = make_uniform_rule(operator, WHOLE)
    names = [argument.name for argument in operator._schema.arguments]

    def rule(*inputs: Any, **keywords: Any) -> str:
        rows = read()
        if rows is None:
            return whole()
        shapes = []
        for argument, tensor in (dict(zip(names, inputs)) | keywords).items():
            count = rows.arguments.get(argument)
            if count is not None and tensor is not None:
                shapes.append(tensor.shape[: len(tensor.shape) - count])
        if any(shape != shapes[0] for shape in shapes):
            return whole()
        before = ", ".join(map(_dimensions, rows.arguments.values()))
        return f"{before} -> {', '.join(map(_dimensions, rows.results))}"

    return rule


def _dimensions(inner: int | None) -> str:
    return WHOLE if inner is None else " ".join([REST, *[WHOLE] * inner])
