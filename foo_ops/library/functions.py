"""What kernels are made of: functions written in Python."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any


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
