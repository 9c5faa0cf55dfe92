"""Read in a tile kernel's source whether it computes each row on its own."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterator
from typing import Any

# These look at a tensor's dtype alone.
_OF_DTYPE = ("cast", "lanes", "zero")
_KNOWN_EVERYWHERE = ("ndim", "dtype")


def row_dimensions(
    function: Callable[..., Any], tensors: Collection[str], written: Collection[str]
) -> dict[str, int | None] | None:
    """Return how many dimensions of each tensor lie within a row; None for one that is read whole.

    A kernel works by rows if its tiles are used in ``for row in rows`` alone and ``row`` in
    ``x.row(row)``, ``x.flat[row]`` or ``x[row, ...]``, if what is written is accessed in no other
    way, and if it asks for no size that depends on the number of rows. Else the result is None.

    Args:
        function: the kernel, whose last argument is the range of tiles.
        tensors: the names of its tensors.
        written: those of them that it writes.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        return None
    (definition,) = tree.body
    if not isinstance(definition, ast.FunctionDef):
        return None
    *_, tiles = inspect.signature(function).parameters
    return _Reader(definition, tiles, set(tensors)).read(set(written))


class _Reader:
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
