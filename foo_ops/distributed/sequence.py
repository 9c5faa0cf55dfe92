"""Cut sequences among processes, and put them together again."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from foo_ops.distributed.ring import gather_objects, rank_and_size


class Part(NamedTuple):
    """Which of a process's queries see which of a process's keys."""

    queries: slice
    keys: slice
    is_causal: bool


def part_of(
    rank: int, source: int, lengths: tuple[int, int], *, is_causal: bool, is_balanced: bool
) -> Part | None:
    """Return the part of attention between one process's queries and another's keys.

    Args:
        rank, source: who has the queries and the keys.
        lengths: of the queries and the keys.
    """
    everything = slice(None)
    if not is_causal or source == rank:
        return Part(everything, everything, is_causal)
    if is_balanced:
        # The pieces are rank and 2 n - 1 - rank: of another process's one is before both of ours,
        # or both are between ours.
        if source < rank:
            return Part(everything, slice(lengths[1] // 2), False)
        return Part(slice(lengths[0] // 2, None), everything, False)
    return Part(everything, everything, False) if source < rank else None


def shard_sequence(
    tensor: Tensor,
    dim: int = 2,
    *,
    group: dist.ProcessGroup | None = None,
    is_balanced: bool = False,
) -> Tensor:
    """Return this process's part of a sequence that all have.

    Args:
        tensor: of any shape.
        dim: the dimension of the sequence, by default that of (B, H, S, D).
        group: the processes; by default all, and without torch.distributed this one alone.
        is_balanced: the sequence is cut into 2 n pieces for n processes, and process r has the
            pieces r and 2 n - 1 - r, so that in causal attention each has the same work. Else it
            is cut into n pieces, as torch.chunk does.

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
    """Return the sequence whose parts the processes have, in the order of `shard_sequence`.

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
