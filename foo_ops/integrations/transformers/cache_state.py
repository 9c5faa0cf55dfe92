"""Descriptions of a call's arguments, and of all that a cache's objects hold.

Two calls with equal descriptions call the same operators, with the same integers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from foo_ops.integrations.transformers import cache as foo_cache
from foo_ops.integrations.transformers.recording import PLAIN, address_of

UNLIMITED = 2**62

VALUES = (bool, int, float, str, type(None))
KNOWN = (*VALUES, type, torch.dtype, torch.device, PreTrainedConfig)
"""Classes of values that a cache may hold beside tensors."""

SIZES = {
    *("hidden_size", "d_model", "n_embd"),
    *("intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"),
    *("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer"),
    *("encoder_layers", "decoder_layers"),
    *("num_attention_heads", "num_key_value_heads", "num_heads", "n_head"),
    *("encoder_attention_heads", "decoder_attention_heads"),
    *("head_dim", "d_kv", "k_head_dim", "v_head_dim"),
    *("vocab_size", "batch_size"),
}
"""Integers of configurations and caches to which no model compares the length of a cache."""


class Description:
    """Values as one flat list, so that equal lists mean the same operators.

    The lists of successive tokens are merged; integers may grow.

    Attributes:
        atoms: for a tensor its class, dtype, device and sizes, and where it occurs again its first
            place; for a list its class and length, for a dictionary its keys; other values
            themselves.
        tensors: the tensors, in order.
        places: the first place of each tensor, by its id.
        is_known: whether the values are of classes that cannot hide others.
    """

    def __init__(self, known: tuple[type, ...]) -> None:
        self.known = known
        self.atoms: list[Any] = []
        self.tensors: list[Tensor] = []
        self.places: dict[int, int] = {}
        self.is_known = True

    def add(self, value: Any, room: int | None = None) -> None:
        """Add a value. Memory may have any ``room``, its third size."""
        if isinstance(value, Tensor):
            self.add_tensor(value, room)
        elif isinstance(value, (tuple, list)):
            self.atoms += (type(value), len(value))
            for it in value:
                self.add(it, room)
        elif isinstance(value, dict):
            self.atoms += (type(value), len(value), *value)
            for it in value.values():
                self.add(it, room)
        else:
            self.atoms.append(value)
            if not isinstance(value, self.known):
                self.is_known = False

    def add_tensor(self, tensor: Tensor, room: int | None) -> None:
        place = len(self.tensors)
        first = self.places.setdefault(id(tensor), place)
        self.tensors.append(tensor)
        if first != place:
            self.atoms += (Tensor, first)
            return
        kind, shape = type(tensor), tensor.shape
        self.atoms += (kind, tensor.dtype, tensor.device, len(shape), *shape)
        if room is not None and len(shape) == 4 and shape[2] == room:
            self.atoms[-2] = None
        if kind not in PLAIN:
            self.is_known = False


class State(Description):
    """Everything that a cache's objects hold, by the object and the name.

    Attributes:
        owners: the dictionaries and lists that hold values.
        values: the values.
        owner_numbers, names: for each value the number of its owner, and its name there.
        values_of_tensors: for each tensor the place of its value.
        integers: the places of values that are integers among the atoms.
        limit: from this length on, a layer's memory is full.
    """

    def __init__(self, cache: Cache | list[Tensor]) -> None:
        super().__init__(KNOWN)
        self.owners: list[Any] = []
        # Lists of integers and names: 400 tuples would call Python's garbage collector.
        self.values: list[Any] = []
        self.owner_numbers: list[int] = []
        self.names: list[Any] = []
        self.values_of_tensors: list[int] = []
        self.integers: list[int] = []
        self.limit = UNLIMITED
        self.add_owner(cache)
        addresses: dict[int, int] = {}
        for place in self.places.values():
            self.atoms.append(addresses.setdefault(address_of(self.tensors[place]), place))

    def add_owner(self, owner: Any) -> None:
        """Add the values of an object, list or dictionary, and then those of the ones it holds."""
        content = owner if isinstance(owner, (dict, list)) else vars(owner)
        number = len(self.owners)
        self.owners.append(content)
        room = None
        if isinstance(owner, foo_cache.Memory):
            room = owner.room
            self.limit = min(self.limit, room)
        named = dict(enumerate(content)) if isinstance(content, list) else content.copy()
        self.atoms += (type(owner), len(named), *named)
        for name, value in named.items():
            kind: Any = type(value)
            if is_owner(kind):
                self.add_owner(value)
            elif room is None or name != "room":
                place = len(self.values)
                self.values.append(value)
                self.owner_numbers.append(number)
                self.names.append(name)
                if kind is int and name not in SIZES:
                    self.integers.append(len(self.atoms))
                self.add(value, room)
                while len(self.values_of_tensors) < len(self.tensors):
                    self.values_of_tensors.append(place)

    def keys(self) -> list[tuple[int, Any]]:
        """Return for each value the number of its owner and its name."""
        return list(zip(self.owner_numbers, self.names))


@lru_cache
def is_owner(kind: type) -> bool:
    """Whether objects of a class hold values of a cache: other caches, layers, memory, lists."""
    if issubclass(kind, (dict, list)):
        return True
    library = kind.__module__.partition(".")[0]
    is_callable = any("__call__" in vars(it) for it in kind.__mro__)
    is_other = issubclass(kind, (type, PreTrainedConfig, Tensor)) or is_callable
    return library in ("transformers", "foo_ops") and kind.__dictoffset__ != 0 and not is_other
