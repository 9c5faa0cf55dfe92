"""Attention: the gradients that are sums over a row's keys, freed of what rounded its delta.

The gradient of a row's scores is dS = P * (dP - delta), and delta comes from the output as it was
stored. What that rounding left out, e, is in each dS as P * e, which a sum over the keys gathers: a
bias for the whole row gets e where it should get nothing, and a slope e times the distance of the
keys, which may be thousands, where their distances differ by few. With the sums R of dS and S of P
and the weight w of the sink

    D = sum(P dP) = R + delta S,    delta' = D - dLogsumexp

is what delta would be of an output that was not rounded, and so

    sum(dS)            = w D + S dLogsumexp
    sum(dS distance)   = sum(dS far) + (delta - delta') sum(P far) + nearest sum(dS)
    gradient of a sink = -w delta'

where far = distance - nearest, for the nearest key that a block of queries sees. S + w is 1, but
for the roundings of the logsumexp, by which all of P and dS are divided once more. Of a part of the
keys S and R are not known, and all sums are those of dS as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention.parameters import GRADIENT_ADDED, TILE_STRIDE
from foo_ops.kernels.attention.scores import POSITIONS
from foo_ops.kernels.attention.softmax import make_sink_score
from foo_ops.kernels.lang.scratch import row_of
from foo_ops.kernels.math.exponential import exp2
from foo_ops.kernels.simd.arithmetic import absolute, fma, splat
from foo_ops.kernels.simd.memory import address_of, load, load_vector, pointer_to, shift, store
from foo_ops.kernels.simd.transpose import make_fill
from foo_ops.kernels.simd.types import ELEMENTS, compute_dtype, lanes_of

# Rows of sums, one number for each query: dS, P, and both times ``far``.
GRADS, WEIGHTS, FAR_GRADS, FAR_WEIGHTS = (row * TILE_STRIDE for row in range(4))
SUM_ROWS = 4


@njit
def adds_row_sums(parameters):
    """Whether a bias that is the same for all keys wants its gradient."""
    return parameters.bias_gradient == GRADIENT_ADDED and parameters.bias_columns == 1


@njit
def needs_row_sums(parameters):
    has_sums = parameters.has_sinks != 0 or parameters.has_alibi_slopes != 0
    return has_sums or adds_row_sums(parameters)


@njit
def nearest_distance(piece):
    """The distance of the nearest key that the queries of a block see, or less."""
    first = piece.query_start + piece.alignment
    last = first + piece.query_count - 1
    most_behind = min(last - piece.key_start, piece.alignment - piece.first_visible)
    least_behind = max(first - piece.key_stop + 1, piece.alignment - piece.last_visible)
    return max(0, least_behind, -most_behind)


@functools.cache
def make_row_sums(dtype: str) -> tuple[Callable, Callable]:
    """Make the functions that begin the row sums and add a panel of a tile to them.

    They are ``start_row_sums(sums)``, and ``add_row_sums(parameters, piece, row_facts, weights,
    grad_scores, sums, key_start, columns, count)``.
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
        """Add the far distances; first_distance is that of the block's first query from the first
        key.
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
    """Make ``write_row_sums(parameters, piece, sums, base, shares, delta)``.

    It adds what a block contributes to the gradients of slopes and sinks, and of a bias that is the
    same for all keys. See `foo_ops.kernels.attention.weights.make_statistics_loader` for the rest.
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
                    # A query that sees nothing.
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
