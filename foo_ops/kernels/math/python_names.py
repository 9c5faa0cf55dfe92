"""Map Python's ``math``, ``round``, ``**``, ``%`` and ``//`` to our functions in kernels.

Numba would call the C library for each number. Our functions are vectorised with the loop around
them, in the type of their argument.
"""

from __future__ import annotations

import importlib
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from numba.core import types
from numba.core.typing.templates import signature

from foo_ops.kernels.compiler.numba_target.registry import define_signature, functions

# Functions of ``math``, by the module of ours that has them. Integers are converted to float64.
_OF_ONE = {
    "division": ("sqrt",),
    "exponential": (
        *("acosh", "asinh", "atanh", "cosh", "exp", "expm1", "log", "log10", "log1p", "log2"),
        *("sinh", "tanh"),
    ),
    "special": ("erf", "erfc", "gamma", "lgamma"),
    "trigonometric": ("acos", "asin", "atan", "cos", "sin", "tan"),
}
_OF_TWO = {
    "division": ("fmod", "hypot"),
    "exponential": ("pow",),
    "trigonometric": ("atan2",),
}
# Functions of floats that return floats; Numba's own would return integers.
_ROUNDING = ("ceil", "floor", "trunc")


def _emitter(module: str, name: str) -> Callable[..., Any]:
    """Make the emitter of a function, which imports its module when a kernel first calls it."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = getattr(importlib.import_module(f"foo_ops.kernels.math.{module}"), name)
        return getattr(found, "emit", found)(context, builder, signature, args)

    return emit


def _define(
    function: Callable[..., Any], module: str, name: str, find: Callable[..., Any], count: int
) -> None:
    define_signature(function, find)
    functions.lower(function, *[types.Float] * count)(_emitter(module, name))


def _float_of_one(args: Sequence[types.Type]) -> Any:
    if len(args) == 1 and isinstance(args[0], types.Float):
        return signature(args[0], args[0])
    return None


def _of_one(args: Sequence[types.Type]) -> Any:
    if len(args) == 1 and isinstance(args[0], (types.Integer, types.Boolean)):
        return signature(types.float64, types.float64)
    return _float_of_one(args)


def _of_two(args: Sequence[types.Type]) -> Any:
    """Use the wider of two floating-point types; an integer exponent gets the base's type."""
    floats = [arg for arg in args if isinstance(arg, types.Float)]
    numbers = [arg for arg in args if isinstance(arg, (types.Float, types.Integer))]
    if len(numbers) != 2 or len(args) != 2 or not floats:
        return None
    type_ = max(floats) if isinstance(args[0], types.Float) else types.float64
    return signature(type_, type_, type_)


def _float_of_two(args: Sequence[types.Type]) -> Any:
    are_integers = len(args) == 2 and all(isinstance(arg, types.Integer) for arg in args)
    return _of_two((types.float64, types.float64) if are_integers else args)


def _integers_of_two(args: Sequence[types.Type]) -> Any:
    """Divide in 32 bits if both fit. The result has 64 bits, like Numba's integers."""
    if len(args) != 2 or not all(isinstance(arg, types.Integer) for arg in args):
        return None
    are_signed = any(arg.signed for arg in args)
    widths = [arg.bitwidth if arg.signed else 2 * arg.bitwidth for arg in args]
    if max(widths) > 64:
        return None
    operand = types.int32 if max(widths) <= 32 else types.int64
    return signature(types.int64 if are_signed else types.uint64, operand, operand)


for _table, _find, _count in ((_OF_ONE, _of_one, 1), (_OF_TWO, _float_of_two, 2)):
    for _module, _names in _table.items():
        for _name in _names:
            _define(getattr(math, _name), _module, _name, _find, _count)
# Python 3.10 lacks math.exp2 and math.cbrt.
for _name, _module, _ours in (("exp2", "exponential", "exp2_of_all"), ("cbrt", "division", "cbrt")):
    if hasattr(math, _name):
        _define(getattr(math, _name), _module, _ours, _of_one, 1)
for _name in _ROUNDING:
    _define(getattr(math, _name), "division", _name, _float_of_one, 1)
_define(round, "division", "round", _float_of_one, 1)
for _power in (operator.pow, operator.ipow, pow):
    _define(_power, "exponential", "pow", _of_two, 2)
for _operators, _of_floats, _of_integers in (
    ((operator.floordiv, operator.ifloordiv), "floor_divide", "emit_floor_divide"),
    ((operator.mod, operator.imod), "remainder", "emit_remainder"),
):
    for _operator in _operators:
        define_signature(_operator, _integers_of_two)
        functions.lower(_operator, types.Float, types.Float)(_emitter("division", _of_floats))
        functions.lower(_operator, types.Integer, types.Integer)(_emitter("division", _of_integers))
