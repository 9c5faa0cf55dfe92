"""Add up the values of a tile of keys for few queries, each with a key's weight."""

from __future__ import annotations

from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention.parameters import KEY_BLOCK
from foo_ops.kernels.products.operands import step_of
from foo_ops.kernels.simd.memory import address_of, pointer_to, prefetch_near, shift
from foo_ops.kernels.simd.register_tiles import tile_load, tile_outer, tile_splat, tile_store
from foo_ops.kernels.simd.types import ELEMENTS, compute_dtype, lanes_of

# Keys, or pairs of keys, that are added to sums between two accesses to these.
STEPS = 4


def make_line_prefetcher(dtype: str, ROWS: int, COLUMNS: int) -> Callable:
    """Make ``prefetch_lines(later, stride, width, column)``, for ``COLUMNS`` columns from
    ``column`` on that are read of ``ROWS`` rows: it fetches as many elements of the rows ``later``.

    Of adjacent rows they come in the order of memory: 0.79 of the bandwidth for bfloat16, and 0.65
    where each row is fetched as it is read.
    """
    LINE = 64 // ELEMENTS[dtype].size
    LINES = -(-ROWS * COLUMNS // LINE)

    @njit
    def prefetch_lines(later, stride, width, column):
        if stride == width:
            for line in range(LINES):
                prefetch_near(later, column * ROWS + line * LINE)
        else:
            for row in range(ROWS):
                prefetch_near(later, row * stride + column)

    return prefetch_lines


def make_weighted_sums(dtype: str, stored: str, in_products: str, GROUP: int) -> Callable:
    """Make ``weighted_sums(sums, width, weights, values, value_stride, zeros, rows, ahead,
    count)``.

    sums[row] grows by the sum over the keys of weights[key, row] * values[key]. The weights are
    those of `foo_ops.kernels.attention.decode_softmax.make_decode_softmax`, for each ``GROUP`` of
    rows in room for KEY_BLOCK keys. Sums must have room for whole groups, ``zeros`` are as many as
    a row has elements, and ``ahead`` is how many rows further on are fetched.

    Some keys are added at a time, so that values are read in the order in which they lie in memory:
    column by column, as in a product of matrices, they come at two thirds of its speed.
    """
    LANES = lanes_of(compute_dtype(dtype))
    STEP = step_of(in_products)
    # Two rows of STEP vectors make as many vectors of pairs.
    COLUMNS = STEP * LANES
    as_weights, SIZE = pointer_to(in_products), ELEMENTS[stored].size

    def make_adder(ROWS: int, STEPS: int) -> Callable:
        prefetch_lines = make_line_prefetcher(stored, STEPS * STEP, COLUMNS)

        @njit
        def add(sums, width, weights, values, stride, ahead):
            factors = tile_splat(weights, 1, STEPS * ROWS, LANES)
            later = shift(values, ahead * stride)
            for column in range(0, width, COLUMNS):
                prefetch_lines(later, stride, width, column)
                some, place = shift(values, column), shift(sums, column)
                total = tile_load(place, width, ROWS, STEP, LANES)
                tile_store(tile_outer(total, factors, some, stride), place, width)

        return add

    def make_group(ROWS: int) -> Callable:
        add_some, add_one = make_adder(ROWS, STEPS), make_adder(ROWS, 1)

        @njit
        def add_group(sums, width, weights, values, stride, zeros, ahead, count):
            steps = count // STEP
            whole = steps // STEPS * STEPS
            for step in range(0, whole, STEPS):
                some = shift(values, step * STEP * stride)
                add_some(sums, width, shift(weights, step * ROWS), some, stride, ahead)
            for step in range(whole, steps):
                some = shift(values, step * STEP * stride)
                add_one(sums, width, shift(weights, step * ROWS), some, stride, ahead)
            if steps * STEP < count:
                # The last key has no other to be a pair with.
                last = shift(values, (count - 1) * stride)
                distance = (address_of(zeros) - address_of(last)) // SIZE
                add_one(sums, width, shift(weights, steps * ROWS), last, distance, 0)

        return add_group

    add_single, add_group = make_group(1), make_group(GROUP)

    @njit
    def weighted_sums(sums, width, weights, values, value_stride, zeros, rows, ahead, count):
        if rows == 1:
            factors = as_weights(address_of(weights))
            add_single(sums, width, factors, values, value_stride, zeros, ahead, count)
        else:
            for row in range(0, rows, GROUP):
                factors = as_weights(address_of(shift(weights, row * KEY_BLOCK)))
                place = shift(sums, row * width)
                add_group(place, width, factors, values, value_stride, zeros, ahead, count)

    return weighted_sums
