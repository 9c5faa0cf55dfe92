"""foo::linear_silu_mul and foo::silu_mul in gated MLPs (SwiGLU)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foo_ops.integrations.transformers.linear import lone_weight
from foo_ops.integrations.transformers.quantized import FooJoined, products
from foo_ops.integrations.transformers.replacement import (
    Replacement,
    can_multiply,
    has_own_forward,
    is_near,
    is_taken,
    stand_in,
)
from foo_ops.library.operators import FLOATING
from foo_ops.ops.linear import linear_silu_mul
from foo_ops.ops.silu_mul import silu_mul

ACTIVATIONS = ("act_fn", "activation_fn")
GATE_AND_UP = ("gate_proj", "up_proj")
Layer = Callable[[Tensor], Tensor]


def gated(module: nn.Module, input: Tensor) -> Tensor:
    """Compute ``silu(gate_proj(input)) * up_proj(input)``."""
    layers = module._modules
    gate_weight, up_weight = lone_weight(layers["gate_proj"]), lone_weight(layers["up_proj"])
    if (
        gate_weight is not None
        and up_weight is not None
        and can_multiply(input, gate_weight, up_weight)
    ):
        return linear_silu_mul(input, gate_weight, up_weight)
    return silu_mul(*products(module, GATE_AND_UP, input))


def has_layers(module: nn.Module, names: set[str]) -> bool:
    """Whether a module consists of these layers and an activation only."""
    if not names <= module._modules.keys() or has_own_forward(module):
        return False
    others = module._modules.keys() - names - set(ACTIVATIONS)
    return not others and not module._parameters and not module._buffers


def agrees(module: Any, widths: dict[str, int], gate_and_up: Callable[..., Any]) -> bool:
    """Whether a module's own forward computes the same as ours in each dtype, on trial layers.

    Some rows are large, so that clamping of the factors is noticed, and in float16 clamping of
    overflow.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def layer(weight: Tensor) -> Layer:
        return lambda input: input @ weight.to(input.dtype)

    width = 8
    layers = {name: layer(random(width, columns)) for name, columns in widths.items()}
    sizes = torch.tensor([0.01, 1.0, 100.0, 10000.0], dtype=torch.float64)
    input = random(2, 4, width) * sizes[:, None]
    twin: Any = stand_in(module, modules=layers)

    def agrees_in(dtype: torch.dtype) -> bool:
        try:
            own = type(module).forward(twin, input.to(dtype))
            gate, up = gate_and_up(layers, input.to(dtype))
        except Exception:  # an MLP that needs more of its layers is another kind
            return False
        return is_near(own, layers["down_proj"](F.silu(gate) * up))

    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return all(map(agrees_in, FLOATING))


class FooGatedMLP(FooJoined):
    """Replaces MLPs such as Llama's: ``down_proj(silu(gate_proj(x)) * up_proj(x))``."""

    siblings = GATE_AND_UP

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        def gate_and_up(layers: dict[str, Layer], x: Tensor) -> Any:
            return layers["gate_proj"](x), layers["up_proj"](x)

        widths = {"gate_proj": 8, "up_proj": 8, "down_proj": 8}
        return has_layers(module, set(widths)) and agrees(module, widths, gate_and_up)

    def forward(self, x: Tensor) -> Any:
        if not is_taken(x):
            return super().forward(x)  # type: ignore[misc]
        return self._modules["down_proj"](gated(self, x))  # type: ignore[arg-type]


class FooPackedMLP(Replacement):
    """Replaces MLPs such as Phi-3's, where one layer computes gate and up, side by side."""

    gate_up_proj: Layer
    down_proj: Layer

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        def gate_and_up(layers: dict[str, Layer], x: Tensor) -> Any:
            return layers["gate_up_proj"](x).chunk(2, dim=-1)

        widths = {"gate_up_proj": 16, "down_proj": 8}
        return has_layers(module, set(widths)) and agrees(module, widths, gate_and_up)

    def forward(self, hidden_states: Tensor) -> Any:
        if not is_taken(hidden_states):
            return super().forward(hidden_states)  # type: ignore[misc]
        return self.down_proj(silu_mul(*self.gate_up_proj(hidden_states).chunk(2, dim=-1)))
