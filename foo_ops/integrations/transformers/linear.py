"""foo::linear in torch's linear layers and GPT-2's ``Conv1D``."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from foo_ops.integrations.transformers.deferred_logits import defer
from foo_ops.integrations.transformers.replacement import (
    PLAIN,
    Replacement,
    can_multiply,
    has_hooks,
    has_own_forward,
)


def is_plain(module: nn.Module) -> bool:
    """Whether a layer has its class's forward and a floating-point weight of a supported type."""
    weight: Any = module.weight
    return not has_own_forward(module) and type(weight) in PLAIN and weight.is_floating_point()


class Deferred(threading.local):
    """The head whose output this thread defers.

    Attributes:
        head: the head of a model that is called for its loss (`fused_loss`). Per thread, since
            others may call the same model for its logits.
    """

    head: Any = None


deferred = Deferred()


class FooLinear(Replacement):
    """Replaces `torch.nn.Linear`."""

    weight: Tensor
    bias: Tensor | None
    _parameters: Any

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        return type(module).forward is nn.Linear.forward and is_plain(module)

    def forward(self, input: Tensor) -> Any:
        own = self._parameters
        # Attribute lookup is slow, and only needed under a parametrization.
        is_own = "weight" in own and "bias" in own
        weight, bias = (own["weight"], own["bias"]) if is_own else (self.weight, self.bias)
        if not can_multiply(input, weight, bias):
            return super().forward(input)  # type: ignore[misc]
        if deferred.head is self:
            return defer(input, weight, bias)
        return torch.ops.foo.linear.default(input, weight, bias)


def is_lone(layer: Any) -> bool:
    """Whether a layer is one of ours, without hooks or parametrizations."""
    is_ours = getattr(type(layer), "forward", None) is FooLinear.forward
    return is_ours and not has_hooks(layer) and type(layer.weight) in PLAIN


def lone_weight(layer: Any) -> Tensor | None:
    """Return the weight of a layer of ours without bias, or None."""
    return layer.weight if is_lone(layer) and layer.bias is None else None


class FooConv1D(Replacement):
    """Replaces transformers' ``Conv1D``, a linear layer with the weight transposed."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        return type(module).forward is Conv1D.forward and is_plain(module)

    def forward(self, x: Tensor) -> Any:
        # Conv1D's own forward views the input as rows, and raises if it cannot.
        if not can_multiply(x, self.weight, self.bias) or not x.is_contiguous():
            return super().forward(x)  # type: ignore[misc]
        return torch.ops.foo.linear.default(x, self.weight.t(), self.bias)
