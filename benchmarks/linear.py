"""Compares foo::linear with torch.nn.functional.linear."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import foo_ops
from benchmarks import peaks
from benchmarks.measure import OURS, Case, Contenders, Local

SECTION, FEW_ROWS = "linear", "linear of few rows"
MOST_OF_FEW_ROWS = 4

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Layer:
    """A linear layer, and the number of its input rows.

    Attributes:
        target: the fraction of the peak, or of the read bandwidth, to reach on one thread.
    """

    direction: str
    dtype: str
    rows: int
    width: int
    outputs: int
    target: float

    @property
    def name(self) -> str:
        size = f"{self.rows} x {self.width} x {self.outputs}"
        return f"linear {self.direction}, {self.dtype}, {size}"

    @property
    def has_few_rows(self) -> bool:
        return self.rows <= MOST_OF_FEW_ROWS

    def flops(self) -> int:
        """Count one product forward, and two backward."""
        products = 2 if self.direction == "backward" else 1
        return products * 2 * self.rows * self.width * self.outputs

    def weight_bytes(self) -> int:
        return self.width * self.outputs * getattr(torch, self.dtype).itemsize


READ_TARGET = 0.75
TARGETS = {
    64: {"float32": 0.75, "bfloat16": 0.70, "float16": 0.65},
    1024: {"float32": 0.85, "bfloat16": 0.80, "float16": 0.75},
}
"""Target fractions of the peak, by rows and dtype, forward and backward."""


def layers(dtypes: Sequence[str]) -> Iterator[Layer]:
    for dtype in dtypes:
        for rows in (1, MOST_OF_FEW_ROWS):
            yield Layer("forward", dtype, rows, 4096, 4096, READ_TARGET)
        for rows, targets in TARGETS.items():
            for direction in ("forward", "backward"):
                yield Layer(direction, dtype, rows, 2816, 1024, targets[dtype])


def target(name: str) -> float:
    """Return the target of a row by its name."""
    return next(it.target for it in layers(tuple(TARGETS[64])) if it.name == name)


def cases(dtypes: Sequence[str], threads: Sequence[int]) -> Iterator[Case]:
    for layer in layers(dtypes):
        peak = peaks.READ if layer.has_few_rows else peaks.compute_peak(layer.dtype)
        yield Case(
            FEW_ROWS if layer.has_few_rows else SECTION,
            layer.name,
            partial(contenders, layer),
            tuple(threads),
            layer.weight_bytes() if layer.has_few_rows else layer.flops(),
            references=peaks.references(peak),
            headline=layer.dtype == "bfloat16",
        )


def contenders(layer: Layer) -> Contenders:
    """Make contenders; few rows get several weights beyond the caches, like those of a model."""
    copies = 1
    if layer.has_few_rows:
        copies = -(-peaks.bytes_beyond_the_caches() // layer.weight_bytes())
    dtype = getattr(torch, layer.dtype)
    input = torch.randn(layer.rows, layer.width).to(dtype)
    shape = (copies, layer.outputs, layer.width)
    weights = (torch.randn(shape) / layer.width**0.5).to(dtype).unbind()
    make = backward if layer.direction == "backward" else forward
    functions = {OURS: foo_ops.linear, "torch": F.linear}
    return {name: partial(make, it, input, weights) for name, it in functions.items()}


def forward(function: Function, input: Tensor, weights: Sequence[Tensor]) -> Local:
    following = itertools.cycle(weights)
    return Local(lambda: function(input, next(following)), torch.no_grad)


def backward(function: Function, input: Tensor, weights: Sequence[Tensor]) -> Local:
    tensors: list[Any] = [it.detach().requires_grad_() for it in (input, weights[0])]
    output = function(*tensors)
    gradient = torch.ones_like(output)
    return Local(partial(torch.autograd.grad, output, tensors, gradient, retain_graph=True))
