"""Merge the results of key splits into the output and the logsumexp of a block of queries.

Each split has the largest score of a query, the sum of 2^(score - largest) and the values summed
with these weights. The splits, in their order, are brought to the largest of all (Dao et al. 2023,
Flash-Decoding). A logsumexp of each would not do: beside a mask of -1e9 nothing is left of the
logarithm that tells how many keys it is of.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from numba import njit

from foo_ops.kernels.attention.output import make_finish, make_row_writer
from foo_ops.kernels.attention.parameters import QUERY_BLOCK, argument_types
from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.lang.scratch import Scratch, make_kernel_with_scratch, row_of
from foo_ops.kernels.math.exponential import exp2
from foo_ops.kernels.simd.arithmetic import fma, splat
from foo_ops.kernels.simd.memory import load, load_vector, shift, store
from foo_ops.kernels.simd.transpose import make_fill, round_up
from foo_ops.kernels.simd.types import ELEMENTS, compute_dtype, lanes_of


@functools.cache
def make_scratch(dtype: str) -> Scratch:
    LANES = lanes_of(compute_dtype(dtype))

    @njit
    def sizes_of_block(parameters, piece):
        return round_up(parameters.value_dim, LANES), piece.heads * piece.query_count

    def describe(width: Any, rows: Any) -> dict[str, Any]:
        return {
            "largest": QUERY_BLOCK,
            "total": QUERY_BLOCK,
            "factors": QUERY_BLOCK,
            "sums": rows * width,
        }

    return Scratch(compute_dtype(dtype), sizes_of_block, describe)


def make_merge_kernel(dtype: str) -> Kernel:
    """Make the merging kernel. Its piece is that of the forward kernel, for all splits at once."""
    compute = ELEMENTS[dtype].compute
    LANES = lanes_of(compute_dtype(dtype))
    fill, finish = make_fill(compute_dtype(dtype)), make_finish(dtype)
    write, layout = make_row_writer(dtype, "output"), make_scratch(dtype)
    sizes_of_block = layout.sizes_of

    @njit
    def largest_of_key_splits(parameters, piece, block_row):
        largest = compute(-math.inf)
        for key_split in range(piece.key_splits):
            value = load(row_of(parameters, "partial_largest", key_split, piece.slot, block_row), 0)
            # NaN stays: no number is larger, and it is not equal to itself.
            if value > largest or value != value:
                largest = value
        return largest

    @njit
    def scale_of(parameters, piece, key_split, block_row, largest):
        value = load(row_of(parameters, "partial_largest", key_split, piece.slot, block_row), 0)
        # Equal infinities, of a sink or where nothing is seen, have no difference.
        exponent = value - largest if value != largest else compute(0.0)
        return compute(exp2(exponent))

    @njit
    def add_key_splits(parameters, piece, block_row, largest, sums, width):
        """Add up the weighted values of all splits in ``sums``, and return the sum of the
        weights.
        """
        fill(sums, width, 0.0)
        total = compute(0.0)
        for key_split in range(piece.key_splits):
            scale = scale_of(parameters, piece, key_split, block_row, largest)
            total += scale * load(
                row_of(parameters, "partial_total", key_split, piece.slot, block_row), 0
            )
            scales = splat(scale, LANES)
            source = row_of(parameters, "partial_output", key_split, piece.slot, block_row)
            for column in range(0, width, LANES):
                sum_ = load_vector(sums, column, LANES)
                store(sums, column, fma(scales, load_vector(source, column, LANES), sum_))
        return total

    def merge(parameters, piece, memory):
        width, rows = sizes_of_block(parameters, piece)
        largest, total, factors, sums = memory.largest, memory.total, memory.factors, memory.sums
        for block_row in range(rows):
            top = largest_of_key_splits(parameters, piece, block_row)
            store(largest, block_row, top)
            row = shift(sums, block_row * width)
            store(total, block_row, add_key_splits(parameters, piece, block_row, top, row, width))
        finish(parameters, piece, largest, total, factors, False)
        for block_row in range(rows):
            row = shift(sums, block_row * width)
            factor = load(factors, block_row)
            write(parameters, piece, row, factor, block_row, 0, parameters.value_dim, False)

    return make_kernel_with_scratch(merge, layout, argument_types(dtype))
