"""What a tile kernel is written with beside Python's arithmetic, ``math`` and its arguments' views.

Names are loaded where a kernel is compiled: to import this module imports no Numba. The modules
of ``foo_ops.kernels`` say what each does: view.py about arrays, reduction.py about sums and
maxima, functions.py about exp2, exp, tanh and log, simd.py about explicit vectors.

Example:
    >>> from foo_ops import language
    >>> def squares(input, output, rows):
    ...     for row in rows:
    ...         x, total = input.row(row), language.zero(input)
    ...         for i in range(input.shape[-1]):
    ...             total = language.accumulate(total, x[i] * x[i])
    ...         output[row] = total
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "reduction": (
        *("accumulate", "accumulate_maximum", "cast", "lanes", "reduce_add", "reduce_maximum"),
        "zero",
    ),
    "functions": ("exp", "exp2", "log", "tanh"),
    "simd": (
        *("absolute", "address_of", "any_lane", "fma", "less", "load", "load_vector", "maximum"),
        *("prefetch", "select", "shift", "shift_bytes", "splat", "store"),
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"foo_ops.kernels.{module}"), name)


def __dir__() -> list[str]:
    return __all__
