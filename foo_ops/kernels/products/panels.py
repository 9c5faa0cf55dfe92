"""Copy blocks of matrices into the form that products take: converted, padded, transposed."""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import njit
from numba.core import types

from foo_ops.kernels.products.forms import Form
from foo_ops.kernels.vectors.elements import ELEMENTS, lanes_of
from foo_ops.kernels.vectors.memory import address_of, load, pointer_to, shift, store
from foo_ops.kernels.vectors.rows import round_up
from foo_ops.kernels.vectors.stack import stack_memory
from foo_ops.kernels.vectors.transpose import transpose_square

_BITS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


def is_copied_as_it_is(stored: str, source: str) -> bool:
    """Whether elements have the same bits in both dtypes."""
    return source == stored or {source, stored} == {"bool", "uint8"}


@functools.cache
def _make_copy(stored: str, source: str) -> Callable:
    """Make ``copy(target, source, stride, count, width)``: elements at a stride become adjacent.

    Those that are missing to ``width`` are zeros. bfloat16 stays as it is.
    """
    kind = ELEMENTS[stored].compute
    to_bits = pointer_to(_BITS[ELEMENTS[source].size])

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

    copy_some = copy_bits if is_copied_as_it_is(stored, source) else copy_converted

    @njit
    def copy(target, source, stride, count, width):
        copy_some(target, source, stride, count)
        for i in range(count, width):
            store(target, i, kind(0))

    return copy


@functools.cache
def make_pack_rows(form: Form, a: str) -> Callable:
    """Make ``pack_rows(target, source, row_stride, column_stride, rows, depth)``."""
    DEPTH, MULTIPLE = form.depth, form.depth_multiple
    copy = _make_copy(form.left, a)

    @njit
    def pack_rows(target, source, row_stride, column_stride, rows, depth):
        for row in range(rows):
            line = shift(source, row * row_stride)
            copy(shift(target, row * DEPTH), line, column_stride, depth, round_up(depth, MULTIPLE))

    return pack_rows


@functools.cache
def make_pack_panel(form: Form, b: str, WIDTH: int) -> Callable:
    """Make ``pack_panel(panel, source, row_stride, column_stride, depth, columns, padded)``.

    A step is a row of the panel. Where columns are adjacent they are copied; else some columns at a
    time are transposed.
    """
    # Integers that become pairs of bfloat16 are converted on their way to a strip.
    is_copied = form.right != "bfloat16" or b == "bfloat16"
    pack_adjacent = _make_pack_adjacent(form, b, WIDTH) if is_copied else _pack_nothing
    pack_transposed = _make_pack_transposed(form, b, WIDTH)

    @njit
    def pack_panel(panel, source, row_stride, column_stride, depth, columns, padded):
        if is_copied and column_stride == 1:
            pack_adjacent(panel, source, row_stride, depth, columns, padded)
        else:
            pack_transposed(panel, source, row_stride, column_stride, depth, columns, padded)

    return pack_panel


@njit
def _pack_nothing(panel, source, row_stride, depth, columns, padded):
    """Stand for a copy that is never called."""


def _make_pack_transposed(form: Form, b: str, WIDTH: int) -> Callable:
    LANES, DEPTH, STEP = lanes_of(form.unit), form.depth, form.step
    BLOCK = LANES * STEP
    MULTIPLE, HEIGHT = max(BLOCK, form.depth_multiple), DEPTH // STEP
    copy, strip_of = _make_copy(form.right, b), stack_memory(form.right, LANES * DEPTH)
    as_units, is_same = pointer_to(form.unit), is_copied_as_it_is(form.right, b)

    @njit
    def pack_transposed(panel, source, row_stride, column_stride, depth, columns, padded):
        strip, units = strip_of(), as_units(address_of(panel))
        rows = as_units(address_of(strip))
        # So much is transposed from where it is.
        adjacent = is_same and row_stride == 1 and column_stride % STEP == 0
        first = depth // BLOCK * BLOCK if adjacent else 0
        for column in range(0, padded, LANES):
            start = first if column + LANES <= columns else 0
            columns_of = as_units(address_of(shift(source, column * column_stride)))
            for step in range(0, start // STEP, LANES):
                target = shift(units, step * WIDTH + column)
                place = shift(columns_of, step)
                transpose_square(target, WIDTH, place, column_stride // STEP, LANES)
            rest = round_up(depth, MULTIPLE) - start
            for lane in range(LANES):
                count = depth - start if column + lane < columns else 0
                line = shift(source, (column + lane) * column_stride + start * row_stride)
                copy(shift(strip, lane * DEPTH), line, row_stride, count, rest)
            for step in range(0, rest // STEP, LANES):
                target = shift(units, (start // STEP + step) * WIDTH + column)
                transpose_square(target, WIDTH, shift(rows, step), HEIGHT, LANES)

    return pack_transposed


def _make_pack_adjacent(form: Form, b: str, WIDTH: int) -> Callable:
    """Make the copy of adjacent columns, of which a step joins one or several rows."""
    STEP, MULTIPLE = form.step, form.depth_multiple
    if STEP == 1:
        copy = _make_copy(form.right, b)

        @njit
        def pack_rows(panel, source, row_stride, depth, columns, padded):
            for row in range(depth):
                line = shift(source, row * row_stride)
                copy(shift(panel, row * WIDTH), line, 1, columns, padded)

        return pack_rows

    size = ELEMENTS[form.right].size
    bits, is_pair, WIDE = ELEMENTS[_BITS[size]].compute, STEP == 2, types.uint32(8 * size)
    as_units = pointer_to(form.unit)
    as_source = pointer_to("uint16" if b == "bfloat16" else b)

    @njit
    def element(line, i):
        return types.uint32(bits(load(line, i)))

    @njit
    def join_pairs(target, line, stride, columns):
        second = shift(line, stride)
        for i in range(columns):
            store(target, i, types.int32(element(line, i) | element(second, i) << WIDE))

    @njit
    def join_fours(target, line, stride, columns):
        second, third, fourth = (
            shift(line, stride),
            shift(line, 2 * stride),
            shift(line, 3 * stride),
        )
        for i in range(columns):
            low = element(line, i) | element(second, i) << WIDE
            high = element(third, i) | element(fourth, i) << WIDE
            store(target, i, types.int32(low | high << (WIDE + WIDE)))

    join = join_pairs if is_pair else join_fours

    @njit
    def join_some(target, line, stride, columns, count):
        """Join fewer rows, for the last step."""
        for i in range(columns):
            joined = types.uint32(0)
            for row in range(count):
                joined |= element(line, row * stride + i) << types.uint32(row * WIDE)
            store(target, i, types.int32(joined))

    @njit
    def pack_steps(panel, source, row_stride, depth, columns, padded):
        units, rows = as_units(address_of(panel)), as_source(address_of(source))
        for row in range(0, round_up(depth, MULTIPLE), STEP):
            target, line = shift(units, row // STEP * WIDTH), shift(rows, row * row_stride)
            if row + STEP <= depth:
                join(target, line, row_stride, columns)
            else:
                join_some(target, line, row_stride, columns, max(depth - row, 0))
            for i in range(columns, padded):
                store(target, i, 0)

    return pack_steps
