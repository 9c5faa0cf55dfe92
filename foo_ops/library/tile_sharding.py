"""Cut the rows of tile kernels among processes, where each is computed on its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from foo_ops.library.row_kernels import row_dimensions
from foo_ops.library.sharding import REST, WHOLE, Rule, make_uniform_rule


def make_tile_sharding(
    operator: torch._ops.OpOverload, function: Callable[..., Any] | None, names: Sequence[str]
) -> Rule:
    """Make the rule of a tile kernel: by its rows, or else on whole tensors.

    Args:
        function: the kernel; None for one whose tiles are no rows.
        names: its arguments, those of the operator and then the results.
    """
    whole = make_uniform_rule(operator, WHOLE)
    arguments, returns = operator._schema.arguments, operator._schema.returns
    places = [place for place, it in enumerate(arguments) if "Tensor" in str(it.type)]
    results = list(names[len(arguments) :])
    # A result that is an argument, where the function has no name for it of its own.
    results = results or [_alias(it, arguments, names) for it in returns]
    written = [*(names[place] for place in places if arguments[place].is_write), *results]
    tensors = [*(names[place] for place in places), *results]
    own_names = {argument.name: name for argument, name in zip(arguments, names)}

    @functools.cache
    def read() -> dict[str, int | None] | None:
        """Look into the source, which takes too long for an import."""
        found = None if function is None else row_dimensions(function, tensors, written)
        return found if found is not None and found[names[places[0]]] == 1 else None

    def rule(*inputs: Any, **keywords: Any) -> str:
        inner = read()
        if inner is None:
            return whole()
        shapes = []
        for argument, tensor in (dict(zip(own_names, inputs)) | keywords).items():
            count = inner.get(own_names[argument])
            if count is not None and tensor is not None:
                shapes.append(tensor.shape[: len(tensor.shape) - count])
        if any(shape != shapes[0] for shape in shapes):
            return whole()
        before = ", ".join(_dimensions(inner[names[place]]) for place in places)
        return f"{before} -> {', '.join(_dimensions(inner[name]) for name in results)}"

    return rule


def _alias(result: Any, arguments: Sequence[Any], names: Sequence[str]) -> str:
    aliases = result.alias_info.before_set
    return next(
        name
        for argument, name in zip(arguments, names)
        if argument.alias_info is not None and argument.alias_info.before_set == aliases
    )


def _dimensions(inner: int | None) -> str:
    return WHOLE if inner is None else " ".join([REST, *[WHOLE] * inner])
