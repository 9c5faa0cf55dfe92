"""foo::linear_int8 and foo::linear_int4 in the table of operators.

The error of an element is bounded as for foo::linear, with the magnitudes of the dequantized
weights. Weights that are rounded to the input's dtype have errors of their own, independent of each
other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from foo_ops.testing import reference
from foo_ops.testing.rounding import roundoff
from foo_ops.testing.spec import Dtypes, Maker, OpSpec, Sample, Tensors, random
from foo_ops.testing.specs.linear import bound

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def integers(name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Draw integers over their whole range."""
    (numbers,) = random(name, shape, dtype=torch.float64)
    bits = (numbers * 4096).round().to(torch.int64) % 256
    return bits.to(torch.uint8).view(dtype)


def int8_sample(
    name: str, rows: tuple[int, ...], depth: int, columns: int, *, has_bias: bool = True
) -> Maker:
    def make(dtype: torch.dtype) -> Sample:
        input, scale, bias = random(name, (*rows, depth), (columns,), (columns,), dtype=dtype)
        weight = integers(name, (columns, depth), torch.int8)
        inputs = (input, weight, scale / 128)
        return Sample((*inputs, bias) if has_bias else inputs)

    return make


def int4_sample(
    name: str,
    rows: tuple[int, ...],
    groups: int,
    columns: int,
    *,
    group_size: int = 32,
    has_bias: bool = True,
) -> Maker:
    def make(dtype: torch.dtype) -> Sample:
        of_groups = (columns, groups)
        input, scale, zero, bias = random(
            name, (*rows, groups * group_size), of_groups, of_groups, (columns,), dtype=dtype
        )
        weight = integers(name, (columns, groups * group_size // 2), torch.uint8)
        # Zero points are integers, except in the first column.
        zero = (8 + 4 * zero).to(dtype)
        zero[1:] = zero[1:].round()
        inputs = (input, weight, scale / 8, zero)
        return Sample((*inputs, bias) if has_bias else inputs, {"group_size": group_size})

    return make


def special(make: Maker, dtype: torch.dtype) -> Sample:
    """Make infinities and NaN, which must stay in their rows and columns, and zeros."""
    sample = make(dtype)
    input, _, scale, *_ = sample.inputs
    input[0, 3], input[2, 20], input[5, 0] = torch.nan, torch.inf, -torch.inf
    input[-1] = 0
    scale[4], scale[6] = torch.inf, torch.nan
    scale[2] = 0
    return sample


# ----------------------------------------------------------------------------------------- bounds


def numbers(sample: Sample) -> tuple[Tensor, Tensor]:
    """Return the dequantized weight, and the magnitudes in its computation."""
    _, weight, scale, *others = sample.inputs
    if not sample.keywords:
        value = weight.double() * scale.detach()[:, None]
        return value, value.abs()
    factors, size = (scale.detach(), others[0].detach()), sample.keywords["group_size"]
    magnitude = reference.numbers_of_int4(weight, factors[0].abs(), -factors[1].abs(), size)
    return reference.numbers_of_int4(weight, *factors, size), magnitude


def error_of_rounded(left: Tensor, right: Tensor, equation: str, dtype: torch.dtype) -> Tensor:
    """Bound the error of a sum of products with a right matrix that is rounded to a dtype.

    Errors are independent, each at most a rounding of its term: their sum exceeds 8 times the root
    of the sum of their squares with a probability below 3e-14 (Hoeffding 1963, theorem 2).
    """
    all_terms = torch.einsum(equation, left.abs(), right.abs())
    squares = torch.einsum(equation, left.square(), right.square())
    return roundoff(dtype) * torch.minimum(all_terms, 8 * squares.sqrt())


def output_budget(sample: Sample, dtype: torch.dtype) -> Tensors:
    input = sample.inputs[0]
    value, (weight, magnitude) = sample.call(reference_of(sample))[0], numbers(sample)
    bias = sample.inputs[4 if sample.keywords else 3 :]
    total = reference.linear(input.abs(), magnitude, *(it.abs() for it in bias))
    # Three more terms for a weight, or for the scale of a sum.
    error = bound(value, total, input.shape[-1] + 3, dtype)
    if dtype == torch.bfloat16 and sample.keywords:
        error = error + error_of_rounded(input, weight, "...k,nk->...n", dtype)
    return (error,)


def gradient_budget(sample: Sample, dtypes: Dtypes, cotangents: Tensors) -> Tensors:
    """Bound the errors of the gradients of tensors that require one."""
    input, integers, scale, *others = (
        it.detach() if isinstance(it, Tensor) else it for it in sample.inputs
    )
    (grad,), (dtype, *_) = cotangents, dtypes
    assert dtype is not None
    weight, magnitude = numbers(sample)
    rows, depth = grad.shape[:-1].numel(), input.shape[-1]
    of_input = torch.einsum("...n,nk->...k", grad.abs(), magnitude)
    error = bound(torch.einsum("...n,nk->...k", grad, weight), of_input, len(weight) + 3, dtype)
    budgets = [error + error_of_rounded(grad, weight, "...n,nk->...k", dtype)]
    of_weight = torch.einsum("...n,...k->nk", grad, input)
    magnitudes = torch.einsum("...n,...k->nk", grad.abs(), input.abs())
    terms = rows + depth + 3
    if sample.keywords:
        size = sample.keywords["group_size"]
        one, (zero, *others) = torch.ones_like(scale), others
        steps = reference.numbers_of_int4(integers, one, zero, size)
        most = reference.numbers_of_int4(integers, one, -zero.abs(), size)
        groups = (scale.shape[1], size)
        for factor, largest, by in ((steps, most, one), (one.new_ones(1), one.new_ones(1), scale)):
            value = (of_weight * factor).unflatten(1, groups).sum(-1) * by
            total = (magnitudes * largest).unflatten(1, groups).sum(-1) * by.abs()
            budgets.append(bound(value, total, terms, dtype))
    else:
        value = (of_weight * integers).sum(-1)
        budgets.append(bound(value, (magnitudes * integers.double().abs()).sum(-1), terms, dtype))
    if others:
        value, total = (torch.einsum("...n->n", it) for it in (grad, grad.abs()))
        budgets.append(bound(value, total, rows, dtype))
    tensors = [it for it in sample.inputs if it.is_floating_point()]
    return tuple(it for tensor, it in zip(tensors, budgets, strict=True) if tensor.requires_grad)


def reference_of(sample: Sample) -> Callable[..., Tensor]:
    return reference.linear_int4 if sample.keywords else reference.linear_int8


# ------------------------------------------------------------------------------------------ specs


LINEAR_INT8 = OpSpec(
    operator=torch.ops.foo.linear_int8.default,
    reference=reference.linear_int8,
    dtypes=DTYPES,
    sized=lambda dtype, size: int8_sample("sized", (2, size), size + 3, size + 1)(dtype),
    samples={
        "vector": int8_sample("vector", (), 19, 33),
        "no bias": int8_sample("no bias", (3, 4), 35, 18, has_bias=False),
        "no depth": int8_sample("no depth", (3,), 0, 5),
        "no columns": int8_sample("no columns", (3,), 5, 0),
        "one row": int8_sample("one row", (1,), 1029, 131),
        "few rows": int8_sample("few rows", (5,), 515, 70),
        "several sections": int8_sample("several sections", (61,), 1101, 75),
        "special values": partial(special, int8_sample("special", (9,), 21, 20)),
        "special values of few rows": partial(special, int8_sample("few", (7,), 21, 20)),
    },
    essential=("size1", "size7", "no bias"),
    in_layouts=("size7", "no bias", "few rows"),
    large=int8_sample("large", (301,), 600, 333),
    output_budget=output_budget,
    gradient_budget=gradient_budget,
)

LINEAR_INT4 = OpSpec(
    operator=torch.ops.foo.linear_int4.default,
    reference=reference.linear_int4,
    dtypes=DTYPES,
    sized=lambda dtype, size: int4_sample("sized", (2, size), 1 + size // 6, size + 1)(dtype),
    samples={
        "vector": int4_sample("vector", (), 1, 33),
        "no bias": int4_sample("no bias", (3, 4), 1, 9, has_bias=False),
        "no depth": int4_sample("no depth", (3,), 0, 5),
        "no columns": int4_sample("no columns", (3,), 2, 0),
        "one row": int4_sample("one row", (1,), 33, 131),
        "one row, groups of 64": int4_sample("64", (1,), 9, 41, group_size=64),
        "few rows, groups of 128": int4_sample("128", (5,), 5, 70, group_size=128),
        "several sections": int4_sample("several sections", (61,), 9, 75, group_size=128),
        "special values": partial(special, int4_sample("special", (9,), 2, 20)),
        "special values of few rows": partial(special, int4_sample("few", (7,), 2, 20)),
    },
    essential=("size1", "size7", "no bias"),
    in_layouts=("size7", "no bias", "few rows, groups of 128"),
    large=int4_sample("large", (301,), 10, 333, group_size=64),
    output_budget=output_budget,
    gradient_budget=gradient_budget,
)
