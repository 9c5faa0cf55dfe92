"""Map tile kernels under torch.vmap: by their rows in one call, or else by a loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from foo_ops.library.operators import Parameter, find, tensors_in
from foo_ops.library.random_vmap import make_random_loop
from foo_ops.library.tile_rows import RowReader, Rows
from foo_ops.library.vmap import (
    Rule,
    in_first_place,
    in_front,
    make_loop,
    make_loop_in_place,
    meta_element,
)


def make_tile_rule(
    operator: torch._ops.OpOverload, parameters: Sequence[Parameter], read: RowReader
) -> Rule | None:
    """Make the rule of a tile kernel; ``f.out`` has none, as PyTorch's have none."""
    name, is_mutable = operator.name(), operator._schema.is_mutable
    if any(parameter.kind == "generator" for parameter in parameters):
        return None if is_mutable else make_random_loop(name, tuple(parameters))
    if any(parameter.role == "out" for parameter in parameters):
        return None
    return make_loop_in_place(name) if is_mutable else _make_rule_of_rows(name, read)


def _make_rule_of_rows(name: str, read: RowReader) -> Rule:
    loop = make_loop(name)

    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any, **keywords: Any) -> Any:
        operator, size = find(name), info.batch_size
        rows = read() if size > 0 and not tensors_in(keywords) else None
        more = None if rows is None else _more_rows(operator, rows, size, in_dims, inputs)
        if more is None:
            return loop(info, in_dims, *inputs, **keywords)
        arguments, first = more
        one = operator(*map(meta_element, inputs, in_dims), **keywords)
        shapes = [_shape_of_more(result, size, first) for result in tensors_in(one)]
        if shapes != _shapes_of(operator, arguments, keywords):
            return loop(info, in_dims, *inputs, **keywords)
        results = operator(*arguments, **keywords)
        if first is not None:
            results = pytree.tree_map_only(
                Tensor, lambda result: result.unflatten(0, (size, first)), results
            )
        return results, in_first_place(results)

    return vmap


def _more_rows(
    operator: torch._ops.OpOverload,
    rows: Rows,
    size: int,
    in_dims: Sequence[Any],
    inputs: Sequence[Any],
) -> tuple[list[Any], int | None] | None:
    """Make the mapped dimension a part of the first one of rows, whose size comes with the inputs.

    So tensors keep the number of dimensions that kernels and fake kernels may ask for; those of one
    row get one more. None where something else is mapped, or rows would be broadcast.
    """
    names = [argument.name for argument in operator._schema.arguments]
    more, before = list(inputs), set()
    for place, (name, tensor, in_dim) in enumerate(zip(names, inputs, in_dims)):
        inner = rows.arguments.get(name)
        if inner is not None and isinstance(tensor, Tensor):
            moved = in_front(tensor, in_dim, size)
            before.add(moved.shape[1 : moved.dim() - inner])
            more[place] = moved.flatten(0, 1) if moved.dim() - inner > 1 else moved
        elif in_dim is not None:
            return None
    if len(before) != 1:
        return None
    (shape,) = before
    return more, shape[0] if len(shape) > 0 else None


def _shape_of_more(result: Tensor, size: int, first: int | None) -> list[int] | None:
    """Return what shape a result must have with more rows; None if it has no dimension of rows."""
    if first is None:
        return [size, *result.shape]
    if result.dim() == 0 or result.shape[0] != first:
        return None
    return [size * first, *result.shape[1:]]


def _shapes_of(
    operator: torch._ops.OpOverload, arguments: Sequence[Any], keywords: dict[str, Any]
) -> list[list[int]] | None:
    """Return the shapes of the results; None where the fake kernel refuses so many rows."""
    arguments = pytree.tree_map_only(Tensor, lambda x: x.to("meta"), arguments)
    try:
        return [list(result.shape) for result in tensors_in(operator(*arguments, **keywords))]
    except (ValueError, TypeError, RuntimeError):
        return None
