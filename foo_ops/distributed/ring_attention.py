"""Attention of a sequence that is cut among processes: keys and values go round.

Each process has some of the queries, keys and values. In n steps it sees the keys and values of all
(Liu et al. 2023, Ring Attention, algorithm 1), and merges what it computes with each by their
logsumexp, so that no process ever has the whole sequence:

    L = log(e^L1 + e^L2),   O = e^(L1 - L) O1 + e^(L2 - L) O2

The gradients go the same way: those of keys and values travel with them, and are home in the end.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from foo_ops import _C
from foo_ops.distributed.ring import LENGTH, Ring, gather_objects
from foo_ops.distributed.sequence import Part, part_of
from foo_ops.library.dtypes import dtype_name
from foo_ops.ops.arguments import compute_type
from foo_ops.ops.attention_options import AttentionOptions

KEYS, GRADIENTS = 0, 2
"""Tags of what goes round at the same time, keys with values and their gradients."""


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    is_balanced: bool = False,
    return_logsumexp: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute scaled dot-product attention of a sequence that is cut among processes.

    All processes of the group call it, each with its part. Keys and values of one other process are
    in memory at a time, and the next ones on their way. The backward pass goes round again, on all
    processes.

    Args:
        query: (B, Hq, S, D), this process's queries, as `foo_ops.attention` takes them.
        key: (B, Hkv, Sk, D), its keys. Hq must be a multiple of Hkv.
        value: (B, Hkv, Sk, Dv). Lengths may differ from process to process; what else the tensors
            are may not.
        group: the processes, whose parts follow each other in the order of their ranks; by default
            all, and without torch.distributed this one alone.
        is_causal: queries see the keys up to their own place in the whole sequence. Then there are
            as many keys as queries on each process.
        scale: factor of the scores, by default 1 / sqrt(D).
        is_balanced: the parts are those of `shard_sequence` with is_balanced. Causal attention then
            takes half of the time, since no process waits for another.
        return_logsumexp: return the logarithm of the softmax's denominator, too.

    Returns:
        The output, (B, Hq, S, Dv) in query's dtype, and if asked for the logsumexp, (B, Hq, S) in
        float32 (float64 for float64), of this process's queries and all keys. Both can be
        differentiated once, for query, key and value. Half precision is merged in float32.

    Raises:
        ValueError, TypeError: for shapes and dtypes that do not fit together, on this process or
            between processes: on all of them, before anything goes round.

    Example:
        >>> query, key, value = torch.randn(3, 1, 8, 100, 64).unbind()
        >>> parts = map(foo_ops.distributed.shard_sequence, (query, key, value))
        >>> foo_ops.distributed.ring_attention(*parts, is_causal=True).shape
        torch.Size([1, 8, 100, 64])
    """
    output, logsumexp = attend(
        query, key, value, group=group, is_causal=is_causal, scale=scale, is_balanced=is_balanced
    )
    return (output, logsumexp) if return_logsumexp else output


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: dist.ProcessGroup | None,
    is_causal: bool,
    scale: float | None,
    is_balanced: bool,
) -> tuple[Tensor, Tensor]:
    ring = Ring(group)
    options = {"is_causal": is_causal, "scale": scale, "is_balanced": is_balanced}
    lengths = exchange_lengths(ring, query, key, value, options)
    call = Call(ring, lengths, is_causal, is_balanced, scale)
    outputs: tuple[Tensor, Tensor] = RingAttention.apply(query, key, value, call)
    return outputs


# ----------------------------------------------------------------------------------------- checks


def exchange_lengths(
    ring: Ring, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> list[int]:
    """Return how many keys each process has; where something is wrong, all raise it."""
    error = error_of(ring, query, key, value, options)
    if error is not None:
        mine: Any = error
    else:
        shapes = [list(it.shape) for it in (query, key, value)]
        mine = (shapes, dtype_name(query.dtype), options)
    all_ = gather_objects(mine, ring.group)
    for rank, its in enumerate(all_):
        if isinstance(its, Exception):
            raise type(its)(f"{its} (on rank {rank})")
    for rank, its in enumerate(all_):
        require_agreement(rank, its, all_[0])
    return [shapes[1][LENGTH] for shapes, _, _ in all_]


def error_of(
    ring: Ring, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> ValueError | TypeError | None:
    """Return what is wrong with the arguments of this process."""
    checked = AttentionOptions(scale=options["scale"]).checked()
    try:
        _C.check_attention(query, key, value, None, None, None, *checked)
    except (ValueError, TypeError) as error:
        return type(error)(f"ring_{error}")
    queries, keys = query.shape[LENGTH], key.shape[LENGTH]
    if options["is_causal"] and queries != keys:
        return ValueError(
            f"ring_attention: key must have length {queries} as query has if is_causal, got {keys}"
        )
    if options["is_balanced"] and queries % 2 != 0:
        return ValueError(
            f"ring_attention: query must have an even length if is_balanced, got {queries}"
        )
    return None


def require_agreement(rank: int, its: Any, first: Any) -> None:
    names = ("query", "key", "value")
    (shapes, dtype, options), (first_shapes, first_dtype, first_options) = its, first
    is_balanced = options["is_causal"] and options["is_balanced"]
    for name, shape, first_shape in zip(names, shapes, first_shapes):
        expected = list(first_shape)
        if not is_balanced:
            expected[LENGTH] = shape[LENGTH]
        if shape != expected:
            lengths = "" if is_balanced else " but for its length"
            raise ValueError(
                f"ring_attention: {name} must have the same shape on all processes{lengths}, got "
                f"{first_shape} on rank 0 and {shape} on rank {rank}"
            )
    if dtype != first_dtype:
        raise TypeError(
            f"ring_attention: query must have the same dtype on all processes, got {first_dtype} "
            f"on rank 0 and {dtype} on rank {rank}"
        )
    for name, value in options.items():
        if value != first_options[name]:
            raise ValueError(
                f"ring_attention: {name} must be the same on all processes, got "
                f"{first_options[name]} on rank 0 and {value} on rank {rank}"
            )


# ---------------------------------------------------------------------------------------- autograd


@dataclasses.dataclass(frozen=True)
class Call:
    """What a call is given beside its tensors.

    Attributes:
        lengths: how many keys each process has.
    """

    ring: Ring
    lengths: list[int]
    is_causal: bool
    is_balanced: bool
    scale: float | None

    def part(self, source: int, queries: int) -> Part | None:
        lengths = (queries, self.lengths[source])
        return part_of(
            self.ring.rank,
            source,
            lengths,
            is_causal=self.is_causal,
            is_balanced=self.is_balanced,
        )


class Step(NamedTuple):
    """One step round the ring: whose keys and values are here, and what to do with them."""

    source: int
    part: Part | None
    key: Tensor
    value: Tensor


def steps(call: Call, queries: int, key: Tensor, value: Tensor) -> Any:
    """Yield all keys and values; while one step is worked on, the next ones are on their way."""
    tensors = [key.contiguous(), value.contiguous()]
    for step in range(call.ring.size):
        source = call.ring.source(step)
        passing = None
        if step < call.ring.size - 1:
            length = call.lengths[call.ring.source(step + 1)]
            passing = call.ring.pass_on(tensors, length, KEYS)
        yield Step(source, call.part(source, queries), *tensors)
        if passing is not None:
            tensors = passing.wait()


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Call
    ) -> tuple[Tensor, Tensor]:
        merged = Merged(query, value.shape[-1])
        for step in steps(call, query.shape[LENGTH], key, value):
            if step.part is not None:
                queries, keys, is_causal = step.part
                merged.add(
                    queries,
                    *torch.ops.foo.attention(
                        query[:, :, queries],
                        step.key[:, :, keys],
                        step.value[:, :, keys],
                        is_causal=is_causal,
                        scale=call.scale,
                    ),
                )
        output = merged.output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, merged.logsumexp)
        ctx.call = call
        return output, merged.logsumexp

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, grad_logsumexp: Tensor) -> Any:
        query, key, value, output, logsumexp = ctx.saved_tensors
        call: Call = ctx.call
        rows = (grad_output, grad_logsumexp, query, output, logsumexp)
        compute = compute_type(query.dtype)
        grad_query = torch.zeros_like(query, dtype=compute)
        passing = None
        for step in steps(call, query.shape[LENGTH], key, value):
            if passing is None:
                gradients = [torch.zeros_like(it, dtype=compute) for it in (step.key, step.value)]
            else:
                gradients = passing.wait()
            if step.part is not None:
                queries, keys, is_causal = step.part
                added = differentiate(
                    [it[:, :, queries] for it in rows],
                    step.key[:, :, keys],
                    step.value[:, :, keys],
                    is_causal=is_causal,
                    scale=call.scale,
                )
                grad_query[:, :, queries] += added[0]
                for gradient, more in zip(gradients, added[1:]):
                    gradient[:, :, keys] += more
            # With them to the process that has the same keys in its next step; at last, home.
            length = call.lengths[(step.source - 1) % call.ring.size]
            passing = call.ring.pass_on(gradients, length, GRADIENTS)
        assert passing is not None
        grad_key, grad_value = passing.wait()
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None


def differentiate(
    rows: list[Tensor], key: Tensor, value: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value for a part of the keys.

    Those of the scores follow from the output and the logsumexp over all keys.
    """
    grad_output, grad_logsumexp, query, output, logsumexp = rows
    none = (None, None, None)
    gradients: tuple[Tensor, ...] = torch.ops.foo.attention_backward(
        grad_output, grad_logsumexp, query, key, value, *none, output, logsumexp, None, **options
    )
    return gradients[:3]


class Merged:
    """Attention over all keys seen so far, in the compute type."""

    def __init__(self, query: Tensor, value_dim: int) -> None:
        compute = compute_type(query.dtype)
        shape = query.shape[:-1]
        self.output = query.new_zeros((*shape, value_dim), dtype=compute)
        self.logsumexp = query.new_full(shape, -torch.inf, dtype=compute)

    def add(self, queries: slice, output: Tensor, logsumexp: Tensor) -> None:
        """Merge what some of the queries see in other keys."""
        merged, before = self.output[:, :, queries], self.logsumexp[:, :, queries]
        together = torch.logaddexp(before, logsumexp)
        # Where no key has been seen, the differences of infinities would be NaN.
        is_blind = together == -torch.inf
        for weight in (before, logsumexp):
            weight.sub_(together).exp_().masked_fill_(is_blind, 0.0)
        merged.mul_(before.unsqueeze(-1)).add_(output * logsumexp.unsqueeze(-1))
        before.copy_(together)
