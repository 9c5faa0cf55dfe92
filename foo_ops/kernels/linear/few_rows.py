"""Compute a block of a product of few rows: all of them, with some of the columns.

The right matrix, whose steps are adjacent, is read once, as it lies in memory: vectors lie along
the steps, and a sum's lanes are added up at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.linear.output import make_writer
from foo_ops.kernels.linear.parameters import argument_types
from foo_ops.kernels.products.operands import step_of, vector_product_dtype
from foo_ops.kernels.vectors.elements import compute_dtype, lanes_of
from foo_ops.kernels.vectors.memory import address_of, pointer_to, prefetch, shift
from foo_ops.kernels.vectors.pairs import PAIRS
from foo_ops.kernels.vectors.register_tiles import tile_dot, tile_store_sums, tile_zero
from foo_ops.kernels.vectors.rows import make_copy_row, round_up
from foo_ops.kernels.vectors.scratch import Scratch, make_kernel_with_scratch

# Columns that are read at a time for one row.
COLUMNS_OF_ROW = 8
# Rows that are multiplied at a time.
MOST_OF_GROUP = 4


def make_few_rows_kernel(dtype: str) -> Kernel:
    """Make the kernel that `foo_ops.kernels.linear.product.make_product_kernel` makes, for few
    rows.
    """
    compute, in_products = compute_dtype(dtype), vector_product_dtype(dtype)
    LANES, STEP = lanes_of(compute), step_of(in_products)
    VECTOR = LANES * STEP
    in_pairs = in_products == PAIRS
    # Numbers that products do not take as they are stored are converted where they are loaded.
    left_dtype = dtype if in_pairs else compute
    as_left, as_left_products = pointer_to(left_dtype), pointer_to(in_products)
    as_stored, as_right_products = pointer_to(dtype), pointer_to(PAIRS if in_pairs else dtype)
    copy_row, write = make_copy_row(compute), make_writer(dtype)
    # As many sums as a vector has lanes, which is what adding them up takes.
    GROUP = min(MOST_OF_GROUP, LANES)
    COLUMNS_OF_GROUP = LANES // GROUP

    @njit
    def sizes_of_block(product, block):
        columns = round_up(block.column_stop - block.column_start, LANES)
        rows = round_up(block.row_stop - block.row_start, GROUP)
        return rows, columns, round_up(product.depth, VECTOR)

    def describe(rows: Any, columns: Any, depth: Any) -> dict[str, Any]:
        return {
            "left": rows * depth,
            "edges": VECTOR * LANES,
            "sums": rows * columns,
            "bias": columns,
        }

    def make_tile(ROWS: int, COLUMNS: int) -> Callable:
        """Make ``tiles``, which returns the column behind the last that is a part of a tile."""

        @njit
        def tile(product, memory, sums, width, left, depth, right):
            stride = product.right_column_stride
            vectors, steps = as_right_products(address_of(right)), stride // STEP
            rows = as_left_products(address_of(left))
            whole = product.depth // VECTOR * LANES
            total = tile_zero(sums, ROWS, COLUMNS, LANES)
            for step in range(0, whole, LANES):
                for column in range(COLUMNS, 2 * COLUMNS):
                    prefetch(vectors, column * steps + step)
                total = tile_dot(
                    total, shift(rows, step), depth // STEP, shift(vectors, step), steps
                )
            if whole * STEP < product.depth:
                edges = as_stored(address_of(memory.edges))
                for column in range(COLUMNS):
                    line = shift(right, column * stride + whole * STEP)
                    count = product.depth - whole * STEP
                    copy_row(shift(edges, column * VECTOR), line, 1, count, VECTOR)
                total = tile_dot(
                    total, shift(rows, whole), depth // STEP,
                    as_right_products(address_of(edges)), LANES,
                )  # fmt: skip
            tile_store_sums(total, sums, width)

        @njit
        def tiles(product, memory, sums, width, left, depth, right, start, columns):
            column = start
            while column + COLUMNS <= columns:
                place = shift(right, column * product.right_column_stride)
                tile(product, memory, shift(sums, column), width, left, depth, place)
                column += COLUMNS
            return column

        return tiles

    row_tiles, row_tile = make_tile(1, min(COLUMNS_OF_ROW, LANES)), make_tile(1, 1)
    group_tiles, group_tile = make_tile(GROUP, COLUMNS_OF_GROUP), make_tile(GROUP, 1)

    def compute_block(product, block, memory):
        rows, width, depth = sizes_of_block(product, block)
        count, columns = block.row_stop - block.row_start, block.column_stop - block.column_start
        left, right = (
            as_left(address_of(memory.left)),
            shift(product.right, block.column_start * product.right_column_stride),
        )
        for row in range(rows):
            # Rows that fill up a group are copies of the last one.
            place = (block.row_start + min(row, count - 1)) * product.left_row_stride
            copy_row(
                shift(left, row * depth), shift(product.left, place), product.left_step_stride,
                product.depth, depth,
            )  # fmt: skip
        if count == 1:
            column = row_tiles(product, memory, memory.sums, width, left, depth, right, 0, columns)
            row_tile(product, memory, memory.sums, width, left, depth, right, column, columns)
        else:
            for row in range(0, rows, GROUP):
                some, sums = shift(left, row * depth), shift(memory.sums, row * width)
                column = group_tiles(product, memory, sums, width, some, depth, right, 0, columns)
                group_tile(product, memory, sums, width, some, depth, right, column, columns)
        write(product, block, memory, width, 0)

    layout = Scratch(compute, sizes_of_block, describe)
    return make_kernel_with_scratch(compute_block, layout, argument_types(dtype))
