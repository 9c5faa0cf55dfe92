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

from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from foo_ops.kernels.simd import (
    INT16,
    INT32,
    INT64,
    Vector,
    absolute,
    any_lane,
    constant_of,
    less,
    load_vector,
    select,
    shaped,
    splat,
    store,
)
from foo_ops.kernels.target import multiplies_tiles
from foo_ops.kernels.tiles import emit_first_of_pairs, emit_second_of_pairs

# Of numbers below this no sum of products overflows, and neither does one of products with these.
SMALL = 2.0**30
# Adjacent elements of a row that a matrix unit takes at once.
GROUP_ELEMENTS = 32
_PARTS = {"bfloat16": 1, "float16": 2, "float32": 3}
_UPPER = 0xFFFF0000


def parts_of(dtype: str) -> int:
    """How many parts the numbers of a dtype have in products; 0 where these are of vectors."""
    return _PARTS.get(dtype, 0) if multiplies_tiles() else 0


@intrinsic
def bfloat16_part(typing_context, x):
    """x rounded to the nearest bfloat16 (halves away from zero), as float32.

    A NaN must be one that processors make, whose last bits are not all ones.
    """

    def generate(context, builder, signature, args):
        bits = builder.bitcast(args[0], shaped(INT32, args[0].type))
        return _upper_half(builder, builder.add(bits, constant_of(bits.type, 0x8000)), args[0].type)

    return x(x), generate


@intrinsic
def bfloat16_part_of_any(typing_context, x):
    """As `bfloat16_part`, for any NaN."""

    def generate(context, builder, signature, args):
        bits = builder.bitcast(args[0], shaped(INT32, args[0].type))
        rounded = builder.add(bits, constant_of(bits.type, 0x8000))
        return _upper_half(builder, _select_nan(builder, args[0], bits, rounded), args[0].type)

    return x(x), generate


def _select_nan(builder: ir.IRBuilder, x: ir.Value, bits: ir.Value, others: ir.Value) -> ir.Value:
    """The bits of x where it is NaN, of one whose upper half is that of a NaN too, and others."""
    quiet = builder.or_(bits, constant_of(bits.type, 0x400000))
    return builder.select(builder.fcmp_ordered("ord", x, x), others, quiet)


def _upper_half(builder: ir.IRBuilder, bits: ir.Value, type_: ir.Type) -> ir.Value:
    return builder.bitcast(builder.and_(bits, constant_of(bits.type, _UPPER)), type_)


@intrinsic
def pack_parts(typing_context, a, b):
    """A vector of bfloat16x2, each pair a lane of a and of b, which are bfloat16 already."""
    result = Vector(types.int32, a.lanes)

    def generate(context, builder, signature, args):
        wide = ir.VectorType(INT32, a.lanes)
        first, second = (builder.bitcast(value, wide) for value in args)
        first = builder.lshr(first, constant_of(wide, 16))
        return builder.or_(first, builder.and_(second, constant_of(wide, _UPPER)))

    return result(a, a), generate


@intrinsic
def store_halves(typing_context, pointer, index, a, b):
    """Store the lanes of a and then those of b, which are bfloat16 already, as bfloat16."""
    lanes = a.lanes

    def generate(context, builder, signature, args):
        halves = ir.VectorType(INT16, 2 * lanes)
        first, second = (builder.bitcast(value, halves) for value in args[2:])
        order = ir.Constant(ir.VectorType(INT32, 2 * lanes), list(range(1, 4 * lanes, 2)))
        value = builder.shuffle_vector(first, second, order)
        address = builder.gep(args[0], [args[1]])
        builder.store(value, builder.bitcast(address, halves.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(pointer, types.intp, a, a), generate


@intrinsic(prefer_literal=True)
def interleave(typing_context, target, index, first, second, lanes):
    """Store, as bfloat16x2, the pairs of 2 * LANES adjacent bfloat16 from each of two places."""
    count = 2 * lanes.literal_value

    def generate(context, builder, signature, args):
        halves = ir.VectorType(INT16, count)
        upper, lower = (
            builder.load(builder.bitcast(place, halves.as_pointer()), align=2)
            for place in args[2:4]
        )
        for number in range(2):
            lanes_of_half = range(number * count // 2, (number + 1) * count // 2)
            order = [lane for each in lanes_of_half for lane in (each, count + each)]
            mask = ir.Constant(ir.VectorType(INT32, count), order)
            pairs = builder.shuffle_vector(upper, lower, mask)
            place = builder.gep(args[0], [builder.add(args[1], INT64(number * count // 2))])
            builder.store(pairs, builder.bitcast(place, halves.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(target, types.intp, first, second, lanes), generate


@intrinsic
def first_of_pairs(typing_context, pairs):
    result = Vector(types.float32, pairs.lanes)

    def generate(context, builder, signature, args):
        return emit_first_of_pairs(builder, args[0])

    return result(pairs), generate


@intrinsic
def second_of_pairs(typing_context, pairs):
    result = Vector(types.float32, pairs.lanes)

    def generate(context, builder, signature, args):
        return emit_second_of_pairs(builder, args[0])

    return result(pairs), generate


@intrinsic
def truncated_part(typing_context, x):
    """x rounded towards zero to a bfloat16, as float32; NaN for NaN."""

    def generate(context, builder, signature, args):
        bits = builder.bitcast(args[0], shaped(INT32, args[0].type))
        return _upper_half(builder, _select_nan(builder, args[0], bits, bits), args[0].type)

    return x(x), generate


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
