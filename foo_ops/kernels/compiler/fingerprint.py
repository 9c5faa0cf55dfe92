"""Describe, in bytes, what the code of a function depends on: for the key of the cache on disk.

A function counts with its compiled code, its defaults, what it closes over and the globals that it
names, and so do the functions among these, wherever they are. Line numbers and comments do not
count, but for kernels that tell where they have gone wrong. Needs no Numba: a kernel that is
already on disk is loaded without it.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class _Walk:
    """A walk through functions: the number of each one seen so far, by id."""

    has_places: bool
    seen: dict[int, int] = dataclasses.field(default_factory=dict)


def fingerprint(*functions: Callable[..., Any], has_places: bool = False) -> bytes:
    """Return the same for the same functions in every process, and another where anything
    differs.

    Args:
        functions: the functions.
        has_places: files and line numbers count, too.
    """
    walk = _Walk(has_places)
    return b"\0".join(part for function in functions for part in _parts(function, walk))


def _parts(value: Any, walk: _Walk) -> Iterator[bytes]:
    value = _function_of(value)
    if isinstance(value, types.FunctionType):
        if id(value) in walk.seen:
            yield b"function %d" % walk.seen[id(value)]
            return
        walk.seen[id(value)] = len(walk.seen)
        yield from _function_parts(value, walk)
    elif isinstance(value, types.CodeType):
        yield from _code_parts(value, walk)
    elif isinstance(value, (tuple, list)):
        yield f"{type(value).__name__} of {len(value)}".encode()
        for part in value:
            yield from _parts(part, walk)
    elif isinstance(value, (frozenset, set)):
        yield repr(sorted(map(repr, value))).encode()
    elif isinstance(value, type) and issubclass(value, enum.Enum):
        yield repr([(member.name, member.value) for member in value]).encode()
    elif hasattr(value, "tobytes") and hasattr(value, "shape"):
        yield repr((value.dtype, value.shape)).encode() + value.tobytes()
    else:
        yield repr(value).encode()


def _function_of(value: Any) -> Any:
    """Return the Python function in what Numba makes of one: ``njit`` and ``intrinsic``."""
    for attribute in ("py_func", "_defn"):
        inner = getattr(value, attribute, None)
        if isinstance(inner, types.FunctionType):
            return inner
    return value


def _function_parts(function: types.FunctionType, walk: _Walk) -> Iterator[bytes]:
    if is_known(function.__module__):
        yield f"{function.__module__}.{function.__qualname__}".encode()
        return
    yield from _parts(function.__code__, walk)
    yield from _parts(function.__defaults__, walk)
    for cell in function.__closure__ or ():
        yield from _parts(cell.cell_contents, walk)
    attributes = attribute_names(function.__code__)
    for name in sorted(global_names(function.__code__) & function.__globals__.keys()):
        yield name.encode()
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType):
            yield from _module_parts(value, attributes, walk)
        else:
            yield from _parts(value, walk)


def _module_parts(module: types.ModuleType, names: frozenset[str], walk: _Walk) -> Iterator[bytes]:
    """Yield what a function may use of a module that it names."""
    yield module.__name__.encode()
    if is_known(module.__name__):
        return
    for name in sorted(names & vars(module).keys()):
        value = vars(module)[name]
        yield name.encode()
        if isinstance(value, types.ModuleType):
            yield from _module_parts(value, names, walk)
        else:
            yield from _parts(value, walk)


def _code_parts(code: types.CodeType, walk: _Walk) -> Iterator[bytes]:
    yield code.co_code
    yield repr((code.co_names, code.co_varnames, code.co_argcount, code.co_flags)).encode()
    if walk.has_places:
        yield repr((code.co_filename, code.co_firstlineno, code.co_linetable)).encode()
    for constant in code.co_consts:
        yield from _parts(constant, walk)


def is_known(module: str | None) -> bool:
    """Whether the key covers a module by its package's version or by its source.

    The module is None for a function that was made by ``exec``.
    """
    if module is None:
        return False
    package = module.partition(".")[0]
    return (
        package in ("numba", "numpy", "torch")
        or module == "foo_ops.language"
        or module.startswith("foo_ops.kernels.")
    )


def global_names(code: types.CodeType) -> frozenset[str]:
    """Return the names of the globals that a function's code reads."""
    return _names(code, "LOAD_GLOBAL", "LOAD_NAME")


def attribute_names(code: types.CodeType) -> frozenset[str]:
    """Return the names of the attributes that a function's code reads."""
    return _names(code, "LOAD_ATTR", "LOAD_METHOD")


@functools.cache
def _names(code: types.CodeType, *operations: str) -> frozenset[str]:
    own = (step.argval for step in dis.get_instructions(code) if step.opname in operations)
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(own).union(*(_names(const, *operations) for const in inner))
