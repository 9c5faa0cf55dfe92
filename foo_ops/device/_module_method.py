"""Install ``module.foo()``, which gives way to children, parameters and buffers of that name.

torch could generate this method, too, but as a function of the class. That would hide members of a
module, which only ``Module.__getattr__`` finds, and torch rejects members named like an existing
attribute.
"""

import sys
import types
from typing import Any

import torch

NAME = "foo"


def foo(self: torch.nn.Module, device: Any = None) -> torch.nn.Module:
    """Move all parameters and buffers to foo, by default to the current device."""
    return self._apply(lambda tensor: tensor.foo(device))


def _is_method(value: Any) -> bool:
    return getattr(value, "__func__", None) is foo


def _is_called_by_torch() -> bool:
    """Whether the caller's caller is a function of torch."""
    name = sys._getframe(2).f_globals.get("__name__", "")
    return name.partition(".")[0] == "torch"


class _Method:
    """The method, which gives way to any member of that name.

    torch's own code does not see the method. It never calls it, but checks in dozens of places
    whether a module has a name: to register a member, or to copy one into the graph of a model.
    """

    def __get__(self, module: torch.nn.Module | None, owner: type) -> Any:
        if module is None:
            return foo
        try:
            member = owner.__getattr__(module, NAME)  # type: ignore[attr-defined]
        except AttributeError:
            if _is_called_by_torch():
                raise
            return types.MethodType(foo, module)
        # A module that forwards lookups to another one would find the other's method.
        return types.MethodType(foo, module) if _is_method(member) else member


_names_of = torch.nn.Module.__dir__


def _dir(self: torch.nn.Module) -> list[str]:
    """List the names of a module; for torch, without the method."""
    names = _names_of(self)
    if _is_called_by_torch() and _is_method(getattr(self, NAME)):
        names.remove(NAME)
    return names


def install() -> None:
    setattr(torch.nn.Module, NAME, _Method())
    torch.nn.Module.__dir__ = _dir  # type: ignore[method-assign]
