"""Products with weights of 8-bit and 4-bit integers, and of 4-bit numbers (MXFP4, tables)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from numba import njit

from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.lang.reduction import reduce_add
from foo_ops.kernels.linear.few_rows import (
    MOST_OF_GROUP,
    PAIR,
    Tiles,
    columns_of_row,
    columns_of_sums,
    fetching_of,
    make_element_tiles,
    make_few_rows_kernel,
    make_tiles_ahead,
)
from foo_ops.kernels.linear.packing import (
    chunk_of_prefetches,
    in_pairs,
    make_lines_ahead,
    make_right_packer,
    on_matrix_unit,
)
from foo_ops.kernels.linear.product import (
    Panels,
    leave_sums,
    make_product_kernel,
    quantized_argument_types,
)
from foo_ops.kernels.products.on_amx import GROUP
from foo_ops.kernels.simd.arithmetic import splat
from foo_ops.kernels.simd.fixed_point import (
    FLOAT4,
    FLOAT4_ZERO,
    INT4,
    LANE_BYTES,
    TABLE4,
    Digits,
    bits_of_float,
    deinterleave_numbers,
    digits_of,
    doubled_float4,
    half_power,
    largest_magnitude,
    load_half_powers,
    scale_of_integers,
    store_digits,
    tile_add_grouped,
    tile_dot_codes,
    tile_dot_table,
    tile_load_codes,
    unpack_bytes,
    unpack_float4,
    unpack_int4,
    unpack_table4,
)
from foo_ops.kernels.simd.memory import (
    address_of,
    load,
    load_first,
    load_vector,
    pointer_to,
    prefetch,
    shift,
    store,
)
from foo_ops.kernels.simd.register_tiles import (
    tile_dot,
    tile_dot_scaled,
    tile_splat,
    tile_store_sums,
    tile_zero,
)
from foo_ops.kernels.simd.transpose import make_copy_row, make_fill, round_up
from foo_ops.kernels.simd.types import ELEMENTS, compute_dtype, lanes_of

# -------------------------------------------------------------------------------- tiles of integers

# Multiplies few rows by weights of 4 bits, unpacked in registers, or of 8 bits in groups.
#
# MXFP4's numbers are integers, too: twice a number plus FLOAT4_ZERO, which is their zero, with half
# of their group's scale.
#
# A weight is (integer - zero) * scale. An element of the output is the sum, over the groups g of a
# column, of
#
#     scale[g] * sum(integer * left)  -  scale[g] * zero[g] * sum(left),
#
# where only the first sum is computed for each column: the sums of the left row's groups are
# computed once. A group of the left row is converted to integers times a scale, so that products
# are of integers (`foo_ops.kernels.simd.fixed_point`): a vector multiplies as many bytes of weights
# as it has. For rows of float64 these integers are too short: weights are converted to numbers.
# Rows that are to be rounded to 8 bits have shorter integers (foo_ops/kernels/linear/integer.py).
#
# The numbers of a table are looked up in registers, and multiplied with the row as it is.


COMPUTE = "float32"
# Bits of a step of the left row, scaled to its group's largest magnitude. bfloat16, which has 8
# bits, is exact for numbers of at least 1/64 of the largest magnitude.
NUMBER_BITS = {"bfloat16": 16, "float16": 24, "float32": 24}
FLOAT_BITS = 32
# A group whose largest magnitude is outside these is multiplied as numbers, like one with
# infinities: its scale times a weight's could overflow or underflow float32.
SMALLEST_GROUP, LARGEST_GROUP = 2.0**-64, 2.0**64


@dataclasses.dataclass(frozen=True)
class Rounding:
    """How groups of a row become integers times a scale.

    Attributes:
        bits: the bits of an integer.
        scale_of: ``scale_of(magnitude)`` returns the scale and its inverse for the largest
            magnitude of a group, given by its bits.
        smallest: bits of the smallest of the magnitudes for which a group is rounded.
        largest: bits of the largest of these; larger ones, infinities and NaN give NaN.
        is_zero_below: whether smaller magnitudes count as zeros; otherwise only 0 does, and others
            give NaN.
    """

    bits: int
    scale_of: Callable
    smallest: int
    largest: int
    is_zero_below: bool


def rounding_to_multiples(dtype: str) -> Rounding:
    """Round to multiples of a power of two, to more bits than the dtype or weights have."""
    BITS = NUMBER_BITS[dtype]

    @njit
    def scale_of(magnitude):
        return scale_of_integers(magnitude, BITS)

    smallest, largest = bits_of_float(SMALLEST_GROUP), bits_of_float(LARGEST_GROUP)
    return Rounding(BITS, scale_of, smallest, largest, is_zero_below=False)


@dataclasses.dataclass(frozen=True)
class Weights:
    """How weights of few bits are read.

    Attributes:
        codes: INT4, FLOAT4, TABLE4 or BYTE.
        arguments: the types of the kernel's arguments.
        load_groups: ``load_groups(product, column, group, groups)`` returns scales and zeros of
            adjacent groups, of which a column has ``groups``, as vectors.
        prefetch_groups: ``prefetch_groups(product, column, group)`` prefetches them into L2.
        load_pair: ``load_pair(product, column, group, index)`` returns the two numbers in a byte of
            a group; None where sums are not mended.
    """

    codes: str
    arguments: tuple[Any, ...]
    load_groups: Callable
    prefetch_groups: Callable
    load_pair: Callable | None


def _make_loader() -> Callable:
    """Make ``load_some(line, group, groups)``, which pads a vector with zeros behind the last."""
    LANES = lanes_of(COMPUTE)

    @njit
    def load_some(line, group, groups):
        if group + LANES <= groups:
            return load_vector(line, group, LANES)
        return load_first(line, group, groups - group, LANES)

    return load_some


def int4_weights(dtype: str, GROUP_SIZE: int) -> Weights:
    """Read integers, with scale and zero for each group."""
    HALF, NUMBER, load_some = GROUP_SIZE // 2, ELEMENTS[COMPUTE].compute, _make_loader()

    @njit
    def load_groups(product, column, group, groups):
        scales = shift(product.scale, column * product.scale_column_stride)
        zeros = shift(product.zero, column * product.zero_column_stride)
        return load_some(scales, group, groups), load_some(zeros, group, groups)

    @njit
    def prefetch_groups(product, column, group):
        prefetch(product.scale, column * product.scale_column_stride + group)
        prefetch(product.zero, column * product.zero_column_stride + group)

    @njit
    def load_pair(product, column, group, index):
        byte = load(product.right, column * product.right_column_stride + group * HALF + index)
        scale = load(product.scale, column * product.scale_column_stride + group)
        zero = load(product.zero, column * product.zero_column_stride + group)
        return (NUMBER(byte & 15) - zero) * scale, (NUMBER(byte >> 4) - zero) * scale

    arguments = quantized_argument_types(dtype, "uint8")
    return Weights(INT4, arguments, load_groups, prefetch_groups, load_pair)


def float4_weights(dtype: str, GROUP_SIZE: int) -> Weights:
    """Read floating-point numbers, with an exponent for each group."""
    LANES, HALF, NUMBER = lanes_of(COMPUTE), GROUP_SIZE // 2, ELEMENTS[COMPUTE].compute
    zero = NUMBER(FLOAT4_ZERO)

    @njit
    def load_groups(product, column, group, groups):
        exponents = shift(product.scale, column * product.scale_column_stride)
        count = min(LANES, groups - group)
        scales = load_half_powers(exponents, group, count, LANES)
        return scales, splat(zero, LANES)

    @njit
    def prefetch_groups(product, column, group):
        prefetch(product.scale, column * product.scale_column_stride + group)

    @njit
    def load_pair(product, column, group, index):
        byte = load(product.right, column * product.right_column_stride + group * HALF + index)
        scale = half_power(load(product.scale, column * product.scale_column_stride + group))
        first, second = doubled_float4(byte & 15), doubled_float4(byte >> 4)
        return NUMBER(first) * scale, NUMBER(second) * scale

    arguments = quantized_argument_types(dtype, "uint8", "uint8")
    return Weights(FLOAT4, arguments, load_groups, prefetch_groups, load_pair)


def table4_weights(dtype: str, GROUP_SIZE: int) -> Weights:
    """Read codes of a table, with a scale for each group and no zero."""
    LANES, HALF, load_some = lanes_of(COMPUTE), GROUP_SIZE // 2, _make_loader()
    none = ELEMENTS[COMPUTE].compute(0)

    @njit
    def load_groups(product, column, group, groups):
        scales = shift(product.scale, column * product.scale_column_stride)
        return load_some(scales, group, groups), splat(none, LANES)

    @njit
    def prefetch_groups(product, column, group):
        prefetch(product.scale, column * product.scale_column_stride + group)

    @njit
    def load_pair(product, column, group, index):
        byte = load(product.right, column * product.right_column_stride + group * HALF + index)
        scale = load(product.scale, column * product.scale_column_stride + group)
        return load(product.table, byte & 15) * scale, load(product.table, byte >> 4) * scale

    arguments = quantized_argument_types(dtype, "uint8", compute_dtype(dtype))
    return Weights(TABLE4, arguments, load_groups, prefetch_groups, load_pair)


def make_4bit_tiles(dtype: str, GROUP_SIZE: int, weights: Weights) -> Tiles:
    """Make the tiles of rows that are rounded to more bits than they need, and mended.

    Rows for numbers of a table are not rounded.
    """
    mend = _make_mender(GROUP_SIZE, weights)
    rounding = None if weights.codes == TABLE4 else rounding_to_multiples(dtype)
    return make_group_tiles(GROUP_SIZE, weights, rounding, mend)


def make_group_tiles(
    GROUP_SIZE: int, weights: Weights, rounding: Rounding | None, scale_sums: Callable
) -> Tiles:
    """Make tiles of rows that have been copied as digits, with their groups' scales and sums.

    Without a rounding, the digits are the numbers of the rows.

    The tiles prefetch the next columns, their scales and zeros: a column of 4096 integers is half a
    page of memory, and hardware prefetchers stop at the end of a page.
    """
    LANES, CODES = lanes_of(COMPUTE), weights.codes
    of_numbers = digits_of(FLOAT_BITS if rounding is None else rounding.bits, LANES, CODES)
    BYTES, PER_BYTE = of_numbers.vector_size, of_numbers.per_byte
    CODES_PER_BYTE = of_numbers.codes_per_byte
    SIZE = GROUP_SIZE // CODES_PER_BYTE
    # Groups in a vector of integers; if a group has several vectors, they share its scale.
    GROUPS = max(1, BYTES // SIZE)
    COLUMNS_OF_ROW, COLUMNS_OF_GROUP = columns_of_row(False), columns_of_sums(LANES)
    as_bytes, make_factors = pointer_to("int8"), _make_factors_maker(weights)
    row_size, digits_size = _make_row_sizes(GROUP_SIZE, of_numbers)
    tiles_ahead = make_tiles_ahead()
    make_dots = partial(_make_dots, GROUPS, of_numbers, CODES)

    @functools.cache
    def make_tile(ROWS: int, COLUMNS: int) -> Callable:
        fetch = fetching_of(ROWS, COLUMNS)
        ROWS_OF_FACTORS = 1 if CODES == TABLE4 else ROWS
        factors_of_columns = make_factors(ROWS_OF_FACTORS, COLUMNS)
        SUMS = ROWS_OF_FACTORS * COLUMNS
        add_dots = make_dots(ROWS, COLUMNS)

        @njit
        def place_of_group(group):
            return group // LANES * LANES * SUMS + group % LANES

        @njit
        def tile(product, right, memory, sums, width, left, depth, column):
            groups, stride = product.depth // GROUP_SIZE, product.right_column_stride
            padded, factors = round_up(groups, LANES), memory.factors
            offsets = shift(factors, SUMS * padded)
            scales = shift(left, digits_size(product.depth))
            ahead = COLUMNS * tiles_ahead(COLUMNS * stride)
            factors_of_columns(product, column, groups, factors, offsets, scales, depth, ahead)
            total = tile_zero(sums, ROWS, COLUMNS, LANES)
            # Tables have no zeros.
            for group in range(0, padded if CODES != TABLE4 else 0, LANES):
                of_groups = shift(scales, padded + group)
                total = tile_dot(total, of_groups, depth, shift(offsets, group), padded, None)
            digits, size = as_bytes(address_of(left)), LANE_BYTES * depth
            right, count = shift(right, column * stride), product.depth // CODES_PER_BYTE
            whole = count // BYTES * BYTES
            for byte in range(0, whole, BYTES):
                fetch(right, ahead * stride + COLUMNS * byte, BYTES, COLUMNS)
                total = add_dots(
                    total, product, shift(digits, byte * PER_BYTE), size, shift(right, byte),
                    stride, None, shift(factors, place_of_group(byte // SIZE)),
                )  # fmt: skip
            if whole < count:
                total = add_dots(
                    total, product, shift(digits, whole * PER_BYTE), size, shift(right, whole),
                    stride, count - whole, shift(factors, place_of_group(whole // SIZE)),
                )  # fmt: skip
            tile_store_sums(total, sums, width)

        return tile

    def regions(depth: Any) -> dict[str, Any]:
        # Each group, of at least 32 steps, has an offset for each column of a tile and a factor for
        # each sum.
        of_row = (PAIR + 1) * min(COLUMNS_OF_ROW, LANES)
        of_group = (min(MOST_OF_GROUP, LANES) + 1) * COLUMNS_OF_GROUP
        most = max(of_row, of_group)
        elements = 32 * of_numbers.places * of_numbers.size // LANE_BYTES
        return {"factors": (most + elements - 1) // elements * depth + most * LANES}

    if rounding is None:
        copy_row = _make_numbers_copy(GROUP_SIZE, of_numbers)
    else:
        copy_row = _make_row_copy(GROUP_SIZE, of_numbers, CODES, rounding)
    return Tiles(
        COMPUTE, row_size, copy_row, weights.arguments, make_tile, COLUMNS_OF_ROW,
        COLUMNS_OF_GROUP, lambda ROWS: make_tile(ROWS, 1), regions, scale_sums,
    )  # fmt: skip


def _make_dots(GROUPS: int, of_numbers: Digits, CODES: str, ROWS: int, COLUMNS: int) -> Callable:
    """Make ``add_dots(total, product, digits, size, right, stride, count, factors)``.

    It adds the products of a vector of bytes of each column, or of its first ``count`` bytes.
    """
    LANES, BITS, PARTS = of_numbers.lanes, of_numbers.bits, of_numbers.parts
    as_numbers = pointer_to(COMPUTE)

    @njit
    def add_integers(total, product, digits, size, right, stride, count, factors):
        return tile_dot_codes(
            total, digits, size, right, stride, count, factors, GROUPS, BITS, CODES
        )

    @njit
    def add_numbers(total, product, digits, size, right, stride, count, factors):
        rows, row_size = as_numbers(address_of(digits)), size // LANE_BYTES
        codes = tile_load_codes(right, stride, count, COLUMNS, LANES)
        products = tile_zero(rows, ROWS, COLUMNS, LANES)
        # A column has more steps than there are parts, but LLVM does not know. It would unroll the
        # loop, look up all numbers first, and move them to the stack: with 4 rows, a Zen 4 takes
        # 1.3 times as long.
        for part in range(min(PARTS, product.depth)):
            products, codes = tile_dot_table(
                products, shift(rows, part * LANES), row_size, codes, product.table
            )
        return tile_add_grouped(total, products, factors, GROUPS)

    return add_numbers if CODES == TABLE4 else add_integers


def _make_row_sizes(GROUP_SIZE: int, of_numbers: Digits) -> tuple[Callable, Callable]:
    """Make ``row_size(depth)`` and ``digits_size(depth)``, in elements of the compute dtype.

    The digits of a row, for whole vectors of integers, are followed by the scales of its groups and
    their sums, both padded with zeros to whole vectors.
    """
    LANES, BYTES, PER_BYTE = of_numbers.lanes, of_numbers.vector_size, of_numbers.per_byte
    CODES_PER_BYTE = of_numbers.codes_per_byte

    @njit
    def digits_size(depth):
        return round_up(depth // CODES_PER_BYTE, BYTES) // LANE_BYTES * PER_BYTE

    @njit
    def row_size(depth):
        return digits_size(depth) + 2 * round_up(depth // GROUP_SIZE, LANES)

    return row_size, digits_size


def _make_row_copy(GROUP_SIZE: int, of_numbers: Digits, CODES: str, rounding: Rounding) -> Callable:
    """Make ``copy_row(target, source, stride, depth, row_size)``, of adjacent steps.

    A group that cannot be rounded gets scale 0 and sum NaN, which `_make_mender` detects.
    """
    LANES, number = of_numbers.lanes, ELEMENTS[COMPUTE].compute
    BITS, BYTES, PER_BYTE = of_numbers.bits, of_numbers.vector_size, of_numbers.per_byte
    SIZE, scale_of = GROUP_SIZE // of_numbers.codes_per_byte, rounding.scale_of
    SMALLEST, LARGEST = rounding.smallest, rounding.largest
    LEAST_NAN = SMALLEST if rounding.is_zero_below else 1
    as_bytes, none, not_a_number = pointer_to("int8"), number(0), number(math.nan)
    _, digits_size = _make_row_sizes(GROUP_SIZE, of_numbers)

    @njit
    def copy_row(target, source, stride, depth, row_size):
        groups, digits = depth // GROUP_SIZE, as_bytes(address_of(target))
        scales, padded = shift(target, digits_size(depth)), round_up(groups, LANES)
        sums = shift(scales, padded)
        for group in range(groups // LANES * LANES, padded):
            store(scales, group, none)
            store(sums, group, none)
        for group in range(groups):
            line, byte = shift(source, group * GROUP_SIZE), group * SIZE
            largest = largest_magnitude(line, GROUP_SIZE, LANES)
            if SMALLEST <= largest <= LARGEST:
                scale, inverse = scale_of(largest)
                place = shift(digits, byte // BYTES * BYTES * PER_BYTE + byte % BYTES)
                total = store_digits(place, line, GROUP_SIZE, inverse, BITS, LANES, CODES)
                store(scales, group, scale)
                store(sums, group, number(total) * scale)
            else:
                store(scales, group, none)
                store(sums, group, none if largest < LEAST_NAN else not_a_number)

    return copy_row


def _make_numbers_copy(GROUP_SIZE: int, of_numbers: Digits) -> Callable:
    """Make ``copy_row(target, source, stride, depth, row_size)``, of numbers as they are.

    Groups have scale 1, and sum 0, since weights have no zeros.
    """
    LANES, PER_VECTOR = of_numbers.lanes, of_numbers.parts * of_numbers.lanes
    copy, fill = make_copy_row(COMPUTE), make_fill(COMPUTE)
    _, digits_size = _make_row_sizes(GROUP_SIZE, of_numbers)

    @njit
    def copy_row(target, source, stride, depth, row_size):
        size, groups = digits_size(depth), round_up(depth // GROUP_SIZE, LANES)
        copy(target, source, stride, depth, size)
        for start in range(0, size, PER_VECTOR):
            deinterleave_numbers(shift(target, start), LANES)
        fill(shift(target, size), groups, 1.0)
        fill(shift(target, size + groups), groups, 0.0)

    return copy_row


def _make_factors_maker(weights: Weights) -> Callable[[int, int], Callable]:
    """Make ``make(ROWS, COLUMNS)``, which makes the function that computes a tile's factors.

    ``factors_of_columns(product, column, groups, factors, offsets, scales, stride, ahead)`` works
    on the groups of adjacent columns, padded with zeros. The factors are the scales of the weights
    times the scales of each row of the left matrix, which lie ``stride`` apart: a vector for each
    sum, then the next groups. The offsets are -scale * zero of the weights. Scales and zeros of
    columns ``ahead`` are prefetched into L2.
    """
    LANES, none = lanes_of(COMPUTE), ELEMENTS[COMPUTE].compute(0)
    load_groups, prefetch_groups = weights.load_groups, weights.prefetch_groups

    def make(ROWS: int, COLUMNS: int) -> Callable:
        @njit
        def factors_of_columns(product, column, groups, factors, offsets, scales, stride, ahead):
            padded = round_up(groups, LANES)
            for other in range(COLUMNS):
                for group in range(0, padded, LANES):
                    prefetch_groups(product, column + other + ahead, group)
                    scale, zero = load_groups(product, column + other, group, groups)
                    store(offsets, other * padded + group, (splat(none, LANES) - scale) * zero)
                    for row in range(ROWS):
                        place = group * ROWS * COLUMNS + (row * COLUMNS + other) * LANES
                        of_row = load_vector(scales, row * stride + group, LANES)
                        store(factors, place, scale * of_row)

        return factors_of_columns

    return make


def _make_mender(GROUP_SIZE: int, weights: Weights) -> Callable:
    """Make ``mend(product, block, memory, width, panel)``: recompute sums that are not finite.

    Infinities, and numbers near the largest, can make inf - inf of an output's two sums, where the
    weights themselves would give a number or an infinity.
    """
    HALF, NUMBER, LANES = GROUP_SIZE // 2, ELEMENTS[COMPUTE].compute, lanes_of(COMPUTE)
    none, load_pair = NUMBER(0), weights.load_pair
    # The steps of a byte's two weights: adjacent, or half a group apart.
    FIRST, DISTANCE = (1, HALF) if weights.codes == INT4 else (2, 1)

    @njit
    def has_nan(left, stride, depth):
        for step in range(depth):
            value = load(left, step * stride)
            if value != value:
                return True
        return False

    @njit
    def multiply(product, left, column):
        stride, total = product.left_step_stride, none
        for group in range(product.depth // GROUP_SIZE):
            for index in range(HALF):
                first, second = load_pair(product, column, group, index)
                step = group * GROUP_SIZE + index * FIRST
                total += load(left, step * stride) * first
                total += load(left, (step + DISTANCE) * stride) * second
        return total

    @njit
    def is_finite(sums, count):
        differences, whole = splat(none, LANES), count // LANES * LANES
        for column in range(0, whole, LANES):
            vector = load_vector(sums, column, LANES)
            differences = differences + (vector - vector)
        total = reduce_add(differences)
        for column in range(whole, count):
            total += load(sums, column) - load(sums, column)
        return total == 0

    @njit
    def mend(product, block, memory, width, panel):
        columns = block.column_stop - block.column_start
        for row in range(block.row_stop - block.row_start):
            sums = shift(memory.sums, row * width)
            if is_finite(sums, columns):
                continue
            left = shift(product.left, (block.row_start + row) * product.left_row_stride)
            for column in range(columns):
                value = load(sums, column)
                if value - value != 0:
                    if has_nan(left, product.left_step_stride, product.depth):
                        break
                    store(sums, column, multiply(product, left, block.column_start + column))

    return mend


# --------------------------------------------------------------------------- products with integers

# Multiplies by weights of 8-bit and 4-bit integers, and of floating-point numbers of 8 and 4 bits.
#
# Numbers of 8 bits with a scale per column enter products unscaled, and the sums of the column are
# multiplied by its scale. Those with scales for groups of a column are scaled when they are
# converted to numbers: in registers for few rows, which is as fast as memory is read, otherwise on
# the way to a panel, for all rows of a block. Weights of 4 bits are multiplied as integers for few
# rows (`make_4bit_tiles`), and otherwise converted on the way to a panel.


# Sections of the depth are whole groups, of any size.
LARGEST_GROUP_SIZE = 128
# Numbers of MXFP4 that share a scale.
MXFP4_GROUP_SIZE = 32


def make_8bit_few_rows_kernel(dtype: str, stored: str, group_size: int | None = None) -> Kernel:
    """Make the kernel for few rows and numbers of 8 bits, with a scale per column or per group."""
    if group_size is None:
        return make_few_rows_kernel(dtype, partial(_make_8bit_tiles, stored=stored))
    make_tiles = partial(_make_8bit_group_tiles, stored=stored, GROUP_SIZE=group_size)
    return make_few_rows_kernel(dtype, make_tiles)


def make_int4_few_rows_kernel(dtype: str, group_size: int) -> Kernel:
    """Make the kernel for few rows and 4-bit integers."""
    return _make_4bit_few_rows_kernel(dtype, group_size, int4_weights)


def make_mxfp4_few_rows_kernel(dtype: str) -> Kernel:
    """Make the kernel for few rows and MXFP4."""
    return _make_4bit_few_rows_kernel(dtype, MXFP4_GROUP_SIZE, float4_weights)


def make_table4_few_rows_kernel(dtype: str, group_size: int) -> Kernel:
    """Make the kernel for few rows and codes of a table."""
    return _make_4bit_few_rows_kernel(dtype, group_size, table4_weights)


def _make_4bit_few_rows_kernel(
    dtype: str, group_size: int, weights_of: Callable[[str, int], Weights]
) -> Kernel:
    def make_tiles(dtype: str) -> Tiles:
        weights = weights_of(dtype, group_size)
        if dtype == "float64":
            return _make_unpacked_tiles(dtype, weights)
        return make_4bit_tiles(dtype, group_size, weights)

    return make_few_rows_kernel(dtype, make_tiles)


def make_8bit_product_kernel(dtype: str, stored: str, has_groups: bool = False) -> Kernel:
    """Make the kernel for any number of rows and numbers of 8 bits."""

    def make_panels(dtype: str, WIDTH: int, SECTION: int) -> Panels:
        if has_groups:
            unpack, scale_sums = _make_8bit_group_unpacker(dtype), leave_sums
        else:
            unpack, scale_sums = _make_8bit_unpacker(dtype), _make_sums_scaler(dtype)
        arguments = _8bit_arguments(dtype, stored)
        return _make_unpacked_panels(dtype, WIDTH, SECTION, 1, arguments, unpack, scale_sums)

    multiple = LARGEST_GROUP_SIZE if has_groups else 1
    return make_product_kernel(dtype, make_panels, multiple=multiple)


def make_int4_product_kernel(dtype: str) -> Kernel:
    """Make the kernel for any number of rows and 4-bit integers."""
    return _make_4bit_product_kernel(dtype, INT4)


def make_mxfp4_product_kernel(dtype: str) -> Kernel:
    """Make the kernel for any number of rows and MXFP4."""
    return _make_4bit_product_kernel(dtype, FLOAT4)


def make_table4_product_kernel(dtype: str) -> Kernel:
    """Make the kernel for any number of rows and codes of a table."""
    return _make_4bit_product_kernel(dtype, TABLE4)


def _make_4bit_product_kernel(dtype: str, codes: str) -> Kernel:
    def make_panels(dtype: str, WIDTH: int, SECTION: int) -> Panels:
        unpack = _make_4bit_unpacker(dtype, codes)
        scales = {FLOAT4: "uint8", TABLE4: compute_dtype(dtype)}
        arguments = quantized_argument_types(dtype, "uint8", scales.get(codes))
        return _make_unpacked_panels(dtype, WIDTH, SECTION, 2, arguments, unpack, leave_sums)

    return make_product_kernel(dtype, make_panels, multiple=LARGEST_GROUP_SIZE)


# --------------------------------------------------------------------------------------- few rows


def _8bit_arguments(dtype: str, stored: str) -> tuple[Any, ...]:
    """Integers have scales of the left matrix's dtype, and other numbers of the compute dtype."""
    return quantized_argument_types(
        dtype, stored, dtype if stored == "int8" else compute_dtype(dtype)
    )


def _make_8bit_tiles(dtype: str, stored: str) -> Tiles:
    arguments, scale_sums = _8bit_arguments(dtype, stored), _make_sums_scaler(dtype)
    return make_element_tiles(compute_dtype(dtype), stored, stored, arguments, scale_sums)


def _make_8bit_group_tiles(dtype: str, stored: str, GROUP_SIZE: int) -> Tiles:
    """Make tiles that multiply each vector of numbers by the scale of its group."""
    compute = compute_dtype(dtype)
    LANES, tiles_ahead = lanes_of(compute), make_tiles_ahead()
    arguments = _8bit_arguments(dtype, stored)
    tiles = make_element_tiles(compute, stored, stored, arguments, leave_sums)

    @functools.cache
    def make_tile(ROWS: int, COLUMNS: int) -> Callable:
        fetch = fetching_of(ROWS, COLUMNS)

        @njit
        def tile(product, right, memory, sums, width, left, depth, column):
            stride, of_scales = product.right_column_stride, product.scale_column_stride
            right, scales = (
                shift(right, column * stride),
                shift(product.scale, column * of_scales),
            )
            ahead = COLUMNS * stride * tiles_ahead(COLUMNS * stride)
            total = tile_zero(sums, ROWS, COLUMNS, LANES)
            for group in range(product.depth // GROUP_SIZE):
                factors = tile_splat(shift(scales, group), of_scales, COLUMNS, LANES)
                start = group * GROUP_SIZE
                fetch(right, ahead + COLUMNS * start, GROUP_SIZE, COLUMNS)
                for step in range(start, start + GROUP_SIZE, LANES):
                    total = tile_dot_scaled(
                        total, shift(left, step), depth, shift(right, step), stride, factors
                    )
            tile_store_sums(total, sums, width)

        return tile

    return dataclasses.replace(
        tiles,
        make_tile=make_tile,
        make_stream_tile=lambda ROWS: make_tile(ROWS, 1),
        columns_of_group=columns_of_sums(LANES),
        regions=lambda depth: {},
    )


def _make_unpacked_tiles(dtype: str, weights: Weights) -> Tiles:
    """Make tiles that first convert columns of 4-bit weights to numbers."""
    LANES, unpack = lanes_of(dtype), _make_4bit_unpacker(dtype, weights.codes)
    tiles = make_element_tiles(dtype, dtype, dtype, weights.arguments, leave_sums)

    def make_tile(ROWS: int, COLUMNS: int) -> Callable:
        @njit
        def tile(product, right, memory, sums, width, left, depth, column):
            numbers = memory.numbers
            for other in range(COLUMNS):
                unpack(product, shift(numbers, other * depth), column + other, 0, product.depth)
            total = tile_zero(sums, ROWS, COLUMNS, LANES)
            for step in range(0, product.depth, LANES):
                total = tile_dot(total, shift(left, step), depth, shift(numbers, step), depth, None)
            tile_store_sums(total, sums, width)

        return tile

    def regions(depth: Any) -> dict[str, Any]:
        return {"numbers": max(tiles.columns_of_row, tiles.columns_of_group) * depth}

    return dataclasses.replace(tiles, make_tile=make_tile, regions=regions)


# ----------------------------------------------------------------------------------------- panels


def _make_unpacked_panels(
    dtype: str,
    WIDTH: int,
    SECTION: int,
    PER_BYTE: int,
    arguments: tuple[Any, ...],
    unpack: Callable,
    scale_sums: Callable,
) -> Panels:
    """Make panels of numbers, packed from a strip of converted columns at a time.

    ``unpack(product, target, column, start, count)`` converts part of a column to numbers.
    """
    BYTES = chunk_of_prefetches(SECTION // PER_BYTE, 1)
    pack_right, lines_of = make_right_packer(dtype, WIDTH), make_lines_ahead(BYTES, 1)
    # The multiple of columns that packing pads to, so that strips do not overwrite each other.
    STRIP = GROUP if on_matrix_unit(dtype) else lanes_of(compute_dtype(dtype))
    as_numbers = pointer_to(_strip_dtype(dtype))

    @njit
    def pack(product, part, memory, start, column, columns, count, distance):
        strip = as_numbers(address_of(memory.strip))
        for first in range(0, columns, STRIP):
            some = min(STRIP, columns - first)
            for other in range(some):
                unpack(product, shift(strip, other * SECTION), column + first + other, start, count)
            panel = shift(memory.right, first // WIDTH * distance + first % WIDTH)
            pack_right(panel, distance, strip, SECTION, 1, some, count)

    @njit
    def lines_ahead(product, part, start, column, columns, count, shares):
        stride = product.right_column_stride
        panel = shift(product.right, column * stride + start // PER_BYTE)
        return lines_of(panel, stride, 1, columns, count // PER_BYTE, shares)

    chunk = BYTES * PER_BYTE
    return Panels(arguments, pack, chunk, lines_ahead, {"strip": STRIP * SECTION}, scale_sums)


def _strip_dtype(dtype: str) -> str:
    """The dtype of the numbers in a strip: bfloat16 where they are packed in pairs."""
    return "bfloat16" if in_pairs(dtype) else compute_dtype(dtype)


def _make_8bit_unpacker(dtype: str) -> Callable:
    LANES, number = lanes_of(compute_dtype(dtype)), ELEMENTS[compute_dtype(dtype)].compute
    one = number(1)

    @njit
    def unpack(product, target, column, start, count):
        source = shift(product.right, column * product.right_column_stride + start)
        whole = count // LANES * LANES
        for step in range(0, whole, LANES):
            unpack_bytes(shift(target, step), shift(source, step), one, LANES)
        for step in range(whole, count):
            unpack_bytes(shift(target, step), shift(source, step), one, 1)

    return unpack


def _make_8bit_group_unpacker(dtype: str) -> Callable:
    LANES = lanes_of(compute_dtype(dtype))

    @njit
    def unpack(product, target, column, start, count):
        size = product.group_size
        source = shift(product.right, column * product.right_column_stride + start)
        scales = shift(product.scale, column * product.scale_column_stride + start // size)
        for group in range(count // size):
            scale = load(scales, group)
            for step in range(group * size, (group + 1) * size, LANES):
                unpack_bytes(shift(target, step), shift(source, step), scale, LANES)

    return unpack


def _make_4bit_unpacker(dtype: str, codes: str) -> Callable:
    makers = {
        INT4: _make_int4_unpacker,
        FLOAT4: _make_float4_unpacker,
        TABLE4: _make_table4_unpacker,
    }
    return makers[codes](dtype)


def _make_float4_unpacker(dtype: str) -> Callable:
    LANES, number = lanes_of(compute_dtype(dtype)), ELEMENTS[compute_dtype(dtype)].compute
    SIZE, HALF = MXFP4_GROUP_SIZE, MXFP4_GROUP_SIZE // 2

    @njit
    def unpack(product, target, column, start, count):
        source = shift(product.right, column * product.right_column_stride + start // 2)
        exponents = shift(product.scale, column * product.scale_column_stride + start // SIZE)
        for group in range(count // SIZE):
            scale = number(half_power(load(exponents, group)))
            for part in range(group * HALF, (group + 1) * HALF, LANES):
                unpack_float4(shift(target, 2 * part), shift(source, part), scale, LANES)

    return unpack


def _make_table4_unpacker(dtype: str) -> Callable:
    LANES = lanes_of(compute_dtype(dtype))

    @njit
    def unpack(product, target, column, start, count):
        size, half = product.group_size, product.group_size // 2
        source = shift(product.right, column * product.right_column_stride + start // 2)
        scales = shift(product.scale, column * product.scale_column_stride + start // size)
        for group in range(count // size):
            scale = load(scales, group)
            for part in range(group * half, (group + 1) * half, LANES):
                unpack_table4(
                    shift(target, 2 * part), shift(source, part), scale, product.table, LANES
                )

    return unpack


def _make_int4_unpacker(dtype: str) -> Callable:
    LANES = lanes_of(compute_dtype(dtype))

    @njit
    def unpack(product, target, column, start, count):
        size, half = product.group_size, product.group_size // 2
        source = shift(product.right, column * product.right_column_stride + start // 2)
        scales = shift(product.scale, column * product.scale_column_stride)
        zeros = shift(product.zero, column * product.zero_column_stride)
        for step in range(0, count, size):
            group = (start + step) // size
            scale = load(scales, group)
            zero = load(zeros, group)
            for part in range(0, half, LANES):
                unpack_int4(
                    shift(target, step + part), half, shift(source, step // 2 + part), scale,
                    zero, LANES,
                )  # fmt: skip

    return unpack


# ------------------------------------------------------------------------------------------ scale


def _make_sums_scaler(dtype: str) -> Callable:
    """Make ``scale_sums(product, block, memory, width, panel)``: multiply by the columns' scales.

    See `foo_ops.kernels.linear.product.make_writer` for the layout of the sums.
    """
    compute = compute_dtype(dtype)
    LANES, copy_row = lanes_of(compute), make_copy_row(compute)

    @njit
    def scale_sums(product, block, memory, width, panel):
        rows, columns = block.row_stop - block.row_start, block.column_stop - block.column_start
        for start in range(0, columns, width):
            # Scales, like sums, fill whole vectors; they use the bias's memory.
            count, stride = min(width, columns - start), product.scale_column_stride
            source = shift(product.scale, (block.column_start + start) * stride)
            whole = (count + LANES - 1) // LANES * LANES
            copy_row(memory.bias, source, stride, count, whole)
            for row in range(rows):
                sums = shift(memory.sums, start // width * panel + row * width)
                for column in range(0, whole, LANES):
                    product_of = load_vector(sums, column, LANES)
                    store(sums, column, product_of * load_vector(memory.bias, column, LANES))

    return scale_sums
