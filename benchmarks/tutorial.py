"""The operators of docs/kit.md and docs/kit_reference.md, to compare them with PyTorch's."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.operators import Operator, like_input
from foo_ops import language, library

SECTION = "kit"
WIDTH = 4096
# In a kernel math.sqrt(0.5) would be float64, and promote other operands to float64.
ROOT_OF_HALF = math.sqrt(0.5)


@library.numba_op("foo_benchmark::mish")
def mish(x: float) -> float:
    return x * math.tanh(math.log1p(math.exp(min(x, 20.0))))


@library.numba_op("foo_benchmark::gelu")
def gelu(x: float) -> float:
    return 0.5 * x * (1 + math.erf(x * ROOT_OF_HALF))


@library.numba_op("foo_benchmark::blend")
def blend(a: float, b: float, weight: float = 0.5) -> float:
    return a + weight * (b - a)


def squared_error_gradient(grad: float, prediction: float, target: float) -> tuple[float, float]:
    slope = 2 * (prediction - target) * grad
    return slope, -slope


@library.numba_op("foo_benchmark::squared_error", backward=squared_error_gradient)
def squared_error(prediction: float, target: float) -> float:
    return (prediction - target) ** 2


@library.numba_op("foo_benchmark::cube", backward=lambda grad, x: 3 * x * x * grad)
def cube(x: float) -> float:
    return x * x * x


library.define("foo_benchmark::log_sum_exp", "(Tensor input) -> Tensor")


@library.register_fake("foo_benchmark::log_sum_exp")
def log_sum_exp_fake(input: Tensor) -> Tensor:
    return input.new_empty(input.shape[:-1])


@library.register_kernel("foo_benchmark::log_sum_exp", ("cpu", "foo"))
@library.tile_kernel(contiguous_rows=True)
def log_sum_exp(input: Any, output: Any, rows: Any) -> None:
    size = input.shape[-1]
    for row in rows:
        x = input.row(row)
        largest = language.cast(-math.inf, input)
        for i in range(size):
            largest = language.accumulate_maximum(largest, x[i])
        total = language.zero(input)
        for i in range(size):
            total = language.accumulate(total, math.exp(x[i] - largest))
        output.flat[row] = largest + math.log(total)


library.define("foo_benchmark::row_norm", "(Tensor input, *, float eps=1e-6) -> Tensor")


@library.register_fake("foo_benchmark::row_norm")
def row_norm_fake(input: Tensor, *, eps: float = 1e-6) -> Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@library.register_kernel("foo_benchmark::row_norm", ("cpu", "foo"))
@library.tile_kernel(contiguous_rows=True)
def row_norm(input: Any, eps: Any, output: Any, rows: Any) -> None:
    size = input.shape[-1]
    for row in rows:
        x, y = input.row(row), output.row(row)
        total = language.zero(input)
        for i in range(size):
            total = language.accumulate(total, x[i] * x[i])
        scale = language.cast(1 / math.sqrt(total / size + eps), input)
        for i in range(size):
            y[i] = x[i] * scale


def _operator(ours: Any, theirs: Any, count: int, *moved: int) -> Operator:
    """Make a row for ``count`` arguments of one shape."""
    return Operator(ours, theirs, partial(like_input, count=count), moved, WIDTH)


_ops = torch.ops.foo_benchmark
OPERATORS = {
    "mish": _operator(mish, F.mish, 1, 2),
    "gelu": _operator(gelu, F.gelu, 1, 2),
    "blend": _operator(blend, lambda a, b: torch.lerp(a, b, 0.5), 2, 3),
    "squared_error": _operator(squared_error, lambda a, b: (a - b) ** 2, 2, 3, 5, 8),
    "cube": _operator(cube, lambda x: x**3, 1, 2, 3, 5),
    "log_sum_exp": _operator(_ops.log_sum_exp, lambda x: x.logsumexp(-1), 1, 1),
    "row_norm": _operator(_ops.row_norm, lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-6), 1, 2),
}
