"""foo's operators in attention layers, instead of the functions that each would call."""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from foo_ops.integrations.transformers.attention import (
    PackedSequences,
    combine,
    compute,
    compute_sparse,
    foo_attention_forward,
)
from foo_ops.integrations.transformers.replacement import (
    OtherGlobals,
    are_alike,
    are_cast_alike,
    has_numbers,
    has_own_forward,
    memory_order,
    permuted_back,
)
from foo_ops.library.operators import FLOATING
from foo_ops.ops.rotary_embedding import composite

# ---------------------------------------------------------------------------- foo::rotary_embedding

# In layers that call a function ``apply_rotary_pos_emb``.


FUNCTION = "apply_rotary_pos_emb"
PARAMETERS = ["q", "k", "cos", "sin", "unsqueeze_dim"]

Table = Callable[[Tensor], Tensor]
Rotation = Callable[..., tuple[Tensor, Tensor]]


def first_half(table: Tensor) -> Tensor:
    """Return the angles of a table that repeats them as a whole."""
    return table[..., : table.shape[-1] // 2]


def second_half(table: Tensor) -> Tensor:
    return table[..., table.shape[-1] // 2 :]


def every_second(table: Tensor) -> Tensor:
    """Return the angles of a table that repeats each of them twice in a row."""
    return table[..., ::2]


def every_other(table: Tensor) -> Tensor:
    return table[..., 1::2]


def whole(table: Tensor) -> Tensor:
    return table


COPIES: dict[Table, Table] = {first_half: second_half, every_second: every_other}
"""Where a table that has its angles twice holds the second copy."""


class Layout(NamedTuple):
    """How a function rotates query and key.

    Attributes:
        angles: how a table holds the angles.
        interleaved: whether pairs are adjacent elements, and not half a row apart.
        keeps_order: whether results have the memory order of their inputs, and are not always
            contiguous.
    """

    angles: Table
    interleaved: bool
    keeps_order: bool

    def table(self, angles: Tensor) -> Tensor:
        """Return a table that holds these angles."""
        if self.angles is first_half:
            return torch.cat((angles, angles), dim=-1)
        return angles.repeat_interleave(2, dim=-1) if self.angles is every_second else angles

    def turn(self, input: Tensor, cosine: Tensor, sine: Tensor) -> Tensor | None:
        """Rotate query or key, or return None if the operator cannot write the result."""
        rotate = torch.ops.foo.rotary_embedding.default
        if not self.keeps_order or input.is_contiguous():
            return rotate(input, cosine, sine, interleaved=self.interleaved)
        order = memory_order(input)
        if order is None or cosine.dim() != input.dim():
            return None
        given = (it.permute(order) for it in (input, cosine, sine))
        return permuted_back(rotate(*given, interleaved=self.interleaved), order)

    def read(self, tables: Sequence[Tensor], heads: int) -> Sequence[Tensor] | None:
        """Return the angles of tables as views, or None for tables that hold other values.

        For images with several positions, the two halves of a row may differ. This depends on
        values, so tables that repeat their angles are not read while a graph is traced.

        Args:
            heads: dimension of the heads in query and key, which the views get, too.
        """
        copies = COPIES.get(self.angles)
        if torch.compiler.is_compiling():
            return self.views(tables, heads) if copies is None else None
        if latest.layout is self and latest.heads == heads and is_latest(tables):
            return latest.views
        views = None
        if copies is None or (
            all(map(has_numbers, tables))
            and all(torch.equal(self.angles(it), copies(it)) for it in tables)
        ):
            views = self.views(tables, heads)
        if not any(it.requires_grad for it in tables):
            latest.layout, latest.heads, latest.tables = self, heads, tuple(tables)
            latest.versions, latest.views = versions_of(tables), views
        return views

    def views(self, tables: Sequence[Tensor], heads: int) -> Sequence[Tensor]:
        return [self.angles(it).unsqueeze(heads) for it in tables]


class Latest(threading.local):
    """The tables that this thread has read last; all layers of a model receive the same ones.

    A reference to them is kept, so that their identity stays unique.
    """

    layout: Layout | None = None
    heads = 0
    tables: Sequence[Tensor] = ()
    versions: Sequence[int] = ()
    views: Sequence[Tensor] | None = None


latest = Latest()


def is_latest(tables: Sequence[Tensor]) -> bool:
    kept = latest.tables
    same = len(tables) == len(kept) and all(a is b for a, b in zip(tables, kept))
    return same and latest.versions == versions_of(tables)


def versions_of(tables: Sequence[Tensor]) -> Sequence[int]:
    return [0 if it.is_inference() else it._version for it in tables]


class Form(NamedTuple):
    """How query and key are rotated (`Layout`), and a function that does it by foo's operator."""

    layout: Layout
    rotate: Rotation


LAYOUTS = [
    Layout(angles, interleaved, keeps_order)
    for angles, interleaved in (
        (first_half, False),  # Llama, and most others
        (whole, False),  # gpt-oss
        (every_second, True),  # Cohere
        (first_half, True),  # GLM
    )
    for keeps_order in (True, False)
]


@cache
def form_of(function: Callable[..., Any]) -> Form | None:
    """Return the form of a function, or None if it agrees with no known one on random numbers."""
    if list(inspect.signature(function).parameters) != PARAMETERS:
        return None
    layout = next((it for it in LAYOUTS if agrees_with_layout(function, it)), None)
    if layout is None:
        return None
    return Form(layout, make_rotation(function, layout))


def make_rotation(own: Rotation, layout: Layout) -> Rotation:
    """Make a function that rotates query and key as ``own`` does, and calls it as a fallback."""
    heads = inspect.signature(own).parameters["unsqueeze_dim"].default

    def rotate(
        q: Tensor, k: Any = None, cos: Any = None, sin: Any = None, unsqueeze_dim: int = heads
    ) -> Any:
        angles = None
        if k is not None and are_alike(q, k, cos, sin):
            angles = layout.read((cos, sin), unsqueeze_dim)
        if angles is not None:
            query, key = (layout.turn(it, *angles) for it in (q, k))
            if query is not None and key is not None:
                return query, key
        return own(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    return rotate


def agrees_with_layout(function: Callable[..., Any], layout: Layout) -> bool:
    """Whether a function rotates tensors of each dtype like this, and returns that dtype."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    query, key, angles = random(2, 6, 5, 16), random(2, 2, 5, 16), layout.table(random(2, 5, 8))
    for dtype in FLOATING:
        q, k, cosine, sine = (it.to(dtype) for it in (query, key, angles.cos(), angles.sin()))
        for each, dim in (((q, k), 1), ((q.transpose(1, 2), k.transpose(1, 2)), 2)):
            try:
                own = function(*each, cosine, sine, dim)
            except Exception:  # tables of another form
                return False
            if not all(is_turned(*pair, cosine, sine, dim, layout) for pair in zip(own, each)):
                return False
    return True


def is_turned(
    own: Tensor, input: Tensor, cosine: Tensor, sine: Tensor, dim: int, layout: Layout
) -> bool:
    memory = torch.preserve_format if layout.keeps_order else torch.contiguous_format
    like = torch.empty_like(input, memory_format=memory)
    if (own.shape, own.dtype, own.stride()) != (like.shape, like.dtype, like.stride()):
        return False
    tables = (layout.angles(it.double()).unsqueeze(dim) for it in (cosine, sine))
    exact = composite(input.double(), *tables, interleaved=layout.interleaved)
    # Some functions compute in float32, also for float64.
    room = 16 * max(torch.finfo(own.dtype).eps, torch.finfo(torch.float32).eps)
    return torch.allclose(own.double(), exact, rtol=0, atol=room)


class FooRotaryAttention(OtherGlobals):
    """Replaces attention layers: their own forward, which looks up our rotation by its name."""

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        forward: Any = type(module).forward
        if not isinstance(forward, types.FunctionType) or has_own_forward(module):
            return False
        function = forward.__globals__.get(FUNCTION)
        if FUNCTION not in forward.__code__.co_names or function is None:
            return False
        return form_of(function) is not None

    @classmethod
    def names(cls, forward: Any) -> dict[str, Any]:
        form: Any = form_of(forward.__globals__[FUNCTION])
        return {**super().names(forward), FUNCTION: form.rotate}


# ----------------------------------------------------------------------------------- foo::attention

# A layer of transformers looks up its function by the name of the model's implementation. The name
# also decides how a model makes its masks, which arguments it passes, and which entry points accept
# it, so a model keeps its name. Instead, its layers look into another table, which has our function
# for each function whose computation is known: PyTorch's ``sdpa``, and any
# ``eager_attention_forward`` that agrees with foo's operator on random numbers. All other
# functions, and all calls with arguments that ours do not support, go to the model's own.


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


# ------------------------------------------------------------------ foo::attention in place of sdpa


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
    if isinstance(attention_mask, PackedSequences):
        given = {**others, "position_bias": position_bias, "cache": cache}
        return attention_mask.attend(query, key, value, scaling, dropout, given), None
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


# ------------------------------------------------------- foo::attention in place of eager functions


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
        if isinstance(attention_mask, PackedSequences):
            dropout = dropout if module.training else 0.0
            return attention_mask.attend(query, key, value, scaling, dropout, others), None
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
        return cls.serves_in_place_of(own_function(module), type(module).forward)

    @staticmethod
    def serves_in_place_of(function: Function | None, forward: Any) -> bool:
        """Whether a layer with this forward calls our function in place of another one."""
        if function is None or function is foo_attention_forward:
            return function is not None
        return interfaces_of(forward).served(function) is not function

    @classmethod
    def names(cls, forward: Any) -> dict[str, Any]:
        return {**super().names(forward), INTERFACES: interfaces_of(forward)}


class FooRotaryFooAttention(FooAttention, FooRotaryAttention):
    """Replaces both attention and rotation."""

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        return FooAttention.recognises(module) and FooRotaryAttention.recognises(module)
