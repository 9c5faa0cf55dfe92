"""Attention: output and logsumexp of a block of queries whose keys were split into parts.

The parts, in their order, are weighted with exp(logsumexp of the part - logsumexp) (Dao et al.
2023, Flash-Decoding).
"""

from __future__ import annotations

import math

from numba import njit

from foo_ops.kernels.attention import (
    LOG2,
    argument_types,
    compute_dtype,
    copy_row_of,
    fill_of,
    round_up,
)
from foo_ops.kernels.functions import exp2
from foo_ops.kernels.jit import Kernel
from foo_ops.kernels.matmul import lanes_of
from foo_ops.kernels.simd import ELEMENTS, fma, load, load_vector, splat, store
from foo_ops.kernels.struct import row_of


def build(dtype: str) -> Kernel:
    """Piece of work: as for the forward kernel, with the number of parts in place of one."""
    compute = ELEMENTS[dtype].compute
    LANES = lanes_of(compute_dtype(dtype))  # noqa: N806
    copy_row, fill = copy_row_of(compute_dtype(dtype)), fill_of(compute_dtype(dtype))

    @njit
    def logsumexp_of_parts(parameters, piece, lane):
        largest = compute(-math.inf)
        for part in range(piece.parts):
            value = load(row_of(parameters, "partial_logsumexp", part, piece.slot, lane), 0)
            # NaN is kept: no number is larger, and it is not equal to itself.
            if value > largest or value != value:
                largest = value
        if largest == -math.inf or largest == math.inf or largest != largest:
            return largest
        total = compute(0.0)
        for part in range(piece.parts):
            value = load(row_of(parameters, "partial_logsumexp", part, piece.slot, lane), 0)
            total += exp2((value - largest) / compute(LOG2))
        return largest + math.log(total)

    @njit
    def merge_row(parameters, piece, lane, logsumexp, total, width):
        fill(total, width, 0.0)
        for part in range(piece.parts):
            value = load(row_of(parameters, "partial_logsumexp", part, piece.slot, lane), 0)
            if value == -math.inf:
                continue
            # Equal infinities, of a sink, have no difference.
            exponent = value - logsumexp if value != logsumexp else compute(0.0)
            weight = splat(compute(exp2(exponent / compute(LOG2))), LANES)
            source = row_of(parameters, "partial_output", part, piece.slot, lane)
            for column in range(0, width, LANES):
                sum_ = load_vector(total, column, LANES)
                store(total, column, fma(weight, load_vector(source, column, LANES), sum_))

    def merge(parameters, piece, scratch):
        width = round_up(parameters.value_dim, LANES)
        for index in range(piece.heads):
            for row in range(piece.query_count):
                lane = index * piece.query_count + row
                query, head = piece.query_offset + piece.query_start + row, piece.head + index
                result = logsumexp_of_parts(parameters, piece, lane)
                merge_row(parameters, piece, lane, result, scratch, width)
                store(row_of(parameters, "logsumexp", piece.batch, head, query), 0, result)
                target = row_of(parameters, "output", piece.batch, head, query)
                copy_row(target, scratch, 1, parameters.value_dim, parameters.value_dim)

    return Kernel(merge, argument_types(dtype))
