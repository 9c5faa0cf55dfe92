"""The online softmax, and for the backward pass a tile's weights and the sums over a row's keys."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention.operands import (
    GRADIENT_ADDED,
    KEY_BLOCK,
    LOG2,
    TILE_STRIDE,
    lowest_score,
    make_pairs_storer,
    make_tile_operation,
    queries_of,
    second,
)
from foo_ops.kernels.attention.scores import (
    LIMB_GROUP,
    POSITIONS,
    make_dropout_mask,
    make_scores,
)
from foo_ops.kernels.lang.scratch import row_of
from foo_ops.kernels.math.exponential import exp2
from foo_ops.kernels.products.limbs import GROUP_ELEMENTS, limbs_of
from foo_ops.kernels.products.operands import make_products, make_step_counter, sizes_of
from foo_ops.kernels.simd.arithmetic import absolute, any_lane, fma, less, maximum, select, splat
from foo_ops.kernels.simd.memory import address_of, load, load_vector, pointer_to, shift, store
from foo_ops.kernels.simd.narrow import PAIRS, bfloat16_limb, pack_limbs, store_halves
from foo_ops.kernels.simd.register_tiles import tile_dot, tile_store_sums, tile_zero
from foo_ops.kernels.simd.transpose import make_copy_row, make_fill, round_up
from foo_ops.kernels.simd.types import ELEMENTS, compute_dtype, lanes_of

# ----------------------------------------------------------------------------------- online softmax

# The online softmax.
#
# With the maximum m and the sum l of 2^(score - m) so far, a tile with maximum m' turns l into l *
# 2^(m - max(m, m')) plus the tile's sum; the unnormalised output is rescaled by the same factor
# (Milakov and Gimelshein 2018; Dao et al. 2022, algorithm 1). Scores and maxima are in units of
# log 2 here.


WEIGHTS_LIMB_STRIDE = KEY_BLOCK // 2 * TILE_STRIDE


@functools.cache
def make_sink_score(dtype: str) -> Callable:
    """Make ``sink_score(parameters, batch, head)``: in units of log 2, rounded as other scores."""
    compute = ELEMENTS[dtype].compute
    LOWEST, LOG2E = lowest_score(dtype), 1.0 / LOG2

    @njit
    def sink_score(parameters, batch, head):
        sink = load(row_of(parameters, "sinks", batch, head, 0), 0)
        if compute(-math.inf) < sink < compute(LOWEST):
            sink = compute(LOWEST)
        elif compute(-LOWEST) < sink < compute(math.inf):
            sink = compute(-LOWEST)
        return sink * compute(LOG2E)

    return sink_score


@functools.cache
def make_softmax_start(dtype: str) -> Callable:
    """Make ``start_softmax(parameters, piece, largest, total, columns)``, called before any tile.

    The first split of the keys starts with the sink as a score seen already.
    """
    fill, sink_score = make_fill(compute_dtype(dtype)), make_sink_score(dtype)
    compute = ELEMENTS[dtype].compute

    @njit
    def start_softmax(parameters, piece, largest, total, columns):
        fill(largest, columns, -math.inf)
        fill(total, columns, 0.0)
        if parameters.has_sinks and piece.key_split == 0:
            for index in range(piece.heads):
                sink = sink_score(parameters, piece.batch, piece.head + index)
                if sink != compute(-math.inf):
                    first = index * piece.query_count
                    fill(shift(largest, first), piece.query_count, sink)
                    # The maximum's comparisons drop a NaN, so the sum carries it.
                    fill(shift(total, first), piece.query_count, 1.0 if sink == sink else sink)

    return start_softmax


@functools.cache
def _make_maxima(dtype: str) -> tuple[Callable, Callable]:
    """Make ``update_maxima`` and ``offset_of``.

    ``update_maxima(scores, largest, total, correction, factor, columns, count)`` takes a tile's
    scores into account, and returns whether a maximum grew: see `make_online_softmax`.
    ``offset_of(largest, column)`` is added to scores before the exponential.
    """
    compute = ELEMENTS[dtype].compute
    LANES, fill = lanes_of(compute_dtype(dtype)), make_fill(compute_dtype(dtype))

    @njit
    def largest_of_tile(scores, column, count):
        # Four chains: with two, an Intel waits for each maximum's latency of 4 cycles, and needs 2
        # cycles for a vector instead of 1 (by the model of ports).
        first = splat(compute(-math.inf), LANES)
        second, third, fourth = first, first, first
        for key in range(0, count, 4):
            index = key * TILE_STRIDE + column
            first = maximum(load_vector(scores, index, LANES), first)
            second = maximum(load_vector(scores, index + TILE_STRIDE, LANES), second)
            third = maximum(load_vector(scores, index + 2 * TILE_STRIDE, LANES), third)
            fourth = maximum(load_vector(scores, index + 3 * TILE_STRIDE, LANES), fourth)
        return maximum(maximum(first, second), maximum(third, fourth))

    @njit
    def base_of(largest, lowest, zero):
        # A query that has seen no key yet has the maximum -infinity: any finite base will do.
        return select(less(lowest, largest), largest, zero)

    @njit
    def offset_of(largest, column):
        zero, lowest = splat(compute(0.0), LANES), splat(compute(-math.inf), LANES)
        return zero - base_of(load_vector(largest, column, LANES), lowest, zero)

    @njit
    def grow(largest, total, correction, column, top):
        """Update the running maximum with ``top``; return whether a maximum grew."""
        zero, lowest = splat(compute(0.0), LANES), splat(compute(-math.inf), LANES)
        before = load_vector(largest, column, LANES)
        after = maximum(top, before)
        # For an infinite maximum that does not grow, the difference would be NaN.
        grown = select(less(before, after), before - base_of(after, lowest, zero), zero)
        scaled = exp2(grown)
        store(largest, column, after)
        store(total, column, load_vector(total, column, LANES) * scaled)
        store(correction, column, scaled)
        return any_lane(less(before, after))

    @njit
    def update_maxima(scores, largest, total, correction, factor, columns, count):
        # Maxima take four keys at a time, and pairs two.
        for key in range(count, round_up(count, 4)):
            fill(shift(scores, key * TILE_STRIDE), columns, -math.inf)
        for column in range(0, columns, LANES):
            store(correction, column, largest_of_tile(scores, column, count) * factor)
        grew = False
        for column in range(0, columns, LANES):
            top = load_vector(correction, column, LANES)
            grew = grow(largest, total, correction, column, top) or grew
        return grew

    return update_maxima, offset_of


@functools.cache
def make_online_softmax(dtype: str, weights_dtype: str, has_options: bool) -> Callable:
    """Make the function that turns a tile of scores into weights 2^(factor * score - largest).

    ``online_softmax(parameters, scores, dropout_mask, weights, largest, total, correction, columns,
    count)`` updates largest and total, and multiplies the weights by the dropout mask if there is
    one. Weights of dtype bfloat16x2 are pairs of neighbouring keys, padded with zeros to the steps
    of a product, with limbs WEIGHTS_LIMB_STRIDE apart. Returns whether a maximum grew; the output
    must then be multiplied by ``correction``.
    """
    compute = ELEMENTS[dtype].compute
    LANES = lanes_of(compute_dtype(dtype))
    fill = make_fill(compute_dtype(dtype))
    as_weights = pointer_to(weights_dtype)
    packs, steps, LIMBS = weights_dtype == PAIRS, make_step_counter(dtype), limbs_of(dtype)
    store_pairs, (update_maxima, offset_of) = make_pairs_storer(dtype), _make_maxima(dtype)

    def make_exponentials(has_dropout: bool) -> Callable:
        """Make a loop without a branch on dropout, which keeps more constants in registers."""

        @njit
        def exponential(scores, dropout_mask, index, factor, offset):
            """Return the exponential, before and after dropout."""
            score = load_vector(scores, index, LANES)
            # No fma: the product must be rounded like the maximum. For scores near 1e10 a
            # difference of hundreds would remain, and 2^x overflow.
            value = exp2(score * factor + offset)
            if has_dropout:
                return value, value * load_vector(dropout_mask, index, LANES)
            return value, value

        @njit
        def exponentials(scores, dropout_mask, weights, largest, total, column, count, factor):
            offset = offset_of(largest, column)
            # Sum the tile first: adding each weight to the total would round it to the total's
            # precision.
            sum_ = splat(compute(0.0), LANES)
            if packs:
                pairs = as_weights(address_of(weights))
                for key in range(0, count, 2):
                    index = key * TILE_STRIDE + column
                    first, left = exponential(scores, dropout_mask, index, factor, offset)
                    index += TILE_STRIDE
                    second, right = exponential(scores, dropout_mask, index, factor, offset)
                    sum_ = sum_ + (first + second)
                    store_pairs(
                        pairs, key // 2 * TILE_STRIDE + column, WEIGHTS_LIMB_STRIDE, left, right
                    )
            else:
                for key in range(count):
                    index = key * TILE_STRIDE + column
                    value, left = exponential(scores, dropout_mask, index, factor, offset)
                    sum_ = sum_ + value
                    store(weights, index, left)
            store(total, column, load_vector(total, column, LANES) + sum_)

        return exponentials

    exponentials, exponentials_with_dropout = make_exponentials(False), make_exponentials(True)

    @njit
    def online_softmax(
        parameters, scores, dropout_mask, weights, largest, total, correction, columns, count
    ):
        factor = splat(compute(parameters.factor), LANES)
        # With loops of their own, the processor overlaps the exponentials of neighbouring columns:
        # 7 cycles a vector; 10 in one loop.
        grew = update_maxima(scores, largest, total, correction, factor, columns, count)
        for column in range(0, columns, LANES):
            if has_options and parameters.dropout_threshold > 0:
                exponentials_with_dropout(
                    scores, dropout_mask, weights, largest, total, column, count, factor
                )
            else:
                exponentials(scores, dropout_mask, weights, largest, total, column, count, factor)
        if packs:
            for number in range(LIMBS):
                for step in range((count + 1) // 2, steps(count)):
                    fill(
                        shift(weights, number * WEIGHTS_LIMB_STRIDE + step * TILE_STRIDE),
                        columns,
                        0.0,
                    )
        return grew

    return online_softmax


@functools.cache
def make_rescale(dtype: str) -> Callable:
    """Make ``rescale(sums, stride, factors, rows, columns)``: multiply columns by their factors."""
    LANES = lanes_of(compute_dtype(dtype))

    @njit
    def rescale(sums, stride, factors, rows, columns):
        for row in range(rows):
            for column in range(0, columns, LANES):
                index = row * stride + column
                product = load_vector(sums, index, LANES) * load_vector(factors, column, LANES)
                store(sums, index, product)

    return rescale


# ------------------------------------------------------------------------------- exact sums of rows

# Gradients that are sums over a row's keys, corrected for the rounding error of the row's delta.
#
# The gradient of a row's scores is dS = P * (dP - delta), where delta comes from the stored output.
# The rounding error e of delta is in each dS as P * e, and a sum over the keys accumulates it: a
# bias for the whole row gets e instead of zero, and a slope gets e times the distance of the keys,
# which may be thousands although their distances differ by few. Let R be the sum of dS, S the sum
# of P and w the weight of the sink. An output that was not rounded would give delta':
#
#     D = sum(P dP) = R + delta S,    delta' = D - dLogsumexp
#
# and so
#
#     sum(dS)            = w D + S dLogsumexp
#     sum(dS distance)   = sum(dS far) + (delta - delta') sum(P far) + nearest sum(dS)
#     gradient of a sink = -w delta'
#
# where far = distance - nearest, for the nearest key that a block of queries sees. S + w is 1 up to
# the rounding of the logsumexp, so P and dS are divided by S + w. A call on part of the keys
# (`is_part`) does not know S and R: its sums are of dS, uncorrected.


# Rows of sums, one number for each query: dS, P, and both times ``far``.
GRADS, WEIGHTS, FAR_GRADS, FAR_WEIGHTS = (row * TILE_STRIDE for row in range(4))
SUM_ROWS = 4


@njit
def adds_row_sums(parameters):
    """Whether to compute the gradient of a bias that is the same for all keys."""
    return parameters.bias_gradient == GRADIENT_ADDED and parameters.bias_columns == 1


@njit
def needs_row_sums(parameters):
    has_sums = parameters.has_sinks != 0 or parameters.has_alibi_slopes != 0
    return has_sums or adds_row_sums(parameters)


@njit
def nearest_distance(piece):
    """A lower bound of the distance to the nearest key that the queries of a block see."""
    first = piece.query_start + piece.alignment
    last = first + piece.query_count - 1
    most_behind = min(last - piece.key_start, piece.alignment - piece.first_visible)
    least_behind = max(first - piece.key_stop + 1, piece.alignment - piece.last_visible)
    return max(0, least_behind, -most_behind)


@functools.cache
def make_row_sums(dtype: str) -> tuple[Callable, Callable]:
    """Make the functions that zero the row sums and add a panel of a tile to them.

    They are called as ``start_row_sums(sums)`` and ``add_row_sums(parameters, piece, row_facts,
    weights, grad_scores, sums, key_start, columns, count)``.
    """
    compute = ELEMENTS[dtype].compute
    LANES, fill = lanes_of(compute_dtype(dtype)), make_fill(compute_dtype(dtype))

    @njit
    def start_row_sums(sums):
        fill(sums, SUM_ROWS * TILE_STRIDE, 0.0)

    @njit
    def add(sums, index, vector):
        store(sums, index, load_vector(sums, index, LANES) + vector)

    @njit
    def add_near(weights, grad_scores, sums, columns, count):
        zero = splat(compute(0.0), LANES)
        for column in range(0, columns, LANES):
            grads, total = zero, zero
            for key in range(count):
                index = key * TILE_STRIDE + column
                grads = grads + load_vector(grad_scores, index, LANES)
                total = total + load_vector(weights, index, LANES)
            add(sums, GRADS + column, grads)
            add(sums, WEIGHTS + column, total)

    @njit
    def add_far(row_facts, weights, grad_scores, sums, first_distance, nearest, columns, count):
        """Add the sums times ``far``.

        ``first_distance`` is from the block's first query to the tile's first key.
        """
        zero, shortest = splat(compute(0.0), LANES), splat(compute(nearest), LANES)
        for column in range(0, columns, LANES):
            position = load_vector(row_facts, POSITIONS + column, LANES)
            grads, total = zero, zero
            for key in range(count):
                offset = splat(compute(first_distance - key), LANES)
                far = absolute(position + offset) - shortest
                index = key * TILE_STRIDE + column
                grads = fma(load_vector(grad_scores, index, LANES), far, grads)
                total = fma(load_vector(weights, index, LANES), far, total)
            add(sums, FAR_GRADS + column, grads)
            add(sums, FAR_WEIGHTS + column, total)

    @njit
    def add_row_sums(
        parameters, piece, row_facts, weights, grad_scores, sums, key_start, columns, count
    ):
        add_near(weights, grad_scores, sums, columns, count)
        if parameters.has_alibi_slopes:
            first_distance = piece.query_start + piece.alignment - key_start
            nearest = nearest_distance(piece)
            add_far(row_facts, weights, grad_scores, sums, first_distance, nearest, columns, count)

    return start_row_sums, add_row_sums


@functools.cache
def make_row_sums_writer(dtype: str) -> Callable:
    """Make the function that writes the gradients of a block's row sums.

    ``write_row_sums(parameters, piece, sums, base, shares, delta)`` adds the block's contribution
    to the gradients of slopes and sinks, and of a bias that is the same for all keys. See
    `make_statistics_loader` for base, shares and delta.
    """
    compute, sink_score = ELEMENTS[dtype].compute, make_sink_score(dtype)
    as_sums = pointer_to(compute_dtype(dtype))

    @njit
    def write_row_sums(parameters, piece, sums, base, shares, delta):
        nearest = compute(nearest_distance(piece))
        adds_rows = adds_row_sums(parameters)
        bias = shift(as_sums(address_of(parameters.grad_attn_bias)), piece.bias)
        for index in range(piece.heads):
            head = piece.head + index
            slope_total, sink_total = compute(0.0), compute(0.0)
            for row in range(piece.query_count):
                block_row, query = index * piece.query_count + row, piece.query_start + row
                grad = row_of(
                    parameters, "grad_logsumexp", piece.batch, head, piece.query_offset + query
                )
                grad_logsumexp = load(grad, 0)
                grads, weights = load(sums, GRADS + block_row), load(sums, WEIGHTS + block_row)
                of_sink = compute(0.0)
                if parameters.has_sinks:
                    sink = sink_score(parameters, piece.batch, head)
                    of_sink = exp2(sink - load(base, block_row)) * load(shares, block_row)
                if weights + of_sink == compute(0.0):
                    # The query sees no key.
                    continue
                share = compute(1.0)
                if not parameters.is_part:
                    share /= weights + of_sink
                of_sink *= share
                product = (grads + load(delta, block_row) * weights) * share
                exact = product - grad_logsumexp
                row_sum = of_sink * product + weights * share * grad_logsumexp
                if parameters.is_part:
                    exact, row_sum = load(delta, block_row), grads
                far = load(sums, FAR_GRADS + block_row)
                far += (load(delta, block_row) - exact) * load(sums, FAR_WEIGHTS + block_row)
                slope_total -= far * share + nearest * row_sum
                sink_total -= of_sink * exact
                if adds_rows:
                    place = index * parameters.grad_attn_bias_head_stride
                    place += row * parameters.grad_attn_bias_row_stride
                    store(bias, place, load(bias, place) + row_sum)
            if parameters.has_alibi_slopes:
                target = row_of(parameters, "grad_alibi_slopes", piece.batch, head, piece.block)
                store(target, 0, slope_total)
            if parameters.has_sinks:
                target = row_of(parameters, "grad_sinks", piece.batch, head, piece.block)
                store(target, 0, sink_total)

    return write_row_sums


# ------------------------------------------------------------------ weights and gradients of scores

# Recomputes a tile's weights in the backward pass, and the gradient of its scores.


@functools.cache
def make_statistics_loader(dtype: str) -> Callable:
    """Make the function that loads a block's statistics: base, shares and delta of each query.

    ``load_statistics(parameters, piece, grad_outputs, stride, width, scratch, base, shares, delta,
    columns)``. For each query delta = sum(grad_output * output) - grad_logsumexp, and a weight is
    shares * 2^(score - base), in units of log 2. The base is the logsumexp, rounded in these units,
    and the share is 1 except for a correction of this rounding. Where large scores would swallow
    the logarithm of the sum, the base is the largest score and the share is 1 / sum(2^(score -
    base)). ``grad_outputs`` are rows of ``width``, a multiple of the vector's lanes; ``scratch``
    has room for one more.
    """
    compute, scalar = compute_dtype(dtype), ELEMENTS[dtype].compute
    LANES = lanes_of(compute)
    copy_row, fill = make_copy_row(compute), make_fill(compute)
    may_stay = dtype == compute

    @njit
    def output_row(parameters, piece, scratch, head, query, width):
        """Return a row of ``width`` elements: the tensor's own, or a copy padded with zeros."""
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
            sum_ = tile_dot(sum_, shift(first, column), 0, shift(second, column), 0, None)
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
        # Columns without a query keep an infinite base, so their weights are zero.
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
                # A query that sees no key has a logsumexp of -infinity; its weights are zero too.
                if saved != -math.inf:
                    store_base(parameters, piece, saved, base, shares, block_row)
                output = output_row(parameters, piece, scratch, index, query, width)
                store_product(
                    shift(delta, block_row), output, shift(grad_outputs, block_row * stride), width
                )
                store(delta, block_row, load(delta, block_row) - grad)

    return load_statistics


@functools.cache
def _make_limited_exponential(dtype: str) -> Callable:
    """Make ``limited(exponent)``: 2^exponent, at most 1.

    Rounding scores near 1e10 makes exponents of hundreds.
    """
    scalar, LANES = ELEMENTS[dtype].compute, lanes_of(compute_dtype(dtype))

    @njit
    def limited(exponent):
        zero = splat(scalar(0.0), LANES)
        return exp2(select(less(zero, exponent), zero, exponent))

    return limited


@functools.cache
def make_weights(dtype: str, has_options: bool, has_programs: bool) -> Callable:
    """Make the function that recomputes the weights of a panel, from ``first_column`` on.

    ``weights_tile(parameters, piece, row_facts, weights, grad_scores, dropout_mask, slopes, keys,
    values, queries, grad_outputs, are_small, base, shares, delta, row_sums, key_start,
    first_column, columns, count)`` computes the weights P = exp(S - logsumexp) and the gradient of
    the scores dS = P * (V dO - delta), where S is the score with bias and mask; both are zero for
    columns without a query. With dropout the weights and V dO are multiplied by its mask.
    ``dropout_mask`` and ``slopes`` have room for a tile. See `make_statistics_loader` for base,
    shares and delta, `make_score_mod` for slopes, and `make_row_sums` for row_sums, to which the
    panel is added.
    """
    scalar = ELEMENTS[dtype].compute
    LANES = lanes_of(compute_dtype(dtype))
    (matmul, _, _) = make_products(dtype)
    scores_tile = make_scores(dtype, has_options, has_programs, differentiates=True)
    load_dropout_mask, (_, add_row_sums) = make_dropout_mask(dtype), make_row_sums(dtype)
    steps, ROWS = make_step_counter(dtype), sizes_of(dtype).rows
    copy = make_tile_operation(compute_dtype(dtype), second)
    limited = _make_limited_exponential(dtype)

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
                # No fma: the product must be rounded like that of the largest score.
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


@njit
def may_fuse(parameters, piece):
    """Whether `make_weight_matrices` is enough: bases are logsumexps, and no row sums are added."""
    return piece.statistics < 0 and not needs_row_sums(parameters)


@functools.cache
def make_weight_matrices(dtype: str) -> tuple[Callable, Callable]:
    """Make functions that turn scores into matrices for a matrix unit, in one pass and by parts.

    ``weight_matrices(parameters, memory, column, key, stop)`` computes the same as `make_weights`,
    if `may_fuse`, for two vectors of columns and some keys, of which the first is a multiple of 2.
    The tiles ``weights`` and ``grad_scores`` in scratch memory hold scores and products V dO. It
    rounds weights and gradients of the scores to the left matrices ``weight_limbs`` and
    ``score_limbs``, and the gradients also to pairs of keys in ``dropout_mask``, for a right
    matrix: see `make_tile_matrices`. ``pad_pairs(memory, start, columns, count)`` pads these.
    """
    scalar, LANES = ELEMENTS[dtype].compute, lanes_of(compute_dtype(dtype))
    limited, fill = _make_limited_exponential(dtype), make_fill(compute_dtype(dtype))
    as_elements, as_pairs = pointer_to("bfloat16"), pointer_to(PAIRS)
    steps = make_step_counter(dtype)

    @njit
    def pad_pairs(memory, start, columns, count):
        # The key after an odd number is zeros, and so are its products.
        for step in range((count + 1) // 2, steps(count)):
            fill(shift(memory.dropout_mask, step * TILE_STRIDE + start), columns, 0.0)

    @njit
    def weight_and_gradient(memory, index, factor, offset, share, delta):
        weight = limited(fma(load_vector(memory.weights, index, LANES), factor, offset)) * share
        gradient = weight * (load_vector(memory.grad_scores, index, LANES) - delta)
        return bfloat16_limb(weight), bfloat16_limb(gradient)

    @njit
    def weight_matrices(parameters, memory, column, key, stop):
        factor, zero = splat(scalar(parameters.factor), LANES), splat(scalar(0.0), LANES)
        base, shares, deltas = (
            shift(memory.base, column), shift(memory.shares, column), shift(memory.delta, column),
        )  # fmt: skip
        offset = zero - load_vector(base, 0, LANES)
        other_offset = zero - load_vector(base, LANES, LANES)
        share, other_share = load_vector(shares, 0, LANES), load_vector(shares, LANES, LANES)
        delta, other_delta = load_vector(deltas, 0, LANES), load_vector(deltas, LANES, LANES)
        weights, gradients, pairs = (
            as_elements(address_of(memory.weight_limbs)),
            as_elements(address_of(memory.score_limbs)),
            as_pairs(address_of(memory.dropout_mask)),
        )
        group = column // GROUP_ELEMENTS * 2 * LIMB_GROUP + column % GROUP_ELEMENTS
        for upper in range(key, stop, 2):
            index, place = upper * TILE_STRIDE + column, group + upper * GROUP_ELEMENTS
            first, left = weight_and_gradient(memory, index, factor, offset, share, delta)
            second, right = weight_and_gradient(
                memory, index + LANES, factor, other_offset, other_share, other_delta
            )
            store_halves(weights, place, first, second)
            store_halves(gradients, place, left, right)
            index, place = index + TILE_STRIDE, place + GROUP_ELEMENTS
            first, lower_left = weight_and_gradient(memory, index, factor, offset, share, delta)
            second, lower_right = weight_and_gradient(
                memory, index + LANES, factor, other_offset, other_share, other_delta
            )
            store_halves(weights, place, first, second)
            store_halves(gradients, place, lower_left, lower_right)
            line = upper // 2 * TILE_STRIDE + column
            store(pairs, line, pack_limbs(left, lower_left))
            store(pairs, line + LANES, pack_limbs(right, lower_right))

    return weight_matrices, pad_pairs
