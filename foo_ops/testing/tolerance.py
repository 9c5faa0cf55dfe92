"""Tolerances around a float64 reference, where the author gives no error budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

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
