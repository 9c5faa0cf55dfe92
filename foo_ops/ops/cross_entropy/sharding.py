"""Compute cross-entropy of DTensors: each process has some of the rows, or of the classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foo_ops import library

# -------------------------------------------------------------------------------- different classes

# Compute cross-entropy if processes have different classes, without sending logits.
#
# From its own classes, process r has the logsumexp L_r of each row, and for rows whose target is
# among them the loss L_r - x_target. Processes exchange a maximum and two sums for each row:
#
#     L = m + log(sum_r exp(L_r - m)),   m = max_r L_r
#     loss = (1 - smoothing) ((L_r - x_target) + (L - L_r))
#            + smoothing sum_r V_r / V ((L_r - mean_r x) + (L - L_r))
#
# From L, each process computes the gradients of its own logits. The second line of the loss is the
# operator with label_smoothing 1, in a separate call.


if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

IGNORED = -100

# Takes targets among a process's own classes, and label_smoothing; returns losses and logsumexps.
Forward = Callable[[Tensor, float], tuple[Tensor, Tensor]]
# Takes the gradients of losses and logsumexps before the same arguments; returns gradients.
Backward = Callable[[Tensor, Tensor, Tensor, float], list[Tensor]]


@dataclasses.dataclass(frozen=True)
class Classes:
    """Some of the classes, from ``start`` on, and the processes that have the others.

    Attributes:
        rows: the placements of tensors with one number per row.
        is_cut: for each dimension of the mesh, whether it shards the classes.
    """

    mesh: DeviceMesh
    rows: list[Placement]
    is_cut: list[bool]
    start: int
    count: int
    total: int

    def placed(self, dim: int, others: Sequence[Placement]) -> list[Placement]:
        """Return placements of a tensor that has the classes in dimension ``dim``."""
        from torch.distributed.tensor import Shard

        return [Shard(dim) if is_cut else it for is_cut, it in zip(self.is_cut, others)]

    def reduce(self, tensor: Tensor, operation: str) -> Tensor:
        """Return the sum or the maximum over processes for each row."""
        from torch.distributed.tensor import DTensor, Partial

        placements = [
            Partial(operation) if is_cut else row for row, is_cut in zip(self.rows, self.is_cut)
        ]
        mine = DTensor.from_local(tensor, self.mesh, placements, run_check=False)
        return mine.redistribute(placements=self.rows).to_local()

    def logsumexp(self, own: Tensor) -> Tensor:
        largest = self.reduce(own, "max")
        base = largest.where(largest.isfinite(), 0.0)
        return base + self.reduce((own - base).exp(), "sum").log()

    def own(self, target: Tensor, ignore_index: int) -> Tensor:
        """Return the mask of targets that are among this process's classes."""
        end = self.start + self.count
        return (target != ignore_index) & (target >= self.start) & (target < end)

    def among_own(self, target: Tensor, own: Tensor) -> Tensor:
        return (target - self.start).where(own, IGNORED)

    def any(self, target: Tensor) -> Tensor:
        """Return any valid targets, for calls with label_smoothing 1, where they do not count."""
        return torch.full_like(target, 0 if self.count > 0 else IGNORED)

    @property
    def share(self) -> float:
        return self.count / self.total if self.total else 0.0


def require_classes(operator: str, target: Tensor, classes: int, ignore_index: int) -> None:
    is_wrong = (target != ignore_index) & ((target < 0) | (target >= classes))
    if is_wrong.any():
        raise IndexError(
            f"{operator}: target must be a class in [0, {classes}) or ignore_index {ignore_index}, "
            f"got {target[is_wrong][0].item()}"
        )


def vocabulary_forward(
    classes: Classes,
    call: Forward,
    target: Tensor,
    operator: str,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """Return the losses and the logsumexps of rows.

    Args:
        operator: the name for the error about a target that is no class.
    """
    require_classes(operator, target, classes.total, ignore_index)
    own = classes.own(target, ignore_index)
    loss, its_sum = call(classes.among_own(target, own), 0.0)
    logsumexp = classes.logsumexp(its_sum)

    def lifted(loss: Tensor, is_counted: Tensor) -> Tensor:
        """Replace the process's logsumexp in its losses by that of all classes."""
        whole = (loss + (logsumexp - its_sum)).where(its_sum > -torch.inf, torch.inf)
        # An infinite logit on any process makes the loss NaN.
        whole = whole.where(logsumexp != torch.inf, torch.nan)
        return whole.where(is_counted, 0.0)

    share = (1.0 - label_smoothing) * lifted(loss, own)
    if label_smoothing != 0.0 and classes.count > 0:
        uniform, _ = call(classes.any(target), 1.0)
        share += label_smoothing * classes.share * lifted(uniform, target != ignore_index)
    return classes.reduce(share, "sum"), logsumexp


def vocabulary_backward(
    classes: Classes,
    call: Backward,
    grad_loss: Tensor | None,
    grad_logsumexp: Tensor | None,
    target: Tensor,
    like: Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> list[Tensor]:
    """Return the gradients that follow from a process's own classes.

    Args:
        like: a tensor with one number per row.
    """
    of_loss = torch.zeros_like(like) if grad_loss is None else grad_loss
    of_loss = of_loss.where(target != ignore_index, 0.0)
    of_logsumexp = torch.zeros_like(like) if grad_logsumexp is None else grad_logsumexp
    own = classes.own(target, ignore_index)
    of_target = (1.0 - label_smoothing) * of_loss
    results = call(
        of_target.where(own, 0.0),
        of_logsumexp + of_target.where(~own, 0.0),
        classes.among_own(target, own),
        0.0,
    )
    if label_smoothing != 0.0 and classes.count > 0:
        of_mean = label_smoothing * of_loss
        share = classes.share
        more = call(share * of_mean, (1.0 - share) * of_mean, classes.any(target), 1.0)
        results = [it + its for it, its in zip(results, more)]
    return results


# ---------------------------------------------------------------------------- softmax_cross_entropy

# Compute the cross-entropy of DTensors: each process has some of the rows, or of the classes.
#
# The mean needs the sum and the count over all processes, which placements cannot express.


if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def register_softmax() -> None:
    """Register with DTensor, which is imported by now."""
    from torch.distributed.tensor import DTensor

    library.register_torch_dispatch("foo::softmax_cross_entropy", DTensor, softmax_forward)
    library.register_torch_dispatch(
        "foo::softmax_cross_entropy_backward", DTensor, softmax_backward
    )


@torch.no_grad()
def softmax_forward(
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

        loss, logsumexp = vocabulary_forward(
            classes, call, labels, "softmax_cross_entropy", **kwargs
        )
    loss, logsumexp = (as_placed(it, logits, logits.shape[:-1], rows) for it in (loss, logsumexp))
    return loss, logsumexp, loss.sum() / count(target, **kwargs)


@torch.no_grad()
def softmax_backward(
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

    (gradient,) = vocabulary_backward(classes, call, given[0], given[1], labels, sums, **kwargs)
    return as_placed(gradient, logits, logits.shape, placements)


def require_distributed(operator: str, **tensors: Tensor | None) -> None:
    from torch.distributed.tensor import DTensor

    for name, tensor in tensors.items():
        if tensor is not None and not isinstance(tensor, DTensor):
            raise TypeError(f"{operator}: {name} must be a DTensor as others are, got a Tensor")


def rows_of(logits: DTensor) -> list[Placement]:
    """Return the placements of tensors with one number per row."""
    from torch.distributed.tensor import Replicate, Shard

    return [
        it if isinstance(it, Shard) and it.dim < logits.dim() - 1 else Replicate()
        for it in logits.placements
    ]


def classes_of(tensor: DTensor, dim: int, rows: list[Placement]) -> Classes | None:
    """Return a process's classes, from a tensor that has the classes in dimension ``dim``.

    None if all processes have all classes. A mesh dimension that shards rows shards no classes.
    """
    from torch.distributed.tensor import Replicate, Shard

    from foo_ops.compat import local_shape_and_global_offset

    is_cut = [
        isinstance(it, Shard) and it.dim == dim and not isinstance(row, Shard)
        for it, row in zip(tensor.placements, rows)
    ]
    if not any(is_cut):
        return None
    mesh, total = tensor.device_mesh, tensor.shape[dim]
    placements = [Shard(0) if it else Replicate() for it in is_cut]
    (own,), (start,) = local_shape_and_global_offset((total,), mesh, placements)
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


# ----------------------------------------------------------------------------- linear_cross_entropy

# Compute foo::linear_cross_entropy of DTensors: each process has some rows, or some classes.
#
# With some rows, each process computes its share of the gradients of weight and bias; with some
# classes, its share of the gradient of hidden. These gradients are sums over processes.


if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

OF_LOSS = ("label_smoothing", "ignore_index")
# The options of gradients, and their defaults.
WANTED = {"hidden_requires_grad": True, "weight_requires_grad": True, "bias_requires_grad": False}


def register_linear() -> None:
    """Register with DTensor, which is imported by now."""
    from torch.distributed.tensor import DTensor

    library.register_torch_dispatch("foo::linear_cross_entropy", DTensor, linear_forward)
    library.register_torch_dispatch("foo::linear_cross_entropy_backward", DTensor, linear_backward)


@torch.no_grad()
def linear_forward(
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

        loss, logsumexp = vocabulary_forward(
            classes, call, labels, "linear_cross_entropy", **of_loss
        )
    loss, logsumexp = (as_placed(it, hidden, hidden.shape[:-1], rows) for it in (loss, logsumexp))
    return loss, logsumexp, loss.sum() / count(target, **kwargs)


@torch.no_grad()
def linear_backward(
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

        gradients = vocabulary_backward(classes, call, given[0], given[1], labels, sums, **of_loss)
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
    """Return the options of the loss, and those of the logits."""
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
