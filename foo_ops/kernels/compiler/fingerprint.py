"""Describe everything that a function's code depends on, for the key of the cache on disk.

A function counts with its compiled code, its defaults, its closure and the globals that it names,
and so do functions and classes among these, wherever they are defined. Line numbers and comments
count only for kernels that report the place of an error. For this package's own functions, their
modules count: see sources.py. Does not import Numba: a kernel on disk is loaded without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import importlib
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from foo_ops.kernels.compiler.inspection import attribute_names, global_names, imported_names
from foo_ops.kernels.compiler.kernel import Fingerprint
from foo_ops.kernels.compiler.sources import MODULES

# A kernel refers to about twenty functions, classes and objects. A kernel that refers to a plugin
# of pytest, as an assert in a test's file does, refers to all of pytest: a minute, and gigabytes.
MOST = 1000


class _TooManyError(Exception):
    """Functions refer to more than `MOST` other functions, classes and objects."""


@dataclasses.dataclass(frozen=True)
class _Walk:
    """A walk through functions and classes.

    It numbers the objects seen so far, by id, and collects the modules of this package.
    """

    has_places: bool
    seen: dict[int, int] = dataclasses.field(default_factory=dict)
    modules: set[str] = dataclasses.field(default_factory=set)
    # Keeps seen values alive, so that no other value gets their id.
    _alive: list[Any] = dataclasses.field(default_factory=list)

    def is_new(self, value: Any) -> bool:
        if id(value) in self.seen:
            return False
        if len(self.seen) == MOST:
            raise _TooManyError
        self.seen[id(value)] = len(self.seen)
        self._alive.append(value)
        return True

    def note(self, module: str) -> None:
        if module in MODULES:
            self.modules.add(module)


def fingerprint(*functions: Callable[..., Any], has_places: bool = False) -> Fingerprint:
    """Return a fingerprint of functions that is equal in every process, and differs if they do.

    Args:
        functions: the functions.
        has_places: files and line numbers count, too.

    Returns:
        The fingerprint, without content if there are more than `MOST` functions, classes and
        objects, or if they refer to each other in a chain that is longer than Python's stack.
    """
    walk = _Walk(has_places)
    try:
        content = b"\0".join(part for function in functions for part in _parts(function, walk))
    except (_TooManyError, RecursionError):
        # The walk is incomplete, so add every module that a kernel may load.
        language = sys.modules.get("foo_ops.language")
        later = getattr(language, "MODULE_OF", {}).values()
        return Fingerprint(None, frozenset(walk.modules.union(later)))
    return Fingerprint(content, frozenset(walk.modules))


def _parts(value: Any, walk: _Walk, attributes: frozenset[str] = frozenset()) -> Iterator[bytes]:
    """Yield the parts of a value; of a module, only the ``attributes`` that are used."""
    inner = _inner(value)
    # Not tuples: whether equal ones are one object depends on Python's compiler.
    has_identity = _may_refer_to_itself(value) or inner is not value
    if has_identity and not walk.is_new(value):
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
        yield from _module_parts(value, walk, attributes)
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
    elif hasattr(type(value), "tobytes") and hasattr(type(value), "shape"):
        yield repr((value.dtype, value.shape)).encode() + value.tobytes()
    else:
        yield from _object_parts(value, walk)


def _may_refer_to_itself(value: Any) -> bool:
    kinds = (types.FunctionType, type, list, dict)
    return isinstance(value, kinds) or not _is_covered(type(value).__module__)


def _inner(value: Any) -> Any:
    """Return the Python function that a value wraps, or the value.

    Wrappers are ``njit``, ``intrinsic``, methods and properties of classes, and
    ``functools.cache``.
    """
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial, type)):
        return value
    # Reading an attribute of other types may do anything, as with pytest.mark.
    if type(value).__module__.partition(".")[0] not in ("builtins", "functools", "numba"):
        return value
    for attribute in ("py_func", "_defn", "__func__", "__wrapped__", "fget", "func"):
        inner = getattr(value, attribute, None)
        if isinstance(inner, types.FunctionType):
            return inner
    return value


def _options(value: Any) -> list[tuple[str, str]]:
    """Return the options of a function for Numba: ``fastmath=True`` makes other code."""
    names = ("targetoptions", "locals", "_prefer_literal", "_ctor_kwargs")
    found = {name: getattr(value, name, None) or {} for name in names}
    return [
        (name, repr(sorted(it.items()) if isinstance(it, dict) else it))
        for name, it in found.items()
    ]


def _function_parts(function: types.FunctionType, walk: _Walk) -> Iterator[bytes]:
    module, code = function.__module__, function.__code__
    if is_known(module):
        yield f"{module}.{function.__qualname__}".encode()
        walk.note(module)
        return
    attributes = attribute_names(code)
    for cell in function.__closure__ or ():
        yield from _cell_parts(cell, walk, attributes)
    if _is_covered(module):
        yield f"{module}.{function.__qualname__}".encode()
        return
    yield from _parts((code, function.__defaults__, function.__kwdefaults__), walk)
    for name in sorted(global_names(code) & function.__globals__.keys()):
        yield name.encode()
        yield from _parts(function.__globals__[name], walk, attributes)
    for name in sorted(imported_names(code)):
        yield from _parts(_imported(name, function), walk, attributes)
    yield from _parts(_overloads(function), walk)


def _imported(name: str, function: types.FunctionType) -> types.ModuleType | None:
    """Import a module as a function would; None if that fails."""
    # The name may be relative to the package.
    for it, package in ((name, None), (f".{name}", function.__globals__.get("__package__"))):
        with contextlib.suppress(Exception):
            return importlib.import_module(it, package)
    return None


def _cell_parts(cell: types.CellType, walk: _Walk, attributes: frozenset[str]) -> Iterator[bytes]:
    try:
        value = cell.cell_contents
    except ValueError:
        # The enclosing function's variable has no value yet.
        yield b"empty"
    else:
        yield from _parts(value, walk, attributes)


def _overloads(function: Callable[..., Any]) -> tuple[tuple[Any, str], ...]:
    """Return the overloads that users have registered for a function; Numba compiles these."""
    templates = sys.modules.get("numba.core.typing.templates")
    registered = templates.builtin_registry.globals if templates is not None else ()
    return tuple(
        (template._overload_func, repr(sorted(template._jit_options.items())))
        for known, type_ in registered
        if known is function
        for template in getattr(type_, "templates", ())
        if hasattr(template, "_overload_func")
    )


def _module_parts(module: types.ModuleType, walk: _Walk, names: frozenset[str]) -> Iterator[bytes]:
    """Yield the attributes of a module that a function may use."""
    yield module.__name__.encode()
    if is_known(module.__name__):
        walk.note(module.__name__)
        lazy: Mapping[str, str] = vars(module).get("MODULE_OF", {})
        for name in sorted(names & lazy.keys()):
            yield name.encode()
            walk.note(lazy[name])
        return
    # Not the module's dictionary: some modules load attributes lazily.
    for name in sorted(names & set(dir(module))):
        yield name.encode()
        yield from _parts(getattr(module, name, None), walk, names)


def _class_parts(class_: type, walk: _Walk) -> Iterator[bytes]:
    """Yield the parts of a class: intrinsics read its attributes and call its methods."""
    yield repr(class_).encode()
    if _is_covered(class_.__module__):
        walk.note(class_.__module__)
    elif issubclass(class_, enum.Enum):
        yield repr([(member.name, member.value) for member in class_]).encode()
    else:
        yield from _parts(class_.__bases__, walk)
        names = sorted(vars(class_).keys() - _OF_EVERY_CLASS)
        yield from _parts(tuple((name, vars(class_)[name]) for name in names), walk)
        if any(is_known(base.__module__) for base in class_.__bases__):
            yield _source_around(class_)


# Left out: some are made on demand, some are places in a file, some are specific to a process.
_OF_EVERY_CLASS = frozenset(
    (
        *("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__slotnames__"),
        *("__abstractmethods__", "_abc_impl", "__dataclass_fields__"),
        *("__firstlineno__", "__static_attributes__"),
    )
)


def _source_around(class_: type) -> bytes:
    """Return the source of a Numba type's module, which registers the type's operations."""
    file = getattr(sys.modules.get(class_.__module__), "__file__", None)
    if file is None:
        return b""
    with open(file, "rb") as source:
        return source.read()


def _object_parts(value: Any, walk: _Walk) -> Iterator[bytes]:
    """Yield the parts of an object; its repr need not show all of it."""
    class_ = type(value)
    if _is_covered(class_.__module__):
        yield repr(value).encode()
        return
    slots = {name for it in class_.__mro__ for name in vars(it).get("__slots__", ())}
    attributes = {name: getattr(value, name, None) for name in sorted(slots)}
    attributes |= getattr(value, "__dict__", {})
    # The default repr holds an address; it is used only for objects without Python attributes.
    if class_.__repr__ is not object.__repr__ or not attributes:
        yield repr(value).encode()
    yield from _parts((class_, attributes), walk)


@functools.cache
def _is_covered(module: str | None) -> bool:
    """Whether the key covers a module: it is known, or Python's own."""
    if module is None or is_known(module):
        return module is not None
    # A user's file may have the name of a standard module.
    file = getattr(sys.modules.get(module), "__file__", None)
    is_pythons = module.partition(".")[0] in sys.stdlib_module_names and module != "__main__"
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

    The module is None for a function made by ``exec``.
    """
    if module is None:
        return False
    package = module.partition(".")[0]
    return (
        package in ("llvmlite", "numba", "numpy", "torch")
        or module == "foo_ops.language"
        or module.startswith("foo_ops.kernels.")
    )
