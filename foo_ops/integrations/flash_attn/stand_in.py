"""Let ``import flash_attn`` find foo's functions."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from foo_ops.integrations.flash_attn import bert_padding, functions

NAME = "flash_attn"
VERSION = "2.8.3"


def install() -> None:
    """Let ``import flash_attn`` find these functions, and ``flash_attn.bert_padding``.

    Raises:
        RuntimeError: if the flash_attn package itself is installed.

    Example:
        >>> foo_ops.integrations.flash_attn.install()
        >>> from flash_attn import flash_attn_with_kvcache
        >>> foo_ops.integrations.flash_attn.uninstall()
    """
    uninstall()
    if importlib.util.find_spec(NAME) is not None:
        raise RuntimeError(
            "foo_ops.integrations.flash_attn.install: the flash_attn package is installed; "
            "import the functions from foo_ops.integrations.flash_attn instead"
        )
    names = {
        name: function
        for name, function in vars(functions).items()
        if name.startswith("flash_attn_")
    }
    package = _add(NAME, {"__version__": VERSION, **names})
    package.__path__ = []
    for name, contents in {
        "flash_attn_interface": names,
        "bert_padding": {name: getattr(bert_padding, name) for name in bert_padding.__all__},
    }.items():
        setattr(package, name, _add(f"{NAME}.{name}", contents))


def uninstall() -> None:
    """Undo `install`.

    Example:
        >>> foo_ops.integrations.flash_attn.uninstall()
    """
    for name, module in list(sys.modules.items()):
        if isinstance(module, _StandIn):
            del sys.modules[name]


class _StandIn(ModuleType):
    """A module without a file."""


def _add(name: str, contents: dict[str, Any]) -> _StandIn:
    module = _StandIn(name, "foo_ops.integrations.flash_attn in place of flash_attn.")
    module.__spec__ = ModuleSpec(name, loader=None, is_package=name == NAME)
    vars(module).update(contents)
    sys.modules[name] = module
    return module
