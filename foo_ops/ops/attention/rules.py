"""Attention under torch.vmap, and on DTensors: by parts of the batch and of the heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from foo_ops import library
from foo_ops._process import after_import
from foo_ops.compat import get_unwrapped, is_batched_tensor, maybe_get_bdim
from foo_ops.library.operators import find

# ----------------------------------------------------------------- dense attention under torch.vmap

# Map dense attention under torch.vmap: the mapped dimension becomes part of the batch.


Dims = tuple[int | None, ...]

# Runs torch.nn.functional.scaled_dot_product_attention on foo.
FUSED = "aten::_scaled_dot_product_fused_attention_overrideable"
# Defaults of query, key, value, attn_bias, dropout_p, is_causal, return_debug_mask.
FUSED_DEFAULTS: tuple[Any, ...] = (None, None, None, None, 0.0, False, False)


@dataclasses.dataclass(frozen=True)
class Fold:
    """Mapped calls, and the batch of each."""

    calls: int
    batch: int

    def tensor(self, tensor: Tensor, in_dim: int | None) -> Tensor:
        """Fold the mapped dimension into the batch, the first dimension."""
        if in_dim is None:
            return tensor.expand(self.calls, *tensor.shape).flatten(0, 1)
        return tensor.movedim(in_dim, 0).flatten(0, 1)

    def bias(self, bias: Tensor, in_dim: int | None, is_differentiated: bool = False) -> Tensor:
        """Fold a bias, which may have no batch dimension.

        Without a gradient, a bias that is neither mapped nor batched is broadcast as it is.
        """
        bias = _with_dimensions(bias, in_dim, 4)
        if in_dim is None and bias.shape[0] == 1 and not is_differentiated:
            return bias
        return bias.expand(self.calls, self.batch, *bias.shape[-3:]).flatten(0, 1)

    def of_heads(self, tensor: Tensor | None, in_dim: int | None) -> Tensor | None:
        """Fold slopes or sinks, which may have no batch dimension."""
        if tensor is None:
            return None
        tensor = _with_dimensions(tensor, in_dim, 2)
        return tensor.expand(self.calls, self.batch, -1).flatten(0, 1)

    def unfold(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (self.calls, self.batch))

    def gradient(self, gradient: Tensor, of: Tensor, in_dim: int | None) -> Tensor:
        """Sum a gradient over the batch, if its tensor is broadcast along the batch."""
        shape, gradient = shape_of(of, in_dim), self.unfold(gradient)
        if len(shape) < gradient.dim() - 1 or shape[0] != self.batch:
            gradient = gradient.sum(1)
        return gradient.reshape(self.calls, *shape)


def _with_dimensions(tensor: Tensor, in_dim: int | None, dimensions: int) -> Tensor:
    """Insert dimensions of size 1 before those that are not mapped."""
    if in_dim is not None:
        tensor = tensor.movedim(in_dim, 0)
    first = 0 if in_dim is None else 1
    while tensor.dim() < dimensions + first:
        tensor = tensor.unsqueeze(first)
    return tensor


def _fold(info: Any, query: Tensor, in_dim: int | None) -> Fold:
    return Fold(info.batch_size, shape_of(query, in_dim)[0])


def shape_of(tensor: Tensor, in_dim: int | None) -> list[int]:
    """Return the shape that each call sees."""
    shape = list(tensor.shape)
    if in_dim is not None:
        del shape[in_dim]
    return shape


def padded(arguments: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    return (*arguments, *(None,) * (count - len(arguments)))


def make_forward_rule(name: str) -> Callable[..., Any]:
    """Make the rule of foo::attention or foo::attention_seeded.

    With a seed the rule is a loop, since dropout depends on the place in the batch. foo::attention
    with dropout does not come here: csrc/ops/attention/dense.cpp draws a seed for it first.
    """

    def vmap(info: Any, in_dims: Dims, *inputs: Tensor | None, **options: Any) -> Any:
        dims, tensors = padded(in_dims, 6)[:6], padded(inputs, 8)
        query, key, value, attn_bias, alibi_slopes, sinks, *numbers = tensors
        operator = find(name)
        if any(it is not None for it in numbers):
            return library.vmap_by_loop(operator, info, in_dims, *inputs, **options)
        fold = _fold(info, query, dims[0])
        if attn_bias is not None:
            attn_bias = fold.bias(attn_bias, dims[3])
        folded = map(fold.tensor, (query, key, value), dims)
        of_heads = map(fold.of_heads, (alibi_slopes, sinks), dims[4:])
        outputs = operator(*folded, attn_bias, *of_heads, **options)
        return tuple(map(fold.unfold, outputs)), (0, 0)

    return vmap


def vmap_backward(
    info: Any, in_dims: Dims, *inputs: Any, attn_bias_requires_grad: bool = False, **options: Any
) -> Any:
    """Compute the gradients of all mapped calls in one, as the forward pass does."""
    given, numbers = inputs[:10], inputs[10:]
    *first, attn_bias, alibi_slopes, sinks, output, logsumexp = given
    options["attn_bias_requires_grad"] = attn_bias_requires_grad
    operator = torch.ops.foo.attention_backward.default
    if any(it is not None for it in numbers):
        return library.vmap_by_loop(operator, info, in_dims, *inputs, **options)
    fold = _fold(info, first[2], in_dims[2])
    bias = attn_bias
    if bias is not None:
        bias = fold.bias(bias, in_dims[5], attn_bias_requires_grad)
    folded = map(fold.tensor, first, in_dims)
    of_heads = map(fold.of_heads, (alibi_slopes, sinks), in_dims[6:])
    results = map(fold.tensor, (output, logsumexp), in_dims[8:])
    gradients = operator(*folded, bias, *of_heads, *results, None, **options)
    found = [*map(fold.unfold, gradients[:3]), *gradients[3:]]
    has_bias_gradient = attn_bias is not None and attn_bias_requires_grad
    if has_bias_gradient:
        found[3] = fold.gradient(gradients[3], attn_bias, in_dims[5])
    for place, tensor, in_dim in ((4, alibi_slopes, in_dims[6]), (5, sinks, in_dims[7])):
        if tensor is not None:
            found[place] = fold.gradient(gradients[place], tensor, in_dim)
    are_mapped = (*(True,) * 3, has_bias_gradient, alibi_slopes is not None, sinks is not None)
    return tuple(found), tuple(0 if is_mapped else None for is_mapped in are_mapped)


def vmap_fused(info: Any, in_dims: Dims, *inputs: Any, **options: Any) -> Any:
    """Map torch's scaled_dot_product_attention on foo."""
    given = inputs + FUSED_DEFAULTS[len(inputs) :]
    query, key, value, attn_bias, dropout_p, *rest = given
    dims = padded(in_dims, 4)[:4]
    if dropout_p > 0.0:
        options |= {"dropout_p": dropout_p, "is_causal": rest[0]}
        return _fused_with_dropout(info, dims, query, key, value, attn_bias, **options)
    fold = _fold(info, query, dims[0])
    if attn_bias is not None:
        attn_bias = fold.bias(attn_bias, dims[3])
    folded = map(fold.tensor, (query, key, value), dims)
    output, logsumexp, *others = find(FUSED)(*folded, attn_bias, dropout_p, *rest, **options)
    results = (fold.unfold(output), fold.unfold(logsumexp), *others)
    return results, (0, 0, *(None,) * len(others))


def _fused_with_dropout(info: Any, in_dims: Dims, *inputs: Any, **options: Any) -> Any:
    """Call foo::attention_seeded per element, since dropout depends on the place in the batch."""
    query, key = inputs[:2]
    # torch.randint draws as the argument `randomness` of torch.vmap says, or refuses.
    seed = torch.randint(torch.iinfo(torch.int64).max, (1,), device=query.device)
    seed_dim = None
    if is_batched_tensor(seed):
        seed_dim = maybe_get_bdim(seed)
        seed = get_unwrapped(seed)
    operator = torch.ops.foo.attention_seeded.default
    dims = (*in_dims, None, None, seed_dim)
    (output, logsumexp), _ = library.vmap_by_loop(
        operator, info, dims, *inputs, None, None, seed, **options
    )
    lengths = shape_of(query, in_dims[0])[2], shape_of(key, in_dims[1])[2]
    seed = seed.squeeze(-1)
    results = (output, logsumexp, None, None, *lengths, seed, seed.new_empty(()), None)
    return results, (0, 0, None, None, None, None, seed_dim, None, None)


def vmap_fused_backward(info: Any, in_dims: Dims, *inputs: Any, **options: Any) -> Any:
    """Map the backward pass of torch's scaled_dot_product_attention on foo."""
    grad_output, query, key, value, attn_bias, needed, output, logsumexp, *rest = inputs
    operator = find(f"{FUSED}_backward")
    dropout_p = rest[4]
    if dropout_p > 0.0:
        return library.vmap_by_loop(operator, info, in_dims, *inputs, **options)
    fold = _fold(info, query, in_dims[1])
    has_bias_gradient = attn_bias is not None and needed[3]
    bias = None if attn_bias is None else fold.bias(attn_bias, in_dims[4], has_bias_gradient)
    first = map(fold.tensor, (grad_output, query, key, value), in_dims)
    last = map(fold.tensor, (output, logsumexp), in_dims[6:])
    *gradients, of_bias = operator(*first, bias, needed, *last, *rest, **options)
    if has_bias_gradient:
        of_bias = fold.gradient(of_bias, attn_bias, in_dims[4])
    results = (*map(fold.unfold, gradients), of_bias)
    return results, (0, 0, 0, 0 if has_bias_gradient else None)


# ---------------------------------------------------------------- packed attention under torch.vmap

# Map packed attention under torch.vmap: mapped calls are more sequences of one call.


class Inputs(NamedTuple):
    """The tensors of foo::attention_varlen, or their mapped dimensions."""

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
        calls: the number of calls.
        dims: the mapped dimensions of the tensors.
        shares_pages: whether pages that are not mapped serve all calls. Their gradients would be
            one sum over all calls.
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
        """Repeat the starts of one call's sequences for all calls, one after another."""
        calls = torch.arange(self.calls, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
        moved = cu_seqlens[1:] + (calls * cu_seqlens[-1]).unsqueeze(1)
        return torch.cat((cu_seqlens[:1], moved.flatten()))

    def moved(self, tables: Tensor, pages: int) -> Tensor:
        """Give each call pages of its own; an invalid number must not become another's page."""
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


def is_loop(calls: int, dims: Inputs, numbers: Sequence[Tensor | None]) -> bool:
    """Whether calls are mapped by a loop.

    Dropout, which has numbers, depends on the place among the sequences. Mapped starts have to be
    right for each call.
    """
    has_dropout = any(it is not None for it in numbers)
    return calls == 0 or has_dropout or dims[3:5] != (None, None)


def make_packed_forward_rule(name: str) -> Callable[..., Any]:
    """Make the rule of foo::attention_varlen or foo::attention_varlen_seeded."""

    def vmap(info: Any, in_dims: Dims, *inputs: Tensor | None, **options: Any) -> Any:
        tensors, numbers = padded(inputs, 9)[:9], inputs[9:]
        dims = Inputs(*padded(in_dims, 9)[:9])
        operator = find(name)
        if is_loop(info.batch_size, dims, numbers):
            return library.vmap_by_loop(operator, info, in_dims, *inputs, **options)
        fold = PackedFold(info.batch_size, dims, shares_pages=True)
        output, logsumexp = operator(*fold.inputs(Inputs(*tensors)), **options)
        return (fold.unfold(output), fold.unfold(logsumexp, 1)), (0, 1)

    return vmap


def vmap_packed_backward(info: Any, in_dims: Dims, *inputs: Any, **options: Any) -> Any:
    """Compute the gradients of all mapped calls in one, as the forward pass does."""
    grad_output, grad_logsumexp, *tensors, output, logsumexp = inputs[:13]
    given, dims, calls = Inputs(*tensors), Inputs(*in_dims[2:11]), info.batch_size
    operator = torch.ops.foo.attention_varlen_backward.default
    if is_loop(calls, dims, inputs[13:]):
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


# ------------------------------------------------------------------------------------------ DTensor

# Each process has some of the batch and of the heads.
#
# Packed sequences are sharded by heads. If heads of query share those of key and value, both are
# sharded into equal parts. Dropout keeps the same weights as in one process: the heads are numbered
# before they are sharded.


if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def register_heads(name: str, tensors: int, sharding: str, of_gradients: str) -> None:
    """Let DTensor shard attention, dense or packed.

    Args:
        name: the operator's name; it draws its seed.
        tensors: the number of its tensors.
        sharding, of_gradients: the names of the dimensions of tensors and results, for the operator
            that takes a seed, and for that of the gradients.
    """
    for operator, its in ((f"{name}_seeded", sharding), (f"{name}_backward", of_gradients)):
        library.register_sharding(operator, make_sharding(operator, its))

    register_rule(name, make_rule(f"{name}_seeded", tensors))


def register_rule(name: str, rule: Callable[..., Any]) -> None:
    """Let DTensor call a function in place of an operator."""

    def register() -> None:
        from torch.distributed.tensor import DTensor

        library.register_torch_dispatch(name, DTensor, rule)

    after_import("torch.distributed.tensor", register)


def make_sharding(name: str, sharding: str) -> Callable[..., str]:
    """Make the rule of an operator whose last tensor is dropout_heads."""
    count = len(sharding.partition("->")[0].split(","))

    def rule(*tensors: Any, **options: Any) -> str:
        if options.get("dropout_p", 0.0) > 0.0 and padded(tensors, count)[-1] is None:
            raise NotImplementedError(
                f"{name.removeprefix('foo::')}: dropout_heads must be given if DTensors have "
                "dropout, got None"
            )
        return sharding

    return rule


def make_rule(seeded: str, count: int) -> Callable[..., Any]:
    """Make the rule that calls the operator with a seed, after ``count`` tensors."""
    operator = find(seeded)

    @torch.no_grad()
    def rule(
        mode: Any, whole: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        tensors = padded(args, count)
        numbers: tuple[Any, ...] = ()
        if kwargs.get("dropout_p", 0.0) > 0.0:
            query, starts = tensors[0], tensors[3]
            batch = starts.shape[0] - 1 if "varlen" in seeded else query.shape[0]
            numbers = numbers_of(query, batch)
        return operator(*tensors, *numbers, **kwargs)

    return rule


def draw_numbers(
    mode: Any, operator: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[DTensor, DTensor]:
    return numbers_of(*args)


def numbers_of(query: DTensor, batch: int) -> tuple[DTensor, DTensor]:
    """Draw the first process's seed, and number all heads."""
    heads = query.shape[1]
    seed = torch.randint(torch.iinfo(torch.int64).max, (1,), device=query.device)
    numbers = torch.arange(batch * heads, device=query.device).view(batch, heads)
    mesh = query.device_mesh
    return on_all(seed, mesh, src_data_rank=0), on_all(numbers, mesh, src_data_rank=None)


def on_all(tensor: Tensor, mesh: DeviceMesh, src_data_rank: int | None) -> DTensor:
    """Replicate a tensor to all processes, from one of them or as it is on each."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    return distribute_tensor(tensor, mesh, [Replicate()] * mesh.ndim, src_data_rank=src_data_rank)
