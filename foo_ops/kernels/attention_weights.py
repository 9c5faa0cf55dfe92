"""What the backward kernels of attention share: a tile's weights and the gradient of its scores."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention import (
    QUERY_BLOCK,
    compute_dtype,
    scores_of,
    transpose,
)
from foo_ops.kernels.matmul import lanes_of, matmul_of
from foo_ops.kernels.simd import ELEMENTS, exp, load, load_vector, shift, store
from foo_ops.kernels.struct import row_of


@functools.cache
def load_rows_of(dtype: str) -> Callable:
    """The function that packs what a block of queries brings to its gradients.

    ``load_rows(parameters, queries, grad_outputs, logsumexp, delta, batch, head, query_start, rows,
    columns)`` writes the transposed queries and gradients of the output, and for each query the
    logsumexp and delta = sum(grad_output * output) - grad_logsumexp.
    """
    compute = ELEMENTS[dtype].compute

    @njit
    def load_statistics(parameters, logsumexp, delta, batch, head, query_start, rows, columns):
        output = row_of(parameters, "output", batch, head, query_start)
        grad_output = row_of(parameters, "grad_output", batch, head, query_start)
        saved = row_of(parameters, "logsumexp", batch, head, query_start)
        grad_saved = row_of(parameters, "grad_logsumexp", batch, head, query_start)
        for row in range(rows):
            sum_ = -load(grad_saved, row * parameters.grad_logsumexp_row_stride)
            line = shift(output, row * parameters.output_row_stride)
            grad_line = shift(grad_output, row * parameters.grad_output_row_stride)
            for column in range(parameters.value_dim):
                sum_ += load(line, column * parameters.output_column_stride) * load(
                    grad_line, column * parameters.grad_output_column_stride
                )
            value = load(saved, row * parameters.logsumexp_row_stride)
            # A query that sees nothing has only scores of -infinity: this makes its weights zero.
            store(logsumexp, row, compute(math.inf) if value == -math.inf else value)
            store(delta, row, sum_)
        for row in range(rows, columns):
            store(logsumexp, row, compute(math.inf))
            store(delta, row, 0.0)

    @njit
    def load_rows(
        parameters, queries, grad_outputs, logsumexp, delta,
        batch, head, query_start, rows, columns,
    ):  # fmt: skip
        query = row_of(parameters, "query", batch, head, query_start)
        grad_output = row_of(parameters, "grad_output", batch, head, query_start)
        transpose(
            queries, query, parameters.query_row_stride, parameters.query_column_stride,
            rows, parameters.head_dim, columns,
        )  # fmt: skip
        transpose(
            grad_outputs, grad_output,
            parameters.grad_output_row_stride, parameters.grad_output_column_stride,
            rows, parameters.value_dim, columns,
        )  # fmt: skip
        load_statistics(parameters, logsumexp, delta, batch, head, query_start, rows, columns)

    return load_rows


@functools.cache
def weights_of(dtype: str) -> Callable:
    """The function that recomputes a tile's weights P and the gradient of its scores dS.

    ``weights_tile(parameters, weights, grad_scores, bias, keys, key_row, key_column, values,
    value_row, value_column, queries, grad_outputs, logsumexp, delta, batch, head, query_start,
    key_start, rows, columns, count)``: P = exp(S - logsumexp) and dS = P * (V dO - delta), where S
    is the score after scale, bias and masks; P and dS are zero for padded queries.
    """
    LANES = lanes_of(compute_dtype(dtype))  # noqa: N806
    matmul, scores_tile = matmul_of(compute_dtype(dtype)), scores_of(dtype)

    @njit
    def exponentials(weights, grad_scores, logsumexp, delta, columns, count):
        for key in range(count):
            for column in range(0, columns, LANES):
                index = key * QUERY_BLOCK + column
                score = load_vector(weights, index, LANES)
                weight = exp(score - load_vector(logsumexp, column, LANES))
                grad = load_vector(grad_scores, index, LANES) - load_vector(delta, column, LANES)
                store(weights, index, weight)
                store(grad_scores, index, weight * grad)

    @njit
    def weights_tile(
        parameters, weights, grad_scores, bias,
        keys, key_row, key_column, values, value_row, value_column,
        queries, grad_outputs, logsumexp, delta,
        batch, head, query_start, key_start, rows, columns, count,
    ):  # fmt: skip
        scores_tile(
            parameters, weights, bias, keys, key_row, key_column, queries,
            batch, head, query_start, key_start, rows, columns, count,
        )  # fmt: skip
        matmul(
            grad_scores, QUERY_BLOCK, values, value_row, value_column,
            grad_outputs, QUERY_BLOCK, count, columns, parameters.value_dim, False,
        )  # fmt: skip
        exponentials(weights, grad_scores, logsumexp, delta, columns, count)

    return weights_tile
