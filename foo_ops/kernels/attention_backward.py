"""Attention: the gradients for query, key and value from a share of the blocks of queries.

With the weights P = exp(S - logsumexp), recomputed tile by tile (Dao et al. 2022, algorithm 4):

    delta = rowsum(dO * O) - dLogsumexp       dV = P^T dO
    dP = dO V^T,  dS = P * (dP - delta)       dQ = scale * dS K,   dK = scale * dS^T Q
"""

from __future__ import annotations

from numba import njit

from foo_ops.kernels.attention import (
    KEY_BLOCK,
    QUERY_BLOCK,
    argument_types,
    compact,
    compute_dtype,
    fill,
    round_up,
    tiles_of,
    visible_keys,
)
from foo_ops.kernels.attention_weights import load_rows_of, weights_of
from foo_ops.kernels.jit import Kernel
from foo_ops.kernels.matmul import lanes_of, matmul_of
from foo_ops.kernels.simd import ELEMENTS, load, load_vector, shift, splat, store
from foo_ops.kernels.struct import row_of


def build(dtype: str) -> Kernel:
    """Piece of work: batch, head of the keys, chunk.

    A chunk has every ``chunks``-th block of queries of the heads that share the keys, and adds to
    sums of grad_key and grad_value of its own, in a fixed order: the result does not depend on
    which thread runs it.
    """
    compute = ELEMENTS[dtype].compute
    LANES = lanes_of(compute_dtype(dtype))  # noqa: N806
    matmul = matmul_of(compute_dtype(dtype))
    key_tile, value_tile = tiles_of(dtype)
    weights_tile, load_rows = weights_of(dtype), load_rows_of(dtype)

    @njit
    def multiply(target, count, columns, factor):
        """Every row of a tile, times a factor."""
        factors = splat(compute(factor), LANES)
        for key in range(count):
            for column in range(0, columns, LANES):
                index = key * QUERY_BLOCK + column
                store(target, index, load_vector(target, index, LANES) * factors)

    @njit
    def write_grad_query(parameters, batch, head, query_start, rows, grad):
        target = row_of(parameters, "grad_query", batch, head, query_start)
        for row in range(rows):
            line = shift(target, row * parameters.grad_query_row_stride)
            for column in range(parameters.head_dim):
                value = load(grad, column * QUERY_BLOCK + row)
                store(line, column * parameters.grad_query_column_stride, value)

    @njit
    def block_of_queries(parameters, scratch, batch, head, key_head, chunk, query_start):
        head_dim, value_dim = parameters.head_dim, parameters.value_dim
        # The sums' rows are whole vectors, and so are those of the blocks they are computed from.
        head_width, value_width = parameters.grad_key_row_stride, parameters.grad_value_row_stride
        rows = min(QUERY_BLOCK, parameters.query_length - query_start)
        columns = round_up(rows, LANES)

        weights = scratch
        grad_scores = shift(weights, KEY_BLOCK * QUERY_BLOCK)
        bias = shift(grad_scores, KEY_BLOCK * QUERY_BLOCK)
        logsumexp = shift(bias, KEY_BLOCK * QUERY_BLOCK)
        delta = shift(logsumexp, QUERY_BLOCK)
        queries_transposed = shift(delta, QUERY_BLOCK)
        grad_queries = shift(queries_transposed, head_dim * QUERY_BLOCK)
        grad_outputs_transposed = shift(grad_queries, head_dim * QUERY_BLOCK)
        queries = shift(grad_outputs_transposed, value_dim * QUERY_BLOCK)
        grad_outputs = shift(queries, head_width * QUERY_BLOCK)
        converted_keys = shift(grad_outputs, value_width * QUERY_BLOCK)
        converted_values = shift(converted_keys, KEY_BLOCK * head_dim)

        load_rows(
            parameters, queries_transposed, grad_outputs_transposed, logsumexp, delta,
            batch, head, query_start, rows, columns,
        )  # fmt: skip
        query = row_of(parameters, "query", batch, head, query_start)
        grad_output = row_of(parameters, "grad_output", batch, head, query_start)
        compact(
            queries, query, parameters.query_row_stride, parameters.query_column_stride,
            rows, head_dim, head_width,
        )  # fmt: skip
        compact(
            grad_outputs, grad_output,
            parameters.grad_output_row_stride, parameters.grad_output_column_stride,
            rows, value_dim, value_width,
        )  # fmt: skip
        fill(grad_queries, head_dim * QUERY_BLOCK, 0.0)

        # grad_key and grad_value have the shape (batch * key_heads, chunks, key_length, width).
        sums = (batch * parameters.key_heads + key_head) * parameters.chunks + chunk
        end = visible_keys(parameters, query_start + rows)
        for key_start in range(0, end, KEY_BLOCK):
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
                queries_transposed, grad_outputs_transposed, logsumexp, delta,
                batch, head, query_start, key_start, rows, columns, count,
            )  # fmt: skip
            multiply(grad_scores, count, columns, parameters.scale)
            place = sums * parameters.key_length + key_start
            matmul(
                shift(parameters.grad_value, place * value_width), value_width,
                weights, QUERY_BLOCK, 1, grad_outputs, value_width,
                count, value_width, rows, True,
            )  # fmt: skip
            matmul(
                shift(parameters.grad_key, place * head_width), head_width,
                grad_scores, QUERY_BLOCK, 1, queries, head_width,
                count, head_width, rows, True,
            )  # fmt: skip
            matmul(
                grad_queries, QUERY_BLOCK, keys, key_column, key_row,
                grad_scores, QUERY_BLOCK, head_dim, columns, count, True,
            )  # fmt: skip
        write_grad_query(parameters, batch, head, query_start, rows, grad_queries)

    def backward(parameters, scratch, batch, key_head, chunk):
        group = parameters.query_heads // parameters.key_heads
        blocks = (parameters.query_length + QUERY_BLOCK - 1) // QUERY_BLOCK
        for piece in range(chunk, group * blocks, parameters.chunks):
            head = key_head * group + piece // blocks
            query_start = piece % blocks * QUERY_BLOCK
            block_of_queries(parameters, scratch, batch, head, key_head, chunk, query_start)

    return Kernel(backward, argument_types(dtype))
