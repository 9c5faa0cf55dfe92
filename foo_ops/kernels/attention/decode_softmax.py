"""The online softmax of few queries: of each key there are less scores than a vector has lanes."""

from __future__ import annotations

import math
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention.parameters import TILE_STRIDE
from foo_ops.kernels.math.exponential import exp2
from foo_ops.kernels.simd.arithmetic import less, maximum, select, splat
from foo_ops.kernels.simd.memory import (
    address_of,
    load_pieces,
    load_vector,
    pointer_to,
    shift,
    store,
)
from foo_ops.kernels.simd.narrow import PAIRS, pack_pairs
from foo_ops.kernels.simd.transpose import make_fill, round_up
from foo_ops.kernels.simd.types import ELEMENTS, compute_dtype, lanes_of


def make_decode_softmax(dtype: str, in_products: str, has_options: bool, ROWS: int) -> Callable:
    """Make the function that turns ``ROWS`` columns of a tile of scores into weights.

    ``softmax(parameters, scores, dropout_mask, weights, line, largest, total, correction, count)``
    does as `foo_ops.kernels.attention.softmax.make_online_softmax`. But the weights of a key follow
    those of the key before, or, if ``in_products`` is pairs, those of each two keys as pairs: so
    vectors are full, where rows of the tile have ``ROWS`` numbers of theirs. Weights behind the
    last are 0. ``line`` has room for two vectors.
    """
    scalar, LANES = ELEMENTS[dtype].compute, lanes_of(compute_dtype(dtype))
    fill, packs = make_fill(compute_dtype(dtype)), in_products == PAIRS
    # Maxima and sums of rows. There are no vectors of one lane: any numbers follow a single row.
    STATE, KEYS = LANES if ROWS == 1 else ROWS, LANES // ROWS
    # Keys of two vectors, which become one of pairs.
    BLOCK = 2 * KEYS
    # The next key of a vector, and the first of the second vector.
    STEP, SECOND = (2, 1) if packs else (1, KEYS)
    as_pairs = pointer_to(PAIRS)

    @njit
    def load_two(tile, key):
        row = shift(tile, key * TILE_STRIDE)
        first = load_pieces(row, STEP * TILE_STRIDE, ROWS, LANES)
        row = shift(row, SECOND * TILE_STRIDE)
        return first, load_pieces(row, STEP * TILE_STRIDE, ROWS, LANES)

    @njit
    def gather(scores, target, stop):
        """Copy the scores to adjacent vectors. Returns the maximum of these."""
        top = splat(scalar(-math.inf), LANES)
        other = top
        for key in range(0, stop, BLOCK):
            first, second = load_two(scores, key)
            top, other = maximum(first, top), maximum(second, other)
            store(target, key * ROWS, first)
            store(target, key * ROWS + LANES, second)
        return maximum(top, other)

    @njit
    def grow(largest, total, correction, top):
        """Take ``top`` into the maximum of the scores seen so far. Returns what to subtract."""
        zero, lowest = splat(scalar(0.0), STATE), splat(scalar(-math.inf), STATE)
        before = load_vector(largest, 0, STATE)
        after = maximum(top, before)
        # A query that has seen nothing yet has the maximum -infinity: any finite number does.
        base = select(less(lowest, after), after, zero)
        # The difference would be NaN for an infinite maximum that stays.
        scaled = exp2(select(less(before, after), before - base, zero))
        store(largest, 0, after)
        store(total, 0, load_vector(total, 0, STATE) * scaled)
        store(correction, 0, scaled)
        return base

    @njit
    def softmax(parameters, scores, dropout_mask, weights, line, largest, total, correction, count):
        factor, stop = scalar(parameters.factor), round_up(count, BLOCK)
        has_dropout = has_options and parameters.dropout_threshold > 0
        for key in range(count, stop):
            fill(shift(scores, key * TILE_STRIDE), ROWS, -math.inf)
            if has_dropout:
                fill(shift(dropout_mask, key * TILE_STRIDE), ROWS, 0.0)
        store(line, 0, gather(scores, weights, stop))
        top = load_vector(line, 0, STATE)
        for piece in range(ROWS, LANES, ROWS):
            top = maximum(load_vector(line, piece, STATE), top)
        base = grow(largest, total, correction, top * splat(factor, STATE))
        for piece in range(0, LANES, ROWS):
            store(line, piece, base)

        factors, offset = splat(factor, LANES), load_vector(line, 0, LANES)
        sum_ = splat(scalar(0.0), LANES)
        pairs = as_pairs(address_of(weights))
        for key in range(0, stop, BLOCK):
            index = key * ROWS
            # The product is rounded as the maximum is, which fma would not do: of scores near 1e10
            # a difference of hundreds would remain, and 2^x overflow.
            first = exp2(load_vector(weights, index, LANES) * factors - offset)
            second = exp2(load_vector(weights, index + LANES, LANES) * factors - offset)
            sum_ = sum_ + (first + second)
            if has_dropout:
                left, right = load_two(dropout_mask, key)
                first, second = first * left, second * right
            if packs:
                store(pairs, index // 2, pack_pairs(first, second))
            else:
                store(weights, index, first)
                store(weights, index + LANES, second)
        # One sum of all keys would round each weight to the digits of the total: this is the sum of
        # the tile.
        store(line, 0, sum_)
        own = load_vector(line, 0, STATE)
        for piece in range(ROWS, LANES, ROWS):
            own = own + load_vector(line, piece, STATE)
        store(total, 0, load_vector(total, 0, STATE) + own)

    return softmax
