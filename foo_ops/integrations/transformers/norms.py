"""foo::rms_norm in the norms of models."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foo_ops.integrations.transformers.replacement import (
    Replacement,
    are_alike,
    has_hooks,
    has_own_forward,
    memory_order,
    permuted_back,
    stand_in,
)
from foo_ops.library.operators import FLOATING
from foo_ops.ops.rms_norm import composite


def eps_of(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps"):
        if isinstance(eps := getattr(module, name, None), float):
            return eps
    return None


def is_norm(module: nn.Module, weight_of: Callable[[Tensor], Tensor], keeps_order: bool) -> bool:
    """Whether a module is called a norm, and gives what an RMS norm gives on random numbers.

    There are rows where eps counts and rows where it does not, and their mean is not zero.

    Args:
        weight_of: returns what the norm multiplies by, from the module's weight.
        keeps_order: whether results lie in memory like their inputs, and not always contiguous.
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
    input = input.transpose(0, 1)
    other = torch.randn(len(weight), generator=generator)
    return all(
        agrees(module, input.to(dtype), other.to(dtype), weight_of, keeps_order, autocast)
        for dtype in FLOATING
        for autocast in (False, True)
    )


def agrees(
    module: nn.Module,
    input: Tensor,
    weight: Tensor,
    weight_of: Callable[[Tensor], Tensor],
    keeps_order: bool,
    autocast: bool,
) -> bool:
    """Whether a module's own forward returns the norm, in the dtype of its input."""
    with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=autocast):
        try:
            own = type(module).forward(stand_in(module, {"weight": weight}), input)
        except Exception:  # what fails on a plain tensor is no plain norm
            return False
    memory = torch.preserve_format if keeps_order else torch.contiguous_format
    like = torch.empty_like(input, memory_format=memory)
    if not isinstance(own, Tensor) or own.shape != like.shape:
        return False
    if own.dtype != like.dtype or own.stride() != like.stride():
        return False
    exact = composite(input.double(), weight_of(weight.double()), eps=eps_of(module))  # type: ignore[arg-type]
    # They compute in float32, also with float64, and may round the norm before they weight it.
    room = max(4 * torch.finfo(own.dtype).eps, 64 * torch.finfo(torch.float32).eps)
    return torch.allclose(own.double(), exact, rtol=room, atol=0)


def same(weight: Tensor) -> Tensor:
    return weight


def one_more(weight: Tensor) -> Tensor:
    """Return what Gemma's norms multiply by, in the type that they compute in."""
    return 1 + weight.to(torch.promote_types(weight.dtype, torch.float32))


class FooNorm(Replacement):
    """The base of norms with a weight.

    Attributes:
        keeps_order: whether results lie in memory like their inputs, and not always contiguous.
    """

    weight: Tensor
    keeps_order: ClassVar[bool] = True
    _parameters: Any

    @staticmethod
    def weight_of(weight: Tensor) -> Tensor:
        """Return what the norm multiplies by."""
        raise NotImplementedError

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        return is_norm(module, cls.weight_of, cls.keeps_order)

    def forward(self, hidden_states: Tensor) -> Any:
        own = self._parameters
        # Attributes are slow to find, and only a parametrization has them elsewhere.
        weight = own["weight"] if "weight" in own else self.weight  # noqa: SIM401
        if not are_alike(hidden_states, weight):
            return super().forward(hidden_states)  # type: ignore[misc]
        weight, eps = self.weight_of(weight), eps_of(self)  # type: ignore[arg-type]
        norm = torch.ops.foo.rms_norm.default
        if hidden_states.is_contiguous() or not self.keeps_order:
            return norm(hidden_states, weight, eps=eps)
        order = memory_order(hidden_states)
        if order is None:
            return super().forward(hidden_states)  # type: ignore[misc]
        return permuted_back(norm(hidden_states.permute(order), weight, eps=eps), order)


class FooRMSNorm(FooNorm):
    """In the place of norms as of Llama and gpt-oss."""

    weight_of = staticmethod(same)


class FooContiguousRMSNorm(FooRMSNorm):
    """In the place of `torch.nn.RMSNorm`."""

    keeps_order = False


class FooOffsetRMSNorm(FooNorm):
    """In the place of Gemma's norms, whose weight is what is added to 1."""

    weight_of = staticmethod(one_more)


NORMS = (FooRMSNorm, FooContiguousRMSNorm, FooOffsetRMSNorm)


def add_norm(norm: Any, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm of a sum, and the sum: in one pass where the norm is one of ours."""
    is_ours = getattr(type(norm), "forward", None) is FooNorm.forward and not has_hooks(norm)
    if (
        not is_ours
        or not are_alike(input, residual, norm.weight)
        or input.shape != residual.shape
        or not (input.is_contiguous() and residual.is_contiguous())
    ):
        sum = residual + input
        return norm(sum), sum
    weight = norm.weight_of(norm.weight)
    return torch.ops.foo.add_rms_norm.default(input, residual, weight, eps=eps_of(norm))
