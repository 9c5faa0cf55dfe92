"""The names that tile kernels use besides Python's arithmetic, ``math`` and their arguments.

Names are loaded when a kernel is compiled: importing this module imports no Numba. The modules of
foo_ops/kernels/lang document arrays (views.py), indices (indexing.py), sums and maxima
(reduction.py), random numbers (random.py) and products of matrices (dot.py); those of
foo_ops/kernels/math document exp, erf, sin and the like, and those of foo_ops/kernels/simd explicit
vectors. ``help(language.exp)`` documents one function.

The examples in their docstrings are lines of a kernel, where ``x`` and ``y`` are rows of ``size``
adjacent elements (``x = input.row(row)``), ``i`` and ``j`` are indices, ``total`` is a number of
x's type, and ``a``, ``b`` and ``output`` are views of two dimensions.
With FOO_INTERPRET=1 all of them are interpreted by Python.

Example:
    >>> from foo_ops import language
    >>> def squares(input, output, rows):
    ...     for row in rows:
    ...         x, total = input.row(row), language.zero(input)
    ...         for i in range(input.shape[-1]):
    ...             total = language.accumulate(total, x[i] * x[i])
    ...         output.flat[row] = total
"""

from __future__ import annotations

import importlib
from typing import Any

from foo_ops.kernels.compiler.interpret import INTERPRETS

_MODULES = {
    "lang.reduction": (
        *("accumulate", "accumulate_maximum", "cast", "lanes", "reduce_add", "reduce_maximum"),
        "zero",
    ),
    "lang.dot": ("add_dot", "dot"),
    "lang.random": ("random",),
    "math.exponential": (
        *("acosh", "asinh", "atanh", "cosh", "exp", "exp2", "expm1", "log", "log10", "log1p"),
        *("log2", "pow", "sinh", "tanh"),
    ),
    "math.trigonometric": ("acos", "asin", "atan", "atan2", "cos", "sin", "tan"),
    "math.special": ("erf", "erfc", "gamma", "lgamma"),
    "math.division": (
        *("cbrt", "ceil", "floor", "floor_divide", "fmod", "hypot", "remainder", "round", "sqrt"),
        "trunc",
    ),
    "simd.arithmetic": (
        *("absolute", "any_lane", "fma", "less", "maximum", "next_lane", "select", "splat"),
    ),
    "simd.memory": (
        *("address_of", "load", "load_vector", "prefetch", "prefetch_vectors"),
        *("shift", "shift_bytes", "store"),
    ),
}
_PACKAGE = "foo_ops.kernels"
MODULE_OF = {name: f"{_PACKAGE}.{module}" for module, names in _MODULES.items() for name in names}
"""The module of each name, which is part of the cache key of a kernel that uses the name."""

__all__ = sorted(MODULE_OF)


def __getattr__(name: str) -> Any:
    module = MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if INTERPRETS:
        module = f"{_PACKAGE}.interpret.language"
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return __all__
