"""Compute the cross-entropy of DTensors: each process has some of the rows, or of the classes.

The mean needs the sum and the count of all processes, so that placements alone do not tell it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foo_ops import library
from foo_ops.ops import vocabulary
from foo_ops.ops.vocabulary import Classes

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
    labels, classes = local(target, rows), classes_of(logits, logits.dim() - 1, rows)
    if classes is None:
        loss, logsumexp, _ = operator(local(logits, rows), labels, **kwargs)
    else:
        own = local(logits, classes.placed(logits.dim() - 1, rows))

        def call(labels: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
            loss, logsumexp, _ = operator(own, labels, label_smoothing=label_smoothing)
            return loss, logsumexp

        named = "softmax_cross_entropy", "logits have classes"
        loss, logsumexp = vocabulary.forward(classes, call, labels, *named, **kwargs)
    loss, logsumexp = (as_placed(it, logits, logits.shape[:-1], rows) for it in (loss, logsumexp))
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
    given = [None if it is None else local(it, rows) for it in (grad_loss, grad_logsumexp)]
    labels, sums = local(target, rows), local(logsumexp, rows)
    classes = classes_of(logits, logits.dim() - 1, rows)
    if classes is None:
        gradient = operator(*given, None, local(logits, rows), labels, sums, **kwargs)
        return as_placed(gradient, logits, logits.shape, rows)
    placements = classes.placed(logits.dim() - 1, rows)
    own = local(logits, placements)
    part = torch.ops.foo.softmax_cross_entropy_part_backward.default

    def call(
        of_loss: Tensor, of_logsumexp: Tensor, labels: Tensor, label_smoothing: float
    ) -> list[Tensor]:
        return [
            part(of_loss, of_logsumexp, None, own, labels, sums, label_smoothing=label_smoothing)
        ]

    (gradient,) = vocabulary.backward(classes, call, given[0], given[1], labels, sums, **kwargs)
    return as_placed(gradient, logits, logits.shape, placements)


def require_distributed(operator: str, **tensors: Tensor | None) -> None:
    from torch.distributed.tensor import DTensor

    for name, tensor in tensors.items():
        if tensor is not None and not isinstance(tensor, DTensor):
            raise TypeError(f"{operator}: {name} must be a DTensor as others are, got a Tensor")


def rows_of(logits: DTensor) -> list[Placement]:
    """Return the placements of what each row has."""
    from torch.distributed.tensor import Replicate, Shard

    return [
        it if isinstance(it, Shard) and it.dim < logits.dim() - 1 else Replicate()
        for it in logits.placements
    ]


def classes_of(tensor: DTensor, dim: int, rows: list[Placement]) -> Classes | None:
    """Return which classes a process has, of a tensor that has them in dimension ``dim``.

    None where all have all. What cuts the rows does not cut the classes.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    is_cut = [
        isinstance(it, Shard) and it.dim == dim and not isinstance(row, Shard)
        for it, row in zip(tensor.placements, rows)
    ]
    if not any(is_cut):
        return None
    mesh, total = tensor.device_mesh, tensor.shape[dim]
    placements = [Shard(0) if it else Replicate() for it in is_cut]
    (own,), (start,) = compute_local_shape_and_global_offset((total,), mesh, placements)
    return Classes(mesh, rows, is_cut, start, own, total)


def count(target: DTensor, *, ignore_index: int = -100, **options: Any) -> Tensor:
    from torch.distributed.tensor import Replicate

    return redistribute((target != ignore_index).sum(), [Replicate()] * target.device_mesh.ndim)


def local(tensor: Tensor, placements: list[Placement]) -> Tensor:
    return redistribute(tensor, placements).to_local()


def redistribute(tensor: Tensor, placements: list[Placement]) -> DTensor:
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    return tensor.redistribute(placements=placements)


def as_placed(
    tensor: Tensor, like: DTensor, shape: torch.Size, placements: list[Placement]
) -> DTensor:
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        tensor, like.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )
