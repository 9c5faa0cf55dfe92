"""What is measured: a new line of the benchmark is a new case here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.measure import Case, Contenders
from foo_ops.ops.attention import attention

BACKWARD_WORK = 2.5
"""Of the forward pass's work: five products of matrices, where that has two."""

HEADLINE_LENGTHS = (512, 2048)


def cases(quick: bool, processors: int) -> list[Case]:
    """All cases; with ``quick`` the small sizes only."""
    threads = [count for count in (1, 2) if count <= processors]
    return [
        *call_cases(),
        *abs_cases([2**20] if quick else [2**20, 2**25], threads[-1]),
        *attention_cases([128] if quick else [128, 512, 2048], threads),
    ]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ----------------------------------------------------------------------------------------- calls


def call_cases() -> Iterator[Case]:
    """What a call costs when there is next to nothing to compute."""
    variants: dict[str, tuple[bool, Callable[[], AbstractContextManager[Any]]]] = {
        "abs, no gradient needed": (False, nullcontext),
        "abs, under no_grad": (False, torch.no_grad),
        "abs, gradient needed": (True, nullcontext),
    }
    for name, (requires_grad, context) in variants.items():
        prepare = partial(prepare_calls, requires_grad)
        yield Case("calls", name, prepare, context=context, headline=True)


def prepare_calls(requires_grad: bool) -> Contenders:
    input = torch.randn(8, requires_grad=requires_grad)
    return {"foo": partial(torch.ops.foo.abs.default, input), "torch": partial(torch.abs, input)}


# ------------------------------------------------------------------------------------------- abs


def abs_cases(sizes: list[int], threads: int) -> Iterator[Case]:
    """The elementwise launcher, from and to memory; on foo against torch.abs on cpu."""
    for size in sizes:
        for dtype in (torch.float32, torch.bfloat16, torch.complex64):
            moved = size * (dtype.itemsize + dtype.to_real().itemsize)
            for form, prepare in {
                "": partial(prepare_abs, dtype, size, "cpu"),
                ", out=": partial(prepare_abs_out, dtype, size),
                ", on foo": partial(prepare_abs, dtype, size, "foo"),
            }.items():
                name = f"abs, {dtype_name(dtype)}, 2^{size.bit_length() - 1} elements{form}"
                headline = dtype is torch.float32 and size == max(sizes)
                yield Case("abs", name, prepare, threads, work=moved, headline=headline)


def prepare_abs(dtype: torch.dtype, size: int, device: str) -> Contenders:
    input = torch.randn(size, dtype=dtype)
    return {
        "foo": partial(torch.ops.foo.abs.default, input.to(device)),
        "torch": partial(torch.abs, input),
    }


def prepare_abs_out(dtype: torch.dtype, size: int) -> Contenders:
    input = torch.randn(size, dtype=dtype)
    ours, theirs = (torch.empty(size, dtype=dtype.to_real()) for _ in range(2))
    return {
        "foo": partial(torch.ops.foo.abs.out, input, out=ours),
        "torch": partial(torch.abs, input, out=theirs),
    }


# ------------------------------------------------------------------------------------- attention


def attention_cases(lengths: list[int], threads: list[int]) -> Iterator[Case]:
    """Forward and backward against torch's flash attention."""
    batch, heads, head_dim = 1, 8, 64
    for direction, prepare, share in (
        ("forward", prepare_forward, 1.0),
        ("backward", prepare_backward, BACKWARD_WORK),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            for is_causal in (False, True):
                for length in lengths:
                    shape = (batch, heads, length, head_dim)
                    work = 4.0 * batch * heads * length * length * head_dim * share
                    mask = "causal" if is_causal else "dense"
                    for count in threads:
                        yield Case(
                            f"attention {direction}",
                            f"{dtype_name(dtype)}, {mask}, length {length}",
                            partial(prepare, shape, dtype, is_causal),
                            count,
                            work / 2 if is_causal else work,
                            partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION),
                            headline=count == 1 and length in HEADLINE_LENGTHS,
                        )


def attention_inputs(
    shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value."""
    query, key, value = torch.randn(3, *shape, dtype=dtype).unbind()
    return (
        query.requires_grad_(requires_grad),
        key.requires_grad_(requires_grad),
        value.requires_grad_(requires_grad),
    )


def prepare_forward(shape: tuple[int, ...], dtype: torch.dtype, is_causal: bool) -> Contenders:
    inputs = attention_inputs(shape, dtype, requires_grad=False)
    return {
        "foo": partial(attention, *inputs, is_causal=is_causal),
        "torch": partial(F.scaled_dot_product_attention, *inputs, is_causal=is_causal),
    }


def prepare_backward(shape: tuple[int, ...], dtype: torch.dtype, is_causal: bool) -> Contenders:
    inputs = attention_inputs(shape, dtype, requires_grad=True)
    grad = torch.randn(shape, dtype=dtype)
    outputs = {
        "foo": attention(*inputs, is_causal=is_causal),
        "torch": F.scaled_dot_product_attention(*inputs, is_causal=is_causal),
    }
    return {
        name: partial(torch.autograd.grad, output, inputs, grad, retain_graph=True)
        for name, output in outputs.items()
    }
