"""Attention on DTensors: each process has some of the batch and of the heads.

Packed sequences are sharded by heads. If heads of query share those of key and value, both are
sharded into equal parts. Dropout keeps the same weights as in one process: the heads are numbered
before they are sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foo_ops import library
from foo_ops._process import after_import
from foo_ops.library.operators import find
from foo_ops.ops.attention.vmap import padded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def register_heads(name: str, tensors: int, sharding: str, of_gradients: str) -> None:
    """Let DTensor shard attention, dense or packed.

    Args:
        name: the operator's name; it draws its seed.
        tensors: the number of its tensors.
        sharding, of_gradients: the names of the dimensions of tensors and results, for the operator
            that takes a seed, and for that of the gradients.
    """
    for operator, its in ((f"{name}_seeded", sharding), (f"{name}_backward", of_gradients)):
        library.register_sharding(operator, make_sharding(operator, its))

    register_rule(name, make_rule(f"{name}_seeded", tensors))


def register_rule(name: str, rule: Callable[..., Any]) -> None:
    """Let DTensor call a function in place of an operator."""

    def register() -> None:
        from torch.distributed.tensor import DTensor

        library.register_torch_dispatch(name, DTensor, rule)

    after_import("torch.distributed.tensor", register)


def make_sharding(name: str, sharding: str) -> Callable[..., str]:
    """Make the rule of an operator whose last tensor is dropout_heads."""
    count = len(sharding.partition("->")[0].split(","))

    def rule(*tensors: Any, **options: Any) -> str:
        if options.get("dropout_p", 0.0) > 0.0 and padded(tensors, count)[-1] is None:
            raise NotImplementedError(
                f"{name.removeprefix('foo::')}: dropout_heads must be given if DTensors have "
                "dropout, got None"
            )
        return sharding

    return rule


def make_rule(seeded: str, count: int) -> Callable[..., Any]:
    """Make the rule that calls the operator with a seed, after ``count`` tensors."""
    operator = find(seeded)

    @torch.no_grad()
    def rule(
        mode: Any, whole: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        tensors = padded(args, count)
        numbers: tuple[Any, ...] = ()
        if kwargs.get("dropout_p", 0.0) > 0.0:
            query, starts = tensors[0], tensors[3]
            batch = starts.shape[0] - 1 if "varlen" in seeded else query.shape[0]
            numbers = numbers_of(query, batch)
        return operator(*tensors, *numbers, **kwargs)

    return rule


def draw_numbers(
    mode: Any, operator: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[DTensor, DTensor]:
    return numbers_of(*args)


def numbers_of(query: DTensor, batch: int) -> tuple[DTensor, DTensor]:
    """Draw the first process's seed, and number all heads."""
    heads = query.shape[1]
    seed = torch.randint(torch.iinfo(torch.int64).max, (1,), device=query.device)
    numbers = torch.arange(batch * heads, device=query.device).view(batch, heads)
    mesh = query.device_mesh
    return on_all(seed, mesh, src_data_rank=0), on_all(numbers, mesh, src_data_rank=None)


def on_all(tensor: Tensor, mesh: DeviceMesh, src_data_rank: int | None) -> DTensor:
    """Replicate a tensor to all processes, from one of them or as it is on each."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    return distribute_tensor(tensor, mesh, [Replicate()] * mesh.ndim, src_data_rank=src_data_rank)
