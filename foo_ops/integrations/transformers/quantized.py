"""foo::linear_int8 and foo::linear_int4 in the layers of a model that decodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from foo_ops.integrations.transformers.linear import FooConv1D, FooLinear
from foo_ops.integrations.transformers.replacement import (
    Replacement,
    is_replaced,
    put_back,
    replace,
)
from foo_ops.ops.quantize_weight import quantize_weight

BITS = (8, 4)
GROUP_SIZES = (64, 32)
"""Of 4 bits, in the order in which they are tried: as many weights share a scale and a zero."""
BUFFERS = ("foo_weight", "foo_scale", "foo_zero")


class FooQuantizedLinear(Replacement):
    """In the place of linear layers, with a copy of the weight in 8 or 4 bits beside it.

    The copy is in buffers that no ``state_dict`` has, which go where the module goes. In training
    the weight itself is used.
    """

    bias: Tensor | None
    training: bool
    _buffers: Any

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        return FooLinear.recognises(module) or FooConv1D.recognises(module)

    @classmethod
    def forget(cls, module: nn.Module) -> None:
        for name in BUFFERS:
            delattr(module, name)

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            return super().forward(input)  # type: ignore[misc]
        # Attributes would be looked for in two places before the buffers.
        own = self._buffers
        weight, scale, zero = own["foo_weight"], own["foo_scale"], own["foo_zero"]
        return quantized_product(input, weight, scale, zero, self.bias)

    def copied(self, state: dict[str, Any]) -> dict[str, Any]:
        """Give a copy buffers of its own, and not all that theirs may be part of (`FooJoined`)."""
        own = {name: it.clone() for name in BUFFERS if (it := self._buffers[name]) is not None}
        return {**state, "_buffers": {**state["_buffers"], **own}}


def quantized_product(
    input: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Multiply by weights of 8 bits, or of 4, which have zeros."""
    if zero is None:
        return torch.ops.foo.linear_int8.default(input, weight, scale, bias)
    group_size = 2 * weight.shape[1] // scale.shape[1]
    return torch.ops.foo.linear_int4.default(
        input, weight, scale, zero, bias, group_size=group_size
    )


def check_bits(bits: int | None) -> None:
    if bits is not None and bits not in BITS:
        raise ValueError(f"apply: quantize must be None, 8 or 4, got {bits}")


def quantize(module: nn.Module, bits: int) -> None:
    """Quantise the weight of a linear layer, also of one that `apply` has changed before.

    A layer whose width no group of 4 bits divides stays as it is.
    """
    if is_replaced(module) and isinstance(module, (FooLinear, FooConv1D, FooQuantizedLinear)):
        put_back(module)
    if not FooQuantizedLinear.recognises(module):
        return
    weight: Any = module.weight
    if isinstance(module, Conv1D):
        weight = weight.t()
    group_size = next((it for it in GROUP_SIZES if weight.shape[1] % it == 0), None)
    if bits == 4 and group_size is None:
        return
    options = {"group_size": group_size} if bits == 4 else {}
    with torch.no_grad():
        tensors = quantize_weight(weight, bits, **options)
    for name, tensor in zip(BUFFERS, (*tensors, None)):
        module.register_buffer(name, tensor, persistent=False)
    replace(module, FooQuantizedLinear)
