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
from foo_ops.library.operators import Parameter, short_name

_CHECKED = ("text", "scalar", "floats", "ints", "tensors")


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


_values: dict[str, _Values] = {}


def remember_values(
    operator: torch._ops.OpOverload, parameters: Sequence[Parameter], cpp_parameters: Sequence[Any]
) -> None:
    """Remember what the kernel of an operator takes, for its fake kernel."""
    if any(p.kind in _CHECKED or p.role != "read" for p in parameters):
        _values[operator.name()] = _Values(short_name(operator), parameters, cpp_parameters)


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
        if name in _values:
            return _values[name].calling(fake, args, kwargs)
        return fake(*args, **kwargs)

    return checked
