"""foo::linear in the table of operators.

The error of an element is bounded by the roundings of its sum, in the compute type, times the
summed magnitudes, plus the rounding to its own dtype. Processors flush subnormal numbers to zero in
products of bfloat16, and in their sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foo_ops.testing import reference
from foo_ops.testing.rounding import compute_type, roundings, roundoff, smallest
from foo_ops.testing.spec import Dtypes, Maker, OpSpec, Sample, Tensors, random


def linear_sample(
    name: str, rows: tuple[int, ...], depth: int, columns: int, *, has_bias: bool = True
) -> Maker:
    def make(dtype: torch.dtype) -> Sample:
        shapes = ((*rows, depth), (columns, depth), (columns,))
        input, weight, bias = random(name, *shapes, dtype=dtype)
        return Sample((input, weight, bias) if has_bias else (input, weight))

    return make


def special(dtype: torch.dtype) -> Sample:
    """Make infinities and NaN, which must stay in their rows and columns, and zeros."""
    input, weight, bias = random("special", (9, 21), (20, 21), (20,), dtype=dtype)
    input[0, 3], input[2, 20], input[5, 0] = torch.nan, torch.inf, -torch.inf
    weight[4, 7], weight[19, 20], bias[11] = torch.inf, torch.nan, -torch.inf
    input[8] = 0
    weight[2] = 0
    return Sample((input, weight, bias))


def bound(value: Tensor, magnitude: Tensor, terms: int, dtype: torch.dtype) -> Tensor:
    """Bound the error of a sum of ``terms`` products whose magnitudes add up to ``magnitude``."""
    compute = compute_type(dtype)
    error = roundings(terms + 1) * roundoff(compute) * magnitude
    lost = 2 * terms * torch.finfo(compute).smallest_normal
    return error + lost + roundoff(dtype) * value.abs() + smallest(dtype)


def output_budget(sample: Sample, dtype: torch.dtype) -> Tensors:
    value, magnitude = (reference.linear(*it.inputs) for it in (sample, sample.map(torch.abs)))
    return (bound(value, magnitude, sample.inputs[0].shape[-1], dtype),)


def gradient_budget(sample: Sample, dtypes: Dtypes, cotangents: Tensors) -> Tensors:
    """Bound the errors of the gradients of tensors that require one."""
    input, weight, *_ = sample.inputs
    (grad,), (dtype, *_) = cotangents, dtypes
    assert dtype is not None
    rows = grad.shape[:-1].numel()
    products = (
        ("...n,nk->...k", (grad, weight), weight.shape[0]),
        ("...n,...k->nk", (grad, input), rows),
        ("...n->n", (grad,), rows),
    )
    return tuple(
        bound(torch.einsum(it, *of), torch.einsum(it, *(x.abs() for x in of)), terms, dtype)
        for tensor, (it, of, terms) in zip(sample.inputs, products)
        if tensor.requires_grad
    )


LINEAR = OpSpec(
    operator=torch.ops.foo.linear.default,
    reference=reference.linear,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sized=lambda dtype, size: linear_sample("sized", (2, size), size + 3, size + 1)(dtype),
    samples={
        "vector": linear_sample("vector", (), 19, 33),
        "no bias": linear_sample("no bias", (3, 4), 35, 18, has_bias=False),
        "4-d": linear_sample("4-d", (2, 3, 2), 17, 5),
        "no depth": linear_sample("no depth", (3,), 0, 5),
        "no columns": linear_sample("no columns", (3,), 5, 0),
        "one row": linear_sample("one row", (1,), 1029, 131),
        "few rows": linear_sample("few rows", (5,), 515, 70),
        "several sections": linear_sample("several sections", (61,), 1101, 75),
        "special values": special,
    },
    essential=("size1", "size7", "no bias"),
    in_layouts=("size7", "no bias", "few rows"),
    large=linear_sample("large", (301,), 600, 333),
    output_budget=output_budget,
    gradient_budget=gradient_budget,
)
