"""Integers for kernels that run as plain Python, which calculate as compiled ones do.

Numba computes integers in 64 bits: in uint64 where both operands are unsigned, else in int64. NumPy
stays in the wider dtype of the operands, and makes a float64 of uint64 and int64. With floats both
promote alike. Numbers of int64 need no type of their own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

# ``and`` and ``or`` are words of the language.
_OPERATIONS = ("add", "sub", "mul", "floordiv", "mod", "pow", "and", "or", "xor")
_SHIFTS = ("lshift", "rshift")
# Where the first operand is unsigned, the second is taken for unsigned, too.
_BY_THE_FIRST = (*_SHIFTS, "floordiv", "mod")


def as_compiled(value: Any) -> Any:
    """Return a scalar of NumPy as one that calculates as in compiled code; others as they are."""
    type_ = _TYPES.get(type(value))
    return value if type_ is None else type_(value)


def _plain(value: Any) -> Any:
    return type(value).plain(value) if hasattr(value, "plain") else value


def _in_64_bits(value: Any) -> Any:
    # Of Python's own integers some have no place in int64.
    is_unsigned = isinstance(value, np.unsignedinteger) or int(value) >= 2**63
    return np.uint64(value) if is_unsigned else np.int64(value)


def _are_integers(*operands: Any) -> bool:
    return all(isinstance(it, (int, np.integer, np.bool_)) for it in operands)


def _type_of(*operands: Any) -> type[Any]:
    is_signed = any(isinstance(it, np.signedinteger) for it in operands)
    return np.int64 if is_signed else np.uint64


def _calculated(name: str, *operands: Any) -> Any:
    function = getattr(operator, f"__{name}__")
    if not _are_integers(*operands):
        return function(*map(_plain, operands))
    wide = [_in_64_bits(_plain(it)) for it in operands]
    type_ = _type_of(*wide[: 1 if name in _BY_THE_FIRST else 2])
    result = function(*(it.astype(type_) for it in wide))
    return as_compiled(result if name in _SHIFTS else result.astype(_type_of(*wide)))


def _calculation(name: str) -> Callable[[Any, Any], Any]:
    return lambda self, other: _calculated(name, self, other)


def _divided(*operands: Any) -> Any:
    if _are_integers(*operands):
        return operator.truediv(*map(np.float64, map(_plain, operands)))
    return operator.truediv(*map(_plain, operands))


def _methods(name: str, calculate: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {
        f"__{name}__": calculate,
        f"__r{name}__": lambda self, other: calculate(other, self),
    }


_ATTRIBUTES: dict[str, Any] = {
    # NumPy's scalars then leave arithmetic with these to them.
    "__array_priority__": 1.0,
    "__neg__": lambda self: as_compiled(-_in_64_bits(_plain(self))),
    "__pos__": lambda self: as_compiled(_in_64_bits(_plain(self))),
    "__invert__": lambda self: as_compiled(~_plain(self)),
    "__abs__": lambda self: as_compiled(abs(_plain(self))),
    **_methods("truediv", _divided),
    **_methods("divmod", lambda self, other: (self // other, self % other)),
}
for _name in (*_OPERATIONS, *_SHIFTS):
    _ATTRIBUTES |= _methods(_name, _calculation(_name))

_TYPES: dict[type[Any], Any] = {
    plain: type(plain.__name__, (plain,), {**_ATTRIBUTES, "plain": plain})
    for plain in (np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32, np.uint64)
}
