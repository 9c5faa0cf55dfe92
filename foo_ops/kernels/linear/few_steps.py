"""Compute a block of a product of few steps, as the gradients of weights of few tokens are.

The rows of the left matrix and the columns of the right one are adjacent. All steps are packed at
once, and the sums never leave the registers before they are rounded: adding up 96 steps of bfloat16
in scratch memory takes a Zen 4 1.3 times as long.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.lang.scratch import Scratch, make_kernel_with_scratch
from foo_ops.kernels.linear.packing import (
    behind_bands,
    make_band_packer,
    make_right_packer_for_vectors,
)
from foo_ops.kernels.linear.product import argument_types
from foo_ops.kernels.products.on_amx import GROUP
from foo_ops.kernels.products.on_vectors import make_tall_matmul, tall_shape
from foo_ops.kernels.products.operands import step_of, vector_product_dtype
from foo_ops.kernels.simd.memory import address_of, pointer_to, shift
from foo_ops.kernels.simd.transpose import make_copy_row, round_up
from foo_ops.kernels.simd.types import compute_dtype, lanes_of


def make_few_steps_kernel(dtype: str) -> Kernel:
    """Make the kernel of products of few steps, without a bias, whose output is not transposed.

    It multiplies on vectors, also where there is a matrix unit.
    """
    compute, in_products = compute_dtype(dtype), vector_product_dtype(dtype)
    LANES, STEP = lanes_of(compute), step_of(in_products)
    BAND, WIDTH = tall_shape()[0], tall_shape()[1] * LANES
    pack_bands = make_band_packer(dtype, BAND)
    pack_right = make_right_packer_for_vectors(dtype, WIDTH)
    matmul = make_tall_matmul(compute, in_products, in_products, 0, 0)
    copy_row = make_copy_row(compute)
    as_factors, as_output = pointer_to(in_products), pointer_to(dtype)

    @njit
    def sizes_of_block(product, block):
        rows = block.row_stop - block.row_start
        return rows, (rows + BAND - 1) // BAND, round_up((product.depth + STEP - 1) // STEP, GROUP)

    def describe(rows: Any, bands: Any, steps: Any) -> dict[str, Any]:
        return {
            "left": bands * (steps * BAND + behind_bands(compute, BAND)),
            "right": steps * WIDTH,
            # A panel whose last vector has more columns than the block.
            "panel": rows * WIDTH,
        }

    @njit
    def multiply_panel(product, block, memory, distance, column):
        """Multiply all rows by a panel of columns."""
        rows, columns = block.row_stop - block.row_start, min(WIDTH, block.column_stop - column)
        steps, is_whole = (product.depth + STEP - 1) // STEP, columns % LANES == 0
        pack_right(
            memory.right, 0, shift(product.right, column), 1, product.right_step_stride, columns,
            product.depth,
        )  # fmt: skip
        output, stride = as_output(address_of(memory.panel)), WIDTH
        line = shift(product.output, block.row_start * product.output_stride + column)
        if is_whole:
            output, stride = line, product.output_stride
        for row in range(0, rows, BAND):
            matmul(
                shift(output, row * stride), stride,
                as_factors(address_of(shift(memory.left, row // BAND * distance))), 1, BAND,
                as_factors(address_of(memory.right)), WIDTH,
                min(BAND, rows - row), round_up(columns, LANES), steps, False, None,
            )  # fmt: skip
        if not is_whole:
            for row in range(rows):
                place = shift(line, row * product.output_stride)
                copy_row(place, shift(output, row * WIDTH), 1, columns, 0)

    def multiply(product, block, memory):
        distance = pack_bands(
            memory.left, shift(product.left, block.row_start), product.left_step_stride,
            block.row_stop - block.row_start, product.depth,
        )  # fmt: skip
        for column in range(block.column_start, block.column_stop, WIDTH):
            multiply_panel(product, block, memory, distance, column)

    layout = Scratch(compute, sizes_of_block, describe)
    return make_kernel_with_scratch(multiply, layout, argument_types(dtype))
