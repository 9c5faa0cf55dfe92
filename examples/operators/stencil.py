"""A step of the heat equation on a grid, with the five-point stencil.

    output[i, j] = (1 - 4 rate) x[i, j] + rate * (x[i-1, j] + x[i+1, j] + x[i, j-1] + x[i, j+1])

The grid is in the last two dimensions, with zeros around (Dirichlet's boundary), so the step is a
symmetric matrix, and its own gradient. Stable for rates up to 1/4.

Shows rows that need their neighbours, a kernel for two operators, derivatives of every order, and
vmap in one call.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foo_ops import language, library
from foo_ops.testing import OpSpec, Sample, random

TAGS = torch.Tag.pt2_compliant_tag
library.define("examples::stencil", "(Tensor input, *, float rate) -> Tensor", tags=TAGS)
library.define(
    "examples::stencil_backward", "(Tensor grad_output, *, float rate) -> Tensor", tags=TAGS
)


def stencil(input: Tensor, *, rate: float) -> Tensor:
    """Return the grids ``input`` (..., H, W) one step later."""
    return torch.ops.examples.stencil(input, rate=rate)


# ----------------------------------------------------------------------------------------- kernel


@library.tile_kernel(contiguous_rows=True)
def kernel(input: Any, rate: Any, output: Any, rows: Any) -> None:
    height, width = input.shape[-2], input.shape[-1]
    step = language.cast(rate, input)
    rest = language.cast(1.0 - 4.0 * rate, input)
    for row in rows:
        x, y = input.row(row), output.row(row)
        has_upper, has_lower = row % height > 0, row % height < height - 1
        upper = input.row(row - 1 if has_upper else row)
        lower = input.row(row + 1 if has_lower else row)
        is_inside = has_upper and has_lower
        if is_inside:
            for j in range(1, width - 1):
                around = x[j - 1] + x[j + 1] + upper[j] + lower[j]
                y[j] = rest * x[j] + step * around
        # Inner rows lack only the first and the last column now, other rows all.
        for j in range(0, width, max(width - 1, 1) if is_inside else 1):
            around = language.zero(input)
            if has_upper:
                around += upper[j]
            if has_lower:
                around += lower[j]
            if j > 0:
                around += x[j - 1]
            if j < width - 1:
                around += x[j + 1]
            y[j] = rest * x[j] + step * around


# ------------------------------------------------------------------------------------------- fake


def check(input: Tensor) -> None:
    if not input.is_floating_point():
        raise TypeError(f"stencil: input must be floating-point, got {input.dtype}")
    if input.dim() < 2:
        raise ValueError(f"stencil: input must have at least 2 dimensions, got {input.dim()}")


def fake(input: Tensor, *, rate: float) -> Tensor:
    check(input)
    return torch.empty_like(input, memory_format=torch.contiguous_format)


# --------------------------------------------------------------------------------------- autograd


def composite(input: Tensor, *, rate: float) -> Tensor:
    """Compute the same with torch's operators, for forward mode and second derivatives."""
    padded = F.pad(input, (1, 1, 1, 1))
    rows, columns = slice(1, -1), slice(1, -1)
    around = padded[..., :-2, columns] + padded[..., 2:, columns]
    around = around + padded[..., rows, :-2] + padded[..., rows, 2:]
    return (1 - 4 * rate) * input + rate * around


for name in ("examples::stencil", "examples::stencil_backward"):
    library.register_fake(name, fake)
    library.register_kernel(name, ("cpu", "foo"), kernel)
library.register_autograd("examples::stencil", "examples::stencil_backward", composite=composite)
library.register_autograd("examples::stencil_backward", composite=composite)
library.register_vmap_rows("examples::stencil", "input")


# ---------------------------------------------------------------------------------------- samples


def reference(input: Tensor, rate: float) -> Tensor:
    result = (1 - 4 * rate) * input
    for dim in (-2, -1):
        if input.shape[dim] > 0:
            nothing = torch.zeros_like(input.narrow(dim, 0, 1))
            most = input.shape[dim] - 1
            before = torch.cat((nothing, input.narrow(dim, 0, most)), dim)
            behind = torch.cat((input.narrow(dim, 1, most), nothing), dim)
            result = result + rate * (before + behind)
    return result


def infinite(dtype: torch.dtype) -> Sample:
    """Make infinities at the boundary, and a NaN, which only reach their neighbours."""
    (input,) = random("infinite", (5, 9), dtype=dtype)
    input[0, 3], input[2, 0], input[3, 6] = torch.inf, -torch.inf, torch.nan
    return Sample((input,), {"rate": 0.125})


def sample(shape: tuple[int, ...], dtype: torch.dtype, rate: float = 0.2) -> Sample:
    (input,) = random("stencil", shape, dtype=dtype)
    return Sample((input,), {"rate": rate})


SPEC = OpSpec(
    operator=torch.ops.examples.stencil.default,
    reference=reference,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sized=lambda dtype, size: sample((2, size, size + 3), dtype),
    samples={
        "one row": lambda dtype: sample((1, 33), dtype),
        "one column": lambda dtype: sample((5, 1), dtype, rate=-1.5),
        "no columns": lambda dtype: sample((2, 3, 0), dtype),
        "infinite": infinite,
    },
    essential=("size7", "one column"),
    large=lambda dtype: sample((3, 101, 501), dtype),
)
