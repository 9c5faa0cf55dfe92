"""Read in a function's source which kind of number it returns, to refuse it where it is defined."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

KINDS = (bool, int, float, complex)
"""From the narrowest."""

_CONVERSIONS = {"bool": bool, "int": int, "float": float}
_PREDICATES = ("isfinite", "isinf", "isnan")
_OF_INTEGERS = ("comb", "factorial", "gcd", "isqrt", "lcm", "perm")
_KEEPING = ("ceil", "floor", "trunc")


def returned_kinds(
    function: Callable[..., Any], arguments: Mapping[str, type]
) -> Iterator[tuple[list[type | None], int]]:
    """Yield of which kind the values of each return statement are, and its line.

    It is None where the source does not tell; without a source nothing is yielded.

    Args:
        function: a function of numbers.
        arguments: the kinds of those that are known.

    Example:
        >>> import math
        >>> from foo_ops.library.returned_kinds import returned_kinds
        >>> def half(x):
        ...     return x / 2
        >>> [kinds for kinds, line in returned_kinds(half, {"x": int})]
        [[<class 'float'>]]
    """
    try:
        lines, first = inspect.getsourcelines(function)
        definition = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, SyntaxError):
        return
    if not isinstance(definition, ast.FunctionDef):
        return
    source = _Source(definition, arguments, inspect.getclosurevars(function).globals)
    for node in _own_nodes(definition):
        if isinstance(node, ast.Return) and node.value is not None:
            is_tuple = isinstance(node.value, ast.Tuple)
            values = node.value.elts if is_tuple else [node.value]  # type: ignore[attr-defined]
            yield [source.kind(value) for value in values], first + node.lineno - 1


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is inside, but for functions inside of it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.Lambda)):
            yield child
            yield from _own_nodes(child)


class _Source:
    """What the source of a function says about its variables."""

    def __init__(
        self,
        definition: ast.FunctionDef,
        arguments: Mapping[str, type],
        global_values: Mapping[str, Any],
    ) -> None:
        self._arguments = arguments
        self._globals = global_values
        # For each name all that it is set to; None is unknown.
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
            # Also of the two above: the number of stores tells whether all values are known.
            self._values.setdefault(node.id, []).append(None)

    def _variable(self, name: str) -> type | None:
        """Return the kind of what a name is set to, where that is always the same."""
        kinds = {self._arguments[name]} if name in self._arguments else set()
        values = self._values.get(name, [])
        known = [value for value in values if value is not None]
        if 2 * len(known) != len(values):
            return None
        if name in self._asked:
            # It is set to something made of itself, which is no narrower than the rest of it.
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
            # Kernels round to floats, which have room for every result.
            return self._widest(arguments)
        return None if name in _OF_INTEGERS else float

    def _is_of_math(self, node: ast.Attribute) -> bool:
        module = node.value
        return isinstance(module, ast.Name) and self._globals.get(module.id) is math

    def _widest(self, nodes: list[ast.expr]) -> type | None:
        kinds = [self.kind(node) for node in nodes]
        known = [kind for kind in kinds if kind is not None]
        return max(known, key=KINDS.index) if len(known) == len(kinds) else None
