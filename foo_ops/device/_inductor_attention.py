"""Write torch's attention on foo as the operators of foo_ops in graphs that Inductor compiles.

Kernels that a device has under torch's own name return numbers beside tensors, which the C++ around
a graph cannot take from an operator of which it knows no more than the schema.
"""

from typing import Any

import torch
from torch import Tensor
from torch._inductor.decomposition import register_decomposition

aten = torch.ops.aten


def _in_order_of(query: Tensor, result: Tensor) -> Tensor:
    """Let the dimensions lie in memory as those of the query, which torch promises."""
    order = sorted(range(4), key=query.stride, reverse=True)
    inverse = sorted(range(4), key=order.__getitem__)
    return result.permute(order).contiguous().permute(inverse)


def _seed_argument(seed: Tensor, dropout_p: float) -> Tensor | None:
    return seed.view(1) if dropout_p > 0 else None


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    if query.device.type != "foo":
        return NotImplemented
    seed = query.new_empty((), dtype=torch.int64)
    if dropout_p > 0:
        seed = torch.randint(torch.iinfo(torch.int64).max, (), device=query.device)
    output, logsumexp = torch.ops.foo.attention_seeded(
        query, key, value, attn_bias, seed=_seed_argument(seed, dropout_p),
        is_causal=is_causal, scale=scale, dropout_p=dropout_p,
    )  # fmt: skip
    lengths = query.shape[2], key.shape[2]
    offset = torch.empty_like(seed)
    return _in_order_of(query, output), logsumexp, None, None, *lengths, seed, offset, None


def _attention_backward(
    grad_output: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    grad_input_mask: list[bool],
    output: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> Any:
    if query.device.type != "foo":
        return NotImplemented
    if grad_output is None:
        return None, None, None, None
    grad_query, grad_key, grad_value, grad_bias, _, _ = torch.ops.foo.attention_backward(
        grad_output, torch.zeros_like(logsumexp), query, key, value, attn_bias, None, None,
        output, logsumexp, _seed_argument(philox_seed, dropout_p),
        attn_bias_requires_grad=grad_input_mask[3],
        is_causal=is_causal, scale=scale, dropout_p=dropout_p,
    )  # fmt: skip
    return (
        _in_order_of(query, grad_query),
        _in_order_of(key, grad_key),
        _in_order_of(value, grad_value),
        grad_bias if grad_input_mask[3] else None,
    )


def register() -> None:
    for name, formula in (
        ("_scaled_dot_product_fused_attention_overrideable", _attention),
        ("_scaled_dot_product_fused_attention_overrideable_backward", _attention_backward),
    ):
        register_decomposition(getattr(aten, name).default)(formula)
