"""Copy plain Python functions with all that they call, in a form that something else can run."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from foo_ops.kernels.compiler.fingerprint import attribute_names, global_names, is_known


class Copies:
    """Copies functions, and in the copies what they name: globals, closures, parts of modules.

    A subclass says what becomes of a copy (`finished`), and of what is no plain function (`other`).
    """

    def __init__(self) -> None:
        self._copies: dict[types.FunctionType, Any] = {}

    def finished(self, copy: types.FunctionType) -> Callable[..., Any]:
        return copy

    def other(self, value: Any) -> Any:
        return value

    def of(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType) or not _is_plain(value):
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
                named = value.__globals__[name]
                is_module = isinstance(named, types.ModuleType)
                copy.__globals__[name] = (
                    self._module(named, attributes) if is_module else self.of(named)
                )
            for cell in copy.__closure__ or ():
                cell.cell_contents = self.of(cell.cell_contents)
        return self._copies[value]

    def _module(self, module: types.ModuleType, names: frozenset[str]) -> types.ModuleType:
        """Copy a module, with those of its functions copied that are used."""
        functions = {name: vars(module)[name] for name in names & vars(module).keys()}
        functions = {name: value for name, value in functions.items() if _is_plain(value)}
        if is_known(module.__name__) or not functions:
            return self.of(module)
        copy = types.ModuleType(module.__name__)
        vars(copy).update(vars(module))
        vars(copy).update({name: self.of(value) for name, value in functions.items()})
        return copy


def _is_plain(value: Any) -> bool:
    return (
        isinstance(value, types.FunctionType)
        and not is_known(value.__module__)
        # What stands for a function of Numba's own, such as an overload.
        and not hasattr(value, "__wrapped__")
    )


def _copied_cells(function: types.FunctionType) -> tuple[types.CellType, ...] | None:
    cells = function.__closure__
    return None if cells is None else tuple(types.CellType(cell.cell_contents) for cell in cells)
