"""Hash the sources of kernels, and notice when they change on disk."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterable, Iterator

from foo_ops import __version__

# ----------------------------------------------------------------------------------------- upgrades

# Notices when the sources of kernels on disk are no longer those that this process imported.
#
# Modules are imported when they are needed, and the package may be upgraded meanwhile. A kernel
# compiled then would come partly from old and partly from new sources.


PACKAGE = "foo_ops.kernels"
# The folder of all kernels, including the compiler.
_FOLDER = os.path.dirname(os.path.dirname(__file__))


class UpgradeError(Exception):
    """A source has changed since it was imported, or may have."""


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
    """Return a stamp of each file; reading the files would take ten times as long.

    The result is empty if there are no files, as in a program that was packed into one file.
    """
    try:
        return {name: _stamp(os.stat(os.path.join(_FOLDER, name))) for name in _names()}
    except OSError:
        return {}


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_mtime_ns, status.st_size, status.st_ino


# Recorded for all modules when the first one of the package is imported.
_AT_IMPORT = _state()


def is_upgraded() -> bool:
    """Whether a file was changed, added or removed since foo_ops was imported."""
    return _state() != _AT_IMPORT


def _module_of(name: str) -> str:
    folders = name.removesuffix(".py").removesuffix(f"{os.sep}__init__").split(os.sep)
    return ".".join((PACKAGE, *folders))


_FILES = {_module_of(name): name for name in _AT_IMPORT if name != "__init__.py"}
MODULES = frozenset(_FILES)
"""The modules of kernels, except the package itself, which only imports the table of kernels."""


def source(module: str) -> bytes:
    """Return the source of a module as it was imported; raise an UpgradeError if it has changed."""
    name = _FILES[module]
    try:
        with open(os.path.join(_FOLDER, name), "rb") as file:
            content = file.read()
            if _stamp(os.fstat(file.fileno())) == _AT_IMPORT[name]:
                return content
    except OSError:
        pass
    raise UpgradeError(name)


# --------------------------------------------------------------------------------------------- keys

# Hashes the sources of kernels: a module with all modules that it imports, and the compiler.
#
# When a kernel is compiled, its module, and those that it imports, run as Python: they make
# functions, emit LLVM IR, and register types and operators. Walking through functions would not
# find all of this. So the whole text of these modules counts, and modules that do not run do not.
# Only the texts are read: neither Numba nor the modules are imported.


# The module that compiles all kernels.
_COMPILER = f"{PACKAGE}.compiler.emit"
# A module's name, followed by the names imported from it, or by a dot: then a module of that
# package is imported by a name made at run time from a string, which is in the same text.
_MENTION = re.compile(rf"{re.escape(PACKAGE)}((?:\.\w+)*)(?: import (\([^)]*\)|.*)|(\.))?")
_WORD, _TEXT = re.compile(r"\w+"), re.compile(r"[\"'](\w+)[\"']")


@functools.cache
def digest(modules: frozenset[str]) -> bytes:
    """Hash the sources of modules, of all modules that they import, and of the compiler.

    Raises an UpgradeError if one of them has changed since this process imported it.
    """
    # A program that was packed into one file has no sources.
    content = hashlib.sha256(b"" if MODULES else __version__.encode())
    for name in sorted(closure(modules)):
        content.update(name.encode() + _read(name)[0])
    return content.digest()


def closure(modules: Iterable[str]) -> set[str]:
    """Return modules and the compiler, with everything they import, also inside functions."""
    waiting, found = [*modules, _COMPILER], set()
    while waiting:
        name = waiting.pop()
        if name not in found and name in MODULES:
            found.add(name)
            waiting += _read(name)[1]
    return found


@functools.cache
def _read(module: str) -> tuple[bytes, frozenset[str]]:
    """Return a hash of a module's source, and the modules that it mentions."""
    content = source(module)
    text = content.decode()
    mentioned = {name for match in _MENTION.finditer(text) for name in _named(match, text)}
    # A module's packages are imported before the module.
    return hashlib.sha256(content).digest(), frozenset({*mentioned, *_packages(module)})


def _named(match: re.Match[str], text: str) -> Iterator[str]:
    """Yield the modules that a mention may refer to: rather too many than too few."""
    name = PACKAGE + match[1]
    yield from (name, *_packages(name))
    words = _TEXT.findall(text) if match[3] else _WORD.findall(match[2] or "")
    yield from (f"{name}.{word}" for word in words)


def _packages(name: str) -> Iterator[str]:
    """Yield the names of the packages that contain a name."""
    while name := name.rpartition(".")[0]:
        yield name
