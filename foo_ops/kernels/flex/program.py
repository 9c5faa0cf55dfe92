"""Programs: a user's function of one score, as text. Imports neither Numba nor LLVM.

A line is a node, and nodes are numbered from 0 on::

    float32 input score
    int32 input query
    int32 input key
    int32 sub 1 2
    float32 load 0 3
    float32 add 0 4
    output 5

A line has the dtype of the result, as torch names it, then the operation, then its operands, which
are numbers of earlier nodes. These operations have other operands:

    input NAME          one of `INPUTS`
    number I            the I-th of the call's floating-point numbers
    integer I           the I-th of its integers; with dtype bool, whether it is not zero
    load C ...          the element of the captured tensor C at the indices that follow: one for
                        each dimension, negative ones counted from the end

The last lines are the results: ``output NODE``, and in a program of gradients also
``gradient C VALUE INDEX ...``, which adds the node VALUE to an element of the gradient of C.

Both operands of arithmetic have the dtype of the result; both operands of a comparison have the
same dtype. 16-bit floats are computed in float32: only ``load`` and ``cast`` have such a dtype, and
a cast to float32 follows. The text holds no number and no size of a call, so that a program is
compiled once for all calls.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

# The score; its indices, all int32; and, in a program of gradients, the gradient of the function's
# result.
INPUTS = ("score", "batch", "head", "query", "key", "grad")

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
DTYPES = ("bool", *INTEGERS, *FLOATS)

# Functions of one floating-point number.
FUNCTIONS = (
    *("exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "tanh", "sin", "cos", "erf"),
    *("floor", "ceil", "trunc", "round"),
)
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
# First for any numbers; then for floats, or for integers with a rounded quotient; then for integers
# and bools. ``minimum`` and ``maximum`` are NaN if one operand is. ``floor_divide`` and
# ``remainder`` round down, as in Python, ``trunc_divide`` and ``fmod`` towards zero; integers
# divided by zero give 0.
ARITHMETIC = (
    *("add", "sub", "mul", "minimum", "maximum"),
    *("div", "pow", "floor_divide", "trunc_divide", "remainder", "fmod"),
    *("and", "or", "xor", "shift_left", "shift_right"),
)
# ``not`` inverts all bits, or a bool. ``where`` takes a bool and two numbers. ``cast`` converts to
# the node's dtype, like torch; a bool is whether the number is not zero.
OTHERS = ("neg", "abs", "sign", "not", "where", "cast")
# The number of operands. A load has the tensor and one operand for each dimension.
OPERANDS = {
    **dict.fromkeys(("number", "integer", *FUNCTIONS, "neg", "abs", "sign", "not", "cast"), 1),
    **dict.fromkeys((*COMPARISONS, *ARITHMETIC), 2),
    "where": 3,
}
OPERATIONS = (
    *("input", "number", "integer", "load"),
    *(*FUNCTIONS, *COMPARISONS, *ARITHMETIC, *OTHERS),
)


@dataclasses.dataclass(frozen=True)
class Node:
    """A value: ``operands`` are nodes, except for the first of number, integer and load."""

    dtype: str
    operation: str
    operands: tuple[int, ...] = ()
    name: str = ""

    def __str__(self) -> str:
        return " ".join((self.dtype, self.operation, *map(str, self.operands or (self.name,))))

    @property
    def arguments(self) -> tuple[int, ...]:
        """Return the operands that are nodes."""
        if self.operation in ("input", "number", "integer"):
            return ()
        return self.operands[1:] if self.operation == "load" else self.operands


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A value to add to an element of a captured tensor's gradient."""

    captured: int
    value: int
    indices: tuple[int, ...]

    def __str__(self) -> str:
        return " ".join(map(str, ("gradient", self.captured, self.value, *self.indices)))


@dataclasses.dataclass(frozen=True)
class Program:
    """Nodes, each after its operands, and the results."""

    nodes: tuple[Node, ...]
    output: int
    gradients: tuple[Gradient, ...] = ()

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.nodes, f"output {self.output}", *self.gradients)))

    @classmethod
    @functools.cache
    def parse(cls, text: str) -> Program:
        """Read a program from its text."""
        nodes: list[Node] = []
        gradients: list[Gradient] = []
        output = -1
        for line in text.splitlines():
            first, *words = line.split()
            try:
                if first == "output":
                    (output,) = map(int, words)
                elif first == "gradient":
                    captured, value, *indices = map(int, words)
                    gradients.append(Gradient(captured, value, tuple(indices)))
                elif words[0] == "input":
                    (name,) = words[1:]
                    nodes.append(Node(first, "input", name=name))
                else:
                    nodes.append(Node(first, words[0], tuple(map(int, words[1:]))))
            except (IndexError, ValueError):
                raise ValueError(
                    f"a line of a program must have a dtype, an operation and its operands, got "
                    f"'{line}'"
                ) from None
        return cls(tuple(nodes), output, tuple(gradients))

    def check(self, captured: Sequence[tuple[str, int]], numbers: int, integers: int) -> None:
        """Raise a ValueError if the program is malformed or reads more than a call has.

        Args:
            captured: dtype and number of dimensions of each captured tensor.
            numbers, integers: the numbers of floating-point and integer arguments.
        """
        for place, node in enumerate(self.nodes):
            line = f"line {place} of a program, '{node}',"
            if node.operation not in OPERATIONS or node.dtype not in DTYPES:
                raise ValueError(f"{line} must have a known operation and a known dtype")
            if any(not 0 <= operand < place for operand in node.arguments):
                raise ValueError(f"{line} must have earlier lines as operands")
            if node.operation == "input" and node.name not in INPUTS:
                raise ValueError(f"{line} must read one of the inputs {', '.join(INPUTS)}")
            self._check_operands(line, node)
            if node.operation == "number" and not 0 <= node.operands[0] < numbers:
                raise ValueError(f"{line} must read one of {numbers} numbers")
            if node.operation == "integer" and not 0 <= node.operands[0] < integers:
                raise ValueError(f"{line} must read one of {integers} integers")
            if node.operation == "load":
                self._check_element(line, node.operands[0], node.operands[1:], captured)
                dtype = captured[node.operands[0]][0]
                if dtype != node.dtype:
                    raise ValueError(f"{line} must read a tensor of {node.dtype}, got {dtype}")
        if not 0 <= self.output < len(self.nodes):
            raise ValueError(f"a program must have one of its lines as output, got {self.output}")
        for gradient in self.gradients:
            line = f"'{gradient}' of a program"
            self._check_element(line, gradient.captured, gradient.indices, captured)
            if any(not 0 <= it < len(self.nodes) for it in (gradient.value, *gradient.indices)):
                raise ValueError(f"{line} must have lines of the program as operands")

    def _check_operands(self, line: str, node: Node) -> None:
        count = OPERANDS.get(node.operation, len(node.operands))
        if len(node.operands) != count:
            raise ValueError(f"{line} must have {count} operands, got {len(node.operands)}")
        dtypes = [self.nodes[operand].dtype for operand in node.arguments]
        wanted = dtypes
        if node.operation in COMPARISONS:
            wanted = dtypes[:1] * 2
        elif node.operation == "where":
            wanted = ["bool", node.dtype, node.dtype]
        elif node.operation not in ("cast", "load"):
            wanted = [node.dtype] * len(dtypes)
        if dtypes != wanted:
            raise ValueError(
                f"{line} must have operands of {', '.join(wanted)}, got {', '.join(dtypes)}"
            )

    def _check_element(
        self,
        line: str,
        number: int,
        indices: tuple[int, ...],
        captured: Sequence[tuple[str, int]],
    ) -> None:
        if not 0 <= number < len(captured):
            raise ValueError(f"{line} must name one of {len(captured)} captured tensors")
        dimensions = captured[number][1]
        if len(indices) != dimensions:
            raise ValueError(
                f"{line} must have an index for each of {dimensions} dimensions, got {len(indices)}"
            )
        if any(self.nodes[index].dtype not in INTEGERS for index in indices):
            raise ValueError(f"{line} must have integers as indices")
