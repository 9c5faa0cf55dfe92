"""Registers kernels of compiled graphs, so that observers can wrap them.

A graph calls kernels by their names in its module and passes tensors, so no operator is dispatched
that one could watch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

Kernel = Callable[..., Any]
# Whether each argument is written; None for arguments that are not tensors.
Written = list[bool | None]
Around = Callable[[str, Written, Kernel], Kernel]


class _Module(NamedTuple):
    names: dict[str, Any]
    written: dict[str, Written]
    kernels: dict[str, Kernel]


_modules: list[_Module] = []
# Wrappers by owner. The last one is the outermost.
_arounds: dict[str, Around | None] = {"sanitizer": None, "capture": None}


def _put_in(module: _Module) -> None:
    for name, kernel in module.kernels.items():
        for around in filter(None, _arounds.values()):
            kernel = around(name, module.written[name], kernel)
        module.names[name] = kernel


def add(names: dict[str, Any], types: dict[str, list[str]]) -> None:
    """Add the kernels of a module, given the C++ types of their arguments."""
    written = {
        kernel: [None if "*" not in each else not each.startswith("const ") for each in its_types]
        for kernel, its_types in types.items()
    }
    module = _Module(names, written, {name: names[name] for name in types})
    _modules.append(module)
    _put_in(module)


def put_around(who: str, around: Around | None) -> None:
    """Wrap each kernel by the owner's function; None removes the wrapper."""
    _arounds[who] = around
    for module in _modules:
        _put_in(module)
