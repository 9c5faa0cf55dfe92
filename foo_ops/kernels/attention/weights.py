"""What the backward kernels of attention share: a tile's weights and the gradient of its scores."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention.operands import products_of, sizes_of, steps_of
from foo_ops.kernels.attention.parameters import LOG2, TILE_STRIDE, compute_dtype
from foo_ops.kernels.attention.row_sums import needs_row_sums, row_sums_of
from foo_ops.kernels.attention.rows import copy_row_of, fill_of, queries_of, round_up
from foo_ops.kernels.attention.scores import kept_of, scores_of
from foo_ops.kernels.vectors.arithmetic import fma, less, select, splat
from foo_ops.kernels.vectors.elements import ELEMENTS, lanes_of
from foo_ops.kernels.vectors.functions import exp2
from foo_ops.kernels.vectors.memory import load, load_vector, shift, store
from foo_ops.kernels.vectors.register_tiles import tile_dot, tile_store_sums, tile_zero
from foo_ops.kernels.vectors.struct import row_of


@functools.cache
def statistics_of(dtype: str) -> Callable:
    """``load_statistics(parameters, piece, grad_outputs, stride, width, scratch, base, shares,
    delta, columns)``.

    For each query of a block delta = sum(grad_output * output) - grad_logsumexp, and what makes a
    weight of a score: shares * 2^(score - base), in units of log 2. The base is the logsumexp and
    the shares are 1, but for what rounds it in these units; or, where the logarithm of the sum
    would be lost beside large scores, the base is the largest score and the shares are
    1 / sum(2^(score - base)). ``grad_outputs`` are rows of ``width``, which is a multiple of the
    lanes; scratch has room for one more.
    """
    compute, scalar = compute_dtype(dtype), ELEMENTS[dtype].compute
    LANES = lanes_of(compute)  # noqa: N806
    copy_row, fill = copy_row_of(compute), fill_of(compute)
    may_stay = dtype == compute

    @njit
    def output_row(parameters, piece, scratch, head, query, width):
        """A row of ``width``: itself, if it is, or a copy with zeros behind it."""
        row = row_of(parameters, "output", piece.batch, head, query)
        columns, column_stride = parameters.value_dim, parameters.output_column_stride
        if may_stay and column_stride == 1 and columns == width:
            return row
        copy_row(scratch, row, column_stride, columns, width)
        return scratch

    @njit
    def store_product(target, first, second, width):
        """The sum of the products of two rows."""
        sum_ = tile_zero(target, 1, 1, LANES)
        for column in range(0, width, LANES):
            sum_ = tile_dot(sum_, shift(first, column), 0, shift(second, column), 0)
        tile_store_sums(sum_, target, 0)

    @njit
    def store_base(parameters, piece, logsumexp, base, shares, lane):
        slot = piece.statistics
        if slot < 0:
            in_float64 = logsumexp / LOG2
            rounded = scalar(in_float64)
            store(base, lane, rounded)
            store(shares, lane, exp2(scalar(rounded - in_float64)))
            return
        store(base, lane, load(row_of(parameters, "partial_largest", 0, slot, lane), 0))
        total = load(row_of(parameters, "partial_total", 0, slot, lane), 0)
        store(shares, lane, scalar(1.0) / total)

    @njit
    def load_statistics(
        parameters, piece, grad_outputs, stride, width, scratch, base, shares, delta, columns
    ):
        # Unused lanes keep a base of infinity, and so weights of zero.
        fill(base, columns, math.inf)
        fill(shares, columns, 1.0)
        fill(delta, columns, 0.0)
        for head in range(piece.heads):
            for row in range(piece.query_count):
                query = piece.query_offset + piece.query_start + row
                lane = head * piece.query_count + row
                index = piece.head + head
                saved = load(row_of(parameters, "logsumexp", piece.batch, index, query), 0)
                grad = load(row_of(parameters, "grad_logsumexp", piece.batch, index, query), 0)
                # A query that sees nothing has a logsumexp of -infinity and no weights, too.
                if saved != -math.inf:
                    store_base(parameters, piece, saved, base, shares, lane)
                output = output_row(parameters, piece, scratch, index, query, width)
                store_product(shift(delta, lane), output, shift(grad_outputs, lane * stride), width)
                store(delta, lane, load(delta, lane) - grad)

    return load_statistics


@functools.cache
def weights_of(dtype: str, has_options: bool) -> Callable:
    """``weights_tile(parameters, piece, lanes, weights, grad_scores, kept, slopes, keys, values,
    queries, grad_outputs, are_small, base, shares, delta, row_sums, key_start, first_column,
    columns, count)``, for a panel from first_column on.

    Recomputes a tile's weights P = exp(S - logsumexp) and the gradient of its scores
    dS = P * (V dO - delta), where S is the score with bias and masks; both are zero for unused
    lanes. See statistics_of for base, shares and delta. With dropout the weights and V dO are
    multiplied by what it keeps. ``kept`` and ``slopes`` have room for a tile; see modify_of for
    what is in slopes, and foo_ops/kernels/attention/row_sums.py for row_sums, which a tile adds to.
    """
    scalar = ELEMENTS[dtype].compute
    LANES = lanes_of(compute_dtype(dtype))  # noqa: N806
    (matmul, _, _), scores_tile = products_of(dtype), scores_of(dtype, has_options, True)
    load_kept, (_, add_row_sums) = kept_of(dtype), row_sums_of(dtype)
    steps, ROWS = steps_of(dtype), sizes_of(dtype).rows  # noqa: N806

    @njit
    def drop(parameters, weights, grad_scores, kept, columns, count):
        scale = splat(scalar(parameters.kept_scale), LANES)
        for key in range(count):
            for column in range(0, columns, LANES):
                index = key * TILE_STRIDE + column
                factor = load_vector(kept, index, LANES) * scale
                store(kept, index, load_vector(weights, index, LANES) * factor)
                store(grad_scores, index, load_vector(grad_scores, index, LANES) * factor)

    @njit
    def limited(exponent):
        """A weight is 1 at most, also for scores near 1e10, whose roundings are hundreds."""
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
    def copy_tile(target, source, columns, count):
        for key in range(count):
            for column in range(0, columns, LANES):
                index = key * TILE_STRIDE + column
                store(target, index, load_vector(source, index, LANES))

    @njit
    def weights_tile(
        parameters, piece, lanes, weights, grad_scores, kept, slopes, keys, values,
        queries, grad_outputs, are_small, base, shares, delta, row_sums, key_start, first_column,
        columns, count,
    ):  # fmt: skip
        first_query, query_count = queries_of(piece, first_column, columns)
        weights, grad_scores = shift(weights, first_column), shift(grad_scores, first_column)
        kept, slopes = shift(kept, first_column), shift(slopes, first_column)
        scores_tile(
            parameters, piece, shift(lanes, first_column), weights, kept, slopes,
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
            load_kept(parameters, lanes, kept, key_start, first_column, columns, count)
            drop(parameters, weights, grad_scores, kept, columns, count)
        multiply_weights(weights, grad_scores, shift(delta, first_column), columns, count)
        if needs_row_sums(parameters):
            add_row_sums(
                parameters, piece, shift(lanes, first_column), weights, grad_scores,
                shift(row_sums, first_column), key_start, columns, count,
            )  # fmt: skip
        if has_options and parameters.dropout_threshold > 0:
            copy_tile(weights, kept, columns, count)

    return weights_tile
