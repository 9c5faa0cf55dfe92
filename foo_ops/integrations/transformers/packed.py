"""Linear layers and embeddings whose weights are integers of 4 or 8 bits, and nothing else."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import logging

from foo_ops.integrations.transformers.quantized import quantized_product, ready_output
from foo_ops.integrations.transformers.replacement import can_multiply, has_hooks
from foo_ops.ops.arguments import compute_type
from foo_ops.ops.linear_quantized import dequantize_weight

logger = logging.get_logger(__name__)
UNTRAINED = (
    "Weights of 4 and 8 bits stay as they are in training: only other parameters are trained, such "
    "as adapters (peft)."
)


class Integers(NamedTuple):
    """The weights of a linear layer with N outputs and K inputs.

    Attributes:
        weight: (N, K / 2) uint8 with 4 bits, as `foo_ops.quantize_weight` packs them, or with a
            table as `foo_ops.linear_table4` reads them; or (N, K) int8, or uint8 with the bits of
            float8_e4m3fn.
        scale: (N, K / group_size), or (N,) with 8 bits; with a table and for float8_e4m3fn float32
            or float64.
        zero: of scale's shape for integers of 4 bits, else None.
        order: (K,) int64, the inputs in the order of weight's columns; None if that is their own.
        table: (16,), the numbers of codes of 4 bits, of scale's dtype; None for integers.
    """

    weight: Tensor
    scale: Tensor
    zero: Tensor | None = None
    order: Tensor | None = None
    table: Tensor | None = None


def bits_of(zero: Tensor | None, table: Tensor | None = None) -> int:
    """Return the bits of a weight, by the tensors of `Integers` that only 4 bits have."""
    return 8 if zero is None and table is None else 4


def fits(scale: Tensor, is_wide: bool, dtype: torch.dtype) -> bool:
    """Whether inputs of a dtype are multiplied by weights with such scales.

    Args:
        is_wide: whether scales are of the compute type, not of the input's dtype.
    """
    return compute_type(dtype) is scale.dtype if is_wide else dtype is scale.dtype


def keep_wide(module: nn.Module, before: dict[str, Tensor | None]) -> None:
    """Keep buffers of the compute type as they were where a model is converted to 16 bits."""
    for name, tensor in before.items():
        now = module._buffers[name]
        if tensor is not None and now is not None and compute_type(now.dtype) is not now.dtype:
            module._buffers[name] = tensor.to(now.device)


class FooPackedLinear(nn.Linear):
    """A linear layer with weights of 4 or 8 bits, multiplied as they are.

    It is a `torch.nn.Linear`, so that peft wraps it by itself. Its integers, scales and zeros are
    buffers: a state_dict has them, and an optimizer does not. Gradients flow through it to its
    input. An input of another floating dtype than the scales, as after
    ``peft.prepare_model_for_kbit_training``, is converted to theirs, and the output back.

    Attributes:
        weight, scale, zero, order, table: see `Integers`.
        stored_format: the `Format` of formats.py that the layer was read from, or None.
        foo_activations: bits to which the input is rounded for integers: 8 or None.
        foo_ready: an input and the output for it: see `FooQuantizedLinear`.
    """

    foo_activations: int | None = None
    foo_ready: tuple[Tensor, Tensor] | None = None
    weight: Tensor
    scale: Tensor
    zero: Tensor | None
    order: Tensor | None
    table: Tensor | None
    stored_format: Any

    def __init__(
        self, integers: Integers, bias: nn.Parameter | None = None, stored_format: Any = None
    ) -> None:
        """Make a layer of packed weights and a bias (N,)."""
        nn.Module.__init__(self)
        self.register_parameter("bias", bias)
        self.hold(integers, stored_format)

    @classmethod
    def take_over(cls, layer: nn.Linear, integers: Integers) -> None:
        """Turn a linear layer into a packed one, which has no reference to the layer's weight."""
        del layer.weight
        layer.__class__ = cls
        layer.hold(integers)  # type: ignore[operator]

    def hold(self, integers: Integers, stored_format: Any = None) -> None:
        for name, tensor in integers._asdict().items():
            self.register_buffer(name, tensor)
        per_byte = 8 // self.bits
        self.out_features, self.in_features = len(integers.weight), per_byte * self.weight.shape[1]
        self.stored_format = stored_format

    @property
    def bits(self) -> int:
        return bits_of(self.zero, self.table)

    @property
    def is_float(self) -> bool:
        """Whether weights are float8_e4m3fn."""
        return self.bits == 8 and self.weight.dtype == torch.uint8

    @property
    def has_wide_scale(self) -> bool:
        """Whether scales are of the compute type, not of the input's dtype."""
        return self.is_float or self.table is not None

    @property
    def group_size(self) -> int | None:
        """Weights that share a scale and a zero; None for those of a whole row."""
        return None if self.scale.dim() == 1 else self.in_features // self.scale.shape[1]

    def forward(self, input: Tensor) -> Tensor:
        if (ready := ready_output(self, input)) is not None:
            return ready
        if self.order is not None:
            input = input.index_select(-1, self.order)
        dtype = input.dtype
        if not self.takes(dtype) and not torch.is_autocast_enabled(input.device.type):
            input = input.to(self.scale.dtype)
        output = quantized_product(
            input, self.weight, self.scale, self.zero, self.bias, self.foo_activations, self.table
        )
        return output if output.dtype is dtype or input.dtype is dtype else output.to(dtype)

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether inputs of a dtype are multiplied as they are."""
        return fits(self.scale, self.has_wide_scale, dtype)

    @property
    def names_to_join(self) -> tuple[str, ...] | None:
        """Names of the buffers that layers with the same input may have in common (`FooJoined`)."""
        return Integers._fields[:3] if self.order is None else None

    def joins(self, input: Tensor) -> bool:
        """Whether a call multiplies by these buffers and adds the bias, and does nothing else."""
        of_dtype = () if self.has_wide_scale else (self.scale,)
        return (
            not has_hooks(self)
            and self.takes(input.dtype)
            and can_multiply(input, *of_dtype, self.bias)
        )

    def _apply(self, *arguments: Any, **keywords: Any) -> Any:
        before = dict(self._buffers)
        made = super()._apply(*arguments, **keywords)
        if self.has_wide_scale:
            keep_wide(self, {name: before[name] for name in ("scale", "table")})
        return made

    def train(self, mode: bool = True) -> Any:
        if mode and not self.training:
            logger.warning_once(UNTRAINED)
        return super().train(mode)

    def reset_parameters(self) -> None:
        """Leave the weights as they are: there are no other ones to start from."""

    def extra_repr(self) -> str:
        groups = "" if self.group_size is None else f" in groups of {self.group_size}"
        groups += "" if self.table is None else " with a table"
        return (
            f"{self.in_features} -> {self.out_features}, {self.bits} bits{groups}, "
            f"bias={self.bias is not None}"
        )


class FooPackedEmbedding(nn.Embedding):
    """An embedding whose rows are integers of 4 or 8 bits, as in `FooPackedLinear`.

    Attributes:
        weight, scale, zero: see `Integers`, which have no table.
    """

    weight: Tensor
    scale: Tensor
    zero: Tensor | None

    def __init__(self, integers: Integers, padding_idx: int | None = None) -> None:
        nn.Module.__init__(self)
        self.padding_idx = padding_idx
        for name in ("weight", "scale", "zero"):
            self.register_buffer(name, getattr(integers, name))
        per_byte = 8 // bits_of(self.zero)
        self.num_embeddings = len(integers.weight)
        self.embedding_dim = per_byte * self.weight.shape[1]

    def forward(self, input: Tensor) -> Tensor:
        rows = input.flatten()
        zero = None if self.zero is None else self.zero[rows]
        numbers = dequantize_weight(self.weight[rows], self.scale[rows], zero)
        return numbers.unflatten(0, input.shape)

    def reset_parameters(self) -> None:
        """Leave the weights as they are: there are no other ones to start from."""

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {bits_of(self.zero)} bits"
