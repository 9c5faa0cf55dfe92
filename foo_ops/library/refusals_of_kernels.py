"""Refuse kernels that their operators cannot have, when they are defined."""

from __future__ import annotations

import ast
import dis
import inspect
import math
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from foo_ops.library.kernels import Scratch, count_parameters
from foo_ops.library.operators import Parameter, describe

# ------------------------------------------------------------------------ kinds of numbers returned

# Find out from a function's source which kind of number it returns, to refuse it when defined.


KINDS = (bool, int, float, complex)
"""Kinds of numbers, from the narrowest."""

_CONVERSIONS = {"bool": bool, "int": int, "float": float}
_PREDICATES = ("isfinite", "isinf", "isnan")
_OF_INTEGERS = ("comb", "factorial", "gcd", "isqrt", "lcm", "perm")
_KEEPING = ("ceil", "floor", "trunc")


def returned_kinds(
    function: Callable[..., Any], arguments: Mapping[str, type]
) -> Iterator[tuple[list[type | None], int]]:
    """Yield the kinds of the values of each return statement, and its line.

    A kind is None if the source does not determine it; without a source nothing is yielded.

    Args:
        function: a function of numbers.
        arguments: the known kinds of arguments.

    Example:
        >>> import math
        >>> from foo_ops.library.refusals_of_kernels import returned_kinds
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
    """Yield the nodes inside a node, except nested functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.Lambda)):
            yield child
            yield from _own_nodes(child)


class _Source:
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


# ---------------------------------------------------------------------------- what functions return

# Count in a function's bytecode the values that it returns, to refuse a kernel when it is defined.


# Instructions that push one number.
_NUMBERS = ("BINARY_", "UNARY_", "COMPARE_OP")

# Instructions that push the value of one variable.
_READS = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK")


def returned_counts(function: Callable[..., Any]) -> Iterator[tuple[int | None, int]]:
    """Yield the number of values of each return statement, and its line.

    The number is 0 for None, which a function also returns at its end, and None if it depends on
    the types of variables.
    """
    counts = _counts_of_variables(function)
    line = function.__code__.co_firstlineno
    before: dis.Instruction | None = None
    for step in dis.get_instructions(function):
        line = getattr(step, "line_number", step.starts_line) or line
        if step.opname == "RETURN_CONST":
            yield _count_of(step.argval), line
        elif step.opname == "RETURN_VALUE":
            yield None if step.is_jump_target else _count_after(before, counts), line
        before = step


def _counts_of_variables(function: Callable[..., Any]) -> dict[str, int]:
    """Count the values in each variable, if the code shows their number and it is always the same.

    An argument is one value.
    """
    code = function.__code__
    found: dict[str, set[int | None]] = {
        name: {1} for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    }
    before: dis.Instruction | None = None
    for step in dis.get_instructions(function):
        if step.opname.startswith("STORE_FAST"):
            # Python 3.13 stores and loads several variables in one instruction.
            is_one = step.opname == "STORE_FAST" and not step.is_jump_target
            names = (step.argval,) if isinstance(step.argval, str) else step.argval
            for name in names:
                found.setdefault(name, set()).add(_count_after(before, {}) if is_one else None)
        before = step
    known = {name: count for name, (count, *others) in found.items() if not others}
    return {name: count for name, count in known.items() if count is not None}


def _count_after(step: dis.Instruction | None, counts: dict[str, int]) -> int | None:
    """Count the values that an instruction leaves for the next one."""
    if step is None:
        return None
    if step.opname == "LOAD_CONST":
        return _count_of(step.argval)
    if step.opname == "BUILD_TUPLE":
        return step.arg
    if step.opname in _READS:
        return counts.get(step.argval)
    is_number = step.opname.startswith(_NUMBERS) and step.opname != "BINARY_SUBSCR"
    return 1 if is_number else None


def _count_of(constant: object) -> int:
    if constant is None:
        return 0
    return len(constant) if isinstance(constant, tuple) else 1


# ------------------------------------------------------------------------------ elementwise kernels

# Refuse operators that an elementwise kernel does not fit, when it is registered.


Functions = Sequence[Callable[..., Any]]
"""The functions of a kernel, one for each way in which it may be called."""


def refuse_whole(operator: torch._ops.OpOverload, parameters: Sequence[Parameter]) -> None:
    """Refuse arguments that are neither elements nor the same for all elements."""
    for parameter in parameters:
        if parameter.kind == "tensors":
            raise TypeError(
                f"{operator.name()}: an elementwise kernel takes no lists of tensors, got "
                f"{parameter.name}; a tile_kernel does"
            )
        if parameter.kind == "generator":
            raise TypeError(
                f"{operator.name()}: an elementwise kernel takes no generator, since it does not "
                f"know which element it computes, got {parameter.name}; a tile_kernel does"
            )


def check_parameters(
    operator: torch._ops.OpOverload,
    parameters: Sequence[Parameter],
    functions: Functions,
    own: Collection[str],
) -> None:
    inputs = [p for p in parameters if p.role != "out"]
    if not any(p.is_tensor and not p.is_optional and p.name not in own for p in inputs):
        kind = "tensor that is promoted" if own else "tensor"
        raise TypeError(f"{operator.name()}: an elementwise kernel needs a {kind}")
    read = [p.name for p in parameters if p.is_tensor and p.role == "read"]
    for name in set(own) - set(read):
        raise TypeError(
            f"{operator.name()}: own_dtypes must name tensors that are read ({', '.join(read)}), "
            f"got {name}"
        )
    for function in functions:
        taken = count_parameters(function)
        if taken != len(inputs):
            names = ", ".join(p.name for p in inputs)
            raise TypeError(
                f"{operator.name()}: its kernel must take {len(inputs)} arguments ({names}), and "
                f"{describe(function)} takes {taken}"
            )


def check_returned(operator: torch._ops.OpOverload, functions: Functions, results: int) -> None:
    """Refuse a wrong number of values if the code shows it; otherwise the compiler does."""
    for function in functions:
        for count, line in returned_counts(function):
            if count not in (None, 0, results):
                raise TypeError(
                    f"{operator.name()}: its kernel must return {results} "
                    f"value{'s' * (results != 1)}, one for each result, and "
                    f"{describe(function)} returns {count} in line {line}"
                )


# ------------------------------------------------------------------------------------- tile kernels

# Refuse tile kernels that their operators cannot have, when they are defined.


def require_no_result(function: Callable[..., Any]) -> None:
    """Refuse a function that returns a value, except a lambda, which always does."""
    for count, line in returned_counts(function):
        if count != 0 and function.__name__ != "<lambda>":
            raise TypeError(
                "a tile kernel writes its results, which are arguments, and must return nothing: "
                f"{describe(function)} returns a value in line {line}"
            )


def require_verdict(function: Callable[..., Any]) -> None:
    """Refuse a function that may return nothing, or several values, instead of True or False."""
    for count, line in returned_counts(function):
        if count not in (1, None):
            raise TypeError(
                "a tile kernel with refuse and without check must return True, or False where it "
                f"cannot use what it reads: {describe(function)} returns "
                f"{'nothing' if count == 0 else f'{count} values'} in line {line}"
            )


def require_scratch(function: Callable[..., Any], scratch: Mapping[str, Scratch] | None) -> None:
    """Require a dict of scratch memory, with the names that the function has before the tiles."""
    given = scratch or {}
    if not isinstance(given, Mapping) or not all(isinstance(s, Scratch) for s in given.values()):
        raise TypeError(
            "tile_kernel: scratch must be a dict of names and library.scratch(...), got "
            f"{scratch!r}"
        )
    names = list(inspect.signature(function).parameters)
    taken = names[-1 - len(given) : -1]
    if taken != list(given):
        raise TypeError(
            f"tile_kernel: scratch has {', '.join(given)}, which {describe(function)} must take "
            f"before its tiles, and it takes {', '.join(taken)}"
        )


def check_late_refusal(operator: torch._ops.OpOverload, parameters: Sequence[Parameter]) -> None:
    for parameter in parameters:
        if parameter.role == "in place" or parameter.kind == "generator":
            raise TypeError(
                f"{operator.name()}: a kernel that returns whether it could use what it read must "
                f"write to no argument and draw no random numbers, and {parameter.name} is "
                f"{'drawn from' if parameter.kind == 'generator' else 'written'}: give it check="
            )


def check_lists(operator: torch._ops.OpOverload, parameters: Sequence[Parameter]) -> None:
    for parameter in parameters:
        is_written = parameter.kind == "tensors" and parameter.role != "read"
        if is_written and operator._schema.returns:
            raise TypeError(
                f"{operator.name()}: an operator that writes to a list of tensors must return "
                f"nothing, -> (), got {parameter.name}"
            )
    for result in operator._schema.returns:
        if str(result.real_type) not in ("Tensor", "Optional[Tensor]"):
            raise TypeError(
                f"{operator.name()}: the results of a tile kernel are tensors, got {result.type}"
            )


def refuse_scalars_alone(operator: torch._ops.OpOverload, parameters: Sequence[Parameter]) -> None:
    if any(p.is_tensor and not p.is_optional for p in parameters):
        return
    for parameter in parameters:
        if parameter.kind == "scalar":
            raise TypeError(
                f"{operator.name()}: a Scalar comes in the compute type of the first tensor that "
                f"is always there, and there is none for {parameter.name}"
            )
