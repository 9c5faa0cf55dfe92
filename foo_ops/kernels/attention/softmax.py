"""The online softmax.

With the maximum m and the sum l of 2^(score - m) so far, a tile with maximum m' turns l into l *
2^(m - max(m, m')) plus its own share, and the unnormalised output alike (Milakov and Gimelshein
2018; Dao et al. 2022, algorithm 1). Scores and maxima are in units of log 2 here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention.operands import make_pairs_storer
from foo_ops.kernels.attention.parameters import KEY_BLOCK, LOG2, TILE_STRIDE, lowest_score
from foo_ops.kernels.lang.scratch import row_of
from foo_ops.kernels.math.exponential import exp2
from foo_ops.kernels.products.limbs import limbs_of
from foo_ops.kernels.products.operands import make_step_counter
from foo_ops.kernels.simd.arithmetic import any_lane, less, maximum, select, splat
from foo_ops.kernels.simd.memory import address_of, load, load_vector, pointer_to, shift, store
from foo_ops.kernels.simd.narrow import PAIRS
from foo_ops.kernels.simd.transpose import make_fill
from foo_ops.kernels.simd.types import ELEMENTS, compute_dtype, lanes_of

WEIGHTS_LIMB_STRIDE = KEY_BLOCK // 2 * TILE_STRIDE


@functools.cache
def make_sink_score(dtype: str) -> Callable:
    """Make ``sink_score(parameters, batch, head)``, in units of log 2 and rounded as other scores
    are.
    """
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
    """Make ``start_softmax(parameters, piece, largest, total, columns)``, for before the first
    tile.

    A sink is a score that has been seen already, by the first split of the keys.
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
                    # No number is less or more than NaN, so that the sum has to carry it.
                    fill(shift(total, first), piece.query_count, 1.0 if sink == sink else sink)

    return start_softmax


@functools.cache
def make_online_softmax(dtype: str, weights_dtype: str, has_options: bool) -> Callable:
    """Make the function that turns a tile of scores into weights 2^(factor * score - largest).

    ``online_softmax(parameters, scores, dropout_mask, weights, largest, total, correction, columns,
    count)`` updates largest and total, and multiplies the weights by the dropout mask if there is
    one. Weights of dtype bfloat16x2 are pairs of neighbouring keys, with zeros up to the steps of a
    product and limbs that are WEIGHTS_LIMB_STRIDE apart. Returns whether a maximum grew, so that
    the output has to be multiplied by ``correction``.
    """
    compute = ELEMENTS[dtype].compute
    LANES = lanes_of(compute_dtype(dtype))
    fill = make_fill(compute_dtype(dtype))
    as_weights = pointer_to(weights_dtype)
    packs, steps, LIMBS = weights_dtype == PAIRS, make_step_counter(dtype), limbs_of(dtype)
    store_pairs = make_pairs_storer(dtype)

    @njit
    def largest_of_tile(scores, column, count):
        first = splat(compute(-math.inf), LANES)
        second = first
        for key in range(0, count, 2):
            index = key * TILE_STRIDE + column
            first = maximum(load_vector(scores, index, LANES), first)
            second = maximum(load_vector(scores, index + TILE_STRIDE, LANES), second)
        return maximum(first, second)

    @njit
    def grow(largest, total, correction, column, top):
        """Take ``top`` into the maximum of the scores seen so far. Returns whether a maximum
        grew.
        """
        zero, lowest = splat(compute(0.0), LANES), splat(compute(-math.inf), LANES)
        before = load_vector(largest, column, LANES)
        after = maximum(top, before)
        # The difference would be NaN for an infinite maximum that stays.
        grown = select(less(before, after), before - base_of(after, lowest, zero), zero)
        scaled = exp2(grown)
        store(largest, column, after)
        store(total, column, load_vector(total, column, LANES) * scaled)
        store(correction, column, scaled)
        return any_lane(less(before, after))

    @njit
    def base_of(largest, lowest, zero):
        # A query that has seen nothing yet has the maximum -infinity: any finite number does.
        return select(less(lowest, largest), largest, zero)

    def make_exponentials(has_dropout: bool) -> Callable:
        """Make a loop without a branch, which keeps more of its constants in registers."""

        @njit
        def exponential(scores, dropout_mask, index, factor, offset):
            """Return the exponential, and what dropout leaves of it."""
            score = load_vector(scores, index, LANES)
            # The product is rounded as the maximum is, which fma would not do: of scores near
            # 1e10 a difference of hundreds would remain, and 2^x overflow.
            value = exp2(score * factor + offset)
            if has_dropout:
                return value, value * load_vector(dropout_mask, index, LANES)
            return value, value

        @njit
        def exponentials(scores, dropout_mask, weights, largest, total, column, count, factor):
            zero, lowest = splat(compute(0.0), LANES), splat(compute(-math.inf), LANES)
            offset = zero - base_of(load_vector(largest, column, LANES), lowest, zero)
            # One sum of all keys would round each weight to the digits of the total: this is the
            # sum of the tile.
            sum_ = zero
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
        # Maxima, and pairs, are taken of two keys at a time.
        if count % 2 == 1:
            fill(shift(scores, count * TILE_STRIDE), columns, -math.inf)
        # Three loops, since the processor then begins with a column's exponentials before it is
        # done with those of the column before: 7 cycles a vector, and 10 in one loop.
        for column in range(0, columns, LANES):
            store(correction, column, largest_of_tile(scores, column, count) * factor)
        grew = False
        for column in range(0, columns, LANES):
            top = load_vector(correction, column, LANES)
            grew = grow(largest, total, correction, column, top) or grew
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
