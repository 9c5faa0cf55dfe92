"""Numbers as sums of bfloat16, for a matrix unit that multiplies nothing wider.

Rounded to bfloat16, a number leaves a rest, which rounded again leaves another: 8 bits each. Three
such parts are a float32, two are a float16 (or 16 bits of a float32). A product of two numbers is
the sum of the products of their parts, of which those are left out that are below the roundings of
float32: 6 of 9 remain, with half the error of a matrix product in float32 (Henry, Tang and Heinecke
2019, "Leveraging the bfloat16 artificial intelligence datatype for higher-precision computations").

Parts lie ``part`` elements after one another. Those of an infinity are itself and zeros, so that
they do add up to it, but a product of parts would be infinity times zero: where not all numbers are
small, products are computed of the sums. What is left of numbers below 2^-110 is less than the
smallest normal number, and counts as zero.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from numba import njit
from numba.core import types

from foo_ops.kernels.compiler.processor import multiplies_tiles
from foo_ops.kernels.vectors.arithmetic import absolute, any_lane, less, select, splat
from foo_ops.kernels.vectors.limbs import (
    bfloat16_part,
    bfloat16_part_of_any,
    pack_parts,
    store_halves,
    truncated_part,
)
from foo_ops.kernels.vectors.memory import load_vector, store

# Of numbers below this no sum of products overflows, and neither does one of products with these.
SMALL = 2.0**30

# Adjacent elements of a row that a matrix unit takes at once.
GROUP_ELEMENTS = 32

_PARTS = {"bfloat16": 1, "float16": 2, "float32": 3}


def parts_of(dtype: str) -> int:
    """How many parts the numbers of a dtype have in products; 0 where these are of vectors."""
    return _PARTS.get(dtype, 0) if multiplies_tiles() else 0


@functools.cache
def part_and_rest_of(lanes: int) -> Callable:
    """``part_and_rest(x)``: the first part, and what is left, which is zero of an infinity."""
    LARGEST = math.ldexp(255.0, 120)  # noqa: N806

    @njit
    def part_and_rest(x):
        # Rounded up, a number that is larger than all bfloat16 would be an infinity.
        limit = splat(types.float32(LARGEST), lanes)
        part = select(less(absolute(x), limit), bfloat16_part(x), truncated_part(x))
        zero, infinity = splat(types.float32(0.0), lanes), splat(types.float32(math.inf), lanes)
        rest = x - part
        return part, select(less(absolute(rest), infinity), rest, zero)

    return part_and_rest


@functools.cache
def _parts_storer_of(
    parts: int, splits: Callable, round_last: Callable, store_part: Callable
) -> Callable:
    """``store_parts(target, index, part, a, b)``: store_part(target, index, a, b) for each part.

    ``splits(x)`` gives the first part of x and the rest, ``round_last(x)`` the last part.
    """
    has_two, has_three = parts >= 2, parts == 3

    @njit
    def store_parts(target, index, part, a, b):
        if has_two:
            first, a = splits(a)
            second, b = splits(b)
            store_part(target, index, first, second)
            index += part
        if has_three:
            first, a = splits(a)
            second, b = splits(b)
            store_part(target, index, first, second)
            index += part
        store_part(target, index, round_last(a), round_last(b))

    return store_parts


@njit
def _store_pairs(target, index, a, b):
    store(target, index, pack_parts(a, b))


@njit
def _split_finite(x):
    part = bfloat16_part(x)
    return part, x - part


def pair_storer_of(parts: int) -> Callable:
    """``store_pairs(target, index, part, a, b)``: the pairs of the lanes of a and b.

    There must be no infinity among them, and nothing that would be rounded to one.
    """
    return _parts_storer_of(parts, _split_finite, bfloat16_part, _store_pairs)


def _splits_of(is_finite: bool, lanes: int) -> tuple[Callable, Callable]:
    """What splits a number, and what rounds the last part of it."""
    if is_finite:
        return _split_finite, bfloat16_part
    return part_and_rest_of(lanes), bfloat16_part_of_any


@functools.cache
def smallness_of(lanes: int) -> Callable:
    """``are_small(source, count)``: whether all of these float32 are below SMALL, and none NaN.

    count must be a multiple of the lanes.
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
def row_splitter_of(parts: int, lanes: int) -> Callable:
    """``split_row(target, group, part, source, count)``: the parts of a row of float32.

    They are bfloat16; each GROUP_ELEMENTS of them are adjacent, and begin ``group`` elements behind
    those before.
    Returns whether all are small. count must be a multiple of GROUP_ELEMENTS.
    """
    are_small = smallness_of(lanes)

    def loop_of(is_finite: bool) -> Callable:
        store_parts = _parts_storer_of(parts, *_splits_of(is_finite, lanes), store_halves)

        @njit
        def loop(target, group, part, source, count):
            for index in range(0, count, 2 * lanes):
                first = load_vector(source, index, lanes)
                second = load_vector(source, index + lanes, lanes)
                place = index // GROUP_ELEMENTS * group + index % GROUP_ELEMENTS
                store_parts(target, place, part, first, second)

        return loop

    split_finite, split = loop_of(is_finite=True), loop_of(is_finite=False)

    @njit
    def split_row(target, group, part, source, count):
        small = are_small(source, count)
        if small:
            split_finite(target, group, part, source, count)
        else:
            split(target, group, part, source, count)
        return small

    return split_row
