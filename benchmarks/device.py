"""Compares device foo with the CPU: calls, memory, a training step; and with its sanitizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from foo_ops._C import device as _C
from torch import Tensor

from benchmarks.measure import OURS, Case, Contender, Contenders, Local
from foo_ops import sanitizer
from foo_ops.demo.model import GPT, OPERATORS, VOCABULARY, GPTConfig
from foo_ops.demo.training import BATCH, Batch, Setup, Trainer

CPU = "cpu"
SECTION = "device"
SANITIZER = "sanitizer"
WITHOUT = "without it"
FALLBACK = "add, 8 floats, through the fallback"
ALLOCATION = "allocate and free 4096 bytes"
TRAINING = "a training step of the demo"
ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "a + b": lambda each: each + each,
    "abs": torch.abs,
}
STEPS = 10_000
"""Steps of the learning-rate schedule, more than are measured."""


def cases(elements: Sequence[int], threads: int) -> Iterator[Case]:
    largest = max(elements)
    prepare = partial(prepare_function, lambda each: each + each, 8)
    yield Case(SECTION, FALLBACK, prepare, headline=True)
    yield Case(SECTION, ALLOCATION, lambda: {OURS: Allocation}, headline=True)
    for name, function in ELEMENTWISE.items():
        full_name = f"{name}, 2^{largest.bit_length() - 1} floats"
        prepare = partial(prepare_function, function, largest)
        yield Case(SECTION, full_name, prepare, (threads,), headline=True)


def training_case(threads: int) -> Case:
    return Case(SECTION, TRAINING, prepare_training, (threads,), repeat=5, headline=True)


def sanitizer_cases(threads: int) -> Iterator[Case]:
    yield Case(SANITIZER, "add, 8 floats", prepare_sanitized_function)
    yield Case(SANITIZER, TRAINING, prepare_sanitized_training, (threads,), repeat=5)


def prepare_sanitized_function() -> Contenders:
    input = torch.randn(8, device="foo")
    add = partial(torch.add, input, input)
    return {OURS: partial(Local, add, sanitizer.check), WITHOUT: partial(Local, add)}


def prepare_sanitized_training() -> Contenders:
    return {
        OURS: partial(training, "foo", sanitizer.check),
        WITHOUT: partial(training, "foo"),
    }


def prepare_function(function: Callable[[Tensor], Tensor], size: int) -> Contenders:
    input = torch.randn(size)
    return {
        name: partial(Local, partial(function, input.to(device)))
        for name, device in ((OURS, "foo"), (CPU, "cpu"))
    }


def prepare_training() -> Contenders:
    return {OURS: partial(training, "foo"), CPU: partial(training, "cpu")}


def training(
    device: str, context: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Contender:
    """Train on one batch; both devices start with the same weights."""
    torch.manual_seed(0)
    config = GPTConfig()
    trainer = Trainer(GPT(config, OPERATORS["foo"]), Setup(device, "foo", False), steps=STEPS)
    tokens = torch.randint(VOCABULARY, (BATCH, config.context + 1))
    batch: Batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return Local(lambda: torch.tensor(trainer.step(batch)), context)


class Allocation:
    """Allocates a block from the allocator's cache and frees it, in a loop in C++."""

    def results(self) -> list[Tensor]:
        return []

    def time(self, calls: int, threads: int) -> float:
        start = time.perf_counter()
        _C.allocate_and_free(4096, 0, calls)
        return time.perf_counter() - start
