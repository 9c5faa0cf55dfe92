"""Interpreted kernels of users: the makers of elementwise.py and tile.py under the same names.

A function runs unchanged, except for ``math``: its functions return float32 for float32, as in
compiled code, and infinity or NaN where Python's functions raise.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numba.core import types as numba_types

from foo_ops.kernels.compiler.kernel import Kernel, size_name
from foo_ops.kernels.compiler.numba_target.constants import Text
from foo_ops.kernels.compiler.python_math import MATH, round_whole
from foo_ops.kernels.interpret.views import (
    FromEnd,
    ReadOnlyList,
    View,
    as_compiled,
    read,
    read_one,
    write,
)
from foo_ops.kernels.lang.arguments import Numbers, Tensors, wrong_number
from foo_ops.kernels.simd.memory import DATA, NDIM, OUTSIDE, SIZE, SIZES, STRIDES
from foo_ops.kernels.user import elementwise, tile
from foo_ops.kernels.user.sources import Copies


def make_elementwise_kernel(
    signature: str,
    kinds: tuple[str, ...],
    variants: Mapping[str, tuple[int, str, tuple[str, ...]]],
    depends_on: tuple[int, ...],
    *functions: Callable[..., Any],
) -> Kernel:
    """Make the loop over elements around a scalar function: see elementwise.py."""
    dtype, *given = signature.split(",")
    position, input_dtype, all_outputs = variants[dtype]
    function = _InterpretedCopies().of(functions[position])
    arguments = elementwise.describe_arguments(kinds, given, input_dtype)
    present = elementwise.present_outputs(depends_on, arguments, len(all_outputs))
    output_dtypes = [all_outputs[output] for output in present]
    inputs = [argument for argument in arguments if argument.dtype is not None]
    dtypes = (*output_dtypes, *(argument.dtype for argument in inputs))

    def argument_at(argument: Any, addresses: Sequence[int], numbers: int) -> Any:
        if argument.dtype is not None:
            return read_one(addresses[len(output_dtypes) + argument.position], argument.dtype)
        return _value(argument.type, numbers + 8 * argument.position)

    def loop(data: int, strides: int, size0: int, size1: int, numbers: int) -> None:
        steps = _integers(strides, 2 * len(dtypes))
        inner, outer = steps[: len(dtypes)], steps[len(dtypes) :]
        starts = _integers(data, len(dtypes))
        for row, column in np.ndindex(size1, size0):
            places = [a + row * o + column * i for a, o, i in zip(starts, outer, inner)]
            values = function(*(argument_at(argument, places, numbers) for argument in arguments))
            values = values if isinstance(values, tuple) else (values,)
            if len(values) != len(all_outputs):
                raise TypeError(wrong_number(len(all_outputs), len(values)))
            for place, output in zip(places, present):
                write(place, all_outputs[output], values[output])

    return Kernel(_quietly(loop), elementwise.ARGUMENT_TYPES)


def make_tile_kernel(
    signature: str,
    kinds: tuple[str, ...],
    names: tuple[str, ...],
    contiguous_rows: bool,
    taken: Mapping[str, tuple[int, ...]],
    scratch: tuple[tuple[int, int], ...],
    refuses_late: bool,
    *functions: Callable[..., Any],
) -> Kernel:
    """Make the call of a function of views for a range of tiles: see tile.py."""
    argument_types = tile.types_of_arguments(signature, kinds, names, contiguous_rows, scratch)
    sizes = sum(dimensions for _, dimensions in scratch)
    copies = _InterpretedCopies()
    function, *others = map(copies.of, functions)
    given = dict(zip(taken, others))

    def argument_at(type_: Any, place: int) -> Any:
        if isinstance(type_, tile.View):
            return _view(_integers(place, 1)[0], type_)
        return _value(type_, place)

    def loop(numbers: int, phase: int, count: int, begin: int, end: int) -> None:
        def value_of(position: int) -> Any:
            return argument_at(argument_types[position], numbers + 8 * position)

        def call(name: str, default: Any) -> Any:
            if name not in given:
                return default
            return given[name](*map(value_of, taken[name]))

        if phase == tile.COUNT_TILES:
            # There is no scratch memory yet.
            arguments = map(value_of, range(len(kinds) - len(scratch)))
            rows = next((value.rows for value in arguments if isinstance(value, View)), 0)
            tiles = call("tiles", rows) if call("check", True) else tile.REFUSED
            names_of_sizes = map(size_name, range(sizes if tiles >= 0 else 0))
            counts = [tiles, *(call(name, 0) for name in names_of_sizes)]
            write(count, "int64", np.array(counts, np.int64))
        elif phase == tile.RUN_TILES:
            is_used = function(*map(value_of, range(len(kinds))), Range(begin, end))
            if refuses_late and not is_used:
                write(count, "int64", np.array([tile.REFUSED], np.int64))
        else:
            call("finish", None)

    return Kernel(_quietly(loop), tile.ARGUMENT_TYPES)


def _quietly(loop: Callable[..., None]) -> Callable[..., None]:
    """Make division by zero and overflow return infinity or NaN without a warning."""
    return np.errstate(all="ignore")(loop)


# ------------------------------------------------------------------------------------- arguments


def _integers(address: int, count: int) -> list[int]:
    return read(address, "int64", count).tolist()


def _value(type_: Any, address: int) -> Any:
    """Read an argument that is not a tensor: its eight bytes are a number or an address."""
    if type_ == numba_types.none:
        return None
    if isinstance(type_, Text):
        return type_.text
    if isinstance(type_, Numbers):
        fields = _integers(_integers(address, 1)[0], SIZE + 1)
        numbers = read(fields[DATA], type_.view.dtype, fields[SIZE])
        return ReadOnlyList(type_.view.argument, numbers.astype(str(type_.element)))
    if isinstance(type_, Tensors):
        first, count = _integers(_integers(address, 1)[0], 2)
        size = 8 * (OUTSIDE + 1)
        views = [_view(first + size * position, type_.view) for position in range(count)]
        return ReadOnlyList(type_.view.argument, views)
    if isinstance(type_, numba_types.Complex):
        return read(_integers(address, 1)[0], "complex128").astype(str(type_))[0]
    is_float = isinstance(type_, numba_types.Float)
    bits = read(address, "float64" if is_float else "int64")
    if type_ == numba_types.boolean:
        return bool(bits[0])
    return as_compiled(bits.astype(str(type_))[0])


def _view(struct: int, type_: tile.View) -> View:
    """Read the C++ struct ``View``."""
    fields = _integers(struct, max(DATA, NDIM, SIZES, STRIDES) + 1)
    shape, strides = (_integers(fields[field], fields[NDIM]) for field in (SIZES, STRIDES))
    return View(type_, fields[DATA], shape, strides)


# ----------------------------------------------------------------------------- names and constants


class _InterpretedCopies(Copies):
    """Copies functions, unwraps Numba's ``njit``, and replaces functions of ``math``.

    Negative constants are marked as such: see `FromEnd`.
    """

    def finished(self, copy: types.FunctionType) -> types.FunctionType:
        copy.__code__ = _with_marked_constants(copy.__code__)
        for name, ours in (("round", _round), ("range", Range)):
            copy.__globals__.setdefault(name, ours)
        return copy

    def other(self, value: Any) -> Any:
        if isinstance(value, types.BuiltinFunctionType) and value.__module__ == "math":
            return MATH.get(value.__name__, value)
        inner = getattr(value, "py_func", None)
        return _marked(value) if inner is None else self.of(inner)


def _with_marked_constants(code: types.CodeType) -> types.CodeType:
    return code.replace(co_consts=tuple(map(_marked, code.co_consts)))


def _marked(value: Any) -> Any:
    """Return a constant with its negative integers replaced by `FromEnd`."""
    if isinstance(value, types.CodeType):
        return _with_marked_constants(value)
    if type(value) is tuple:
        return tuple(map(_marked, value))
    return FromEnd(value) if type(value) is int and value < 0 else value


def _round(number: Any, digits: Any = None) -> Any:
    return round_whole(number) if digits is None else round(number, digits)


class Range:
    """A range of 64-bit integers, which promote float32 as in compiled code."""

    def __init__(self, *bounds: Any) -> None:
        self._range = range(*map(int, bounds))

    def __iter__(self) -> Iterator[np.int64]:
        return map(np.int64, self._range)

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, index: Any) -> np.int64:
        return np.int64(self._range[index])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._range, name)

    def __repr__(self) -> str:
        return repr(self._range)
