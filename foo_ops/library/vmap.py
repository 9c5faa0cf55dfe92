"""Map operators under torch.vmap, by a loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import register_vmap

from foo_ops.library.operators import find, tensors_in


def register_vmap_loop(name: str) -> None:
    """Map an operator by a call for each element of the mapped dimension.

    Example:
        >>> @torch.library.custom_op("mylib::sum_of_row", mutates_args=())
        ... def sum_of_row(row: torch.Tensor) -> torch.Tensor:
        ...     assert row.dim() == 1
        ...     return row.sum()
        >>> foo_ops.library.register_vmap_loop("mylib::sum_of_row")
        >>> torch.vmap(torch.ops.mylib.sum_of_row)(torch.ones(3, 2))
        tensor([2., 2., 2.])
    """
    operator = find(name)

    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any, **keywords: Any) -> Any:
        return vmap_by_loop(operator, info, in_dims, *inputs, **keywords)

    register_vmap(name, vmap)


def vmap_by_loop(
    operator: torch._ops.OpOverload,
    info: Any,
    in_dims: tuple[int | None, ...],
    *inputs: Any,
    **keywords: Any,
) -> tuple[Any, Any]:
    """Return what a function for register_vmap does: the results, stacked, and where.

    Example:
        >>> @torch.library.custom_op("mylib::norm_of_row", mutates_args=())
        ... def norm_of_row(row: torch.Tensor) -> torch.Tensor:
        ...     assert row.dim() == 1
        ...     return row.norm()
        >>> @foo_ops.library.register_vmap("mylib::norm_of_row")
        ... def vmap(info, in_dims, row):
        ...     operator = torch.ops.mylib.norm_of_row.default
        ...     return foo_ops.library.vmap_by_loop(operator, info, in_dims, row)
        >>> torch.vmap(torch.ops.mylib.norm_of_row)(torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
        tensor([5., 2.])
    """
    if info.batch_size == 0:
        return _mapped_over_nothing(operator, in_dims, inputs, keywords)
    calls = []
    for index in range(info.batch_size):
        chosen = (
            argument if in_dim is None else argument.select(in_dim, index)
            for argument, in_dim in zip(inputs, in_dims)
        )
        calls.append(operator(*chosen, **keywords))
    if isinstance(calls[0], Tensor):
        return torch.stack(calls), 0
    return tuple(map(torch.stack, zip(*calls))), (0,) * len(calls[0])


def _mapped_over_nothing(
    operator: torch._ops.OpOverload,
    in_dims: tuple[int | None, ...],
    inputs: tuple[Any, ...],
    keywords: dict[str, Any],
) -> tuple[Any, Any]:
    """Return what a loop without calls does: the fake kernel tells what a call would return."""

    def element(argument: Any, in_dim: int | None) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        shape = list(argument.shape)
        if in_dim is not None:
            del shape[in_dim]
        return torch.empty(shape, dtype=argument.dtype, device="meta")

    device = tensors_in(inputs)[0].device

    def none_of(result: Tensor) -> Tensor:
        return torch.empty((0, *result.shape), dtype=result.dtype, device=device)

    result = operator(*map(element, inputs, in_dims), **keywords)
    if isinstance(result, Tensor):
        return none_of(result), 0
    return tuple(map(none_of, result)), (0,) * len(result)
