"""Compute a block of a product, of any number of rows."""

from __future__ import annotations

from typing import Any

from numba import njit

from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.linear.output import make_writer
from foo_ops.kernels.linear.packing import (
    in_pairs,
    make_left_packer,
    make_right_packer,
    make_share_prefetcher,
    on_matrix_unit,
)
from foo_ops.kernels.linear.parameters import argument_types
from foo_ops.kernels.products.on_amx import GROUP, TILE_MULTIPLE, make_amx_products
from foo_ops.kernels.products.on_vectors import shapes
from foo_ops.kernels.products.operands import make_vector_products, step_of
from foo_ops.kernels.vectors.elements import ELEMENTS, compute_dtype, lanes_of
from foo_ops.kernels.vectors.memory import address_of, pointer_to, shift
from foo_ops.kernels.vectors.pairs import PAIRS
from foo_ops.kernels.vectors.rows import make_fill, round_up
from foo_ops.kernels.vectors.scratch import Scratch, make_kernel_with_scratch

# Of a row of the left matrix, and of a vector of a panel: both lie in the second cache.
SECTION_BYTES = 1024
# Rows that are multiplied between two shares of prefetching: whole tiles of all shapes.
BAND = 32


def make_product_kernel(dtype: str) -> Kernel:
    """Make the kernel for output[row, column] = bias[column] + sum over step of left[row, step] *
    right[column, step].
    """
    compute, on_unit = compute_dtype(dtype), on_matrix_unit(dtype)
    in_products = PAIRS if in_pairs(dtype) else compute
    LANES, STEP = lanes_of(compute), step_of(in_products)
    WIDTH = 2 * TILE_MULTIPLE if on_unit else shapes()[0][1] * LANES
    STEPS = SECTION_BYTES // ELEMENTS[in_products].size
    SECTION = STEPS * STEP
    # What a product takes rows, columns and steps in multiples of.
    ROW_MULTIPLE, MULTIPLE, STEP_MULTIPLE = (
        (TILE_MULTIPLE, GROUP, GROUP) if on_unit else (1, LANES, 1)
    )
    products = make_amx_products(1) if on_unit else make_vector_products(dtype)
    matmul, begin_products, end_products = products
    pack_left, pack_right = make_left_packer(dtype), make_right_packer(dtype, WIDTH)
    prefetch_share = make_share_prefetcher(dtype)
    fill, write = make_fill(compute), make_writer(dtype)
    as_matrix = pointer_to(in_products)

    @njit
    def panel_of(product, block, start, column):
        place = (block.column_start + column) * product.right_column_stride
        return shift(product.right, place + start * product.right_step_stride)

    @njit
    def rows_of(product, block, start):
        place = block.row_start * product.left_row_stride
        return shift(product.left, place + start * product.left_step_stride)

    @njit
    def sizes_of_block(product, block):
        rows = round_up(block.row_stop - block.row_start, ROW_MULTIPLE)
        return rows, round_up(block.column_stop - block.column_start, WIDTH)

    def describe(rows: Any, columns: Any) -> dict[str, Any]:
        return {
            "left": rows * STEPS,
            "right": WIDTH * STEPS,
            "sums": rows * columns,
            "bias": columns,
        }

    @njit
    def prefetch_next(product, block, start, column, share, shares):
        """Begin to bring a share of what is packed next to the second cache."""
        rows, columns = block.row_stop - block.row_start, block.column_stop - block.column_start
        next_start, next_column = start, column + WIDTH
        if next_column >= columns:
            next_start, next_column = start + SECTION, 0
        count = min(SECTION, product.depth - next_start)
        if count <= 0:
            return
        prefetch_share(
            panel_of(product, block, next_start, next_column),
            product.right_column_stride, product.right_step_stride,
            min(WIDTH, columns - next_column), count, share, shares,
        )  # fmt: skip
        if next_start > start:
            prefetch_share(
                rows_of(product, block, next_start), product.left_row_stride,
                product.left_step_stride, rows, count, share, shares,
            )  # fmt: skip

    @njit
    def multiply(product, block, memory, left, start, column, steps):
        """Multiply bands of rows by a packed panel. Meanwhile the next one comes to the cache."""
        rows, _ = sizes_of_block(product, block)
        columns = min(WIDTH, block.column_stop - block.column_start - column)
        factors, row_stride, step_stride, limb_stride = left
        bands = (rows + BAND - 1) // BAND
        for band in range(bands):
            prefetch_next(product, block, start, column, band, bands)
            row = band * BAND
            matmul(
                shift(memory.sums, column * rows + row * WIDTH), WIDTH,
                (shift(factors, row * row_stride), row_stride, step_stride, limb_stride),
                (as_matrix(address_of(memory.right)), WIDTH, 0),
                min(BAND, rows - row), round_up(columns, MULTIPLE), steps, start > 0, True,
            )  # fmt: skip

    def compute_block(product, block, memory):
        all_rows, width = sizes_of_block(product, block)
        rows, columns = block.row_stop - block.row_start, block.column_stop - block.column_start
        if product.depth == 0:
            fill(memory.sums, all_rows * width, 0.0)
        begin_products()
        for start in range(0, product.depth, SECTION):
            count = min(SECTION, product.depth - start)
            steps = round_up((count + STEP - 1) // STEP, STEP_MULTIPLE)
            left = pack_left(
                memory.left, rows_of(product, block, start), product.left_row_stride,
                product.left_step_stride, rows, count,
            )  # fmt: skip
            for column in range(0, columns, WIDTH):
                pack_right(
                    memory.right, panel_of(product, block, start, column),
                    product.right_column_stride, product.right_step_stride,
                    min(WIDTH, columns - column), count,
                )  # fmt: skip
                multiply(product, block, memory, left, start, column, steps)
        end_products()
        write(product, block, memory, WIDTH, all_rows * WIDTH)

    layout = Scratch(compute, sizes_of_block, describe)
    return make_kernel_with_scratch(compute_block, layout, argument_types(dtype))
