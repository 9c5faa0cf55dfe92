"""The names of foo_ops.language for interpreted kernels, on NumPy's scalars.

A vector is an array. Docstrings are copied from the compiled functions of the same names.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foo_ops.kernels.compiler.processor import vector_bits
from foo_ops.kernels.compiler.python_math import MATH, are_constants
from foo_ops.kernels.interpret.views import (
    Pointer,
    Row,
    View,
    as_compiled,
    compute_dtype_of,
    read,
    read_one,
    write,
)
from foo_ops.kernels.lang import dot as products
from foo_ops.kernels.lang import random as random_numbers
from foo_ops.kernels.lang import reduction
from foo_ops.kernels.math import division, exponential, special, trigonometric
from foo_ops.kernels.simd import arithmetic, memory
from foo_ops.kernels.simd.types import ELEMENTS

_WORD = 0xFFFFFFFF


def _type_of(like: Any) -> np.dtype[Any]:
    if isinstance(like, (Pointer, Row, View)):
        return compute_dtype_of(like.dtype)
    return np.asarray(like).dtype


def zero(like: Any) -> Any:
    return as_compiled(_type_of(like).type(0))


def cast(value: Any, like: Any) -> Any:
    return as_compiled(np.asarray(value).astype(_type_of(like))[()])


def lanes(like: Any) -> int:
    return vector_bits() // 8 // _type_of(like).itemsize


def accumulate(total: Any, value: Any) -> Any:
    return cast(total + cast(value, total), total)


def accumulate_maximum(largest: Any, value: Any) -> Any:
    return np.maximum(largest, cast(value, largest))


def reduce_add(vector: Any) -> Any:
    # Add halves until one lane is left, like compiled code.
    while len(vector) > 1:
        vector = vector[: len(vector) // 2] + vector[len(vector) // 2 :]
    return vector[0]


def reduce_maximum(vector: Any) -> Any:
    return np.maximum.reduce(vector)


# ------------------------------------------------------------------------------------ functions


def _rounded(function: Any, *numbers: Any) -> Any:
    """Compute in float64: NumPy's float32 functions are off by some units in the last place."""
    result = function(*(np.asarray(number, np.float64) for number in numbers))
    return float(result) if are_constants(*numbers) else cast(result, numbers[0])


def _without_subnormals(x: Any) -> Any:
    if are_constants(x):
        return x
    return cast(np.where(x < np.finfo(_type_of(x)).smallest_normal, 0.0, x), x)


def _function(function: Any) -> Any:
    def call(*numbers: Any) -> Any:
        return _rounded(function, *numbers)

    return call


ceil, cos, exp, expm1, floor, log, log1p, log2, pow, round, sin, sqrt, tanh, trunc = map(
    _function,
    (
        *(np.ceil, np.cos, np.exp, np.expm1, np.floor, np.log, np.log1p, np.log2, np.power),
        *(np.rint, np.sin, np.sqrt, np.tanh, np.trunc),
    ),
)
floor_divide, fmod, remainder = map(_function, (np.floor_divide, np.fmod, np.remainder))
acos, acosh, asin, asinh, atan, atan2, atanh = map(
    _function,
    (*(np.arccos, np.arccosh, np.arcsin, np.arcsinh, np.arctan, np.arctan2, np.arctanh),),
)
cbrt, cosh, hypot, log10, sinh, tan = map(
    _function, (np.cbrt, np.cosh, np.hypot, np.log10, np.sinh, np.tan)
)
erf, erfc, gamma, lgamma = (
    _function(np.vectorize(MATH[name], otypes=[np.float64]))
    for name in ("erf", "erfc", "gamma", "lgamma")
)


def exp2(x: Any) -> Any:
    return _without_subnormals(_rounded(np.exp2, x))


def random(seed: Any, offset: Any) -> Any:
    words = [int(offset) & _WORD, int(offset) >> 32 & _WORD, 0, 0]
    key = [int(seed) & _WORD, int(seed) >> 32 & _WORD]
    for _ in range(random_numbers.ROUNDS):
        first, second = (word * m for word, m in zip(words[::2], random_numbers.MULTIPLIERS))
        words = [
            *(second >> 32 ^ words[1] ^ key[0], second & _WORD),
            *(first >> 32 ^ words[3] ^ key[1], first & _WORD),
        ]
        key = [word + step & _WORD for word, step in zip(key, random_numbers.WEYL_STEPS)]
    return np.float32((words[0] >> 8) * 2.0**-24)


# ----------------------------------------------------------------------------------- arithmetic


def absolute(a: Any) -> Any:
    return np.abs(a)


def fma(a: Any, b: Any, c: Any) -> Any:
    # The product is exact, or nearly exact, in the next wider type.
    wide = np.float64 if _type_of(a) == np.float32 else np.longdouble
    return cast(np.asarray(a).astype(wide) * b + c, a)


def maximum(a: Any, b: Any) -> Any:
    return np.where(a > b, a, b)[()]


def less(a: Any, b: Any) -> Any:
    return a < b


def select(mask: Any, a: Any, b: Any) -> Any:
    return np.where(mask, a, b)[()]


def any_lane(mask: Any) -> bool:
    return bool(np.any(mask))


def next_lane(mask: Any, start: Any) -> int:
    found = np.flatnonzero(mask[start:])
    return int(start + found[0]) if found.size else len(mask)


def splat(value: Any, lanes: int) -> Any:
    return np.full(lanes, value)


# ------------------------------------------------------------------------------------- products


def dot(target: Any, a: Any, b: Any) -> None:
    _multiply(target, a, b, adds=False)


def add_dot(target: Any, a: Any, b: Any) -> None:
    _multiply(target, a, b, adds=True)


def _multiply(target: Any, a: Any, b: Any, *, adds: bool) -> None:
    target, a, b = (it[:, :] if isinstance(it, View) else it for it in (target, a, b))
    fits = (target.rows, target.columns, a.columns) == (a.rows, b.columns, b.rows)
    if not fits:
        sizes = ", ".join(f"[{it.rows}, {it.columns}]" for it in (target, a, b))
        raise ValueError(
            f"dot: target, a and b must have shapes [m, n], [m, k] and [k, n], got {sizes}"
        )
    factors = [it.read(read) for it in (a, b)]
    kinds = [factor.dtype for factor in factors]
    floats = [kind for kind in kinds if kind.kind == "f"]
    whole = np.int32 if all(kind.itemsize <= 2 for kind in kinds) else np.int64
    kind = max(floats, key=lambda kind: kind.itemsize) if floats else np.dtype(whole)
    wide = np.float64 if floats else kind
    # Rounded once to the type of sums: more precise than compiled products.
    result = (factors[0].astype(wide) @ factors[1].astype(wide)).astype(kind)
    target.write(write, target.read(read) + result if adds else result)


# --------------------------------------------------------------------------------------- memory


def load(pointer: Pointer | Row, index: Any) -> Any:
    return read_one(pointer.place(index), pointer.dtype)


def load_vector(pointer: Pointer | Row, index: Any, lanes: int) -> Any:
    return read(pointer.place(index, lanes), pointer.dtype, lanes)


def store(pointer: Pointer | Row, index: Any, value: Any) -> None:
    write(pointer.place(index, np.size(value)), pointer.dtype, value)


def prefetch(pointer: Pointer | Row, index: Any) -> None:
    pass


def prefetch_vectors(pointer: Pointer | Row, index: Any, lanes: int, count: int) -> None:
    pass


def address_of(pointer: Pointer | Row) -> int:
    return pointer.address


def shift(pointer: Pointer | Row, count: Any) -> Pointer | Row:
    return pointer.moved(count)


def shift_bytes(pointer: Pointer, count: Any) -> Pointer:
    return pointer.moved(count // ELEMENTS[pointer.dtype].size)


# --------------------------------------------------------------------------------------- docstrings

for _module in (
    *(arithmetic, division, exponential, memory, products, random_numbers, reduction),
    *(special, trigonometric),
):
    for _name, _function in list(globals().items()):
        if getattr(_function, "__module__", None) == __name__ and hasattr(_module, _name):
            _function.__doc__ = getattr(_module, _name).__doc__
