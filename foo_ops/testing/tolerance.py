"""Bounds of errors: of roundings, carried from step to step, without a budget, and of means."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# ---------------------------------------------------------------------------------------- roundings


def roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def smallest(dtype: torch.dtype) -> float:
    """Return the smallest positive number; half of it is the error of subnormal numbers."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def compute_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums are accumulated in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def roundings(count: int) -> float:
    """Return the number of roundings to allow for in a sum or product of ``count`` terms.

    There are at most ``count``. Since they are independent, their total exceeds ``8 * sqrt(count)``
    roundings with a probability below 3e-14 (Higham and Mary 2019, A new approach to probabilistic
    rounding error analysis, theorem 2.4 with lambda = 8).
    """
    return min(count, 8 * math.sqrt(count))


def bound(value: Tensor, magnitude: Tensor, terms: int, dtype: torch.dtype) -> Tensor:
    """Bound the error of a sum of ``terms`` products whose magnitudes add up to ``magnitude``."""
    compute = compute_type(dtype)
    error = roundings(terms + 1) * roundoff(compute) * magnitude
    lost = 2 * terms * torch.finfo(compute).smallest_normal
    return error + lost + roundoff(dtype) * value.abs() + smallest(dtype)


# ------------------------------------------------------------------------------ numbers with errors


@dataclasses.dataclass(frozen=True)
class Approximate:
    """Numbers in float64, and bounds of how far the operator's are off."""

    value: Tensor
    error: Tensor

    @classmethod
    def exact(cls, value: Tensor) -> Approximate:
        return cls(value, torch.zeros_like(value))

    def map(self, function: Any) -> Approximate:
        """Apply a function that only moves elements."""
        return Approximate(function(self.value), function(self.error))

    def __add__(self, other: Approximate) -> Approximate:
        return Approximate(self.value + other.value, self.error + other.error)

    def __mul__(self, other: Approximate) -> Approximate:
        return einsum("...,...->...", self, other)

    def rounded(self, dtype: torch.dtype) -> Approximate:
        """Return the numbers after a step in the compute type that ends with a rounding."""
        compute = roundings(64) * roundoff(compute_type(dtype))
        magnitude = self.value.abs() + self.error
        error = self.error + (compute + roundoff(dtype)) * magnitude + smallest(dtype)
        return Approximate(self.value, error)


def einsum(equation: str, a: Approximate, b: Approximate) -> Approximate:
    first, second = a.value.abs(), b.value.abs()
    error = torch.einsum(equation, a.error, second + b.error)
    error = error + torch.einsum(equation, first, b.error)
    return Approximate(torch.einsum(equation, a.value, b.value), error)


def product(
    equation: str, a: Approximate, b: Approximate, terms: int, dtype: torch.dtype
) -> Approximate:
    """Return sums of ``terms`` products, rounded once."""
    result = einsum(equation, a, b)
    magnitude = torch.einsum(equation, a.value.abs() + a.error, b.value.abs() + b.error)
    return Approximate(
        result.value,
        result.error + bound(result.value.abs() + result.error, magnitude, terms, dtype),
    )


def smooth(function: Any, x: Approximate) -> Approximate:
    """Apply a smooth function to single numbers; its slope counts at both ends of the error too."""
    steepness = []
    for place in (x.value, x.value - x.error, x.value + x.error):
        steepness.append(slopes(function, place.detach()).detach().abs())
    slope = torch.stack(steepness).amax(0)
    return Approximate(function(x.value).detach(), 2 * slope * x.error)


def slopes(function: Any, x: Tensor) -> Tensor:
    """Return the derivatives of a function of single numbers, which can be differentiated."""
    with torch.enable_grad():
        leaf = x if x.requires_grad else x.detach().requires_grad_()
        # A function that is constant, as slopes of straight lines are, has no graph.
        total = (function(leaf) + 0.0 * leaf).sum()
        result: Tensor = torch.autograd.grad(total, leaf, create_graph=True)[0]
    return result


# --------------------------------------------------------------------------------------- tolerances

# Tolerances around a float64 reference, where the author gives no error budget.


Tolerances = Mapping[torch.dtype, tuple[float, float]]

# Relative and absolute tolerances: those of torch.testing.assert_close.
TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex32: (1e-3, 1e-5),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}
# Draws of signs to estimate a spread: two terms that cancel show in all but one of 2^15.
_DRAWS = 16


def has_gradients(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def tolerance(given: Tolerances, actual: Tensor, expected: Tensor) -> Tensor:
    """Return the budget that follows from a result's dtype. Integers and bool must be equal."""
    relative, absolute = (TOLERANCES | dict(given)).get(actual.dtype, (0.0, 0.0))
    if not has_gradients(expected.dtype):
        return torch.full(expected.shape, absolute)
    return relative * expected.abs().nan_to_num(math.inf) + absolute


def gradient_tolerance(
    given: Tolerances, actual: Tensor, expected: Tensor, spread: Tensor
) -> Tensor:
    """Return the budget of a gradient, which may be a sum of rounded terms.

    Each term has the relative tolerance, so the sum is also allowed twice that of its spread: if
    terms cancel, the sum may be too small to measure their errors by.
    """
    relative, _ = (TOLERANCES | dict(given)).get(actual.dtype, (0.0, 0.0))
    return tolerance(given, actual, expected) + 2 * relative * spread


def gradients_of(
    outputs: Sequence[Tensor],
    tensors: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    *,
    once: bool = True,
    recorded_again: bool = False,
) -> tuple[Tensor, ...]:
    """Differentiate the outputs that have a history; return zeros for tensors that none depends on.

    Args:
        once: free the graph afterwards.
        recorded_again: make the gradients differentiable.
    """
    recorded = [index for index, output in enumerate(outputs) if output.requires_grad]
    if not tensors:
        return ()
    return torch.autograd.grad(
        [outputs[index] for index in recorded],
        tensors,
        [cotangents[index] for index in recorded],
        retain_graph=not once or recorded_again,
        create_graph=recorded_again,
        allow_unused=True,
        materialize_grads=True,
    )


def spreads_of_gradients(
    outputs: Sequence[Tensor],
    tensors: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    gradients: Sequence[Tensor],
) -> list[Tensor]:
    """Estimate the standard deviation of each gradient if every output's sign is random.

    A gradient is a sum over the outputs, such as that of a broadcast operand. Its spread is
    proportional to the accumulated rounding of its terms: the root of the sum of their squares,
    less the square of the sum; zero for one term.
    """
    generator = torch.Generator().manual_seed(0)
    squares = [torch.zeros_like(gradient.abs()) for gradient in gradients]
    for _ in range(_DRAWS):
        signs = (torch.randint(2, c.shape, generator=generator) * 2 - 1 for c in cotangents)
        signed = [cotangent * sign for cotangent, sign in zip(cotangents, signs)]
        for square, drawn in zip(squares, gradients_of(outputs, tensors, signed, once=False)):
            square += drawn.abs().square() / _DRAWS
    return [
        (square - gradient.abs().square()).clamp(min=0).sqrt().nan_to_num(0.0)
        for square, gradient in zip(squares, gradients)
    ]


# -------------------------------------------------------------------------------------------- means

# Operators that draw random numbers are checked by their means, over calls with one seed each.
#
# No single result can be compared with a reference, but the mean of many can. Its error bound
# follows from the spread of the results (Maurer and Pontil 2009, theorem 4): for normal numbers
# seven standard deviations of the mean. The seeds are the same in every run, and so is the verdict.


Tensors = tuple[Tensor, ...]

# The logarithm of 2 / 1e-10: a correct mean exceeds the bound with probability 1e-10.
_LOG = 23.7


@contextlib.contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Seed the default generators of the CPU and of foo, and restore them at the end."""
    foo = range(torch.get_device_module("foo").device_count())
    with torch.random.fork_rng(foo, device_type="foo"):
        torch.manual_seed(seed)
        yield


class Mean:
    """The elementwise mean of tensors, and a bound on its distance from the expectation."""

    def __init__(self) -> None:
        self._count = 0
        self._sum = self._square = self._most = torch.zeros(())

    def add(self, value: Tensor) -> None:
        wide = value.detach().cpu().to(torch.float64)
        self._count += 1
        self._sum = self._sum + wide
        self._square = self._square + wide.square()
        self._most = torch.maximum(self._most, wide.abs())

    def value(self) -> Tensor:
        return self._sum / self._count

    def bound(self, expected: Tensor) -> Tensor:
        """Bound the distance of the mean from the expectation."""
        count = self._count
        variance = (self._square / count - self.value().square()).clamp(min=0) * count / (count - 1)
        # An event that never occurred may be rare: its size is at least that of the expectation.
        largest = torch.maximum(self._most, expected.abs())
        return (2 * variance * _LOG / count).sqrt() + 7 * largest * _LOG / (3 * (count - 1))


def means(call: Callable[[], Sequence[Tensor]], draws: int) -> list[Mean]:
    """Return the mean of each tensor that ``call`` returns, over calls with one seed each."""
    found: list[Mean] = []
    with seeded():
        for seed in range(draws):
            torch.manual_seed(seed)
            tensors = call()
            found = found or [Mean() for _ in tensors]
            for mean, tensor in zip(found, tensors):
                mean.add(tensor)
    return found


def budget_of(mean: Mean, dtype: torch.dtype, expected: Tensor, given: Tolerances) -> Tensor:
    """Return the bound of a mean, plus the rounding to the results' dtype."""
    relative, absolute = (TOLERANCES | dict(given)).get(dtype, (0.0, 0.0))
    return mean.bound(expected) + relative * expected.abs() + absolute
