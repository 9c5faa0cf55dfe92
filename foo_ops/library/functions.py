"""What kernels are made of: functions written in Python."""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Callable
from typing import Any

from foo_ops.library.operators import describe


def is_function(value: object) -> bool:
    """Return whether a value is a function written in Python, or what Numba made of one."""
    return isinstance(getattr(value, "py_func", value), types.FunctionType)


def require_function(what: str, value: Any) -> None:
    """Refuse what has no code that could be compiled, and a generator.

    Args:
        what: the beginning of the message, such as "tile_kernel: tiles must be".
        value: the argument.
    """
    if not is_function(value):
        raise TypeError(f"{what} a function written in Python, got {value!r}")
    function = getattr(value, "py_func", value)
    if inspect.isgeneratorfunction(function):
        raise TypeError(
            f"{what} a function that returns, since kernels cannot have generators, and "
            f"{describe(function)} yields in line {_line_of_yield(function)}"
        )


def _line_of_yield(function: Callable[..., Any]) -> int:
    line = function.__code__.co_firstlineno
    for step in dis.get_instructions(function):
        line = getattr(step, "line_number", step.starts_line) or line
        if step.opname.startswith("YIELD"):
            break
    return line


def by_position(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes its keyword-only arguments by their places, as kernels get all.

    They stand behind the others. No argument has a default, since all are given.
    """
    if not isinstance(function, types.FunctionType) or not function.__code__.co_kwonlyargcount:
        return function
    code = function.__code__
    count = code.co_argcount + code.co_kwonlyargcount
    copy = types.FunctionType(
        code.replace(co_argcount=count, co_kwonlyargcount=0),
        function.__globals__,
        function.__name__,
        None,
        function.__closure__,
    )
    copy.__module__ = function.__module__
    return copy
