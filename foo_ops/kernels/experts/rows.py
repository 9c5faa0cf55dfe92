"""Apply gates to rows of projections, differentiate them, and add up the rows of each token."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core import types

from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.lang.reduction import reduce_add
from foo_ops.kernels.lang.scratch import Scratch, Struct, make_kernel_with_scratch
from foo_ops.kernels.math.exponential import exp, tanh, tanh_derivative
from foo_ops.kernels.math.special import erf
from foo_ops.kernels.simd.arithmetic import absolute, fma, less, maximum, select, splat
from foo_ops.kernels.simd.memory import load, load_vector, shift, store
from foo_ops.kernels.simd.transpose import make_copy_row, make_fill, round_up
from foo_ops.kernels.simd.types import ELEMENTS, Pointer, compute_dtype, lanes_of

# -------------------------------------------------------------------------- parameters of launchers

RANGE = Struct("RowRange", (("start", types.int64), ("stop", types.int64)))


def gate_argument_types(dtype: str) -> tuple[Any, ...]:
    """Types of the struct Gate of foo_ops/csrc/ops/experts/rows.h, rows, scratch memory, its size.

    Strides are in elements.
    """
    number, pointer, sums = types.int64, Pointer(dtype), Pointer(compute_dtype(dtype))
    fields = (
        *((name, number) for name in ("columns", "is_gated", "step", "up", "projected_stride")),
        *((name, types.float64) for name in ("alpha", "limit", "up_offset")),
        *(("projected", pointer), ("activated", pointer), ("grad_activated", pointer)),
        *(("weight", sums), ("grad_weight", sums), ("grad_projected", pointer)),
    )
    return (Struct("Gate", fields), RANGE, sums, Pointer("int64"))


def combine_argument_types(dtype: str) -> tuple[Any, ...]:
    """Types of the struct Combine of foo_ops/csrc/ops/experts/rows.h, and as above."""
    number, pointer, sums = types.int64, Pointer(dtype), Pointer(compute_dtype(dtype))
    fields = (
        *((name, number) for name in ("columns", "top_k", "has_weight")),
        *(("rows", pointer), ("place", Pointer("int64")), ("weight", sums), ("output", pointer)),
    )
    return (Struct("Combine", fields), RANGE, sums, Pointer("int64"))


# -------------------------------------------------------------------------------------- activations


@functools.cache
def make_activation(compute: str, name: str) -> tuple[Callable, Callable]:
    """Make ``value(x, alpha)`` and ``slope(x, alpha)`` for vectors: an activation, its derivative.

    silu is x / (1 + exp(-alpha x)), with alpha 1 that of Hendrycks and Gimpel 2016, whose gelu is
    exact or with tanh; relu2 is the square of relu (So et al. 2021, Primer).
    """
    make = {
        "relu": _make_relu,
        "relu2": _make_squared_relu,
        "silu": _make_silu,
        "gelu": _make_gelu,
        "gelu_tanh": _make_gelu_tanh,
    }[name]
    LANES, number = lanes_of(compute), ELEMENTS[compute].compute

    @njit
    def constant(value):
        return splat(number(value), LANES)

    return make(constant)


def _make_relu(constant: Callable) -> tuple[Callable, Callable]:
    @njit
    def value(x, alpha):
        return maximum(constant(0.0), x)

    @njit
    def slope(x, alpha):
        return select(less(constant(0.0), x), constant(1.0), constant(0.0))

    return value, slope


def _make_squared_relu(constant: Callable) -> tuple[Callable, Callable]:
    @njit
    def value(x, alpha):
        positive = maximum(constant(0.0), x)
        return positive * positive

    @njit
    def slope(x, alpha):
        return constant(2.0) * maximum(constant(0.0), x)

    return value, slope


def _make_silu(constant: Callable) -> tuple[Callable, Callable]:
    @njit
    def value(x, alpha):
        return x / (constant(1.0) + exp(constant(0.0) - alpha * x))

    @njit
    def slope(x, alpha):
        sigmoid = constant(1.0) / (constant(1.0) + exp(constant(0.0) - alpha * x))
        return sigmoid * (constant(1.0) + alpha * x * (constant(1.0) - sigmoid))

    return value, slope


def _make_gelu(constant: Callable) -> tuple[Callable, Callable]:
    SHARE, DENSITY = math.sqrt(0.5), math.sqrt(0.5 / math.pi)

    @njit
    def probability(x):
        return constant(0.5) * (constant(1.0) + erf(x * constant(SHARE)))

    @njit
    def value(x, alpha):
        return x * probability(x)

    @njit
    def slope(x, alpha):
        density = constant(DENSITY) * exp(constant(-0.5) * x * x)
        return fma(x, density, probability(x))

    return value, slope


def _make_gelu_tanh(constant: Callable) -> tuple[Callable, Callable]:
    FACTOR, CUBIC = math.sqrt(2 / math.pi), 0.044715

    @njit
    def inner(x):
        return constant(FACTOR) * (x + constant(CUBIC) * x * x * x)

    @njit
    def value(x, alpha):
        return constant(0.5) * x * (constant(1.0) + tanh(inner(x)))

    @njit
    def slope(x, alpha):
        steep = constant(FACTOR) * (constant(1.0) + constant(3 * CUBIC) * x * x)
        bend = x * tanh_derivative(inner(x)) * steep
        return constant(0.5) * (constant(1.0) + tanh(inner(x)) + bend)

    return value, slope


# --------------------------------------------------------------------------------------------- rows


@functools.cache
def make_write_row(compute: str) -> Callable:
    """Make ``write_row(target, step, source, count)``: round a row to ``target``'s dtype."""
    LANES = lanes_of(compute)

    @njit
    def write_row(target, step, source, count):
        whole = count // LANES * LANES if step == 1 else 0
        for index in range(0, whole, LANES):
            store(target, index, load_vector(source, index, LANES))
        for index in range(whole, count):
            store(target, index * step, load(source, index))

    return write_row


@njit
def _columns_of_gate(gate, rows):
    return (gate.columns,)


def _scratch(dtype: str, names: tuple[str, ...]) -> Scratch:
    """Describe rows of scratch memory, each padded to whole vectors."""
    compute = compute_dtype(dtype)
    LANES = lanes_of(compute)

    def describe(columns: Any) -> dict[str, Any]:
        return dict.fromkeys(names, columns + LANES)

    return Scratch(compute, _columns_of_gate, describe)


def make_gate_kernel(dtype: str, *, activation: str) -> Kernel:
    """Make the kernel that computes rows of activation(gate) * (up + up_offset).

    With ``limit``, gate is at most the limit and up within plus and minus it. Without a gate it is
    the activation alone.
    """
    compute = compute_dtype(dtype)
    LANES, number = lanes_of(compute), ELEMENTS[compute].compute
    value, _ = make_activation(compute, activation)
    copy_row, write_row = make_copy_row(compute), make_write_row(compute)

    def apply(gate, rows, memory):
        columns, step = gate.columns, gate.step
        alpha, limit = splat(number(gate.alpha), LANES), splat(number(gate.limit), LANES)
        lowest, offset = splat(-number(gate.limit), LANES), splat(number(gate.up_offset), LANES)
        padded = round_up(columns, LANES)
        for row in range(rows.start, rows.stop):
            line = shift(gate.projected, row * gate.projected_stride)
            copy_row(memory.gate, line, step, columns, padded)
            if gate.is_gated:
                copy_row(memory.up, shift(line, gate.up), step, columns, padded)
            for index in range(0, padded, LANES):
                x = load_vector(memory.gate, index, LANES)
                x = value(select(less(limit, x), limit, x), alpha)
                if gate.is_gated:
                    up = load_vector(memory.up, index, LANES)
                    up = select(less(limit, up), limit, up)
                    x = x * (select(less(up, lowest), lowest, up) + offset)
                store(memory.gate, index, x)
            write_row(shift(gate.activated, row * columns), 1, memory.gate, columns)

    return make_kernel_with_scratch(
        apply, _scratch(dtype, ("gate", "up")), gate_argument_types(dtype)
    )


def make_gate_gradient_kernel(dtype: str, *, activation: str) -> Kernel:
    """Make the kernel of the gradients of gated rows, which a token adds with a weight.

    From grad_activated, the gradient of a row without its weight, it computes grad_weight, the
    row's dot product with the activated row; grad_projected; and the activated row times its
    weight.
    """
    compute = compute_dtype(dtype)
    LANES, number = lanes_of(compute), ELEMENTS[compute].compute
    value, slope = make_activation(compute, activation)
    copy_row, write_row = make_copy_row(compute), make_write_row(compute)

    def differentiate(gate, rows, memory):
        columns, step = gate.columns, gate.step
        alpha, limit = splat(number(gate.alpha), LANES), splat(number(gate.limit), LANES)
        lowest, offset = splat(-number(gate.limit), LANES), splat(number(gate.up_offset), LANES)
        zero, padded = splat(number(0.0), LANES), round_up(columns, LANES)
        for row in range(rows.start, rows.stop):
            line = shift(gate.projected, row * gate.projected_stride)
            copy_row(memory.gate, line, step, columns, padded)
            copy_row(memory.grad, shift(gate.grad_activated, row * columns), 1, columns, padded)
            if gate.is_gated:
                copy_row(memory.up, shift(line, gate.up), step, columns, padded)
            weight, total = splat(load(gate.weight, row), LANES), zero
            for index in range(0, padded, LANES):
                x, grad = (
                    load_vector(memory.gate, index, LANES),
                    load_vector(memory.grad, index, LANES),
                )
                at_most = select(less(limit, x), limit, x)
                activated, slope_of_gate = value(at_most, alpha), slope(at_most, alpha)
                slope_of_gate = select(less(limit, x), zero, slope_of_gate)
                result = activated
                if gate.is_gated:
                    up = load_vector(memory.up, index, LANES)
                    within = select(less(limit, up), limit, up)
                    within = select(less(within, lowest), lowest, within) + offset
                    result, slope_of_gate = activated * within, slope_of_gate * within
                    slope_of_up = select(less(limit, absolute(up)), zero, activated)
                    store(memory.up, index, weight * grad * slope_of_up)
                total = fma(grad, result, total)
                store(memory.gate, index, weight * grad * slope_of_gate)
                store(memory.grad, index, weight * result)
            store(gate.grad_weight, row, reduce_add(total))
            write_row(shift(gate.activated, row * columns), 1, memory.grad, columns)
            target = shift(gate.grad_projected, row * gate.projected_stride)
            write_row(target, step, memory.gate, columns)
            if gate.is_gated:
                write_row(shift(target, gate.up), step, memory.up, columns)

    return make_kernel_with_scratch(
        differentiate, _scratch(dtype, ("gate", "up", "grad")), gate_argument_types(dtype)
    )


def make_combine_kernel(dtype: str) -> Kernel:
    """Make the kernel that adds up the rows of a token, each times its weight.

    ``place[token, i]`` is the row of the token's choice i, or -1 for none.
    """
    compute = compute_dtype(dtype)
    LANES, number = lanes_of(compute), ELEMENTS[compute].compute
    fill, write_row = make_fill(compute), make_write_row(compute)

    @njit
    def columns_of(combine, tokens):
        return (combine.columns,)

    def describe(columns: Any) -> dict[str, Any]:
        return {"sums": columns + LANES}

    @njit
    def add_row(sums, row, weight, columns):
        factor, whole = splat(weight, LANES), columns // LANES * LANES
        for column in range(0, whole, LANES):
            total = load_vector(sums, column, LANES)
            store(sums, column, fma(factor, load_vector(row, column, LANES), total))
        for column in range(whole, columns):
            store(sums, column, load(sums, column) + weight * load(row, column))

    def combine_rows(combine, tokens, memory):
        columns, top_k = combine.columns, combine.top_k
        for token in range(tokens.start, tokens.stop):
            fill(memory.sums, columns, 0.0)
            for choice in range(token * top_k, (token + 1) * top_k):
                place = load(combine.place, choice)
                if place >= 0:
                    weight = number(1.0)
                    if combine.has_weight:
                        weight = load(combine.weight, choice)
                    add_row(memory.sums, shift(combine.rows, place * columns), weight, columns)
            write_row(shift(combine.output, token * columns), 1, memory.sums, columns)

    layout = Scratch(compute, columns_of, describe)
    return make_kernel_with_scratch(combine_rows, layout, combine_argument_types(dtype))
