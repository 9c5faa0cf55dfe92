"""foo::rms_norm and foo::layer_norm in the norms of models, also of sums between blocks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
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
from foo_ops.ops.layer_norm import composite as layer_norm_composite
from foo_ops.ops.rms_norm import composite as rms_norm_composite

# -------------------------------------------------------------------------------------------- norms

# foo::rms_norm and foo::layer_norm in the norms of models.


def eps_of(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps"):
        if isinstance(eps := getattr(module, name, None), float):
            return eps
    return None


def is_norm(module: nn.Module, replacement: type[FooNorm]) -> bool:
    """Whether a module is called a norm, and agrees with one of ours on random numbers.

    The rows include some where eps matters and some where it does not; their mean is not zero.
    """
    given, eps = module._parameters, eps_of(module)
    if "Norm" not in type(module).__name__ or has_own_forward(module):
        return False
    weight = given.get("weight")
    if weight is None or weight.dim() != 1 or eps is None:
        return False
    if not given.keys() <= set(replacement.parameter_names) or module._modules or module._buffers:
        return False
    if any(it is not None and it.shape != weight.shape for it in given.values()):
        return False
    if len(inspect.signature(type(module).forward).parameters) != 2:
        return False
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1.0, eps**0.5, 100.0])[:, None]
    input = sizes * (torch.randn(2, 3, len(weight), generator=generator) + 0.5)
    input = input.transpose(0, 1)
    others = {
        name: None if it is None else torch.randn(len(weight), generator=generator)
        for name, it in given.items()
    }
    return all(
        agrees(module, input.to(dtype), others, replacement, autocast)
        for dtype in FLOATING
        for autocast in (False, True)
    )


def agrees(
    module: nn.Module,
    input: Tensor,
    parameters: Mapping[str, Tensor | None],
    replacement: type[FooNorm],
    autocast: bool,
) -> bool:
    """Whether a module's own forward returns the norm in the dtype of its input."""
    given = {name: None if it is None else it.to(input.dtype) for name, it in parameters.items()}
    with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=autocast):
        try:
            own = type(module).forward(stand_in(module, given), input)
        except Exception:  # a norm accepts an ordinary tensor
            return False
    memory = torch.preserve_format if replacement.keeps_order else torch.contiguous_format
    like = torch.empty_like(input, memory_format=memory)
    if not isinstance(own, Tensor) or own.shape != like.shape:
        return False
    if own.dtype != like.dtype or own.stride() != like.stride():
        return False
    exact = replacement.exact(input, given, eps_of(module))
    # Such norms compute in float32, also for float64, and may round before they multiply by the
    # weight.
    room = max(4 * torch.finfo(own.dtype).eps, 64 * torch.finfo(torch.float32).eps)
    return bool(((own - exact).abs() <= room * exact.abs().amax(-1, keepdim=True)).all())


def one_more(weight: Tensor) -> Tensor:
    """Return the factor of Gemma's norms, in the dtype that they compute in."""
    return 1 + weight.to(torch.promote_types(weight.dtype, torch.float32))


class FooNorm(Replacement):
    """Base class of norms with a weight.

    Attributes:
        keeps_order: whether results have the memory order of their inputs, and are not always
            contiguous.
        parameter_names: names of the module's parameters.
        operator: the operator of the norm.
        sum_operator: the operator of a sum and its norm.
        composite: the norm by torch's operators.
    """

    keeps_order: ClassVar[bool]
    parameter_names: ClassVar[tuple[str, ...]]
    operator: ClassVar[Any]
    sum_operator: ClassVar[Any]
    composite: ClassVar[Callable[..., Tensor]]
    _parameters: Any

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        return is_norm(module, cls)

    @staticmethod
    def arguments(weight: Tensor, *bias: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the operator's arguments behind its input, given the module's parameters."""
        return weight, *bias

    @classmethod
    def exact(cls, input: Tensor, parameters: Mapping[str, Tensor | None], eps: Any) -> Tensor:
        """Compute the norm in float64."""
        wide = {name: None if it is None else it.double() for name, it in parameters.items()}
        arguments = cls.arguments(*map(wide.get, cls.parameter_names))  # type: ignore[arg-type]
        return cls.composite(input.double(), *arguments, eps=eps)

    def given(self) -> list[Any]:
        """Return the parameters."""
        own = self._parameters
        # Attribute lookup is slow, and only needed under a parametrization.
        return [own[it] if it in own else getattr(self, it, None) for it in self.parameter_names]

    def forward(self, hidden_states: Tensor) -> Any:
        given = self.given()
        if not are_alike(hidden_states, *given):
            return super().forward(hidden_states)  # type: ignore[misc]
        norm, arguments = self.operator.default, self.arguments(*given)
        eps = eps_of(self)  # type: ignore[arg-type]
        if hidden_states.is_contiguous() or not self.keeps_order:
            return norm(hidden_states, *arguments, eps=eps)
        order = memory_order(hidden_states)
        if order is None:
            return super().forward(hidden_states)  # type: ignore[misc]
        return permuted_back(norm(hidden_states.permute(order), *arguments, eps=eps), order)


class FooRMSNorm(FooNorm):
    """Replaces norms such as those of Llama and gpt-oss."""

    keeps_order = True
    parameter_names = ("weight",)
    operator = torch.ops.foo.rms_norm
    sum_operator = torch.ops.foo.add_rms_norm
    composite = staticmethod(rms_norm_composite)


class FooContiguousRMSNorm(FooRMSNorm):
    """Replaces `torch.nn.RMSNorm`."""

    keeps_order = False


class FooOffsetRMSNorm(FooRMSNorm):
    """Replaces Gemma's norms, which multiply by 1 + weight."""

    @staticmethod
    def arguments(weight: Tensor, *bias: Tensor | None) -> tuple[Tensor | None, ...]:
        return one_more(weight), *bias


class FooLayerNorm(FooNorm):
    """Replaces `torch.nn.LayerNorm`."""

    keeps_order = False
    parameter_names = ("weight", "bias")
    operator = torch.ops.foo.layer_norm
    sum_operator = torch.ops.foo.add_layer_norm
    composite = staticmethod(layer_norm_composite)


class FooOwnLayerNorm(FooLayerNorm):
    """Replaces layer norms that are written in elementwise operators, such as Cohere's."""

    keeps_order = True

    def forward(self, hidden_states: Tensor) -> Any:
        # The operator returns float32 as torch's does, and such norms the dtype of their input.
        if not hidden_states.is_cpu and torch.is_autocast_enabled(hidden_states.device.type):
            return self.original.forward(self, hidden_states)
        return super().forward(hidden_states)


class FooOffsetLayerNorm(FooOwnLayerNorm):
    """Replaces layer norms that multiply by 1 + weight, such as Nemotron's."""

    keeps_order = False
    arguments = staticmethod(FooOffsetRMSNorm.arguments)


NORMS = (FooRMSNorm, FooContiguousRMSNorm, FooOffsetRMSNorm)
LAYER_NORMS = (FooLayerNorm, FooOwnLayerNorm, FooOffsetLayerNorm)


def add_norm(norm: Any, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm of a sum, and the sum, in one pass if the norm is one of ours."""
    is_ours = getattr(type(norm), "forward", None) is FooNorm.forward and not has_hooks(norm)
    given = norm.given() if is_ours else ()
    if (
        not is_ours
        or not are_alike(input, residual, *given)
        or input.shape != residual.shape
        or not (input.is_contiguous() and residual.is_contiguous())
        # The norm may have another dtype than the sum.
        or (not input.is_cpu and torch.is_autocast_enabled(input.device.type))
    ):
        sum = residual + input
        return norm(sum), sum
    arguments = norm.arguments(*given)
    return norm.sum_operator.default(input, residual, *arguments, eps=eps_of(norm))


# ------------------------------------------------------------------------------------ norms of sums

# foo::add_rms_norm and foo::add_layer_norm between the blocks of layers.


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


class FooPostNormOutput(Replacement):
    """Replaces the ends of BERT's blocks: ``LayerNorm(dropout(dense(x)) + input_tensor)``."""

    blocks = frozenset({"dense", "dropout", "LayerNorm"})
    _modules: Any

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        if module._modules.keys() != cls.blocks or has_own_forward(module):
            return False
        names = list(inspect.signature(type(module).forward).parameters)
        if module._parameters or module._buffers or names[1:] != ["hidden_states", "input_tensor"]:
            return False
        return output_agrees(module, cls)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        blocks = self._modules
        output = blocks["dropout"](blocks["dense"](hidden_states))
        # In this order, which the errors of some dtypes name.
        return add_norm(blocks["LayerNorm"], input_tensor, output)[0]


LAYERS = (FooPreNormLayer, FooSandwichLayer, FooPostNormOutput)


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


def output_agrees(module: nn.Module, replacement: type[FooPostNormOutput]) -> bool:
    """Whether a module's own forward adds the residual to its dense layer, as ours does.

    Tried in each dtype; the blocks differ, so that their order matters.
    """
    generator = torch.Generator().manual_seed(0)
    hidden, residual, weight = torch.randn(
        3, 4, WIDTH, WIDTH, generator=generator, dtype=torch.float64
    )
    twin = stand_in(module, modules={
        "dense": lambda input: input @ weight[0].to(input.dtype),
        "dropout": lambda input: input.flip(-1),
        "LayerNorm": lambda input: input * input,
    })  # fmt: skip

    def agrees_in(dtype: torch.dtype) -> bool:
        given = hidden.to(dtype), residual.to(dtype)
        try:
            own = type(module).forward(twin, *given)
            ours = replacement.forward(twin, *given)  # type: ignore[arg-type]
        except Exception:  # a module that needs more of its blocks is another kind
            return False
        return is_near(own, ours)

    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return all(map(agrees_in, FLOATING))
