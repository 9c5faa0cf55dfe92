"""Compute a block of a product, of any number of rows."""

from __future__ import annotations

from typing import Any

from numba import njit

from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.linear.output import make_writer
from foo_ops.kernels.linear.packing import (
    make_left_packer,
    make_right_packer,
    make_share_prefetcher,
)
from foo_ops.kernels.linear.parameters import argument_types
from foo_ops.kernels.products.on_vectors import make_matmul, shapes
from foo_ops.kernels.products.operands import step_of, vector_product_dtype
from foo_ops.kernels.vectors.elements import ELEMENTS, compute_dtype, lanes_of
from foo_ops.kernels.vectors.memory import address_of, pointer_to, shift
from foo_ops.kernels.vectors.rows import make_fill, round_up
from foo_ops.kernels.vectors.scratch import Scratch, make_kernel_with_scratch

SECTION_BYTES = 1024


def make_product_kernel(dtype: str) -> Kernel:
    """Make the kernel for output[row, column] = bias[column] + sum over step of left[row, step] *
    right[column, step].
    """
    compute, in_products = compute_dtype(dtype), vector_product_dtype(dtype)
    LANES = lanes_of(compute)
    ROWS, vectors = shapes()[0]
    WIDTH = vectors * LANES
    STEPS = SECTION_BYTES // ELEMENTS[in_products].size
    SECTION = STEPS * step_of(in_products)
    STEP = step_of(in_products)
    matmul = make_matmul(compute, in_products, in_products)
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
        return block.row_stop - block.row_start, round_up(
            block.column_stop - block.column_start, WIDTH
        )

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
        rows, width = sizes_of_block(product, block)
        columns = min(WIDTH, block.column_stop - block.column_start - column)
        factors, row_stride, step_stride = left
        bands = (rows + ROWS - 1) // ROWS
        for band in range(bands):
            prefetch_next(product, block, start, column, band, bands)
            row = band * ROWS
            matmul(
                shift(memory.sums, row * width + column), width,
                shift(factors, row * row_stride), row_stride, step_stride,
                as_matrix(address_of(memory.right)), WIDTH, min(ROWS, rows - row),
                round_up(columns, LANES), steps, start > 0,
            )  # fmt: skip

    def compute_block(product, block, memory):
        rows, width = sizes_of_block(product, block)
        columns = block.column_stop - block.column_start
        if product.depth == 0:
            fill(memory.sums, rows * width, 0.0)
        for start in range(0, product.depth, SECTION):
            count = min(SECTION, product.depth - start)
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
                multiply(product, block, memory, left, start, column, (count + STEP - 1) // STEP)
        write(product, block, memory, width)

    layout = Scratch(compute, sizes_of_block, describe)
    return make_kernel_with_scratch(compute_block, layout, argument_types(dtype))
