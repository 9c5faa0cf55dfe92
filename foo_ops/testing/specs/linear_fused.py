"""foo::linear_activation and foo::linear_silu_mul in the table of operators.

The slope of an activation is at most 1.13, which bounds how an error of the sum carries over. In
forward passes that record gradients, results are rounded once more, between the steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foo_ops.testing import reference
from foo_ops.testing.rounding import compute_type, roundings, roundoff, smallest
from foo_ops.testing.spec import Dtypes, Maker, OpSpec, Sample, Tensors, random
from foo_ops.testing.specs.linear import bound, linear_sample

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SLOPE = 1.13
# Error of a function, in roundings of the compute type.
FUNCTION_ROUNDINGS = 16
# Roundings in gradients: of the sums, of a function and its slope, of the factors.
GRADIENT_ROUNDINGS = 8


def sum_error(
    input: Tensor, weight: Tensor, dtype: torch.dtype, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return a sum of products, and the error that it has in the compute type."""
    value = reference.linear(input, weight, bias)
    magnitude = reference.linear(input.abs(), weight.abs(), None if bias is None else bias.abs())
    return value, bound(value, magnitude, input.shape[-1], compute_type(dtype))


def gradient_errors(
    input: Tensor, weight: Tensor, gradient: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Bound the errors of the gradients of a product's factors.

    Args:
        gradient: bounds the magnitude of the product's own gradient, and of the terms of its
            slopes.
    """
    terms = max(weight.shape[0], gradient.shape[:-1].numel()) + input.shape[-1]
    compute = compute_type(dtype)
    relative = GRADIENT_ROUNDINGS * roundoff(dtype) + roundings(terms) * roundoff(compute)
    of_input = torch.einsum("...n,nk->...k", gradient, weight.abs())
    of_weight = torch.einsum("...n,...k->nk", gradient, input.abs())
    return relative * of_input + smallest(dtype), relative * of_weight + smallest(dtype)


def finished(value: Tensor, error: Tensor, dtype: torch.dtype) -> Tensor:
    of_functions = roundings(FUNCTION_ROUNDINGS) * roundoff(compute_type(dtype))
    return error + (of_functions + roundoff(dtype)) * value.abs() + smallest(dtype)


# ------------------------------------------------------------------------------------- activations


def activation_sample(name: str, activation: str, rows: int, depth: int, columns: int) -> Maker:
    make = linear_sample(name, (rows,), depth, columns)
    return lambda dtype: Sample(make(dtype).inputs, {"activation": activation})


def activation_budget(sample: Sample, dtype: torch.dtype) -> Tensors:
    """Bound the error; gelu's sum of 1 and a negative number has the absolute error of 1."""
    input, weight, bias = sample.inputs
    value, error = sum_error(input, weight, dtype, bias)
    of_function = roundings(FUNCTION_ROUNDINGS) * roundoff(compute_type(dtype)) * value.abs()
    result = reference.linear_activation(*sample.inputs, **sample.keywords)
    return (finished(result, SLOPE * error + of_function, dtype),)


def activation_gradient_budget(sample: Sample, dtypes: Dtypes, cotangents: Tensors) -> Tensors:
    input, weight, bias = sample.inputs
    (dtype, *_), (grad,) = dtypes, cotangents
    assert dtype is not None
    gradient = grad.abs() * (1 + reference.linear(input, weight, bias).abs())
    of_input, of_weight = gradient_errors(input, weight, gradient, dtype)
    _, of_bias = gradient_errors(input.new_ones(*input.shape[:-1], 1), weight, gradient, dtype)
    return of_input, of_weight, of_bias[:, 0]


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


# ------------------------------------------------------------------------------------------- gates


def gate_sample(name: str, rows: tuple[int, ...], depth: int, columns: int) -> Maker:
    shapes = ((*rows, depth), (columns, depth), (columns, depth))
    return lambda dtype: Sample(tuple(random(name, *shapes, dtype=dtype)))


def gate_budget(sample: Sample, dtype: torch.dtype) -> Tensors:
    input, gate_weight, up_weight = sample.inputs
    (gate, gate_error), (up, up_error) = (
        sum_error(input, weight, dtype) for weight in (gate_weight, up_weight)
    )
    silu = gate * torch.sigmoid(gate)
    error = SLOPE * gate_error * (up.abs() + up_error) + silu.abs() * up_error
    return (finished(silu * up, error, dtype),)


def gate_gradient_budget(sample: Sample, dtypes: Dtypes, cotangents: Tensors) -> Tensors:
    input, gate_weight, up_weight = sample.inputs
    (dtype, *_), (grad,) = dtypes, cotangents
    assert dtype is not None
    gate, up = reference.linear(input, gate_weight), reference.linear(input, up_weight)
    of_gate, of_up = grad.abs() * (1 + gate.abs()) * up.abs(), grad.abs() * (1 + gate.abs())
    input_by_gate, gate_error = gradient_errors(input, gate_weight, of_gate, dtype)
    input_by_up, up_error = gradient_errors(input, up_weight, of_up, dtype)
    return input_by_gate + input_by_up, gate_error, up_error


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
