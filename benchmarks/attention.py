"""Contenders for a `Workload`: foo::attention, and the functions that one would call instead."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.measure import OURS, Contenders, Local
from benchmarks.workload import Workload
from benchmarks.zentorch_process import Zentorch
from foo_ops.ops.attention.dense import attention
from foo_ops.ops.attention.varlen import attention_varlen

LARGEST_SCORES = 1 << 30
"""Most bytes of the score matrix for the math backend, which keeps several of them."""
FLEX_SHORTEST = 512
"""Fewest queries for FlexAttention: up to its block of 128 it needs a separate compilation."""


def contenders(workload: Workload) -> Contenders:
    makers: dict[str, Callable[[Workload], Any]] = {OURS: ours}
    if has_fused_kernel(workload):
        makers["flash"] = flash
    if score_bytes(workload) <= LARGEST_SCORES:
        makers["math"] = math
    if flex_takes_part(workload):
        makers["flex"] = flex
    if not (workload.is_backward or workload.has_bias):
        makers["zentorch"] = Zentorch
    return {name: partial(make, workload) for name, make in makers.items()}


def has_fused_kernel(workload: Workload) -> bool:
    """Return whether PyTorch has a fused kernel, which supports masks without gradient only."""
    return not (workload.has_bias or workload.dropout_p or workload.value_dim)


def score_bytes(workload: Workload) -> int:
    pairs = workload.query_length * workload.key_length
    return 4 * workload.batch * workload.query_heads * pairs


def flex_takes_part(workload: Workload) -> bool:
    """Return whether FlexAttention supports the workload on CPUs, and is worth compiling.

    Compilation takes 7 s per row and number of threads, unless only the length differs from the
    previous row. So float16, in which it is slowest, and other numbers of heads are left out.
    """
    if workload.is_backward or workload.has_bias or workload.dropout_p or workload.value_dim:
        return False
    is_long = workload.query_length >= FLEX_SHORTEST and workload.query_heads == 8
    return workload.dtype != "float16" and (is_long or workload.is_decoding)


# ------------------------------------------------------------------------------------ contenders


def ours(workload: Workload) -> Local:
    return local(workload, packed(workload) if workload.is_packed else padded(workload))


def padded(workload: Workload) -> Callable[..., Any]:
    return partial(
        attention,
        is_causal=workload.is_causal,
        dropout_p=workload.dropout_p,
        window_left=workload.window - 1,
    )


def packed(workload: Workload) -> Callable[..., Any]:
    lengths = workload.sequence_lengths()
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return partial(
        attention_varlen,
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        max_seqlen_q=max(lengths),
        max_seqlen_k=max(lengths),
        window_right=0 if workload.is_causal else -1,
    )


def flash(workload: Workload) -> Local:
    return scaled_dot_product_attention(workload, SDPBackend.FLASH_ATTENTION)


def math(workload: Workload) -> Local:
    return scaled_dot_product_attention(workload, SDPBackend.MATH)


def scaled_dot_product_attention(workload: Workload, backend: SDPBackend) -> Local:
    function = partial(
        F.scaled_dot_product_attention,
        dropout_p=workload.dropout_p,
        enable_gqa=workload.query_heads != workload.key_heads,
        **workload.mask_arguments(),
    )
    return local(workload, workload.one_by_one(function), partial(sdpa_kernel, backend))


def flex(workload: Workload) -> Local:
    """Compile FlexAttention, which has no backward pass on CPUs."""
    block_mask = None
    if workload.is_causal:
        lengths = workload.query_length, workload.key_length
        block_mask = create_block_mask(mask_mod(workload), None, None, *lengths, device="cpu")
    function: Callable[..., Any] = partial(
        compiled_flex(dataclasses.replace(workload, query_length=0, key_length=0, copies=0)),
        block_mask=block_mask,
        enable_gqa=workload.query_heads != workload.key_heads,
    )
    if workload.is_packed:
        function = with_batch(function)
    return local(workload, function)


@lru_cache(maxsize=1)
def compiled_flex(any_length: Workload) -> Callable[..., Any]:
    """Compile once for all workloads that differ only in lengths, which costs no speed."""
    torch.compiler.reset()
    return torch.compile(flex_attention, dynamic=True)


def mask_mod(workload: Workload) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the mask of a workload as a mask_mod."""
    if workload.is_packed:
        lengths = torch.tensor(workload.sequence_lengths())
        sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
        return lambda batch, head, query, key: (query >= key) & (sequence[query] == sequence[key])
    if workload.window:
        return lambda batch, head, query, key: (query >= key) & (query - key < workload.window)
    return upper_left


def upper_left(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def with_batch(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a function of (batch, heads, ...) for packed sequences, as a batch of one."""

    def call(*inputs: Tensor) -> Tensor:
        return function(*(tensor.transpose(0, 1)[None] for tensor in inputs))[0].transpose(0, 1)

    return call


def local(
    workload: Workload,
    function: Callable[..., Any],
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Local:
    if not workload.is_backward:
        return Local(workload.in_turn(function), context, workload.comparable)
    (inputs,) = workload.inputs()
    with context():
        output = function(*inputs)
    gradients = partial(
        torch.autograd.grad, output, inputs, workload.grad_output(), retain_graph=True
    )
    return Local(gradients, compared=workload.comparable)
