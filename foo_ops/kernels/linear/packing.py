"""Pack rows of the left matrix and columns of the right one in the order a product reads them.

In each matrix either the steps are adjacent in memory, or the rows (columns) are. A step of
bfloat16 may be a pair: see foo_ops/kernels/products/operands.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.compiler.processor import spreads_prefetches
from foo_ops.kernels.products.limbs import limbs_of
from foo_ops.kernels.products.on_amx import GROUP, TILE_MULTIPLE
from foo_ops.kernels.products.operands import vector_product_dtype
from foo_ops.kernels.simd.memory import (
    CACHE_LINE,
    address_of,
    load,
    load_vector,
    pointer_to,
    prefetch,
    shift,
    store,
)
from foo_ops.kernels.simd.narrow import PAIRS, interleave, load_interleaved
from foo_ops.kernels.simd.transpose import (
    make_copy_row,
    round_up,
    transpose_adjacent,
    transpose_pairs,
    transpose_square,
)
from foo_ops.kernels.simd.types import ELEMENTS, compute_dtype, lanes_of

# Rows of the left matrix at a distance of whole pages share few sets of L1. They are copied even
# if the product could read them in place.
PAGE_BYTES = 4096


def on_matrix_unit(dtype: str) -> bool:
    """Whether a matrix unit computes products; it multiplies only bfloat16 without splitting."""
    return limbs_of(dtype) == 1


def in_pairs(dtype: str) -> bool:
    return on_matrix_unit(dtype) or vector_product_dtype(dtype) == PAIRS


@functools.cache
def make_left_packer(dtype: str, BAND: int, STEPS: int) -> Callable:
    """Make ``pack_left(target, source, row_stride, step_stride, rows, count)``.

    It packs ``count`` elements of each row, or leaves the source where that is as fast. It returns
    the left matrix of a product: a pointer, the distance of bands of ``BAND`` rows, and the strides
    of a row and of a step (for a matrix unit, of a group of steps). Copied rows with adjacent steps
    are ``STEPS`` steps apart.
    """
    if in_pairs(dtype):
        return _make_left_packer_of_pairs(BAND, STEPS)
    compute = compute_dtype(dtype)
    copy_row, pack_bands = make_copy_row(compute), make_band_packer(dtype, BAND)
    is_computed = dtype == compute
    PAGE = PAGE_BYTES // ELEMENTS[dtype].size

    @njit
    def pack_left(target, source, row_stride, step_stride, rows, count):
        if step_stride != 1:
            distance = pack_bands(target, source, step_stride, rows, count)
            return target, distance, 1, BAND
        if is_computed and row_stride % PAGE != 0:
            return source, BAND * row_stride, row_stride, 1
        for row in range(rows):
            copy_row(shift(target, row * STEPS), shift(source, row * row_stride), 1, count, 0)
        return target, BAND * STEPS, STEPS, 1

    return pack_left


def behind_bands(compute: str, BAND: int) -> int:
    """Return the number of elements that vectors write beyond a piece of a band."""
    return -BAND % lanes_of(compute)


@functools.cache
def make_band_packer(dtype: str, BAND: int) -> Callable:
    """Make ``pack_bands(target, source, step_stride, rows, count)`` for rows that are adjacent.

    It packs bands of ``BAND`` rows, step by step, for a product on vectors, and returns the
    distance of bands. A step of bfloat16 may be a pair.
    """
    compute, has_pairs = compute_dtype(dtype), vector_product_dtype(dtype) == PAIRS
    copy_bands = _make_pair_band_copy(BAND) if has_pairs else _make_band_copy(compute, BAND)
    STEP, BEHIND = 2 if has_pairs else 1, behind_bands(compute, BAND)
    as_target = pointer_to(PAIRS if has_pairs else compute)

    @njit
    def pack_bands(target, source, step_stride, rows, count):
        distance = BAND * ((count + STEP - 1) // STEP) + BEHIND
        for step in range(0, count, STEP):
            place = as_target(address_of(shift(target, step // STEP * BAND)))
            line = shift(source, step * step_stride)
            copy_bands(place, line, step_stride, rows, count - step, distance)
        return distance

    return pack_bands


def _make_band_copy(compute: str, BAND: int) -> Callable:
    """Make ``copy_bands(target, line, step_stride, rows, count, distance)``.

    It copies a step of all rows in pieces of ``BAND``. Vectors write beyond the end of a piece,
    into the piece of the next step, which is written later.
    """
    LANES, copy_row = lanes_of(compute), make_copy_row(compute)
    COVERED = BAND + behind_bands(compute, BAND)

    @njit
    def copy_bands(target, line, step_stride, rows, count, distance):
        row, place = 0, target
        while row + COVERED <= rows:
            for lane in range(0, COVERED, LANES):
                store(place, lane, load_vector(line, row + lane, LANES))
            row += BAND
            place = shift(place, distance)
        while row < rows:
            copy_row(place, shift(line, row), 1, min(BAND, rows - row), 0)
            row += BAND
            place = shift(place, distance)

    return copy_bands


def _make_pair_band_copy(BAND: int) -> Callable:
    """Like `_make_band_copy`, for pairs of a step and the next: zeros if ``count`` is 1."""
    LANES, move = LANES_OF_PAIRS(), _make_pair_mover()
    COVERED = BAND + behind_bands("float32", BAND)

    @njit
    def copy_bands(target, line, step_stride, rows, count, distance):
        row, place = 0, target
        while count > 1 and row + COVERED <= rows:
            for lane in range(0, COVERED, LANES):
                first = shift(line, row + lane)
                store(place, lane, load_interleaved(first, shift(first, step_stride), LANES))
            row += BAND
            place = shift(place, distance)
        while row < rows:
            for lane in range(min(BAND, rows - row)):
                move(place, lane, shift(line, row + lane), step_stride, 0, count)
            row += BAND
            place = shift(place, distance)

    return copy_bands


@functools.cache
def make_right_packer(dtype: str, WIDTH: int) -> Callable:
    """Make ``pack_right(target, distance, source, column_stride, step_stride, columns, count)``.

    It packs panels of ``WIDTH`` columns at a distance of ``distance``, padded with zeros to whole
    vectors of columns.
    """
    return _make_right_packer(dtype, WIDTH, in_pairs(dtype))


def make_right_packer_for_vectors(dtype: str, WIDTH: int) -> Callable:
    """Like `make_right_packer`, also for vectors of a processor that has a matrix unit."""
    return _make_right_packer(dtype, WIDTH, vector_product_dtype(dtype) == PAIRS)


def _make_right_packer(dtype: str, WIDTH: int, has_pairs: bool) -> Callable:
    if has_pairs:
        return _make_right_packer_of_pairs(WIDTH)
    LANES, copy_row = lanes_of(compute_dtype(dtype)), make_copy_row(compute_dtype(dtype))

    @njit
    def transpose_panel(target, source, column_stride, columns, count):
        for column in range(columns, round_up(columns, LANES)):
            for step in range(count):
                store(target, step * WIDTH + column, 0.0)
        whole = count // LANES * LANES
        for column in range(0, columns, LANES):
            place, line = shift(target, column), shift(source, column * column_stride)
            some = min(LANES, columns - column)
            first = whole if some == LANES else 0
            for step in range(0, first, LANES):
                transpose_square(
                    shift(place, step * WIDTH), WIDTH, shift(line, step), column_stride, LANES
                )
            for lane in range(some):
                for step in range(first, count):
                    store(place, step * WIDTH + lane, load(line, lane * column_stride + step))

    @njit
    def copy_panel(target, source, step_stride, columns, count):
        # The constant WIDTH for whole panels takes 0.9 of the time on a Zen 3, for the gradient of
        # an input of 256 rows and more.
        if columns == WIDTH:
            for step in range(count):
                place, line = shift(target, step * WIDTH), shift(source, step * step_stride)
                for column in range(0, WIDTH, LANES):
                    store(place, column, load_vector(line, column, LANES))
            return
        for step in range(count):
            place, line = shift(target, step * WIDTH), shift(source, step * step_stride)
            copy_row(place, line, 1, columns, round_up(columns, LANES))

    @njit
    def pack_right(target, distance, source, column_stride, step_stride, columns, count):
        for column in range(0, columns, WIDTH):
            place, some = shift(target, column // WIDTH * distance), min(WIDTH, columns - column)
            if step_stride == 1:
                panel = shift(source, column * column_stride)
                transpose_panel(place, panel, column_stride, some, count)
            else:
                copy_panel(place, shift(source, column), step_stride, some, count)

    return pack_right


@functools.cache
def make_share_prefetcher(dtype: str) -> Callable:
    """Make ``prefetch_share(source, row_stride, step_stride, rows, steps, share, shares)``.

    It prefetches one of ``shares`` equal parts of the rows, or columns, into L2.
    """
    LINE = 64 // ELEMENTS[dtype].size

    @njit
    def prefetch_share(source, row_stride, step_stride, rows, steps, share, shares):
        count, stride, length = rows, row_stride, steps
        if step_stride != 1:
            count, stride, length = steps, step_stride, rows
        for number in range(count * share // shares, count * (share + 1) // shares):
            line = shift(source, number * stride)
            for element in range(0, length, LINE):
                prefetch(line, element)

    return prefetch_share


def chunk_of_prefetches(SECTION: int, SIZE: int) -> int:
    """Return how many elements of ``SIZE`` bytes of a row are prefetched at a time, of a section.

    It is the number in two lines if prefetches are spread, else all of the section.
    """
    return min(2 * CACHE_LINE // SIZE, SECTION) if spreads_prefetches() else SECTION


def make_lines_ahead(CHUNK: int, SIZE: int) -> Callable:
    """Make ``lines_ahead(source, row_stride, step_stride, rows, steps, shares)``.

    It returns the lines of some rows, or columns, to be prefetched in equal shares, and each row in
    chunks of ``CHUNK`` elements, which have ``SIZE`` bytes: a pointer to bytes, the number of rows,
    that of a share, the distance of rows, the number of lines of a row in a chunk, the number of
    chunks, and their distance. If the rows are adjacent, each step counts as a row.
    """
    as_bytes = pointer_to("uint8")

    @njit
    def lines_ahead(source, row_stride, step_stride, rows, steps, shares):
        length, chunks = min(CHUNK, steps), (steps + CHUNK - 1) // CHUNK
        count, stride, width = rows, row_stride, length
        if step_stride != 1:
            count, stride, width = length, step_stride, rows
        lines = (width * SIZE + CACHE_LINE - 1) // CACHE_LINE
        return (
            as_bytes(address_of(source)), count, (count + shares - 1) // shares, stride * SIZE,
            lines, chunks, CHUNK * step_stride * SIZE,
        )  # fmt: skip

    return lines_ahead


@njit
def share_of_lines(ahead, share):
    """Return one of the equal shares of lines: the same numbers, except that of a share."""
    place, count, each, stride, lines, chunks, distance = ahead
    first = share * each
    rows = max(0, min(each, count - first))
    return shift(place, first * stride), rows, stride, lines, chunks, distance


@njit
def prefetch_chunk(ahead):
    """Prefetch the first chunk of a share of lines."""
    place, rows, stride, lines, chunks, _ = ahead
    for row in range(rows if chunks > 0 else 0):
        for line in range(lines):
            prefetch(place, row * stride + line * CACHE_LINE)


# ------------------------------------------------------------------------------ pairs of bfloat16

LANES_OF_PAIRS = functools.partial(lanes_of, "float32")


def _make_pair_mover() -> Callable:
    """Make ``move(target, index, source, stride, step, count)``: the pair of a step and the next.

    Steps from ``count`` on are zeros.
    """
    as_halves = pointer_to("uint16")

    @njit
    def move(target, index, source, stride, step, count):
        pairs, halves = as_halves(address_of(target)), as_halves(address_of(source))
        store(pairs, 2 * index, load(halves, step * stride) if step < count else 0)
        store(pairs, 2 * index + 1, load(halves, (step + 1) * stride) if step + 1 < count else 0)

    return move


def _make_left_packer_of_pairs(BAND: int, STEPS: int) -> Callable:
    """Make the left packer for pairs, in which the steps of a row are adjacent.

    For a matrix unit, a group of steps of all rows lies before the next group, padded with zeros to
    whole groups and tiles of rows.
    """
    LANES, move, as_pairs = LANES_OF_PAIRS(), _make_pair_mover(), pointer_to(PAIRS)
    on_unit = on_matrix_unit("bfloat16")
    ROWS, MULTIPLE = (TILE_MULTIPLE, GROUP) if on_unit else (1, 1)
    PAGE = PAGE_BYTES // ELEMENTS["bfloat16"].size

    @njit
    def pack_left(target, source, row_stride, step_stride, rows, count):
        is_whole = rows % ROWS == 0 and count % (2 * MULTIPLE) == 0 and row_stride % 2 == 0
        if is_whole and step_stride == 1 and row_stride % PAGE != 0:
            stride = row_stride // 2
            return as_pairs(address_of(source)), BAND * stride, stride, MULTIPLE
        pairs, steps = as_pairs(address_of(target)), round_up((count + 1) // 2, MULTIPLE)
        all_rows = round_up(rows, ROWS)
        stride, group_stride = (GROUP, all_rows * GROUP) if on_unit else (STEPS, GROUP)
        whole = count // 2 // LANES * LANES
        for row in range(0, rows, LANES):
            some = min(LANES, rows - row)
            first = whole if step_stride == 1 or some == LANES else 0
            for step in range(0, first, LANES):
                place = shift(pairs, row * stride + step // GROUP * group_stride + step % GROUP)
                if step_stride == 1:
                    for lane in range(some):
                        adjacent = as_pairs(address_of(shift(source, (row + lane) * row_stride)))
                        store(place, lane * stride, load_vector(adjacent, step, LANES))
                else:
                    steps_of_rows = shift(source, row + 2 * step * step_stride)
                    transpose_pairs(place, stride, steps_of_rows, step_stride, LANES)
            for lane in range(row, row + some):
                line = shift(source, lane * row_stride)
                for step in range(first, steps):
                    index = lane * stride + step // GROUP * group_stride + step % GROUP
                    move(pairs, index, line, step_stride, 2 * step, count)
        for row in range(rows, all_rows):
            for step in range(steps):
                store(pairs, row * stride + step // GROUP * group_stride + step % GROUP, 0)
        return pairs, BAND * stride, stride, group_stride if on_unit else 1

    return pack_left


def _make_step_interleaver() -> Callable:
    """Make ``interleave_steps(target, source, step_stride, elements, count)``.

    The target receives the pairs of two steps; the second step is zeros if ``count`` is 1.
    """
    LANES, move = LANES_OF_PAIRS(), _make_pair_mover()

    @njit
    def interleave_steps(target, source, step_stride, elements, count):
        whole = elements // (2 * LANES) * (2 * LANES) if count > 1 else 0
        for index in range(0, whole, 2 * LANES):
            first = shift(source, index)
            interleave(target, index, first, shift(first, step_stride), LANES)
        for index in range(whole, elements):
            move(target, index, shift(source, index), step_stride, 0, count)

    return interleave_steps


def _make_right_packer_of_pairs(WIDTH: int) -> Callable:
    LANES, move, as_pairs = LANES_OF_PAIRS(), _make_pair_mover(), pointer_to(PAIRS)
    interleave_steps = _make_step_interleaver()
    on_unit = on_matrix_unit("bfloat16")
    COLUMNS, STEPS = (GROUP, GROUP) if on_unit else (LANES, 1)

    @njit
    def fill_with_zeros(target, columns, steps):
        """Pad with zeros to whole vectors of columns and groups of steps."""
        for step in range(round_up(steps, STEPS)):
            for column in range(columns if step < steps else 0, round_up(columns, COLUMNS)):
                store(target, step * WIDTH + column, 0)

    @njit
    def transpose_panel(pairs, source, column_stride, columns, count):
        steps, whole = (count + 1) // 2, count // 2 // LANES * LANES
        for column in range(0, columns, LANES):
            place, line = shift(pairs, column), shift(source, column * column_stride)
            some = min(LANES, columns - column)
            first = whole if some == LANES else 0
            for step in range(0, first, LANES):
                transpose_adjacent(
                    shift(place, step * WIDTH), WIDTH, shift(line, 2 * step), column_stride, LANES
                )
            for lane in range(some):
                for step in range(first, steps):
                    move(
                        shift(place, lane), step * WIDTH, shift(line, lane * column_stride), 1,
                        2 * step, count,
                    )  # fmt: skip

    @njit
    def pack_right(target, distance, source, column_stride, step_stride, columns, count):
        pairs = as_pairs(address_of(target))
        for column in range(0, columns, WIDTH):
            panel, some = shift(pairs, column // WIDTH * distance), min(WIDTH, columns - column)
            fill_with_zeros(panel, some, (count + 1) // 2)
            if step_stride == 1:
                first = shift(source, column * column_stride)
                transpose_panel(panel, first, column_stride, some, count)
        if step_stride == 1:
            return
        for step in range(0, count, 2):
            line, place = shift(source, step * step_stride), shift(pairs, step // 2 * WIDTH)
            for column in range(0, columns, WIDTH):
                interleave_steps(
                    shift(place, column // WIDTH * distance), shift(line, column), step_stride,
                    min(WIDTH, columns - column), count - step,
                )  # fmt: skip

    return pack_right
