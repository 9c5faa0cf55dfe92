"""foo::linear in the layers of torch and of GPT-2."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from foo_ops.integrations.transformers.replacement import Replacement, has_own_forward
from foo_ops.ops.linear import linear

PLAIN = (Tensor, nn.Parameter)
"""The types of weights that kernels take; others, as of quantisers, bring their own products."""


def is_plain(module: nn.Module) -> bool:
    """Whether a layer computes what its class says, with floating-point numbers."""
    weight: Any = module.weight
    return not has_own_forward(module) and type(weight) in PLAIN and weight.is_floating_point()


class FooLinear(Replacement):
    """In the place of `torch.nn.Linear`."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        return type(module).forward is nn.Linear.forward and is_plain(module)

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        if type(weight) not in PLAIN:
            return super().forward(input)  # type: ignore[misc]
        return linear(input, weight, self.bias)


def lone_weight(layer: Any) -> Tensor | None:
    """Return the weight of a layer that multiplies by it, and does nothing else."""
    if getattr(type(layer), "forward", None) is not FooLinear.forward or has_own_forward(layer):
        return None
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks)
    if layer.bias is not None or any(hooks) or layer._backward_pre_hooks:
        return None
    return layer.weight if type(layer.weight) in PLAIN else None


class FooConv1D(Replacement):
    """In the place of transformers' ``Conv1D``, a linear layer with the weight transposed."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        return type(module).forward is Conv1D.forward and is_plain(module)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.t(), self.bias)
