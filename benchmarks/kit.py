"""Operators defined with the kit as a user would, to measure the cost of their calls."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from foo_ops import language, library


@cache
def relu() -> Any:
    """Return an elementwise relu, to compare with torch.relu."""

    @library.numba_op("foo_benchmark::relu")
    def relu(x: float) -> float:
        return max(x, 0.0)

    return relu.default


@cache
def row_sum() -> Any:
    """Return a sum of rows by a tile kernel, to compare with torch.sum."""
    library.define("foo_benchmark::row_sum", "(Tensor input) -> Tensor")

    @library.register_fake("foo_benchmark::row_sum")
    def fake(input: torch.Tensor) -> torch.Tensor:
        return input.new_empty(input.shape[:-1])

    @library.register_kernel("foo_benchmark::row_sum", ("cpu", "foo"))
    @library.tile_kernel(contiguous_rows=True)
    def row_sum(input: Any, output: Any, rows: Any) -> None:
        for row in rows:
            x, total = input.row(row), language.zero(input)
            for i in range(input.shape[-1]):
                total = language.accumulate(total, x[i])
            output.flat[row] = total

    return torch.ops.foo_benchmark.row_sum.default


def keep_input(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def gradient_of_abs(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    (input,) = ctx.saved_tensors
    return grad * input.sgn()


def make_abs(name: str) -> Any:
    """Return an elementwise abs without a gradient formula."""

    @library.numba_op(f"foo_benchmark::{name}")
    def formula_abs(x: float) -> float:
        return abs(x)

    return formula_abs.default


@cache
def formula_abs() -> Any:
    """Return abs with a Python formula registered by the kit."""
    operator = make_abs("formula_abs")
    library.register_autograd(operator, gradient_of_abs, setup_context=keep_input)
    return operator


@cache
def torch_formula_abs() -> Any:
    """Return abs with the same formula registered by torch.library."""
    operator = make_abs("torch_formula_abs")
    torch.library.register_autograd(operator, gradient_of_abs, setup_context=keep_input)
    return operator


@cache
def custom_abs() -> Any:
    """Return torch.abs as an operator made by torch.library from Python functions."""

    @torch.library.custom_op("foo_benchmark::custom_abs", mutates_args=())
    def custom_abs(input: torch.Tensor) -> torch.Tensor:
        return input.abs()

    custom_abs.register_autograd(gradient_of_abs, setup_context=keep_input)
    return custom_abs
