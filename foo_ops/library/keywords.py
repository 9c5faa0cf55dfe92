"""Say in the words of schemas what the annotations of keywords are."""

from __future__ import annotations

import collections.abc
import math
import types
import typing
from typing import Any

from foo_ops.library.choices import choices_in

# For messages.
KEYWORDS = (
    'float, int, bool, typing.Literal["a", "b"], int | float, list[float], list[int] or a tuple'
)

_NUMBERS = {bool: "bool", int: "SymInt", float: "float"}
_LISTS = (list, collections.abc.Sequence)


def schema_type(hint: Any) -> str | None:
    """Return the type of an argument with this annotation, or None where there is none."""
    parts = set(typing.get_args(hint)) if _is_union(hint) else {hint}
    mark = "?" if type(None) in parts else ""
    plain = parts - {type(None)}
    if {int, float} <= plain <= {bool, int, float, complex}:
        return f"Scalar{mark}"
    type_ = _type_of_one(plain.pop()) if len(plain) == 1 else None
    return None if type_ is None else type_ + mark


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _type_of_one(hint: Any) -> str | None:
    if choices_in(hint):
        return "str"
    if hint in _NUMBERS:
        return _NUMBERS[hint]
    origin, items = typing.get_origin(hint), typing.get_args(hint)
    if origin in _LISTS or (origin is tuple and items[1:] == (...,)):
        size = ""
    elif origin is tuple and len(set(items)) == 1:
        size = str(len(items))
    else:
        return None
    return f"{_NUMBERS[items[0]]}[{size}]" if items[0] in (int, float) else None


def is_finite(default: Any) -> bool:
    """Return whether a schema can have a default."""
    numbers = default if isinstance(default, (list, tuple)) else [default]
    return all(math.isfinite(number) for number in numbers if isinstance(number, float))


def schema_default(default: Any) -> str:
    if isinstance(default, str):
        return f'"{default}"'
    return str(list(default) if isinstance(default, tuple) else default)
