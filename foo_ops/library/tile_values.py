"""Let the fake kernels of tile kernels refuse what the launcher refuses.

That is texts, numbers and lists, and tensors that are written where others are, too. Fake tensors
tell only of those that lie in one storage: of two storages that share memory, such as two arrays of
NumPy, nothing but the addresses would tell, and fake tensors have none.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from foo_ops import _C
from foo_ops.library.operators import Parameter, short_name, tensors_in


@dataclasses.dataclass(frozen=True)
class _Values:
    """The parameters of an operator that has a tile kernel."""

    name: str
    parameters: Sequence[Parameter]
    cpp_parameters: Sequence[Any]

    def calling(
        self, fake: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return what the fake kernel does, and check in the order in which the launcher does."""
        given = {p.name: value for p, value in zip(self.parameters, args)} | kwargs
        values = [given.get(p.name) for p in self.parameters]
        _C.check_tile_values(self.name, self.cpp_parameters, values)
        results = fake(*args, **kwargs)
        if any(p.role != "read" for p in self.parameters):
            _C.check_written_memory(self.name, self.cpp_parameters, values)
        return results


# By the operator, and the dispatch key of the kernel.
_values: dict[str, dict[str, _Values]] = {}


@dataclasses.dataclass(frozen=True)
class Remembered:
    """A registration: it ends with that of the kernel."""

    name: str
    key: str
    values: _Values

    def destroy(self) -> None:
        if _values[self.name].get(self.key) is self.values:
            del _values[self.name][self.key]


def remember_values(
    operator: torch._ops.OpOverload,
    key: str,
    parameters: Sequence[Parameter],
    cpp_parameters: Sequence[Any],
) -> Remembered:
    """Remember what the kernel of an operator takes, for its fake kernel."""
    values = _Values(short_name(operator), parameters, cpp_parameters)
    _values.setdefault(operator.name(), {})[key] = values
    return Remembered(operator.name(), key, values)


def _values_of(name: str, arguments: Any) -> _Values | None:
    """Return what the tile kernel takes that would be called; of no device, any of them."""
    kernels = _values.get(name)
    if not kernels:
        return None
    types = (tensor.device.type for tensor in tensors_in(arguments))
    key = torch._C._dispatch_key_for_device(next(types, "meta"))
    return next(iter(kernels.values()), None) if key == "Meta" else kernels.get(key)


def has_values(schema: torch._C.FunctionSchema) -> bool:
    """Return whether there may be something to check."""
    types = [str(argument.real_type) for argument in schema.arguments]
    return schema.is_mutable or any(
        word in type_ for type_ in types for word in ("str", "number", "List[")
    )


def checking(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Return the fake kernel, with checks of its arguments where the kernel is a tile kernel."""

    @functools.wraps(fake)
    def checked(*args: Any, **kwargs: Any) -> Any:
        values = _values_of(name, (args, kwargs))
        return fake(*args, **kwargs) if values is None else values.calling(fake, args, kwargs)

    return checked
