"""Caches of transformers that are written in place, by foo::cache_append."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

LEAST_ROOM = 64
"""For keys, in the first memory of a cache."""

AnyCache = TypeVar("AnyCache", bound=Cache)


def in_place_cache(cache: AnyCache) -> AnyCache:
    """Let a cache of transformers be written in place, and give it back.

    What a ``DynamicCache`` holds lies at the front of memory that has room for as much again, so
    that a new key is written behind the others, where transformers copies all of them
    (`torch.cat`). Where gradients are recorded, and in graphs that are compiled, it does so still.
    A ``StaticCache`` gets new keys and values from one operator. Layers of another kind, such as
    those of sliding windows, stay as they are.

    `apply` does this with every cache that its model is given.

    Example:
        >>> from transformers import DynamicCache
        >>> cache = foo_ops.integrations.transformers.in_place_cache(DynamicCache())
        >>> key, value = torch.randn(2, 1, 4, 3, 8).unbind()
        >>> cache.update(key, value, 0)[0].equal(key)
        True
    """
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = GrowingLayer
    for layer in cache.layers:
        if (in_place := IN_PLACE.get(type(layer))) is not None:
            layer.__class__ = in_place
    return cache


def take_cache(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
    """Do `in_place_cache` with the cache that a model is called with; a hook."""
    cache = keywords.get("past_key_values")
    if cache is not None and not torch.compiler.is_compiling():
        # A decoder that looks at an encoder has two; the other one is written once.
        in_place_cache(getattr(cache, "self_attention_cache", cache))


def install(module: nn.Module) -> None:
    if not is_installed(module):
        module.register_forward_pre_hook(take_cache, with_kwargs=True)


def uninstall(module: nn.Module) -> None:
    for number in [it for it, hook in module._forward_pre_hooks.items() if hook is take_cache]:
        del module._forward_pre_hooks[number]
        module._forward_pre_hooks_with_kwargs.pop(number, None)


def is_installed(module: nn.Module) -> bool:
    return take_cache in module._forward_pre_hooks.values()


class GrowingLayer(DynamicLayer):
    """The keys and values of one layer, at the front of memory that doubles when it is full.

    ``keys`` and ``values`` are views of it, or tensors that others have put there (cropped, in
    another order): these are copied to new memory before something is written behind them.
    """

    memory: tuple[Tensor, Tensor] | None = None
    positions: Tensor
    """Where the next key of each sequence goes, if ``filled`` are there."""
    filled: int

    def update(
        self, key_states: Tensor, value_states: Tensor, *arguments: Any, **keywords: Any
    ) -> tuple[Tensor, Tensor]:
        is_recorded = torch.is_grad_enabled() and (
            key_states.requires_grad or value_states.requires_grad
        )
        if is_recorded or torch.compiler.is_compiling():
            return super().update(key_states, value_states, *arguments, **keywords)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before = self.get_seq_length()
        after = before + key_states.shape[-2]
        if self.memory is None or not self.has_room(self.memory[0], after):
            self.memory = self.moved(key_states, value_states, before, after)
        if self.filled != before:
            self.positions.fill_(before)
        torch.ops.foo.cache_append.default(*self.memory, key_states, value_states, self.positions)
        self.positions.add_(after - before)
        self.filled = after
        self.keys, self.values = (each.narrow(2, 0, after) for each in self.memory)
        return self.keys, self.values

    def has_room(self, memory: Tensor, length: int) -> bool:
        """Whether the keys are still at the front of the memory, and so many fit."""
        keys: Any = self.keys
        is_front = keys.data_ptr() == memory.data_ptr() and keys.shape[0] == memory.shape[0]
        return is_front and length <= memory.shape[2]

    def moved(self, key: Tensor, value: Tensor, before: int, after: int) -> tuple[Tensor, Tensor]:
        """Return memory for twice as many, with those that are there."""
        room = max(2 * after, LEAST_ROOM)
        memory = tuple(
            each.new_empty(*each.shape[:2], room, each.shape[3]) for each in (key, value)
        )
        if before:
            held: Any = (self.keys, self.values)
            for target, source in zip(memory, held):
                target.narrow(2, 0, before).copy_(source)
        self.positions = torch.full((len(key),), before, device=key.device)
        self.filled = before
        return memory  # type: ignore[return-value]

    def reset(self) -> None:
        super().reset()
        self.memory = None


class InPlaceStaticLayer(StaticLayer):
    """The keys and values of one layer, in memory that is there from the start."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *arguments: Any, **keywords: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys: Any = self.keys
        values: Any = self.values
        positions = self.cumulative_length.expand(key_states.shape[0])
        torch.ops.foo.cache_append.default(keys, values, key_states, value_states, positions)
        self.cumulative_length.add_(key_states.shape[-2])
        return keys, values


IN_PLACE: dict[type, type] = {DynamicLayer: GrowingLayer, StaticLayer: InPlaceStaticLayer}
