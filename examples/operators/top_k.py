"""The largest numbers of each row and their indices, as for sampling from a language model.

A row keeps a heap of the best so far; each vector is compared with the last of them, and skipped if
nothing is better. NaN counts as the largest, as in torch.topk; of equal numbers the first wins, so
the indices are the same on every machine.

Shows vectors with masks, scratch memory, results of several dtypes, gradients that read another
result, and indices that the kernel itself checks (``refuse=``).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from foo_ops import language, library
from foo_ops.testing import OpSpec, Sample, random

TAGS = torch.Tag.pt2_compliant_tag
library.define(
    "examples::top_k", "(Tensor input, SymInt k) -> (Tensor values, Tensor indices)", tags=TAGS
)
library.define(
    "examples::top_k_backward",
    "(Tensor grad_values, Tensor input, Tensor indices) -> Tensor grad_input",
    tags=TAGS,
)


def top_k(input: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the ``k`` largest of each row of ``input`` (..., D), in order, and their indices."""
    return torch.ops.examples.top_k(input, k)


# ---------------------------------------------------------------------------------------- kernels


def is_before(a: Any, index_of_a: Any, b: Any, index_of_b: Any) -> Any:
    """Compare without branches, which would be unpredictable."""
    is_equal = (a == b) | ((a != a) & (b != b))
    return (a > b) | ((a != a) & (b == b)) | (is_equal & (index_of_a < index_of_b))


def sift(values: Any, indices: Any, hole: Any, size: Any, value: Any, index: Any) -> None:
    """Put a number into the heap, whose root is the last in the order of the result.

    It sinks from a hole as far as it must.
    """
    child = 2 * hole + 1
    while child < size:
        if child + 1 < size:
            child += is_before(values[child], indices[child], values[child + 1], indices[child + 1])
        if is_before(values[child], indices[child], value, index):
            break
        values[hole], indices[hole] = values[child], indices[child]
        hole, child = child, 2 * child + 1
    values[hole], indices[hole] = value, index


def replace_last(values: Any, indices: Any, size: Any, x: Any, i: Any) -> None:
    """Replace the root by a number that precedes it."""
    if is_before(x[i], i, values[0], indices[0]):
        sift(values, indices, 0, size, x[i], i)


@library.register_kernel("examples::top_k", ("cpu", "foo"))
@library.tile_kernel(
    contiguous_rows=True,
    scratch={"heap": library.scratch(lambda values: values.shape[-1], like="input")},
)
def forward_kernel(input: Any, k: Any, values: Any, indices: Any, heap: Any, rows: Any) -> None:
    size, step = input.shape[-1], language.lanes(input)
    infinite = language.splat(language.cast(math.inf, input), step)
    if k == 0:
        return
    best = heap.row(0)
    for row in rows:
        x, places, y = input.row(row), indices.row(row), values.row(row)
        for i in range(k):
            best[i], places[i] = x[i], i
        for i in range(k // 2 - 1, -1, -1):
            sift(best, places, i, k, best[i], places[i])
        start = k
        while start + step <= size and best[0] < math.inf:
            numbers = language.load_vector(x, start, step)
            # Replace NaN by infinity, since NaN compares as less to nothing.
            numbers = language.select(language.less(numbers, infinite), numbers, infinite)
            is_better = language.less(language.splat(best[0], step), numbers)
            lane = language.next_lane(is_better, 0)
            while lane < step:
                replace_last(best, places, k, x, start + lane)
                lane = language.next_lane(is_better, lane + 1)
            start += step
        for i in range(start, size):
            replace_last(best, places, k, x, i)
        for last in range(k - 1, 0, -1):
            value, index = best[last], places[last]
            best[last], places[last] = best[0], places[0]
            sift(best, places, 0, last, value, index)
        for i in range(k):
            y[i] = best[i]


def refuse_indices(input: Tensor, indices: Tensor) -> None:
    size = input.shape[-1]
    wrong = indices[(indices < 0) | (indices >= size)]
    raise IndexError(
        f"top_k_backward: indices must be in [0, {size}), the columns of input, got {int(wrong[0])}"
    )


@library.register_kernel("examples::top_k_backward", ("cpu", "foo"))
@library.tile_kernel(
    tiles=lambda grad_input: grad_input.rows,
    contiguous_rows=True,
    refuse=refuse_indices,
)
def backward_kernel(grad_values: Any, input: Any, indices: Any, grad_input: Any, rows: Any) -> bool:
    for row in rows:
        g, places, target = grad_values.row(row), indices.row(row), grad_input.row(row)
        for i in range(grad_input.shape[-1]):
            target[i] = 0.0
        for i in range(grad_values.shape[-1]):
            place = places[i]
            if not 0 <= place < grad_input.shape[-1]:
                return False
            target[place] = g[i]
    return True


# ------------------------------------------------------------------------------------------- fake


@library.register_fake("examples::top_k")
def fake(input: Tensor, k: int) -> tuple[Tensor, Tensor]:
    if not input.is_floating_point():
        raise TypeError(f"top_k: input must be floating-point, got {input.dtype}")
    if input.dim() == 0:
        raise ValueError("top_k: input must have at least 1 dimension, got 0")
    if k < 0 or not library.holds(k <= input.shape[-1]):
        raise ValueError(
            f"top_k: k must be in [0, {input.shape[-1]}], the elements of a row, got {k}"
        )
    values = input.new_empty((*input.shape[:-1], k))
    return values, torch.empty_like(values, dtype=torch.int64)


@library.register_fake("examples::top_k_backward")
def fake_backward(grad_values: Tensor, input: Tensor, indices: Tensor) -> Tensor:
    if indices.dtype != torch.int64:
        raise TypeError(f"top_k_backward: indices must be torch.int64, got {indices.dtype}")
    shape = (*input.shape[:-1], indices.shape[-1])
    for name, given in (("grad_values", grad_values), ("indices", indices)):
        if not library.have_sizes(given.shape, shape):
            raise ValueError(
                f"top_k_backward: {name} must have shape {list(shape)}, got {list(given.shape)}"
            )
    return torch.empty_like(input, memory_format=torch.contiguous_format)


# --------------------------------------------------------------------------------------- autograd


def composite(input: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Compute the same with torch's operators, for forward mode."""
    values, indices = input.sort(dim=-1, descending=True, stable=True)
    return values[..., :k], indices[..., :k]


library.register_autograd("examples::top_k", "examples::top_k_backward", composite=composite)


# ---------------------------------------------------------------------------------------- samples


def reference(input: Tensor, k: int) -> tuple[Tensor, Tensor]:
    indices = input.argsort(dim=-1, descending=True, stable=True)[..., :k]
    return input.gather(-1, indices), indices


def sample(shape: tuple[int, ...], k: int, dtype: torch.dtype) -> Sample:
    return Sample((*random("top_k", shape, dtype=dtype), k))


def equal(dtype: torch.dtype) -> Sample:
    """Make numbers of which many are equal, infinities and NaN."""
    (input,) = random("equal", (4, 301), dtype=dtype)
    input = input.round()
    input[1, 5::7], input[2, 4], input[3, 6:] = torch.nan, torch.inf, -torch.inf
    return Sample((input, 20))


SPEC = OpSpec(
    operator=torch.ops.examples.top_k.default,
    reference=reference,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sized=lambda dtype, size: sample((2, size, size + 3), size // 2, dtype),
    samples={
        "vector": lambda dtype: sample((33,), 5, dtype),
        "all": lambda dtype: sample((3, 33), 33, dtype),
        "none": lambda dtype: sample((3, 0), 0, dtype),
        "several blocks": lambda dtype: sample((3, 501), 5, dtype),
        "equal": equal,
    },
    essential=("size7", "all"),
    large=lambda dtype: sample((301, 501), 50, dtype),
)
