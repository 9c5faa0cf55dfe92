"""Build programs node by node, where equal nodes are one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from foo_ops.kernels.flex.program import Gradient, Node, Program

_INVOLUTIONS = ("neg", "not")


def name_of(dtype: torch.dtype) -> str:
    """Return what programs call a dtype."""
    return str(dtype).removeprefix("torch.")


class Builder:
    """Nodes of several programs, and the numbers that stand in the functions.

    A number gets a place of its own wherever it stands, so that a program does not tell whether two
    happen to be equal. What formulas bring themselves is a `constant`, one node for one value.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.numbers: list[float] = []
        self.integers: list[int] = []
        self._places: dict[Node, int] = {}
        self._constants: dict[tuple[str, float], int] = {}
        self._values: dict[int, float] = {}

    def add(self, dtype: torch.dtype, operation: str, *operands: int, name: str = "") -> int:
        """Return the node that computes this, which may be there already."""
        known = self._simplified(dtype, operation, operands)
        if known is not None:
            return known
        node = Node(name_of(dtype), operation, operands, name)
        place = self._places.setdefault(node, len(self.nodes))
        if place == len(self.nodes):
            self.nodes.append(node)
        return place

    def number(self, value: float, dtype: torch.dtype) -> int:
        """Return a new node for a number of the function's."""
        if dtype.is_floating_point:
            self.numbers.append(float(value))
            return self.add(dtype, "number", len(self.numbers) - 1)
        self.integers.append(int(value))
        return self.add(dtype, "integer", len(self.integers) - 1)

    def constant(self, value: float, dtype: torch.dtype) -> int:
        """Return the node for a number that a formula brings."""
        key = (name_of(dtype), value)
        if key not in self._constants:
            self._constants[key] = self.number(value, dtype)
            self._values[self._constants[key]] = value
        return self._constants[key]

    def value_of(self, node: int) -> float | None:
        """Return the value of a constant, and None for all other nodes."""
        return self._values.get(node)

    def dtype_of(self, node: int) -> torch.dtype:
        """Return a node's dtype."""
        dtype: torch.dtype = getattr(torch, self.nodes[node].dtype)
        return dtype

    def _simplified(
        self, dtype: torch.dtype, operation: str, operands: Sequence[int]
    ) -> int | None:
        """Return a node that has the value of another operation already, exactly."""
        first = operands[0] if operands else -1
        if operation == "cast" and self.dtype_of(first) == dtype:
            return first
        if operation == "cast" and first in self._values and not dtype.is_complex:
            return self.constant(_converted(self._values[first], dtype), dtype)
        if operation in _INVOLUTIONS and self.nodes[first].operation == operation:
            return self.nodes[first].operands[0]
        if operation == "where" and operands[1] == operands[2]:
            return operands[1]
        if operation == "mul" and 1 in map(self.value_of, operands):
            return operands[0] if self.value_of(operands[1]) == 1 else operands[1]
        if operation in ("and", "or"):
            return self._simplified_bools(dtype, operation, operands)
        return None

    def _simplified_bools(
        self, dtype: torch.dtype, operation: str, operands: Sequence[int]
    ) -> int | None:
        one, other = operands
        if one == other:
            return one
        for operand, rest in ((one, other), (other, one)):
            if dtype == torch.bool and operand in self._values:
                return rest if bool(self._values[operand]) == (operation == "and") else operand
        return None


def _converted(value: float, dtype: torch.dtype) -> float:
    if dtype == torch.bool:
        return bool(value)
    is_whole = not dtype.is_floating_point and math.isfinite(value)
    return int(value) if is_whole else value


class Texts:
    """Write programs of one builder, whose captured tensors and numbers have common places.

    Places are given in the order of their first use, and nodes stand behind their operands.
    """

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._captured: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._integers: dict[int, int] = {}

    def write(self, output: int, gradients: Iterable[Gradient] = ()) -> str:
        """Return a program's text, without the nodes that it does not need."""
        gradients = tuple(gradients)
        roots = [output, *(node for it in gradients for node in (it.value, *it.indices))]
        places: dict[int, int] = {}
        nodes: list[Node] = []
        for old in self._ordered(roots):
            places[old] = len(nodes)
            nodes.append(self._renumbered(self._builder.nodes[old], places))
        return str(
            Program(
                tuple(nodes),
                places[output],
                tuple(
                    Gradient(
                        _place(self._captured, it.captured),
                        places[it.value],
                        tuple(places[index] for index in it.indices),
                    )
                    for it in gradients
                ),
            )
        )

    def _ordered(self, roots: Sequence[int]) -> list[int]:
        """Return the nodes that the roots need, each behind its operands."""
        done: dict[int, None] = {}
        waiting = list(reversed(roots))
        while waiting:
            node = waiting[-1]
            missing = [it for it in self._builder.nodes[node].arguments if it not in done]
            if missing and node not in done:
                waiting.extend(reversed(missing))
            else:
                done.setdefault(waiting.pop())
        return list(done)

    def _renumbered(self, node: Node, places: dict[int, int]) -> Node:
        operands = tuple(places[it] for it in node.arguments)
        tables = {"load": self._captured, "number": self._numbers, "integer": self._integers}
        table = tables.get(node.operation)
        if table is not None:
            operands = (_place(table, node.operands[0]), *operands)
        return Node(node.dtype, node.operation, operands, node.name)

    @property
    def captured(self) -> list[int]:
        """Return which captured tensors the programs need, in the order of their places."""
        return list(self._captured)

    @property
    def numbers(self) -> list[float]:
        """Return the floating-point numbers that the programs need."""
        return [self._builder.numbers[it] for it in self._numbers]

    @property
    def integers(self) -> list[int]:
        """Return the integers that the programs need."""
        return [self._builder.integers[it] for it in self._integers]


def _place(table: dict[int, int], key: int) -> int:
    return table.setdefault(key, len(table))
