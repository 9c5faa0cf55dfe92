"""Views, rows, matrices, lists and integers for interpreted kernels, on NumPy."""

from __future__ import annotations

import ctypes
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from foo_ops.kernels.compiler.kernel import WRONG_INDEX
from foo_ops.kernels.lang import views
from foo_ops.kernels.lang.indexing import NOT_INDEXED, NOT_INTEGER, not_a_matrix, wrong_count
from foo_ops.kernels.simd.types import COMPLEX_PARTS, ELEMENTS, HAS_STRIDE

# ----------------------------------------------------------------------------------------- matrices

# Matrices for interpreted kernels: those of foo_ops/kernels/lang/indexing.py on NumPy.


class Matrix:
    """Elements in rows and columns: the memory, and the offset of each element."""

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
    """Return the matrix of an index with slices; raise an IndexError if an index is outside."""
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


# ----------------------------------------------------------------------------------------- integers

# Integers for interpreted kernels, with the arithmetic of compiled ones.
#
# Numba computes integers in 64 bits: in uint64 if both operands are unsigned, else in int64. NumPy
# stays in the wider dtype of the operands, and promotes uint64 and int64 to float64. With floats
# both promote alike. int64 needs no special type.


# ``and`` and ``or`` are keywords: the methods are __and__ and __or__.
_OPERATIONS = ("add", "sub", "mul", "floordiv", "mod", "pow", "and", "or", "xor")
_SHIFTS = ("lshift", "rshift")
# Operations that treat the second operand as unsigned if the first one is.
_BY_THE_FIRST = (*_SHIFTS, "floordiv", "mod")


def as_compiled(value: Any) -> Any:
    """Convert a NumPy integer to one with compiled arithmetic; return other values unchanged."""
    type_ = _TYPES.get(type(value))
    return value if type_ is None else type_(value)


def _as_numpy(value: Any) -> Any:
    return type(value).numpy_type(value) if hasattr(value, "numpy_type") else value


def _in_64_bits(value: Any) -> Any:
    # Some of Python's integers do not fit int64.
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
        return function(*map(_as_numpy, operands))
    wide = [_in_64_bits(_as_numpy(it)) for it in operands]
    type_ = _type_of(*wide[: 1 if name in _BY_THE_FIRST else 2])
    result = function(*(it.astype(type_) for it in wide))
    return as_compiled(result if name in _SHIFTS else result.astype(_type_of(*wide)))


def _calculation(name: str) -> Callable[[Any, Any], Any]:
    return lambda self, other: _calculated(name, self, other)


def _divided(*operands: Any) -> Any:
    if _are_integers(*operands):
        return operator.truediv(*map(np.float64, map(_as_numpy, operands)))
    return operator.truediv(*map(_as_numpy, operands))


def _methods(name: str, calculate: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {
        f"__{name}__": calculate,
        f"__r{name}__": lambda self, other: calculate(other, self),
    }


_ATTRIBUTES: dict[str, Any] = {
    # Makes NumPy scalars defer to our operators.
    "__array_priority__": 1.0,
    "__neg__": lambda self: as_compiled(-_in_64_bits(_as_numpy(self))),
    "__pos__": lambda self: as_compiled(_in_64_bits(_as_numpy(self))),
    "__invert__": lambda self: as_compiled(~_as_numpy(self)),
    "__abs__": lambda self: as_compiled(abs(_as_numpy(self))),
    **_methods("truediv", _divided),
    **_methods("divmod", lambda self, other: (self // other, self % other)),
}
for _name in (*_OPERATIONS, *_SHIFTS):
    _ATTRIBUTES |= _methods(_name, _calculation(_name))

_TYPES: dict[type[Any], Any] = {
    type_: type(type_.__name__, (type_,), {**_ATTRIBUTES, "numpy_type": type_})
    for type_ in (np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32, np.uint64)
}


# -------------------------------------------------------------------------------------------- views

# Views, rows and pointers for interpreted kernels: those of foo_ops/kernels/lang/views.py on NumPy.
#
# An element is a NumPy scalar of its compute type, so that arithmetic rounds and promotes as in
# compiled code. An index outside of an array raises an IndexError, and code that would not compile
# a TypeError.


_STORAGES = {"bool": "uint8", "bfloat16": "uint16"}


def compute_dtype_of(dtype: str) -> np.dtype[Any]:
    return np.dtype(str(ELEMENTS[dtype].compute))


def _memory(address: int, dtype: str, count: int) -> np.ndarray:
    """Return elements in their storage type; a complex32 is two elements."""
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


def read_one(address: int, dtype: str) -> Any:
    return as_compiled(read(address, dtype)[0])


def write(address: int, dtype: str, values: Any) -> None:
    """Convert values to the compute type, and round them to the dtype."""
    computed = np.atleast_1d(values).astype(compute_dtype_of(dtype))
    stored = _memory(address, dtype, len(computed))
    if dtype == "bfloat16":
        stored[:] = _bits_of_bfloat16(computed)
    else:
        stored[:] = computed.view(np.float32) if dtype == "complex32" else computed


def _bits_of_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round float32 to nearest even, like `round_to_bfloat16` of foo_ops/kernels/simd/types.py."""
    bits = values.view(np.uint32)
    upper = bits >> 16
    rounded = (bits + 0x7FFF + (upper & 1)) >> 16
    return np.where(np.isnan(values), upper | 0x40, rounded)


class Extents(tuple[Any, ...]):
    """Sizes or strides: 64-bit integers, which promote float32 as in compiled code.

    Without dimensions, the last one has size 1.
    """

    def __new__(cls, numbers: Sequence[int]) -> Extents:
        return super().__new__(cls, map(np.int64, numbers))

    def __getitem__(self, dimension: Any) -> Any:
        is_none = len(self) == 0 and dimension == -1
        return np.int64(1) if is_none else super().__getitem__(dimension)

    def __repr__(self) -> str:
        return repr(tuple(map(int, self)))


class FromEnd(int):
    """A negative constant, which as an index counts from the end.

    In compiled code constants do so, but variables do not. In arithmetic it is an ordinary Python
    number. A constant that is passed as an argument still counts from the end here, but not in
    compiled code.
    """

    # Makes NumPy scalars defer to the operators below. They would treat a subclass of int as a
    # 64-bit integer, which promotes float32 to float64.
    __array_priority__ = 1.0

    __hash__ = int.__hash__


def _let_calculate(name: str, reflected: str) -> None:
    function = getattr(operator, f"__{name}__")
    setattr(FromEnd, f"__{name}__", lambda self, other: function(int(self), other))
    setattr(FromEnd, f"__{reflected}__", lambda self, other: function(other, int(self)))


for _name in ("add", "and", "floordiv", "lshift", "mod", "mul", "or", "pow", "rshift", "sub"):
    _let_calculate(_name, f"r{_name}")
for _name, _reflected in (
    *(("truediv", "rtruediv"), ("xor", "rxor")),
    *(("lt", "gt"), ("le", "ge"), ("eq", "eq"), ("ne", "ne")),
):
    _let_calculate(_name, _reflected)


def from_start(index: Any, size: Any) -> Any:
    return size + index if isinstance(index, FromEnd) else index


def require_integers(*indices: Any) -> None:
    for index in indices:
        kind = np.asarray(index).dtype
        if kind.kind == "f":
            raise TypeError(WRONG_INDEX + NOT_INTEGER.format(kind))


class _Elements(ABC):
    """Elements with one index, from ``first`` to before ``stop``."""

    dtype: str
    first: Any = 0
    stop: Any

    @abstractmethod
    def place(self, index: Any, count: int = 1, *, told: Any = None) -> int:
        """Return the address of an element that has ``count - 1`` elements after it.

        An access outside is reported at ``told``, by default at the index.
        """

    def _place(self, index: Any) -> int:
        if isinstance(index, tuple):
            raise TypeError(WRONG_INDEX + wrong_count(self, len(index)))
        require_integers(index)
        return self.place(from_start(index, self.stop), told=index)

    def __getitem__(self, index: Any) -> Any:
        return read_one(self._place(index), self.dtype)

    def __setitem__(self, index: Any, value: Any) -> None:
        write(self._place(index), self.dtype, value)

    def __iter__(self) -> Iterator[Any]:
        return (read_one(self.place(i), self.dtype) for i in range(self.first, self.stop))

    def __repr__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self))}]"


class Pointer(_Elements):
    """Adjacent elements."""

    def __init__(
        self, address: int, dtype: str, first: int, stop: int, is_indexable: bool = True
    ) -> None:
        self.address, self.dtype = address, dtype
        self.first, self.stop = first, stop
        self._is_indexable = is_indexable

    def place(self, index: Any, count: int = 1, *, told: Any = None) -> int:
        if not self.first <= index <= self.stop - count:
            what = f"index {index if told is None else told}"
            if count > 1:
                what = f"a vector of {count} elements at {what}"
            raise IndexError(
                f"{what} is outside of the elements from {self.first} to {self.stop - 1}"
            )
        return self.address + int(index) * ELEMENTS[self.dtype].size

    def _place(self, index: Any) -> int:
        if not self._is_indexable:
            raise TypeError(WRONG_INDEX + NOT_INDEXED)
        return super()._place(index)

    def moved(self, count: Any) -> Pointer:
        """Return a pointer moved on by ``count`` elements; the element need not exist."""
        address = self.address + int(count) * ELEMENTS[self.dtype].size
        first, stop = self.first - int(count), self.stop - int(count)
        return Pointer(address, self.dtype, first, stop, self._is_indexable)


class Row(_Elements):
    """Elements that are a stride apart."""

    def __init__(self, memory: Pointer, stride: Any, first: Any, stop: Any) -> None:
        self._memory, self._stride = memory, stride
        self.address, self.dtype = memory.address, memory.dtype
        self.first, self.stop = first, stop

    def place(self, index: Any, count: int = 1, *, told: Any = None) -> int:
        if count != 1:
            raise TypeError(HAS_STRIDE)
        if not self.first <= index < self.stop:
            size = self.stop - self.first
            said = told if isinstance(told, FromEnd) else index - self.first
            raise IndexError(f"index {said} is outside of a row of {size} elements")
        return self._memory.place(index * self._stride)

    def moved(self, count: Any) -> Row:
        memory = self._memory.moved(count * self._stride)
        return Row(memory, self._stride, self.first - count, self.stop - count)


class Flat(_Elements):
    """The elements of a view, counted over all dimensions."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.dtype, self.stop = view.dtype, view.size

    def place(self, index: Any, count: int = 1, *, told: Any = None) -> int:
        if not 0 <= index < self.stop:
            raise IndexError(
                f"index {index if told is None else told} is outside of the {self.stop} elements"
            )
        return self._view.data.place(self._view.offset_of_number(index, self._view.ndim))


class View:
    """A tensor: its sizes and strides, in elements, and the address of its first element."""

    def __init__(
        self, type_: views.View, address: int, shape: Sequence[int], strides: Sequence[int]
    ) -> None:
        self._type, self.dtype = type_, type_.dtype
        self.shape, self.strides = Extents(shape), Extents(strides)
        self.ndim = np.int64(len(shape))
        self.size, self.rows = np.int64(math.prod(shape)), np.int64(math.prod(shape[:-1]))
        last = sum((size - 1) * stride for size, stride in zip(shape, strides))
        stop = last + 1 if self.size > 0 else 0
        self.data = Pointer(address, self.dtype, 0, stop, type_.memory.is_indexable)

    @property
    def flat(self) -> Flat:
        return Flat(self)

    def offset_of_number(self, number: Any, dimensions: Any) -> int:
        """Return the offset of the element or row ``number``, counted over the first dimensions."""
        indices = np.unravel_index(int(number), tuple(self.shape[:dimensions]))
        return sum(int(i * step) for i, step in zip(indices, self.strides))

    def row(self, number: Any) -> Pointer | Row:
        counted = from_start(number, self.rows)
        if not 0 <= counted < self.rows:
            raise IndexError(f"row {number} is outside of the {self.rows} rows")
        start = self.data.moved(self.offset_of_number(counted, -1))
        if self._type.contiguous_rows:
            return Pointer(start.address, self.dtype, 0, int(self.shape[-1]))
        return Row(start, self.strides[-1], 0, self.shape[-1])

    def _place(self, indices: Any) -> int:
        given = indices if isinstance(indices, tuple) else (indices,)
        if len(given) != self.ndim:
            raise TypeError(WRONG_INDEX + wrong_count(self._type, len(given)))
        require_integers(*given)
        counted = tuple(map(from_start, given, self.shape))
        if not all(0 <= index < size for index, size in zip(counted, self.shape)):
            raise IndexError(f"index {_written(given)} is outside of the shape {self.shape}")
        return self.data.place(sum(int(i * step) for i, step in zip(counted, self.strides)))

    def counted(self, index: Any, size: Any) -> Any:
        """Return an index counted from the start of a dimension of ``size``."""
        require_integers(index)
        counted = from_start(index, size)
        if not 0 <= counted < size:
            raise IndexError(f"index {index} is outside of the shape {self.shape}")
        return counted

    def __getitem__(self, indices: Any) -> Any:
        given = indices if isinstance(indices, tuple) else (indices,)
        if any(isinstance(index, slice) for index in given):
            return sliced(self, self._type.argument, given)
        return read_one(self._place(indices), self.dtype)

    def __setitem__(self, indices: Any, value: Any) -> None:
        write(self._place(indices), self.dtype, value)

    def __repr__(self) -> str:
        return f"View({self.dtype}, shape={self.shape}, strides={self.strides})"


def _written(indices: tuple[Any, ...]) -> str:
    return str(tuple(map(int, indices)) if len(indices) != 1 else indices[0])


# -------------------------------------------------------------------------------------------- lists

# Lists for interpreted kernels: those of foo_ops/kernels/lang/arguments.py.


class ReadOnlyList:
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
