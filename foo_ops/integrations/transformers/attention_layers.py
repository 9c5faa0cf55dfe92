"""foo::attention in attention layers, instead of the function that each would call.

A layer of transformers looks up its function by the name of the model's implementation. The name
also decides how a model makes its masks, which arguments it passes, and which entry points accept
it, so a model keeps its name. Instead, its layers look into another table, which has our function
for each function whose computation is known: PyTorch's ``sdpa``, and any
``eager_attention_forward`` that agrees with foo's operator on random numbers. All other functions,
and all calls with arguments that ours do not support, go to the model's own.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from foo_ops.integrations.transformers.attention import (
    combine,
    compute,
    compute_sparse,
    foo_attention_forward,
)
from foo_ops.integrations.transformers.replacement import (
    OtherGlobals,
    are_cast_alike,
    has_own_forward,
)
from foo_ops.integrations.transformers.rotary import FooRotaryAttention

INTERFACES = "ALL_ATTENTION_FUNCTIONS"
"""Global name under which a layer's own forward finds implementations of attention."""
EAGER = "eager_attention_forward"
"""Global name of the function that a layer calls for the implementation ``"eager"``."""

Function = Callable[..., Any]


def is_served(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> bool:
    """Whether foo::attention supports these tensors, and computes in the dtype that others do."""
    tensors = (query, key, value)
    if any(it.dim() != 4 for it in tensors) or (bias is not None and bias.dim() > 4):
        return False
    if key.shape[:3] != value.shape[:3] or query.shape[0] not in (1, key.shape[0]):
        return False
    if key.shape[1] == 0 or query.shape[1] % key.shape[1] or not query.is_floating_point():
        return False
    if query.dtype != key.dtype or query.dtype != value.dtype:
        return are_cast_alike(query, key, value)
    return bias is None or bias.dtype in (torch.bool, torch.float32, query.dtype)


# ------------------------------------------------------------------------------------------- sdpa


SDPA_PARAMETERS = (
    *("module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal"),
    *("position_bias", "cache"),
)
SDPA_READS = {
    *("softcap", "output_attentions"),
    # Parameters of transformers versions newer than this file.
    *(set(inspect.signature(sdpa_attention_forward).parameters) - {*SDPA_PARAMETERS, "kwargs"}),
}
"""Keywords that ``sdpa_attention_forward`` reads and our function does not serve."""


def in_place_of_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    **others: Any,
) -> tuple[Tensor, Any]:
    """Compute ``sdpa_attention_forward``, which ignores other keywords.

    Without a mask, a layer that is causal (by the argument or its attribute) hides keys with an
    index above the query's, unless there is only one query.
    """
    if isinstance(cache, PagedAttentionCache):
        key, value = cache.update(
            key_states=key,
            value_states=value,
            layer_idx=module.layer_idx,
            kwargs=others,
        )
        cache = None
    read = any(others.get(name) not in (None, False) for name in SDPA_READS)
    if read or cache is not None or not is_served(query, key, value, attention_mask):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
            is_causal=is_causal, position_bias=position_bias, cache=cache, **others,
        )  # fmt: skip
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    options = {"is_causal": True} if is_causal and attention_mask is None else {}
    if query.shape[2] == 1:
        options = {}
    bias = combine(position_bias, attention_mask)
    # Layers with an indexer pass the chosen keys, or None if their mask contains them.
    attend = compute_sparse if "indices" in others and not options else compute
    return attend(query, key, value, bias, None, scaling, dropout, 0.0, options), None


# ------------------------------------------------------------------------------------------ eager


@dataclass(frozen=True)
class Eager:
    """An ``eager_attention_forward``, and which variant of attention it computes.

    Attributes:
        function: the model's own.
        has_sinks: it reads the layer's ``sinks``, one logit for each head.
        has_groups: a key head serves several query heads.
        needs_mask: it fails without one.
        reads: the keywords that it reads, besides those that every such function has.
    """

    function: Function
    has_sinks: bool
    has_groups: bool
    needs_mask: bool
    reads: frozenset[str]

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **others: Any,
    ) -> tuple[Tensor, Any]:
        """Compute the same as the model's own function.

        A mask is added to the scores. Without one nothing is hidden, whatever the layer's
        ``is_causal`` says.
        """
        read = {name for name, it in others.items() if name in self.reads and it is not None}
        sinks = getattr(module, "sinks", None) if self.has_sinks else None
        if (
            read - OPTIONS.keys()
            or others.get("output_attentions") not in (None, False)
            or scaling is None
            or (attention_mask is None and self.needs_mask)
            or (attention_mask is not None and not attention_mask.is_floating_point())
            or (query.shape[1] != key.shape[1] and not self.has_groups)
            or not is_served(query, key, value, attention_mask)
        ):
            return self.function(
                module, query, key, value, attention_mask,
                scaling=scaling, dropout=dropout, **others,
            )  # fmt: skip
        bias = combine(
            others.get("position_bias") if "position_bias" in read else None, attention_mask
        )
        softcap = others["softcap"] if "softcap" in read else 0.0
        dropout = dropout if module.training else 0.0
        return compute(query, key, value, bias, sinks, scaling, dropout, softcap, {}), None


OPTIONS: dict[str, Callable[[], Any]] = {
    "softcap": lambda: 1.5,
    "position_bias": lambda: torch.randn(1, 4, 5, 7, generator=torch.Generator().manual_seed(3)),
}
"""Keywords that both functions support, and values to try them with."""
EVERY = {"module", "query", "key", "value", "attention_mask", "scaling", "dropout", "kwargs"}


class Layer:
    """A layer to try an ``eager_attention_forward`` with; functions that read more are unknown.

    Attributes:
        is_causal: must have no effect.
    """

    training = False
    is_causal = True
    head_dim = 8

    def __init__(self, groups: int, heads: int) -> None:
        self.num_key_value_groups = groups
        self.sinks = torch.randn(heads, generator=torch.Generator().manual_seed(2))


@cache
def known_eager(function: Function) -> Eager | None:
    """Return the variant that agrees with a model's function, or None if none does."""
    parameters = inspect.signature(function).parameters
    reads = frozenset(parameters.keys() - EVERY)
    for has_sinks in (False, True):
        for has_groups in (True, False):
            for needs_mask in (False, True):
                known = Eager(function, has_sinks, has_groups, needs_mask, reads)
                if agrees(known):
                    return known
    return None


def agrees(known: Eager) -> bool:
    return all(is_same(known, call) for call in calls(known))


def calls(known: Eager) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments of calls that together test every property of a variant."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 5, 8, generator=generator)
    heads = 2 if known.has_groups else 4
    key, value = torch.randn(2, 2, heads, 7, 8, generator=generator).unbind()
    layer = Layer(4 // heads, 4)
    mask = torch.randn(2, 1, 5, 7, generator=generator)
    mask[:, :, :, 3] = torch.finfo(mask.dtype).min
    given: dict[str, Any] = {"scaling": 0.3, "dropout": 0.5, "is_causal": True}
    yield (layer, query, key, value, mask, given)
    if not known.needs_mask:
        yield (layer, query, key, value, None, given)
    for name in known.reads & OPTIONS.keys():
        yield (layer, query, key, value, mask, {**given, name: OPTIONS[name]()})


def is_same(known: Eager, call: tuple[Any, ...]) -> bool:
    *arguments, options = call
    with torch.no_grad(), torch.device("cpu"):
        try:
            own, _ = known.function(*arguments, **options)
        except Exception:  # a function that needs more of its layer is another variant
            return False
        ours, _ = known(*arguments, **options)
    return (
        isinstance(own, Tensor)
        and own.shape == ours.shape
        and torch.allclose(own, ours, rtol=1e-4, atol=1e-5)
    )


# ------------------------------------------------------------------------------------- the layers


class Interfaces:
    """The table in which a layer looks up its function.

    Attributes:
        own: the model's own table.
        eager: the variant of the layer's own function, if it is known.
    """

    def __init__(self, own: Any, eager: Eager | None) -> None:
        self.own, self.eager = own, eager

    def get_interface(self, name: str, default: Function) -> Function:
        return self.served(self.own.get_interface(name, default))

    def served(self, function: Function) -> Function:
        """Return our function for one of the model's own, or that function itself."""
        if function is sdpa_attention_forward:
            return in_place_of_sdpa
        known = self.eager
        return known if known is not None and function is known.function else function


@cache
def interfaces_of(forward: Any) -> Interfaces:
    names = forward.__globals__
    own = names.get(EAGER)
    return Interfaces(names[INTERFACES], None if own is None else known_eager(own))


def looks_up(module: nn.Module) -> bool:
    """Whether a layer looks up its function in transformers' table."""
    forward: Any = type(module).forward
    return (
        isinstance(forward, types.FunctionType)
        and INTERFACES in forward.__code__.co_names
        and isinstance(forward.__globals__.get(INTERFACES), AttentionInterface)
    )


def own_function(module: Any) -> Function | None:
    """Return the function that a layer calls if nothing is replaced, or None if unknown."""
    forward: Any = getattr(type(module), "original", type(module)).forward
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    names: Mapping[str, Any] = forward.__globals__
    if name is None or name == "eager":
        return names.get(EAGER)
    function: Function | None = names[INTERFACES].get(name)
    return function


class FooAttention(OtherGlobals):
    """Replaces attention layers: their own forward, which looks up our functions."""

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        if has_own_forward(module) or not looks_up(module):
            return False
        function = own_function(module)
        if function is foo_attention_forward:
            return True
        return interfaces_of(type(module).forward).served(function) is not function  # type: ignore[arg-type]

    @classmethod
    def names(cls, forward: Any) -> dict[str, Any]:
        return {**super().names(forward), INTERFACES: interfaces_of(forward)}


class FooRotaryFooAttention(FooAttention, FooRotaryAttention):
    """Replaces both attention and rotation."""

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        return FooAttention.recognises(module) and FooRotaryAttention.recognises(module)
