"""Compute foo::linear_cross_entropy of DTensors: each process has some rows, and all classes.

Each computes its share of the gradients of weight and bias, which are then sums over processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foo_ops import library
from foo_ops.ops.softmax_cross_entropy_sharding import (
    as_rows,
    count,
    local,
    require_distributed,
    rows_of,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def register() -> None:
    """Tell DTensor, which is imported by now."""
    from torch.distributed.tensor import DTensor

    library.register_torch_dispatch("foo::linear_cross_entropy", DTensor, forward)
    library.register_torch_dispatch("foo::linear_cross_entropy_backward", DTensor, backward)


@torch.no_grad()
def forward(
    mode: Any,
    operator: Any,
    types: Any,
    args: tuple[DTensor, DTensor, DTensor, DTensor | None],
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, target, bias = (*args, None)[:4]
    require_distributed(
        "linear_cross_entropy", hidden=hidden, weight=weight, target=target, bias=bias
    )
    rows = rows_of(hidden)
    loss, logsumexp, _ = operator(
        local(hidden, rows), whole(weight), local(target, rows), whole(bias), **kwargs
    )
    loss, logsumexp = (as_rows(it, hidden, hidden.shape[:-1], rows) for it in (loss, logsumexp))
    return loss, logsumexp, loss.sum() / count_of(target, **kwargs)


@torch.no_grad()
def backward(
    mode: Any, operator: Any, types: Any, args: tuple[DTensor | None, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    names = ("grad_loss", "grad_logsumexp", "grad_mean", "hidden", "weight", "target", "bias")
    require_distributed(
        "linear_cross_entropy_backward", **dict(zip((*names, "logsumexp"), args, strict=True))
    )
    grad_loss: Tensor | None
    grad_loss, grad_logsumexp, grad_mean, hidden, weight, target, bias, logsumexp = args
    assert hidden is not None
    assert weight is not None
    assert target is not None
    if grad_mean is not None:
        # Ignored rows have no gradient, whatever that of their loss.
        share = grad_mean / count_of(target, **kwargs)
        grad_loss = share.expand(target.shape) if grad_loss is None else grad_loss + share
    rows = rows_of(hidden)
    of_rows = [None if it is None else local(it, rows) for it in (grad_loss, grad_logsumexp)]
    grad_hidden, *others = operator(
        *of_rows,
        None,
        local(hidden, rows),
        whole(weight),
        local(target, rows),
        whole(bias),
        None if logsumexp is None else local(logsumexp, rows),
        **kwargs,
    )
    if kwargs.get("hidden_requires_grad", True):
        grad_hidden = as_rows(grad_hidden, hidden, hidden.shape, rows)
    return grad_hidden, *(as_sum(it, hidden, rows) for it in others)


def count_of(target: DTensor, *, ignore_index: int = -100, **_: Any) -> Tensor:
    return count(target, ignore_index=ignore_index)


def whole(tensor: DTensor | None) -> Tensor | None:
    from torch.distributed.tensor import Replicate

    return None if tensor is None else local(tensor, [Replicate()] * tensor.device_mesh.ndim)


def as_sum(tensor: Tensor, like: DTensor, rows: list[Placement]) -> Tensor:
    """Return the sum of what processes with different rows have. It may have no elements."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    placements = [Partial() if isinstance(it, Shard) else Replicate() for it in rows]
    return DTensor.from_local(tensor, like.device_mesh, placements, run_check=False)
