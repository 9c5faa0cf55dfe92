"""Tells torch about device ``foo``: its name, its module, its generated methods."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence

import torch

from foo_ops.device import _dlpack

# Typed storages count whole elements, and torch has none of less than a byte.
SMALLER_THAN_A_BYTE = [torch.quint4x2, torch.quint2x4]


def register(module: types.ModuleType) -> None:
    torch.utils.rename_privateuse1_backend("foo")
    torch.utils.generate_methods_for_privateuse1_backend(
        for_storage=True, unsupported_dtype=SMALLER_THAN_A_BYTE
    )
    torch._register_device_module("foo", module)
    _dlpack.register()
    if "torch._dynamo" in sys.modules:
        _register_with_dynamo()
    else:
        sys.meta_path.insert(0, _AfterDynamo())


def _register_with_dynamo() -> None:
    from foo_ops.device import _dynamo

    _dynamo.register()


class _AfterDynamo(importlib.abc.MetaPathFinder):
    """Registers with torch._dynamo once that is imported.

    torch imports it at the first use of torch.compile, which takes seconds. It has no entry point
    that would let a device register before.
    """

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch._dynamo":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(importlib.abc.Loader):
    """A loader that registers the device after the module has been executed."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        # From here on the module looks as if it had been loaded without us.
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _register_with_dynamo()
