"""The functions of ``math`` as in kernels, for interpreted kernels and for constants.

They return the type of their arguments, and infinity or NaN where Python's functions raise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np


def are_constants(*numbers: Any) -> bool:
    """Whether these are Python's own numbers, which adapt to the dtype of other operands."""
    return all(isinstance(n, (int, float)) and not isinstance(n, np.generic) for n in numbers)


_AT_POLES: dict[Callable[..., Any], Callable[..., float]] = {
    math.gamma: lambda number: math.copysign(math.inf, number) if number == 0 else math.nan,
    math.lgamma: lambda number: math.inf,
}


def _lifted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of ``math`` to return the type of its arguments, float64 for integers."""

    def call(*numbers: Any) -> Any:
        kinds = [np.asarray(number).dtype for number in numbers]
        kind = np.result_type(*(k if k.kind == "f" else np.dtype(np.float64) for k in kinds))
        try:
            result = function(*map(float, numbers))
        except OverflowError:
            result = math.inf
        except ValueError:
            result = _AT_POLES.get(function, lambda *_: math.nan)(*numbers)
        return float(result) if are_constants(*numbers) else kind.type(result)

    return call


def _whole(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a rounding function to return the type of its argument."""

    def call(number: Any) -> Any:
        if np.asarray(number).dtype.kind != "f":
            return number
        return float(function(number)) if are_constants(number) else function(number)

    return call


# NumPy's functions return infinity and NaN where those of math raise.
_NUMPYS = {"acos": "arccos", "asin": "arcsin", "atan": "arctan", "pow": "power"}
_NUMPYS |= {"acosh": "arccosh", "asinh": "arcsinh", "atanh": "arctanh", "atan2": "arctan2"}
_FUNCTIONS = (
    *("cos", "cosh", "copysign", "degrees", "erf", "erfc", "exp", "expm1", "fabs", "fmod", "gamma"),
    *("hypot", "lgamma", "log", "log10", "log1p", "log2", "radians", "sin", "sinh", "sqrt", "tan"),
    *("tanh", *_NUMPYS),
)
# Python 3.10 lacks cbrt and exp2.
_FUNCTIONS += tuple(name for name in ("cbrt", "exp2") if hasattr(math, name))
MATH = {
    name: _lifted(getattr(np, _NUMPYS.get(name, name), None) or getattr(math, name))
    for name in _FUNCTIONS
}
MATH |= {name: _whole(getattr(np, name)) for name in ("ceil", "floor", "trunc")}
round_whole = _whole(np.rint)
