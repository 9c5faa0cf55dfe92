"""Hash the sources of kernels: a module with all that it imports, and what compiles it.

When a kernel is compiled, its module, and those that it imports, run as Python: they make
functions, emit LLVM's language, and register types and operators. What comes of that, no walk
through functions tells. So these modules count whole, and others, which do not run, do not count.
Needs neither Numba nor the modules themselves: it reads their texts.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Iterator

from foo_ops import __version__
from foo_ops.kernels.compiler.upgrades import MODULES, PACKAGE, source

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
