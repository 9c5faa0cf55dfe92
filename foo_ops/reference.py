"""What each operator computes, as plainly as it can be written, for tests and benchmarks alone.

Inputs and results are float64 (complex128), and gradients come from autograd. Nothing here is
shared with the operators, and none of it is fast: attention builds the whole matrix of scores.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def abs(input: Tensor) -> Tensor:
    """The absolute value; of complex numbers the modulus."""
    return torch.abs(input)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax of the scores, times value; and the logarithm of the softmax's denominator.

    Args:
        query: (batch, heads, queries, head_dim)
        key: (batch, key_heads, keys, head_dim); query's head ``h`` attends to key's head
            ``h // (heads // key_heads)``.
        value: (batch, key_heads, keys, value_dim)
        attn_bias: broadcasts to (batch, heads, queries, keys); bool, or added to the scores.

    Returns:
        (batch, heads, queries, value_dim) and (batch, heads, queries).
    """
    scores = masked_scores(query, key, attn_bias, is_causal=is_causal, scale=scale)
    # A row that sees no key has no softmax: zeros stand in its place, and the result is replaced.
    sees = (scores > -math.inf).any(-1) | scores.isnan().any(-1)
    scores = scores.where(sees.unsqueeze(-1), 0)
    logsumexp = torch.logsumexp(scores, -1)
    probabilities = torch.exp(scores - logsumexp.unsqueeze(-1))
    output = probabilities @ for_each_query_head(value, query)
    return output.where(sees.unsqueeze(-1), 0), logsumexp.where(sees, -math.inf)


def masked_scores(
    query: Tensor,
    key: Tensor,
    attn_bias: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """The scores (batch, heads, queries, keys), -inf where a query does not see a key."""
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    scores = scale * (query @ for_each_query_head(key, query).mT)
    if is_causal:
        sees = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.where(sees, -math.inf)
    if attn_bias is None:
        return scores
    if attn_bias.dtype == torch.bool:
        return scores.where(attn_bias, -math.inf)
    return scores + attn_bias


def for_each_query_head(tensor: Tensor, query: Tensor) -> Tensor:
    """Repeat key or value (batch, key_heads, ...) to (batch, heads, ...)."""
    heads, key_heads = query.shape[1], tensor.shape[1]
    return tensor.repeat_interleave(heads // max(key_heads, 1), dim=1)
