"""Compares foo::linear_cross_entropy, forward and backward, with functions that compute the logits.

Liger-Kernel computes the same in chunks of rows. Its kernels need Triton and a GPU, so it is not
measured; the chunks of PyTorch's own F.linear_cross_entropy are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

import foo_ops
from benchmarks.measure import OURS, Case, Contenders, Local, stay_awake
from benchmarks.operators import compiled

SECTION, MEMORY = "linear_cross_entropy", "memory of linear_cross_entropy"
WIDTH = 1024
CLASSES = (32_000, 128_256)
"""The vocabularies of Llama 2 and Llama 3."""
MEGABYTE = 1e6

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def of_torch(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    # In float32, as ours; PyTorch's loss is rounded to the dtype of the logits.
    return F.cross_entropy(F.linear(hidden, weight), target).float()


def of_two(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    loss = foo_ops.softmax_cross_entropy(foo_ops.linear(hidden, weight), target)
    assert isinstance(loss, Tensor)
    return loss


def in_chunks(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, target, options=options).float()


def ours(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    loss = foo_ops.linear_cross_entropy(hidden, weight, target)
    assert isinstance(loss, Tensor)
    return loss


FUNCTIONS: dict[str, Function] = {
    OURS: ours,
    "linear, softmax_cross_entropy": of_two,
    "torch": of_torch,
    "torch in chunks": in_chunks,
}


def cases(
    rows: int, classes: Sequence[int], dtypes: Sequence[str], threads: Sequence[int]
) -> Iterator[Case]:
    """Measure a training step, and its peak of memory on foo, which counts it."""
    for count, dtype in product(classes, dtypes):
        name = f"loss and gradients, {dtype}, {rows} x {WIDTH} x {count}"
        make = partial(tensors, rows, count, dtype)
        yield Case(SECTION, name, partial(contenders, make), tuple(threads), headline=True)
        yield Case(MEMORY, name, partial(memory_contenders, make), (threads[-1],))


def tensors(rows: int, classes: int, dtype: str, device: str = "cpu") -> tuple[Tensor, ...]:
    hidden = torch.randn(rows, WIDTH)
    weight = torch.randn(classes, WIDTH) / WIDTH**0.5
    target = torch.arange(rows) * 37 % classes
    kind = getattr(torch, dtype)
    floats = (it.to(device, kind).requires_grad_() for it in (hidden, weight))
    return *floats, target.to(device)


def step(function: Function, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    hidden, weight, target = inputs
    loss = function(hidden, weight, target)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


def contenders(make: Callable[..., tuple[Tensor, ...]]) -> Contenders:
    inputs = make()
    return {
        **{name: partial(Local, partial(step, it, inputs)) for name, it in FUNCTIONS.items()},
        "compiled": lambda: Local(partial(step, compiled(of_torch), inputs)),
    }


def memory_contenders(make: Callable[..., tuple[Tensor, ...]]) -> Contenders:
    inputs = make(device="foo")
    return {name: partial(Peak, partial(step, it, inputs)) for name, it in FUNCTIONS.items()}


def settled_memory() -> int:
    """Return the bytes in use once the autograd thread has freed the gradients of the last call."""
    found = []
    for _ in range(50):
        stay_awake()
        found.append(torch.accelerator.memory_allocated())
    return min(found)


class Peak(Local):
    """Measures the peak megabytes of a call besides its inputs, instead of seconds."""

    def time(self, calls: int, threads: int) -> float:
        before = settled_memory()
        torch.accelerator.reset_peak_memory_stats()
        self.function()
        return calls * (torch.accelerator.max_memory_allocated() - before) / MEGABYTE
