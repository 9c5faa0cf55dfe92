"""Times an operator's first call in a process, without and with its kernel on disk.

``python -m benchmarks.first_call abs`` prints the seconds of one first call, and
``measure_first_calls`` starts such processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import foo_ops
from benchmarks.measure import Result
from foo_ops.ops.abs import abs
from foo_ops.ops.attention.dense import attention

REPOSITORY = Path(__file__).parents[1]


def abs_call() -> Callable[[], Any]:
    return partial(abs, torch.randn(8))


def attention_forward_call(dtype: torch.dtype, queries: int) -> Callable[[], Any]:
    query = torch.randn(1, 8, queries, 64, dtype=dtype)
    key, value = torch.randn(2, 1, 8, 128, 64, dtype=dtype).unbind()
    return partial(attention, query, key, value)


def attention_backward_call(dtype: torch.dtype) -> Callable[[], Any]:
    """Return a call of the backward pass alone; the forward pass has already run."""
    inputs = tuple(
        tensor.requires_grad_() for tensor in torch.randn(3, 1, 8, 128, 64, dtype=dtype).unbind()
    )
    # torch's first backward pass imports sympy, which takes most of a second.
    torch.autograd.grad(inputs[0].abs(), inputs[0], torch.ones_like(inputs[0]))
    output = attention(*inputs)
    assert isinstance(output, torch.Tensor)
    return partial(torch.autograd.grad, output, inputs, torch.randn_like(output))


def flex_call(dtype: torch.dtype, is_backward: bool) -> Callable[[], Any]:
    """Return a call of flex attention with a new function, or of its backward pass alone."""
    query, key, value = inputs = [
        it.requires_grad_(is_backward) for it in torch.randn(3, 1, 8, 128, 64, dtype=dtype)
    ]
    slopes = torch.rand(8)

    def alibi(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return score - slopes[head] * (query - key)

    call = partial(foo_ops.flex_attention, query, key, value, alibi)
    if not is_backward:
        return call
    torch.autograd.grad(inputs[0].abs(), inputs[0], torch.ones_like(inputs[0]))
    output = call()
    assert isinstance(output, torch.Tensor)
    return partial(torch.autograd.grad, output, inputs, torch.randn_like(output))


CALLS: dict[str, Callable[[], Callable[[], Any]]] = {
    "abs float32": abs_call,
    "attention forward float32": partial(attention_forward_call, torch.float32, 128),
    "attention forward bfloat16": partial(attention_forward_call, torch.bfloat16, 128),
    "attention decoding bfloat16": partial(attention_forward_call, torch.bfloat16, 1),
    "attention backward float32": partial(attention_backward_call, torch.float32),
    "attention backward bfloat16": partial(attention_backward_call, torch.bfloat16),
    "flex attention forward float32": partial(flex_call, torch.float32, False),
    "flex attention backward float32": partial(flex_call, torch.float32, True),
}


def measure_first_calls(name: str, rounds: int) -> Result:
    seconds: dict[str, list[float]] = {"warm": [], "cold": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            seconds["cold"].append(run_process(name, cache))
            seconds["warm"].append(run_process(name, cache))
    return Result("first call", name, torch.get_num_threads(), 0.0, True, seconds)


def run_process(name: str, cache: str) -> float:
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_call", name],
        env={**os.environ, "FOO_CACHE_DIR": cache},
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(process.stdout)


def main() -> None:
    call = CALLS[sys.argv[1]]()
    start = time.perf_counter()
    call()
    print(time.perf_counter() - start)


if __name__ == "__main__":
    main()
