"""Compute the cross-entropy of DTensors: each process has some of the rows, and all classes.

The mean needs the sum and the count of all processes, so that placements alone do not tell it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foo_ops import library

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def register() -> None:
    """Tell DTensor, which is imported by now."""
    from torch.distributed.tensor import DTensor

    library.register_torch_dispatch("foo::softmax_cross_entropy", DTensor, forward)
    library.register_torch_dispatch("foo::softmax_cross_entropy_backward", DTensor, backward)


@torch.no_grad()
def forward(
    mode: Any, operator: Any, types: Any, args: tuple[DTensor, DTensor], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    logits, target = args
    require_distributed("softmax_cross_entropy", logits=logits, target=target)
    rows = rows_of(logits)
    loss, logsumexp, _ = operator(local(logits, rows), local(target, rows), **kwargs)
    loss, logsumexp = (as_rows(it, logits, logits.shape[:-1], rows) for it in (loss, logsumexp))
    return loss, logsumexp, loss.sum() / count(target, **kwargs)


@torch.no_grad()
def backward(
    mode: Any,
    operator: Any,
    types: Any,
    args: tuple[DTensor | None, DTensor | None, DTensor | None, DTensor, DTensor, DTensor],
    kwargs: dict[str, Any],
) -> Tensor:
    grad_loss: Tensor | None
    grad_loss, grad_logsumexp, grad_mean, logits, target, logsumexp = args
    names = ("grad_loss", "grad_logsumexp", "grad_mean", "logits", "target", "logsumexp")
    require_distributed("softmax_cross_entropy_backward", **dict(zip(names, args)))
    if grad_mean is not None:
        # Ignored rows have no gradient, whatever that of their loss.
        share = grad_mean / count(target, **kwargs)
        grad_loss = share.expand(target.shape) if grad_loss is None else grad_loss + share
    rows = rows_of(logits)
    tensors = (grad_loss, grad_logsumexp, None, logits, target, logsumexp)
    locals_ = [None if it is None else local(it, rows) for it in tensors]
    return as_rows(operator(*locals_, **kwargs), logits, logits.shape, rows)


def require_distributed(operator: str, **tensors: Tensor | None) -> None:
    from torch.distributed.tensor import DTensor

    for name, tensor in tensors.items():
        if tensor is not None and not isinstance(tensor, DTensor):
            raise TypeError(f"{operator}: {name} must be a DTensor as others are, got a Tensor")


def rows_of(logits: DTensor) -> list[Placement]:
    """Return the placements of logits, but for the classes, which are not cut."""
    from torch.distributed.tensor import Replicate, Shard

    return [
        it if isinstance(it, Shard) and it.dim < logits.dim() - 1 else Replicate()
        for it in logits.placements
    ]


def count(target: DTensor, *, ignore_index: int = -100, **options: Any) -> Tensor:
    from torch.distributed.tensor import Replicate

    return redistribute((target != ignore_index).sum(), [Replicate()] * target.device_mesh.ndim)


def local(tensor: Tensor, rows: list[Placement]) -> Tensor:
    return redistribute(tensor, rows).to_local()


def redistribute(tensor: Tensor, placements: list[Placement]) -> DTensor:
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    return tensor.redistribute(placements=placements)


def as_rows(tensor: Tensor, like: DTensor, shape: torch.Size, rows: list[Placement]) -> DTensor:
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        tensor, like.device_mesh, rows, run_check=False, shape=shape, stride=stride
    )
