"""foo::rms_norm in the norms of models."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from foo_ops.integrations.transformers.replacement import (
    PLAIN,
    Replacement,
    has_hooks,
    has_own_forward,
    stand_in,
)

ROUNDINGS = 64
"""Of float32, in which the norms compute, between a norm's own results and ours."""


def eps_of(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps"):
        if isinstance(eps := getattr(module, name, None), float):
            return eps
    return None


def is_norm(module: nn.Module, norm: Callable[[Tensor, Tensor, float], Tensor]) -> bool:
    """Whether a module is called a norm, and gives what ``norm`` gives on random numbers.

    There are rows where eps counts and rows where it does not, and their mean is not zero.
    """
    weight, eps = module._parameters.get("weight"), eps_of(module)
    if "Norm" not in type(module).__name__ or has_own_forward(module):
        return False
    if weight is None or weight.dim() != 1 or eps is None:
        return False
    if len(module._parameters) != 1 or module._modules or module._buffers:
        return False
    if len(inspect.signature(type(module).forward).parameters) != 2:
        return False
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1.0, eps**0.5, 100.0])[:, None]
    input = sizes * (torch.randn(2, 3, len(weight), generator=generator) + 0.5)
    other = torch.randn(len(weight), generator=generator)
    with torch.no_grad(), torch.device("cpu"):
        twin = stand_in(module, {"weight": other})
        try:
            own = type(module).forward(twin, input)
        except Exception:  # what fails on a plain tensor is no plain norm
            return False
        return is_near(own, norm(input, other, eps))


def is_near(own: object, ours: Tensor) -> bool:
    if not isinstance(own, Tensor) or own.shape != ours.shape or own.dtype != ours.dtype:
        return False
    return torch.allclose(own, ours, rtol=ROUNDINGS * torch.finfo(ours.dtype).eps, atol=0)


def plain(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.ops.foo.rms_norm.default(input, weight, eps=eps)


def one_more(weight: Tensor) -> Tensor:
    """Return what Gemma's norms multiply by, in the type that they compute in."""
    return 1 + weight.to(torch.promote_types(weight.dtype, torch.float32))


def offset(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute Gemma's norm, whose weight is what is added to 1."""
    return plain(input, one_more(weight), eps)


class FooRMSNorm(Replacement):
    """In the place of norms with a weight, as of Llama and gpt-oss."""

    weight: Tensor

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        return is_norm(module, plain)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return plain(hidden_states, self.weight, eps_of(self))  # type: ignore[arg-type]


class FooOffsetRMSNorm(Replacement):
    """In the place of Gemma's norms."""

    weight: Tensor

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        return is_norm(module, offset)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return offset(hidden_states, self.weight, eps_of(self))  # type: ignore[arg-type]


def add_norm(norm: Any, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm of a sum, and the sum: in one pass where the norm is one of ours."""
    own = getattr(type(norm), "forward", None)
    is_ours = own in (FooRMSNorm.forward, FooOffsetRMSNorm.forward) and not has_hooks(norm)
    is_like = input.shape == residual.shape and input.dtype == residual.dtype
    if not is_ours or not is_like or type(weight := norm.weight) not in PLAIN:
        sum = residual + input
        return norm(sum), sum
    if own is FooOffsetRMSNorm.forward:
        weight = one_more(weight)
    return torch.ops.foo.add_rms_norm.default(input, residual, weight, eps=eps_of(norm))
