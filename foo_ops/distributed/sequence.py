"""Shard sequences among processes, gather them again, and pass tensors round a ring."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# -------------------------------------------------------------------------------- ring of processes

# Pass tensors round a ring of processes.


LENGTH = 2
"""The dimension in which the tensors of processes may have different sizes."""


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this process's rank and the size of a group; 0 and 1 without torch.distributed."""
    if group is None and not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def gather_objects(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the objects of all processes."""
    _, size = rank_and_size(group)
    if size == 1:
        return [mine]
    all_: list[Any] = [None] * size
    dist.all_gather_object(all_, mine, group=group)
    return all_


@dataclasses.dataclass(frozen=True)
class Passing:
    """Tensors on their way to the next process, and those from the previous one."""

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
        """Return the rank whose tensors are here after a number of steps."""
        return (self.rank - step) % self.size

    def pass_on(self, tensors: Sequence[Tensor], length: int, tag: int) -> Passing:
        """Send tensors, and receive tensors that differ in length only.

        Args:
            tag: the tag of the first tensor. Tensors under way at the same time need other tags.
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


# ---------------------------------------------------------------------------------------- sequences

# Shard sequences among processes, and gather them again.


class Piece(NamedTuple):
    """Consecutive rows of a process, and their start in the whole sequence."""

    rows: slice
    start: int


class Part(NamedTuple):
    """Queries of a process, and the keys of a process that they see.

    Attributes:
        columns: the keys in the whole sequence.
        offset: query i of the part stands at key i + offset of the part.
    """

    queries: slice
    keys: slice
    columns: slice
    offset: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """How queries and keys are sharded among processes, and which queries see which keys.

    Attributes:
        queries, keys: their number on each process.
        has_places: whether the places of queries and keys matter.
        window_left, window_right: as those of attention.
    """

    queries: list[int]
    keys: list[int]
    is_balanced: bool
    has_places: bool
    window_left: int
    window_right: int

    def parts(self, rank: int, source: int) -> Iterator[Part]:
        """Yield the parts of attention between one process's queries and another's keys."""
        if not self.has_places:
            if self.queries[rank] > 0 and self.keys[source] > 0:
                yield Part(slice(None), slice(None), slice(None), 0)
            return
        # Windows are aligned to the last query and the last key.
        alignment = sum(self.keys) - sum(self.queries)
        for queries in pieces(self.queries, rank, is_balanced=self.is_balanced):
            for keys in pieces(self.keys, source, is_balanced=self.is_balanced):
                offset = queries.start + alignment - keys.start
                if self._is_seen(length_of(queries.rows), length_of(keys.rows), offset):
                    columns = slice(keys.start, keys.start + length_of(keys.rows))
                    yield Part(queries.rows, keys.rows, columns, offset)

    def _is_seen(self, queries: int, keys: int, offset: int) -> bool:
        first_key, last_key = offset - self.window_left, queries - 1 + offset + self.window_right
        return (
            queries > 0
            and keys > 0
            and (self.window_left < 0 or first_key < keys)
            and (self.window_right < 0 or last_key >= 0)
        )


def length_of(rows: slice) -> int:
    length: int = rows.stop - rows.start
    return length


def pieces(lengths: list[int], rank: int, *, is_balanced: bool) -> list[Piece]:
    """Return the pieces of a process's rows, in the order of `shard_sequence`."""
    own = lengths[rank]
    if not is_balanced:
        return [Piece(slice(0, own), sum(lengths[:rank]))]
    first, last = [-(-length // 2) for length in lengths], [length // 2 for length in lengths]
    return [
        Piece(slice(0, first[rank]), sum(first[:rank])),
        Piece(slice(first[rank], own), sum(first) + sum(last[rank + 1 :])),
    ]


def shard_sequence(
    tensor: Tensor,
    dim: int = 2,
    *,
    group: dist.ProcessGroup | None = None,
    is_balanced: bool = False,
) -> Tensor:
    """Return this process's part of a sequence that all processes have.

    Args:
        tensor: of any shape.
        dim: the dimension of the sequence, by default that of (B, H, S, D).
        group: the processes; by default all, and without torch.distributed this one alone.
        is_balanced: the sequence is cut into 2 n pieces for n processes, and process r has the
            pieces r and 2 n - 1 - r, so that in causal attention each has the same work. By default
            it is cut into n pieces, as by torch.chunk.

    Returns:
        A part of the tensor; it has a gradient.

    Raises:
        ValueError: for is_balanced and a length that is no multiple of 2 n.

    Example:
        >>> foo_ops.distributed.shard_sequence(torch.arange(8), 0, is_balanced=True)
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    rank, size = rank_and_size(group)
    if not is_balanced:
        pieces = tensor.tensor_split(_ends(tensor.shape[dim], size), dim)
        return pieces[rank].contiguous()
    if tensor.shape[dim] % (2 * size) != 0:
        raise ValueError(
            f"shard_sequence: tensor must have a multiple of {2 * size} elements in dimension "
            f"{dim} if is_balanced, got {tensor.shape[dim]}"
        )
    pieces = tensor.chunk(2 * size, dim)
    return torch.cat((pieces[rank], pieces[2 * size - 1 - rank]), dim)


def _ends(length: int, size: int) -> list[int]:
    """Return where all pieces but the last end; the last ones may be empty."""
    step = -(-length // size)
    return [min(step * end, length) for end in range(1, size)]


def gather_sequence(
    tensor: Tensor,
    dim: int = 2,
    *,
    group: dist.ProcessGroup | None = None,
    is_balanced: bool = False,
) -> Tensor:
    """Return the whole sequence from the processes' parts, in the order of `shard_sequence`.

    Args:
        tensor: this process's part. In dimension ``dim`` sizes may differ.
        dim, group, is_balanced: as for `shard_sequence`.

    Returns:
        The whole tensor, on each process. It has no gradient.

    Example:
        >>> part = foo_ops.distributed.shard_sequence(torch.arange(8), 0)
        >>> foo_ops.distributed.gather_sequence(part, 0)
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    shapes = gather_objects(list(tensor.shape), group)
    # Not every backend gathers tensors of several shapes.
    padded = list(tensor.shape)
    padded[dim] = max(shape[dim] for shape in shapes)
    mine = tensor.new_zeros(padded)
    mine.narrow(dim, 0, tensor.shape[dim]).copy_(tensor.detach())
    parts = [mine]
    if len(shapes) > 1:
        parts = [torch.empty_like(mine) for _ in shapes]
        dist.all_gather(parts, mine, group=group)
    parts = [part.narrow(dim, 0, shape[dim]) for part, shape in zip(parts, shapes)]
    if is_balanced:
        halves = [part.chunk(2, dim) for part in parts]
        parts = [first for first, _ in halves] + [last for _, last in reversed(halves)]
    return torch.cat(parts, dim)
