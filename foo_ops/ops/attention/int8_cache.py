"""foo::attention_int8_cache attends to keys and values of 8 bits, for decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foo_ops import _C, library
from foo_ops.ops.arguments import compute_type
from foo_ops.ops.attention.dense import OUTPUTS, product_flops
from foo_ops.ops.attention.formula import PACKED, given_options, schema

NAME = "attention_int8_cache"
# All but dropout's.
OPTIONS = tuple(name for name in PACKED if name != "dropout_p")
library.define(
    f"foo::{NAME}",
    "(Tensor query, Tensor key, Tensor value, Tensor key_scale, Tensor value_scale, "
    "Tensor? sinks=None, Tensor? seqused_k=None, Tensor? block_table=None, *, "
    f"{schema(*OPTIONS)}) -> {OUTPUTS}",
    tags=torch.Tag.pt2_compliant_tag,
)
LARGEST = 127


def attention_int8_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_scale: Tensor,
    value_scale: Tensor,
    sinks: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    *,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute `foo_ops.attention` with ``key * key_scale`` and ``value * value_scale``.

    Keys and values are read as int8, half the bytes of bfloat16, and converted to floats in the
    processor's caches. That conversion is exact, and the scales multiply scores and weights in
    float32 (float64 for float64). This is fastest for up to eight queries per key head, as in
    decoding. `quantize_cache` makes integers and scales. There are no gradients.

    Args:
        query: (B, Hq, Sq, D), float16, bfloat16, float32 or float64, any strides.
        key, value: int8 (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv), Hq a multiple of Hkv, any strides;
            with block_table pages, (num_blocks, block_size, Hkv, D) and the same with Dv.
        key_scale, value_scale: (B, Hkv, Sk), or with block_table (num_blocks, block_size, Hkv);
            float32, or float64 as query is.
        sinks: (Hq,), one extra logit for each head in the denominator only.
        seqused_k: (B,), int32, the number of keys in use of each sequence; by default all.
        block_table: (B, max_blocks), int32, the pages of each sequence.
        scale: factor of the scores, by default 1 / sqrt(D).
        window_left, window_right: query i sees the keys from ``i + used - Sq - window_left`` to
            ``i + used - Sq + window_right``; -1 for no bound. window_right=0 is causal.
        softcap: if positive, scores become softcap * tanh(score / softcap).

    Returns:
        The output (B, Hq, Sq, Dv) in query's dtype, and the logsumexp (B, Hq, Sq), float32 (float64
        for float64).

    Raises:
        ValueError, TypeError: for shapes, dtypes, lengths and pages that do not fit.

    Example:
        >>> query, key, value = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> cache = foo_ops.quantize_cache(key), foo_ops.quantize_cache(value)
        >>> (keys, key_scale), (values, value_scale) = cache
        >>> last = query[:, :, -1:]
        >>> foo_ops.attention_int8_cache(last, keys, values, key_scale, value_scale)[0].shape
        torch.Size([1, 2, 1, 8])
    """
    options = given_options(
        scale=scale, window_left=window_left, window_right=window_right, softcap=softcap
    )
    return torch.ops.foo.attention_int8_cache.default(
        query, key, value, key_scale, value_scale, sinks, seqused_k, block_table, **options
    )


def quantize_cache(input: Tensor) -> tuple[Tensor, Tensor]:
    """Round keys or values to integers of 8 bits, with a scale for each row.

    Args:
        input: (..., D), floating-point, finite.

    Returns:
        The integers, int8 (..., D), and the scales (...), float32 (float64 for float64), which are
        the largest magnitude of a row / 127; that of a row of zeros is 1. `foo_ops.cache_append`
        writes both into a cache, the scales as (..., 1).

    Example:
        >>> foo_ops.quantize_cache(torch.tensor([[254.0, -127.0, 3.0]]))
        (tensor([[127, -64,   2]], dtype=torch.int8), tensor([2.]))
    """
    wide = input.to(compute_type(input.dtype))
    scale = wide.abs().amax(-1) / LARGEST
    scale = scale.masked_fill(scale == 0, 1.0)
    integers = (wide / scale.unsqueeze(-1)).round().clamp(-LARGEST, LARGEST)
    return integers.to(torch.int8), scale


# ------------------------------------------------------------------------------------------- fake


@library.register_fake(f"foo::{NAME}")
def fake(
    query: Tensor, key: Tensor, value: Tensor, *added: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    _C.check_attention(f"foo::{NAME}", (query, key, value, *added), options)
    output = query.new_empty(*query.shape[:3], value.shape[3])
    return output, query.new_empty(query.shape[:3], dtype=compute_type(query.dtype))


# --------------------------------------------------------------------------------------- autograd


def backward(ctx: Any, *gradients: Tensor) -> None:
    raise NotImplementedError(
        f"{NAME}: gradients are not supported, since integers have none: use foo_ops.attention"
    )


library.register_autograd(f"foo::{NAME}", backward)


# ---------------------------------------------------------------------- sharding, vmap, FLOPs


@library.register_sharding(f"foo::{NAME}")
def sharding(*inputs: Any, **_: Any) -> str:
    sinks, seqused_k, block_table = (*inputs, None, None, None)[5:8]
    optional = f"{'.' if sinks is None else 'h'}, {'.' if seqused_k is None else 'b'}"
    if block_table is None:
        return f"b h . ., b h . ., b h . ., b h ., b h ., {optional}, . -> b h . ., b h ."
    optional = optional.replace("b", ".")
    return f". h . ., . . h ., . . h ., . . h, . . h, {optional}, . . -> . h . ., . h ."


library.register_vmap_loop(f"foo::{NAME}")


@library.register_flops(f"foo::{NAME}", takes_tensors=True)
def flops(query: Tensor, key: Tensor, value: Tensor, *others: Any, **_: Any) -> int:
    """Count the products of `foo_ops.attention` with as many keys as the cache has room for."""
    block_table = (*others, None, None, None, None, None)[4]
    if block_table is None:
        return sum(product_flops(query.shape, key.shape, value.shape))
    length = block_table.shape[1] * key.shape[1]
    shapes = [torch.Size((*it.shape[:1], it.shape[2], length, it.shape[3])) for it in (key, value)]
    return sum(product_flops(query.shape, *shapes))
