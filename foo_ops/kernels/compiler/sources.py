"""Hash the sources of kernels, and notice when they change on disk. Light: no Numba, no LLVM."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterable, Iterator

from foo_ops import __version__

# ----------------------------------------------------------------------------------------- upgrades

# Notice when the sources of kernels on disk are no longer those that this process imported.
#
# Modules are imported when they are needed, and the package may be upgraded meanwhile. A kernel
# that is compiled then comes from some of the old sources and some of the new ones.


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


# --------------------------------------------------------------------------------------------- keys

# Hash the sources of kernels: a module with all that it imports, and what compiles it.
#
# When a kernel is compiled, its module, and those that it imports, run as Python: they make
# functions, emit LLVM's language, and register types and operators. What comes of that, no walk
# through functions tells. So these modules count whole, and others, which do not run, do not count.
# Needs neither Numba nor the modules themselves: it reads their texts.


# All kernels go through it.
_COMPILER = f"{PACKAGE}.compiler.emit"
# A module's name, and the names that are imported from it, or a point: then a module of that
# package is imported by a name that is made at run time, of a text that stands there, too.
_MENTION = re.compile(rf"{re.escape(PACKAGE)}((?:\.\w+)*)(?: import (\([^)]*\)|.*)|(\.))?")
_WORD, _TEXT = re.compile(r"\w+"), re.compile(r"[\"'](\w+)[\"']")


@functools.cache
def digest(modules: frozenset[str]) -> bytes:
    """Hash the sources of modules, of all that they import, and of the compiler.

    Raises an UpgradeError where one of them is no longer what this process imported.
    """
    # A program that was packed into one file has no sources.
    content = hashlib.sha256(b"" if MODULES else __version__.encode())
    for name in sorted(closure(modules)):
        content.update(name.encode() + _read(name)[0])
    return content.digest()


def closure(modules: Iterable[str]) -> set[str]:
    """Return modules and the compiler, with all that they import, wherever they do so."""
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
    # A module's packages are imported before it is.
    return hashlib.sha256(content).digest(), frozenset({*mentioned, *_packages(module)})


def _named(match: re.Match[str], text: str) -> Iterator[str]:
    """Yield the modules that a mention may mean: more rather than too few."""
    name = PACKAGE + match[1]
    yield from (name, *_packages(name))
    words = _TEXT.findall(text) if match[3] else _WORD.findall(match[2] or "")
    yield from (f"{name}.{word}" for word in words)


def _packages(name: str) -> Iterator[str]:
    """Yield the names of the packages above a name."""
    while name := name.rpartition(".")[0]:
        yield name
