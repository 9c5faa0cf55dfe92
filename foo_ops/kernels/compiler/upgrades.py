"""Notice when the sources of kernels on disk are no longer those that this process imported.

Modules are imported when they are needed, and the package may be upgraded meanwhile. A kernel that
is compiled then comes from some of the old sources and some of the new ones.
"""

from __future__ import annotations

import hashlib
import os

# That of all kernels: the compiler is among them.
_FOLDER = os.path.dirname(os.path.dirname(__file__))


def _names() -> list[str]:
    names = [
        os.path.relpath(os.path.join(folder, name), _FOLDER)
        for folder, _, files in os.walk(_FOLDER)
        for name in files
    ]
    return sorted(name for name in names if _is_source(name))


def _is_source(name: str) -> bool:
    return name.endswith(".py") and not os.path.basename(name).startswith(".")


def _state() -> list[tuple[str, int, int, int]]:
    """Return what changes with the files; to read them takes ten times as long.

    It is empty where there are no files, as in a program that was packed into one.
    """
    try:
        found = [(name, os.stat(os.path.join(_FOLDER, name))) for name in _names()]
    except OSError:
        return []
    return [(name, each.st_mtime_ns, each.st_size, each.st_ino) for name, each in found]


# The first module of the package to be imported takes note of all of them.
_AT_IMPORT = _state()


def is_upgraded() -> bool:
    """Whether a file has changed, or has come or gone, since foo_ops was imported."""
    return _state() != _AT_IMPORT


def digest() -> bytes | None:
    """Hash the sources as they were imported; None if they have changed since."""
    content = hashlib.sha256()
    try:
        for name, *_ in _AT_IMPORT:
            with open(os.path.join(_FOLDER, name), "rb") as file:
                content.update(file.read())
    except OSError:
        return None
    return None if is_upgraded() else content.digest()
