"""Compute a block of a product, of any number of rows."""

from __future__ import annotations

from typing import Any

from numba import njit

from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.linear.packing import make_left_packer, make_right_packer
from foo_ops.kernels.linear.parameters import argument_types
from foo_ops.kernels.products.on_vectors import make_matmul, shapes
from foo_ops.kernels.products.operands import step_of, vector_product_dtype
from foo_ops.kernels.vectors.elements import ELEMENTS, compute_dtype, lanes_of
from foo_ops.kernels.vectors.memory import address_of, load, load_vector, pointer_to, shift, store
from foo_ops.kernels.vectors.rows import make_copy_row, make_fill, round_up
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
    fill, copy_row = make_fill(compute), make_copy_row(compute)
    as_matrix = pointer_to(in_products)

    @njit
    def sizes_of_block(product, block):
        return block.row_stop - block.row_start, round_up(
            block.column_stop - block.column_start, WIDTH
        )

    def describe(rows: Any, columns: Any) -> dict[str, Any]:
        return {
            "left": rows * STEPS,
            "right": columns * STEPS,
            "sums": rows * columns,
            "bias": columns,
        }

    @njit
    def multiply(memory, left, rows, width, columns, steps, accumulate):
        """A band of rows stays in the nearest cache while it is multiplied by each panel."""
        factors, row_stride, step_stride = left
        for row in range(0, rows, ROWS):
            some = min(ROWS, rows - row)
            for column in range(0, columns, WIDTH):
                matmul(
                    shift(memory.sums, row * width + column), width,
                    shift(factors, row * row_stride), row_stride, step_stride,
                    as_matrix(address_of(shift(memory.right, column * STEPS))), WIDTH,
                    some, round_up(min(WIDTH, columns - column), LANES), steps, accumulate,
                )  # fmt: skip

    @njit
    def write(product, block, memory, rows, width, columns):
        if product.has_bias:
            source = shift(product.bias, block.column_start * product.bias_stride)
            copy_row(memory.bias, source, product.bias_stride, columns, width)
        else:
            fill(memory.bias, width, 0.0)
        whole = columns // LANES * LANES
        for row in range(rows):
            place = (block.row_start + row) * product.output_row_stride + block.column_start
            line, sums = shift(product.output, place), shift(memory.sums, row * width)
            for column in range(0, whole, LANES):
                value = load_vector(sums, column, LANES) + load_vector(memory.bias, column, LANES)
                store(line, column, value)
            for column in range(whole, columns):
                store(line, column, load(sums, column) + load(memory.bias, column))

    def compute_block(product, block, memory):
        rows, width = sizes_of_block(product, block)
        columns = block.column_stop - block.column_start
        if product.depth == 0:
            fill(memory.sums, rows * width, 0.0)
        left = shift(product.left, block.row_start * product.left_row_stride)
        right = shift(product.right, block.column_start * product.right_column_stride)
        for start in range(0, product.depth, SECTION):
            count = min(SECTION, product.depth - start)
            packed = pack_left(
                memory.left, shift(left, start * product.left_step_stride),
                product.left_row_stride, product.left_step_stride, rows, count,
            )  # fmt: skip
            for column in range(0, columns, WIDTH):
                place = column * product.right_column_stride + start * product.right_step_stride
                pack_right(
                    shift(memory.right, column * STEPS), shift(right, place),
                    product.right_column_stride, product.right_step_stride,
                    min(WIDTH, columns - column), count,
                )  # fmt: skip
            steps = (count + STEP - 1) // STEP
            multiply(memory, packed, rows, width, columns, steps, start > 0)
        write(product, block, memory, rows, width, columns)

    layout = Scratch(compute, sizes_of_block, describe)
    return make_kernel_with_scratch(compute_block, layout, argument_types(dtype))
