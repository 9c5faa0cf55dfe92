"""Copy functions with all that they refer to, as it is now: later changes do not reach the copies.

A kernel is compiled for one dtype today and for another one tomorrow. Both see the same globals.
A copy may also be in another form, which the compiler or the interpreter of kernels takes.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

from foo_ops.kernels.compiler.fingerprint import attribute_names, global_names, is_known


class Copies:
    """Copies functions, and in the copies what they name: globals, closures, parts of modules.

    A subclass says what becomes of a copy (`finished`), and of what is not copied (`other`).
    """

    def __init__(self) -> None:
        self._copies: dict[types.FunctionType, Any] = {}
        self._modules: dict[tuple[types.ModuleType, frozenset[str]], types.ModuleType] = {}

    def finished(self, copy: types.FunctionType) -> Callable[..., Any]:
        return copy

    def other(self, value: Any) -> Any:
        return value

    def of(self, value: Any, attributes: frozenset[str] = frozenset()) -> Any:
        """Return the copy of a value, of which a module's ``attributes`` are used."""
        if isinstance(value, types.ModuleType):
            return self._module(value, attributes)
        if not _is_plain(value):
            return self.other(value)
        if value not in self._copies:
            # Copied before what it calls is, which may be itself.
            copy = types.FunctionType(
                value.__code__,
                dict(value.__globals__),
                value.__name__,
                value.__defaults__,
                _copied_cells(value),
            )
            self._copies[value] = self.finished(copy)
            attributes = attribute_names(value.__code__)
            for name in global_names(value.__code__) & value.__globals__.keys():
                copy.__globals__[name] = self.of(value.__globals__[name], attributes)
            for cell in copy.__closure__ or ():
                cell.cell_contents = self.of(cell.cell_contents, attributes)
        return self._copies[value]

    def _module(self, module: types.ModuleType, attributes: frozenset[str]) -> types.ModuleType:
        """Copy a module, with what is used of it."""
        used = {name: vars(module)[name] for name in attributes & vars(module).keys()}
        if not used or is_known(module.__name__):
            return module
        if (module, attributes) not in self._modules:
            # Copied before what is in it is, which may refer to it.
            copy = self._modules[module, attributes] = types.ModuleType(module.__name__)
            copies = {name: self.of(value, attributes) for name, value in used.items()}
            vars(copy).update({**vars(module), **copies})
            is_of_python = module.__name__.partition(".")[0] in sys.stdlib_module_names
            if is_of_python and all(copies[name] is used[name] for name in used):
                # Such values are those of the time of a call: sys.stdout may be another one by now.
                self._modules[module, attributes] = module
        return self._modules[module, attributes]


def _is_plain(value: Any) -> bool:
    """Whether a value is a function of a user, and not one that Numba knows or has made."""
    return (
        isinstance(value, types.FunctionType)
        and not is_known(value.__module__)
        # It stands for a function of Numba's own, such as an overload.
        and not hasattr(value, "__wrapped__")
    )


def _copied_cells(function: types.FunctionType) -> tuple[types.CellType, ...] | None:
    cells = function.__closure__
    return None if cells is None else tuple(types.CellType(cell.cell_contents) for cell in cells)
