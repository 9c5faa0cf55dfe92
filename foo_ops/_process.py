"""The process: its environment variables, its imports, its forks."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

# ---------------------------------------------------------------------------- environment variables

# Switches.


def switch(name: str) -> bool | None:
    """Return whether an environment variable, 0 or 1, is 1; None if it is not set."""
    chosen = os.environ.get(name)
    if chosen and chosen not in ("0", "1"):
        raise ValueError(f"{name} must be 0 or 1, got {chosen}")
    return chosen == "1" if chosen else None


# ------------------------------------------------------------------------------------------ imports


Action = Callable[[], None]

_waiting: dict[str, list[Action]] = {}


def after_import(name: str, action: Action) -> None:
    """Call ``action`` now if the module is loaded, else as soon as it is.

    Serves registrations with modules of torch that import slowly and that few programs use.
    """
    if name in sys.modules:
        action()
    elif name in _waiting:
        _waiting[name].append(action)
    else:
        _waiting[name] = [action]
        sys.meta_path.insert(0, _Finder(name))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, fullname)
        return spec


class _Loader(importlib.abc.Loader):
    """A loader that calls the waiting actions after the module has been executed."""

    def __init__(self, loader: importlib.abc.Loader, name: str) -> None:
        self._loader = loader
        self._name = name

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        # From here on the module looks as if it had been loaded without us.
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        for action in _waiting.pop(self._name):
            action()


# -------------------------------------------------------------------------------------------- forks

# A fork waits until the compiler of kernels is idle.
#
# Otherwise a child would find the compiler in the middle of its work, with locks that nobody
# releases, since the thread that holds them is not in the child. This holds from the start of
# torch: other code may compile with Numba before any kernel is needed here.


# Held while the compiler works, and during a fork.
compiler_lock: Any = threading.RLock()
_held: list[Any] = []


def compiler_locks() -> list[Any]:
    """Return the locks of the compiler, in the order in which it takes them."""
    numba = getattr(sys.modules.get("numba.core.compiler_lock"), "global_compiler_lock", None)
    return [compiler_lock] if numba is None else [compiler_lock, numba._lock]


def _before_fork() -> None:
    for lock in compiler_locks():
        lock.acquire()
        _held.append(lock)


def _after_fork() -> None:
    """Release the locks in the parent, and in the child, whose thread is the one that took them."""
    while _held:
        _held.pop().release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
