"""Describe what the code of a function depends on: for the key of the cache on disk.

A function counts with its compiled code, its defaults, what it closes over and the globals that it
names, and so do the functions and classes among these, wherever they are. Line numbers and comments
do not count, but for kernels that tell where they have gone wrong. Of this package's own functions
the modules count, see sources.py. Needs no Numba: a kernel that is already on disk is loaded
without it.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import importlib
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from foo_ops.kernels.compiler.kernel import Fingerprint
from foo_ops.kernels.compiler.upgrades import MODULES


@dataclasses.dataclass(frozen=True)
class _Walk:
    """A walk through functions and classes: the number of each one seen so far, by id, and the
    modules of this package that were met.
    """

    has_places: bool
    seen: dict[int, int] = dataclasses.field(default_factory=dict)
    modules: set[str] = dataclasses.field(default_factory=set)
    # No other value gets the id of one that has been seen.
    _alive: list[Any] = dataclasses.field(default_factory=list)

    def is_new(self, value: Any) -> bool:
        if id(value) in self.seen:
            return False
        self.seen[id(value)] = len(self.seen)
        self._alive.append(value)
        return True

    def note(self, module: str) -> None:
        if module in MODULES:
            self.modules.add(module)


def fingerprint(*functions: Callable[..., Any], has_places: bool = False) -> Fingerprint:
    """Return the same for the same functions in every process, and another where anything
    differs.

    Args:
        functions: the functions.
        has_places: files and line numbers count, too.
    """
    walk = _Walk(has_places)
    content = b"\0".join(part for function in functions for part in _parts(function, walk))
    return Fingerprint(content, frozenset(walk.modules))


def _parts(value: Any, walk: _Walk) -> Iterator[bytes]:
    inner = _inner(value)
    if _may_refer_to_itself(value) or inner is not value:
        # Not tuples: constants are one or two of them, as the compiler of Python likes.
        if not walk.is_new(value):
            yield b"seen %d" % walk.seen[id(value)]
            return
    if inner is not value:
        yield repr(_options(value)).encode()
        yield from _parts(inner, walk)
    elif isinstance(value, types.FunctionType):
        yield from _function_parts(value, walk)
    elif isinstance(value, types.CodeType):
        yield from _code_parts(value, walk)
    elif isinstance(value, types.ModuleType):
        yield from _module_parts(value, frozenset(), walk)
    elif isinstance(value, types.MethodType):
        yield from _parts((value.__func__, value.__self__), walk)
    elif isinstance(value, functools.partial):
        yield from _parts((value.func, value.args, value.keywords), walk)
    elif isinstance(value, (tuple, list)):
        yield f"{type(value).__name__} of {len(value)}".encode()
        for part in value:
            yield from _parts(part, walk)
    elif isinstance(value, (dict, types.MappingProxyType)):
        yield from _parts(tuple(value.items()), walk)
    elif isinstance(value, (frozenset, set)):
        yield repr(sorted(map(repr, value))).encode()
    elif isinstance(value, type):
        yield from _class_parts(value, walk)
    elif hasattr(value, "tobytes") and hasattr(value, "shape"):
        yield repr((value.dtype, value.shape)).encode() + value.tobytes()
    elif _is_described(type(value)) or not hasattr(value, "__dict__"):
        yield repr(value).encode()
    else:
        # Its text need not say all, or says where it is.
        yield from _parts((type(value), vars(value)), walk)


def _may_refer_to_itself(value: Any) -> bool:
    kinds = (types.FunctionType, type, list, dict)
    return isinstance(value, kinds) or not _is_described(type(value))


def _inner(value: Any) -> Any:
    """Return the Python function in what is made of one: ``njit``, ``intrinsic``, methods of
    classes and ``functools.cache``.
    """
    for attribute in ("py_func", "_defn", "__func__", "__wrapped__", "fget"):
        inner = getattr(value, attribute, None)
        if isinstance(inner, types.FunctionType) and not isinstance(value, types.MethodType):
            return inner
    return value


def _options(value: Any) -> list[tuple[str, str]]:
    """Return what Numba was told of a function: ``fastmath=True`` makes other code."""
    names = ("targetoptions", "locals", "_prefer_literal", "_ctor_kwargs")
    found = {name: getattr(value, name, None) or {} for name in names}
    return [
        (name, repr(sorted(it.items()) if isinstance(it, dict) else it))
        for name, it in found.items()
    ]


def _function_parts(function: types.FunctionType, walk: _Walk) -> Iterator[bytes]:
    if is_known(function.__module__):
        yield f"{function.__module__}.{function.__qualname__}".encode()
        walk.note(function.__module__)
        return
    code = function.__code__
    yield from _parts((code, function.__defaults__, function.__kwdefaults__), walk)
    for cell in function.__closure__ or ():
        yield from _cell_parts(cell, walk)
    attributes = attribute_names(code)
    for name in sorted(global_names(code) & function.__globals__.keys()):
        yield name.encode()
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType):
            yield from _module_parts(value, attributes, walk)
        else:
            yield from _parts(value, walk)
    for name in sorted(imported_names(code)):
        yield from _module_parts(_imported(name, function), attributes, walk)
    for overload in _overloads(function):
        yield from _parts(overload, walk)


def _imported(name: str, function: types.FunctionType) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except (ImportError, ValueError):
        # Its name is relative to the package.
        return importlib.import_module(f".{name}", function.__globals__.get("__package__"))


def _cell_parts(cell: types.CellType, walk: _Walk) -> Iterator[bytes]:
    try:
        value = cell.cell_contents
    except ValueError:
        # A variable of the function around it has no value yet.
        yield b"empty"
    else:
        yield from _parts(value, walk)


def _overloads(function: Callable[..., Any]) -> Iterator[tuple[Any, str]]:
    """Yield what Numba's users have registered for a function, which it compiles instead."""
    templates = sys.modules.get("numba.core.typing.templates")
    registered = templates.builtin_registry.globals if templates is not None else ()
    for known, type_ in registered:
        if known is function:
            for template in getattr(type_, "templates", ()):
                if hasattr(template, "_overload_func"):
                    yield template._overload_func, repr(sorted(template._jit_options.items()))


def _module_parts(module: types.ModuleType, names: frozenset[str], walk: _Walk) -> Iterator[bytes]:
    """Yield what a function may use of a module that it names."""
    yield module.__name__.encode()
    if is_known(module.__name__):
        walk.note(module.__name__)
        lazy: Mapping[str, str] = vars(module).get("MODULE_OF", {})
        for name in sorted(names & lazy.keys()):
            yield name.encode()
            walk.note(lazy[name])
        return
    # Not the module's dictionary: some load what they have when they are asked for it.
    for name in sorted(names & set(dir(module))):
        value = getattr(module, name)
        yield name.encode()
        if isinstance(value, types.ModuleType):
            yield from _module_parts(value, names, walk)
        else:
            yield from _parts(value, walk)


def _class_parts(class_: type, walk: _Walk) -> Iterator[bytes]:
    """Yield a class: intrinsics read its attributes and call its methods."""
    yield repr(class_).encode()
    walk.note(class_.__module__)
    if _is_described(class_):
        return
    if issubclass(class_, enum.Enum):
        yield repr([(member.name, member.value) for member in class_]).encode()
        return
    yield from _parts(class_.__bases__, walk)
    names = sorted(vars(class_).keys() - _OF_EVERY_CLASS)
    yield from _parts(tuple((name, vars(class_)[name]) for name in names), walk)
    if any(is_known(base.__module__) for base in class_.__bases__):
        yield _source_around(class_)


# Some are made on demand.
_OF_EVERY_CLASS = frozenset(
    ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__abstractmethods__")
) | {"_abc_impl", "__slotnames__"}


def _source_around(class_: type) -> bytes:
    """Return the text of the module of a type of Numba: it registers there what the type can do."""
    file = getattr(sys.modules.get(class_.__module__), "__file__", None)
    if file is None:
        return b""
    with open(file, "rb") as source:
        return source.read()


@functools.cache
def _is_described(class_: type) -> bool:
    """Whether the key says all of a class by its name."""
    name = class_.__module__
    if is_known(name):
        return True
    # A user's file may have the name of one of Python's.
    file = getattr(sys.modules.get(name), "__file__", None)
    is_pythons = name.partition(".")[0] in sys.stdlib_module_names and name != "__main__"
    return is_pythons and (file is None or file.startswith(_STANDARD + os.sep))


_STANDARD = os.path.dirname(os.__file__)


def _code_parts(code: types.CodeType, walk: _Walk) -> Iterator[bytes]:
    yield code.co_code
    yield getattr(code, "co_exceptiontable", b"")
    yield repr((code.co_names, code.co_varnames, code.co_argcount, code.co_flags)).encode()
    yield repr((code.co_freevars, code.co_posonlyargcount, code.co_kwonlyargcount)).encode()
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
        package in ("llvmlite", "numba", "numpy", "torch")
        or module == "foo_ops.language"
        or module.startswith("foo_ops.kernels.")
    )


def global_names(code: types.CodeType) -> frozenset[str]:
    """Return the names of the globals that a function's code reads."""
    return _names(code, "LOAD_GLOBAL", "LOAD_NAME")


def imported_names(code: types.CodeType) -> frozenset[str]:
    """Return the names of the modules that a function's code imports."""
    return _names(code, "IMPORT_NAME")


def attribute_names(code: types.CodeType) -> frozenset[str]:
    """Return the names of the attributes that a function's code reads."""
    return _names(code, "LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")


@functools.cache
def _names(code: types.CodeType, *operations: str) -> frozenset[str]:
    own = (step.argval for step in dis.get_instructions(code) if step.opname in operations)
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(own).union(*(_names(const, *operations) for const in inner))
