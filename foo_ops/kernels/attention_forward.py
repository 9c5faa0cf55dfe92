"""Attention: the output and the logsumexp for a block of queries.

Online softmax over tiles of keys (Milakov and Gimelshein 2018; Dao et al. 2022, algorithm 1): with
the maximum m and the sum l of exp(score - m) so far, a tile with maximum m' turns l into
l * exp(m - max(m, m')) plus its own part, and the unnormalised output alike.
"""

from __future__ import annotations

import math

from numba import njit

from foo_ops.kernels.attention import (
    KEY_BLOCK,
    QUERY_BLOCK,
    argument_types,
    compute_dtype,
    fill,
    round_up,
    scores_of,
    tiles_of,
    transpose,
    visible_keys,
)
from foo_ops.kernels.jit import Kernel
from foo_ops.kernels.matmul import lanes_of, matmul_of
from foo_ops.kernels.simd import (
    ELEMENTS,
    any_lane,
    exp,
    less,
    load,
    load_vector,
    maximum,
    select,
    shift,
    splat,
    store,
)
from foo_ops.kernels.struct import row_of


def build(dtype: str) -> Kernel:
    compute = ELEMENTS[dtype].compute
    LANES = lanes_of(compute_dtype(dtype))  # noqa: N806
    matmul = matmul_of(compute_dtype(dtype))
    key_tile, value_tile = tiles_of(dtype)
    scores_tile = scores_of(dtype)

    @njit
    def online_softmax(scores, largest, total, correction, columns, count):
        """Turn a tile of scores into exp(score - largest), with largest and total updated.

        Returns whether a maximum grew, so that the output has to be multiplied by correction.
        """
        grew = False
        for column in range(0, columns, LANES):
            before = load_vector(largest, column, LANES)
            after = before
            for key in range(count):
                after = maximum(load_vector(scores, key * QUERY_BLOCK + column, LANES), after)
            # A query that has seen nothing yet has the maximum -infinity: any finite number does.
            lowest = splat(compute(-math.inf), LANES)
            base = select(less(lowest, after), after, splat(compute(0.0), LANES))
            factor = exp(before - base)
            sum_ = load_vector(total, column, LANES) * factor
            for key in range(count):
                index = key * QUERY_BLOCK + column
                weight = exp(load_vector(scores, index, LANES) - base)
                store(scores, index, weight)
                sum_ = sum_ + weight
            store(largest, column, after)
            store(total, column, sum_)
            store(correction, column, factor)
            grew = grew or any_lane(less(before, after))
        return grew

    @njit
    def rescale(accumulator, correction, rows, columns):
        for row in range(rows):
            for column in range(0, columns, LANES):
                index = row * QUERY_BLOCK + column
                factor = load_vector(correction, column, LANES)
                store(accumulator, index, load_vector(accumulator, index, LANES) * factor)

    @njit
    def write(parameters, batch, head, query_start, rows, accumulator, largest, total):
        output = row_of(parameters, "output", batch, head, query_start)
        logsumexp = row_of(parameters, "logsumexp", batch, head, query_start)
        for row in range(rows):
            maximum_, sum_ = load(largest, row), load(total, row)
            # The sum is zero for a query that sees nothing, and its output is zero.
            factor = compute(1.0) / sum_ if sum_ != 0.0 else compute(0.0)
            line = shift(output, row * parameters.output_row_stride)
            for column in range(parameters.value_dim):
                value = load(accumulator, column * QUERY_BLOCK + row)
                store(line, column * parameters.output_column_stride, value * factor)
            # The sum is NaN for a score of +infinity, whose logsumexp is nevertheless +infinity.
            result = maximum_ if maximum_ == math.inf else maximum_ + math.log(sum_)
            store(logsumexp, row * parameters.logsumexp_row_stride, result)

    def forward(parameters, scratch, batch, head, query_start):
        head_dim, value_dim = parameters.head_dim, parameters.value_dim
        rows = min(QUERY_BLOCK, parameters.query_length - query_start)
        columns = round_up(rows, LANES)
        key_head = head // (parameters.query_heads // parameters.key_heads)

        scores = scratch
        bias = shift(scores, KEY_BLOCK * QUERY_BLOCK)
        largest = shift(bias, KEY_BLOCK * QUERY_BLOCK)
        total = shift(largest, QUERY_BLOCK)
        correction = shift(total, QUERY_BLOCK)
        queries = shift(correction, QUERY_BLOCK)
        accumulator = shift(queries, head_dim * QUERY_BLOCK)
        converted_keys = shift(accumulator, value_dim * QUERY_BLOCK)
        converted_values = shift(converted_keys, KEY_BLOCK * head_dim)

        query = row_of(parameters, "query", batch, head, query_start)
        transpose(
            queries, query, parameters.query_row_stride, parameters.query_column_stride,
            rows, head_dim, columns,
        )  # fmt: skip
        fill(largest, QUERY_BLOCK, -math.inf)
        fill(total, QUERY_BLOCK, 0.0)
        fill(accumulator, value_dim * QUERY_BLOCK, 0.0)

        end = visible_keys(parameters, query_start + rows)
        for key_start in range(0, end, KEY_BLOCK):
            count = min(KEY_BLOCK, end - key_start)
            keys, key_row, key_column = key_tile(
                parameters, converted_keys, batch, key_head, key_start, count
            )
            values, value_row, value_column = value_tile(
                parameters, converted_values, batch, key_head, key_start, count
            )
            scores_tile(
                parameters, scores, bias, keys, key_row, key_column, queries,
                batch, head, query_start, key_start, rows, columns, count,
            )  # fmt: skip
            if online_softmax(scores, largest, total, correction, columns, count):
                rescale(accumulator, correction, value_dim, columns)
            matmul(
                accumulator, QUERY_BLOCK, values, value_column, value_row,
                scores, QUERY_BLOCK, value_dim, columns, count, True,
            )  # fmt: skip
        write(parameters, batch, head, query_start, rows, accumulator, largest, total)

    return Kernel(forward, argument_types(dtype))
