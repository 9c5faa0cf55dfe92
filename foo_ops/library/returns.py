"""Read in a function's code what it returns, to refuse a kernel where it is defined."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from typing import Any

# These leave one number.
_NUMBERS = ("BINARY_", "UNARY_", "COMPARE_OP")

# These leave the value of one variable.
_READS = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK")


def returned_counts(function: Callable[..., Any]) -> Iterator[tuple[int | None, int]]:
    """Yield how many values each return statement gives, and its line.

    The number is 0 for None, which is also what a function returns at its end, and None where only
    the types of variables would tell.
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
    """Count the values of each variable for which the code says it, the same wherever it is set.

    An argument is one.
    """
    code = function.__code__
    found: dict[str, set[int | None]] = {
        name: {1} for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    }
    before: dis.Instruction | None = None
    for step in dis.get_instructions(function):
        if step.opname.startswith("STORE_FAST"):
            # Python 3.13 stores and loads several in one.
            is_one = step.opname == "STORE_FAST" and not step.is_jump_target
            names = (step.argval,) if isinstance(step.argval, str) else step.argval
            for name in names:
                found.setdefault(name, set()).add(_count_after(before, {}) if is_one else None)
        before = step
    known = {name: count for name, (count, *others) in found.items() if not others}
    return {name: count for name, count in known.items() if count is not None}


def _count_after(step: dis.Instruction | None, counts: dict[str, int]) -> int | None:
    """Count the values that an instruction leaves for the one behind it."""
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
