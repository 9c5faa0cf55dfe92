"""Experts of a mixture whose weights are integers of 4 or 8 bits, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from foo_ops.integrations.transformers.experts import (
    FLAGS,
    gate_of,
    names_of_weights,
    weights_of,
)
from foo_ops.integrations.transformers.packed import (
    FooPackedLinear,
    Integers,
    fits,
    keep_wide,
)
from foo_ops.ops.experts.quantized import are_fp8, moe_experts_quantized


class Parts(NamedTuple):
    """The layers of each expert whose rows are joined in one weight.

    Attributes:
        weight: the name of the model's parameter.
        layers: their names in a file, in order.
    """

    weight: str
    layers: tuple[str, ...]


class FooPackedExperts(nn.Module):
    """Experts with weights of 4 or 8 bits, multiplied as they are.

    Their buffers are ``gate_up_proj`` and ``down_proj``, as `foo_ops.moe_experts_quantized` takes
    them, each with ``_scale`` and ``_zero``. Gradients flow through them to their input, which is
    converted as in `FooPackedLinear`.

    Attributes:
        parts: of both weights.
        stored_formats: of each layer of an expert, which write it to a file.
        options: of `foo_ops.moe_experts`, those of the model's own gate.
    """

    def __init__(
        self, own: Any, parts: list[Parts], weights: list[Integers], stored_formats: dict[str, Any]
    ) -> None:
        """Make the experts that stand for a module of the model's own class.

        Args:
            parts: of both weights, in the order of `names_of_weights`.
            weights: in the same order, of all experts: (experts, outputs, ...).
        """
        super().__init__()
        self.num_experts: int = len(weights_of(own)[0])
        self.options: dict[str, Any] = gate_of(own)  # type: ignore[assignment]
        self.parts = parts
        self.stored_formats = stored_formats
        for (weight, _), integers in zip(parts, weights):
            for name, tensor in zip(suffixed(weight), integers):
                self.register_buffer(name, tensor)

    @classmethod
    def of_layers(
        cls, own: Any, parts: list[Parts], read: Callable[[str], FooPackedLinear]
    ) -> FooPackedExperts:
        """Join the layers that `read` makes from their names ``expert.layer``."""
        experts, formats = len(weights_of(own)[0]), dict[str, Any]()
        weights = [fused(experts, names, read, formats) for _, names in parts]
        return cls(own, parts, weights, formats)

    def layers(self) -> Iterator[tuple[str, FooPackedLinear]]:
        """Yield the layers of all experts, with their names in a file."""
        for weight, names in self.parts:
            integers, scale, zero = (self._buffers[it] for it in suffixed(weight))
            for expert in range(self.num_experts):
                tensors = [
                    [None] * len(names) if it is None else it[expert].chunk(len(names))
                    for it in (integers, scale, zero)
                ]
                for name, *parts in zip(names, *tensors):
                    made = Integers(*parts)
                    yield f"{expert}.{name}", FooPackedLinear(made, None, self.stored_formats[name])

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tensors: Any = [self._buffers[it] for weight, _ in self.parts for it in suffixed(weight)]
        weight, scale, zero, *_ = tensors
        dtype = hidden_states.dtype
        has_autocast = torch.is_autocast_enabled(hidden_states.device.type)
        if not (fits(scale, are_fp8(weight, zero), dtype) or has_autocast):
            hidden_states, top_k_weights = (
                it.to(scale.dtype) for it in (hidden_states, top_k_weights)
            )
        output = moe_experts_quantized(
            hidden_states, top_k_index, top_k_weights, *tensors, **self.options
        )
        return output if hidden_states.dtype is dtype else output.to(dtype)

    def _apply(self, *arguments: Any, **keywords: Any) -> Any:
        before = dict(self._buffers)
        made = super()._apply(*arguments, **keywords)
        for name, _ in self.parts:
            _, scale, zero = suffixed(name)
            if are_fp8(self.get_buffer(name), self._buffers[zero]):
                keep_wide(self, {scale: before[scale]})
        return made

    def extra_repr(self) -> str:
        bits = 8 if self._buffers[f"{self.parts[0].weight}_zero"] is None else 4
        return f"{self.num_experts} experts, {bits} bits"


def fused(
    experts: int,
    names: tuple[str, ...],
    read: Callable[[str], FooPackedLinear],
    formats: dict[str, Any],
) -> Integers:
    """Join the layers of all experts, and note the formats by the names of layers."""
    made: list[Tensor | None] = [None] * 3
    for expert in range(experts):
        for place, name in enumerate(names):
            layer = read(f"{expert}.{name}")
            formats[name] = layer.stored_format
            for number, tensor in enumerate((layer.weight, layer.scale, layer.zero)):
                if tensor is None:
                    continue
                rows, *others = tensor.shape
                whole = made[number]
                if whole is None:
                    sizes = (experts, rows * len(names), *others)
                    whole = made[number] = tensor.new_empty(sizes)
                whole[expert, rows * place : rows * (place + 1)] = tensor
    return Integers(*made)  # type: ignore[arg-type]


def suffixed(weight: str) -> tuple[str, str, str]:
    return weight, f"{weight}_scale", f"{weight}_zero"


def can_be_packed(module: Any) -> bool:
    """Whether a module has experts that `FooPackedExperts` can stand for."""
    if not all(hasattr(module, flag) for flag in FLAGS):
        return False
    has_others = module.has_post_expert_norm or module.has_bias
    return not has_others and gate_of(module) is not None


def sizes_of_experts(module: Any, weight: str) -> tuple[int, int]:
    """Return the numbers of outputs and inputs of each expert's weight."""
    up, down, *_ = weights_of(module)
    rows, columns = (up if weight == names_of_weights(module)[0] else down).shape[1:]
    return rows, columns


def packed_layers(model: nn.Module) -> Iterator[tuple[str, FooPackedLinear]]:
    """Yield the packed layers of a model, those of experts too, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, FooPackedLinear):
            yield name, module
        elif isinstance(module, FooPackedExperts):
            for last, layer in module.layers():
                yield f"{name}.{last}", layer
