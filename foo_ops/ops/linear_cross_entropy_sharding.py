"""Compute foo::linear_cross_entropy of DTensors: each process has some rows, or some classes.

With some rows each computes its share of the gradients of weight and bias, with some classes that
of hidden; they are sums over processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foo_ops import library
from foo_ops.ops import vocabulary
from foo_ops.ops.softmax_cross_entropy_sharding import (
    as_placed,
    classes_of,
    count,
    local,
    require_distributed,
    rows_of,
)
from foo_ops.ops.vocabulary import Classes

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

OF_LOSS = ("label_smoothing", "ignore_index")
# The options of gradients, and their defaults.
WANTED = {"hidden_requires_grad": True, "weight_requires_grad": True, "bias_requires_grad": False}


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
    x, labels = local(hidden, rows), local(target, rows)
    classes = classes_of(weight, 0, rows)
    of_weight = replicated(rows) if classes is None else classes.placed(0, replicated(rows))
    own, own_bias = local(weight, of_weight), None if bias is None else local(bias, of_weight)
    if classes is None:
        loss, logsumexp, _ = operator(x, own, labels, own_bias, **kwargs)
    else:
        of_loss, options = divided(kwargs)

        def call(labels: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
            loss, logsumexp, _ = operator(
                x, own, labels, own_bias, label_smoothing=label_smoothing, **options
            )
            return loss, logsumexp

        named = "linear_cross_entropy", "weight has rows"
        loss, logsumexp = vocabulary.forward(classes, call, labels, *named, **of_loss)
    loss, logsumexp = (as_placed(it, hidden, hidden.shape[:-1], rows) for it in (loss, logsumexp))
    return loss, logsumexp, loss.sum() / count(target, **kwargs)


@torch.no_grad()
def backward(
    mode: Any, operator: Any, types: Any, args: tuple[DTensor | None, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, ...]:
    names = ("grad_loss", "grad_logsumexp", "grad_mean", "hidden", "weight", "target", "bias")
    require_distributed(
        "linear_cross_entropy_backward", **dict(zip((*names, "logsumexp"), args, strict=True))
    )
    grad_loss: Tensor | None
    grad_loss, grad_logsumexp, grad_mean, hidden, weight, target, bias, logsumexp = args
    assert hidden is not None
    assert weight is not None
    assert target is not None
    assert logsumexp is not None
    if grad_mean is not None:
        # Ignored rows have no gradient, whatever that of their loss.
        share = grad_mean / count(target, **kwargs)
        grad_loss = share.expand(target.shape) if grad_loss is None else grad_loss + share
    rows = rows_of(hidden)
    given = [None if it is None else local(it, rows) for it in (grad_loss, grad_logsumexp)]
    x, labels, sums = (local(it, rows) for it in (hidden, target, logsumexp))
    classes = classes_of(weight, 0, rows)
    of_weight = replicated(rows) if classes is None else classes.placed(0, replicated(rows))
    own, own_bias = local(weight, of_weight), None if bias is None else local(bias, of_weight)
    if classes is None:
        gradients = operator(*given, None, x, own, labels, own_bias, sums, **kwargs)
    else:
        of_loss, options = divided(kwargs)

        def call(
            grad_loss: Tensor, grad_logsumexp: Tensor, labels: Tensor, label_smoothing: float
        ) -> list[Tensor]:
            of_rows, options["label_smoothing"] = (grad_loss, grad_logsumexp), label_smoothing
            results: list[Tensor] = operator(
                *of_rows, None, x, own, labels, own_bias, sums, **options
            )
            return results

        gradients = vocabulary.backward(classes, call, given[0], given[1], labels, sums, **of_loss)
    of_hidden, of_others = sums_of(rows, classes)
    shapes = (hidden.shape, of_hidden), (weight.shape, of_others), (weight.shape[:1], of_others)
    wanted = [kwargs.get(name, default) for name, default in WANTED.items()]
    return tuple(
        as_placed(it, hidden, *(placed if is_wanted else (it.shape, replicated(rows))))
        for it, placed, is_wanted in zip(gradients, shapes, wanted)
    )


def replicated(rows: list[Placement]) -> list[Placement]:
    from torch.distributed.tensor import Replicate

    return [Replicate()] * len(rows)


def divided(kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options that tell losses from logits, and the others."""
    of_loss = {name: it for name, it in kwargs.items() if name in OF_LOSS}
    return of_loss, {name: it for name, it in kwargs.items() if name not in OF_LOSS}


def sums_of(
    rows: list[Placement], classes: Classes | None
) -> tuple[list[Placement], list[Placement]]:
    """Return the placements of the gradients of hidden, and of weight and bias."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    of_weight: list[Placement] = [
        Partial() if isinstance(it, Shard) else Replicate() for it in rows
    ]
    if classes is None:
        return rows, of_weight
    of_hidden = [Partial() if is_cut else it for is_cut, it in zip(classes.is_cut, rows)]
    return of_hidden, classes.placed(0, of_weight)
