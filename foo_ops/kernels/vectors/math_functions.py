"""Let Python's ``math``, ``round`` and ``**`` mean this package's functions in kernels.

Numba calls the C library for each number. These functions are vectorised with the loop around
them, in the type of their argument.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from numba.core import types
from numba.core.typing.templates import signature

from foo_ops.kernels.compiler.numba_target.constants import let_fold
from foo_ops.kernels.compiler.numba_target.registry import define_signature, functions
from foo_ops.kernels.compiler.plain_math import MATH, round_whole
from foo_ops.kernels.vectors import error_function, periodic, powers, rounding
from foo_ops.kernels.vectors import functions as exponentials

_MODULES = (error_function, exponentials, periodic, powers, rounding)
# Names in math. Integers are converted to float64 first.
_UNARY = (*("cos", "erf", "exp", "expm1", "log", "log1p", "log2", "sin", "sqrt", "tanh"),)
# Numba's own are for integers, which they return.
_ROUNDING = ("ceil", "floor", "trunc")


def _function(name: str) -> Any:
    """Find the function of kernels that has a name."""
    return next(getattr(module, name) for module in _MODULES if hasattr(module, name))


def _define(function: Callable[..., Any], ours: Any, find: Callable[..., Any]) -> None:
    define_signature(function, find)
    functions.lower(function, *[types.Float] * ours.arguments)(ours.emit)
    let_fold(ours, MATH.get(function.__name__, round_whole))


def _float_of_one(args: Sequence[types.Type]) -> Any:
    if len(args) == 1 and isinstance(args[0], types.Float):
        return signature(args[0], args[0])
    return None


def _of_one(args: Sequence[types.Type]) -> Any:
    if len(args) == 1 and isinstance(args[0], (types.Integer, types.Boolean)):
        return signature(types.float64, types.float64)
    return _float_of_one(args)


def _of_two(args: Sequence[types.Type]) -> Any:
    """Take the wider of two floating-point types; an integer exponent has that of the base."""
    floats = [arg for arg in args if isinstance(arg, types.Float)]
    numbers = [arg for arg in args if isinstance(arg, (types.Float, types.Integer))]
    if len(numbers) != 2 or len(args) != 2 or not floats:
        return None
    type_ = max(floats) if isinstance(args[0], types.Float) else types.float64
    return signature(type_, type_, type_)


def _float_of_two(args: Sequence[types.Type]) -> Any:
    are_integers = len(args) == 2 and all(isinstance(arg, types.Integer) for arg in args)
    return _of_two((types.float64, types.float64) if are_integers else args)


for _name in _UNARY:
    _define(getattr(math, _name), _function(_name), _of_one)
# Python 3.10 has none.
if hasattr(math, "exp2"):
    _define(math.exp2, exponentials.exp2_of_all, _of_one)
for _name in _ROUNDING:
    _define(getattr(math, _name), _function(_name), _float_of_one)
_define(round, rounding.round, _float_of_one)
_define(math.pow, powers.pow, _float_of_two)
for _power in (operator.pow, operator.ipow, pow):
    _define(_power, powers.pow, _of_two)
