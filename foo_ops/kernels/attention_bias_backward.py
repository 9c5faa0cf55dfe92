"""Attention: the gradient of the bias, a tile of it at a time.

It is the gradient of the scores, summed over all that the bias was broadcast to. A piece of work
owns its tile of the gradient and recomputes the scores that it needs: nothing of size
query_length x key_length is kept, and no two threads write to one place.
"""

from __future__ import annotations

from numba import njit

from foo_ops.kernels.attention import (
    BIAS_FLOAT32,
    KEY_BLOCK,
    QUERY_BLOCK,
    argument_types,
    compute_dtype,
    fill,
    round_up,
    tiles_of,
    visible_keys,
)
from foo_ops.kernels.attention_weights import load_rows_of, weights_of
from foo_ops.kernels.jit import Kernel
from foo_ops.kernels.matmul import lanes_of
from foo_ops.kernels.simd import (
    ELEMENTS,
    address_of,
    load,
    load_vector,
    pointer_to,
    shift,
    store,
)


def build(dtype: str) -> Kernel:
    """Piece of work: batch * bias_heads + head of the bias, block of rows, tile of columns.

    The last two are zero where the bias has one row or one column.
    """
    compute = ELEMENTS[dtype].compute
    LANES = lanes_of(compute_dtype(dtype))  # noqa: N806
    weights_tile, load_rows = weights_of(dtype), load_rows_of(dtype)
    key_tile, value_tile = tiles_of(dtype)
    own_dtype, as_float32 = pointer_to(dtype), pointer_to("float32")

    @njit
    def add(total, tile, columns, count):
        for key in range(count):
            for column in range(0, columns, LANES):
                index = key * QUERY_BLOCK + column
                sum_ = load_vector(total, index, LANES) + load_vector(tile, index, LANES)
                store(total, index, sum_)

    @njit
    def sum_columns(total):
        """Move the sum of each key's scores to its first query."""
        for key in range(KEY_BLOCK):
            sum_ = compute(0.0)
            for row in range(QUERY_BLOCK):
                sum_ += load(total, key * QUERY_BLOCK + row)
            store(total, key * QUERY_BLOCK, sum_)

    @njit
    def sum_rows(total):
        """Move the sum of each query's scores to its first key."""
        for row in range(QUERY_BLOCK):
            sum_ = compute(0.0)
            for key in range(KEY_BLOCK):
                sum_ += load(total, key * QUERY_BLOCK + row)
            store(total, row, sum_)

    @njit
    def write(target, row_stride, column_stride, total, rows, columns):
        for row in range(rows):
            for key in range(columns):
                value = load(total, key * QUERY_BLOCK + row)
                store(target, row * row_stride + key * column_stride, value)

    @njit
    def write_gradient(parameters, total, batch, head, first_row, first_column):
        row_stride = parameters.grad_attn_bias_row_stride
        column_stride = parameters.grad_attn_bias_column_stride
        rows = min(QUERY_BLOCK, parameters.bias_rows - first_row)
        columns = min(KEY_BLOCK, parameters.bias_columns - first_column)
        offset = (
            batch * parameters.grad_attn_bias_batch_stride
            + head * parameters.grad_attn_bias_head_stride
            + first_row * row_stride
            + first_column * column_stride
        )
        address = address_of(parameters.grad_attn_bias)
        if parameters.bias_kind == BIAS_FLOAT32:
            wide = shift(as_float32(address), offset)
            write(wide, row_stride, column_stride, total, rows, columns)
        else:
            write(
                shift(own_dtype(address), offset), row_stride, column_stride, total, rows, columns
            )

    @njit
    def add_block(parameters, scratch, total, batch, head, query_start, key_begin, key_stop):
        """Add the gradients of the scores of a block of queries with some keys to the total."""
        head_dim, value_dim = parameters.head_dim, parameters.value_dim
        rows = min(QUERY_BLOCK, parameters.query_length - query_start)
        columns = round_up(rows, LANES)
        key_head = head // (parameters.query_heads // parameters.key_heads)

        weights = scratch
        grad_scores = shift(weights, KEY_BLOCK * QUERY_BLOCK)
        bias = shift(grad_scores, KEY_BLOCK * QUERY_BLOCK)
        logsumexp = shift(bias, KEY_BLOCK * QUERY_BLOCK)
        delta = shift(logsumexp, QUERY_BLOCK)
        queries = shift(delta, QUERY_BLOCK)
        grad_outputs = shift(queries, head_dim * QUERY_BLOCK)
        converted_keys = shift(grad_outputs, value_dim * QUERY_BLOCK)
        converted_values = shift(converted_keys, KEY_BLOCK * head_dim)

        end = min(key_stop, visible_keys(parameters, query_start + rows))
        if key_begin >= end:
            return
        load_rows(
            parameters, queries, grad_outputs, logsumexp, delta,
            batch, head, query_start, rows, columns,
        )  # fmt: skip
        for key_start in range(key_begin, end, KEY_BLOCK):
            count = min(KEY_BLOCK, end - key_start)
            keys, key_row, key_column = key_tile(
                parameters, converted_keys, batch, key_head, key_start, count
            )
            values, value_row, value_column = value_tile(
                parameters, converted_values, batch, key_head, key_start, count
            )
            weights_tile(
                parameters, weights, grad_scores, bias,
                keys, key_row, key_column, values, value_row, value_column,
                queries, grad_outputs, logsumexp, delta,
                batch, head, query_start, key_start, rows, columns, count,
            )  # fmt: skip
            add(total, grad_scores, columns, count)

    def bias_backward(parameters, scratch, place, row_block, column_tile):
        bias_batch, bias_head = place // parameters.bias_heads, place % parameters.bias_heads
        total = scratch
        rest = shift(scratch, KEY_BLOCK * QUERY_BLOCK)
        fill(total, KEY_BLOCK * QUERY_BLOCK, 0.0)

        one_row, one_column = parameters.bias_rows == 1, parameters.bias_columns == 1
        query_begin = row_block * QUERY_BLOCK
        query_stop = parameters.query_length if one_row else query_begin + 1
        key_begin = column_tile * KEY_BLOCK
        key_stop = parameters.key_length
        if not one_column:
            key_stop = min(key_stop, key_begin + KEY_BLOCK)

        # Steps of 1 over batches and heads that the bias has been broadcast to, else only its own.
        batch_stop = parameters.batch if parameters.bias_batch == 1 else bias_batch + 1
        head_stop = parameters.query_heads if parameters.bias_heads == 1 else bias_head + 1
        for batch in range(bias_batch, batch_stop):
            for head in range(bias_head, head_stop):
                for query_start in range(query_begin, query_stop, QUERY_BLOCK):
                    add_block(
                        parameters, rest, total, batch, head, query_start, key_begin, key_stop
                    )
        if one_row:
            sum_columns(total)
        if one_column:
            sum_rows(total)
        write_gradient(parameters, total, bias_batch, bias_head, query_begin, key_begin)

    return Kernel(bias_backward, argument_types(dtype))
