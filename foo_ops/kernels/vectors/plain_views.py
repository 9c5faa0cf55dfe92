"""Views, rows and pointers for kernels that run as plain Python: those of views.py on NumPy.

An element is a NumPy scalar of its compute type, so that arithmetic rounds and promotes as in
compiled code. An index outside of an array raises IndexError.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from foo_ops.kernels.vectors.elements import COMPLEX_PARTS, ELEMENTS

_STORAGES = {"bool": "uint8", "bfloat16": "uint16"}


def compute_dtype_of(dtype: str) -> np.dtype[Any]:
    return np.dtype(str(ELEMENTS[dtype].compute))


def _memory(address: int, dtype: str, count: int) -> np.ndarray:
    """Return elements as they lie in memory. Complex numbers in half precision are two of them."""
    buffer = (ctypes.c_char * (count * ELEMENTS[dtype].size)).from_address(address)
    storage = COMPLEX_PARTS[dtype] if dtype == "complex32" else _STORAGES.get(dtype, dtype)
    return np.frombuffer(memoryview(buffer), storage)


def read(address: int, dtype: str, count: int = 1) -> np.ndarray:
    """Read adjacent elements in their compute type."""
    stored, compute = _memory(address, dtype, count), compute_dtype_of(dtype)
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    if dtype == "complex32":
        return stored.astype(np.float32).view(compute)
    return stored.astype(compute)


def write(address: int, dtype: str, values: Any) -> None:
    """Convert values to the compute type, and round them to the dtype."""
    computed = np.atleast_1d(values).astype(compute_dtype_of(dtype))
    stored = _memory(address, dtype, len(computed))
    if dtype == "bfloat16":
        stored[:] = _bits_of_bfloat16(computed)
    else:
        stored[:] = computed.view(np.float32) if dtype == "complex32" else computed


def _bits_of_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round float32 to nearest even, as `elements.round_to_bfloat16` does."""
    bits = values.view(np.uint32)
    upper = bits >> 16
    rounded = (bits + 0x7FFF + (upper & 1)) >> 16
    return np.where(np.isnan(values), upper | 0x40, rounded)


class Extents(tuple[Any, ...]):
    """Sizes or strides. They are 64-bit integers, which promote float32 as in compiled code.

    Where there are no dimensions, the last is one of one element.
    """

    def __new__(cls, numbers: Sequence[int]) -> Extents:
        return super().__new__(cls, map(np.int64, numbers))

    def __getitem__(self, dimension: Any) -> Any:
        is_none = len(self) == 0 and dimension == -1
        return np.int64(1) if is_none else super().__getitem__(dimension)

    def __repr__(self) -> str:
        return repr(tuple(map(int, self)))


class Pointer:
    """Adjacent elements, of which those from ``first`` to before ``last`` may be used."""

    def __init__(self, address: int, dtype: str, first: int, last: int) -> None:
        self.address, self.dtype = address, dtype
        self._first, self._last = first, last

    def place(self, index: Any, count: int = 1) -> int:
        """Return the address of an element with ``count - 1`` after it."""
        if not self._first <= index <= self._last - count:
            raise IndexError(
                f"index {index} is outside of the elements from {self._first} to {self._last - 1}"
                + f", with the {count - 1} after it" * (count > 1)
            )
        return self.address + int(index) * ELEMENTS[self.dtype].size

    def moved(self, count: Any) -> Pointer:
        """Return the pointer to an element beside the first; it need not exist."""
        address = self.address + int(count) * ELEMENTS[self.dtype].size
        return Pointer(address, self.dtype, self._first - int(count), self._last - int(count))

    def __getitem__(self, index: Any) -> Any:
        return read(self.place(index), self.dtype)[0]

    def __setitem__(self, index: Any, value: Any) -> None:
        write(self.place(index), self.dtype, value)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(self._first, self._last))

    def __repr__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self))}]"


class Row:
    """Elements that are a stride apart."""

    def __init__(self, data: Pointer, stride: Any, size: Any) -> None:
        self._data, self._stride, self._size = data, stride, size
        self.dtype = data.dtype

    def _index(self, index: Any) -> Any:
        if not 0 <= index < self._size:
            raise IndexError(f"index {index} is outside of a row of {self._size} elements")
        return index * self._stride

    def __getitem__(self, index: Any) -> Any:
        return self._data[self._index(index)]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._data[self._index(index)] = value

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(self._size))

    def __repr__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self))}]"


class View:
    """A tensor: its sizes and strides, in elements, and where its first element is."""

    def __init__(
        self,
        address: int,
        dtype: str,
        shape: Sequence[int],
        strides: Sequence[int],
        contiguous_rows: bool,
    ) -> None:
        self.dtype, self.shape, self.strides = dtype, Extents(shape), Extents(strides)
        self.ndim = np.int64(len(shape))
        self.size, self.rows = np.int64(math.prod(shape)), np.int64(math.prod(shape[:-1]))
        self._contiguous_rows = contiguous_rows
        last = sum((size - 1) * stride for size, stride in zip(shape, strides))
        self.data = Pointer(address, dtype, 0, last + 1 if self.size > 0 else 0)

    def _offset(self, indices: Any) -> int:
        indices = indices if isinstance(indices, tuple) else (indices,)
        inside = (0 <= index < size for index, size in zip(indices, self.shape))
        if len(indices) != self.ndim or not all(inside):
            raise IndexError(f"index {_written(indices)} is outside of the shape {self.shape}")
        return sum(int(index * stride) for index, stride in zip(indices, self.strides))

    def row(self, number: Any) -> Pointer | Row:
        if not 0 <= number < self.rows:
            raise IndexError(f"row {number} is outside of the {self.rows} rows")
        indices = np.unravel_index(int(number), tuple(self.shape[:-1]))
        start = self.data.moved(sum(int(i * step) for i, step in zip(indices, self.strides)))
        if self._contiguous_rows:
            return Pointer(start.address, self.dtype, 0, int(self.shape[-1]))
        return Row(start, self.strides[-1], self.shape[-1])

    def __getitem__(self, indices: Any) -> Any:
        return self.data[self._offset(indices)]

    def __setitem__(self, indices: Any, value: Any) -> None:
        self.data[self._offset(indices)] = value

    def __repr__(self) -> str:
        return f"View({self.dtype}, shape={self.shape}, strides={self.strides})"


def _written(indices: tuple[Any, ...]) -> str:
    return str(tuple(map(int, indices)) if len(indices) != 1 else indices[0])
