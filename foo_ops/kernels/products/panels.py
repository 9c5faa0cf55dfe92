"""Copy blocks of matrices into the form that register tiles take: converted, padded, transposed."""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import njit
from numba.core import types

from foo_ops.kernels.vectors.elements import ELEMENTS, lanes_of
from foo_ops.kernels.vectors.memory import address_of, load, pointer_to, shift, store
from foo_ops.kernels.vectors.pairs import PAIRS
from foo_ops.kernels.vectors.stack import stack_memory
from foo_ops.kernels.vectors.transpose import transpose_square

DEPTH = 256
"""The most elements of a block that are summed over."""


@functools.cache
def _make_copy(stored: str, source: str) -> Callable:
    """Make ``copy(target, source, stride, count, width)``: elements at a stride become adjacent.

    Those that are missing to ``width`` are zeros. bfloat16 stays as it is.
    """
    kind = ELEMENTS[stored].compute
    is_same = stored == source
    bits = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}[ELEMENTS[source].size]
    to_bits = pointer_to(bits)

    @njit
    def copy_bits(target, source, stride, count):
        to, of = to_bits(address_of(target)), to_bits(address_of(source))
        if stride == 1:
            for i in range(count):
                store(to, i, load(of, i))
        else:
            for i in range(count):
                store(to, i, load(of, i * stride))

    @njit
    def copy_converted(target, source, stride, count):
        if stride == 1:
            for i in range(count):
                store(target, i, kind(load(source, i)))
        else:
            for i in range(count):
                store(target, i, kind(load(source, i * stride)))

    copy_some = copy_bits if is_same else copy_converted

    @njit
    def copy(target, source, stride, count, width):
        copy_some(target, source, stride, count)
        for i in range(count, width):
            store(target, i, kind(0))

    return copy


@functools.cache
def make_pack_rows(stored: str, a: str) -> Callable:
    """Make ``pack_rows(target, source, row_stride, column_stride, rows, depth)``."""
    copy = _make_copy(stored, a)

    @njit
    def pack_rows(target, source, row_stride, column_stride, rows, depth):
        for row in range(rows):
            line = shift(source, row * row_stride)
            copy(shift(target, row * DEPTH), line, column_stride, depth, depth + depth % 2)

    return pack_rows


@functools.cache
def make_pack_panel(stored: str, b: str, WIDTH: int) -> Callable:
    """Make ``pack_panel(panel, source, row_stride, column_stride, depth, columns, padded)``.

    A step is a row of the panel: of elements, or of pairs of bfloat16. Where columns are adjacent
    they are copied; else some columns at a time are copied as rows, and transposed.
    """
    in_pairs = stored == "bfloat16"
    # Integers that become pairs are converted on their way to a strip.
    is_copied = not in_pairs or b == "bfloat16"
    unit = PAIRS if in_pairs else stored
    LANES = lanes_of("float32" if in_pairs else stored)
    as_units = pointer_to(unit)
    copy, pack_pairs = _make_copy(stored, b), _make_pack_pairs()
    strip_of = stack_memory(stored, LANES * DEPTH)
    PER_STEP = 2 if in_pairs else 1
    HEIGHT = DEPTH // PER_STEP

    @njit
    def pack_adjacent(panel, source, row_stride, depth, columns, padded):
        if in_pairs:
            pack_pairs(panel, source, row_stride, depth, columns, padded, WIDTH)
        else:
            for row in range(depth):
                line = shift(source, row * row_stride)
                copy(shift(panel, row * WIDTH), line, 1, columns, padded)

    @njit
    def pack_transposed(panel, source, row_stride, column_stride, depth, columns, padded):
        strip, units = strip_of(), as_units(address_of(panel))
        rows = as_units(address_of(strip))
        block = LANES * PER_STEP
        whole = (depth + block - 1) // block * block
        for column in range(0, padded, LANES):
            for lane in range(LANES):
                count = depth if column + lane < columns else 0
                line = shift(source, (column + lane) * column_stride)
                copy(shift(strip, lane * DEPTH), line, row_stride, count, whole)
            for step in range(0, whole // PER_STEP, LANES):
                target = shift(units, step * WIDTH + column)
                transpose_square(target, WIDTH, shift(rows, step), HEIGHT, LANES)

    @njit
    def pack_panel(panel, source, row_stride, column_stride, depth, columns, padded):
        if is_copied and column_stride == 1:
            pack_adjacent(panel, source, row_stride, depth, columns, padded)
        else:
            pack_transposed(panel, source, row_stride, column_stride, depth, columns, padded)

    return pack_panel


@functools.cache
def _make_pack_pairs() -> Callable:
    """Make the copy of adjacent columns of bfloat16 into pairs of two rows."""
    as_bits, as_pairs = pointer_to("uint16"), pointer_to(PAIRS)

    @njit
    def pack_pairs(panel, source, row_stride, depth, columns, padded, width):
        pairs = as_pairs(address_of(panel))
        for row in range(0, depth, 2):
            low = as_bits(address_of(shift(source, row * row_stride)))
            target = shift(pairs, row // 2 * width)
            if row + 1 < depth:
                high = shift(low, row_stride)
                for i in range(columns):
                    upper = types.uint32(load(high, i)) << types.uint32(16)
                    store(target, i, types.int32(types.uint32(load(low, i)) | upper))
            else:
                for i in range(columns):
                    store(target, i, types.int32(load(low, i)))
            for i in range(columns, padded):
                store(target, i, types.int32(0))

    return pack_pairs
