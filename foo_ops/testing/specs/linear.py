"""foo::linear in the table of operators, with an activation, and with quantised weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from foo_ops.testing import reference
from foo_ops.testing.spec import Dtypes, Maker, OpSpec, Sample, Tensors, random
from foo_ops.testing.tolerance import (
    Approximate,
    bound,
    compute_type,
    product,
    roundoff,
    slopes,
    smooth,
)

# -------------------------------------------------------------------------------------- foo::linear

# The error of an element is bounded by the roundings of its sum, in the compute type, times the
# summed magnitudes, plus the rounding to its own dtype. Processors flush subnormal numbers to zero
# in products of bfloat16, and in their sums.


def linear_sample(
    name: str, rows: tuple[int, ...], depth: int, columns: int, *, has_bias: bool = True
) -> Maker:
    def make(dtype: torch.dtype) -> Sample:
        shapes = ((*rows, depth), (columns, depth), (columns,))
        input, weight, bias = random(name, *shapes, dtype=dtype)
        return Sample((input, weight, bias) if has_bias else (input, weight))

    return make


def special_linear(dtype: torch.dtype) -> Sample:
    """Make infinities and NaN, which must stay in their rows and columns, and zeros."""
    input, weight, bias = random("special", (9, 21), (20, 21), (20,), dtype=dtype)
    input[0, 3], input[2, 20], input[5, 0] = torch.nan, torch.inf, -torch.inf
    weight[4, 7], weight[19, 20], bias[11] = torch.inf, torch.nan, -torch.inf
    input[8] = 0
    weight[2] = 0
    return Sample((input, weight, bias))


def linear_budget(sample: Sample, dtype: torch.dtype) -> Tensors:
    value, magnitude = (reference.linear(*it.inputs) for it in (sample, sample.map(torch.abs)))
    return (bound(value, magnitude, sample.inputs[0].shape[-1], dtype),)


def linear_gradient_budget(sample: Sample, dtypes: Dtypes, cotangents: Tensors) -> Tensors:
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
        "special values": special_linear,
    },
    essential=("size1", "size7", "no bias"),
    in_layouts=("size7", "no bias", "few rows"),
    large=linear_sample("large", (301,), 600, 333),
    output_budget=linear_budget,
    gradient_budget=linear_gradient_budget,
)


# ----------------------------------------------------- foo::linear_activation, foo::linear_silu_mul

# In forward passes that record gradients, results are rounded once more, between the steps.


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def multiplied(
    input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Approximate:
    rows, matrix = Approximate.exact(input), Approximate.exact(weight)
    sums = product("...k,nk->...n", rows, matrix, input.shape[-1] + 1, dtype)
    return sums if bias is None else (sums + Approximate.exact(bias)).rounded(dtype)


def gradients_of_product(
    grad: Approximate, input: Tensor, weight: Tensor, dtype: torch.dtype
) -> tuple[Approximate, Approximate]:
    """Return the gradients of a product's rows and of its matrix, given that of its sums."""
    rows = input.shape[:-1].numel()
    of_input = product("...n,nk->...k", grad, Approximate.exact(weight), weight.shape[0], dtype)
    return of_input, product("...n,...k->nk", grad, Approximate.exact(input), rows, dtype)


def activated(activation: str, sums: Approximate, dtype: torch.dtype) -> Approximate:
    """Activate sums; gelu's sum of 1 and a negative number has the absolute error of 1."""
    result = smooth(partial(reference.activation_of, activation=activation), sums)
    of_function = Approximate.exact(sums.value).rounded(compute_type(dtype)).error
    return Approximate(result.value, result.error + of_function)


def slope_of(activation: str, sums: Approximate, dtype: torch.dtype) -> Approximate:
    """Return an activation's slope, which sums numbers of at most about 1."""
    function = partial(reference.activation_of, activation=activation)
    result = smooth(partial(slopes, function), sums)
    one = Approximate.exact(torch.ones_like(sums.value))
    return Approximate(result.value, result.error + one.rounded(compute_type(dtype)).error)


# --------------------------------------------------------------------------- foo::linear_activation


def activation_sample(name: str, activation: str, rows: int, depth: int, columns: int) -> Maker:
    make = linear_sample(name, (rows,), depth, columns)
    return lambda dtype: Sample(make(dtype).inputs, {"activation": activation})


def activation_budget(sample: Sample, dtype: torch.dtype) -> Tensors:
    input, weight, bias = sample.inputs
    sums = multiplied(input, weight, bias, compute_type(dtype))
    return (activated(sample.keywords["activation"], sums, dtype).rounded(dtype).error,)


def activation_gradient_budget(sample: Sample, dtypes: Dtypes, cotangents: Tensors) -> Tensors:
    input, weight, bias = (it.detach() for it in sample.inputs)
    (dtype, *_), (grad,) = dtypes, cotangents
    assert dtype is not None
    slope = slope_of(sample.keywords["activation"], multiplied(input, weight, bias, dtype), dtype)
    of_sums = (Approximate.exact(grad) * slope).rounded(dtype)
    one = torch.ones(*input.shape[:-1], 1, dtype=input.dtype)
    _, of_bias = gradients_of_product(of_sums, one, weight, dtype)
    gradients = gradients_of_product(of_sums, input, weight, dtype)
    return *(it.error for it in gradients), of_bias.error[:, 0]


LINEAR_ACTIVATION = OpSpec(
    operator=torch.ops.foo.linear_activation.default,
    reference=reference.linear_activation,
    dtypes=DTYPES,
    sized=lambda dtype, size: activation_sample("sized", "silu", size, size + 3, size + 1)(dtype),
    samples={
        "relu": activation_sample("relu", "relu", 11, 35, 18),
        "gelu": activation_sample("gelu", "gelu", 9, 19, 33),
        "gelu_tanh": activation_sample("gelu_tanh", "gelu_tanh", 70, 300, 65),
        "one row": activation_sample("one row", "gelu", 1, 515, 131),
    },
    essential=("size1", "gelu"),
    in_layouts=("size7", "gelu"),
    large=activation_sample("large", "gelu", 301, 600, 333),
    output_budget=activation_budget,
    gradient_budget=activation_gradient_budget,
)


# ----------------------------------------------------------------------------- foo::linear_silu_mul


def gate_sample(name: str, rows: tuple[int, ...], depth: int, columns: int) -> Maker:
    shapes = ((*rows, depth), (columns, depth), (columns, depth))
    return lambda dtype: Sample(tuple(random(name, *shapes, dtype=dtype)))


def gate_budget(sample: Sample, dtype: torch.dtype) -> Tensors:
    input, *weights = sample.inputs
    gate, up = (multiplied(input, it, None, compute_type(dtype)) for it in weights)
    return ((activated("silu", gate, dtype) * up).rounded(dtype).error,)


def gradients_of_gate(
    grad: Approximate, gate: Approximate, up: Approximate, dtype: torch.dtype
) -> tuple[Approximate, Approximate]:
    """Return the gradients of both products, given that of the gate's result."""
    of_gate = (grad * up * slope_of("silu", gate, dtype)).rounded(dtype)
    return of_gate, (grad * activated("silu", gate, dtype)).rounded(dtype)


def gate_gradient_budget(sample: Sample, dtypes: Dtypes, cotangents: Tensors) -> Tensors:
    input, gate_weight, up_weight = (it.detach() for it in sample.inputs)
    dtype, grad = dtypes[0], Approximate.exact(cotangents[0])
    assert dtype is not None
    gate, up = (multiplied(input, it, None, dtype) for it in (gate_weight, up_weight))
    of_gate, of_up = gradients_of_gate(grad, gate, up, dtype)
    input_by_gate, of_gate_weight = gradients_of_product(of_gate, input, gate_weight, dtype)
    input_by_up, of_up_weight = gradients_of_product(of_up, input, up_weight, dtype)
    of_input = (input_by_gate + input_by_up).rounded(dtype)
    return of_input.error, of_gate_weight.error, of_up_weight.error


LINEAR_SILU_MUL = OpSpec(
    operator=torch.ops.foo.linear_silu_mul.default,
    reference=reference.linear_silu_mul,
    dtypes=DTYPES,
    sized=lambda dtype, size: gate_sample("sized", (2, size), size + 3, size + 1)(dtype),
    samples={
        "vector": gate_sample("vector", (), 19, 33),
        "no depth": gate_sample("no depth", (3,), 0, 5),
        "one row": gate_sample("one row", (1,), 1029, 131),
        "few columns": gate_sample("few columns", (61,), 300, 5),
        "several sections": gate_sample("several sections", (61,), 1101, 75),
    },
    essential=("size1", "size7"),
    in_layouts=("size7", "few columns"),
    large=gate_sample("large", (301,), 600, 333),
    output_budget=gate_budget,
    gradient_budget=gate_gradient_budget,
)


# ------------------------------------------- linear layers with weights of 8 and 4 bits, samples

# The error of an element is bounded as for foo::linear, with the magnitudes of the dequantized
# weights. Weights that are rounded to the input's dtype have errors of their own, independent of
# each other.


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


def int8_groups_sample(
    name: str,
    rows: tuple[int, ...],
    groups: int,
    columns: int,
    *,
    group_size: int = 32,
    has_bias: bool = True,
) -> Maker:
    def make(dtype: torch.dtype) -> Sample:
        shapes = (*rows, groups * group_size), (columns, groups), (columns,)
        input, scale, bias = random(name, *shapes, dtype=dtype)
        weight = integers(name, (columns, groups * group_size), torch.int8)
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


def fp8_sample(
    name: str,
    rows: tuple[int, ...],
    depth: int,
    columns: int,
    *,
    group_size: int | None = None,
    has_bias: bool = True,
) -> Maker:
    def make(dtype: torch.dtype) -> Sample:
        input, bias = random(name, (*rows, depth), (columns,), dtype=dtype)
        groups = () if group_size is None else (depth // group_size,)
        of_scale = torch.float64 if dtype == torch.float64 else torch.float32
        (scale,) = random(name, (columns, *groups), dtype=of_scale)
        weight = integers(name, (columns, depth), torch.uint8)
        # No NaN.
        weight = torch.where(weight % 128 == 127, weight - 1, weight)
        inputs = (input, weight, scale / 512)
        return Sample((*inputs, bias) if has_bias else inputs)

    return make


def special_fp8(make: Maker, dtype: torch.dtype) -> Sample:
    """Make infinities and NaN, also of weights."""
    sample = special_quantized(make, dtype)
    _, weight, *_ = sample.inputs
    weight[8, 1], weight[9, 4] = 0x7F, 0xFF
    return sample


def mxfp4_sample(
    name: str, rows: tuple[int, ...], groups: int, columns: int, *, has_bias: bool = True
) -> Maker:
    def make(dtype: torch.dtype) -> Sample:
        input, bias = random(name, (*rows, 32 * groups), (columns,), dtype=dtype)
        weight = integers(name, (columns, 16 * groups), torch.uint8)
        scale = 119 + integers(name, (columns, groups), torch.uint8) % 8
        inputs = (input, weight, scale)
        return Sample((*inputs, bias) if has_bias else inputs)

    return make


def special_mxfp4(make: Maker, dtype: torch.dtype) -> Sample:
    """Make infinities and NaN, of the input and of a scale, and zeros."""
    sample = make(dtype)
    input, _, scale, *_ = sample.inputs
    input[0, 3], input[2, 20], input[5, 0] = torch.nan, torch.inf, -torch.inf
    input[-1] = 0
    scale[4, 0] = 255
    return sample


def table4_sample(
    name: str,
    rows: tuple[int, ...],
    groups: int,
    columns: int,
    *,
    group_size: int = 64,
    has_bias: bool = True,
) -> Maker:
    def make(dtype: torch.dtype) -> Sample:
        input, bias = random(name, (*rows, groups * group_size), (columns,), dtype=dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        scale, table = random(name, (columns, groups), (16,), dtype=wide)
        weight = integers(name, (columns, groups * group_size // 2), torch.uint8)
        inputs = (input, weight, scale / 8, table)
        return Sample((*inputs, bias) if has_bias else inputs)

    return make


def special_quantized(make: Maker, dtype: torch.dtype) -> Sample:
    """Make infinities and NaN, which must stay in their rows and columns, and zeros."""
    sample = make(dtype)
    input, _, scale, *_ = sample.inputs
    input[0, 3], input[2, 20], input[5, 0] = torch.nan, torch.inf, -torch.inf
    input[-1] = 0
    scale[4], scale[6] = torch.inf, torch.nan
    scale[2] = 0
    return sample


def rounded(make: Maker) -> Maker:
    """Make a call that rounds rows to 8 bits."""

    def make_rounded(dtype: torch.dtype) -> Sample:
        sample = make(dtype)
        return Sample(sample.inputs, {**sample.keywords, "activations": 8})

    return make_rounded


def rounded_by_section(make: Maker) -> Maker:
    """Make a call that rounds rows and weights to 8 bits, by sections of the depth."""

    def make_rounded(dtype: torch.dtype) -> Sample:
        sample = rounded(make)(dtype)
        return Sample(sample.inputs, {**sample.keywords, "by_section": True})

    return make_rounded


def special_rounded(make: Maker) -> Maker:
    """Make infinities and NaN, zeros, and rows and groups of tiny and of huge numbers."""

    def make_special(dtype: torch.dtype) -> Sample:
        sample = make(dtype)
        input, _, scale, *_ = sample.inputs
        input[0, 3], input[2, 20], input[5, 0] = torch.nan, torch.inf, -torch.inf
        input[-1] = 0
        input[1] *= 2.0**-110
        input[3, :5] *= 2.0**12
        scale[6] = torch.nan
        scale[2] = 0
        return sample

    return rounded(make_special)


# ------------------------------------------------------------------------ quantised weights, errors


def numbers(sample: Sample) -> tuple[Tensor, Tensor]:
    """Return the dequantized weight, and the magnitudes in its computation."""
    _, weight, scale, *others = sample.inputs
    if scale.dtype == torch.uint8:
        value = reference.numbers_of_mxfp4(weight, scale)
        return value, value.abs()
    if "group_size" not in sample.keywords:
        weight = numbers_of_bytes(weight)
        factors = scale.detach()
        value = reference.numbers_of_int8(weight, factors[:, None] if scale.dim() == 1 else factors)
        return value, value.abs()
    factors, size = (scale.detach(), others[0].detach()), sample.keywords["group_size"]
    magnitude = reference.numbers_of_int4(weight, factors[0].abs(), -factors[1].abs(), size)
    return reference.numbers_of_int4(weight, *factors, size), magnitude


def numbers_of_bytes(weight: Tensor) -> Tensor:
    return reference.numbers_of_fp8(weight) if weight.dtype == torch.uint8 else weight.double()


def error_of_rounded(left: Tensor, right: Tensor, equation: str, dtype: torch.dtype) -> Tensor:
    """Bound the error of a sum of products with a right matrix that is rounded to a dtype.

    Errors are independent, each at most a rounding of its term: their sum exceeds 8 times the root
    of the sum of their squares with a probability below 3e-14 (Hoeffding 1963, theorem 2).
    Subnormal numbers are rounded as the smallest normal one is.
    """
    right = right.abs().clamp(min=torch.finfo(dtype).smallest_normal)
    all_terms = torch.einsum(equation, left.abs(), right)
    squares = torch.einsum(equation, left.square(), right.square())
    return roundoff(dtype) * torch.minimum(all_terms, 8 * squares.sqrt())


def with_rounded_rows(sample: Sample) -> Sample:
    """Return a call that computes the same with rows as they are: the rows after their rounding."""
    options = dict(sample.keywords)
    if options.pop("activations", None) is None:
        return sample
    input, weight, scale, *others = sample.inputs
    # Weights that are rounded once more are as large as those that are not.
    rows = reference.input_of_8_bits(input.detach(), scale, options.pop("by_section", False))
    rows.requires_grad_(input.requires_grad)
    return Sample((rows, weight, scale, *others), options)


def quantized_budget(sample: Sample, dtype: torch.dtype) -> Tensors:
    sample = with_rounded_rows(sample)
    input = sample.inputs[0]
    value, (weight, magnitude) = sample.call(reference_of(sample))[0], numbers(sample)
    bias = sample.inputs[4 if "group_size" in sample.keywords else 3 :]
    has_groups = sample.inputs[2].dim() == 2
    return budget_of_product(value, input, weight, magnitude, bias, dtype, has_groups)


def table4_budget(sample: Sample, dtype: torch.dtype) -> Tensors:
    input, integers, scale, table, *bias = sample.inputs
    (value,) = sample.call(reference.linear_table4)
    weight = reference.numbers_of_table4(integers, scale.detach(), table.detach())
    return budget_of_product(value, input, weight, weight.abs(), bias, dtype, has_groups=True)


def budget_of_product(
    value: Tensor,
    input: Tensor,
    weight: Tensor,
    magnitude: Tensor,
    bias: Sequence[Tensor],
    dtype: torch.dtype,
    has_groups: bool,
) -> Tensors:
    total = reference.linear(input.abs(), magnitude, *(it.abs() for it in bias))
    # Three more terms for a weight, or for the scale of a sum.
    error = bound(value, total, input.shape[-1] + 3, dtype)
    if dtype == torch.bfloat16 and has_groups:
        error = error + error_of_rounded(input, weight, "...k,nk->...n", dtype)
    return (error,)


def quantized_gradient_budget(sample: Sample, dtypes: Dtypes, cotangents: Tensors) -> Tensors:
    """Bound the errors of the gradients of tensors that require one."""
    sample = with_rounded_rows(sample)
    input, integers, scale, *others = (
        it.detach() if isinstance(it, Tensor) else it for it in sample.inputs
    )
    (grad,), (dtype, *_) = cotangents, dtypes
    assert dtype is not None
    weight, magnitude = numbers(sample)
    rows, depth = grad.shape[:-1].numel(), input.shape[-1]
    budgets = [budget_of_input(grad, weight, magnitude, dtype)]
    of_weight, magnitudes = terms_of_weight(grad, input)
    terms = rows + depth + 3
    if scale.dtype == torch.uint8:
        pass  # exponents have no gradients
    elif "group_size" in sample.keywords:
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
        of_row = scale.shape[1] if scale.dim() == 2 else 1
        groups, numbers_ = (of_row, depth // max(of_row, 1)), numbers_of_bytes(integers)
        value, total = (
            (it * numbers_.abs()).unflatten(1, groups).sum(-1).reshape(scale.shape)
            for it in (of_weight * numbers_.sign(), magnitudes)
        )
        budgets.append(bound(value, total, terms, dtype))
    if others:
        value, total = (torch.einsum("...n->n", it) for it in (grad, grad.abs()))
        budgets.append(bound(value, total, rows, dtype))
    tensors = [it for it in sample.inputs if it.is_floating_point()]
    return tuple(it for tensor, it in zip(tensors, budgets, strict=True) if tensor.requires_grad)


def budget_of_input(grad: Tensor, weight: Tensor, magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    of_input = torch.einsum("...n,nk->...k", grad.abs(), magnitude)
    error = bound(torch.einsum("...n,nk->...k", grad, weight), of_input, len(weight) + 3, dtype)
    return error + error_of_rounded(grad, weight, "...n,nk->...k", dtype)


def terms_of_weight(grad: Tensor, input: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of a weight, and the sum of its terms' magnitudes."""
    of_weight = torch.einsum("...n,...k->nk", grad, input)
    return of_weight, torch.einsum("...n,...k->nk", grad.abs(), input.abs())


def table4_gradient_budget(sample: Sample, dtypes: Dtypes, cotangents: Tensors) -> Tensors:
    """Bound the errors of the gradients of tensors that require one."""
    input, codes, scale, table, *bias = (it.detach() for it in sample.inputs)
    (grad,), (dtype, *_) = cotangents, dtypes
    assert dtype is not None
    weight = reference.numbers_of_table4(codes, scale, table)
    rows, depth = grad.shape[:-1].numel(), input.shape[-1]
    budgets = [budget_of_input(grad, weight, weight.abs(), dtype)]
    of_weight, magnitudes = terms_of_weight(grad, input)
    numbers_ = reference.numbers_of_table4(codes, torch.ones_like(scale), table)
    groups, size = scale.shape[1], depth // max(scale.shape[1], 1)
    value, total = (
        (it * by).unflatten(1, (groups, size)).sum(-1)
        for it, by in ((of_weight, numbers_), (magnitudes, numbers_.abs()))
    )
    budgets.append(bound(value, total, rows + depth + 3, dtype))
    scales = scale.repeat_interleave(size, 1)
    places = reference.numbers_of_table4(
        codes, torch.ones_like(scale), torch.arange(16, dtype=scale.dtype, device=scale.device)
    )
    value, total = (
        torch.stack([(it * by)[places == code].sum() for code in range(16)])
        for it, by in ((of_weight, scales), (magnitudes, scales.abs()))
    )
    budgets.append(bound(value, total, rows + places.numel() + 3, dtype))
    if bias:
        value, total = (torch.einsum("...n->n", it) for it in (grad, grad.abs()))
        budgets.append(bound(value, total, rows, dtype))
    tensors = [it for it in sample.inputs if it.is_floating_point()]
    return tuple(it for tensor, it in zip(tensors, budgets, strict=True) if tensor.requires_grad)


def reference_of(sample: Sample) -> Callable[..., Tensor]:
    _, weight, scale, *_ = sample.inputs
    if scale.dtype == torch.uint8:
        return reference.linear_mxfp4
    if "group_size" in sample.keywords:
        return reference.linear_int4
    return reference.linear_fp8 if weight.dtype == torch.uint8 else reference.linear_int8


# ------------------------------------------------------------------------- quantised weights, specs


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
        "special values": partial(special_quantized, int8_sample("special", (9,), 21, 20)),
        "special values of few rows": partial(special_quantized, int8_sample("few", (7,), 21, 20)),
        "groups": int8_groups_sample("groups", (2, 7), 3, 18),
        "groups, no bias": int8_groups_sample("no bias", (3, 4), 1, 9, has_bias=False),
        "groups, no depth": int8_groups_sample("no depth", (3,), 0, 5),
        "groups, one row": int8_groups_sample("one row", (1,), 33, 131),
        "groups of 64, few rows": int8_groups_sample("64", (5,), 9, 70, group_size=64),
        "groups of 128, sections": int8_groups_sample("128", (61,), 9, 75, group_size=128),
        "special values of groups": partial(
            special_quantized, int8_groups_sample("special", (9,), 2, 20)
        ),
        "special values of groups of few rows": partial(
            special_quantized, int8_groups_sample("few", (7,), 2, 20)
        ),
    },
    essential=("size1", "size7", "no bias", "groups"),
    in_layouts=("size7", "no bias", "few rows", "groups"),
    large=int8_sample("large", (301,), 600, 333),
    output_budget=quantized_budget,
    gradient_budget=quantized_gradient_budget,
)

# Rows of float64 are not rounded to 8 bits.
ROUNDED_DTYPES = tuple(it for it in DTYPES if it != torch.float64)

LINEAR_INT8_ACTIVATIONS = OpSpec(
    operator=torch.ops.foo.linear_int8.default,
    reference=reference.linear_int8,
    dtypes=ROUNDED_DTYPES,
    sized=lambda dtype, size: rounded(int8_sample("sized", (2, size), size + 3, size + 1))(dtype),
    samples={
        "vector": rounded(int8_sample("vector", (), 19, 33)),
        "no bias": rounded(int8_sample("no bias", (3, 4), 35, 18, has_bias=False)),
        "no depth": rounded(int8_sample("no depth", (3,), 0, 5)),
        "no depth of many rows": rounded(int8_sample("no depth", (13,), 0, 5)),
        "no columns": rounded(int8_sample("no columns", (3,), 5, 0)),
        "one row": rounded(int8_sample("one row", (1,), 1029, 131)),
        "few rows": rounded(int8_sample("few rows", (5,), 515, 70)),
        "several sections": rounded(int8_sample("several sections", (61,), 1101, 75)),
        "special values": special_rounded(int8_sample("special", (9,), 21, 20)),
        "special values of few rows": special_rounded(int8_sample("few", (7,), 21, 20)),
        "groups": rounded(int8_groups_sample("groups", (2, 7), 3, 18)),
        "groups, no bias": rounded(int8_groups_sample("no", (3, 4), 1, 9, has_bias=False)),
        "groups, one row": rounded(int8_groups_sample("one row", (1,), 33, 131)),
        "groups of 64, one row": rounded(int8_groups_sample("64", (1,), 9, 70, group_size=64)),
        "groups of 128, few rows": rounded(int8_groups_sample("few", (5,), 9, 70, group_size=128)),
        "groups of 128, sections": rounded(int8_groups_sample("128", (61,), 9, 75, group_size=128)),
        "special values of groups": special_rounded(int8_groups_sample("special", (9,), 2, 20)),
        "special values of groups of few rows": special_rounded(
            int8_groups_sample("few", (7,), 2, 20)
        ),
        "by section": rounded_by_section(int8_groups_sample("section", (2, 7), 19, 18)),
        "by section, one row": rounded_by_section(
            int8_groups_sample("one row", (1,), 9, 131, group_size=64, has_bias=False)
        ),
        "by section, no depth": rounded_by_section(int8_groups_sample("no depth", (3,), 0, 5)),
        "by section, special values": rounded_by_section(
            special_rounded(int8_groups_sample("special", (9,), 17, 20))
        ),
    },
    essential=("size1", "size7", "no bias", "groups"),
    in_layouts=("size7", "no bias", "few rows", "groups"),
    large=rounded(int8_sample("large", (301,), 600, 333)),
    output_budget=quantized_budget,
    gradient_budget=quantized_gradient_budget,
)

LINEAR_INT4_ACTIVATIONS = OpSpec(
    operator=torch.ops.foo.linear_int4.default,
    reference=reference.linear_int4,
    dtypes=ROUNDED_DTYPES,
    sized=lambda dtype, size: rounded(int4_sample("sized", (2, size), 1 + size // 6, size + 1))(
        dtype
    ),
    samples={
        "vector": rounded(int4_sample("vector", (), 1, 33)),
        "no bias": rounded(int4_sample("no bias", (3, 4), 1, 9, has_bias=False)),
        "no depth": rounded(int4_sample("no depth", (3,), 0, 5)),
        "no columns": rounded(int4_sample("no columns", (3,), 2, 0)),
        "one row": rounded(int4_sample("one row", (1,), 33, 131)),
        "one row, groups of 64": rounded(int4_sample("64", (1,), 9, 41, group_size=64)),
        "few rows, groups of 128": rounded(int4_sample("128", (5,), 5, 70, group_size=128)),
        "several sections": rounded(int4_sample("several", (61,), 9, 75, group_size=128)),
        "many rows, groups of 64": rounded(int4_sample("many", (41,), 9, 75, group_size=64)),
        "special values": special_rounded(int4_sample("special", (9,), 2, 20)),
        "special values of few rows": special_rounded(int4_sample("few", (7,), 2, 20)),
        "by section": rounded_by_section(int4_sample("section", (2, 7), 19, 18)),
        "by section, one row": rounded_by_section(
            int4_sample("one row", (1,), 9, 131, group_size=64, has_bias=False)
        ),
        "by section, no depth": rounded_by_section(int4_sample("no depth", (3,), 0, 5)),
        "by section, many rows": rounded_by_section(
            int4_sample("many", (61,), 9, 75, group_size=128)
        ),
        "by section, special values": rounded_by_section(
            special_rounded(int4_sample("special", (9,), 17, 20))
        ),
    },
    essential=("size1", "size7", "no bias", "by section"),
    in_layouts=("size7", "no bias", "few rows, groups of 128"),
    large=rounded(int4_sample("large", (301,), 10, 333, group_size=64)),
    output_budget=quantized_budget,
    gradient_budget=quantized_gradient_budget,
)

LINEAR_FP8 = OpSpec(
    operator=torch.ops.foo.linear_fp8.default,
    reference=reference.linear_fp8,
    dtypes=DTYPES,
    sized=lambda dtype, size: fp8_sample("sized", (2, size), size + 3, size + 1)(dtype),
    samples={
        "vector": fp8_sample("vector", (), 19, 33),
        "no bias": fp8_sample("no bias", (3, 4), 35, 18, has_bias=False),
        "no depth": fp8_sample("no depth", (3,), 0, 5),
        "no columns": fp8_sample("no columns", (3,), 5, 0),
        "few rows": fp8_sample("few rows", (5,), 515, 70),
        "several sections": fp8_sample("several sections", (61,), 1101, 75),
        "special values": partial(special_fp8, fp8_sample("special", (9,), 21, 20)),
        "groups": fp8_sample("groups", (2, 7), 96, 18, group_size=32),
        "groups, one row": fp8_sample("one row", (1,), 1056, 131, group_size=32),
        "groups of 64, few rows": fp8_sample("64", (5,), 576, 70, group_size=64),
        "groups of 128, sections": fp8_sample("128", (61,), 1152, 75, group_size=128),
        "special values of groups": partial(
            special_fp8, fp8_sample("special", (9,), 64, 20, group_size=32)
        ),
        "special values of groups of few rows": partial(
            special_fp8, fp8_sample("few", (7,), 64, 20, group_size=32)
        ),
    },
    essential=("size1", "size7", "no bias", "groups"),
    in_layouts=("size7", "no bias", "few rows", "groups"),
    large=fp8_sample("large", (301,), 640, 333, group_size=128),
    output_budget=quantized_budget,
    gradient_budget=quantized_gradient_budget,
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
        "special values": partial(special_quantized, int4_sample("special", (9,), 2, 20)),
        "special values of few rows": partial(special_quantized, int4_sample("few", (7,), 2, 20)),
    },
    essential=("size1", "size7", "no bias"),
    in_layouts=("size7", "no bias", "few rows, groups of 128"),
    large=int4_sample("large", (301,), 10, 333, group_size=64),
    output_budget=quantized_budget,
    gradient_budget=quantized_gradient_budget,
)

LINEAR_MXFP4 = OpSpec(
    operator=torch.ops.foo.linear_mxfp4.default,
    reference=reference.linear_mxfp4,
    dtypes=DTYPES,
    sized=lambda dtype, size: mxfp4_sample("sized", (2, size), 1 + size // 6, size + 1)(dtype),
    samples={
        "vector": mxfp4_sample("vector", (), 1, 33),
        "no bias": mxfp4_sample("no bias", (3, 4), 1, 9, has_bias=False),
        "no depth": mxfp4_sample("no depth", (3,), 0, 5),
        "no columns": mxfp4_sample("no columns", (3,), 2, 0),
        "one row": mxfp4_sample("one row", (1,), 33, 131),
        "few rows": mxfp4_sample("few rows", (5,), 17, 70),
        "several sections": mxfp4_sample("several sections", (61,), 35, 75),
        "special values": partial(special_mxfp4, mxfp4_sample("special", (9,), 2, 20)),
        "special values of few rows": partial(special_mxfp4, mxfp4_sample("few", (7,), 2, 20)),
    },
    essential=("size1", "size7", "no bias"),
    in_layouts=("size7", "no bias", "few rows"),
    large=mxfp4_sample("large", (301,), 20, 333),
    output_budget=quantized_budget,
    gradient_budget=quantized_gradient_budget,
)

LINEAR_TABLE4 = OpSpec(
    operator=torch.ops.foo.linear_table4.default,
    reference=reference.linear_table4,
    dtypes=DTYPES,
    sized=lambda dtype, size: table4_sample(
        "sized", (2, size), 1 + size // 6, size + 1, group_size=32
    )(dtype),
    samples={
        "vector": table4_sample("vector", (), 1, 33),
        "no bias": table4_sample("no bias", (3, 4), 1, 9, group_size=32, has_bias=False),
        "no depth": table4_sample("no depth", (3,), 0, 5),
        "no columns": table4_sample("no columns", (3,), 2, 0),
        "one row": table4_sample("one row", (1,), 33, 131, group_size=32),
        "one row, groups of 64": table4_sample("64", (1,), 9, 41),
        "few rows, groups of 128": table4_sample("128", (5,), 5, 70, group_size=128),
        "several sections": table4_sample("several sections", (61,), 17, 75),
        "special values": partial(
            special_quantized, table4_sample("special", (9,), 2, 20, group_size=32)
        ),
        "special values of few rows": partial(special_quantized, table4_sample("few", (7,), 2, 20)),
    },
    essential=("size1", "size7", "no bias"),
    in_layouts=("size7", "no bias", "few rows, groups of 128"),
    large=table4_sample("large", (301,), 10, 333),
    output_budget=table4_budget,
    gradient_budget=table4_gradient_budget,
)


# ------------------------------------------------------------------- foo::linear_silu_mul_quantized


def gate_of(make: Maker) -> Maker:
    """Make a gate from a product without bias, whose columns are those of gate and up.

    Gradients of scales, with products of three of its factors, would be too large for float16.
    """

    def make_gate(dtype: torch.dtype) -> Sample:
        sample = make(dtype)
        input, *others = sample.inputs
        options = {key: it for key, it in sample.keywords.items() if key != "group_size"}
        return Sample((input / 8, *others), options)

    return make_gate


def both_products(sample: Sample) -> Sample:
    """Return the call that computes the products of gate and up, one beside the other."""
    input, _, scale, *zero = sample.inputs
    groups = {"group_size": input.shape[-1] // max(scale.shape[-1], 1) or 32} if zero else {}
    return Sample(sample.inputs, {**sample.keywords, **groups})


def approximate_products(sample: Sample, dtype: torch.dtype) -> list[Approximate]:
    call = both_products(sample)
    value = call.call(reference_of(call))[0].detach()
    (error,) = quantized_budget(call, dtype)
    return [Approximate(*parts) for parts in zip(value.chunk(2, -1), error.chunk(2, -1))]


def quantized_gate_budget(sample: Sample, dtype: torch.dtype) -> Tensors:
    gate, up = approximate_products(sample, dtype)
    return ((activated("silu", gate, dtype) * up).rounded(dtype).error,)


def quantized_gate_gradient_budget(sample: Sample, dtypes: Dtypes, cotangents: Tensors) -> Tensors:
    dtype, grad = dtypes[0], Approximate.exact(cotangents[0])
    assert dtype is not None
    gate, up = approximate_products(sample, dtype)
    of_gate, of_up = gradients_of_gate(grad, gate, up, dtype)
    value, error = (
        torch.cat((getattr(of_gate, part), getattr(of_up, part)), -1) for part in ("value", "error")
    )
    budgets = quantized_gradient_budget(both_products(sample), dtypes, (value,))
    return tuple(map(torch.add, budgets, passed_on(both_products(sample), error)))


def passed_on(sample: Sample, error: Tensor) -> Tensors:
    """Bound what errors of a product's gradient do to the gradients of its tensors.

    These are linear in it, so the magnitudes of all factors are multiplied by the errors.
    """
    call = with_rounded_rows(sample)
    input, weight, scale, *zero = call.inputs
    given = [input.detach().abs(), scale.detach().abs(), *(-it.detach().abs() for it in zero)]
    tensors = [it.requires_grad_() for it in given]
    integers_ = weight.double().abs() if weight.dtype == torch.int8 else weight
    with torch.enable_grad():
        result = reference_of(call)(
            tensors[0], integers_, tensors[1], *tensors[2:], **call.keywords
        )
        passed = torch.autograd.grad(result, tensors, error)
    needed = (it for it in call.inputs if it.is_floating_point())
    return tuple(
        it.abs() for it, tensor in zip(passed, needed, strict=True) if tensor.requires_grad
    )


LINEAR_SILU_MUL_QUANTIZED = OpSpec(
    operator=torch.ops.foo.linear_silu_mul_quantized.default,
    reference=reference.linear_silu_mul_quantized,
    dtypes=DTYPES,
    sized=lambda dtype, size: gate_of(
        int8_sample("sized", (2, size), size + 3, 2 * size, has_bias=False)
    )(dtype),
    samples={
        "vector": gate_of(int8_sample("vector", (), 19, 34, has_bias=False)),
        "no depth": gate_of(int8_sample("no depth", (3,), 0, 6, has_bias=False)),
        "no columns": gate_of(int8_sample("no columns", (3,), 5, 0, has_bias=False)),
        "many rows": gate_of(int8_sample("many rows", (81,), 70, 26, has_bias=False)),
        "groups": gate_of(int8_groups_sample("groups", (2, 7), 3, 18, has_bias=False)),
        "4 bits": gate_of(int4_sample("4 bits", (3, 4), 2, 10, has_bias=False)),
    },
    essential=("size1", "size7", "groups", "4 bits"),
    in_layouts=("size7", "groups", "4 bits"),
    large=gate_of(int8_sample("large", (301,), 600, 332, has_bias=False)),
    output_budget=quantized_gate_budget,
    gradient_budget=quantized_gate_gradient_budget,
)

LINEAR_SILU_MUL_QUANTIZED_ACTIVATIONS = OpSpec(
    operator=torch.ops.foo.linear_silu_mul_quantized.default,
    reference=reference.linear_silu_mul_quantized,
    dtypes=ROUNDED_DTYPES,
    sized=lambda dtype, size: gate_of(
        rounded(int8_sample("sized", (2, size), size + 3, 2 * size, has_bias=False))
    )(dtype),
    samples={
        "4 bits by section": gate_of(
            rounded_by_section(int4_sample("section", (3, 4), 17, 10, has_bias=False))
        ),
        "one row": gate_of(rounded(int8_sample("one row", (1,), 70, 34, has_bias=False))),
        "no depth of many rows": gate_of(
            rounded(int8_sample("no depth", (70,), 0, 6, has_bias=False))
        ),
        "several sections": gate_of(
            rounded(int8_sample("several sections", (71,), 1101, 150, has_bias=False))
        ),
        "groups": gate_of(rounded(int8_groups_sample("groups", (2, 7), 3, 18, has_bias=False))),
        "groups of 64, many rows": gate_of(
            rounded(int8_groups_sample("64", (41,), 9, 70, group_size=64, has_bias=False))
        ),
        "4 bits": gate_of(rounded(int4_sample("4 bits", (3, 4), 2, 10, has_bias=False))),
        "4 bits, groups of 128, many rows": gate_of(
            rounded(int4_sample("128", (33,), 9, 150, group_size=128, has_bias=False))
        ),
    },
    essential=("size1", "size7", "groups", "4 bits"),
    in_layouts=("size7", "groups of 64, many rows", "4 bits, groups of 128, many rows"),
    large=gate_of(rounded(int4_sample("large", (301,), 10, 332, group_size=64, has_bias=False))),
    output_budget=quantized_gate_budget,
    gradient_budget=quantized_gate_gradient_budget,
)
