"""Recompute a tile's weights in the backward pass, and the gradient of its scores."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention.parameters import LOG2, TILE_STRIDE
from foo_ops.kernels.attention.row_sums import make_row_sums, needs_row_sums
from foo_ops.kernels.attention.rows import make_tile_operation, queries_of, second
from foo_ops.kernels.attention.scores import make_dropout_mask, make_scores
from foo_ops.kernels.lang.scratch import row_of
from foo_ops.kernels.math.exponential import exp2
from foo_ops.kernels.products.operands import make_products, make_step_counter, sizes_of
from foo_ops.kernels.simd.arithmetic import fma, less, select, splat
from foo_ops.kernels.simd.memory import load, load_vector, shift, store
from foo_ops.kernels.simd.register_tiles import tile_dot, tile_store_sums, tile_zero
from foo_ops.kernels.simd.transpose import make_copy_row, make_fill, round_up
from foo_ops.kernels.simd.types import ELEMENTS, compute_dtype, lanes_of


@functools.cache
def make_statistics_loader(dtype: str) -> Callable:
    """Make the function that loads what a block's weights are computed from.

    ``load_statistics(parameters, piece, grad_outputs, stride, width, scratch, base, shares, delta,
    columns)``. For each query delta = sum(grad_output * output) - grad_logsumexp, and a weight is
    shares * 2^(score - base), in units of log 2. The base is the logsumexp and the shares are 1,
    but for its rounding in these units. Where the logarithm of the sum would be lost beside large
    scores, the base is the largest score and the shares are 1 / sum(2^(score - base)).
    ``grad_outputs`` are rows of ``width``, a multiple of the vector's lanes; ``scratch`` has room
    for one more.
    """
    compute, scalar = compute_dtype(dtype), ELEMENTS[dtype].compute
    LANES = lanes_of(compute)
    copy_row, fill = make_copy_row(compute), make_fill(compute)
    may_stay = dtype == compute

    @njit
    def output_row(parameters, piece, scratch, head, query, width):
        """Return a row of ``width``: itself, if it is that long, or a copy with zeros behind it."""
        row = row_of(parameters, "output", piece.batch, head, query)
        columns, column_stride = parameters.value_dim, parameters.output_column_stride
        if may_stay and column_stride == 1 and columns == width:
            return row
        copy_row(scratch, row, column_stride, columns, width)
        return scratch

    @njit
    def store_product(target, first, second, width):
        """Store the sum of the products of two rows."""
        sum_ = tile_zero(target, 1, 1, LANES)
        for column in range(0, width, LANES):
            sum_ = tile_dot(sum_, shift(first, column), 0, shift(second, column), 0)
        tile_store_sums(sum_, target, 0)

    @njit
    def store_base(parameters, piece, logsumexp, base, shares, block_row):
        slot = piece.statistics
        if slot < 0:
            in_float64 = logsumexp / LOG2
            rounded = scalar(in_float64)
            store(base, block_row, rounded)
            store(shares, block_row, exp2(scalar(rounded - in_float64)))
            return
        store(base, block_row, load(row_of(parameters, "partial_largest", 0, slot, block_row), 0))
        total = load(row_of(parameters, "partial_total", 0, slot, block_row), 0)
        store(shares, block_row, scalar(1.0) / total)

    @njit
    def load_statistics(
        parameters, piece, grad_outputs, stride, width, scratch, base, shares, delta, columns
    ):
        # Columns without a query keep a base of infinity, and so weights of zero.
        fill(base, columns, math.inf)
        fill(shares, columns, 1.0)
        fill(delta, columns, 0.0)
        for head in range(piece.heads):
            for row in range(piece.query_count):
                query = piece.query_offset + piece.query_start + row
                block_row = head * piece.query_count + row
                index = piece.head + head
                saved = load(row_of(parameters, "logsumexp", piece.batch, index, query), 0)
                grad = load(row_of(parameters, "grad_logsumexp", piece.batch, index, query), 0)
                # A query that sees nothing has a logsumexp of -infinity and no weights, too.
                if saved != -math.inf:
                    store_base(parameters, piece, saved, base, shares, block_row)
                output = output_row(parameters, piece, scratch, index, query, width)
                store_product(
                    shift(delta, block_row), output, shift(grad_outputs, block_row * stride), width
                )
                store(delta, block_row, load(delta, block_row) - grad)

    return load_statistics


@functools.cache
def make_weights(dtype: str, has_options: bool, has_programs: bool) -> Callable:
    """Make the function that recomputes a panel of a tile, from ``first_column`` on.

    ``weights_tile(parameters, piece, row_facts, weights, grad_scores, dropout_mask, slopes, keys,
    values, queries, grad_outputs, are_small, base, shares, delta, row_sums, key_start,
    first_column, columns, count)`` computes the weights P = exp(S - logsumexp) and the gradient of
    the scores dS = P * (V dO - delta), where S is the score with bias and mask; both are zero for
    columns without a query. With dropout the weights and V dO are multiplied by its mask.
    ``dropout_mask`` and ``slopes`` have room for a tile. See `make_statistics_loader` for base,
    shares and delta, `make_score_mod` for slopes, and foo_ops/kernels/attention/row_sums.py for
    row_sums, which a tile adds to.
    """
    scalar = ELEMENTS[dtype].compute
    LANES = lanes_of(compute_dtype(dtype))
    (matmul, _, _) = make_products(dtype)
    scores_tile = make_scores(dtype, has_options, has_programs, differentiates=True)
    load_dropout_mask, (_, add_row_sums) = make_dropout_mask(dtype), make_row_sums(dtype)
    steps, ROWS = make_step_counter(dtype), sizes_of(dtype).rows
    copy = make_tile_operation(compute_dtype(dtype), second)

    @njit
    def drop(parameters, weights, grad_scores, dropout_mask, columns, count):
        scale = splat(scalar(parameters.dropout_scale), LANES)
        for key in range(count):
            for column in range(0, columns, LANES):
                index = key * TILE_STRIDE + column
                factor = load_vector(dropout_mask, index, LANES) * scale
                store(dropout_mask, index, load_vector(weights, index, LANES) * factor)
                store(grad_scores, index, load_vector(grad_scores, index, LANES) * factor)

    @njit
    def limited(exponent):
        """Limit a weight to 1, which roundings of scores near 1e10 exceed by hundreds."""
        zero = splat(scalar(0.0), LANES)
        return exp2(select(less(zero, exponent), zero, exponent))

    @njit
    def exponentials(parameters, weights, base, shares, columns, count):
        factor, zero = splat(scalar(parameters.factor), LANES), splat(scalar(0.0), LANES)
        for column in range(0, columns, LANES):
            offset = zero - load_vector(base, column, LANES)
            share = load_vector(shares, column, LANES)
            for key in range(count):
                index = key * TILE_STRIDE + column
                exponent = fma(load_vector(weights, index, LANES), factor, offset)
                store(weights, index, limited(exponent) * share)

    @njit
    def shares_of_sums(parameters, weights, base, shares, columns, count):
        factor = splat(scalar(parameters.factor), LANES)
        for column in range(0, columns, LANES):
            largest, share = load_vector(base, column, LANES), load_vector(shares, column, LANES)
            for key in range(count):
                index = key * TILE_STRIDE + column
                # The product is rounded as that of the largest score is, which fma would not do.
                exponent = load_vector(weights, index, LANES) * factor - largest
                store(weights, index, limited(exponent) * share)

    @njit
    def multiply_weights(weights, grad_scores, delta, columns, count):
        for column in range(0, columns, LANES):
            deltas = load_vector(delta, column, LANES)
            for key in range(count):
                index = key * TILE_STRIDE + column
                grad = load_vector(grad_scores, index, LANES) - deltas
                store(grad_scores, index, load_vector(weights, index, LANES) * grad)

    @njit
    def weights_tile(
        parameters, piece, row_facts, weights, grad_scores, dropout_mask, slopes, keys, values,
        queries, grad_outputs, are_small, base, shares, delta, row_sums, key_start, first_column,
        columns, count,
    ):  # fmt: skip
        first_query, query_count = queries_of(piece, first_column, columns)
        weights, grad_scores = shift(weights, first_column), shift(grad_scores, first_column)
        dropout_mask, slopes = shift(dropout_mask, first_column), shift(slopes, first_column)
        scores_tile(
            parameters, piece, shift(row_facts, first_column), weights, dropout_mask, slopes,
            keys, queries, are_small, first_query, query_count, key_start, columns, count,
        )  # fmt: skip
        matmul(
            grad_scores, TILE_STRIDE, values, grad_outputs, round_up(count, ROWS), columns,
            steps(parameters.value_dim), False, are_small,
        )  # fmt: skip
        base, shares = shift(base, first_column), shift(shares, first_column)
        if piece.statistics < 0:
            exponentials(parameters, weights, base, shares, columns, count)
        else:
            shares_of_sums(parameters, weights, base, shares, columns, count)
        if has_options and parameters.dropout_threshold > 0:
            load_dropout_mask(
                parameters, row_facts, dropout_mask, key_start, first_column, columns, count
            )
            drop(parameters, weights, grad_scores, dropout_mask, columns, count)
        multiply_weights(weights, grad_scores, shift(delta, first_column), columns, count)
        if needs_row_sums(parameters):
            add_row_sums(
                parameters, piece, shift(row_facts, first_column), weights, grad_scores,
                shift(row_sums, first_column), key_start, columns, count,
            )  # fmt: skip
        if has_options and parameters.dropout_threshold > 0:
            copy(weights, dropout_mask, columns, count)

    return weights_tile
