"""foo::attention computes exact attention in O(length) memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foo_ops import _C, library
from foo_ops.library.operators import is_known
from foo_ops.library.tensor_numbers import SEEDED
from foo_ops.ops.arguments import compute_type
from foo_ops.ops.attention.formula import (
    DEFAULTS,
    AttentionOptions,
    composite,
    composite_gradients,
    given_options,
    make_dropout_mask,
    schema,
)
from foo_ops.ops.attention.rules import (
    FUSED,
    draw_numbers,
    make_forward_rule,
    padded,
    register_heads,
    register_rule,
    vmap_backward,
    vmap_fused,
    vmap_fused_backward,
)

OPTIONS = schema(*DEFAULTS)
INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? attn_bias=None, Tensor? alibi_slopes=None, "
    "Tensor? sinks=None"
)

OUTPUTS = "(Tensor output, Tensor logsumexp)"

TAGS: tuple[torch.Tag, ...] = (torch.Tag.pt2_compliant_tag,)

RANDOM_TAGS: tuple[torch.Tag, ...] = (*TAGS, torch.Tag.nondeterministic_seeded)

library.define("foo::attention", f"({INPUTS}, *, {OPTIONS}) -> {OUTPUTS}", tags=RANDOM_TAGS)

# The same with more arguments; autograd records this operator:
# - seed: of dropout, (1,) int64.
# - dropout_heads: (B, Hq) int64, the numbers of heads, batch * Hq + head, if these are a part of
#   the heads of several processes. Dropout draws by these numbers, and so keeps the same weights
#   as in one process.
# - part_offset: see AttentionOptions.
NUMBERS = "Tensor? seed=None, Tensor? dropout_heads=None"
OWN_OPTIONS = schema(*DEFAULTS, "part_offset")
library.define(
    "foo::attention_seeded", f"({INPUTS}, {NUMBERS}, *, {OWN_OPTIONS}) -> {OUTPUTS}", tags=TAGS
)

SAVED = (
    "Tensor grad_output, Tensor grad_logsumexp, Tensor query, Tensor key, Tensor value, "
    "Tensor? attn_bias, Tensor? alibi_slopes, Tensor? sinks, Tensor output, Tensor logsumexp, "
    "Tensor? seed, Tensor? dropout_heads=None, *, bool attn_bias_requires_grad=False, "
    f"{OWN_OPTIONS}"
)

# The gradients of alibi_slopes and sinks have size 0 if these are None, that of attn_bias if it is
# not needed.
library.define(
    "foo::attention_backward",
    f"({SAVED}) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_attn_bias, "
    "Tensor grad_alibi_slopes, Tensor grad_sinks)",
    tags=TAGS,
)

# 1.0 for the weights that dropout keeps, else 0.0, in the shape (batch, heads, queries, keys).
library.define(
    "foo::attention_dropout_mask",
    "(Tensor seed, SymInt[] shape, float dropout_p, Tensor? dropout_heads=None, *, "
    "ScalarType dtype) -> Tensor",
    tags=TAGS,
)

# Draws the seed of a call that is differentiated, dense or packed. DTensor also numbers the heads.
library.define(
    "foo::attention_dropout_numbers",
    "(Tensor query, SymInt batch) -> (Tensor seed, Tensor? dropout_heads)",
    tags=RANDOM_TAGS,
)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    return_logsumexp: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute scaled dot-product attention: softmax(scale * query @ key^T + attn_bias) @ value.

    Computed tile by tile with an online softmax (Dao et al. 2022, FlashAttention, algorithm 1), so
    that memory besides inputs and outputs grows with the lengths and not with their product.

    Args:
        query: (B, Hq, Sq, D), float16, bfloat16, float32 or float64, any strides, D up to 256.
        key: (B, Hkv, Sk, D). Hq must be a multiple of Hkv: each head of key and value serves
            Hq / Hkv heads of query in a row.
        value: (B, Hkv, Sk, Dv), Dv up to 256.
        attn_bias: added to the scores; of any shape that broadcasts to (B, Hq, Sq, Sk), float32 or
            of query's dtype. Or bool: True where the query may see the key. Keys before and after
            all those that the queries of a tile may see are not visited.
        alibi_slopes: (Hq,) or (B, Hq), float32 or of query's dtype. slope * |i' - j| is subtracted
            from the score of query i and key j (Press et al. 2022), where i' = i + Sk - Sq.
        sinks: (Hq,) or (B, Hq), float32 or of query's dtype: one more score for each head, in the
            denominator of the softmax only (Xiao et al. 2024; OpenAI 2025, gpt-oss).
        is_causal: query i sees the keys j <= i only (aligned to the upper left).
        scale: factor of the scores, by default 1 / sqrt(D).
        dropout_p: probability with which a weight of the softmax is dropped, at least 0 and less
            than 1; the others are divided by 1 - dropout_p. Drawn from the device's default
            generator, under torch.vmap as its argument ``randomness`` says.
        window_left, window_right: query i sees the keys i' - window_left <= j <= i' + window_right
            (aligned to the lower right); -1 for no bound. window_right=0 is causal with a cache of
            earlier keys.
        softcap: if positive, scores become softcap * tanh(score / softcap) before bias and ALiBi
            (Gemma Team 2024, Gemma 2).
        return_logsumexp: return the logarithm of the softmax's denominator, too.

    Returns:
        The output, (B, Hq, Sq, Dv) in query's dtype with query's order of heads and rows in memory,
        and with ``return_logsumexp`` the natural logsumexp, (B, Hq, Sq) in float32 (float64 for
        float64), which dropout does not change. A query that sees no key has output 0 and logsumexp
        -inf, or the sink. float16 and bfloat16 are accumulated in float32. On a matrix unit (AMX)
        float32 is multiplied as three limbs of bfloat16, which gives float32's digits, and the
        weights of float16 keep 16 bits. Both results can be differentiated, twice, for query, key,
        value, a floating-point attn_bias, alibi_slopes and sinks; the second time in O(Sq * Sk)
        memory.

    Raises:
        ValueError: for shapes that do not fit together, and options out of range.
        TypeError: for dtypes.

    Example:
        >>> query, key, value = torch.randn(3, 1, 8, 100, 64).unbind()
        >>> foo_ops.attention(query, key, value, is_causal=True).shape
        torch.Size([1, 8, 100, 64])
    """
    options = given_options(
        is_causal=is_causal,
        scale=scale,
        dropout_p=dropout_p,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
    )
    output, logsumexp = torch.ops.foo.attention.default(
        query, key, value, attn_bias, alibi_slopes, sinks, **options
    )
    return (output, logsumexp) if return_logsumexp else output


# ------------------------------------------------------------------------------------ fake kernels


def make_fake(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def fake(
        query: Tensor, key: Tensor, value: Tensor, *added: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        _C.check_attention(name, (query, key, value, *added), options)
        return empty_results(query, value)

    return fake


for name in ("foo::attention", "foo::attention_seeded"):
    library.register_fake(name, make_fake(name))


def empty_results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Make output and logsumexp as the launchers of dense attention do."""
    batch, heads, rows, _ = query.shape
    if _has_heads_inside(query):
        output = query.new_empty(batch, rows, heads, value.shape[3]).transpose(1, 2)
    else:
        output = query.new_empty(batch, heads, rows, value.shape[3])
    return output, query.new_empty(batch, heads, rows, dtype=compute_type(query.dtype))


def _has_heads_inside(query: Tensor) -> bool:
    """Return whether the heads of a row are adjacent in memory, by the rule of the launchers."""
    outer, inner = query.stride(1), query.stride(2)
    if is_known(outer >= inner):
        return False
    # The number of heads may depend on data; for strides PyTorch counts 0 heads as 1.
    heads = query.shape[1]
    row = (outer * heads, outer * torch.sym_max(heads, 1))
    return is_known(outer < inner) or any(is_known(inner == it) for it in row)


def empty_gradient(tensor: Tensor | None, query: Tensor) -> Tensor:
    return query.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)


@library.register_fake("foo::attention_backward")
def fake_backward(
    *saved: Any, attn_bias_requires_grad: bool = False, **options: Any
) -> tuple[Tensor, ...]:
    options["attn_bias_requires_grad"] = attn_bias_requires_grad
    _C.check_attention("foo::attention_backward", saved, options)
    query, key, value, attn_bias, alibi_slopes, sinks = saved[2:8]
    bias = attn_bias if attn_bias_requires_grad else None
    tensors = (query, key, value, bias, alibi_slopes, sinks)
    return tuple(empty_gradient(tensor, query) for tensor in tensors)


@library.register_fake("foo::attention_dropout_mask")
def fake_dropout_mask(
    seed: Tensor,
    shape: list[int],
    dropout_p: float,
    dropout_heads: Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    _C.check_attention_dropout_mask(seed, shape, dropout_p, dropout_heads, dtype)
    return seed.new_empty(shape, dtype=dtype)


# ---------------------------------------------------------------------------------------- autograd


def composite_seeded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    *numbers: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Compute foo::attention_seeded with torch's own operators."""
    keywords = keywords_of_composite(query, key, numbers, options)
    return composite(query, key, value, attn_bias, alibi_slopes, sinks, **keywords)


def composite_backward(
    *saved: Any, attn_bias_requires_grad: bool = False, **options: Any
) -> tuple[Tensor, ...]:
    """Compute foo::attention_backward with torch's own operators."""
    if options.get("part_offset") is not None:
        # The logsumexp may be that of more keys than are here.
        raise NotImplementedError(
            "attention_backward: second derivatives are not supported with part_offset"
        )
    grad_output, grad_logsumexp, *inputs = saved[:8]
    query, key = inputs[:2]
    gradients = composite_gradients(
        grad_output,
        grad_logsumexp,
        *inputs,
        **keywords_of_composite(query, key, saved[10:], options),
    )
    if not attn_bias_requires_grad:
        gradients = gradients._replace(attn_bias=None)
    return tuple(query.new_empty(0) if grad is None else grad for grad in gradients)


def keywords_of_composite(
    query: Tensor, key: Tensor, numbers: tuple[Tensor | None, ...], options: dict[str, Any]
) -> dict[str, Any]:
    given = AttentionOptions(**options)
    seed, dropout_heads = padded(numbers, 2)
    shape = (*query.shape[:3], key.shape[2])
    mask = make_dropout_mask(query, shape, seed, dropout_heads, given.dropout_p)
    return {"dropout_mask": mask, "options": given}


library.register_autograd(
    "foo::attention_seeded", "foo::attention_backward", composite=composite_seeded
)
library.register_autograd("foo::attention_backward", composite=composite_backward)
SEEDED["foo::attention"] = "foo::attention_seeded"


# ----------------------------------------------------------------- sharding, vmap, autocast, FLOPs


HEADS = "b h . ., b h . ., b h . ."
ADDED = "b h . ., b h, b h"
register_heads(
    "foo::attention",
    tensors=6,
    sharding=f"{HEADS}, {ADDED}, ., b h -> b h . ., b h .",
    of_gradients=(f"b h . ., b h ., {HEADS}, {ADDED}, b h . ., b h ., ., b h -> {HEADS}, {ADDED}"),
)
register_rule("foo::attention_dropout_numbers", draw_numbers)
library.register_sharding("foo::attention_dropout_mask", "., . -> .")
library.register_autocast("foo::attention")
library.register_autocast("foo::attention_seeded")

for name in ("foo::attention", "foo::attention_seeded"):
    library.register_vmap(name, make_forward_rule(name))
library.register_vmap("foo::attention_backward", vmap_backward)
library.register_vmap(FUSED, vmap_fused)
library.register_vmap(f"{FUSED}_backward", vmap_fused_backward)


def product_flops(
    query_shape: torch.Size, key_shape: torch.Size, value_shape: torch.Size
) -> tuple[int, int]:
    """Count the operations of query @ key^T and of weights @ value, for all heads."""
    from opt_einsum.helpers import flop_count

    batch, heads, queries, head_dim = query_shape
    sizes = {"b": batch, "h": heads, "i": queries, "j": key_shape[2]}
    sizes |= {"d": head_dim, "e": value_shape[3]}
    scores = flop_count("bhijd", True, 2, sizes)
    return scores, flop_count("bhije", True, 2, sizes)


@library.register_flops("foo::attention", "foo::attention_seeded", FUSED)
def flops(
    query_shape: torch.Size, key_shape: torch.Size, value_shape: torch.Size, *others: Any, **_: Any
) -> int:
    """Count two matrix products; a mask does not reduce them, as in torch's counts."""
    return sum(product_flops(query_shape, key_shape, value_shape))


@library.register_flops("foo::attention_backward")
def backward_flops(
    grad_output_shape: torch.Size,
    grad_logsumexp_shape: torch.Size,
    query_shape: torch.Size,
    key_shape: torch.Size,
    value_shape: torch.Size,
    *others: Any,
    **_: Any,
) -> int:
    """Count five products: scores, dQ, dK over the head dimension, dP and dV over the value's."""
    scores, values = product_flops(query_shape, key_shape, value_shape)
    return 3 * scores + 2 * values


@library.register_flops(f"{FUSED}_backward")
def fused_backward_flops(grad_output_shape: torch.Size, *shapes: Any, **_: Any) -> int:
    """Count as `backward_flops` does, for a logsumexp without gradient."""
    return backward_flops(grad_output_shape, grad_output_shape[:-1], *shapes)
