"""foo::attention and what one would call instead, each made ready for a `Workload`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.measure import OURS, THREADS, Contenders, Local, torch_threads
from benchmarks.workload import Workload
from benchmarks.zentorch_process import Zentorch
from foo_ops.ops.attention import attention

Attention = Callable[[Tensor, Tensor, Tensor], Any]

LARGEST_SCORES = 1 << 30
"""Bytes of the matrix of scores for which the math backend, which keeps several, takes part."""


def contenders(workload: Workload) -> Contenders:
    makers: dict[str, Callable[[Workload], Any]] = {OURS: ours, "flash": flash}
    if score_bytes(workload) <= LARGEST_SCORES:
        makers["math"] = math
    if not workload.is_backward:
        makers |= {"flex": flex, "zentorch": Zentorch}
    return {name: partial(make, workload) for name, make in makers.items()}


def score_bytes(workload: Workload) -> int:
    pairs = workload.query_length * workload.key_length
    return 4 * workload.batch * workload.query_heads * pairs


def ours(workload: Workload) -> Local:
    return local(workload, partial(attention, is_causal=workload.is_causal))


def flash(workload: Workload) -> Local:
    return scaled_dot_product_attention(workload, SDPBackend.FLASH_ATTENTION)


def math(workload: Workload) -> Local:
    return scaled_dot_product_attention(workload, SDPBackend.MATH)


def scaled_dot_product_attention(workload: Workload, backend: SDPBackend) -> Local:
    function = partial(
        F.scaled_dot_product_attention,
        is_causal=workload.is_causal,
        enable_gqa=workload.query_heads != workload.key_heads,
    )
    return local(workload, function, partial(sdpa_kernel, backend))


def flex(workload: Workload) -> Local:
    """Compiled FlexAttention, which has no backward pass on CPUs.

    A cache that grows would be compiled anew at every step, so decoding takes dynamic shapes.
    """
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=workload.is_decoding)
    block_mask = None
    if workload.is_causal:
        lengths = workload.query_length, workload.key_length
        block_mask = create_block_mask(upper_left, None, None, *lengths, device="cpu")
    enable_gqa = workload.query_heads != workload.key_heads
    function = partial(compiled, block_mask=block_mask, enable_gqa=enable_gqa)
    for threads in THREADS:
        # Compiled at the first call on each number of threads, which the code has as a constant.
        with torch_threads(threads):
            function(*workload.inputs()[0])
    return local(workload, function)


def upper_left(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def local(
    workload: Workload,
    function: Attention,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Local:
    if not workload.is_backward:
        return Local(workload.in_turn(function), context)
    (inputs,) = workload.inputs()
    with context():
        output = function(*inputs)
    return Local(
        partial(torch.autograd.grad, output, inputs, workload.grad_output(), retain_graph=True)
    )
