"""Caches of transformers that are written in place, by foo::cache_append, also in 8 bits."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from copy import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from foo_ops.compat import disabled_torch_function, pytree, storage_use_count
from foo_ops.integrations.transformers.replacement import holds
from foo_ops.ops.attention.int8_cache import quantize_cache

# ----------------------------------------------------------------------------------------- integers

# Keys and values of 8 bits that act as floating-point tensors unless their int8 is read.


def numbers(integers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize int8 (B, H, S, D) by scales (B, H, S)."""
    return (integers.to(scales.dtype) * scales.unsqueeze(-1)).to(dtype)


Base: Any = Tensor
"""Tensor, untyped: the signature of its constructor does not fit."""


class Integers(Base):
    """An int8 tensor with scales; every operator receives its floating-point values.

    Attention of implementation ``"foo"`` reads integers and scales directly. Models with another
    attention, or that use keys and values otherwise, need not know about this class.

    Attributes:
        integers: int8, (B, H, S, D).
        scales: (B, H, S).
    """

    integers: Tensor
    scales: Tensor

    @staticmethod
    def __new__(
        cls: type[Integers], integers: Tensor, scales: Tensor, dtype: torch.dtype
    ) -> Integers:
        made = Base._make_wrapper_subclass(cls, integers.shape, dtype=dtype, device=integers.device)
        made.integers, made.scales = integers, scales
        return made

    def numbers(self) -> Tensor:
        return numbers(self.integers, self.scales, self.dtype)

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(
        cls, operator: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        arguments, keywords = pytree.tree_map_only(
            Integers, Integers.numbers, (arguments, keywords or {})
        )
        return operator(*arguments, **keywords)


# ------------------------------------------------------------------------------------------- caches


LEAST_ROOM = 64
"""Keys that the first memory of a cache has room for, at least."""

CACHES = {"past_key_values", "layer_past"}
"""Names of the cache parameter of attention layers."""

AnyCache = TypeVar("AnyCache", bound=Cache)


def in_place_cache(cache: AnyCache, *, bits: int | None = None) -> AnyCache:
    """Make a cache of transformers write in place, and return it.

    The keys and values of a ``DynamicCache`` lie at the front of memory with room for as many
    again, so a new key is written behind the others, where transformers copies all of them
    (`torch.cat`). It still copies where keys or values need gradients, and in compiled graphs.
    Tensors that were taken from the cache are never overwritten: if somebody holds tensors that
    were cropped away, the rest is copied first. A ``StaticCache`` gets new keys and values by one
    operator. Other layers, such as those of sliding windows, stay as they are.

    With ``bits=8`` the contents of a ``DynamicCache`` become integers with a scale per head and
    position (`foo_ops.quantize_cache`), half the bytes of bfloat16. Attention of implementation
    ``"foo"`` reads them directly; for any other they are dequantized layer by layer. Attention to a
    first prompt uses the original values. A ``StaticCache`` stays as it is.

    `apply` does this with every cache that its model is given.

    Raises:
        ValueError: for other bits than 8.

    Example:
        >>> from transformers import DynamicCache
        >>> cache = foo_ops.integrations.transformers.in_place_cache(DynamicCache())
        >>> key, value = torch.randn(2, 1, 4, 3, 8).unbind()
        >>> cache.update(key, value, 0)[0].equal(key)
        True
    """
    if bits not in (None, 8):
        raise ValueError(f"in_place_cache: bits must be 8 or None, got {bits}")
    classes = IN_PLACE if bits is None else IN_8_BITS
    if cache.layer_class_to_replicate in classes:
        cache.layer_class_to_replicate = classes[cache.layer_class_to_replicate]
    layer: Any
    for layer in cache.layers:
        if (in_place := classes.get(type(layer))) is not None:
            held = (layer.keys, layer.values) if layer.get_seq_length() else None
            layer.__class__ = in_place
            if isinstance(layer, GrowingLayer):
                layer.hide_attributes()
            if in_place is Int8Layer and held is not None:
                layer.reset()
                layer.update(*held)
    return cache


def take_cache(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
    """Apply `in_place_cache` to the cache that a model is called with; a hook."""
    _take(keywords, None)


def take_int8_cache(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
    """Apply `in_place_cache` with 8 bits to the cache that a model is called with; a hook."""
    _take(keywords, 8)


def _take(keywords: dict[str, Any], bits: int | None) -> None:
    cache = keywords.get("past_key_values")
    if cache is not None and not torch.compiler.is_compiling():
        # A decoder with cross-attention has two; that of the encoder is written only once.
        in_place_cache(getattr(cache, "self_attention_cache", cache), bits=bits)


HOOKS = {None: take_cache, 8: take_int8_cache}


def takes_cache(model: nn.Module) -> bool:
    """Whether a model has attention layers that read a cache, as those of encoders do not."""
    return any(
        CACHES & inspect.signature(type(it).forward).parameters.keys()
        and getattr(it, "is_causal", True)
        and getattr(it, "is_decoder", True)
        for it in model.modules()
        if "Attention" in type(it).__name__ and not holds(it, "Attention")
    )


def install(module: nn.Module, bits: int | None = None) -> None:
    if bits is not None:
        uninstall(module)
    if not is_installed(module):
        module.register_forward_pre_hook(HOOKS[bits], with_kwargs=True)


def uninstall(module: nn.Module) -> None:
    hooks = module._forward_pre_hooks
    for number in [it for it, hook in hooks.items() if hook in HOOKS.values()]:
        del hooks[number]
        module._forward_pre_hooks_with_kwargs.pop(number, None)


def is_installed(module: nn.Module) -> bool:
    return any(hook in HOOKS.values() for hook in module._forward_pre_hooks.values())


def make_room(cache: Cache, count: int) -> None:
    """Let the layers of a cache that grow have memory for some further positions."""
    for layer in getattr(cache, "self_attention_cache", cache).layers:
        if isinstance(layer, GrowingLayer):
            layer.make_room(count)


def is_recorded(layer: Any, *given: Tensor) -> bool:
    """Whether gradients are recorded for the tensors that a layer holds or is given."""
    if not torch.is_grad_enabled():
        return False
    held = (layer.keys, layer.values) if layer.is_initialized else ()
    return any(it.requires_grad for it in (*held, *given))


class Memory:
    """Room for keys and values. Parts that others hold are never overwritten.

    So all tensors that were returned keep their values, also after a crop, and for gradients.

    Attributes:
        tensors: the keys and the values, (B, H, room, D).
        shown: aliases of the tensors, of which views are returned.
        end: how many positions were written.
        positions: (B,), buffer for ``end``, which the operator reads from a tensor.
    """

    def __init__(
        self, room: int, end: int, held: Sequence[Tensor], given: Sequence[Tensor]
    ) -> None:
        """Allocate ``room`` positions, and copy the ``end`` positions that a layer holds."""
        self.tensors = tuple(it.new_empty(*it.shape[:2], room, it.shape[3]) for it in given)
        if end:
            for tensor, old in zip(self.tensors, held):
                tensor.narrow(2, 0, end).copy_(old)
        # Autograd would count writes behind a view as changes of it; not so with `data`.
        self.shown = tuple(it.data for it in self.tensors)
        self.room, self.end = room, end
        self.positions = torch.empty(len(given[0]), dtype=torch.int64, device=given[0].device)
        self.is_inference = torch.is_inference_mode_enabled()

    def has_room(self, count: int) -> bool:
        """Whether there is room for further positions, which may be written."""
        if self.end + count > self.room:
            return False
        return not self.is_inference or torch.is_inference_mode_enabled()

    def rewind(self, held: Sequence[Tensor]) -> bool:
        """Forget all behind the views that a layer holds, if nobody else holds more.

        Assisted generation crops in each step.
        """
        is_own = all(it.data_ptr() == own.data_ptr() for it, own in zip(held, self.shown))
        if not is_own or any(holders_of(it) != 3 for it in self.tensors):
            return False
        self.end = held[0].shape[2]
        return True

    def append(self, given: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Append the given keys and values; return all."""
        self.positions.fill_(self.end)
        torch.ops.foo.cache_append.default(*self.tensors, *given, self.positions)
        self.end += given[0].shape[2]
        return self.view(0), self.view(1)

    def view(self, number: int) -> Tensor:
        """Return all keys (0) or values (1) that were written."""
        return self.shown[number].narrow(2, 0, self.end)

    def overwrite(self, new: Sequence[Tensor]) -> bool:
        """Replace all that was written, unless others hold parts or the number of rows changes."""
        if any(holders_of(it) != 2 or len(it) != len(new[0]) for it in self.tensors):
            return False
        for tensor, it in zip(self.tensors, new):
            tensor.narrow(2, 0, self.end).copy_(it)
        return True


def holders_of(tensor: Tensor) -> int:
    """Count the tensors that share its memory; a `Memory` has two, and its views are further."""
    storage = tensor.untyped_storage()
    count: int = storage_use_count(storage._cdata)
    return count - 1


def promoted(new: Tensor, old: Tensor) -> Tensor:
    """Convert to the dtype of `torch.cat` of both."""
    return new if new.dtype == old.dtype else new.to(torch.promote_types(old.dtype, new.dtype))


class GrowingLayer(DynamicLayer):
    """The keys and values of one layer, at the front of memory that doubles when it is full.

    ``keys`` and ``values`` are views of it, made where they are asked for: a token of a model with
    24 layers has no use for 48 tensors of Python. Others may put other tensors in their places (in
    another order, for one), which are copied to new memory before the next write.
    """

    memory: Memory | None = None
    held_keys: Tensor | None = None
    held_values: Tensor | None = None

    @property
    def keys(self) -> Any:
        return self.shown(0, self.held_keys)

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        self.held_keys = self.foreign(0, value)

    @property
    def values(self) -> Any:
        return self.shown(1, self.held_values)

    @values.setter
    def values(self, value: Tensor | None) -> None:
        self.held_values = self.foreign(1, value)

    def shown(self, number: int, held: Tensor | None) -> Tensor | None:
        return held if held is not None or self.memory is None else self.memory.view(number)

    def foreign(self, number: int, value: Tensor | None) -> Tensor | None:
        """Return a tensor that is put in the place of keys or values, or None for these themselves.

        Offloading to a CPU, which is where they are, puts them back in each step.
        """
        if value is None or self.memory is None or torch.compiler.is_compiling():
            return value
        if type(value) is not Tensor or value.requires_grad:
            return value
        own = self.memory.view(number)
        alike = [(it.shape, it.stride(), it.dtype) for it in (value, own)]
        is_own = alike[0] == alike[1] and value.data_ptr() == own.data_ptr()
        return None if is_own else value

    def own_memory(self) -> Memory | None:
        """Return the memory, if keys and values are what it holds."""
        return self.memory if self.held_keys is None and self.held_values is None else None

    def hide_attributes(self) -> None:
        """Move the attributes of an object of the base class behind the properties."""
        for name in ("keys", "values"):
            if name in vars(self):
                setattr(self, name, vars(self).pop(name))

    def get_seq_length(self) -> int:
        memory = self.own_memory()
        return super().get_seq_length() if memory is None else memory.end

    def update(
        self, key_states: Tensor, value_states: Tensor, *arguments: Any, **keywords: Any
    ) -> tuple[Tensor, Tensor]:
        if is_recorded(self, key_states, value_states) or torch.compiler.is_compiling():
            return super().update(key_states, value_states, *arguments, **keywords)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        memory = self.own_memory()
        held = (self.keys, self.values) if memory is None else memory.tensors
        given = (promoted(key_states, held[0]), promoted(value_states, held[1]))
        count = key_states.shape[2]
        is_wider = given[0].dtype != held[0].dtype or given[1].dtype != held[1].dtype
        if memory is None or is_wider or not memory.has_room(count):
            memory = self.move(given, count)
        return memory.append(given)

    def move(self, like: Sequence[Tensor], count: int) -> Memory:
        """Move to memory for some further positions, and for as many again as there are then."""
        length = self.get_seq_length()
        room = max(2 * (length + count), LEAST_ROOM)
        self.memory = Memory(room, length, (self.keys, self.values), like)
        self.held_keys = self.held_values = None
        return self.memory

    def make_room(self, count: int) -> None:
        """Have memory for some further positions, as `update` would need it."""
        if not self.get_seq_length() or is_recorded(self):
            return
        memory = self.own_memory()
        if memory is None or not memory.has_room(count):
            self.move((self.keys, self.values), count)

    def reorder_cache(self, beam_idx: Any) -> None:
        """Reorder the batch in place, if nobody else holds the keys and values."""
        memory = self.own_memory()
        if memory is None or is_recorded(self) or not memory.has_room(0):
            super().reorder_cache(beam_idx)
        elif beam_idx.tolist() != list(range(len(memory.tensors[0]))):
            new = [it.index_select(0, beam_idx.to(it.device)) for it in (self.keys, self.values)]
            if not memory.overwrite(new):
                self.keys, self.values = new

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        keys, values = self.held_keys, self.held_values
        if self.memory is None or keys is None or values is None:
            return
        if self.memory.rewind((keys, values)):
            self.held_keys = self.held_values = None

    def reset(self) -> None:
        super().reset()
        self.memory = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which makes memory of its own when it is continued."""
        state = {name: it for name, it in vars(self).items() if name != "memory"}
        return {**state, "held_keys": self.keys, "held_values": self.values}


class Int8Layer(GrowingLayer):
    """The keys and values of one layer as 8-bit integers, with a second layer for their scales.

    Attention receives `Integers`.
    """

    scales: GrowingLayer
    """(B, H, S, 1) for keys and for values."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.scales = GrowingLayer()

    def make_room(self, count: int) -> None:
        super().make_room(count)
        if self.get_seq_length():
            self.scales.make_room(count)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {**state, "scales": copy(self.scales)} if self.is_initialized else state

    def update(
        self, key_states: Tensor, value_states: Tensor, *arguments: Any, **keywords: Any
    ) -> tuple[Tensor, Tensor]:
        given = (key_states, value_states)
        if is_recorded(self, *given):
            raise NotImplementedError(
                "cache of 8 bits: key and value must not require gradients, since integers have "
                "none; call the model under torch.no_grad()"
            )
        is_first = self.get_seq_length() == 0
        integers, scales = zip(*map(quantize_cache, given))
        held = super().update(*integers)
        held_scales = self.scales.update(*(it.unsqueeze(-1) for it in scales))
        if is_first:
            return given
        read = numbers if torch.compiler.is_compiling() else Integers
        key, value = (
            read(tensor, scale.squeeze(-1), new.dtype)
            for tensor, scale, new in zip(held, held_scales, given)
        )
        return key, value

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.is_initialized:
            self.scales.crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.is_initialized:
            self.scales.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self.is_initialized:
            self.scales.batch_select_indices(indices)

    def reorder_cache(self, beam_idx: Any) -> None:
        super().reorder_cache(beam_idx)
        if self.is_initialized:
            self.scales.reorder_cache(beam_idx)


class InPlaceStaticLayer(StaticLayer):
    """The keys and values of one layer, in memory that is allocated once."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *arguments: Any, **keywords: Any
    ) -> tuple[Tensor, Tensor]:
        if is_recorded(self, key_states, value_states):
            return super().update(key_states, value_states, *arguments, **keywords)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys: Any = self.keys
        values: Any = self.values
        positions = self.cumulative_length.expand(key_states.shape[0])
        torch.ops.foo.cache_append.default(keys, values, key_states, value_states, positions)
        self.cumulative_length.add_(key_states.shape[-2])
        return keys, values


IN_PLACE: dict[type, type] = {DynamicLayer: GrowingLayer, StaticLayer: InPlaceStaticLayer}
IN_8_BITS: dict[type, type] = {
    DynamicLayer: Int8Layer,
    GrowingLayer: Int8Layer,
    StaticLayer: InPlaceStaticLayer,
}
