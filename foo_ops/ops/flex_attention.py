"""foo::flex_attention computes attention whose scores a user's function changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foo_ops import _C, library
from foo_ops.ops.attention import empty_results, product_flops

TAGS = (torch.Tag.pt2_compliant_tag,)

MASK = (
    "Tensor? kv_num_blocks=None, Tensor? kv_indices=None, Tensor? full_kv_num_blocks=None, "
    "Tensor? full_kv_indices=None"
)
# The programs' texts are in the language of foo_ops/kernels/vectors/program.py.
PROGRAMS = (
    'str score_mod="", str mask_mod="", str backward="", float[] numbers=[], int[] integers=[], '
    "float? scale=None"
)
OPTIONS = f"{PROGRAMS}, int query_block=128, int key_block=128"

library.define(
    "foo::flex_attention",
    f"(Tensor query, Tensor key, Tensor value, Tensor[] captured, {MASK}, *, {OPTIONS}) "
    "-> (Tensor output, Tensor logsumexp)",
    tags=TAGS,
)

# The gradient of a captured tensor has size 0 where it is not asked for.
library.define(
    "foo::flex_attention_backward",
    "(Tensor grad_output, Tensor grad_logsumexp, Tensor query, Tensor key, Tensor value, "
    f"Tensor[] captured, Tensor output, Tensor logsumexp, {MASK}, *, "
    f"bool[] captured_requires_grad, {OPTIONS}) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor[] grad_captured)",
    tags=TAGS,
)


# ------------------------------------------------------------------------------------ fake kernels


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captured: list[Tensor],
    *mask: Tensor | None,
    query_block: int = 128,
    key_block: int = 128,
    **_: Any,
) -> None:
    lists = (*mask, *(None,) * (4 - len(mask)))
    _C.check_flex_attention(query, key, value, captured, *lists, query_block, key_block)


@library.register_fake("foo::flex_attention")
def fake(
    query: Tensor, key: Tensor, value: Tensor, captured: list[Tensor], *mask: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    _check(query, key, value, captured, *mask, **options)
    return empty_results(query, value)


@library.register_fake("foo::flex_attention_backward")
def fake_backward(
    grad_output: Tensor,
    grad_logsumexp: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captured: list[Tensor],
    output: Tensor,
    logsumexp: Tensor,
    *mask: Any,
    captured_requires_grad: list[bool],
    **options: Any,
) -> tuple[Any, ...]:
    _check(query, key, value, captured, *mask, **options)
    _C.check_attention_results(
        "flex_attention_backward", grad_output, grad_logsumexp, query, value, output, logsumexp
    )
    gradients = (tensor.new_empty(tensor.shape) for tensor in (query, key, value))
    of_captured = empty_captured("flex_attention_backward", captured, captured_requires_grad)
    return (*gradients, of_captured)


def empty_captured(name: str, captured: list[Tensor], requires_grad: list[bool]) -> list[Tensor]:
    """Make the gradients of captured tensors as launchers do."""
    _C.check_captured_requirements(name, captured, requires_grad)
    return [
        tensor.new_empty(tensor.shape if is_needed else (0,))
        for tensor, is_needed in zip(captured, requires_grad)
    ]


# ---------------------------------------------------------------------------------------- autograd


def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    query, key, value, captured, *mask = inputs
    ctx.save_for_backward(query, key, value, *output, *mask, *captured)
    ctx.options = keyword_only_inputs


def backward(ctx: Any, grad_output: Tensor, grad_logsumexp: Tensor) -> tuple[Any, ...]:
    query, key, value, output, logsumexp, *others = ctx.saved_tensors
    mask, captured = others[:4], others[4:]
    needed = ctx.needs_input_grad[3]
    *gradients, of_captured = torch.ops.foo.flex_attention_backward.default(
        grad_output, grad_logsumexp, query, key, value, captured, output, logsumexp, *mask,
        captured_requires_grad=needed, **ctx.options,
    )  # fmt: skip
    of_captured = [grad if it else None for it, grad in zip(needed, of_captured)]
    return (*gradients, of_captured, None, None, None, None)


library.register_autograd("foo::flex_attention", backward, setup_context=setup_context)


# ------------------------------------------------------------------------------------------- FLOPs


@library.register_flops("foo::flex_attention")
def flops(query_shape: Any, key_shape: Any, value_shape: Any, *others: Any, **_: Any) -> int:
    """Count two products of matrices; a mask does not make them fewer, as torch counts."""
    return sum(product_flops(query_shape, key_shape, value_shape))


@library.register_flops("foo::flex_attention_backward")
def backward_flops(
    grad_output_shape: Any,
    grad_logsumexp_shape: Any,
    query_shape: Any,
    key_shape: Any,
    value_shape: Any,
    *others: Any,
    **_: Any,
) -> int:
    """Count five products, as `foo_ops.ops.attention.backward_flops` does."""
    scores, values = product_flops(query_shape, key_shape, value_shape)
    return 3 * scores + 2 * values
