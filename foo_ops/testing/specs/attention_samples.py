"""Samples of attention: random tensors of given sizes, and hard cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from foo_ops.testing.spec import Sample, random

Maker = Callable[[torch.dtype], Tensor]


def attention_sample(
    *,
    batch: int = 2,
    heads: int = 2,
    key_heads: int | None = None,
    queries: int = 9,
    keys: int = 11,
    head_dim: int = 16,
    value_dim: int | None = None,
    bias: Maker | None = None,
    slopes: Maker | None = None,
    sinks: Maker | None = None,
    **keywords: Any,
) -> Callable[[torch.dtype], Sample]:
    """Make a function that draws query, key and value of these sizes."""
    key_heads = heads if key_heads is None else key_heads
    value_dim = head_dim if value_dim is None else value_dim

    def make(dtype: torch.dtype) -> Sample:
        tensors = random(
            f"attention {batch} {heads} {key_heads} {queries} {keys} {head_dim} {value_dim}",
            (batch, heads, queries, head_dim),
            (batch, key_heads, keys, head_dim),
            (batch, key_heads, keys, value_dim),
            dtype=dtype,
        )
        makers = (bias, slopes, sinks)
        others = (None if make is None else make(dtype) for make in makers)
        return Sample((*tensors, *others), keywords)

    return make


def random_bias(*shape: int, float32: bool = False) -> Maker:
    """Draw a bias, or sinks, in the query's dtype or in float32."""
    return lambda dtype: random(f"{shape}", shape, dtype=torch.float32 if float32 else dtype)[0]


def random_slopes(*shape: int, float32: bool = False) -> Maker:
    """Draw small slopes of both signs, so that distant keys still count."""
    return lambda dtype: random_bias(*shape, float32=float32)(dtype) / 8


def random_mask(*shape: int, blind: Sequence[int] = ()) -> Maker:
    """Draw a bool mask that is half True; the rows ``blind`` see no key."""

    def make(dtype: torch.dtype) -> Tensor:
        mask = random(f"mask {shape}", shape, dtype=torch.float64)[0] > 0
        mask[..., list(blind), :] = False
        return mask

    return make


def half_infinite_bias(*shape: int) -> Maker:
    """Draw a bias with -inf where a mask would be False; the last row sees nothing."""
    sees = random_mask(*shape, blind=[-1])
    return lambda dtype: random_bias(*shape)(dtype).where(sees(dtype), -math.inf)


def large_scores(dtype: torch.dtype) -> Sample:
    """Make scores of up to 1e4, whose softmax is one-hot: exp must not overflow."""
    query, *others = attention_sample(head_dim=32, keys=70)(dtype).inputs
    assert query is not None
    return Sample((query * 1000, *others))


def rising_scores(queries: int, keys: int) -> Callable[[torch.dtype], Sample]:
    """Put the largest score last, so that every tile of keys rescales the sums so far."""

    def make(dtype: torch.dtype) -> Sample:
        sample = attention_sample(queries=queries, keys=keys, head_dim=8, scale=0.5)(dtype)
        query, key, *others = sample.inputs
        assert query is not None
        assert key is not None
        steps = torch.linspace(0, 40, keys, dtype=torch.float64).unsqueeze(-1).to(dtype)
        return Sample((torch.ones_like(query), key * 0.1 + steps, *others), sample.keywords)

    return make


def large_scores_with_softcap(dtype: torch.dtype) -> Sample:
    return Sample(large_scores(dtype).inputs, {"softcap": 20.0})


def large_scores_with_sinks(dtype: torch.dtype) -> Sample:
    """Put the first head's sink among the scores, and the second's above all."""
    *tensors, _ = large_scores(dtype).inputs
    return Sample((*tensors, torch.tensor([100.0, 20_000.0]).to(dtype)))


def mask_of_parts(keys: int) -> Maker:
    """Make a mask (2, 1, 1, keys): one batch sees a run of keys, the other a single key."""
    mask = torch.zeros(2, 1, 1, keys, dtype=torch.bool)
    mask[0, :, :, keys // 3 : keys // 2] = True
    mask[1, :, :, -1] = True
    return lambda _: mask
