"""Notice when the sources of kernels on disk are no longer those that this process imported.

Modules are imported when they are needed, and the package may be upgraded meanwhile. A kernel that
is compiled then comes from some of the old sources and some of the new ones.
"""

from __future__ import annotations

import os

PACKAGE = "foo_ops.kernels"
# That of all kernels: the compiler is among them.
_FOLDER = os.path.dirname(os.path.dirname(__file__))


class UpgradeError(Exception):
    """Says that a source has changed since it was imported, or could have been."""


def _names() -> list[str]:
    names = [
        os.path.relpath(os.path.join(folder, name), _FOLDER)
        for folder, _, files in os.walk(_FOLDER)
        for name in files
    ]
    return sorted(name for name in names if _is_source(name))


def _is_source(name: str) -> bool:
    return name.endswith(".py") and not os.path.basename(name).startswith(".")


def _state() -> dict[str, tuple[int, int, int]]:
    """Return what changes with each file; to read them takes ten times as long.

    It is empty where there are no files, as in a program that was packed into one.
    """
    try:
        return {name: _stamp(os.stat(os.path.join(_FOLDER, name))) for name in _names()}
    except OSError:
        return {}


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_mtime_ns, status.st_size, status.st_ino


# The first module of the package to be imported takes note of all of them.
_AT_IMPORT = _state()


def is_upgraded() -> bool:
    """Whether a file has changed, or has come or gone, since foo_ops was imported."""
    return _state() != _AT_IMPORT


def _module_of(name: str) -> str:
    folders = name.removesuffix(".py").removesuffix(f"{os.sep}__init__").split(os.sep)
    return ".".join((PACKAGE, *folders))


_FILES = {_module_of(name): name for name in _AT_IMPORT if name != "__init__.py"}
MODULES = frozenset(_FILES)
"""The modules of kernels, but for the package itself, which makes the table of their names."""


def source(module: str) -> bytes:
    """Return the source of a module as it was imported; raises an UpgradeError if it has changed
    since.
    """
    name = _FILES[module]
    try:
        with open(os.path.join(_FOLDER, name), "rb") as file:
            content = file.read()
            if _stamp(os.fstat(file.fileno())) == _AT_IMPORT[name]:
                return content
    except OSError:
        pass
    raise UpgradeError(name)
