"""foo::add_rms_norm between the blocks of a decoder's layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from foo_ops.integrations.transformers.norms import add_norm
from foo_ops.integrations.transformers.replacement import (
    Replacement,
    has_own_forward,
    is_near,
    stand_in,
)
from foo_ops.library.operators import FLOATING

WIDTH = 8


def first(output: Any) -> Any:
    """Return what a block adds to its input; some give more, as the scores of a router."""
    return output[0] if isinstance(output, tuple) else output


class FooDecoderLayer(Replacement):
    """The base of layers of attention and an MLP, around which the residual goes.

    Attributes:
        blocks: names of the layers that it must consist of.
        defaults: of the parameters of the module's own forward, behind the hidden states.
    """

    blocks: frozenset[str]
    defaults: dict[str, Any]
    _modules: Any

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        if module._modules.keys() != cls.blocks or has_own_forward(module):
            return False
        defaults = defaults_of(type(module))
        if module._parameters or module._buffers or defaults is None:
            return False
        names = {*defaults, "other"}
        return any(agrees(module, cls, names, gives_pair) for gives_pair in (False, True))

    @classmethod
    def attributes(cls, original: type[nn.Module]) -> dict[str, Any]:
        return {"defaults": defaults_of(original)}

    def forward(self, hidden_states: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        if len(arguments) > len(self.defaults):
            most = 1 + len(self.defaults)
            raise TypeError(
                f"forward() takes {most} positional arguments, got {1 + len(arguments)}"
            )
        named = dict(zip(self.defaults, arguments, strict=False))
        return self.run(hidden_states, {**self.defaults, **named, **keywords})

    def run(self, hidden_states: Tensor, keywords: dict[str, Any]) -> Tensor:
        """Compute the layer; ``keywords`` are for its attention."""
        raise NotImplementedError


class FooPreNormLayer(FooDecoderLayer):
    """In the place of layers as of Llama, with a norm before each block."""

    blocks = frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})

    def run(self, hidden_states: Tensor, keywords: dict[str, Any]) -> Tensor:
        # Attributes would be looked for in three places before the modules.
        blocks = self._modules
        normalised = blocks["input_layernorm"](hidden_states)
        attention = first(blocks["self_attn"](hidden_states=normalised, **keywords))
        norm = blocks["post_attention_layernorm"]
        normalised, residual = add_norm(norm, attention, hidden_states)
        return residual + first(blocks["mlp"](normalised))


class FooSandwichLayer(FooDecoderLayer):
    """In the place of layers as of Gemma 2, with a norm before and after each block."""

    blocks = FooPreNormLayer.blocks | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}

    def run(self, hidden_states: Tensor, keywords: dict[str, Any]) -> Tensor:
        blocks = self._modules
        normalised = blocks["input_layernorm"](hidden_states)
        attention = first(blocks["self_attn"](hidden_states=normalised, **keywords))
        attention = blocks["post_attention_layernorm"](attention)
        norm = blocks["pre_feedforward_layernorm"]
        normalised, residual = add_norm(norm, attention, hidden_states)
        return residual + blocks["post_feedforward_layernorm"](first(blocks["mlp"](normalised)))


LAYERS = (FooPreNormLayer, FooSandwichLayer)


# ----------------------------------------------------------------------------------- recognition


def defaults_of(original: type[nn.Module]) -> dict[str, Any] | None:
    """Return the defaults of a layer's forward, or None where it has another form."""
    signature = inspect.signature(inspect.unwrap(original.forward))
    _, hidden_states, *others = signature.parameters.values()
    named = [it for it in others if it.kind is not inspect.Parameter.VAR_KEYWORD]
    has_defaults = all(it.default is not inspect.Parameter.empty for it in named)
    if hidden_states.name != "hidden_states" or not has_defaults:
        return None
    return {it.name: it.default for it in named}


def agrees(
    module: nn.Module, replacement: type[FooDecoderLayer], names: set[str], gives_pair: bool
) -> bool:
    """Whether a layer's own forward calls its blocks as ours does, and adds what they give.

    In each dtype, and with a row whose sums overflow in float16, since some bound them there.

    Args:
        names: of what must reach its attention.
        gives_pair: its MLP gives more than the hidden states.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def block(weight: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda hidden_states: hidden_states @ weight.to(hidden_states.dtype)

    calls: list[dict[str, Any]] = []

    def attention(hidden_states: Tensor, **keywords: Any) -> tuple[Tensor, None]:
        calls.append(keywords)
        return hidden_states.flip(1), None

    blocks: dict[str, Any] = {
        name: block(0.1 * random(WIDTH, WIDTH)) for name in sorted(replacement.blocks)
    }
    mlp = blocks["mlp"]
    twin = stand_in(module, modules={
        **blocks,
        "self_attn": attention,
        "mlp": (lambda hidden_states: (mlp(hidden_states), None)) if gives_pair else mlp,
    })  # fmt: skip
    sizes = torch.tensor([0.01, 1.0, 100.0, 30000.0], dtype=torch.float64)
    input = random(3, 4, WIDTH) * sizes[:, None]
    keywords = {name: object() for name in names}

    def agrees_in(dtype: torch.dtype) -> bool:
        calls.clear()
        try:
            own = inspect.unwrap(type(module).forward)(twin, input.to(dtype), **keywords)
            ours = replacement.run(twin, input.to(dtype), keywords)  # type: ignore[arg-type]
        except Exception:  # what fails with plain blocks is another form
            return False
        return is_near(own, ours) and calls == [keywords, keywords]

    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return all(map(agrees_in, FLOATING))
