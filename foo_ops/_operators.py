"""Declare the operators at the start of torch, and import their Python parts at the first use.

After ``import torch`` an operator is a schema: C++ finds its name, as compiled models and
TorchScript do. `foo_ops.ops` is imported when something is looked up in ``torch.ops.foo``, or when
an operator is called from C++. It registers all else: kernels, fake kernels, gradients, rules for
torch.vmap and autocast.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import types
from typing import Any, NamedTuple

import torch

from foo_ops import _C
from foo_ops._schemas import SCHEMAS
from foo_ops.compat import OpNamespace

OPERATORS = "foo_ops.ops"
"""Imported by its name, since it imports this module."""
TABLE = "foo_ops.tune"
"""Has the table of products that PyTorch computes, for processors without one in the package."""
RESOLVER = "foo_ops.kernels.compiler.resolve"
"""Finds kernels, also those of the device; imported with the first kernel."""


class Definition(NamedTuple):
    """An operator that was defined without a library: its own library, and its definition.

    Attributes:
        module: the module that defined it; None for an operator that came with another one.
        schema: with the operator's name, without namespace.
    """

    library: torch.library.Library
    module: str | None
    schema: str
    tags: tuple[torch.Tag, ...]

    def destroy(self) -> None:
        """End together with the library that keeps this one as a registration."""
        self.library._destroy()


_declared: dict[str, Definition] = {}
"""Operators that only `declare` has defined so far."""
# All calls have the last key. Before it, autograd would warn of lost gradients, and torch.vmap of a
# loop.
_EARLIER_KEYS, _LAST_KEY = ("Autograd", "FuncTorchBatched"), "BackendSelect"
_importers: dict[tuple[str, str], Any] = {}
"""Kernels that import the operators, until each has its own."""
# The namespace in which operators are found while they are registered.
_namespace = torch.ops.foo
_companion = os.stat(_C.__file__)


def declare() -> None:
    """Define the operators, and let their first use import them."""
    for row in SCHEMAS.splitlines():
        module, schema, names = row.split("; ")
        tags = tuple(getattr(torch.Tag, name) for name in names.split())
        library = torch.library.Library("foo", "FRAGMENT")
        definition = Definition(library, module or None, schema, tags)
        library.define(schema, tags=tags)
        name = f"foo::{schema.partition('(')[0]}"
        _declared[name] = definition
        for key in (*_EARLIER_KEYS, _LAST_KEY):
            _importers[name, key] = _C.import_at_first_call(name, key)
    vars(torch.ops)["foo"] = _Namespace()


def take_declared(
    name: str, module: str | None, schema: str, tags: tuple[torch.Tag, ...]
) -> Definition | None:
    """Return the declaration of an operator that its module defines now, if it is the same.

    A different declaration ends, as when a schema has been changed and SCHEMAS has not.
    """
    declared = _declared.get(name)
    if declared is None or declared.module != module:
        return None
    del _declared[name]
    # Its own kernels are registered next; until then the last key's makes other threads wait.
    for key in _EARLIER_KEYS:
        _importers.pop((name, key)).destroy()
    if (declared.schema, declared.tags) == (schema, tags):
        return declared
    declared.destroy()
    return None


def is_declared(name: str) -> bool:
    return name in _declared


def load(name: str = OPERATORS) -> types.ModuleType:
    """Import the operators; wait if another thread imports them, and go on in that thread itself.

    Files that were installed meanwhile do not fit the companion that is loaded.
    """
    if name in sys.modules:
        return importlib.import_module(name)
    if not os.path.samestat(os.stat(_C.__file__), _companion):
        raise ImportError(
            "foo_ops was reinstalled after this process imported torch: restart the process"
        )
    with _loading:
        return importlib.import_module(name)


def resolve(kernel: str, signature: str) -> int:
    """Return the address of a kernel; called from C++."""
    address: int = load(RESOLVER).resolve(kernel, signature)
    return address


# A child that is forked during the import would wait forever for the thread that imports.
_loading = threading.RLock()


def finish_loading() -> None:
    """Wait for threads that import operators, and let no other begin, before a fork."""
    _loading.acquire()
    for name in (OPERATORS, RESOLVER):
        if name in sys.modules:
            importlib.import_module(name)


os.register_at_fork(
    before=finish_loading, after_in_parent=_loading.release, after_in_child=_loading.release
)


def complete() -> None:
    """Mark all operators as registered; `foo_ops.ops` calls this at its end."""
    if isinstance(torch.ops.foo, _Namespace):
        # First copy the operators found so far: no other thread may find one a second time.
        vars(torch.ops.foo).update(vars(_namespace))
        torch.ops.foo.__class__ = OpNamespace  # type: ignore[assignment]
    for registration in (*_importers.values(), *_declared.values()):
        registration.destroy()
    _importers.clear()
    _declared.clear()
    if _C.has_no_products_of_torch() or _C.torch_products() == "tuned":
        importlib.import_module(TABLE).use_kept_table()


class _Namespace(OpNamespace):
    """Stands for ``torch.ops.foo`` until the operators are registered, then becomes ordinary.

    It holds no operator, so that other threads wait instead of finding one without its kernels.
    """

    def __init__(self) -> None:
        types.ModuleType.__init__(self, _namespace.__name__)

    def __getattr__(self, name: str) -> Any:
        # Programs that examine modules, such as inspect, look these up in each.
        if name.startswith("__"):
            raise AttributeError(f"{self.__name__} has no attribute {name!r}")
        load()
        return getattr(_namespace if isinstance(self, _Namespace) else self, name)

    def __dir__(self) -> list[str]:
        load()
        return dir(_namespace)
