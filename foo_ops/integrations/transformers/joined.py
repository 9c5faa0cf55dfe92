"""One product for quantised layers with the same input, whose weights lie together in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from foo_ops.integrations.transformers.quantized import (
    BUFFERS,
    FooQuantizedLinear,
    current_copy,
    is_multiplied,
    quantized_product,
)
from foo_ops.integrations.transformers.replacement import Replacement, has_hooks
from foo_ops.ops.linear import any_requires_grad

JOINED = "_foo_joined"
"""Attribute of a module whose layers are joined."""


class Joined(NamedTuple):
    """Common tensors of several layers, whose buffers are parts of them.

    Attributes:
        parts: the buffers of each layer, in the order of `BUFFERS`.
        tensors: the rows of all layers, in order.
        rows: how many rows each layer has.
    """

    parts: Sequence[tuple[Tensor | None, ...]]
    tensors: Sequence[Any]
    rows: list[int]

    def holds(self, layers: Sequence[nn.Module]) -> bool:
        """Whether the layers still have these buffers; a move replaces them."""
        for layer, (weight, scale, zero) in zip(layers, self.parts):
            own = layer._buffers
            if own.get("foo_weight") is not weight or own.get("foo_scale") is not scale:
                return False
            if own.get("foo_zero") is not zero:
                return False
        return True


class FooJoined(Replacement):
    """Base class of modules with layers that share their input.

    Attributes:
        siblings: the names of these layers.
    """

    siblings: ClassVar[tuple[str, ...]]
    _modules: Any

    def join(self) -> None:
        """Make the siblings' buffers parts of common tensors, if their layouts match."""
        layers = [self._modules[name] for name in self.siblings]
        joined = vars(self).get(JOINED)
        if joined is None or not joined.holds(layers):
            vars(self)[JOINED] = joined_buffers(layers)

    @classmethod
    def forget(cls, module: nn.Module) -> None:
        vars(module).pop(JOINED, None)

    def _apply(self, *arguments: Any, **keywords: Any) -> Any:
        """Join the buffers again after a move or conversion, which is done for each by itself."""
        made = super()._apply(*arguments, **keywords)  # type: ignore[misc]
        self.join()
        return made

    def copied(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name: it for name, it in state.items() if name != JOINED}

    def __setstate__(self, state: Any) -> None:
        """Join the buffers of a copy, which are separate (`FooQuantizedLinear`)."""
        super().__setstate__(state)  # type: ignore[misc]
        self.join()


def joined_buffers(layers: Sequence[nn.Module]) -> Joined | None:
    if not all(isinstance(layer, FooQuantizedLinear) for layer in layers):
        return None
    buffers = [[layer._buffers[name] for name in BUFFERS] for layer in layers]
    layouts = {tuple(layout_of(it) for it in parts) for parts in buffers}
    if len(layouts) > 1:
        return None
    rows = [len(weight) for weight, _, _ in buffers]  # type: ignore[arg-type]
    with torch.inference_mode(False), torch.no_grad():
        tensors: Any = [None if parts[0] is None else torch.cat(parts) for parts in zip(*buffers)]
    for name, tensor in zip(BUFFERS, tensors):
        if tensor is not None:
            for layer, part in zip(layers, tensor.split(rows)):
                layer._buffers[name] = part.detach()
    parts = [tuple(layer._buffers[name] for name in BUFFERS) for layer in layers]
    return Joined(parts, tensors, rows)


def layout_of(tensor: Tensor | None) -> Any:
    """Return the properties that tensors must share to be concatenated by rows."""
    return None if tensor is None else (tensor.shape[1:], tensor.dtype, tensor.device)


def products(module: Any, names: Sequence[str], input: Tensor) -> Sequence[Tensor]:
    """Return the outputs of some layers for one input, by one product if they are joined."""
    layers: Any = [module._modules[name] for name in names]
    # A compiled graph would depend on the identity of the buffers.
    joined = None if torch.compiler.is_compiling() else vars(module).get(JOINED)
    if joined is None or not all(is_lone(layer, input) for layer in layers):
        return [layer(input) for layer in layers]
    biases = [bias for it in layers if (bias := it._parameters["bias"]) is not None]
    for layer in layers:
        current_copy(layer, layer._parameters["weight"], input)
    if len(biases) not in (0, len(layers)) or not joined.holds(layers):
        return [layer(input) for layer in layers]
    weight, scale, zero = joined.tensors
    bias = torch.cat(biases) if biases else None
    output = quantized_product(input, weight, scale, zero, bias)
    return output.split_with_sizes(joined.rows, -1)


def is_lone(layer: Any, input: Tensor) -> bool:
    """Whether a layer multiplies by its buffers and adds its own bias, and does nothing else."""
    own = layer._parameters
    if type(layer).forward is not FooQuantizedLinear.forward or "bias" not in own:
        return False
    weight = own.get("weight")
    if layer.training or has_hooks(layer) or not is_multiplied(input, weight, own["bias"]):
        return False
    return not any_requires_grad(weight)
