"""foo::attention, exact attention in O(length) memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foo_ops import _C, library

library.define(
    "foo::attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias=None, Tensor? alibi_slopes=None, "
    "Tensor? sinks=None, *, bool is_causal=False, float? scale=None, float dropout_p=0.0, "
    "int window_left=-1, int window_right=-1, float softcap=0.0) "
    "-> (Tensor output, Tensor logsumexp)",
    tags=torch.Tag.pt2_compliant_tag,
)
SAVED = (
    "(Tensor grad_output, Tensor grad_logsumexp, Tensor query, Tensor key, Tensor value, "
    "Tensor{} attn_bias, Tensor output, Tensor logsumexp, *, bool is_causal, float? scale)"
)
library.define(
    "foo::attention_backward",
    SAVED.format("?") + " -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    tags=torch.Tag.pt2_compliant_tag,
)
library.define(
    "foo::attention_bias_backward",
    SAVED.format("") + " -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    return_logsumexp: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention: softmax(scale * query @ key^T + attn_bias) @ value.

    Computed tile by tile with an online softmax (Dao et al. 2022, FlashAttention, algorithm 1), so
    that memory beside inputs and outputs grows with the lengths and not with their product.

    Args:
        query: (B, Hq, Sq, D), float16, bfloat16, float32 or float64, any strides, D up to 256.
        key: (B, Hkv, Sk, D). Hq must be a multiple of Hkv: each head of key and value serves
            Hq / Hkv heads of query in a row.
        value: (B, Hkv, Sk, Dv), Dv up to 256.
        attn_bias: added to the scores; of any shape that broadcasts to (B, Hq, Sq, Sk), float32 or
            of query's dtype. Or bool: True where the query may see the key.
        is_causal: query i sees the keys j <= i only (aligned to the upper left).
        scale: factor of the scores, by default 1 / sqrt(D).
        return_logsumexp: return the logarithm of the softmax's denominator, too.

    Returns:
        The output, (B, Hq, Sq, Dv) in query's dtype, and if asked for the natural logsumexp,
        (B, Hq, Sq) in float32 (float64 for float64). A query that sees no key has output 0 and
        logsumexp -inf. float16 and bfloat16 are accumulated in float32. Both results can be
        differentiated, once, for query, key, value and a floating-point attn_bias.

    Raises:
        ValueError: for shapes that do not fit together.
        TypeError: for dtypes.

    Example:
        >>> query, key, value = torch.randn(3, 1, 8, 100, 64).unbind()
        >>> foo_ops.attention(query, key, value, is_causal=True).shape
        torch.Size([1, 8, 100, 64])
    """
    output, logsumexp = torch.ops.foo.attention.default(
        query, key, value, attn_bias, is_causal=is_causal, scale=scale
    )
    return (output, logsumexp) if return_logsumexp else output


@library.register_fake("foo::attention")
def fake(
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
) -> tuple[Tensor, Tensor]:
    _C.check_attention(
        query,
        key,
        value,
        attn_bias,
        alibi_slopes,
        sinks,
        dropout_p,
        window_left,
        window_right,
        softcap,
    )
    shape = query.shape[:3]
    compute = torch.float64 if query.dtype == torch.float64 else torch.float32
    output = query.new_empty(*shape, value.shape[3])
    return output, query.new_empty(shape, dtype=compute)


@library.register_fake("foo::attention_backward")
def fake_backward(
    grad_output: Tensor,
    grad_logsumexp: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    output: Tensor,
    logsumexp: Tensor,
    *,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    _C.check_attention_gradients(
        grad_output, grad_logsumexp, query, key, value, attn_bias, output, logsumexp
    )
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


@library.register_fake("foo::attention_bias_backward")
def fake_bias_backward(
    grad_output: Tensor,
    grad_logsumexp: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    *,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    _C.check_attention_gradients(
        grad_output, grad_logsumexp, query, key, value, attn_bias, output, logsumexp
    )
    return attn_bias.new_empty(attn_bias.shape)


def setup_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
) -> None:
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.options = {name: keyword_only_inputs[name] for name in ("is_causal", "scale")}


class _NotDifferentiable(torch.autograd.Function):
    """The first ``count`` of the tensors, in a way that refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise NotImplementedError("attention: its gradients cannot be differentiated again yet")


def backward(ctx: Any, grad_output: Tensor, grad_logsumexp: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, attn_bias, output, logsumexp = ctx.saved_tensors
    saved = (grad_output, grad_logsumexp, query, key, value, attn_bias, output, logsumexp)
    needs_bias = attn_bias is not None and ctx.needs_input_grad[3]
    with torch.no_grad():
        gradients: list[Tensor | None] = [None] * 4
        if any(ctx.needs_input_grad[:3]):
            gradients[:3] = torch.ops.foo.attention_backward(*saved, **ctx.options)
        if needs_bias:
            gradients[3] = torch.ops.foo.attention_bias_backward(*saved, **ctx.options)
    if torch.is_grad_enabled():
        # create_graph=True: without this the second derivatives would silently lack our part.
        present = [gradient for gradient in gradients if gradient is not None]
        sources = [tensor for tensor in saved if tensor is not None]
        marked = iter(_NotDifferentiable.apply(len(present), *present, *sources))
        gradients = [gradient if gradient is None else next(marked) for gradient in gradients]
    return (*gradients, None, None)


library.register_autograd("foo::attention", backward, setup_context=setup_context)
