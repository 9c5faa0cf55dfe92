"""Differentiate attention twice, dense and packed, by a composite of torch's own operators.

The first derivatives are kernels; csrc/ops/attention/autograd.cpp calls them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from foo_ops.ops.arguments import compute_type
from foo_ops.ops.attention_options import AttentionOptions


def setup_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
) -> None:
    """Save what the second derivative of an operator of the backward pass needs."""
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)
    ctx.options = keyword_only_inputs


def second_derivative(
    ctx: Any,
    function: Callable[..., tuple[Tensor, Tensor]],
    positions: tuple[int, ...],
    grads: tuple[Tensor | None, ...],
) -> tuple[Tensor | None, ...]:
    """Differentiate an operator of the backward pass, with the matrix of scores in memory.

    Its arguments are the gradients of both outputs, the inputs, both outputs, and the seed. The
    outputs are functions of the inputs here, so that they get no gradient themselves.

    Args:
        ctx: as setup_context leaves it.
        function: ``function(inputs, seed, **options)``, what the forward pass computes, made of
            torch's own operators.
        positions: which of the inputs the operator returns the gradients of.
        grads: the gradients of these gradients.
    """
    *saved, _, _, seed = ctx.saved_tensors
    needed = ctx.needs_input_grad[: len(saved)]
    with torch.enable_grad():
        tensors: list[Any] = list(map(distinct, saved))
        cotangents, inputs = tensors[:2], tensors[2:]
        given = [
            (inputs[position], grad)
            for position, grad in zip(positions, grads)
            if grad is not None and inputs[position] is not None
        ]
        if not given:
            return (None,) * len(ctx.saved_tensors)
        chosen, grads = zip(*given)
        outputs = function(inputs, seed, **ctx.options)
        if not outputs[0].requires_grad:
            # There are no sequences, so that nothing depends on anything.
            zeros = (
                torch.zeros_like(tensor) if need else None for tensor, need in zip(saved, needed)
            )
            return (*zeros, None, None, None)
        first = torch.autograd.grad(outputs, chosen, cotangents, create_graph=True)
    second = differentiate(first, tensors, needed, grads, create_graph=torch.is_grad_enabled())
    return (*second, None, None, None)


def distinct(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor that stands for one input alone: one tensor may be two of the inputs."""
    if tensor is None or not tensor.is_floating_point():
        return tensor
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()


def differentiate(
    outputs: tuple[Tensor, ...],
    inputs: Sequence[Any],
    needed: Sequence[bool],
    grads: Sequence[Any],
    *,
    create_graph: bool,
) -> list[Tensor | None]:
    """Return the gradient for each input that needs one."""
    wanted = [tensor for tensor, need in zip(inputs, needed) if need]
    found = iter(
        torch.autograd.grad(
            outputs, wanted, grads, create_graph=create_graph, materialize_grads=True
        )
    )
    return [next(found) if need else None for need in needed]


def make_dropout_mask(
    query: Tensor, shape: tuple[int, ...], seed: Tensor | None, dropout_p: float
) -> Tensor | None:
    """Make the mask of what dropout keeps: 1.0 or 0.0 for each weight, or None."""
    if seed is None:
        return None
    return torch.ops.foo.attention_dropout_mask(
        seed, shape, dropout_p, dtype=compute_type(query.dtype)
    )


def composite(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    *,
    dropout_mask: Tensor | None,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor]:
    """Compute foo::attention with torch's own operators, which build the matrix of scores.

    ``dropout_mask`` has 1.0 for the weights that dropout keeps and 0.0 for the others.
    """
    compute = compute_type(query.dtype)
    group = query.shape[1] // max(key.shape[1], 1)
    keys, values = (
        tensor.to(compute).repeat_interleave(group, dim=1) if group != 1 else tensor.to(compute)
        for tensor in (key, value)
    )
    scale = 1.0 / math.sqrt(query.shape[-1]) if options.scale is None else options.scale
    scores = query.to(compute) @ keys.mT * scale
    if options.softcap > 0.0:
        scores = options.softcap * tanh(scores / options.softcap)
    sees = visible(scores, options)
    if attn_bias is not None and attn_bias.dtype == torch.bool:
        sees = sees & attn_bias
    elif attn_bias is not None:
        scores = scores + attn_bias
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(compute).unsqueeze(-1).unsqueeze(-1)
        scores = scores - slopes * distances(scores).abs()
    scores = scores.masked_fill(~sees, -math.inf)
    extended = scores
    if sinks is not None:
        column = sinks.to(compute).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        extended = torch.cat([scores, column], dim=-1)
    # A query that sees nothing has no softmax: zeros stand in its place and count for nothing.
    blind = (extended == -math.inf).all(-1, keepdim=True)
    extended = extended.masked_fill(blind, 0.0)
    # Taken away first: beside a mask of -1e9 nothing would be left of the logarithm of the sum.
    base = torch.logsumexp(extended, -1, keepdim=True).detach()
    base = base.where(base.isfinite(), 0.0)
    logsumexp = torch.logsumexp(extended - base, -1, keepdim=True)
    weights = torch.exp(scores - base - logsumexp).masked_fill(blind | ~sees, 0.0)
    if dropout_mask is not None:
        weights = weights * dropout_mask / (1.0 - options.dropout_p)
    logsumexp = (base + logsumexp).masked_fill(blind, -math.inf).squeeze(-1)
    return (weights @ values).to(query.dtype), logsumexp


def tanh(x: Tensor) -> Tensor:
    """Compute torch.tanh, with derivatives whose digits do not cancel where 1 - tanh^2 is small.

    They are those of 1 - 2 / (1 + e^(2|x|)), of which the value itself has few digits near zero.
    """
    sign = torch.where(x < 0, -1.0, 1.0).to(x.dtype)
    smooth = -2.0 * sign * torch.sigmoid(-2.0 * sign * x)
    return torch.tanh(x).detach() + (smooth - smooth.detach())


def distances(scores: Tensor) -> Tensor:
    """Return the distance of each query from each key: i + Sk - Sq - j."""
    queries, keys = scores.shape[-2:]
    positions = torch.arange(queries, device=scores.device).unsqueeze(-1) + keys - queries
    return positions - torch.arange(keys, device=scores.device)


def visible(scores: Tensor, options: AttentionOptions) -> Tensor:
    """Return which keys each query sees, (Sq, Sk), but for the mask."""
    distance = distances(scores)
    sees = torch.ones_like(distance, dtype=torch.bool)
    if options.is_causal:
        sees = sees.tril()
    if options.window_left >= 0:
        sees = sees & (distance <= options.window_left)
    if options.window_right >= 0:
        sees = sees & (distance >= -options.window_right)
    return sees
