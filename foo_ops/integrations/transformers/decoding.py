"""Attention layers such as Llama's while a model decodes, token by token.

One token is so little work that the overhead between operators counts: module calls, views, option
lookups. This code keeps it to a minimum.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from foo_ops.integrations.transformers.attention import NAME, foo_attention_forward
from foo_ops.integrations.transformers.attention_layers import (
    FUNCTION,
    INTERFACES,
    FooRotaryFooAttention,
    Form,
    form_of,
    in_place_of_sdpa,
)
from foo_ops.integrations.transformers.quantized import FooJoined, multiplied_together, products
from foo_ops.integrations.transformers.replacement import are_alike, is_near, stand_in, with_globals

PARAMETERS = ["hidden_states", "position_embeddings", "attention_mask", "past_key_values", "kwargs"]
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
LAYERS = {*PROJECTIONS, "o_proj"}
NORMS = {"q_norm", "k_norm"}
UNREAD = frozenset({"position_ids", "use_cache"})
"""Keywords that models pass on, and attention does not read."""

Attention = Callable[..., tuple[Tensor, None]]


def attend(
    function: Attention,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    sliding_window: int | None,
) -> tuple[Tensor, None]:
    """Compute the same as one of our functions, for one query in each sequence.

    Masks for `in_place_of_sdpa` already contain the windows. The output is (B, Hq, 1, D) or
    (B, 1, Hq, D).
    """
    has_window = sliding_window is not None and function is not in_place_of_sdpa
    if sees_all(query, key, value, mask) and not has_window:
        output, _ = torch.ops.foo.attention.default(query, key, value, scale=scaling)
        return output, None
    return function(module, query, key, value, mask, scaling=scaling, sliding_window=sliding_window)


def sees_all(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether nothing is hidden from the query, and keys and values are tensors of its dtype."""
    if mask is not None or type(key) is not Tensor:
        return False
    return key.dtype == query.dtype == value.dtype


ATTENTION: dict[Any, Attention] = {
    sdpa_attention_forward: partial(attend, in_place_of_sdpa),
    foo_attention_forward: partial(attend, foo_attention_forward),
}
"""Called for one token, instead of the implementations' functions."""


def step(
    module: Any,
    form: Form,
    window: int | None,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, ...],
    mask: Tensor | None,
    cache: Any,
    attention: Attention,
) -> Tensor:
    """Compute the layer for one token in each sequence.

    With one position, (B, S, H, D) and (B, H, S, D) have the same memory layout.
    """
    shape = hidden_states.shape[0], -1, 1, module.head_dim
    query, key, value = [it.view(shape) for it in products(module, PROJECTIONS, hidden_states)]
    layers = module._modules
    if "q_norm" in layers:
        query, key = layers["q_norm"](query), layers["k_norm"](key)
    angles = None
    if are_alike(query, key, *position_embeddings):
        angles = form.layout.read(position_embeddings, 1)
    if angles is not None:
        cosine, sine = angles
        rotate = torch.ops.foo.rotary_embedding.default
        query = rotate(query, cosine, sine, interleaved=form.layout.interleaved)
        key = rotate(key, cosine, sine, interleaved=form.layout.interleaved)
    else:
        query, key = form.rotate(query, key, *position_embeddings)
    key, value = cache.update(key, value, module.layer_idx)
    output, _ = attention(
        module, query, key, value, mask, scaling=module.scaling, sliding_window=window
    )
    return layers["o_proj"](output.reshape(hidden_states.shape[0], 1, -1))


class FooDecodingAttention(FooJoined, FooRotaryFooAttention):
    """Replaces attention layers such as Llama's, and Qwen 3's with norms of query and key.

    The layer's own forward is called unless the call is for one further token in a cache, with
    foo's attention. Joined projections are one product in either case.

    Attributes:
        own_forward: the layer's own, with our rotation and our attention.
        form: the form of the rotation.
        interfaces: implementations of attention by name, one of which may replace ours.
    """

    siblings = PROJECTIONS
    own_forward: ClassVar[Callable[..., Any]]
    form: ClassVar[Form]
    interfaces: ClassVar[Mapping[str, Any]]
    training: bool
    config: Any

    @staticmethod
    def window_of(module: Any) -> int | None:
        """Return the length of the sliding window of a layer."""
        return None

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        names = module._modules.keys()
        if names not in (LAYERS, LAYERS | NORMS) or module._parameters or module._buffers:
            return False
        return super().recognises(module) and agrees(module, cls.window_of)

    @classmethod
    def attributes(cls, original: type[nn.Module]) -> dict[str, Any]:
        forward: Any = original.forward
        return {
            "own_forward": super().attributes(original)["forward"],
            "form": form_of(forward.__globals__[FUNCTION]),
            "interfaces": forward.__globals__[INTERFACES],
        }

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        given = hidden_states, position_embeddings, attention_mask, past_key_values
        if torch.compiler.is_compiling() or self.training:
            return self.own_forward(*given, **kwargs)
        attention = ATTENTION.get(self.interfaces.get(self.config._attn_implementation))
        if (
            attention is None
            or past_key_values is None
            or hidden_states.dim() != 3
            or hidden_states.shape[1] != 1
            or not UNREAD.issuperset(kwargs)
        ):
            with multiplied_together(self, PROJECTIONS, hidden_states):
                return self.own_forward(*given, **kwargs)
        return step(self, self.form, self.window_of(self), *given, attention), None


class FooWindowAttention(FooDecodingAttention):
    """The same for layers such as Qwen 2's, each with its own window or none."""

    @staticmethod
    def window_of(module: Any) -> int | None:
        window: int | None = vars(module).get("sliding_window")
        return window


class FooConfiguredWindowAttention(FooDecodingAttention):
    """The same for layers such as Mistral's, with one window for all."""

    @staticmethod
    def window_of(module: Any) -> int | None:
        window: int | None = getattr(module.config, "sliding_window", None)
        return window


ATTENTION_LAYERS = (FooDecodingAttention, FooWindowAttention, FooConfiguredWindowAttention)


# ----------------------------------------------------------------------------------- recognition


class Recorder:
    """A cache and an implementation of attention that record their arguments."""

    def __init__(self) -> None:
        self.numbers: list[Tensor] = []
        self.others: list[Any] = []

    def update(self, key: Tensor, value: Tensor, *others: Any, **options: Any) -> Any:
        self.numbers += [key, value]
        self.others += [others, options]
        return key.flip(1), value + key

    def attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        self.numbers += [query, key, value]
        given = {name: it for name, it in options.items() if it is not None}
        self.others += [module, mask, {"dropout": 0.0, **given}]
        return (query * value.mean()).transpose(1, 2).contiguous(), None

    def get_interface(self, *names: Any) -> Any:
        return self.attention


class Config:
    """The configuration of a trial layer; a layer that reads anything else is another kind."""

    _attn_implementation = NAME
    sliding_window = 11

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(name)


def agrees(module: Any, window_of: Callable[[Any], int | None]) -> bool:
    """Whether a layer's own forward computes the same as `step` for one token."""
    forward: Any = type(module).forward
    if list(inspect.signature(forward).parameters)[1:] != PARAMETERS:
        return False
    if not isinstance(vars(module).get("head_dim"), int) or "scaling" not in vars(module):
        return False
    if INTERFACES not in forward.__globals__:
        return False
    form: Any = form_of(forward.__globals__[FUNCTION])
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def layer(rows: int, columns: int) -> Callable[[Tensor], Tensor]:
        weight = random(columns, rows)
        return lambda input: input @ weight.to(input.dtype)

    width, size = 8, module.head_dim
    heads = {"q_proj": 4 * size, "k_proj": 2 * size, "v_proj": 2 * size}
    layers = {name: layer(rows, width) for name, rows in heads.items()}
    norms = {name: layer(size, size) for name in NORMS & module._modules.keys()}
    input, mask = random(2, 1, width), random(2, 1, 1, 5)
    tables = [form.layout.table(random(2, 1, size // 2)) for _ in range(2)]

    # Some layers rotate query and key only if they have a window, so a window is tried, too.
    windows = [{}, {"sliding_window": 7}] if "sliding_window" in vars(module) else [{}]

    def agrees_in(dtype: torch.dtype, changes: dict[str, Any]) -> bool:
        twin = stand_in(module, modules={**layers, **norms, "o_proj": layer(width, 4 * size)})
        vars(twin).update(training=False, config=Config(), **changes)
        theirs, ours = Recorder(), Recorder()
        own_forward = with_globals(forward, {FUNCTION: form.rotate, INTERFACES: theirs})
        hidden, shown, *turns = (it.to(dtype) for it in (input, mask, *tables))
        try:
            output, weights = own_forward(twin, hidden, tuple(turns), shown, theirs)
            theirs.numbers.append(output)
            window = window_of(twin)
            result = step(twin, form, window, hidden, tuple(turns), shown, ours, ours.attention)
        except Exception:  # a layer that needs more is another kind
            return False
        ours.numbers.append(result)
        return weights is None and is_same(theirs, ours)

    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        # Two dtypes, so that a conversion is noticed.
        dtypes = (torch.float32, torch.bfloat16)
        return all(agrees_in(dtype, changes) for dtype in dtypes for changes in windows)


def is_same(one: Recorder, other: Recorder) -> bool:
    pairs = list(zip(one.numbers, other.numbers))
    return all(is_near(*pair) for pair in pairs) and one.others == other.others
