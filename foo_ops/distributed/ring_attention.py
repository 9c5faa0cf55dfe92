"""Attention of a sequence that is sharded among processes: keys and values go round a ring."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from foo_ops import _C
from foo_ops.distributed.sequence import LENGTH, Layout, Part, Ring, gather_objects
from foo_ops.library.operators import dtype_name
from foo_ops.ops.arguments import compute_type
from foo_ops.ops.attention.formula import DEFAULTS, given_options

# ------------------------------------------------------------------------------------------- checks

# Refuse arguments of ring attention, on all processes at once.


NAMES = ("query", "key", "value", "alibi_slopes", "sinks")


def exchange_lengths(
    ring: Ring, tensors: dict[str, Tensor | None], options: dict[str, Any]
) -> tuple[list[int], list[int]]:
    """Return the numbers of queries and keys of each process.

    If arguments are wrong on one process, all processes raise the error.

    Args:
        tensors: those of NAMES and attn_bias.
    """
    error = error_of(tensors, options)
    all_ = gather_objects(described(tensors, options) if error is None else error, ring.group)
    for rank, its in enumerate(all_):
        if isinstance(its, Exception):
            raise type(its)(f"{its} (on rank {rank})")
    for rank, its in enumerate(all_):
        require_agreement(rank, its, all_[0])
    queries, keys = ([its["shapes"][name][LENGTH] for its in all_] for name in ("query", "key"))
    for rank, its in enumerate(all_):
        require_bias(rank, its, sum(keys))
    return queries, keys


def described(tensors: dict[str, Tensor | None], options: dict[str, Any]) -> dict[str, Any]:
    """Return a description of this process's arguments, for the other processes."""
    bias, query = tensors["attn_bias"], tensors["query"]
    assert query is not None
    shapes = {name: None if it is None else list(it.shape) for name, it in tensors.items()}
    return {
        "shapes": shapes,
        "dtype": query.dtype,
        "bias dtype": None if bias is None else bias.dtype,
        "options": options,
    }


def error_of(
    tensors: dict[str, Tensor | None], options: dict[str, Any]
) -> ValueError | TypeError | None:
    """Return the error in the arguments of this process, or None."""
    query, key, value, slopes, sinks = (tensors[name] for name in NAMES)
    bias = tensors["attn_bias"]
    given = {name: it for name, it in options.items() if name in DEFAULTS}
    try:
        _C.check_attention("foo::attention", (query, key, value, None, slopes, sinks), given)
    except (ValueError, TypeError) as error:
        return type(error)(f"ring_{error}")
    assert query is not None
    assert key is not None
    if bias is not None and bias.device != query.device:
        return ValueError(
            f"ring_attention: attn_bias must be on {query.device} as query is, got {bias.device}"
        )
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


def require_agreement(rank: int, its: dict[str, Any], first: dict[str, Any]) -> None:
    options, first_options = its["options"], first["options"]
    is_balanced = options["is_causal"] and options["is_balanced"]
    for name in NAMES:
        shape, first_shape = its["shapes"][name], first["shapes"][name]
        has_length = name in NAMES[:3]
        expected = first_shape
        if has_length and not is_balanced:
            expected = [*first_shape[:LENGTH], shape[LENGTH], *first_shape[LENGTH + 1 :]]
        if shape != expected:
            lengths = " except for the length" if has_length and not is_balanced else ""
            raise ValueError(
                f"ring_attention: {name} must have the same shape on all processes{lengths}, got "
                f"{first_shape} on rank 0 and {shape} on rank {rank}"
            )
    if its["dtype"] != first["dtype"]:
        raise TypeError(
            "ring_attention: query must have the same dtype on all processes, got "
            f"{dtype_name(first['dtype'])} on rank 0 and {dtype_name(its['dtype'])} on rank {rank}"
        )
    for name, value in options.items():
        if value != first_options[name]:
            raise ValueError(
                f"ring_attention: {name} must be the same on all processes, got "
                f"{first_options[name]} on rank 0 and {value} on rank {rank}"
            )


def require_bias(rank: int, its: dict[str, Any], keys: int) -> None:
    """Refuse a bias that does not broadcast to a process's queries and all keys."""
    shapes = its["shapes"]
    if shapes["attn_bias"] is None:
        return
    whole = {name: list(shapes[name]) for name in NAMES[:3]}
    for name in ("key", "value"):
        whole[name][LENGTH] = keys
    tensors = [torch.empty(it, dtype=its["dtype"], device="meta") for it in whole.values()]
    bias = torch.empty(shapes["attn_bias"], dtype=its["bias dtype"], device="meta")
    try:
        _C.check_attention("foo::attention", (*tensors, bias), {})
    except (ValueError, TypeError) as error:
        raise type(error)(f"ring_{error} (on rank {rank})") from None


# ---------------------------------------------------------------------------------------- attention

# Each process has some of the queries, keys and values. In n steps it sees the keys and values of
# all processes (Liu et al. 2023, Ring Attention, algorithm 1), and merges the partial results by
# their logsumexp, so that no process ever has the whole sequence:
#
#     L = log(e^L1 + e^L2),   O = e^(L1 - L) O1 + e^(L2 - L) O2
#
# Gradients go the same way: those of keys and values travel with them, and arrive at home.


KEYS, GRADIENTS = 0, 2
"""Tags of tensors that go round at the same time: keys with values, and their gradients."""


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    is_balanced: bool = False,
    return_logsumexp: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute scaled dot-product attention of a sequence that is sharded among processes.

    All processes of the group call it, each with its part. At a time, a process has the keys and
    values of one other process in memory, while the next ones are on their way. The backward pass
    goes round again, on all processes. There is no dropout.

    Args:
        query: (B, Hq, S, D), this process's queries, as `foo_ops.attention` takes them.
        key: (B, Hkv, Sk, D), its keys. Hq must be a multiple of Hkv.
        value: (B, Hkv, Sk, Dv). Lengths may differ from process to process; other sizes and dtypes
            may not.
        attn_bias: of any shape that broadcasts to (B, Hq, S, keys), for this process's queries and
            the keys of all, in the order of the whole sequence.
        alibi_slopes, sinks: as for `foo_ops.attention`, the same on all processes.
        group: the processes, whose parts follow each other in the order of their ranks; by default
            all, and without torch.distributed this one alone.
        is_causal: queries see the keys up to their own place in the whole sequence. Each process
            must have as many keys as queries then.
        scale: factor of the scores, by default 1 / sqrt(D).
        window_left, window_right, softcap: as for `foo_ops.attention` of the whole sequence. A
            process skips keys that none of its queries sees.
        is_balanced: the parts are those of `shard_sequence` with is_balanced. Causal attention then
            takes half of the time, since no process waits for another.
        return_logsumexp: return the logarithm of the softmax's denominator, too.

    Returns:
        The output, (B, Hq, S, Dv) in query's dtype, and with ``return_logsumexp`` the logsumexp,
        (B, Hq, S) in float32 (float64 for float64), of this process's queries and all keys. Both
        can be differentiated once, for all tensors; the gradients of bias, slopes and sinks are
        those of this process's queries, which sum up to the whole. Half precision is merged in
        float32.

    Raises:
        ValueError, TypeError: for shapes and dtypes that do not fit together, on this process or
            between processes. All processes raise it, before any tensor is sent.

    Example:
        >>> query, key, value = torch.randn(3, 1, 8, 100, 64).unbind()
        >>> parts = map(foo_ops.distributed.shard_sequence, (query, key, value))
        >>> foo_ops.distributed.ring_attention(*parts, is_causal=True).shape
        torch.Size([1, 8, 100, 64])
    """
    output, logsumexp = attend(
        query,
        key,
        value,
        attn_bias,
        alibi_slopes,
        sinks,
        group=group,
        is_causal=is_causal,
        scale=scale,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
        is_balanced=is_balanced,
    )
    return (output, logsumexp) if return_logsumexp else output


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    *,
    group: dist.ProcessGroup | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    ring = Ring(group)
    added = {"attn_bias": attn_bias, "alibi_slopes": alibi_slopes, "sinks": sinks}
    tensors = {"query": query, "key": key, "value": value, **added}
    queries, keys = exchange_lengths(ring, tensors, options)
    is_causal, is_balanced = options.pop("is_causal"), options.pop("is_balanced")
    if is_causal:
        # There are as many keys as queries, so both alignments are the same.
        options["window_right"] = 0
    window = options["window_left"], options["window_right"]
    has_places = window != (-1, -1) or attn_bias is not None or alibi_slopes is not None
    layout = Layout(queries, keys, is_balanced, has_places, *window)
    call = Call(ring, layout, given_options(**options))
    if attn_bias is not None:
        # Each part has columns of its own.
        attn_bias = attn_bias.expand(*attn_bias.shape[:-1], sum(keys))
    outputs: tuple[Tensor, Tensor] = RingAttention.apply(
        query, key, value, attn_bias, alibi_slopes, sinks, call
    )
    return outputs


# ---------------------------------------------------------------------------------------- autograd


@dataclasses.dataclass(frozen=True)
class Call:
    """A call's arguments besides its tensors."""

    ring: Ring
    layout: Layout
    options: dict[str, Any]


class Step(NamedTuple):
    """One step round the ring: the keys and values that are here, and their process."""

    source: int
    key: Tensor
    value: Tensor


def steps(call: Call, key: Tensor, value: Tensor) -> Iterator[Step]:
    """Yield all keys and values; during each step the next ones are on their way."""
    tensors = [key.contiguous(), value.contiguous()]
    for step in range(call.ring.size):
        passing = None
        if step < call.ring.size - 1:
            length = call.layout.keys[call.ring.source(step + 1)]
            passing = call.ring.pass_on(tensors, length, KEYS)
        yield Step(call.ring.source(step), *tensors)
        if passing is not None:
            tensors = passing.wait()


def bias_of(attn_bias: Tensor | None, part: Part) -> Tensor | None:
    """Return the bias of a part, which may be the same for all queries."""
    if attn_bias is None:
        return None
    if attn_bias.dim() > 1 and attn_bias.shape[-2] != 1:
        attn_bias = attn_bias[..., part.queries, :]
    return attn_bias[..., part.columns]


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Tensor | None,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
        call: Call,
    ) -> tuple[Tensor, Tensor]:
        merged = Merged(query, value.shape[-1], sinks)
        for step in steps(call, key, value):
            for part in call.layout.parts(call.ring.rank, step.source):
                merged.add(
                    part.queries,
                    *torch.ops.foo.attention_seeded(
                        query[:, :, part.queries],
                        step.key[:, :, part.keys],
                        step.value[:, :, part.keys],
                        bias_of(attn_bias, part),
                        alibi_slopes,
                        part_offset=part.offset,
                        **call.options,
                    ),
                )
        output = merged.output.to(query.dtype)
        added = (attn_bias, alibi_slopes, sinks)
        ctx.save_for_backward(query, key, value, *added, output, merged.logsumexp)
        ctx.call = call
        return output, merged.logsumexp

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, grad_logsumexp: Tensor) -> Any:
        query, key, value, attn_bias, slopes, sinks, output, logsumexp = ctx.saved_tensors
        call: Call = ctx.call
        rows = Rows(grad_output, grad_logsumexp, query, output, logsumexp)
        compute = compute_type(query.dtype)
        grad_query = torch.zeros_like(query, dtype=compute)
        wants_bias = ctx.needs_input_grad[3]
        grad_bias = torch.zeros(attn_bias.shape, **as_sums(query)) if wants_bias else None
        grad_slopes = None if slopes is None else torch.zeros(slopes.shape, **as_sums(query))
        passing = None
        for step in steps(call, key, value):
            if passing is None:
                gradients = [torch.zeros_like(it, dtype=compute) for it in (step.key, step.value)]
            else:
                gradients = passing.wait()
            for part in call.layout.parts(call.ring.rank, step.source):
                added = differentiate(
                    rows.part(part.queries),
                    step.key[:, :, part.keys],
                    step.value[:, :, part.keys],
                    bias_of(attn_bias, part),
                    slopes,
                    attn_bias_requires_grad=wants_bias,
                    part_offset=part.offset,
                    **call.options,
                )
                grad_query[:, :, part.queries] += added[0]
                for gradient, more in zip(gradients, added[1:3]):
                    gradient[:, :, part.keys] += more
                of_bias = bias_of(grad_bias, part)
                if of_bias is not None:
                    of_bias += added[3]
                if grad_slopes is not None:
                    grad_slopes += added[4]
            # Sent to the process that has the same keys in its next step; in the last step, home.
            length = call.layout.keys[(step.source - 1) % call.ring.size]
            passing = call.ring.pass_on(gradients, length, GRADIENTS)
        assert passing is not None
        grad_key, grad_value = passing.wait()
        of_added = (grad_bias, grad_slopes, None if sinks is None else rows.of_sinks(sinks))
        return (
            grad_query.to(query.dtype),
            grad_key.to(key.dtype),
            grad_value.to(value.dtype),
            *(
                None if it is None else it.to(its.dtype)
                for it, its in zip(of_added, (attn_bias, slopes, sinks))
            ),
            None,
        )


def as_sums(query: Tensor) -> dict[str, Any]:
    return {"dtype": compute_type(query.dtype), "device": query.device}


class Rows(NamedTuple):
    """The tensors of the backward pass for each query; the logsumexp is over all keys."""

    grad_output: Tensor
    grad_logsumexp: Tensor
    query: Tensor
    output: Tensor
    logsumexp: Tensor

    def part(self, queries: slice) -> Rows:
        return Rows(*(it[:, :, queries] for it in self))

    def of_sinks(self, sinks: Tensor) -> Tensor:
        """Return the gradient of sinks, scores with values of zero, in the compute type."""
        compute = self.logsumexp.dtype
        delta = (self.grad_output.to(compute) * self.output).sum(-1) - self.grad_logsumexp
        weights = torch.exp(sinks.to(compute).unsqueeze(-1) - self.logsumexp)
        # A query that sees no key, with a sink of -infinity.
        weights = weights.masked_fill(self.logsumexp == -torch.inf, 0.0)
        return -(weights * delta).sum(-1).sum_to_size(sinks.shape)


def differentiate(
    rows: Rows,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    slopes: Tensor | None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Return the gradients for a part of the keys."""
    grad_output, grad_logsumexp, query, output, logsumexp = rows
    gradients: tuple[Tensor, ...] = torch.ops.foo.attention_backward(
        grad_output, grad_logsumexp, query, key, value, attn_bias, slopes, None, output, logsumexp,
        None, **options,
    )  # fmt: skip
    return gradients


class Merged:
    """Attention over all keys seen so far, in the compute type.

    A sink is a score that has been seen already, with a value of zero.
    """

    def __init__(self, query: Tensor, value_dim: int, sinks: Tensor | None) -> None:
        compute = compute_type(query.dtype)
        shape = query.shape[:-1]
        self.output = query.new_zeros((*shape, value_dim), dtype=compute)
        self.logsumexp = query.new_full(shape, -torch.inf, dtype=compute)
        if sinks is not None:
            self.logsumexp.copy_(sinks.unsqueeze(-1))

    def add(self, queries: slice, output: Tensor, logsumexp: Tensor) -> None:
        """Merge the attention of some queries over more keys."""
        merged, before = self.output[:, :, queries], self.logsumexp[:, :, queries]
        together = torch.logaddexp(before, logsumexp)
        # If no key has been seen, the differences of infinities would be NaN.
        is_blind = together == -torch.inf
        for weight in (before, logsumexp):
            weight.sub_(together).exp_().masked_fill_(is_blind, 0.0)
        merged.mul_(before.unsqueeze(-1)).add_(output * logsumexp.unsqueeze(-1))
        before.copy_(together)
