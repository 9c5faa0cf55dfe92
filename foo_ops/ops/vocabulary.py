"""Compute cross-entropy where processes have different classes, without anybody's logits moving.

Of its own classes a process knows the logsumexp L_r of each row, and for the rows whose target is
among them the loss L_r - x_target. What travels is a maximum and two sums for each row:

    L = m + log(sum_r exp(L_r - m)),   m = max_r L_r
    loss = (1 - smoothing) ((L_r - x_target) + (L - L_r))
           + smoothing sum_r V_r / V ((L_r - mean_r x) + (L - L_r))

The gradients follow from L, each process's from its own logits. The second line is that of an
operator whose label_smoothing is 1, which needs a call of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

IGNORED = -100

# Takes targets among a process's own classes, and label_smoothing; returns losses and logsumexps.
Forward = Callable[[Tensor, float], tuple[Tensor, Tensor]]
# Takes the gradients of these, too, before the others; returns gradients.
Backward = Callable[[Tensor, Tensor, Tensor, float], list[Tensor]]


@dataclasses.dataclass(frozen=True)
class Classes:
    """Some of the classes, from ``start`` on, and the processes that have the others.

    Attributes:
        rows: the placements of what each row has.
        is_cut: for each dimension of the mesh, whether it cuts the classes.
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
        """Return the sum or the maximum of what the processes have for each row."""
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
        """Return which targets are among the own classes."""
        end = self.start + self.count
        return (target != ignore_index) & (target >= self.start) & (target < end)

    def among_own(self, target: Tensor, own: Tensor) -> Tensor:
        return (target - self.start).where(own, IGNORED)

    def any(self, target: Tensor) -> Tensor:
        """Return targets that do not count if label_smoothing is 1."""
        return torch.full_like(target, 0 if self.count > 0 else IGNORED)

    @property
    def share(self) -> float:
        return self.count / self.total if self.total else 0.0


def require_classes(
    operator: str, target: Tensor, classes: int, ignore_index: int, named: str
) -> None:
    is_wrong = (target != ignore_index) & ((target < 0) | (target >= classes))
    if is_wrong.any():
        raise IndexError(
            f"{operator}: target must be in [0, {classes}) as {named}, or ignore_index "
            f"{ignore_index}, got {target[is_wrong][0].item()}"
        )


def forward(
    classes: Classes,
    call: Forward,
    target: Tensor,
    operator: str,
    named: str,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """Return the losses and the logsumexps of rows.

    Args:
        operator, named: begin and explain the refusal of a target that is no class.
    """
    require_classes(operator, target, classes.total, ignore_index, named)
    own = classes.own(target, ignore_index)
    loss, its_sum = call(classes.among_own(target, own), 0.0)
    logsumexp = classes.logsumexp(its_sum)

    def lifted(loss: Tensor, is_counted: Tensor) -> Tensor:
        """Replace the process's logsumexp in its losses by that of all classes."""
        whole = (loss + (logsumexp - its_sum)).where(its_sum > -torch.inf, torch.inf)
        # Infinite logits of any process leave no loss.
        whole = whole.where(logsumexp != torch.inf, torch.nan)
        return whole.where(is_counted, 0.0)

    share = (1.0 - label_smoothing) * lifted(loss, own)
    if label_smoothing != 0.0 and classes.count > 0:
        plain, _ = call(classes.any(target), 1.0)
        share += label_smoothing * classes.share * lifted(plain, target != ignore_index)
    return classes.reduce(share, "sum"), logsumexp


def backward(
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
        like: a number of each row.
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
