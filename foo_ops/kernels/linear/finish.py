"""What becomes of the sums of a linear layer before they are rounded: activations and gates."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.math.exponential import exp, tanh
from foo_ops.kernels.math.special import erf
from foo_ops.kernels.simd.arithmetic import maximum, splat
from foo_ops.kernels.simd.types import ELEMENTS, lanes_of

NOTHING = "nothing"
GATE = "silu_mul"
"""The silu of one product, times another one of the same input."""


def parts_of(finish: str) -> int:
    """Return how many products a result is made of."""
    return 2 if finish == GATE else 1


@functools.cache
def make_finish(compute: str, finish: str) -> Callable:
    """Make ``finish(value, other)`` for vectors; ``other`` counts for a gate only.

    gelu is Hendrycks and Gimpel 2016, in its exact form and in that with tanh; silu is x / (1 +
    exp(-x)).
    """
    return {
        NOTHING: _nothing,
        "relu": _make_relu,
        "silu": _make_silu,
        "gelu": _make_gelu,
        "gelu_tanh": _make_gelu_tanh,
        GATE: _make_gate,
    }[finish](compute)


def _make_constant(compute: str) -> Callable:
    """Make ``constant(number)``, a vector of it."""
    LANES, type_ = lanes_of(compute), ELEMENTS[compute].compute

    @njit
    def constant(number):
        return splat(type_(number), LANES)

    return constant


def _nothing(compute: str) -> Callable:
    @njit
    def nothing(value, other):
        return value

    return nothing


def _make_relu(compute: str) -> Callable:
    constant = _make_constant(compute)

    @njit
    def relu(value, other):
        return maximum(constant(0.0), value)

    return relu


def _make_silu(compute: str) -> Callable:
    constant = _make_constant(compute)

    @njit
    def silu(value, other):
        return value / (constant(1.0) + exp(constant(0.0) - value))

    return silu


def _make_gate(compute: str) -> Callable:
    silu = _make_silu(compute)

    @njit
    def gate(value, other):
        return silu(value, other) * other

    return gate


def _make_gelu(compute: str) -> Callable:
    constant, FACTOR = _make_constant(compute), math.sqrt(0.5)

    @njit
    def gelu(value, other):
        return constant(0.5) * value * (constant(1.0) + erf(value * constant(FACTOR)))

    return gelu


def _make_gelu_tanh(compute: str) -> Callable:
    constant, FACTOR = _make_constant(compute), math.sqrt(2 / math.pi)

    @njit
    def gelu_tanh(value, other):
        cubed = constant(0.044715) * value * value * value
        return constant(0.5) * value * (constant(1.0) + tanh(constant(FACTOR) * (value + cubed)))

    return gelu_tanh
