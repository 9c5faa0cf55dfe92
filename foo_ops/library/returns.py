"""Read in a function's code what it returns, to refuse a kernel where it is defined."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from typing import Any

# These leave one number.
_NUMBERS = ("BINARY_", "UNARY_", "COMPARE_OP")


def returned_counts(function: Callable[..., Any]) -> Iterator[tuple[int | None, int]]:
    """Yield how many values each return statement gives, and its line.

    The number is 0 for None, which is also what a function returns at its end, and None where only
    the types of variables would tell.
    """
    line = function.__code__.co_firstlineno
    before: dis.Instruction | None = None
    for step in dis.get_instructions(function):
        line = getattr(step, "line_number", step.starts_line) or line
        if step.opname == "RETURN_CONST":
            yield _count_of(step.argval), line
        elif step.opname == "RETURN_VALUE":
            yield None if step.is_jump_target else _count_after(before), line
        before = step


def _count_after(step: dis.Instruction | None) -> int | None:
    """Count the values that an instruction leaves for the return behind it."""
    if step is None:
        return None
    if step.opname == "LOAD_CONST":
        return _count_of(step.argval)
    if step.opname == "BUILD_TUPLE":
        return step.arg
    is_number = step.opname.startswith(_NUMBERS) and step.opname != "BINARY_SUBSCR"
    return 1 if is_number else None


def _count_of(constant: object) -> int:
    if constant is None:
        return 0
    return len(constant) if isinstance(constant, tuple) else 1
