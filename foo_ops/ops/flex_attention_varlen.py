"""foo::flex_attention_varlen is flex attention of packed sequences, and of keys in pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foo_ops import _C, library
from foo_ops.ops.arguments import compute_type
from foo_ops.ops.attention_varlen import backward_flops as packed_backward_flops
from foo_ops.ops.attention_varlen import flops as packed_flops
from foo_ops.ops.flex_attention import PROGRAMS, TAGS, empty_captured

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

# The gradient of a captured tensor has size 0 where it is not asked for.
library.define(
    "foo::flex_attention_varlen_backward",
    "(Tensor grad_output, Tensor grad_logsumexp, Tensor query, Tensor key, Tensor value, "
    f"Tensor[] captured, Tensor output, Tensor logsumexp, {SEQUENCES}, *, "
    f"bool[] captured_requires_grad, {OPTIONS}) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor[] grad_captured)",
    tags=TAGS,
)


# ------------------------------------------------------------------------------------ fake kernels


def _check(*tensors: Any) -> None:
    _C.check_flex_attention_varlen(*tensors, *(None,) * (8 - len(tensors)))


@library.register_fake("foo::flex_attention_varlen")
def fake(query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any) -> Any:
    _check(query, key, value, *others)
    total, heads, _ = query.shape
    output = query.new_empty(total, heads, value.shape[-1])
    return output, query.new_empty(heads, total, dtype=compute_type(query.dtype))


@library.register_fake("foo::flex_attention_varlen_backward")
def fake_backward(
    grad_output: Tensor,
    grad_logsumexp: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captured: list[Tensor],
    output: Tensor,
    logsumexp: Tensor,
    *sequences: Any,
    captured_requires_grad: list[bool],
    **_: Any,
) -> tuple[Any, ...]:
    name = "flex_attention_varlen_backward"
    _check(query, key, value, captured, *sequences)
    _C.check_attention_results(name, grad_output, grad_logsumexp, query, value, output, logsumexp)
    gradients = (tensor.new_empty(tensor.shape) for tensor in (query, key, value))
    return (*gradients, empty_captured(name, captured, captured_requires_grad))


# ---------------------------------------------------------------------------------------- autograd


def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    query, key, value, captured, *sequences = inputs
    ctx.save_for_backward(query, key, value, *output, *sequences, *captured)
    ctx.options = keyword_only_inputs


def backward(ctx: Any, grad_output: Tensor, grad_logsumexp: Tensor) -> tuple[Any, ...]:
    query, key, value, output, logsumexp, *others = ctx.saved_tensors
    sequences, captured = others[:4], others[4:]
    needed = ctx.needs_input_grad[3]
    *gradients, of_captured = torch.ops.foo.flex_attention_varlen_backward.default(
        grad_output, grad_logsumexp, query, key, value, captured, output, logsumexp, *sequences,
        captured_requires_grad=needed, **ctx.options,
    )  # fmt: skip
    of_captured = [grad if it else None for it, grad in zip(needed, of_captured)]
    return (*gradients, of_captured, None, None, None, None)


library.register_autograd("foo::flex_attention_varlen", backward, setup_context=setup_context)


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
