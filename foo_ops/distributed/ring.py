"""Pass tensors round a ring of processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LENGTH = 2
"""The dimension in which the tensors of processes may have different sizes."""


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this process's place in a group; without torch.distributed there is one process."""
    if group is None and not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def gather_objects(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return what each process gives."""
    _, size = rank_and_size(group)
    if size == 1:
        return [mine]
    all_: list[Any] = [None] * size
    dist.all_gather_object(all_, mine, group=group)
    return all_


@dataclasses.dataclass(frozen=True)
class Passing:
    """Tensors on their way to the next process, and those of the one before."""

    sent: Sequence[Tensor]
    received: list[Tensor]
    works: Sequence[dist.Work]

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        return self.received


class Ring:
    """The processes of a group, each of which sends to the next one."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.size = rank_and_size(group)
        self._next = (self.rank + 1) % self.size
        self._previous = (self.rank - 1) % self.size

    def source(self, step: int) -> int:
        """Return whose tensors are here after so many steps."""
        return (self.rank - step) % self.size

    def pass_on(self, tensors: Sequence[Tensor], length: int, tag: int) -> Passing:
        """Send tensors, and receive such tensors of another length.

        Args:
            tag: of the first; what is under way at the same time has tags of its own.
        """
        if self.size == 1:
            return Passing(tensors, list(tensors), [])
        received, operations = [], []
        for place, tensor in enumerate(tensors, tag):
            shape = list(tensor.shape)
            shape[LENGTH] = length
            target = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            received.append(target)
            if tensor.numel() > 0:
                operations.append(self._operation(dist.isend, tensor, self._next, place))
            if target.numel() > 0:
                operations.append(self._operation(dist.irecv, target, self._previous, place))
        works = dist.batch_isend_irecv(operations) if operations else []
        return Passing(tensors, received, works)

    def _operation(
        self, function: Callable[..., Any], tensor: Tensor, rank: int, tag: int
    ) -> dist.P2POp:
        return dist.P2POp(function, tensor, group=self.group, group_peer=rank, tag=tag)
