"""Turn users' Python functions, with everything they call and refer to, into kernel sources."""

from __future__ import annotations

import dataclasses
import importlib
import linecache
import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foo_ops.kernels.compiler.fingerprint import fingerprint, is_known
from foo_ops.kernels.compiler.inspection import (
    attribute_names,
    events,
    global_names,
    returned_counts,
)
from foo_ops.kernels.compiler.kernel import (
    CHECKED,
    WRONG_INDEX,
    Fingerprint,
    KernelError,
    KernelTypeError,
    Maker,
    Source,
)
from foo_ops.kernels.compiler.reasons import (
    Named,
    is_blamed,
    is_of_library,
    named_functions,
    reworded,
)
from foo_ops.kernels.compiler.sources import PACKAGE

# ------------------------------------------------------------------------------------------- copies

# Copies functions with everything they refer to, so that later changes do not reach the copies.
#
# A kernel may be compiled for one dtype now and for another one later: both see the same globals. A
# copy may also be converted to the form that the compiler or the interpreter of kernels needs.


class Copies:
    """Copies functions together with the globals, closures and module attributes that they name.

    A subclass can transform a copy (`finished`), and values that are not copied (`other`).
    """

    def __init__(self) -> None:
        self._copies: dict[types.FunctionType, Any] = {}
        self._modules: dict[tuple[types.ModuleType, frozenset[str]], types.ModuleType] = {}

    def finished(self, copy: types.FunctionType) -> Callable[..., Any]:
        return copy

    def other(self, value: Any) -> Any:
        return value

    def of(self, value: Any, attributes: frozenset[str] = frozenset()) -> Any:
        """Return the copy of a value; of a module, copy the ``attributes`` that are used."""
        if isinstance(value, types.ModuleType):
            return self._module(value, attributes)
        if not _is_users_function(value):
            return self.other(value)
        if value not in self._copies:
            # Memoize before recursing: the function may call itself.
            copy = types.FunctionType(
                value.__code__,
                dict(value.__globals__),
                value.__name__,
                value.__defaults__,
                _copied_cells(value),
            )
            self._copies[value] = self.finished(copy)
            attributes = attribute_names(value.__code__)
            for name in global_names(value.__code__) & value.__globals__.keys():
                copy.__globals__[name] = self.of(value.__globals__[name], attributes)
            for cell in copy.__closure__ or ():
                cell.cell_contents = self.of(cell.cell_contents, attributes)
        return self._copies[value]

    def _module(self, module: types.ModuleType, attributes: frozenset[str]) -> types.ModuleType:
        """Copy a module, and the attributes of it that are used."""
        used = {name: vars(module)[name] for name in attributes & vars(module).keys()}
        if not used or is_known(module.__name__):
            return module
        if (module, attributes) not in self._modules:
            # Memoize before recursing: the module's values may refer to it.
            copy = self._modules[module, attributes] = types.ModuleType(module.__name__)
            copies = {name: self.of(value, attributes) for name, value in used.items()}
            vars(copy).update({**vars(module), **copies})
            is_of_python = module.__name__.partition(".")[0] in sys.stdlib_module_names
            if is_of_python and all(copies[name] is used[name] for name in used):
                # Use the standard library's own module: its values are read at the time of a call,
                # since sys.stdout, for example, may be replaced.
                self._modules[module, attributes] = module
        return self._modules[module, attributes]


def _is_users_function(value: Any) -> bool:
    """Whether a value is a user's function, not one that Numba knows or has made."""
    return (
        isinstance(value, types.FunctionType)
        and not is_known(value.__module__)
        # A wrapper stands for one of Numba's own functions, such as an overload.
        and not hasattr(value, "__wrapped__")
    )


def _copied_cells(function: types.FunctionType) -> tuple[types.CellType, ...] | None:
    cells = function.__closure__
    return None if cells is None else tuple(types.CellType(cell.cell_contents) for cell in cells)


# ---------------------------------------------------------------------------------------- functions

# Turns users' Python functions, with everything they call, into sources of kernels.


if TYPE_CHECKING:
    from foo_ops.kernels.compiler.kernel import Kernel

# Not spelt out, since no compiled kernel depends on that module: a full name in the text would
# count as a dependency (foo_ops/kernels/compiler/sources.py).
_INTERPRETED = f"{PACKAGE}.interpret.kernels"


@dataclasses.dataclass
class UserKernel(Source):
    """A user's functions, and the maker that makes a kernel of them.

    Their globals are constants, with the values at the time when the kernel is first compiled or
    loaded for any signature. If that fails, the next attempt reads the globals again.

    Attributes:
        operator: the operator's name, for messages.
        functions: the functions to compile.
        maker: receives a signature, the options, and the functions compiled by Numba.
        options: everything else that the code depends on; their repr is part of the cache key.
    """

    operator: str
    functions: tuple[Callable[..., Any], ...]
    maker: Maker
    options: tuple[Any, ...]
    _seen: tuple[Callable[..., Any], ...] = ()
    _is_settled: bool = False

    @property
    def title(self) -> str:
        """The first function's name, so that a function of several operators is compiled once."""
        return re.sub(r"\W+", "", self.functions[0].__name__)

    def fingerprint(self, signature: str) -> Fingerprint:
        made = self.maker.fingerprint(self.options)
        seen = fingerprint(*self._look(), has_places=signature.endswith(CHECKED))
        content = made.content and seen.content and made.content + seen.content
        return Fingerprint(content, made.modules | seen.modules | {__name__})

    def build(self, signature: str) -> Kernel:
        # Use the globals that the fingerprint was computed from.
        seen, compilable = self._seen or self._look(), _Compilable()
        # foo_ops.language loads lazily, but Numba only sees what is registered before it starts.
        for module in sorted(fingerprint(*seen).modules):
            importlib.import_module(module)
        return self.maker(signature, *self.options, *map(compilable.of, seen))

    def interpret(self, signature: str) -> Kernel:
        """Make the kernel with the maker of the same name in kernels/interpret/kernels.py."""
        maker = dataclasses.replace(self.maker, module=_INTERPRETED)
        return maker(signature, *self.options, *self._look())

    def settle(self) -> None:
        self._is_settled = True

    def _look(self) -> tuple[Callable[..., Any], ...]:
        """Read the globals, unless a kernel has been made with the ones read before."""
        if not self._is_settled:
            self._seen = tuple(map(Copies().of, self.functions))
        return self._seen

    def explain(self, signature: str, error: Exception) -> KernelError:
        """Return an error that names the operator, the dtypes and the line of the user's file."""
        file, line = _place_of(error) or (None, 0)
        reason = _reason_of(error)
        blamed = _blamed(reason, self._seen or self.functions, file, line)
        if blamed is not None:
            file, line = blamed.file, blamed.line
            reason = blamed.refusal(sees_rows=self._sees_rows)
        elif file is None:
            file, line = _place_in(self.functions[0], reason)
        kind = KernelTypeError if reason.startswith(WRONG_INDEX) else KernelError
        return kind(
            f"{self.operator}: its kernel cannot be compiled for {signature}: "
            f"{reworded(reason, sees_rows=self._sees_rows)} ({_shown(file, line)})"
        )

    @property
    def _sees_rows(self) -> bool:
        return self.maker.function == "make_tile_kernel"


class _Compilable(Copies):
    """Wraps functions, and the functions they call, in ``njit``, so that Numba compiles both."""

    def finished(self, copy: types.FunctionType) -> Any:
        from numba import njit

        _refuse_python(copy)
        return njit(copy)


_DEBUGGING = ("print", "breakpoint", "pdb")
_NO_WITH = "a kernel must not use with: put the with statement around the call of the operator"
_NO_TRY = "a kernel must not use try, since nothing in a kernel raises: write if"
_REFUSED = {
    "with": _NO_WITH,
    "except": _NO_TRY,
    "raise": "a kernel must not raise",
    "yield": "a kernel must not yield: generators are not supported",
}


def _refuse_python(function: types.FunctionType) -> None:
    """Refuse statements that a kernel cannot have.

    These are exceptions, which Numba compiles to a status that nobody would check; generators,
    whose state would outlive a call; and debugging, whose message names the way to do it.
    """
    code = function.__code__
    for event in events(code):
        place = f"Raised from {code.co_filename} ({event.line})"
        if event.kind in _REFUSED:
            raise TypeError(f"{_REFUSED[event.kind]} {place}")
        if event.kind not in ("global", "import"):
            continue
        name = event.value if event.kind == "import" else event.value[0]
        # A user's function may have such a name.
        if name in _DEBUGGING and not isinstance(
            function.__globals__.get(name), types.FunctionType
        ):
            raise TypeError(
                f"a compiled kernel cannot use {name}; set FOO_INTERPRET=1 to interpret kernels as "
                f"Python, with print, pdb and exceptions {place}"
            )


# --------------------------------------------------------------------------------------- errors

_PACKAGE = str(Path(__file__).parents[2])


def _is_the_compilers(file: str) -> bool:
    """Whether a file belongs to foo_ops or Numba, not to the user."""
    numba = sys.modules.get("numba")
    folders = [_PACKAGE, *(numba.__path__ if numba is not None else ())]
    return any(file.startswith(folder + os.sep) for folder in folders)


def _place_of(error: BaseException) -> tuple[str, int] | None:
    """Return file and line of a compiler error, or None if its message has none."""
    # The innermost comes first.
    for found, number in re.findall(
        r"(?:\b(?:at|from) (?=\S)|File \")(\S[^\n]*?)(?: \(|\", line )(\d+)[):]",
        _without_colours(error),
    ):
        file = os.path.abspath(found)
        if not _is_the_compilers(file):
            return (found if os.path.isabs(found) else file), int(number)
    return None


def _place_in(function: Callable[..., Any], reason: str) -> tuple[str, int]:
    """Return the place of a function; of its return, if the reason is the value and it has one."""
    code, lines = function.__code__, set()
    if reason.startswith("the kernel must return"):
        lines = {line for count, line in returned_counts(function) if count != 0}
    return code.co_filename, lines.pop() if len(lines) == 1 else code.co_firstlineno


def _shown(file: str, line: int) -> str:
    text = linecache.getline(file, line).strip()
    return f"{file}:{line}: {text}" if text else f"{file}:{line}"


def _blamed(
    reason: str, functions: tuple[Callable[..., Any], ...], file: str | None, line: int
) -> Named | None:
    """Return the function that a kernel cannot call, if that is the reason."""
    is_told = file is not None and not is_of_library(file)
    there = [
        (named, is_blamed(named, reason))
        for named in named_functions(functions)
        if not is_told or (named.file, named.line) == (file, line)
    ]
    blamed = next((named for named, is_it in there if is_it), None)
    if blamed is None and (is_told or file is not None):
        # The reason names another function, inside the compiler's or a library's implementation of
        # this one.
        blamed = next(
            (it for it, is_it in there if not it.is_known and (is_it is False or not is_told)), None
        )
    return blamed


def _reason_of(error: BaseException) -> str:
    """Return the compiler's message in one line, without traceback, colours and advice."""
    text = _without_colours(error)
    # The target has no types on the heap; only the error message names them.
    if re.search(r"NRT required|\b(?:list|set|array|DictType)[(\[]", text):
        return "a kernel must not allocate"
    # One of our own intrinsics says this about its arguments.
    specific = re.search(
        rf"raised a specific error:\s*\w+: ([^\n]+)\s*raised from {re.escape(_PACKAGE)}", text
    )
    if specific:
        return specific[1]
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("Failed in ")]
    if len(lines) > 1 and lines[1].startswith(">>> "):
        return f"{lines[0]} {lines[1].removeprefix('>>> ')}"
    return lines[0].partition(" Raised from ")[0] if lines else type(error).__name__


def _without_colours(error: BaseException) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error))
