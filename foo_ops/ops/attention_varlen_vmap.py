"""Map packed attention under torch.vmap: mapped calls are more sequences of one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foo_ops import library
from foo_ops.library.operators import find
from foo_ops.ops.attention_vmap import Dims, Fold, padded, shape_of


class Inputs(NamedTuple):
    """The tensors of foo::attention_varlen, or where they are mapped."""

    query: Any
    key: Any
    value: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_k: Any
    block_table: Any
    alibi_slopes: Any
    sinks: Any


@dataclasses.dataclass(frozen=True)
class PackedFold:
    """Mapped calls, whose sequences follow each other.

    Attributes:
        calls: how many there are.
        dims: where the tensors are mapped.
        shares_pages: whether pages that are not mapped serve all calls. Their gradients would be
            one sum for all.
    """

    calls: int
    dims: Inputs
    shares_pages: bool

    def inputs(self, inputs: Inputs) -> Inputs:
        dims, fold = self.dims, Fold(self.calls, inputs.cu_seqlens_q.shape[0] - 1)
        key, value, block_table = inputs.key, inputs.value, inputs.block_table
        pages = None if block_table is None else shape_of(key, dims.key)[0]
        if pages is not None:
            block_table = fold.tensor(block_table, dims.block_table)
        if pages is None or not self.has_common_pages():
            key, value = fold.tensor(key, dims.key), fold.tensor(value, dims.value)
            if pages is not None:
                block_table = self.moved(fold.unfold(block_table), pages)
        return Inputs(
            fold.tensor(inputs.query, dims.query),
            key,
            value,
            self.starts(inputs.cu_seqlens_q),
            self.starts(inputs.cu_seqlens_k),
            None if inputs.seqused_k is None else fold.tensor(inputs.seqused_k, dims.seqused_k),
            block_table,
            fold.of_heads(inputs.alibi_slopes, dims.alibi_slopes),
            fold.of_heads(inputs.sinks, dims.sinks),
        )

    def has_common_pages(self) -> bool:
        return self.shares_pages and self.dims.key is None and self.dims.value is None

    def starts(self, cu_seqlens: Tensor) -> Tensor:
        """Continue the starts of one call's sequences."""
        calls = torch.arange(self.calls, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
        moved = cu_seqlens[1:] + (calls * cu_seqlens[-1]).unsqueeze(1)
        return torch.cat((cu_seqlens[:1], moved.flatten()))

    def moved(self, tables: Tensor, pages: int) -> Tensor:
        """Give each call pages of its own; numbers that no page has must not become another's."""
        calls = torch.arange(self.calls, dtype=tables.dtype, device=tables.device)
        exists = (tables >= 0) & (tables < pages)
        return (tables + calls.view(-1, 1, 1) * pages).where(exists, -1).flatten(0, 1)

    def unfold(self, tensor: Tensor, dim: int = 0) -> Tensor:
        return tensor.unflatten(dim, (self.calls, tensor.shape[dim] // self.calls))


def of_rows(tensor: Tensor, in_dim: int | None, calls: int) -> Tensor:
    """Fold a logsumexp or its gradient, (heads, total)."""
    if in_dim is None:
        return tensor.unsqueeze(1).expand(-1, calls, -1).flatten(1)
    return tensor.movedim(in_dim, 1).flatten(1)


def is_loop(calls: int, dims: Inputs, seed: Tensor | None) -> bool:
    """Whether each call is made on its own.

    What dropout keeps depends on the place among the sequences. Starts that are mapped have to be
    right for each call.
    """
    return calls == 0 or seed is not None or dims[3:5] != (None, None)


def make_packed_forward_rule(name: str) -> Callable[..., Any]:
    """Make the rule of foo::attention_varlen or foo::attention_varlen_seeded."""

    def vmap(info: Any, in_dims: Dims, *inputs: Tensor | None, **options: Any) -> Any:
        *tensors, seed = padded(inputs, 10)
        dims = Inputs(*padded(in_dims, 9)[:9])
        operator = find(name)
        if is_loop(info.batch_size, dims, seed):
            return library.vmap_by_loop(operator, info, in_dims, *inputs, **options)
        fold = PackedFold(info.batch_size, dims, shares_pages=True)
        output, logsumexp = operator(*fold.inputs(Inputs(*tensors)), **options)
        return (fold.unfold(output), fold.unfold(logsumexp, 1)), (0, 1)

    return vmap


def vmap_packed_backward(info: Any, in_dims: Dims, *inputs: Any, **options: Any) -> Any:
    """Compute the gradients of all mapped calls in one, as the forward pass does."""
    grad_output, grad_logsumexp, *tensors, output, logsumexp, seed = inputs
    given, dims, calls = Inputs(*tensors), Inputs(*in_dims[2:11]), info.batch_size
    operator = torch.ops.foo.attention_varlen_backward.default
    if is_loop(calls, dims, seed):
        return library.vmap_by_loop(operator, info, in_dims, *inputs, **options)
    fold = PackedFold(calls, dims, shares_pages=False)
    of_batch = Fold(calls, given.cu_seqlens_q.shape[0] - 1)
    *gradients, of_slopes, of_sinks = operator(
        of_batch.tensor(grad_output, in_dims[0]),
        of_rows(grad_logsumexp, in_dims[1], calls),
        *fold.inputs(given),
        of_batch.tensor(output, in_dims[11]),
        of_rows(logsumexp, in_dims[12], calls),
        None,
        **options,
    )
    if given.alibi_slopes is not None:
        of_slopes = of_batch.gradient(of_slopes, given.alibi_slopes, dims.alibi_slopes)
    if given.sinks is not None:
        of_sinks = of_batch.gradient(of_sinks, given.sinks, dims.sinks)
    are_mapped = (*(True,) * 3, given.alibi_slopes is not None, given.sinks is not None)
    found = (*map(fold.unfold, gradients), of_slopes, of_sinks)
    return found, tuple(0 if is_mapped else None for is_mapped in are_mapped)
