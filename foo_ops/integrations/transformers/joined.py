"""Quantised layers that have one input, and one product for all: their weights lie together."""

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
"""The attribute of a module whose layers are joined."""


class Joined(NamedTuple):
    """What the buffers of some layers are parts of.

    Attributes:
        parts: the buffers of each layer, in the order of `BUFFERS`.
        tensors: the rows of all, one layer after the other.
        rows: how many are of each.
    """

    parts: Sequence[tuple[Tensor | None, ...]]
    tensors: Sequence[Any]
    rows: list[int]

    def holds(self, layers: Sequence[nn.Module]) -> bool:
        """Whether the layers still have these buffers, and not others as after a move."""
        for layer, (weight, scale, zero) in zip(layers, self.parts):
            own = layer._buffers
            if own.get("foo_weight") is not weight or own.get("foo_scale") is not scale:
                return False
            if own.get("foo_zero") is not zero:
                return False
        return True


class FooJoined(Replacement):
    """The base of modules in which layers have one input.

    Attributes:
        siblings: the names of these layers.
    """

    siblings: ClassVar[tuple[str, ...]]
    _modules: Any

    def join(self) -> None:
        """Let the buffers of the siblings be parts of common tensors, if they are alike."""
        layers = [self._modules[name] for name in self.siblings]
        joined = vars(self).get(JOINED)
        if joined is None or not joined.holds(layers):
            vars(self)[JOINED] = joined_buffers(layers)

    @classmethod
    def forget(cls, module: nn.Module) -> None:
        vars(module).pop(JOINED, None)

    def _apply(self, *arguments: Any, **keywords: Any) -> Any:
        """Join again what was moved or converted, each buffer on its own."""
        made = super()._apply(*arguments, **keywords)  # type: ignore[misc]
        self.join()
        return made

    def copied(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name: it for name, it in state.items() if name != JOINED}

    def __setstate__(self, state: Any) -> None:
        """Join what is no longer joined in a copy (`FooQuantizedLinear`)."""
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
    """Return what tensors must have in common for one to hold the rows of both."""
    return None if tensor is None else (tensor.shape[1:], tensor.dtype, tensor.device)


def products(module: Any, names: Sequence[str], input: Tensor) -> Sequence[Tensor]:
    """Return what some layers of a module give for one input: by one product if they are joined."""
    layers: Any = [module._modules[name] for name in names]
    # A graph that is compiled would depend on which tensors the buffers are.
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
