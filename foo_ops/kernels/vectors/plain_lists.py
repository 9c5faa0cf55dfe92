"""Lists for kernels that run as plain Python: those of lists.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from foo_ops.kernels.vectors.plain_views import from_start, require_integers


class PlainList:
    """Numbers or views that are only read."""

    def __init__(self, name: str, items: Sequence[Any] | np.ndarray) -> None:
        self._name = name
        self._items = items

    def __getitem__(self, index: Any) -> Any:
        require_integers(index)
        if not 0 <= from_start(index, len(self)) < len(self):
            raise IndexError(f"index {index} is outside of the {len(self)} items of {self._name}")
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __repr__(self) -> str:
        return f"{self._name} {list(self._items)}"
