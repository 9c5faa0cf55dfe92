"""foo::flex_attention_varlen computes flex attention of packed sequences, or with keys in pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foo_ops import _C, library
from foo_ops.ops.arguments import compute_type
from foo_ops.ops.attention.varlen import backward_flops as packed_backward_flops
from foo_ops.ops.attention.varlen import flops as packed_flops
from foo_ops.ops.flex_attention.cache import traced
from foo_ops.ops.flex_attention.dense import PROGRAMS, TAGS, Function, cast, register_fake_backward
from foo_ops.ops.flex_attention.derivatives import composite_varlen, register_gradients

SEQUENCES = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_k=None, Tensor? block_table=None"
)
OPTIONS = f"SymInt max_seqlen_q, SymInt max_seqlen_k, {PROGRAMS}"

library.define(
    "foo::flex_attention_varlen",
    f"(Tensor query, Tensor key, Tensor value, Tensor[] captured, {SEQUENCES}, *, {OPTIONS}) "
    "-> (Tensor output, Tensor logsumexp)",
    tags=TAGS,
)

# The gradient of a captured tensor has size 0 if it is not needed.
library.define(
    "foo::flex_attention_varlen_backward",
    "(Tensor grad_output, Tensor grad_logsumexp, Tensor query, Tensor key, Tensor value, "
    f"Tensor[] captured, Tensor output, Tensor logsumexp, {SEQUENCES}, *, "
    f"bool[] captured_requires_grad, {OPTIONS}) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor[] grad_captured)",
    tags=TAGS,
)


def flex_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    score_mod: Function | None = None,
    mask_mod: Function | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `foo_ops.flex_attention` of packed sequences, or with keys in pages.

    Args:
        query: (total_q, Hq, D), float16, bfloat16, float32 or float64, D up to 256.
        key: (total_k, Hkv, D); Hq must be a multiple of Hkv. With block_table
            (num_blocks, block_size, Hkv, D).
        value: (total_k, Hkv, Dv), or (num_blocks, block_size, Hkv, Dv).
        cu_seqlens_q, cu_seqlens_k, seqused_k, block_table: as in `foo_ops.attention_varlen`.
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)``, as in `foo_ops.flex_attention`: b is
            the number of the sequence, q_idx and kv_idx are the positions within it.
        mask_mod: ``mask_mod(b, h, q_idx, kv_idx)``, likewise. Blocks of 128 that it masks as a
            whole cost nothing.
        max_seqlen_q, max_seqlen_k: no sequence may be longer.
        scale: factor of the products of query and key, by default 1 / sqrt(D).
        return_lse: return the logarithm of the softmax's denominator, too.

    Returns:
        The output, (total_q, Hq, Dv), and with ``return_lse`` the logsumexp, (Hq, total_q). Both
        can be differentiated, as those of `foo_ops.flex_attention`.

    Raises:
        ValueError, TypeError, NotImplementedError, IndexError: as `foo_ops.flex_attention`, and for
            sequences and blocks that are not inside the tensors.

    Example:
        >>> query, key, value = torch.randn(3, 12, 8, 64).unbind()
        >>> starts = torch.tensor([0, 5, 12], dtype=torch.int32)
        >>> foo_ops.flex_attention_varlen(
        ...     query, key, value, starts, starts, mask_mod=lambda b, h, q, k: q - k < 3,
        ...     max_seqlen_q=7, max_seqlen_k=7,
        ... ).shape
        torch.Size([12, 8, 64])
    """
    query, key, value = cast(query, key, value)
    if torch.compiler.is_dynamo_compiling():
        from foo_ops.ops.flex_attention.compile import compiled

        inputs = (query, key, value)
        sequences = (cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)
        lengths = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        output, logsumexp = compiled(
            "flex_attention_varlen", inputs, score_mod, mask_mod, sequences, scale, lengths
        )
        return (output, logsumexp) if return_lse else output
    programs = traced(score_mod, mask_mod, query)
    output, logsumexp = torch.ops.foo.flex_attention_varlen.default(
        query, key, value, programs.captured, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, score_mod=programs.score_mod,
        mask_mod=programs.mask_mod, backward=programs.backward, numbers=programs.numbers,
        integers=programs.integers, scale=scale,
    )  # fmt: skip
    return (output, logsumexp) if return_lse else output


# ------------------------------------------------------------------------------------ fake kernels


def _check(*tensors: Any, **_: Any) -> None:
    _C.check_flex_attention_varlen(*tensors, *(None,) * (8 - len(tensors)))


@library.register_fake("foo::flex_attention_varlen")
def fake(query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any) -> Any:
    _check(query, key, value, *others)
    total, heads, _ = query.shape
    output = query.new_empty(total, heads, value.shape[-1])
    return output, query.new_empty(heads, total, dtype=compute_type(query.dtype))


register_fake_backward("flex_attention_varlen_backward", _check)


# ---------------------------------------------------------------------------------------- autograd


register_gradients("foo::flex_attention_varlen", composite_varlen)


# -------------------------------------------------------------------------------------------- vmap

library.register_vmap_loop("foo::flex_attention_varlen")
library.register_vmap_loop("foo::flex_attention_varlen_backward")


# ------------------------------------------------------------------------------------------- FLOPs


@library.register_flops("foo::flex_attention_varlen", takes_tensors=True)
def flops(query: Any, key: Any, value: Any, captured: Any, *sequences: Any, **given: Any) -> int:
    return packed_flops(query, key, value, *sequences, **given)


@library.register_flops("foo::flex_attention_varlen_backward", takes_tensors=True)
def backward_flops(
    grad_output: Any,
    grad_logsumexp: Any,
    query: Any,
    key: Any,
    value: Any,
    captured: Any,
    output: Any,
    logsumexp: Any,
    *sequences: Any,
    **options: Any,
) -> int:
    return packed_backward_flops(
        grad_output, grad_logsumexp, query, key, value, *sequences, **options
    )
