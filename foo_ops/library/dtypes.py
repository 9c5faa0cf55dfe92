"""Name dtypes, and sort them by their kinds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOATING_8 = (
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
# In the words of messages. A category is named where all its dtypes are taken.
_CATEGORIES = {"integer": SIGNED + UNSIGNED, "floating-point": FLOATING, "complex": COMPLEX}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name without the module: "float32"."""
    return str(dtype).removeprefix("torch.")


def require_dtypes(what: str, dtypes: object) -> tuple[torch.dtype, ...]:
    """Return the dtypes that an argument has, or refuse it."""
    given = tuple(dtypes) if isinstance(dtypes, Iterable) else (None,)
    if not all(isinstance(dtype, torch.dtype) for dtype in given):
        raise TypeError(
            f"{what} must be a sequence of torch.dtype, such as (torch.float32,), got {dtypes!r}"
        )
    return given


def in_words(dtypes: Iterable[torch.dtype]) -> str:
    """Say in a message which dtypes are taken."""
    left, words = dict.fromkeys(dtypes), []
    for word, category in _CATEGORIES.items():
        if all(dtype in left for dtype in category):
            words.append(word)
            for dtype in (*category, *(FLOATING_8 if word == "floating-point" else ())):
                left.pop(dtype, None)
    if words:
        article = "an" if words[0] == "integer" else "a"
        named = [f"{article} {_joined(words)} dtype"]
    else:
        named = []
    return _joined(named + list(map(dtype_name, left)))


def _joined(words: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
