"""Map dense attention under torch.vmap: the mapped dimension becomes a part of the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foo_ops import library
from foo_ops.library.operators import find

Dims = tuple[int | None, ...]

# Runs torch.nn.functional.scaled_dot_product_attention on foo.
FUSED = "aten::_scaled_dot_product_fused_attention_overrideable"
# For query, key, value, attn_bias, dropout_p, is_causal, return_debug_mask.
FUSED_DEFAULTS: tuple[Any, ...] = (None, None, None, None, 0.0, False, False)


@dataclasses.dataclass(frozen=True)
class Fold:
    """Mapped calls, and the batch of each."""

    calls: int
    batch: int

    def tensor(self, tensor: Tensor, in_dim: int | None) -> Tensor:
        """Fold the mapped dimension into that of the batch, which is the first one."""
        if in_dim is None:
            return tensor.expand(self.calls, *tensor.shape).flatten(0, 1)
        return tensor.movedim(in_dim, 0).flatten(0, 1)

    def bias(self, bias: Tensor, in_dim: int | None, is_differentiated: bool = False) -> Tensor:
        """Fold a bias, which may have no dimension of the batch.

        Without a gradient, one that is neither mapped nor batched is broadcast as it is.
        """
        bias = _with_dimensions(bias, in_dim, 4)
        if in_dim is None and bias.shape[0] == 1 and not is_differentiated:
            return bias
        return bias.expand(self.calls, self.batch, *bias.shape[-3:]).flatten(0, 1)

    def of_heads(self, tensor: Tensor | None, in_dim: int | None) -> Tensor | None:
        """Fold slopes or sinks, which may have no dimension of the batch."""
        if tensor is None:
            return None
        tensor = _with_dimensions(tensor, in_dim, 2)
        return tensor.expand(self.calls, self.batch, -1).flatten(0, 1)

    def unfold(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (self.calls, self.batch))

    def gradient(self, gradient: Tensor, of: Tensor, in_dim: int | None) -> Tensor:
        """Sum a gradient over the batch, where what it belongs to is broadcast along that."""
        shape, gradient = shape_of(of, in_dim), self.unfold(gradient)
        if len(shape) < gradient.dim() - 1 or shape[0] != self.batch:
            gradient = gradient.sum(1)
        return gradient.reshape(self.calls, *shape)


def _with_dimensions(tensor: Tensor, in_dim: int | None, dimensions: int) -> Tensor:
    """Put dimensions of size 1 before those that are not mapped."""
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

    A seed makes it a loop, as what dropout keeps depends on the place in the batch. foo::attention
    with dropout does not come here: csrc/ops/attention/autograd.cpp draws a seed for it first.
    """

    def vmap(info: Any, in_dims: Dims, *inputs: Tensor | None, **options: Any) -> Any:
        dims, tensors = padded(in_dims, 7), padded(inputs, 7)
        query, key, value, attn_bias, alibi_slopes, sinks, seed = tensors
        operator = find(name)
        if seed is not None:
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
    *first, attn_bias, alibi_slopes, sinks, output, logsumexp, seed = inputs
    options["attn_bias_requires_grad"] = attn_bias_requires_grad
    operator = torch.ops.foo.attention_backward.default
    if seed is not None:
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
    """Call it for each element, as what dropout keeps depends on the place in the batch."""
    query, key = inputs[:2]
    # An operator of torch draws what the argument `randomness` of torch.vmap says, or refuses.
    seed = torch.randint(torch.iinfo(torch.int64).max, (1,), device=query.device)
    seed_dim = None
    if torch._C._functorch.is_batchedtensor(seed):
        seed_dim = torch._C._functorch.maybe_get_bdim(seed)
        seed = torch._C._functorch.get_unwrapped(seed)
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
