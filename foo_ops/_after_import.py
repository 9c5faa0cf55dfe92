"""Call functions once a module has been imported, without importing it."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence

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
