"""Compare the operators of examples/operators with PyTorch's own, eager and compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import OURS, Case, Contenders
from benchmarks.operators import Function, backward, compiled, forward
from examples.operators.causal_conv1d import causal_conv1d
from examples.operators.causal_conv1d import composite as torch_conv1d
from examples.operators.gelu import gelu
from examples.operators.histogram import histogram
from examples.operators.layer_norm import layer_norm
from examples.operators.quantize import quantize
from examples.operators.stencil import composite as torch_stencil
from examples.operators.stencil import stencil
from examples.operators.top_k import top_k

SECTION = "examples"
DTYPES = ("float32", "bfloat16")


class MakeInputs(Protocol):
    def __call__(self, rows: int, dtype: torch.dtype) -> Sequence[Any]: ...


@dataclass(frozen=True)
class Example:
    """An operator, the same of PyTorch's, and what they are called with.

    Attributes:
        ours, theirs: take the inputs, and return a tensor or several.
        inputs: makes them, of so many rows.
        differentiable: how many of the first inputs need a gradient; there is no row for gradients
            where none does.
    """

    ours: Function
    theirs: Function
    inputs: MakeInputs
    differentiable: int = 0


def normal(*shapes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tuple(shape), generator=generator).to(dtype) for shape in shapes]


# ------------------------------------------------------------------------------------ the operators


def rows_of(width: int, count: int = 1) -> MakeInputs:
    """Make tensors of (rows, width)."""
    return lambda rows, dtype: normal(*[(rows, width)] * count, dtype=dtype)


def rows_and_weights(rows: int, dtype: torch.dtype) -> list[Tensor]:
    return normal((rows, 1024), (1024,), (1024,), dtype=dtype)


def channels_and_taps(rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Make (2, 512, rows), and for each channel four taps and a bias, as in Mamba."""
    return normal((2, 512, rows), (512, 4), (512,), dtype=dtype)


def rows_without_equals(rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Make rows of 4096 numbers that differ in bfloat16, too: PyTorch takes any of equal ones."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.arange(0x3000, 0x4000, dtype=torch.int16).view(torch.bfloat16)
    order = torch.rand(rows, len(numbers), generator=generator).argsort(-1)
    return [numbers.to(dtype)[order]]


def torch_quantize(input: Tensor) -> tuple[Tensor, Tensor]:
    scale = input.abs().amax(-1).float() / 127
    return (input / scale[..., None]).round().to(torch.int8), scale


def torch_histogram(input: Tensor) -> Tensor:
    return torch.histc(input.float(), 100, -3.0, 3.0)


EXAMPLES = {
    "layer_norm": Example(
        layer_norm, lambda x, *given: F.layer_norm(x, x.shape[-1:], *given), rows_and_weights, 3
    ),
    "gelu": Example(gelu, F.gelu, rows_of(4096), 1),
    "gelu tanh": Example(
        partial(gelu, approximate="tanh"), partial(F.gelu, approximate="tanh"), rows_of(4096), 1
    ),
    "causal_conv1d": Example(causal_conv1d, torch_conv1d, channels_and_taps, 3),
    "top_k": Example(
        lambda x: top_k(x, 50)[0], lambda x: torch.topk(x, 50)[0], rows_without_equals, 1
    ),
    "quantize": Example(quantize, torch_quantize, rows_of(4096)),
    "histogram": Example(
        partial(histogram, bins=100, min=-3.0, max=3.0), torch_histogram, rows_of(1024)
    ),
    "stencil": Example(
        partial(stencil, rate=0.2), partial(torch_stencil, rate=0.2), rows_of(2048), 1
    ),
}


# ----------------------------------------------------------------------------------------- the rows


def cases(rows: int, threads: int) -> Iterator[Case]:
    for name, example in EXAMPLES.items():
        for dtype in DTYPES:
            for is_backward in (False, True)[: 1 + bool(example.differentiable)]:
                direction = " backward" if is_backward else ""
                yield Case(
                    SECTION,
                    f"{name}{direction}, {dtype}, {rows} rows",
                    partial(contenders, example, getattr(torch, dtype), rows, is_backward),
                    (threads,),
                    headline=dtype == "float32",
                )


def contenders(example: Example, dtype: torch.dtype, rows: int, is_backward: bool) -> Contenders:
    """Take ours, PyTorch's operators one by one, and the same compiled."""
    make = backward if is_backward else forward

    def inputs() -> list[Any]:
        made = list(example.inputs(rows, dtype))
        for tensor in made[: example.differentiable]:
            tensor.requires_grad_(is_backward)
        return made

    return {
        OURS: lambda: make(example.ours, inputs()),
        "torch": lambda: make(example.theirs, inputs()),
        "compiled": lambda: make(compiled(example.theirs), inputs()),
    }
