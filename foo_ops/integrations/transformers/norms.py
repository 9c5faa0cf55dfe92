"""foo::rms_norm in the norms of models, and foo::add_rms_norm between a decoder's blocks."""

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
    is_near,
    memory_order,
    permuted_back,
    stand_in,
)
from foo_ops.library.operators import FLOATING
from foo_ops.ops.rms_norm import composite

# -------------------------------------------------------------------------------------------- norms

# foo::rms_norm in the norms of models.


def eps_of(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps"):
        if isinstance(eps := getattr(module, name, None), float):
            return eps
    return None


def is_norm(module: nn.Module, weight_of: Callable[[Tensor], Tensor], keeps_order: bool) -> bool:
    """Whether a module is called a norm, and agrees with an RMS norm on random numbers.

    The rows include some where eps matters and some where it does not; their mean is not zero.

    Args:
        weight_of: returns the factor of the norm, given the module's weight.
        keeps_order: whether results have the memory order of their inputs, and are not always
            contiguous.
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
    """Whether a module's own forward returns the norm in the dtype of its input."""
    with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=autocast):
        try:
            own = type(module).forward(stand_in(module, {"weight": weight}), input)
        except Exception:  # a norm accepts an ordinary tensor
            return False
    memory = torch.preserve_format if keeps_order else torch.contiguous_format
    like = torch.empty_like(input, memory_format=memory)
    if not isinstance(own, Tensor) or own.shape != like.shape:
        return False
    if own.dtype != like.dtype or own.stride() != like.stride():
        return False
    exact = composite(input.double(), weight_of(weight.double()), eps=eps_of(module))  # type: ignore[arg-type]
    # Such norms compute in float32, also for float64, and may round before they multiply by the
    # weight.
    room = max(4 * torch.finfo(own.dtype).eps, 64 * torch.finfo(torch.float32).eps)
    return torch.allclose(own.double(), exact, rtol=room, atol=0)


def same(weight: Tensor) -> Tensor:
    return weight


def one_more(weight: Tensor) -> Tensor:
    """Return the factor of Gemma's norms, in the dtype that they compute in."""
    return 1 + weight.to(torch.promote_types(weight.dtype, torch.float32))


class FooNorm(Replacement):
    """Base class of norms with a weight.

    Attributes:
        keeps_order: whether results have the memory order of their inputs, and are not always
            contiguous.
    """

    weight: Tensor
    keeps_order: ClassVar[bool] = True
    _parameters: Any

    @staticmethod
    def weight_of(weight: Tensor) -> Tensor:
        """Return the factor of the norm."""
        raise NotImplementedError

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        return is_norm(module, cls.weight_of, cls.keeps_order)

    def forward(self, hidden_states: Tensor) -> Any:
        own = self._parameters
        # Attribute lookup is slow, and only needed under a parametrization.
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
    """Replaces norms such as those of Llama and gpt-oss."""

    weight_of = staticmethod(same)


class FooContiguousRMSNorm(FooRMSNorm):
    """Replaces `torch.nn.RMSNorm`."""

    keeps_order = False


class FooOffsetRMSNorm(FooNorm):
    """Replaces Gemma's norms, which multiply by 1 + weight."""

    weight_of = staticmethod(one_more)


NORMS = (FooRMSNorm, FooContiguousRMSNorm, FooOffsetRMSNorm)


def add_norm(norm: Any, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm of a sum, and the sum, in one pass if the norm is one of ours."""
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


# ------------------------------------------------------------------------------------ norms of sums

# foo::add_rms_norm between the blocks of a decoder's layers.


WIDTH = 8


def first(output: Any) -> Any:
    """Return what a block adds to its input; some blocks return more, such as router scores."""
    return output[0] if isinstance(output, tuple) else output


class FooDecoderLayer(Replacement):
    """Base class of decoder layers: attention and an MLP with residual connections.

    Attributes:
        blocks: names of the submodules, which must be all.
        defaults: default arguments of the module's own forward, behind the hidden states.
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
        return any(sum_agrees(module, cls, names, gives_pair) for gives_pair in (False, True))

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
    """Replaces layers such as Llama's, with a norm before each block."""

    blocks = frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})

    def run(self, hidden_states: Tensor, keywords: dict[str, Any]) -> Tensor:
        # Attribute lookup would search three other places before the modules.
        blocks = self._modules
        normalised = blocks["input_layernorm"](hidden_states)
        attention = first(blocks["self_attn"](hidden_states=normalised, **keywords))
        norm = blocks["post_attention_layernorm"]
        normalised, residual = add_norm(norm, attention, hidden_states)
        return residual + first(blocks["mlp"](normalised))


class FooSandwichLayer(FooDecoderLayer):
    """Replaces layers such as Gemma 2's, with a norm before and after each block."""

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
    """Return the default arguments of a layer's forward, or None if its signature is another."""
    signature = inspect.signature(inspect.unwrap(original.forward))
    _, hidden_states, *others = signature.parameters.values()
    named = [it for it in others if it.kind is not inspect.Parameter.VAR_KEYWORD]
    has_defaults = all(it.default is not inspect.Parameter.empty for it in named)
    if hidden_states.name != "hidden_states" or not has_defaults:
        return None
    return {it.name: it.default for it in named}


def sum_agrees(
    module: nn.Module, replacement: type[FooDecoderLayer], names: set[str], gives_pair: bool
) -> bool:
    """Whether a layer's own forward calls its blocks as ours does, and adds their results.

    Tried in each dtype, with a row whose sums overflow in float16, since some layers clamp them
    there.

    Args:
        names: keywords that must reach its attention.
        gives_pair: its MLP returns more than the hidden states.
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
        except Exception:  # a layer that needs more of its blocks is another kind
            return False
        return is_near(own, ours) and calls == [keywords, keywords]

    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return all(map(agrees_in, FLOATING))
