"""Fill, copy and transpose rows of adjacent elements."""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.vectors.arithmetic import splat
from foo_ops.kernels.vectors.elements import ELEMENTS, lanes_of
from foo_ops.kernels.vectors.memory import load, load_vector, shift, store
from foo_ops.kernels.vectors.transpose import transpose_square


@njit
def round_up(count, multiple):
    return (count + multiple - 1) // multiple * multiple


@functools.cache
def make_fill(dtype: str) -> Callable:
    """Make ``fill(target, count, value)`` for targets in the compute dtype ``dtype``."""
    LANES = lanes_of(dtype)
    compute = ELEMENTS[dtype].compute

    @njit
    def fill(target, count, value):
        values = splat(compute(value), LANES)
        whole = count // LANES * LANES
        for index in range(0, whole, LANES):
            store(target, index, values)
        for index in range(whole, count):
            store(target, index, value)

    return fill


@functools.cache
def make_copy_row(dtype: str) -> Callable:
    """Make ``copy_row(target, source, column_stride, columns, width)``, which makes elements
    adjacent.

    It converts between dtypes of the compute dtype ``dtype``, and writes zeros up to ``width``.
    """
    LANES = lanes_of(dtype)

    @njit
    def copy_row(target, source, column_stride, columns, width):
        whole = columns // LANES * LANES if column_stride == 1 else 0
        for column in range(0, whole, LANES):
            store(target, column, load_vector(source, column, LANES))
        for column in range(whole, columns):
            store(target, column, load(source, column * column_stride))
        for column in range(columns, width):
            store(target, column, 0.0)

    return copy_row


@functools.cache
def make_transpose(dtype: str) -> Callable:
    """Make ``transpose(target, target_stride, block, stride, rows, width)``.

    The rows are of the compute dtype ``dtype``, or of pairs. ``rows`` and ``width`` must be
    multiples of the vector's lanes.
    """
    LANES = lanes_of(dtype)

    @njit
    def transpose(target, target_stride, block, stride, rows, width):
        for row in range(0, rows, LANES):
            for column in range(0, width, LANES):
                transpose_square(
                    shift(target, column * target_stride + row), target_stride,
                    shift(block, row * stride + column), stride, LANES,
                )  # fmt: skip

    return transpose
