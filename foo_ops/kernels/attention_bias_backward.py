"""Attention: the gradient of the bias, some columns of it at a time.

It is the gradient of the scores, summed over all that the bias was broadcast to. The blocks of
queries that add to a tile come one after the other, in the same scratch memory, and recompute the
scores that they need: nothing of size query_length x key_length is kept, and no two threads write
to one place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention import (
    BIAS_FLOAT32,
    KEY_BLOCK,
    QUERY_BLOCK,
    TILE,
    TILE_STRIDE,
    argument_types,
    block_of,
    compute_dtype,
    factors_of,
    fill_of,
    round_up,
    tile_of,
    tile_operation_of,
    turn_of,
)
from foo_ops.kernels.attention_scores import LANE_ROWS, lanes_filler_of
from foo_ops.kernels.attention_weights import statistics_of, weights_of
from foo_ops.kernels.jit import Kernel
from foo_ops.kernels.matmul import lanes_of
from foo_ops.kernels.simd import (
    ELEMENTS,
    address_of,
    load,
    pointer_to,
    shift,
    store,
)
from foo_ops.kernels.tiles import transpose_square

# The more, the fewer times a block is prepared; sums of so many stay in the second cache.
BIAS_COLUMNS = 512


def build(dtype: str) -> Kernel:
    """Piece of work: a block of queries, as part ``part`` of the ``parts`` of BIAS_COLUMNS columns
    of the bias, from ``column`` on.
    """
    compute = ELEMENTS[dtype].compute
    compute_name = compute_dtype(dtype)
    LANES = lanes_of(compute_name)  # noqa: N806
    weights_tile, load_statistics = weights_of(dtype, True), statistics_of(dtype)
    load_queries, load_grad_outputs = block_of(dtype, "query"), block_of(dtype, "grad_output")
    key_tile, value_tile = tile_of(dtype, "key"), tile_of(dtype, "value")
    fill, turn, fill_lanes = fill_of(compute_name), turn_of(compute_name), lanes_filler_of(dtype)
    _, as_factors = factors_of(dtype)
    add = tile_operation_of(compute_name, operator.add)
    own_dtype, as_float32 = pointer_to(dtype), pointer_to("float32")

    @njit
    def columns_of(parameters, piece):
        return min(BIAS_COLUMNS, parameters.bias_columns - piece.column)

    @njit
    def sum_columns(total, columns):
        """Move the sum of each key's scores to its first query."""
        for key in range(columns):
            sum_ = compute(0.0)
            for row in range(QUERY_BLOCK):
                sum_ += load(total, key * TILE_STRIDE + row)
            store(total, key * TILE_STRIDE, sum_)

    @njit
    def sum_rows(total):
        """Move the sum of each query's scores to its first key. One column has one tile."""
        for row in range(QUERY_BLOCK):
            sum_ = compute(0.0)
            for key in range(KEY_BLOCK):
                sum_ += load(total, key * TILE_STRIDE + row)
            store(total, row, sum_)

    @njit
    def write_one_by_one(target, row_stride, column_stride, total, first_row, rows, first, columns):
        for row in range(first_row, rows):
            for key in range(first, columns):
                value = load(total, key * TILE_STRIDE + row)
                store(target, row * row_stride + key * column_stride, value)

    def writer_of(target_dtype: str) -> Callable:
        # A vector is stored in a dtype that is computed in its own compute type.
        in_squares = ELEMENTS[target_dtype].compute is compute

        @njit
        def write(target, row_stride, column_stride, total, rows, columns):
            whole_rows, whole = 0, 0
            if in_squares:
                whole_rows = rows // LANES * LANES if column_stride == 1 else 0
                whole = columns // LANES * LANES
                for row in range(0, whole_rows, LANES):
                    for key in range(0, whole, LANES):
                        transpose_square(
                            shift(target, row * row_stride + key), row_stride,
                            shift(total, key * TILE_STRIDE + row), TILE_STRIDE, LANES,
                        )  # fmt: skip
            write_one_by_one(
                target, row_stride, column_stride, total, 0, whole_rows, whole, columns
            )
            write_one_by_one(target, row_stride, column_stride, total, whole_rows, rows, 0, columns)

        return write

    write_own, write_wide = writer_of(dtype), writer_of("float32")

    @njit
    def write_gradient(parameters, piece, total):
        row_stride = parameters.grad_attn_bias_row_stride
        column_stride = parameters.grad_attn_bias_column_stride
        rows = 1 if parameters.bias_rows == 1 else piece.query_count
        columns = columns_of(parameters, piece)
        # The strides of what the bias was broadcast along are zero.
        offset = (
            piece.batch * parameters.grad_attn_bias_batch_stride
            + piece.head * parameters.grad_attn_bias_head_stride
            + piece.query_start * row_stride
            + piece.column * column_stride
        )
        address = address_of(parameters.grad_attn_bias)
        if parameters.bias_kind == BIAS_FLOAT32:
            wide = shift(as_float32(address), offset)
            write_wide(wide, row_stride, column_stride, total, rows, columns)
        else:
            own = shift(own_dtype(address), offset)
            write_own(own, row_stride, column_stride, total, rows, columns)

    @njit
    def add_block(parameters, piece, scratch, total):
        """Add the gradients of the scores of the block with the piece's keys to the total."""
        head_width = round_up(parameters.head_dim, LANES)
        value_width = round_up(parameters.value_dim, LANES)
        width = max(head_width, value_width)
        columns = round_up(piece.query_count, LANES)

        weights = scratch
        grad_scores = shift(weights, TILE)
        kept = shift(grad_scores, TILE)
        slopes = shift(kept, TILE)
        logsumexp = shift(slopes, TILE)
        delta = shift(logsumexp, TILE_STRIDE)
        lanes = shift(delta, TILE_STRIDE)
        block = shift(lanes, LANE_ROWS * TILE_STRIDE)
        turned = shift(block, TILE_STRIDE * width)
        grad_turned = shift(turned, TILE_STRIDE * (width + 1))
        packed = shift(grad_turned, TILE_STRIDE * (width + 1))
        grad_packed = shift(packed, TILE_STRIDE * width)
        key_memory = shift(grad_packed, TILE_STRIDE * width)
        value_memory = shift(key_memory, KEY_BLOCK * head_width)

        fill_lanes(parameters, piece, lanes)
        load_queries(parameters, piece, block, parameters.head_dim, columns, head_width)
        turn(turned, block, head_width, columns, head_width)
        load_grad_outputs(parameters, piece, block, parameters.value_dim, columns, value_width)
        turn(grad_turned, block, value_width, columns, value_width)
        fill(shift(turned, head_width * TILE_STRIDE), columns, 0.0)
        fill(shift(grad_turned, value_width * TILE_STRIDE), columns, 0.0)
        load_statistics(
            parameters, piece, grad_turned, packed, logsumexp, delta, columns, value_width
        )
        queries = as_factors(packed, turned, TILE_STRIDE, parameters.head_dim, columns)
        grad_outputs = as_factors(
            grad_packed, grad_turned, TILE_STRIDE, parameters.value_dim, columns
        )
        for key_start in range(piece.key_start, piece.key_stop, KEY_BLOCK):
            count = min(KEY_BLOCK, piece.key_stop - key_start)
            keys, key_stride, key_step = key_tile(parameters, piece, key_memory, key_start, count)
            values, value_stride, value_step = value_tile(
                parameters, piece, value_memory, key_start, count
            )
            weights_tile(
                parameters, piece, lanes, weights, grad_scores, kept, slopes,
                keys, key_stride, key_step, values, value_stride, value_step,
                queries, grad_outputs, logsumexp, delta, key_start, 0, columns, count,
            )  # fmt: skip
            place = shift(total, (key_start - piece.column) * TILE_STRIDE)
            add(total if parameters.bias_columns == 1 else place, grad_scores, columns, count)

    def bias_backward(parameters, piece, scratch):
        total, columns = scratch, columns_of(parameters, piece)
        if piece.part == 0:
            fill(total, max(KEY_BLOCK, columns) * TILE_STRIDE, 0.0)
        if piece.key_start < piece.key_stop:
            add_block(parameters, piece, shift(scratch, BIAS_COLUMNS * TILE_STRIDE), total)
        if piece.part == piece.parts - 1:
            if parameters.bias_rows == 1:
                sum_columns(total, max(KEY_BLOCK, columns))
            if parameters.bias_columns == 1:
                sum_rows(total)
            write_gradient(parameters, piece, total)

    return Kernel(bias_backward, argument_types(dtype))
