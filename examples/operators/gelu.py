"""The Gaussian error linear unit (Hendrycks and Gimpel 2016), exact or with tanh.

    exact:  x * (1 + erf(x / sqrt(2))) / 2
    tanh:   x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) / 2

Shows an operator from a single decorator: elementwise, an option, first and second derivatives.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from foo_ops import language, library
from foo_ops.testing import OpSpec, Sample, random

HALF_ROOT, SLOPE = math.sqrt(0.5), math.sqrt(2.0 / math.pi)
DENSITY = 1.0 / math.sqrt(2.0 * math.pi)
HALF_LOG2E = 0.5 / math.log(2.0)
CUBE = 0.044715
FORMS = ("none", "tanh")


def gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    """Compute gelu elementwise, floating-point; ``approximate`` is "none" or "tanh"."""
    if approximate not in FORMS:
        raise ValueError(
            f"gelu: approximate must be one of {', '.join(FORMS)}, got {approximate!r}"
        )
    return torch.ops.examples.gelu(input, is_approximate=approximate == "tanh")


# ---------------------------------------------------------------------------------------- kernels


def normal_density(x: Any) -> Any:
    """Return e^(-x^2 / 2) / sqrt(2 pi).

    With `language.exp`, which is also accurate for nearly vanishing results, gradients take 1.25
    times as long as with this power of two.
    """
    return DENSITY * language.exp2(-HALF_LOG2E * x * x)


def second_gradient(grad_grad: Any, grad: Any, x: Any, is_approximate: Any) -> Any:
    if is_approximate:
        inner_slope = SLOPE * (1.0 + 3.0 * CUBE * x * x)
        tanh = language.tanh(SLOPE * (x + CUBE * x * x * x))
        rest = 1.0 - tanh * tanh
        slope = 0.5 * (1.0 + tanh + x * rest * inner_slope)
        bend = rest * (
            inner_slope - x * tanh * inner_slope * inner_slope + 3.0 * x * SLOPE * CUBE * x
        )
    else:
        density = normal_density(x)
        slope = 0.5 * (1.0 + math.erf(HALF_ROOT * x)) + x * density
        bend = density * (2.0 - x * x)
    return grad_grad * slope, grad_grad * grad * bend


@library.elementwise_kernel(backward=second_gradient)
def gradient(grad: Any, x: Any, is_approximate: Any) -> Any:
    if is_approximate:
        inner_slope = SLOPE * (1.0 + 3.0 * CUBE * x * x)
        tanh = language.tanh(SLOPE * (x + CUBE * x * x * x))
        return grad * 0.5 * (1.0 + tanh + x * (1.0 - tanh * tanh) * inner_slope)
    density = normal_density(x)
    return grad * (0.5 * (1.0 + math.erf(HALF_ROOT * x)) + x * density)


@library.numba_op("examples::gelu", backward=gradient)
def kernel(x: float, is_approximate: bool = False) -> float:
    if is_approximate:
        return 0.5 * x * (1.0 + language.tanh(SLOPE * (x + CUBE * x * x * x)))
    return 0.5 * x * (1.0 + math.erf(HALF_ROOT * x))


# ---------------------------------------------------------------------------------------- samples


def reference(input: Tensor, is_approximate: bool = False) -> Tensor:
    if is_approximate:
        inner = (2 / torch.pi) ** 0.5 * (input + 0.044715 * input**3)
        return input * (1 + inner.tanh()) / 2
    return input * torch.special.ndtr(input)


def sample(shape: tuple[int, ...], dtype: torch.dtype, **options: Any) -> Sample:
    (input,) = random("gelu", shape, dtype=dtype)
    return Sample((input,), options)


def special(dtype: torch.dtype) -> Sample:
    """Make numbers for which the result is the input or zero, and a NaN."""
    return Sample((torch.tensor([0.0, -0.0, 9.0, -9.0, 60.0, -60.0, torch.nan], dtype=dtype),))


SPEC = OpSpec(
    operator=torch.ops.examples.gelu.default,
    reference=reference,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sized=lambda dtype, size: sample((2, size, size + 3), dtype),
    samples={
        "0-d": lambda dtype: sample((), dtype),
        "tanh": lambda dtype: sample((3, 33), dtype, is_approximate=True),
        "special values": special,
    },
    essential=("size7", "tanh"),
    large=lambda dtype: sample((301, 501), dtype),
)
