"""Attention: output and logsumexp of a block of queries whose keys were split into parts.

Each part has the largest score of a query, the sum of 2^(score - largest) and the values summed
with these weights. The parts, in their order, are brought to the largest of all (Dao et al. 2023,
Flash-Decoding): by a logsumexp of each, what beside a mask of -1e9 is left of it would not tell how
many keys it is of.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from numba import njit

from foo_ops.kernels.attention.output import finisher_of, row_writer_of
from foo_ops.kernels.attention.parameters import QUERY_BLOCK, argument_types, compute_dtype
from foo_ops.kernels.attention.rows import fill_of, round_up
from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.vectors.arithmetic import fma, splat
from foo_ops.kernels.vectors.elements import ELEMENTS, lanes_of
from foo_ops.kernels.vectors.functions import exp2
from foo_ops.kernels.vectors.memory import load, load_vector, shift, store
from foo_ops.kernels.vectors.scratch import Scratch, kernel_with_scratch
from foo_ops.kernels.vectors.struct import row_of


@functools.cache
def scratch_of(dtype: str) -> Scratch:
    LANES = lanes_of(compute_dtype(dtype))  # noqa: N806

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


def build(dtype: str) -> Kernel:
    """Piece of work: as for the forward kernel, with the number of parts in place of one."""
    compute = ELEMENTS[dtype].compute
    LANES = lanes_of(compute_dtype(dtype))  # noqa: N806
    fill, finish = fill_of(compute_dtype(dtype)), finisher_of(dtype)
    write, layout = row_writer_of(dtype, "output"), scratch_of(dtype)
    sizes_of_block = layout.sizes_of

    @njit
    def largest_of_parts(parameters, piece, lane):
        largest = compute(-math.inf)
        for part in range(piece.parts):
            value = load(row_of(parameters, "partial_largest", part, piece.slot, lane), 0)
            # NaN is kept: no number is larger, and it is not equal to itself.
            if value > largest or value != value:
                largest = value
        return largest

    @njit
    def scale_of(parameters, piece, part, lane, largest):
        value = load(row_of(parameters, "partial_largest", part, piece.slot, lane), 0)
        # Equal infinities, of a sink or where nothing is seen, have no difference.
        exponent = value - largest if value != largest else compute(0.0)
        return compute(exp2(exponent))

    @njit
    def add_parts(parameters, piece, lane, largest, sums, width):
        """The sum of the weights; sums are those of the weighted values."""
        fill(sums, width, 0.0)
        total = compute(0.0)
        for part in range(piece.parts):
            scale = scale_of(parameters, piece, part, lane, largest)
            total += scale * load(row_of(parameters, "partial_total", part, piece.slot, lane), 0)
            scales = splat(scale, LANES)
            source = row_of(parameters, "partial_output", part, piece.slot, lane)
            for column in range(0, width, LANES):
                sum_ = load_vector(sums, column, LANES)
                store(sums, column, fma(scales, load_vector(source, column, LANES), sum_))
        return total

    def merge(parameters, piece, memory):
        width, rows = sizes_of_block(parameters, piece)
        largest, total, factors, sums = memory.largest, memory.total, memory.factors, memory.sums
        for lane in range(rows):
            top = largest_of_parts(parameters, piece, lane)
            store(largest, lane, top)
            row = shift(sums, lane * width)
            store(total, lane, add_parts(parameters, piece, lane, top, row, width))
        finish(parameters, piece, largest, total, factors, False)
        for lane in range(rows):
            row = shift(sums, lane * width)
            factor = load(factors, lane)
            write(parameters, piece, row, factor, lane, 0, parameters.value_dim, False)

    return kernel_with_scratch(merge, layout, argument_types(dtype))
