"""Attention's options, described once, and its formula in torch's own operators.

Schemas, public functions and checks are made from the options. The formula differentiates dense and
packed attention twice; the first derivatives are kernels.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foo_ops.ops.arguments import compute_type

# ------------------------------------------------------------------------------------------ options


# The types of fields as schemas write them.
_SCHEMA_TYPES = {
    "bool": "bool",
    "int": "SymInt",
    "int | None": "SymInt?",
    "float": "float",
    "float | None": "float?",
}


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """The keyword arguments of attention, and their defaults.

    csrc/ops/attention/arguments.h has the same struct. `foo_ops.attention` documents the options.
    part_offset is not public: the keys are then a part of all keys, query i stands at key
    i + part_offset, to which windows and ALiBi are aligned, and a backward pass may get the
    logsumexp of all keys.
    """

    is_causal: bool = False
    scale: float | None = None
    dropout_p: float = 0.0
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    part_offset: int | None = None


_FIELDS = {field.name: field for field in dataclasses.fields(AttentionOptions)}
DEFAULTS = {name: it.default for name, it in _FIELDS.items() if name != "part_offset"}
# Packed sequences are causal by ``window_right=0``.
PACKED = tuple(name for name in DEFAULTS if name != "is_causal")


def schema(*names: str) -> str:
    """Write options as a schema does: ``float? scale=None, float dropout_p=0.0``."""
    fields = map(_FIELDS.__getitem__, names)
    return ", ".join(f"{_SCHEMA_TYPES[str(it.type)]} {it.name}={it.default}" for it in fields)


def given_options(**options: Any) -> dict[str, Any]:
    """Return the options that differ from their defaults.

    The dispatcher takes as long to parse one as to allocate a tensor. Within torch.compile all are
    returned, since a comparison would turn a number that varies into a constant.
    """
    if torch.compiler.is_dynamo_compiling():
        return options
    return {name: value for name, value in options.items() if value != DEFAULTS[name]}


# ------------------------------------------------------------------------------------------ formula


def make_dropout_mask(
    query: Tensor,
    shape: tuple[int, ...],
    seed: Tensor | None,
    dropout_heads: Tensor | None,
    dropout_p: float,
) -> Tensor | None:
    """Make the dropout mask: 1.0 for each weight that is kept, else 0.0; None without a seed."""
    if seed is None:
        return None
    return torch.ops.foo.attention_dropout_mask(
        seed, shape, dropout_p, dropout_heads, dtype=compute_type(query.dtype)
    )


@dataclasses.dataclass(frozen=True)
class Attended:
    """Intermediate results of attention, (B, Hq, Sq, Sk) in the compute type.

    Attributes:
        keys, values: with a head for each head of the query.
        products: scale * query @ key^T.
        weights: of the softmax, before dropout.
        sink_weights: (B, Hq, Sq, 1), the share of the sink, or None.
        kept: the factors of dropout for the weights, or None.
        logsumexp: (B, Hq, Sq).
    """

    keys: Tensor
    values: Tensor
    products: Tensor
    weights: Tensor
    sink_weights: Tensor | None
    kept: Tensor | None
    logsumexp: Tensor

    def dropped(self, weights: Tensor) -> Tensor:
        return weights if self.kept is None else weights * self.kept


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
    attended = attend(
        query, key, value, attn_bias, alibi_slopes, sinks,
        dropout_mask=dropout_mask, options=options,
    )  # fmt: skip
    output = attended.dropped(attended.weights) @ attended.values
    return output.to(query.dtype), attended.logsumexp


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    *,
    dropout_mask: Tensor | None,
    options: AttentionOptions,
) -> Attended:
    compute = compute_type(query.dtype)
    group = query.shape[1] // max(key.shape[1], 1)
    keys, values = (
        tensor.to(compute).repeat_interleave(group, dim=1) if group != 1 else tensor.to(compute)
        for tensor in (key, value)
    )
    products = query.to(compute) @ keys.mT * scale_of(query, options)
    scores = products
    if options.softcap > 0.0:
        scores = options.softcap * tanh(scores / options.softcap)
    sees = visible(scores, options)
    if attn_bias is not None and attn_bias.dtype == torch.bool:
        sees = sees & attn_bias
    elif attn_bias is not None:
        scores = scores + attn_bias.to(compute)
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(compute).unsqueeze(-1).unsqueeze(-1)
        scores = scores - slopes * distances(scores, options).abs()
    scores = scores.masked_fill(~sees, -math.inf)
    extended = scores
    if sinks is not None:
        column = sinks.to(compute).unsqueeze(-1).unsqueeze(-1).expand(*scores.shape[:3], 1)
        extended = torch.cat([scores, column], dim=-1)
    # A query that sees nothing has no softmax: compute that of zeros, and mask the result.
    blind = (extended == -math.inf).all(-1, keepdim=True)
    extended = extended.masked_fill(blind, 0.0)
    # Subtracted first: beside a mask of -1e9 the logarithm of the sum would be rounded away.
    base = torch.logsumexp(extended, -1, keepdim=True).detach()
    base = base.where(base.isfinite(), 0.0)
    logsumexp = torch.logsumexp(extended - base, -1, keepdim=True)
    weights = torch.exp(scores - base - logsumexp).masked_fill(blind | ~sees, 0.0)
    sink_weights = None
    if sinks is not None:
        sink_weights = torch.exp(extended[..., -1:] - base - logsumexp).masked_fill(blind, 0.0)
    kept = None if dropout_mask is None else dropout_mask / (1.0 - options.dropout_p)
    logsumexp = (base + logsumexp).masked_fill(blind, -math.inf).squeeze(-1)
    return Attended(keys, values, products, weights, sink_weights, kept, logsumexp)


class Gradients(NamedTuple):
    """The gradients of attention's tensors; None for those that are missing or bools."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_bias: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None


def composite_gradients(
    grad_output: Tensor,
    grad_logsumexp: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    *,
    dropout_mask: Tensor | None,
    options: AttentionOptions,
) -> Gradients:
    """Compute the gradients of `composite` for its six tensors, with torch's own operators.

    With weights P, dropout M, output O = (P M) V and logsumexp L (Dao et al. 2022, FlashAttention,
    appendix B.4, and with the gradient of L):

        dP = (dO V^T) M,   dS = P (dP - rowsum(P dP) + dL)
    """
    compute = compute_type(query.dtype)
    attended = attend(
        query, key, value, attn_bias, alibi_slopes, sinks,
        dropout_mask=dropout_mask, options=options,
    )  # fmt: skip
    grad = grad_output.to(compute)
    grad_weights = attended.dropped(grad @ attended.values.mT)
    row_sums = (attended.weights * grad_weights).sum(-1, keepdim=True)
    slope = grad_logsumexp.to(compute).unsqueeze(-1) - row_sums
    grad_scores = attended.weights * (grad_weights + slope)
    grad_products = grad_scores
    if options.softcap > 0.0:
        # 1 - tanh(x)^2, without a difference that cancels.
        doubled = 2.0 * attended.products / options.softcap
        grad_products = 4.0 * grad_scores * torch.sigmoid(doubled) * torch.sigmoid(-doubled)
    grad_products = grad_products * scale_of(query, options)
    grad_bias = grad_slopes = grad_sinks = None
    if attn_bias is not None and attn_bias.dtype != torch.bool:
        grad_bias = grad_scores.sum_to_size(attn_bias.shape).to(attn_bias.dtype)
    if alibi_slopes is not None:
        each = -(grad_scores * distances(grad_scores, options).abs()).sum((-2, -1))
        grad_slopes = each.sum_to_size(alibi_slopes.shape).to(alibi_slopes.dtype)
    if sinks is not None:
        assert attended.sink_weights is not None
        each = (attended.sink_weights * slope).sum((-2, -1))
        grad_sinks = each.sum_to_size(sinks.shape).to(sinks.dtype)
    return Gradients(
        (grad_products @ attended.keys).to(query.dtype),
        sum_of_groups(grad_products.mT @ query.to(compute), key),
        sum_of_groups(attended.dropped(attended.weights).mT @ grad, value),
        grad_bias,
        grad_slopes,
        grad_sinks,
    )


def scale_of(query: Tensor, options: AttentionOptions) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if options.scale is None else options.scale


def sum_of_groups(gradient: Tensor, tensor: Tensor) -> Tensor:
    """Sum the gradient of key or value over the heads of query that share a head."""
    heads = tensor.shape[1]
    if gradient.shape[1] != heads:
        gradient = gradient.unflatten(1, (heads, -1)).sum(2)
    return gradient.to(tensor.dtype)


def tanh(x: Tensor) -> Tensor:
    """Compute torch.tanh, with derivatives that do not cancel where 1 - tanh^2 is small.

    They are those of 1 - 2 / (1 + e^(2|x|)), whose own value has few digits near zero.
    """
    sign = torch.where(x < 0, -1.0, 1.0).to(x.dtype)
    smooth = -2.0 * sign * torch.sigmoid(-2.0 * sign * x)
    return torch.tanh(x).detach() + (smooth - smooth.detach())


def distances(scores: Tensor, options: AttentionOptions) -> Tensor:
    """Return the distance of each query from each key: i + Sk - Sq - j, or i + part_offset - j."""
    queries, keys = scores.shape[-2:]
    offset = keys - queries if options.part_offset is None else options.part_offset
    positions = torch.arange(queries, device=scores.device).unsqueeze(-1) + offset
    return positions - torch.arange(keys, device=scores.device)


def visible(scores: Tensor, options: AttentionOptions) -> Tensor:
    """Return the mask of the keys that each query sees, (Sq, Sk), without attn_bias."""
    distance = distances(scores, options)
    sees = torch.ones_like(distance, dtype=torch.bool)
    if options.is_causal:
        sees = sees.tril()
    if options.window_left >= 0:
        sees = sees & (distance <= options.window_left)
    if options.window_right >= 0:
        sees = sees & (distance >= -options.window_right)
    return sees
