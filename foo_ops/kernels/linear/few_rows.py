"""Compute a block of a product of few rows: all rows, and some of the columns.

The right matrix, whose steps are adjacent, is read once, as it lies in memory: vectors lie along
the steps, and a sum's lanes are added up at the end.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from numba import njit

from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.compiler.processor import (
    bytes_ahead,
    fetches_streams_to_first,
    fetches_to_first,
    reads_one_stream,
    vector_registers,
)
from foo_ops.kernels.lang.scratch import Scratch, larger, make_kernel_with_scratch
from foo_ops.kernels.linear.packing import make_left_packer, make_right_packer, on_matrix_unit
from foo_ops.kernels.linear.product import (
    NOTHING,
    argument_types,
    describe_lines,
    leave_sums,
    make_writer,
    parts_of,
)
from foo_ops.kernels.products.on_amx import GROUP, TILE_MULTIPLE, make_amx_products
from foo_ops.kernels.products.on_vectors import make_matmul
from foo_ops.kernels.products.operands import step_of, vector_product_dtype
from foo_ops.kernels.simd.memory import (
    address_of,
    load,
    pointer_to,
    prefetch_vectors,
    prefetch_vectors_in_stream,
    shift,
    store,
)
from foo_ops.kernels.simd.narrow import PAIRS
from foo_ops.kernels.simd.register_tiles import (
    tile_dot,
    tile_dot_along,
    tile_store_sums,
    tile_sum_columns,
    tile_zero,
)
from foo_ops.kernels.simd.transpose import (
    make_copy_row,
    make_fill,
    round_up,
    transpose_square,
)
from foo_ops.kernels.simd.types import ELEMENTS, compute_dtype, lanes_of

# Columns read at a time for one row, in the order of memory, while the next ones are prefetched
# into L1 or L2 (`fetches_streams_to_first`); or one, see `make_is_stream`. Processors with a large
# L1 need prefetching only if numbers are converted; otherwise their own prefetchers look far enough
# ahead. GB/s of weights that one thread reads for a row, of 36 on a Zen 5, 21 on a Zen 3 and 25 on
# a Zen 4:
#
#                        Zen 5                 Zen 3                      Zen 4
#                        float bfloat float    float bfloat float int8    float bfloat float int8
#                           32     16    16       32     16    16            32     16    16
#     4, to L1              32     32    29       16     15    14   14              18    15   13
#     4, to L2                                                               21     22    19   23
#     4, not                35     34    23       20     17    15   11       20     18    15   13
#     8, to L1              31     32    28
#     8, to L2                                                               20     21    19   23
#     8, not                                                                 21     21    21   16
COLUMNS_OF_ROW = 4
# Sums of a single column, so that none waits for the one before it: a line of memory is two vectors
# of bfloat16, and four of int8, that are added one after the other.
SUMS_OF_COLUMN = 4
# Fewest bytes of weights that hardly come from a cache: see `make_is_stream`.
LEAST_OF_STREAM = 2 << 20
# Rows multiplied at a time; two rows are a group of their own. One by one, they took a Zen 4 1.38
# (int8), 1.23 (int4 with rows of 8 bits) and 1.15 times as long (int4), for weights of 4096 x 4096.
MOST_OF_GROUP, PAIR = 4, 2


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Register tiles of few rows, which read the right matrix as it is stored.

    Attributes:
        left: the dtype of the copied rows of the left matrix.
        row_size: ``row_size(depth)``: the number of elements of a copied row.
        copy_row: ``copy_row(target, source, stride, depth, row_size)`` copies a row.
        arguments: the types of the kernel's arguments.
        make_tile: ``make_tile(ROWS, COLUMNS)`` makes ``tile(product, right, memory, sums, width,
            left, depth, column)``, which stores the sums of adjacent columns of ``right``.
        columns_of_row: the number of columns multiplied by one row, or two, at a time.
        columns_of_group: the number of columns multiplied by several rows at a time.
        make_stream_tile: ``make_stream_tile(ROWS)``: a tile of one column, for a stream of them
            (`make_is_stream`), or None if columns are always read side by side.
        regions: ``regions(depth)`` describes the scratch memory of a tile.
        scale_sums: ``scale_sums(product, block, memory, width, panel)`` runs before the sums are
            written.
    """

    left: str
    row_size: Callable[[Any], Any]
    copy_row: Callable
    arguments: tuple[Any, ...]
    make_tile: Callable[[int, int], Callable]
    columns_of_row: int
    columns_of_group: int
    make_stream_tile: Callable[[int], Callable] | None
    regions: Callable[[Any], dict[str, Any]]
    scale_sums: Callable


@functools.cache
def make_tiles_ahead() -> Callable:
    """Make ``tiles_ahead(tile_bytes)``: how many tiles ahead to prefetch.

    With short columns it is several: one tile is read faster than memory answers.
    """
    BYTES_AHEAD = bytes_ahead()

    @njit
    def tiles_ahead(tile_bytes):
        return max(1, BYTES_AHEAD // max(1, tile_bytes))

    return tiles_ahead


def fetching_of(ROWS: int, COLUMNS: int) -> Callable:
    """Return the function that prefetches a tile's vectors: into L1, or as those of a stream.

    Where columns from memory are read one by one, columns side by side are in L2: one thread of a
    Granite Rapids takes 0.75 of the time for weights of 0.5 MB and 8 bits that it fetches to L1.
    """
    is_cached = reads_one_stream() and ROWS <= PAIR and COLUMNS > 1
    return prefetch_vectors if is_cached else prefetch_vectors_in_stream


def make_stored_tiles(dtype: str) -> Tiles:
    """Make the tiles of a right matrix that has the left matrix's dtype."""
    in_products = vector_product_dtype(dtype)
    # Numbers that products do not take as stored are converted when loaded.
    left, loaded = (dtype, PAIRS) if in_products == PAIRS else (compute_dtype(dtype), dtype)
    return make_element_tiles(left, dtype, loaded, argument_types(dtype), leave_sums)


def make_element_tiles(
    left: str, stored: str, loaded: str, arguments: tuple[Any, ...], scale_sums: Callable
) -> Tiles:
    """Make the tiles of a right matrix of dtype ``stored``, loaded as dtype ``loaded``."""
    compute, STEP = compute_dtype(left), step_of(loaded)
    LANES = lanes_of(compute)
    VECTOR, SIZE = LANES * STEP, ELEMENTS[stored].size
    CONVERTS = loaded not in (left, PAIRS)
    # See `COLUMNS_OF_ROW`.
    FETCHES = CONVERTS or not fetches_to_first()
    as_left_products = pointer_to(PAIRS if loaded == PAIRS else left)
    as_stored, as_right_products = pointer_to(stored), pointer_to(loaded)
    copy_row, tiles_ahead = make_copy_row(compute), make_tiles_ahead()

    def begin_with_zeros(ROWS: int, COLUMNS: int) -> Callable:
        @njit
        def begin(sums, rows, distance, vectors, whole, ahead):
            return tile_zero(sums, ROWS, COLUMNS, LANES), 0

        return begin

    def begin_stream(ROWS: int, COLUMNS: int) -> Callable:
        SUMS, RUN = SUMS_OF_COLUMN, SUMS_OF_COLUMN * LANES

        @njit
        def begin(sums, rows, distance, vectors, whole, ahead):
            total, stop = tile_zero(sums, ROWS, SUMS, LANES), whole // RUN * RUN
            for step in range(0, stop, RUN):
                prefetch_vectors_in_stream(vectors, ahead + step, LANES, SUMS)
                total = tile_dot_along(total, shift(rows, step), distance, shift(vectors, step))
            return tile_sum_columns(total), stop

        return begin

    def make_tile(ROWS: int, COLUMNS: int, make_begin: Callable = begin_with_zeros) -> Callable:
        """Make a tile; ``begin(...)`` returns its first sums, and the next step."""
        begin, fetch = make_begin(ROWS, COLUMNS), fetching_of(ROWS, COLUMNS)

        @njit
        def tile(product, right, memory, sums, width, left, depth, column):
            stride = product.right_column_stride
            right = shift(right, column * stride)
            vectors, steps = as_right_products(address_of(right)), stride // STEP
            rows = as_left_products(address_of(left))
            whole = product.depth // VECTOR * LANES
            ahead, distance = steps * tiles_ahead(COLUMNS * stride * SIZE), depth // STEP
            total, first = begin(sums, rows, distance, vectors, whole, ahead)
            for step in range(first, whole, LANES):
                if FETCHES:
                    fetch(vectors, COLUMNS * (ahead + step), LANES, COLUMNS)
                total = tile_dot(
                    total, shift(rows, step), distance, shift(vectors, step), steps, None
                )
            if whole * STEP < product.depth:
                edges = as_stored(address_of(memory.edges))
                for other in range(COLUMNS):
                    line = shift(right, other * stride + whole * STEP)
                    count = product.depth - whole * STEP
                    copy_row(shift(edges, other * VECTOR), line, 1, count, VECTOR)
                total = tile_dot(
                    total, shift(rows, whole), distance,
                    as_right_products(address_of(edges)), LANES, None)  # fmt: skip
            tile_store_sums(total, sums, width)

        return tile

    def make_stream_tile(ROWS: int) -> Callable:
        return make_tile(ROWS, 1, begin_stream)

    def regions(depth: Any) -> dict[str, Any]:
        return {"edges": VECTOR * LANES}

    @njit
    def row_size(depth):
        return round_up(depth, VECTOR)

    return Tiles(
        left, row_size, copy_row, arguments, make_tile, columns_of_row(CONVERTS),
        columns_of_group(LANES, CONVERTS), make_stream_tile if CONVERTS else None,
        regions, scale_sums,
    )  # fmt: skip


def columns_of_row(converts: bool) -> int:
    """Return the number of columns read at a time for one row, or two: see `make_is_stream`.

    If numbers are converted and prefetched into L2, 8 columns are faster than 4 on a Zen 4: for
    float16 from memory, measured in turns, one thread reads 1.13 times and two threads 1.06 times
    as fast; int8 as fast.
    """
    is_twice = converts and not fetches_to_first() and vector_registers() == 32
    return 2 * COLUMNS_OF_ROW if is_twice else COLUMNS_OF_ROW


def columns_of_sums(lanes: int) -> int:
    """Return the number of columns whose sums, for a group, fill the vector that adds them up."""
    return lanes // min(MOST_OF_GROUP, lanes)


def columns_of_group(lanes: int, converts: bool) -> int:
    """Return the number of columns whose sums, for a group, fill the registers.

    The rows, which may exceed L1, are read once for these columns. Weights that a thread reads for
    4 rows of 4096, in GB/s:

                              Zen 3 (16 registers)    Zen 4 (32)
        sums                  float32    float64      float32    bfloat16    float16
        fill a vector            12.6       10.4           16          16         22
        of 3 columns             15.1       16.2
        of 6 columns                                       18          17         22

    If numbers are converted, the Zen 3 reads no faster with 3 columns, and with 6 the prefetched
    columns may not fit L1.
    """
    if vector_registers() == 16:
        return columns_of_sums(lanes) if converts else min(3, lanes)
    return columns_of_sums(lanes) if converts and fetches_streams_to_first() else min(6, lanes)


def make_is_stream(arguments: tuple[Any, ...]) -> Callable:
    """Make ``is_stream(product)``: whether columns are read one by one, for one row, or two.

    They are, where `reads_one_stream`, if the weights are too large for a cache and numbers are
    converted. In L2, weights of 1 MB take a thread of a Granite Rapids 1.2 to 1.9 times as long in
    this way, more if columns are short. From memory it reads float32, which is not converted, at
    15.9 GB/s with 4 columns, and at 14.6 one by one.
    """
    SIZE = ELEMENTS[arguments[0].fields["right"].dtype].size

    @njit
    def is_stream(product):
        # Columns may lie far apart.
        elements = product.columns * min(product.right_column_stride, product.depth)
        return elements * SIZE >= LEAST_OF_STREAM

    return is_stream


def make_few_rows_kernel(
    dtype: str, make_tiles: Callable[[str], Tiles] = make_stored_tiles, *, finish: str = NOTHING
) -> Kernel:
    """Make the kernel of a product of few rows.

    It computes the same as `foo_ops.kernels.linear.product.make_product_kernel`. The weights of a
    gate must be the right matrices.
    """
    compute, tiles = compute_dtype(dtype), make_tiles(dtype)
    LANES, row_size = lanes_of(compute), tiles.row_size
    as_left, copy_row = pointer_to(tiles.left), tiles.copy_row
    write, PARTS = make_writer(dtype, finish), parts_of(finish)
    scale_sums, is_stream = tiles.scale_sums, make_is_stream(tiles.arguments)
    GROUP, COLUMNS_OF_GROUP = min(MOST_OF_GROUP, LANES), tiles.columns_of_group

    @njit
    def sizes_of_block(product, block):
        columns = round_up(block.column_stop - block.column_start, LANES)
        count = block.row_stop - block.row_start
        rows = count if count <= PAIR else round_up(count, GROUP)
        return rows, columns, row_size(product.depth)

    def describe(rows: Any, columns: Any, depth: Any) -> dict[str, Any]:
        return {
            "left": rows * depth,
            **tiles.regions(depth),
            "sums": PARTS * rows * columns,
            "bias": larger(rows, columns) + LANES,
            **describe_lines(compute, finish),
        }

    def make_row_of_tiles(ROWS: int, COLUMNS: int, tile: Callable) -> Callable:
        """Make the loop over whole tiles of columns, which returns the first column left over."""

        @njit
        def row_of_tiles(product, block, right, memory, sums, rows, width, left, depth, start):
            count = (block.column_stop - block.column_start - start) // COLUMNS
            stop = start + count * COLUMNS
            for column in range(start, stop, COLUMNS):
                # All rows, while the columns are in the caches.
                for row in range(0, rows, ROWS):
                    tile(
                        product, right, memory, shift(sums, row * width + column), width,
                        shift(left, row * depth), depth, block.column_start + column,
                    )  # fmt: skip
            return stop

        return row_of_tiles

    def make_multiply_rows(ROWS: int, COLUMNS: int) -> Callable:
        """Make the loop over all columns."""
        several, single = (
            make_row_of_tiles(ROWS, count, tiles.make_tile(ROWS, count)) for count in (COLUMNS, 1)
        )

        @njit
        def multiply_rows(product, block, right, memory, sums, rows, width, left, depth):
            column = several(product, block, right, memory, sums, rows, width, left, depth, 0)
            single(product, block, right, memory, sums, rows, width, left, depth, column)

        return multiply_rows

    def make_multiply_few(ROWS: int) -> Callable:
        side_by_side = make_multiply_rows(ROWS, min(tiles.columns_of_row, LANES))
        if tiles.make_stream_tile is None or not reads_one_stream():
            return side_by_side
        one_by_one = make_row_of_tiles(ROWS, 1, tiles.make_stream_tile(ROWS))

        @njit
        def multiply_few(product, block, right, memory, sums, rows, width, left, depth):
            if is_stream(product):
                one_by_one(product, block, right, memory, sums, rows, width, left, depth, 0)
            else:
                side_by_side(product, block, right, memory, sums, rows, width, left, depth)

        return multiply_few

    multiply_row, multiply_pair = make_multiply_few(1), make_multiply_few(PAIR)
    multiply_group = make_multiply_rows(GROUP, COLUMNS_OF_GROUP)

    @njit
    def multiply(product, block, right, memory, sums):
        rows, width, depth = sizes_of_block(product, block)
        left = as_left(address_of(memory.left))
        if rows == 1:
            multiply_row(product, block, right, memory, sums, rows, width, left, depth)
        elif rows == PAIR:
            multiply_pair(product, block, right, memory, sums, rows, width, left, depth)
        else:
            multiply_group(product, block, right, memory, sums, rows, width, left, depth)

    def compute_block(product, block, memory):
        rows, width, depth = sizes_of_block(product, block)
        last, left = block.row_stop - block.row_start - 1, as_left(address_of(memory.left))
        for row in range(rows):
            # A group is filled up with copies of the last row.
            place = (block.row_start + min(row, last)) * product.left_row_stride
            copy_row(
                shift(left, row * depth), shift(product.left, place), product.left_step_stride,
                product.depth, depth,
            )  # fmt: skip
        multiply(product, block, product.right, memory, memory.sums)
        if PARTS == 2:
            multiply(product, block, product.second, memory, shift(memory.sums, rows * width))
        scale_sums(product, block, memory, width, 0)
        write(product, block, memory, memory.sums, width, 0, (PARTS - 1) * rows * width)

    layout = Scratch(compute, sizes_of_block, describe)
    return make_kernel_with_scratch(compute_block, layout, tiles.arguments)


def make_few_rows_on_unit_kernel(dtype: str, *, finish: str = NOTHING) -> Kernel:
    """Make the kernel of a product of up to 16 rows for a matrix unit, or on vectors without one.

    Registers hold columns as they lie in memory, and all steps of 16 rows, which are packed. So a
    register of sums has columns as its rows, and is transposed.
    """
    if not on_matrix_unit(dtype):
        return make_few_rows_kernel(dtype, finish=finish)
    compute, DEPTH = compute_dtype(dtype), TILE_MULTIPLE
    LANES, PARTS = lanes_of(compute), parts_of(finish)
    write, as_pairs = make_writer(dtype, finish), pointer_to(PAIRS)
    pack_rows, fill = make_right_packer(dtype, GROUP), make_fill(compute)
    pack_columns = make_left_packer(dtype, TILE_MULTIPLE, 0)
    on_tiles, begin_products, end_products = make_amx_products(1)

    @njit
    def sizes_of_block(product, block):
        rows = round_up(block.row_stop - block.row_start, GROUP)
        columns = round_up(block.column_stop - block.column_start, TILE_MULTIPLE)
        return rows, columns, round_up(product.depth, DEPTH) // 2

    def describe(rows: Any, columns: Any, steps: Any) -> dict[str, Any]:
        return {
            "rows": rows * steps,
            # Columns or steps that fill no registers.
            "edges": TILE_MULTIPLE * steps,
            "tile": TILE_MULTIPLE * rows,
            "sums": PARTS * rows * columns,
            "bias": larger(rows, columns) + LANES,
            **describe_lines(compute, finish),
        }

    @njit
    def columns_of(product, memory, right, count):
        """Return the left matrix that has these columns as its rows."""
        stride = product.right_column_stride
        if count % GROUP == 0 and product.depth % DEPTH == 0:
            return as_pairs(address_of(right)), stride // 2, GROUP, 0
        pairs, _, row_stride, group_stride = pack_columns(
            memory.edges, right, stride, 1, count, product.depth
        )
        return pairs, row_stride, group_stride, 0

    @njit
    def multiply(product, block, memory, right, sums):
        rows, width, steps = sizes_of_block(product, block)
        if product.depth == 0:
            fill(sums, rows * width, 0.0)
            return
        packed = as_pairs(address_of(memory.rows))
        for column in range(block.column_start, block.column_stop, TILE_MULTIPLE):
            count = min(TILE_MULTIPLE, block.column_stop - column)
            place = shift(right, column * product.right_column_stride)
            on_tiles(
                memory.tile, rows, columns_of(product, memory, place, count), (packed, rows, 0),
                round_up(count, GROUP), rows, steps, False, True,
            )  # fmt: skip
            for row in range(0, rows, LANES):
                for lane in range(0, round_up(count, GROUP), LANES):
                    target = shift(sums, row * width + column - block.column_start + lane)
                    transpose_square(
                        target, width, shift(memory.tile, lane * rows + row), rows, LANES
                    )

    def compute_block(product, block, memory):
        rows, width, _ = sizes_of_block(product, block)
        count = block.row_stop - block.row_start
        source = shift(product.left, block.row_start * product.left_row_stride)
        pack_rows(
            memory.rows, 0, source, product.left_row_stride, product.left_step_stride, count,
            product.depth,
        )  # fmt: skip
        begin_products()
        multiply(product, block, memory, product.right, memory.sums)
        if PARTS == 2:
            multiply(product, block, memory, product.second, shift(memory.sums, rows * width))
        end_products()
        write(product, block, memory, memory.sums, width, 0, (PARTS - 1) * rows * width)

    layout = Scratch(compute, sizes_of_block, describe)
    return make_kernel_with_scratch(compute_block, layout, argument_types(dtype))


# Steps whose rows of the right matrix are read side by side, each as one stretch of memory.
STEPS_SIDE_BY_SIDE = 8


def make_adjacent_columns_kernel(dtype: str) -> Kernel:
    """Make the kernel of a product of few rows whose right matrix has adjacent columns.

    It computes the same as `make_few_rows_kernel`, for matrices that lie as those of gpt-oss do.
    Their rows are read once, as they lie in memory, and added to sums in L1.
    """
    compute = compute_dtype(dtype)
    LANES, number = lanes_of(compute), ELEMENTS[compute].compute
    matmul, fill = make_matmul(compute, compute, dtype), make_fill(compute)
    copy_row, write = make_copy_row(compute), make_writer(dtype)

    @njit
    def sizes_of_block(product, block):
        rows = block.row_stop - block.row_start
        columns = round_up(block.column_stop - block.column_start, LANES)
        return rows, columns, product.depth

    def describe(rows: Any, columns: Any, depth: Any) -> dict[str, Any]:
        return {
            "left": rows * depth,
            "sums": rows * columns,
            "bias": larger(rows, columns) + LANES,
            **describe_lines(compute, NOTHING),
        }

    @njit
    def multiply_column(product, memory, right, rows, width, depth, column):
        """Multiply by a column that is part of no whole vector."""
        for row in range(rows):
            total, line = number(0.0), shift(memory.left, row * depth)
            for step in range(depth):
                total += load(line, step) * load(right, step * product.right_step_stride + column)
            store(memory.sums, row * width + column, total)

    def compute_block(product, block, memory):
        rows, width, depth = sizes_of_block(product, block)
        columns = block.column_stop - block.column_start
        whole = columns // LANES * LANES
        for row in range(rows):
            place = (block.row_start + row) * product.left_row_stride
            copy_row(
                shift(memory.left, row * depth), shift(product.left, place),
                product.left_step_stride, depth, depth,
            )  # fmt: skip
        fill(memory.sums, rows * width, 0.0)
        right, stride = shift(product.right, block.column_start), product.right_step_stride
        for step in range(0, depth, STEPS_SIDE_BY_SIDE):
            matmul(
                memory.sums, width, shift(memory.left, step), depth, 1,
                shift(right, step * stride), stride, rows, whole,
                min(STEPS_SIDE_BY_SIDE, depth - step), True,
            )  # fmt: skip
        for column in range(whole, columns):
            multiply_column(product, memory, right, rows, width, depth, column)
        write(product, block, memory, memory.sums, width, 0, 0)

    layout = Scratch(compute, sizes_of_block, describe)
    return make_kernel_with_scratch(compute_block, layout, argument_types(dtype))
