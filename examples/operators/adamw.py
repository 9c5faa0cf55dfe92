"""A step of AdamW (Loshchilov and Hutter 2019, algorithm 2), in place and in one pass.

    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g^2
    p = p - lr * decay * p - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

Shows an elementwise kernel that writes three of its arguments, and an optimizer around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foo_ops import library
from foo_ops.testing import OpSpec, Sample, random

# Factors that depend on the step number are computed once, not per element, so a graph of
# torch.compile takes them as numbers.
library.define(
    "examples::adamw_",
    "(Tensor(a!) parameter, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor grad, *, "
    "float avg_weight, float avg_sq_weight, float step_size, float shrinkage, "
    "float root_correction, float eps) -> ()",
    tags=torch.Tag.pt2_compliant_tag,
)


def adamw_(
    parameter: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    *,
    step: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> None:
    """Update a parameter and its two averages, all of one shape, in step 1, 2, ..."""
    if step < 1:
        raise ValueError(f"adamw_: step must be at least 1, got {step}")
    for name, average in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq), ("grad", grad)):
        if not library.have_sizes(average.shape, parameter.shape):
            raise ValueError(
                f"adamw_: {name} must have shape {list(parameter.shape)} as parameter has, "
                f"got {list(average.shape)}"
            )
    beta1, beta2 = betas
    torch.ops.examples.adamw_(
        parameter,
        exp_avg,
        exp_avg_sq,
        grad,
        avg_weight=1.0 - beta1,
        avg_sq_weight=1.0 - beta2,
        step_size=lr / (1.0 - beta1**step),
        shrinkage=1.0 - lr * weight_decay,
        root_correction=1.0 / math.sqrt(1.0 - beta2**step),
        eps=eps,
    )


class AdamW(torch.optim.Optimizer):
    """The optimizer, for ``torch.optim``'s users."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; ``closure``, if given, computes the loss and the gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            options = {name: value for name, value in group.items() if name in self.defaults}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    averages = torch.zeros_like(parameter), torch.zeros_like(parameter)
                    state["step"], (state["exp_avg"], state["exp_avg_sq"]) = 0, averages
                state["step"] += 1
                averages = state["exp_avg"], state["exp_avg_sq"]
                adamw_(parameter, *averages, parameter.grad, step=state["step"], **options)
        return loss


# ----------------------------------------------------------------------------------------- kernel


@library.register_kernel("examples::adamw_", ("cpu", "foo"))
@library.elementwise_kernel
def kernel(
    parameter: Any, exp_avg: Any, exp_avg_sq: Any, grad: Any, avg_weight: Any, avg_sq_weight: Any,
    step_size: Any, shrinkage: Any, root_correction: Any, eps: Any,
) -> Any:  # fmt: skip
    average = exp_avg + avg_weight * (grad - exp_avg)
    square = exp_avg_sq + avg_sq_weight * (grad * grad - exp_avg_sq)
    root = math.sqrt(square) * root_correction + eps
    return parameter * shrinkage - step_size * average / root, average, square


# ---------------------------------------------------------------------------------------- samples


def reference(
    parameter: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    avg_weight: float,
    avg_sq_weight: float,
    step_size: float,
    shrinkage: float,
    root_correction: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    average = (1 - avg_weight) * exp_avg + avg_weight * grad
    square = (1 - avg_sq_weight) * exp_avg_sq + avg_sq_weight * grad**2
    change = step_size * average / (square.sqrt() * root_correction + eps)
    return shrinkage * parameter - change, average, square


OPTIONS = {
    "avg_weight": 0.1,
    "avg_sq_weight": 1e-3,
    "step_size": 1e-2,
    "shrinkage": 0.99,
    "root_correction": 10.0,
    "eps": 1e-8,
}


def sample(shape: tuple[int, ...], dtype: torch.dtype) -> Sample:
    parameter, exp_avg, exp_avg_sq, grad = random("adamw", *[shape] * 4, dtype=dtype)
    return Sample((parameter, exp_avg, exp_avg_sq.square() + 0.125, grad), OPTIONS)


SPEC = OpSpec(
    operator=torch.ops.examples.adamw_.default,
    reference=reference,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sized=lambda dtype, size: sample((2, size, size + 3), dtype),
    samples={"0-d": lambda dtype: sample((), dtype)},
    essential=("size7", "0-d"),
    large=lambda dtype: sample((301, 501), dtype),
    differentiable=False,
)
