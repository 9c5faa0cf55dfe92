"""Let the fake kernels of tile kernels refuse what the launcher refuses: texts, numbers, lists."""

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

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {p.name: value for p, value in zip(self.parameters, args)} | kwargs
        values = [given.get(p.name) for p in self.parameters]
        _C.check_tile_values(self.name, self.cpp_parameters, values)


_values: dict[str, _Values] = {}


def remember_values(
    operator: torch._ops.OpOverload, parameters: Sequence[Parameter], cpp_parameters: Sequence[Any]
) -> None:
    """Remember what the kernel of an operator takes, for its fake kernel."""
    if any(p.kind in _CHECKED for p in parameters):
        _values[operator.name()] = _Values(short_name(operator), parameters, cpp_parameters)


def has_values(schema: torch._C.FunctionSchema) -> bool:
    """Return whether there may be something to check."""
    types = [str(argument.real_type) for argument in schema.arguments]
    return any(word in type_ for type_ in types for word in ("str", "number", "List["))


def checking(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Return the fake kernel, with a check of such arguments where the kernel is a tile kernel."""

    @functools.wraps(fake)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if name in _values:
            _values[name].check(args, kwargs)
        return fake(*args, **kwargs)

    return checked
