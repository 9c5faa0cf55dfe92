"""Matrices for kernels that run as plain Python: those of matrices.py on NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from foo_ops.kernels.vectors.elements import ELEMENTS
from foo_ops.kernels.vectors.matrices import not_a_matrix


class Matrix:
    """Elements in rows and columns: where the memory is, and the offset of each."""

    def __init__(self, memory: Any, dtype: str, offsets: np.ndarray) -> None:
        self._memory, self.dtype, self._offsets = memory, dtype, offsets
        self.rows, self.columns = map(np.int64, offsets.shape)

    @property
    def T(self) -> Matrix:  # noqa: N802
        return Matrix(self._memory, self.dtype, self._offsets.T)

    def read(self, read: Any) -> np.ndarray:
        """Return the elements in their compute type."""
        return read(self._memory.address, self.dtype, int(self._memory.stop))[self._offsets]

    def write(self, write: Any, values: np.ndarray) -> None:
        size = ELEMENTS[self.dtype].size
        for offset, value in zip(self._offsets.flat, values.flat):
            write(self._memory.address + int(offset) * size, self.dtype, value)

    def __repr__(self) -> str:
        return f"Matrix({self.dtype}, rows={self.rows}, columns={self.columns})"


def sliced(view: Any, name: str, indices: Sequence[Any]) -> Matrix:
    """Return the matrix of an index with slices; IndexError where another index is outside."""
    given = [*indices, slice(None)] if len(indices) == view.ndim - 1 else list(indices)
    slices = [index for index in given if isinstance(index, slice)]
    if len(given) != view.ndim or len(slices) != 2 or any(it.step is not None for it in slices):
        raise TypeError(not_a_matrix(name, view.ndim, len(slices)))
    start, extents = 0, []
    for index, size, stride in zip(given, view.shape, view.strides):
        if isinstance(index, slice):
            extents.append(np.arange(*index.indices(int(size))) * int(stride))
        else:
            start += int(view.counted(index, size)) * int(stride)
    rows, columns = extents
    return Matrix(view.data, view.dtype, start + rows[:, None] + columns[None, :])
