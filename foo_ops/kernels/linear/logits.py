"""Compute a block of logits, which are the sums of a product and a bias."""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.lang.scratch import Scratch
from foo_ops.kernels.linear.product import make_block_sums
from foo_ops.kernels.simd.memory import load_vector, shift, store
from foo_ops.kernels.simd.transpose import make_copy_row, round_up
from foo_ops.kernels.simd.types import compute_dtype, lanes_of


@functools.cache
def make_scratch(dtype: str) -> Scratch:
    sums = make_block_sums(dtype)
    return Scratch(compute_dtype(dtype), sums.sizes_of_block, sums.describe)


@functools.cache
def make_logits(dtype: str) -> Callable:
    """Make ``compute_logits(parameters, block, memory)``.

    It leaves the logits, without a soft cap, in ``memory.sums``: see
    `foo_ops.kernels.linear.product.BlockSums`. They fill whole vectors.
    """
    sums, compute = make_block_sums(dtype), compute_dtype(dtype)
    compute_sums, panel_of_block, WIDTH = sums.compute, sums.panel_of_block, sums.width
    LANES, copy_row = lanes_of(compute), make_copy_row(compute)

    @njit
    def add_bias(parameters, block, memory):
        rows, columns = block.row_stop - block.row_start, block.column_stop - block.column_start
        panel = panel_of_block(parameters, block)
        stride = parameters.bias_column_stride
        copy_row(
            memory.bias, shift(parameters.bias, block.column_start * stride), stride, columns,
            round_up(columns, LANES),
        )  # fmt: skip
        for start in range(0, columns, WIDTH):
            bias = shift(memory.bias, start)
            for row in range(rows):
                line = shift(memory.sums, start // WIDTH * panel + row * WIDTH)
                for column in range(0, min(WIDTH, columns - start), LANES):
                    value = load_vector(line, column, LANES) + load_vector(bias, column, LANES)
                    store(line, column, value)

    @njit
    def compute_logits(parameters, block, memory):
        compute_sums(parameters, block, memory)
        if parameters.has_bias:
            add_bias(parameters, block, memory)

    return compute_logits
