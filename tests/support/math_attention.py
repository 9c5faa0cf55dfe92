"""Attention by its formula, with torch's matrix operators."""

import torch


def math_attention(query, key, value, bias=None, *, is_causal=False):
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ value
