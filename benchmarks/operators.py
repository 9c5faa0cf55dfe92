"""Compares the operators that models need besides attention with PyTorch's, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor

import foo_ops
from benchmarks import peaks
from benchmarks.measure import OURS, Case, Contenders, Local
from foo_ops.demo.model import OPERATORS as BUNDLES

SECTION = "operators"
PYTORCH = BUNDLES["torch"]
HEAD_DIM = 128
Function = Callable[..., Any]
Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Operator:
    """An operator, PyTorch's counterpart, and their inputs.

    Attributes:
        ours: our function.
        theirs: the same in PyTorch's operators, which is also compiled.
        shapes: returns the shapes of the arguments, given the number of rows and their width.
        moved: how many tensors of the first argument's size a call reads or writes, for each of
            PASSES that is measured.
        width: width of a row.
        differentiable: how many arguments need a gradient; None for all.
    """

    ours: Function
    theirs: Function
    shapes: Callable[[int, int], Shapes]
    moved: tuple[int, ...]
    width: int
    differentiable: int | None = None


def loss_of(function: Function) -> Function:
    """Return the loss as a function of logits, with the same targets for every contender."""

    def loss(logits: Tensor) -> Tensor:
        target = torch.arange(logits.shape[0]) * 37 % logits.shape[1]
        # In float32, as ours; PyTorch's loss is rounded to the dtype of the logits.
        return function(logits, target).float()

    return loss


def layer_norm(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(input, weight.shape, weight, bias)


def add_layer_norm(
    input: Tensor, residual: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    total = input + residual
    return layer_norm(total, weight, bias), total


def like_input(rows: int, width: int, *, count: int, weights: int = 0) -> Shapes:
    return [(rows, width)] * count + [(width,)] * weights


def heads_and_tables(rows: int, width: int) -> Shapes:
    """Return shapes of heads with ``rows`` positions, and of their cosines and sines."""
    table = (rows, HEAD_DIM // 2)
    return [(width // HEAD_DIM, rows, HEAD_DIM), table, table]


OPERATORS = {
    "rms_norm": Operator(
        foo_ops.rms_norm,
        PYTORCH.rms_norm,
        partial(like_input, count=1, weights=1),
        (2, 3),
        4096,
    ),
    "add_rms_norm": Operator(
        foo_ops.add_rms_norm,
        PYTORCH.add_rms_norm,
        partial(like_input, count=2, weights=1),
        (4, 4),
        4096,
    ),
    "layer_norm": Operator(
        foo_ops.layer_norm, layer_norm, partial(like_input, count=1, weights=2), (2, 3), 4096
    ),
    "add_layer_norm": Operator(
        foo_ops.add_layer_norm,
        add_layer_norm,
        partial(like_input, count=2, weights=2),
        (4, 4),
        4096,
    ),
    "silu_mul": Operator(
        foo_ops.silu_mul, PYTORCH.silu_mul, partial(like_input, count=2), (3, 5), 11_008
    ),
    "rotary_embedding": Operator(
        foo_ops.rotary_embedding, PYTORCH.rotary_embedding, heads_and_tables, (2, 2), 4096, 1
    ),
    "softmax_cross_entropy": Operator(
        loss_of(foo_ops.softmax_cross_entropy),
        loss_of(F.cross_entropy),
        partial(like_input, count=1),
        (1, 2),
        32_000,
    ),
}


def cases(
    section: str,
    operators: Mapping[str, Operator],
    rows: int,
    dtypes: Sequence[str],
    threads: Sequence[int],
) -> Iterator[Case]:
    """Measure one row as in decoding, and many as in training, also with gradients."""
    for name, operator in operators.items():
        for dtype in dtypes:
            measured = list(zip(PASSES, operator.moved, strict=False))
            for count, (passes, moved) in ((1, measured[0]), *((rows, it) for it in measured)):
                size = count * operator.width * getattr(torch, dtype).itemsize
                yield Case(
                    section,
                    f"{name} {passes}, {dtype}, {count} x {operator.width}",
                    partial(contenders, operator, dtype, count, passes),
                    tuple(threads) if count > 1 else (1,),
                    moved * size,
                    references=peaks.references(peaks.READ) if count > 1 else {},
                    headline=dtype == "bfloat16",
                )


def contenders(operator: Operator, dtype: str, rows: int, passes: str) -> Contenders:
    """Return ours, PyTorch's operators in eager mode, and the same compiled."""
    inputs = [
        torch.randn(shape, dtype=getattr(torch, dtype))
        for shape in operator.shapes(rows, operator.width)
    ]
    for input in inputs[: operator.differentiable]:
        input.requires_grad_(passes != "forward")
    make = PASSES[passes]
    return {
        OURS: partial(make, operator.ours, inputs),
        "torch": partial(make, operator.theirs, inputs),
        "compiled": lambda: make(compiled(operator.theirs), inputs),
    }


def compiled(function: Function) -> Function:
    """Compile with a fresh Dynamo, which gives up on a function after eight compilations."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=False)


def forward(function: Function, inputs: list[Tensor]) -> Local:
    return Local(partial(function, *inputs), torch.no_grad)


def backward(function: Function, inputs: list[Tensor]) -> Local:
    # Donated buffers would be missing in the second call.
    with torch._functorch.config.patch(donated_buffer=False):
        outputs = results_of(function, inputs)
        gradients = [torch.ones_like(output) for output in outputs]
        wanted = [input for input in inputs if input.requires_grad]
        gradient = partial(torch.autograd.grad, outputs, wanted, gradients, retain_graph=True)
        return Local(gradient)


def both(function: Function, inputs: list[Tensor]) -> Local:
    """Measure both passes together, since one may do work for the other.

    With torch.compile, the forward pass of a squared error writes 2 (a - b), rounded, and the
    backward pass reads that instead of a and b.
    """
    gradients = [torch.ones_like(output) for output in results_of(function, inputs)]
    wanted = [input for input in inputs if input.requires_grad]

    def step() -> Any:
        return torch.autograd.grad(results_of(function, inputs), wanted, gradients)

    return Local(step)


def results_of(function: Function, inputs: list[Tensor]) -> Sequence[Tensor]:
    outputs = function(*inputs)
    return (outputs,) if isinstance(outputs, Tensor) else outputs


PASSES: Mapping[str, Callable[[Function, list[Tensor]], Local]] = {
    "forward": forward,
    "backward": backward,
    "forward and backward": both,
}
