"""Split numbers into limbs of bfloat16, for a matrix unit that multiplies nothing wider.

Rounding a number to bfloat16 leaves a rest, and rounding the rest leaves another: 8 bits each.
Three such limbs make a float32, two a float16 (or 16 bits of a float32). A product of two numbers
is the sum of the products of their limbs. Products below the rounding of float32 are left out: 6 of
9 remain, with half the error of a matrix product in float32 (Henry, Tang and Heinecke 2019,
"Leveraging the bfloat16 artificial intelligence datatype for higher-precision computations").

The limbs of a row are ``limb_stride`` elements apart. The limbs of an infinity are the infinity and
zeros: their sum is right, but a product of limbs would be infinity times zero. If not all numbers
are small, products are computed from the sums of limbs instead. The rests of numbers below 2^-110
are less than the smallest normal number, and count as zero.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from numba import njit
from numba.core import types

from foo_ops.kernels.compiler.processor import use_matrix_unit
from foo_ops.kernels.simd.arithmetic import absolute, any_lane, less, select, splat
from foo_ops.kernels.simd.memory import load_vector, store
from foo_ops.kernels.simd.narrow import (
    bfloat16_limb,
    bfloat16_limb_of_any,
    pack_limbs,
    store_halves,
    truncated_limb,
)

# Numbers below this, and sums of their products, do not overflow when multiplied.
SMALL = 2.0**30

# Adjacent elements of a row that a matrix unit loads at once.
GROUP_ELEMENTS = 32

_LIMBS = {"bfloat16": 1, "float16": 2, "float32": 3}


def limbs_of(dtype: str) -> int:
    """The number of limbs of a dtype's numbers in products; 0 if vectors compute the products."""
    return _LIMBS.get(dtype, 0) if use_matrix_unit() else 0


@functools.cache
def make_limb_and_rest(lanes: int) -> Callable:
    """Make ``limb_and_rest(x)``: the first limb, and the rest, which is zero for an infinity."""
    LARGEST = math.ldexp(255.0, 120)

    @njit
    def limb_and_rest(x):
        # A number larger than all bfloat16 would be rounded up to an infinity.
        limit = splat(types.float32(LARGEST), lanes)
        limb_stride = select(less(absolute(x), limit), bfloat16_limb(x), truncated_limb(x))
        zero, infinity = splat(types.float32(0.0), lanes), splat(types.float32(math.inf), lanes)
        rest = x - limb_stride
        return limb_stride, select(less(absolute(rest), infinity), rest, zero)

    return limb_and_rest


@functools.cache
def _make_limbs_storer(
    limbs: int, splits: Callable, round_last: Callable, store_limb: Callable
) -> Callable:
    """Make ``store_limbs(target, index, limb_stride, a, b)``.

    It calls store_limb(target, index, a, b) for each limb. ``splits(x)`` returns the first limb of
    x and the rest, ``round_last(x)`` the last limb.
    """
    has_two, has_three = limbs >= 2, limbs == 3

    @njit
    def store_limbs(target, index, limb_stride, a, b):
        if has_two:
            first, a = splits(a)
            second, b = splits(b)
            store_limb(target, index, first, second)
            index += limb_stride
        if has_three:
            first, a = splits(a)
            second, b = splits(b)
            store_limb(target, index, first, second)
            index += limb_stride
        store_limb(target, index, round_last(a), round_last(b))

    return store_limbs


@njit
def _store_pairs(target, index, a, b):
    store(target, index, pack_limbs(a, b))


@njit
def _split_finite(x):
    limb_stride = bfloat16_limb(x)
    return limb_stride, x - limb_stride


def make_pair_storer(limbs: int) -> Callable:
    """Make ``store_pairs(target, index, limb_stride, a, b)``: the pairs of the lanes of a and b.

    The numbers must be finite, and must not be rounded to infinity.
    """
    return _make_limbs_storer(limbs, _split_finite, bfloat16_limb, _store_pairs)


def _make_splits(is_finite: bool, lanes: int) -> tuple[Callable, Callable]:
    """Choose the functions that split a number and round its last limb."""
    if is_finite:
        return _split_finite, bfloat16_limb
    return make_limb_and_rest(lanes), bfloat16_limb_of_any


@functools.cache
def make_smallness_check(lanes: int) -> Callable:
    """Make ``are_small(source, count)``: whether all float32 are below SMALL, and none is NaN.

    ``count`` must be a multiple of the lanes.
    """

    @njit
    def are_small(source, count):
        one, limit = splat(types.float32(1.0), lanes), splat(types.float32(SMALL), lanes)
        found = splat(types.float32(0.0), lanes)
        for index in range(0, count, lanes):
            value = absolute(load_vector(source, index, lanes))
            found = select(less(value, limit), found, one)
        return not any_lane(less(splat(types.float32(0.0), lanes), found))

    return are_small


@functools.cache
def make_row_splitter(limbs: int, lanes: int) -> Callable:
    """Make ``split_row(target, group, limb_stride, source, count)`` for rows of float32.

    The limbs are bfloat16. Groups of GROUP_ELEMENTS of them are adjacent, at a distance of
    ``group`` elements. Returns whether all numbers are small. ``count`` must be a multiple of
    GROUP_ELEMENTS.
    """
    are_small = make_smallness_check(lanes)

    def make_loop(is_finite: bool) -> Callable:
        store_limbs = _make_limbs_storer(limbs, *_make_splits(is_finite, lanes), store_halves)

        @njit
        def loop(target, group, limb_stride, source, count):
            for index in range(0, count, 2 * lanes):
                first = load_vector(source, index, lanes)
                second = load_vector(source, index + lanes, lanes)
                place = index // GROUP_ELEMENTS * group + index % GROUP_ELEMENTS
                store_limbs(target, place, limb_stride, first, second)

        return loop

    split_finite, split = make_loop(is_finite=True), make_loop(is_finite=False)

    @njit
    def split_row(target, group, limb_stride, source, count):
        small = are_small(source, count)
        if small:
            split_finite(target, group, limb_stride, source, count)
        else:
            split(target, group, limb_stride, source, count)
        return small

    return split_row
