"""Read users' functions without calling them: their bytecode, and their source where there is one.

Every question about a function's code is answered here; no other module disassembles or parses it.
Imports neither Numba nor LLVM.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

Function: TypeAlias = Callable[..., Any]

# --------------------------------------------------------------------------------------- bytecode

# Turns bytecode, which differs between versions of Python, into events, which do not.

Kind: TypeAlias = Literal[
    "global",
    "cell",
    "attribute",
    "import",
    "import from",
    "write to global",
    "store",
    "operation",
    "code",
    "with",
    "except",
    "raise",
    "yield",
    "return",
]


class Event(NamedTuple):
    """A step of a function's code.

    Attributes:
        kind: "operation" is an arithmetic operation or a call, "code" a function or comprehension
            inside this one.
        value: for "global" and "cell" the name with the attributes that are read from it at once,
            such as ``("math", "exp")``; for attributes and imports the name; for "store" the names
            of local variables, and what one of them gets; for "return" what is returned, both
            described as by `_left_by`; for "code" the code.
        line: its line in the file.
    """

    kind: Kind
    value: Any
    line: int


# Some of these instructions are only in some versions of Python.
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("LOAD_GLOBAL", "LOAD_NAME"), "global"),
    **dict.fromkeys(("LOAD_ATTR", "LOAD_METHOD"), "attribute"),
    **dict.fromkeys(("STORE_GLOBAL", "DELETE_GLOBAL"), "write to global"),
    **dict.fromkeys(("BEFORE_WITH", "SETUP_WITH", "LOAD_SPECIAL"), "with"),
    **dict.fromkeys(("RAISE_VARARGS", "RERAISE"), "raise"),
    "LOAD_DEREF": "cell",
    "IMPORT_NAME": "import",
    "IMPORT_FROM": "import from",
}
_CATCHING = ("PUSH_EXC_INFO", "SETUP_FINALLY")
_OPERATIONS = ("BINARY_", "INPLACE_", "UNARY_NEGATIVE", "CALL")
_NO_OPERATIONS = ("BINARY_SUBSCR", "BINARY_SLICE", "CALL_INTRINSIC_1")
# Instructions that push one number, and those that push the value of one variable.
_NUMBERS = ("BINARY_", "UNARY_", "COMPARE_OP")
_READS = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK")


def events(code: types.CodeType) -> tuple[Event, ...]:
    """Return the events of code in order, without those of code inside it."""
    # Code that is equal may lie on other lines.
    return _events(code, code.co_linetable)


@functools.cache
def _events(code: types.CodeType, lines: bytes) -> tuple[Event, ...]:
    found: list[Event] = []
    line, is_named, catches, before = code.co_firstlineno, False, False, None
    for step in dis.get_instructions(code):
        numbered = getattr(step, "line_number", step.starts_line)
        line = numbered or line
        if catches and numbered:
            # A handler begins with instructions without a line; the line of its except follows.
            found.append(Event("except", None, line))
        catches = step.opname in _CATCHING or (catches and not numbered)
        kind, value = _kind_and_value(step, before)
        if kind == "attribute" and is_named:
            found[-1] = Event(found[-1].kind, (*found[-1].value, value), line)
        elif kind is not None:
            found.append(Event(kind, value, line))
        is_named = kind in ("global", "cell") or (kind == "attribute" and is_named)
        before = step
    return tuple(found)


def _kind_and_value(
    step: dis.Instruction, before: dis.Instruction | None
) -> tuple[Kind | None, Any]:
    name, value = step.opname, step.argval
    if name == "RETURN_CONST":
        return "return", _count_of(value)
    if name == "RETURN_VALUE":
        return "return", None if step.is_jump_target else _left_by(before)
    if name.startswith("STORE_FAST"):
        # Python 3.13 stores and loads several variables in one instruction.
        is_one = name == "STORE_FAST" and not step.is_jump_target
        names = (value,) if isinstance(value, str) else value
        return "store", (names, _left_by(before) if is_one else None)
    if name.startswith("YIELD"):
        return "yield", None
    if name.startswith(_OPERATIONS) and name not in _NO_OPERATIONS:
        return "operation", None
    if isinstance(value, types.CodeType):
        return "code", value
    kind = _KINDS.get(name)
    return kind, (value,) if kind in ("global", "cell") else value


def _left_by(step: dis.Instruction | None) -> int | str | None:
    """Return the number of values that an instruction leaves for the next one.

    It is 0 for None. A variable's name stands for what the variable has; None is unknown.
    """
    if step is None:
        return None
    if step.opname == "LOAD_CONST":
        return _count_of(step.argval)
    if step.opname == "BUILD_TUPLE":
        return step.arg
    if step.opname in _READS:
        return str(step.argval)
    is_number = step.opname.startswith(_NUMBERS) and step.opname != "BINARY_SUBSCR"
    return 1 if is_number else None


def _count_of(constant: object) -> int:
    if constant is None:
        return 0
    return len(constant) if isinstance(constant, tuple) else 1


# ------------------------------------------------------------------------------------------ answers


def global_names(code: types.CodeType) -> frozenset[str]:
    """Return the names of the globals that code reads, and code inside it."""
    return frozenset(names[0] for names in _values(code, "global"))


def imported_names(code: types.CodeType) -> frozenset[str]:
    """Return the names of the modules that code imports, and code inside it."""
    return frozenset(_values(code, "import"))


def attribute_names(code: types.CodeType) -> frozenset[str]:
    """Return the names of the attributes that code reads, and code inside it."""
    of_names = (names[1:] for names in _values(code, "global", "cell"))
    return frozenset(_values(code, "attribute", "import from")).union(*of_names)


def writes_globals(code: types.CodeType) -> bool:
    """Whether code, or code inside it, assigns or deletes globals."""
    return any(True for _ in _values(code, "write to global"))


def references(code: types.CodeType) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the globals and closure variables that code names, with attributes, and their lines."""
    for event in _all_events(code):
        if event.kind in ("global", "cell"):
            yield event.value, event.line


def _values(code: types.CodeType, *kinds: Kind) -> Iterator[Any]:
    return (event.value for event in _all_events(code) if event.kind in kinds)


def _all_events(code: types.CodeType) -> Iterator[Event]:
    """Yield the events of code, and of code inside it where that appears."""
    for event in events(code):
        yield event
        if event.kind == "code":
            yield from _all_events(event.value)


def line_of(function: Function, kind: Kind) -> int | None:
    """Return the line of the first event of a kind in a function itself; None if it has none."""
    lines = (event.line for event in events(function.__code__) if event.kind == kind)
    return next(lines, None)


def count_operations(function: Function) -> int:
    """Count the arithmetic operations and calls in a function itself; loops count once."""
    return sum(event.kind == "operation" for event in events(function.__code__))


def returned_counts(function: Function) -> Iterator[tuple[int | None, int]]:
    """Yield the number of values of each return statement, and its line.

    The number is 0 for None, which a function also returns at its end, and None if it depends on
    the types of variables.
    """
    counts = _counts_of_variables(function.__code__)
    for event in events(function.__code__):
        if event.kind == "return":
            count = event.value
            yield counts.get(count) if isinstance(count, str) else count, event.line


def _counts_of_variables(code: types.CodeType) -> dict[str, int]:
    """Count the values in each variable, if the code shows their number and it is always the same.

    An argument is one value.
    """
    found: dict[str, set[Any]] = {
        name: {1} for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    }
    for event in events(code):
        if event.kind == "store":
            names, count = event.value
            for name in names:
                found.setdefault(name, set()).add(count)
    only = {name: count for name, (count, *others) in found.items() if not others}
    return {name: count for name, count in only.items() if isinstance(count, int)}


# ------------------------------------------------------------------------------------------- source

# Reads the source of a tile kernel: does it compute each row on its own?


# Functions of foo_ops.language that use only a tensor's dtype.
_OF_DTYPE = ("cast", "lanes", "zero")
_KNOWN_EVERYWHERE = ("ndim", "dtype")


def row_dimensions(
    function: Function, tensors: Collection[str], written: Collection[str]
) -> dict[str, int | None] | None:
    """Return how many dimensions of each tensor lie within a row; None for one that is read whole.

    A kernel works by rows if it uses its tiles only in ``for row in rows``, and ``row`` only in
    ``x.row(row)``, ``x.flat[row]`` or ``x[row, ...]``; if it accesses the tensors that it writes in
    no other way; and if it uses no size that depends on the number of rows. Otherwise the result
    is None.

    Args:
        function: the kernel, whose last argument is the range of tiles.
        tensors: the names of its tensors.
        written: the names of those that it writes.
    """
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError):
        return None
    if not isinstance(definition, ast.FunctionDef):
        return None
    *_, tiles = inspect.signature(function).parameters
    return _Rows(definition, tiles, set(tensors)).read(set(written))


class _Rows:
    def __init__(self, definition: ast.FunctionDef, tiles: str, tensors: set[str]) -> None:
        nodes = [node for statement in definition.body for node in ast.walk(statement)]
        self._parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
        self._names = [node for node in nodes if isinstance(node, ast.Name)]
        self._loops = [node for node in nodes if isinstance(node, ast.For)]
        self._tiles, self._tensors = tiles, tensors

    def read(self, written: set[str]) -> dict[str, int | None] | None:
        loops = [it for it in self._loops if _is_name(it.iter, self._tiles)]
        targets = [loop.target for loop in loops]
        rows = {it.id for it in targets if isinstance(it, ast.Name)}
        if len(list(self._uses({self._tiles}))) != len(loops) or len(rows) != 1:
            return None
        found: dict[str, int | None] = dict.fromkeys(self._tensors)
        row_uses: set[ast.AST] = set(targets)
        for name in self._uses(self._tensors):
            access = self._access(name, *rows)
            if access is not None:
                within, index = access
                if found[name.id] not in (None, within):
                    return None
                found[name.id] = within
                row_uses.add(index)
        for name in self._uses(self._tensors):
            inner = found[name.id]
            if inner is None or self._access(name, *rows) or self._tells_dtype(name):
                continue
            if not self._tells_size_within(name, inner):
                return None
        if any(name not in row_uses for name in self._uses(rows)):
            return None
        return None if any(found[name] is None for name in written) else found

    def _uses(self, names: set[str]) -> Iterator[ast.Name]:
        return (name for name in self._names if name.id in names)

    def _access(self, name: ast.Name, row: str) -> tuple[int, ast.AST] | None:
        """Return how many dimensions an access to one row leaves, and its index."""
        node = self._parents[name]
        if isinstance(node, ast.Attribute) and node.attr in ("row", "flat"):
            outer = self._parents[node]
            if node.attr == "row" and isinstance(outer, ast.Call) and len(outer.args) == 1:
                return (1, outer.args[0]) if _is_name(outer.args[0], row) else None
            if node.attr == "flat" and isinstance(outer, ast.Subscript):
                return (0, outer.slice) if _is_name(outer.slice, row) else None
        if isinstance(node, ast.Subscript) and node.value is name:
            index = node.slice
            indices = index.elts if isinstance(index, ast.Tuple) else [index]
            if _is_name(indices[0], row):
                return len(indices) - 1, indices[0]
        return None

    def _tells_dtype(self, name: ast.Name) -> bool:
        """Whether this is ``x.ndim``, ``x is None`` or ``language.zero(x)``."""
        node = self._parents[name]
        if isinstance(node, ast.Attribute):
            return node.attr in _KNOWN_EVERYWHERE
        if isinstance(node, ast.Compare):
            return all(isinstance(it, (ast.Is, ast.IsNot)) for it in node.ops)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return False
        return _is_name(node.func.value, "language") and node.func.attr in _OF_DTYPE

    def _tells_size_within(self, name: ast.Name, inner: int) -> bool:
        """Whether this is ``x.shape[-1]``, a size within rows."""
        shape = self._parents[name]
        item = self._parents[shape]
        if not isinstance(shape, ast.Attribute) or shape.attr not in ("shape", "strides"):
            return False
        if not isinstance(item, ast.Subscript):
            return False
        try:
            index = ast.literal_eval(item.slice)
        except ValueError:
            return False
        return isinstance(index, int) and -inner <= index < 0


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
