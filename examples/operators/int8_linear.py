"""A linear layer with int8 weights, and a scale for each row of them.

    output[m, n] = scale[n] * sum_k input[m, k] * weight[n, k] + bias[n]

The weights are read as int8, a quarter of the memory of float32, and never dequantized in memory.

Shows a product of matrices of two dtypes, integers and floating-point numbers, a gradient in the
compute type that autograd rounds once, and tiles of two kinds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foo_ops import language, library
from foo_ops.testing import OpSpec, Sample, random

TAGS = torch.Tag.pt2_compliant_tag
library.define(
    "examples::int8_linear",
    "(Tensor input, Tensor weight, Tensor scale, Tensor? bias=None) -> Tensor",
    tags=TAGS,
)
library.define(
    "examples::int8_linear_backward",
    "(Tensor grad_output, Tensor input, Tensor weight, Tensor scale, Tensor? bias) "
    "-> (Tensor grad_input, Tensor grad_scale, Tensor grad_bias)",
    tags=TAGS,
)


def int8_linear(input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply ``input`` (..., K) by ``weight`` (N, K), int8, with ``scale`` and ``bias`` (N,)."""
    return torch.ops.examples.int8_linear(input, weight, scale, bias)


# ---------------------------------------------------------------------------------------- kernels


ROWS, COLUMNS = 128, 64


@library.register_kernel("examples::int8_linear", ("cpu", "foo"))
@library.tile_kernel(
    tiles=lambda weight: (weight.shape[0] + COLUMNS - 1) // COLUMNS,
    contiguous_rows=True,
    scratch={
        "some_rows": library.scratch(
            lambda input: min(input.rows, ROWS), lambda input: input.shape[-1], like="input"
        ),
        "products": library.scratch(lambda input: min(input.rows, ROWS), COLUMNS, like="input"),
    },
)
def forward_kernel(
    input: Any, weight: Any, scale: Any, bias: Any, output: Any,
    some_rows: Any, products: Any, tiles: Any,
) -> None:  # fmt: skip
    """Compute some columns of the output in each tile."""
    for tile in tiles:
        first = tile * COLUMNS
        columns = min(COLUMNS, weight.shape[0] - first)
        for start in range(0, input.rows, ROWS):
            rows = min(ROWS, input.rows - start)
            w = weight[first : first + columns]
            if input.ndim == 2:
                language.dot(products[:rows, :columns], input[start : start + rows], w.T)
            else:
                copy_rows(some_rows, input, start, rows)
                language.dot(products[:rows, :columns], some_rows[:rows], w.T)
            for m in range(rows):
                y, product = output.row(start + m), products.row(m)
                for n in range(columns):
                    base = language.zero(input)
                    if bias is not None:
                        base = language.cast(bias[first + n], input)
                    y[first + n] = product[n] * language.cast(scale[first + n], input) + base


def copy_rows(target: Any, input: Any, start: Any, rows: Any) -> None:
    """Copy rows of an input with any number of dimensions into a matrix."""
    for m in range(rows):
        x, copy = input.row(start + m), target.row(m)
        for k in range(input.shape[-1]):
            copy[k] = x[k]


def product_of(x: Any, w: Any, size: Any) -> Any:
    total = language.zero(x)
    for k in range(size):
        total = language.accumulate(total, x[k] * language.cast(w[k], x))
    return total


@library.register_kernel("examples::int8_linear_backward", ("cpu", "foo"))
@library.tile_kernel(tiles=lambda input, weight: input.rows + weight.shape[0], contiguous_rows=True)
def backward_kernel(
    grad_output: Any, input: Any, weight: Any, scale: Any, bias: Any,
    grad_input: Any, grad_scale: Any, grad_bias: Any, tiles: Any,
) -> None:  # fmt: skip
    """Compute a row of grad_input per tile, and in further tiles the gradients for a weight row."""
    size, rows, columns = input.shape[-1], input.rows, weight.shape[0]
    for tile in tiles:
        if tile < rows:
            g, target = grad_output.row(tile), grad_input.row(tile)
            for k in range(size):
                target[k] = 0.0
            for n in range(columns):
                w, factor = weight.row(n), language.cast(g[n] * scale[n], input)
                for k in range(size):
                    target[k] = target[k] + factor * language.cast(w[k], input)
            continue
        n = tile - rows
        w, slope, total = weight.row(n), language.zero(input), language.zero(input)
        for m in range(rows):
            g = grad_output.row(m)
            slope += g[n] * product_of(input.row(m), w, size)
            total += g[n]
        grad_scale[n] = slope
        if bias is not None:
            grad_bias[n] = total


# ------------------------------------------------------------------------------------------- fake


@library.register_fake("examples::int8_linear")
def fake(input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    if not input.is_floating_point():
        raise TypeError(f"int8_linear: input must be floating-point, got {input.dtype}")
    if weight.dtype != torch.int8:
        raise TypeError(f"int8_linear: weight must be torch.int8, got {weight.dtype}")
    if input.dim() == 0:
        raise ValueError("int8_linear: input must have at least 1 dimension, got 0")
    if weight.dim() != 2 or not library.holds(weight.shape[1] == input.shape[-1]):
        raise ValueError(
            f"int8_linear: weight must have shape [N, {input.shape[-1]}] as input's rows have "
            f"elements, got {list(weight.shape)}"
        )
    for name, given in (("scale", scale), ("bias", bias)):
        if given is not None and not given.is_floating_point():
            raise TypeError(f"int8_linear: {name} must be floating-point, got {given.dtype}")
        if given is not None and not library.have_sizes(given.shape, weight.shape[:1]):
            raise ValueError(
                f"int8_linear: {name} must have shape {list(weight.shape[:1])} to match the rows "
                f"of weight, got {list(given.shape)}"
            )
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


@library.register_fake("examples::int8_linear_backward")
def fake_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    fake(input, weight, scale, bias)
    # Float32 for half precision; autograd rounds it to input's dtype.
    compute = torch.float64 if input.dtype == torch.float64 else torch.float32
    grad_bias = input.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return input.new_empty(input.shape, dtype=compute), scale.new_empty(scale.shape), grad_bias


# --------------------------------------------------------------------------------------- autograd


def composite(input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute the same with torch's operators, for forward mode."""
    unpacked = (weight * scale[:, None]).to(input.dtype)
    return torch.nn.functional.linear(input, unpacked, bias)


library.register_autograd(
    "examples::int8_linear", "examples::int8_linear_backward", composite=composite
)
library.register_vmap_rows("examples::int8_linear", "input")


# ---------------------------------------------------------------------------------------- samples


def reference(input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    products = (input[..., None, :] * weight * scale[:, None]).sum(-1)
    return products if bias is None else products + bias


def sample(
    shape: tuple[int, ...],
    columns: int,
    dtype: torch.dtype,
    *,
    has_bias: bool = True,
    wide: bool = False,
) -> Sample:
    """Make a sample; ``wide`` gives scale and bias in float32."""
    input, scale, bias = random("linear", shape, (columns,), (columns,), dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(-128, 128, (columns, shape[-1]), generator=generator, dtype=torch.int8)
    scale = scale / 128
    if wide:
        scale, bias = scale.float(), bias.float()
    return Sample((input, weight, scale, bias if has_bias else None))


SPEC = OpSpec(
    operator=torch.ops.examples.int8_linear.default,
    reference=reference,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sized=lambda dtype, size: sample((2, size, size + 3), size + 1, dtype),
    samples={
        "vector": lambda dtype: sample((19,), 5, dtype),
        "no bias": lambda dtype: sample((6, 33), 5, dtype, has_bias=False),
        "wide scale": lambda dtype: sample((5, 33), 7, dtype, wide=True),
        "no columns": lambda dtype: sample((5, 0), 3, dtype),
    },
    essential=("size7", "no bias"),
    large=lambda dtype: sample((33, 501), 101, dtype),
)
