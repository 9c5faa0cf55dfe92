"""Read users' functions without calling them: their bytecode, and their source where there is one.

Every question about a function's code is answered here; no other module disassembles or parses it.
Imports neither Numba nor LLVM.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import math
import textwrap
import types
from collections.abc import Callable, Collection, Iterator, Mapping
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


def _definition(function: Function) -> tuple[ast.FunctionDef, int] | None:
    """Return a function's definition and its first line; None for lambdas and without a source.

    A tree is not kept: it is large, and is read once.
    """
    try:
        lines, first = inspect.getsourcelines(function)
        definition = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, SyntaxError):
        return None
    return (definition, first) if isinstance(definition, ast.FunctionDef) else None


# -------------------------------------------------------------------------------- kinds of numbers


KINDS = (bool, int, float, complex)
"""Kinds of numbers, from the narrowest."""

_CONVERSIONS = {"bool": bool, "int": int, "float": float}
_PREDICATES = ("isfinite", "isinf", "isnan")
_OF_INTEGERS = ("comb", "factorial", "gcd", "isqrt", "lcm", "perm")
_KEEPING = ("ceil", "floor", "trunc")


def returned_kinds(
    function: Function, arguments: Mapping[str, type]
) -> Iterator[tuple[list[type | None], int]]:
    """Yield the kinds of the values of each return statement, and its line.

    A kind is None if the source does not determine it; without a source nothing is yielded.

    Args:
        function: a function of numbers.
        arguments: the known kinds of arguments.

    Example:
        >>> import math
        >>> from foo_ops.kernels.compiler.inspection import returned_kinds
        >>> def half(x):
        ...     return x / 2
        >>> [kinds for kinds, line in returned_kinds(half, {"x": int})]
        [[<class 'float'>]]
    """
    found = _definition(function)
    if found is None:
        return
    definition, first = found
    reader = _Kinds(definition, arguments, inspect.getclosurevars(function).globals)
    for node in _own_nodes(definition):
        if isinstance(node, ast.Return) and node.value is not None:
            is_tuple = isinstance(node.value, ast.Tuple)
            values = node.value.elts if is_tuple else [node.value]  # type: ignore[attr-defined]
            yield [reader.kind(value) for value in values], first + node.lineno - 1


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes inside a node, except nested functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.Lambda)):
            yield child
            yield from _own_nodes(child)


class _Kinds:
    """Kinds of a function's variables and expressions, as its source determines them."""

    def __init__(
        self,
        definition: ast.FunctionDef,
        arguments: Mapping[str, type],
        global_values: Mapping[str, Any],
    ) -> None:
        self._arguments = arguments
        self._globals = global_values
        # All values assigned to each name; None for one that is unknown.
        self._values: dict[str, list[ast.expr | None]] = {}
        self._asked: set[str] = set()
        for node in _own_nodes(definition):
            self._note(node)

    def _note(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    self._values.setdefault(target.id, []).append(node.value)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            read = ast.Name(node.target.id, ast.Load())
            value = ast.BinOp(read, node.op, node.value)
            self._values.setdefault(node.target.id, []).append(value)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            # Counts every store, also those above: all values are known if none is left over.
            self._values.setdefault(node.id, []).append(None)

    def _variable(self, name: str) -> type | None:
        """Return the kind of a variable's values, if they all have the same."""
        kinds = {self._arguments[name]} if name in self._arguments else set()
        values = self._values.get(name, [])
        known = [value for value in values if value is not None]
        if 2 * len(known) != len(values):
            return None
        if name in self._asked:
            # Recursive assignment (`x = x + 1`): the other terms decide.
            return bool
        self._asked.add(name)
        found = [self.kind(value) for value in known]
        self._asked.remove(name)
        if not values and name not in self._arguments:
            value = self._globals.get(name)
            return type(value) if type(value) in KINDS else None
        kinds.update(kind for kind in found if kind is not None)
        return kinds.pop() if len(kinds) == 1 and None not in found else None

    def kind(self, node: ast.expr) -> type | None:
        if isinstance(node, ast.Constant):
            return type(node.value) if type(node.value) in KINDS else None
        if isinstance(node, ast.Name):
            return self._variable(node.id)
        if isinstance(node, ast.Compare):
            return bool
        if isinstance(node, ast.UnaryOp):
            return self._unary(node)
        if isinstance(node, ast.BinOp):
            return self._binary(node)
        if isinstance(node, ast.IfExp):
            return self._widest([node.body, node.orelse])
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Attribute) and self._is_of_math(node):
            return float
        return None

    def _unary(self, node: ast.UnaryOp) -> type | None:
        if isinstance(node.op, ast.Not):
            return bool
        kind = self.kind(node.operand)
        return int if kind is bool else kind

    def _binary(self, node: ast.BinOp) -> type | None:
        kind = self._widest([node.left, node.right])
        if isinstance(node.op, ast.Div):
            return None if kind is None else max(kind, float, key=KINDS.index)
        is_power = isinstance(node.op, ast.Pow)
        return None if is_power and kind in (bool, int) else kind

    def _call(self, node: ast.Call) -> type | None:
        function = node.func
        if isinstance(function, ast.Attribute) and self._is_of_math(function):
            return self._of_math(function.attr, node.args)
        if not isinstance(function, ast.Name) or function.id in self._globals or not node.args:
            return None
        if function.id in _CONVERSIONS:
            return _CONVERSIONS[function.id]
        if function.id in ("abs", "max", "min", "round"):
            kind = self._widest(node.args)
            return float if function.id == "abs" and kind is complex else kind
        return None

    def _of_math(self, name: str, arguments: list[ast.expr]) -> type | None:
        if name in _PREDICATES:
            return bool
        if name in _KEEPING:
            # In kernels these return floats, which can hold every result.
            return self._widest(arguments)
        return None if name in _OF_INTEGERS else float

    def _is_of_math(self, node: ast.Attribute) -> bool:
        module = node.value
        return isinstance(module, ast.Name) and self._globals.get(module.id) is math

    def _widest(self, nodes: list[ast.expr]) -> type | None:
        kinds = [self.kind(node) for node in nodes]
        known = [kind for kind in kinds if kind is not None]
        return max(known, key=KINDS.index) if len(known) == len(kinds) else None


# ------------------------------------------------------------------------------------ rows of tiles


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
    found = _definition(function)
    if found is None:
        return None
    *_, tiles = inspect.signature(function).parameters
    return _Rows(found[0], tiles, set(tensors)).read(set(written))


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
