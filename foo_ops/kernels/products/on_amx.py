"""Multiply matrices of bfloat16 limbs, or of bytes, on a matrix unit."""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import njit
from numba.core import types

from foo_ops.kernels.compiler.processor import has_matrix_unit
from foo_ops.kernels.products.limbs import GROUP_ELEMENTS
from foo_ops.kernels.simd.amx import (
    BYTE_DOTS,
    matrix_configure,
    matrix_dot,
    matrix_load,
    matrix_release,
    matrix_store,
    matrix_zero,
)
from foo_ops.kernels.simd.arithmetic import fma, splat
from foo_ops.kernels.simd.memory import address_of, load, load_vector, pointer_to, shift, store
from foo_ops.kernels.simd.narrow import first_of_pairs, second_of_pairs
from foo_ops.kernels.simd.types import lanes_of

TILE_MULTIPLE = 32
"""A multiple for rows, for columns, and for the elements that are summed over: two by two registers
of sums use each register of factors twice."""
GROUP = GROUP_ELEMENTS // 2
"""The number of steps in a register of factors."""
# With several limbs, all rows are summed over this many steps at a time, so that the part of b
# stays in L1: 7 to 9 % for float16 and float32.
STEPS_AT_ONCE = 32


@njit
def nothing():
    """Does nothing: ``begin`` and ``end`` without a matrix unit."""


@functools.cache
def make_amx_products(limbs: int) -> tuple[Callable, Callable, Callable]:
    """Make ``matmul``, and ``begin()`` and ``end()``.

    A kernel calls ``begin`` before its first product and ``end`` after the last: around each
    product they would take a sixth of the time. ``matmul(c, c_stride, a, b, rows, columns, steps,
    accumulate, are_small)`` computes, for row < rows and column < columns,

        c[row, column] = sum over step of a[row, step] * b[step, column]   (+ c if accumulate)

    where a step is a pair of numbers, and a number is the sum of its limbs. c is float32. The
    matrix a is a tuple: the pointer, the stride of a row, the stride of a GROUP of steps, which are
    adjacent, and the distance of its limbs. b is a tuple: the pointer, the stride of a step, and
    the distance of its limbs. Steps and columns must be multiples of 16, rows should be multiples
    of 32. For ``are_small`` see foo_ops/kernels/products/limbs.py.
    """
    return _make_products(
        _make_product_of_sums(limbs), _make_product_by_registers(limbs, matrix_dot)
    )


@functools.cache
def make_amx_products_of_bytes(a: str, b: str) -> tuple[Callable, Callable, Callable]:
    """Like `make_amx_products`, for factors of int8 or uint8.

    A step is four numbers (dtype int8x4), and c is int32.
    """
    return _make_products(
        _make_product_of_bytes(a, b), _make_product_by_registers(1, BYTE_DOTS[a, b])
    )


@functools.cache
def make_amx_blocks() -> tuple[Callable, Callable]:
    """Make functions that compute a product of bfloat16 block by block, beside something else.

    ``start_block(c, c_stride, a, b, columns, steps, accumulate, number)`` begins to compute a block
    of TILE_MULTIPLE rows and columns, with the arguments of `make_amx_products`, and returns its
    place in c. ``store_block(place, c_stride)`` must be called before the next block, and is called
    late: the unit multiplies meanwhile, and the processor would wait for sums that it stores. Rows
    and columns must be multiples of TILE_MULTIPLE.
    """
    multiply, store_block = _make_block(1, matrix_dot, 2, 2)
    if not has_matrix_unit():
        multiply, store_block = _make_block_of_sums(), _store_nothing

    @njit
    def start_block(c, c_stride, a, b, columns, steps, accumulate, number):
        in_row = columns // TILE_MULTIPLE
        row, column = number // in_row * TILE_MULTIPLE, number % in_row * TILE_MULTIPLE
        pointer, stride, limb_stride = b
        place = shift(c, row * c_stride + column)
        right = (shift(pointer, column), stride, limb_stride)
        multiply(place, c_stride, moved(a, row, 0), right, steps, accumulate)
        return place

    return start_block, store_block


def _make_block_of_sums() -> Callable:
    by_sums = _make_product_of_sums(1)

    @njit
    def multiply(c, c_stride, a, b, steps, accumulate):
        by_sums(c, c_stride, a, b, TILE_MULTIPLE, TILE_MULTIPLE, steps, accumulate)

    return multiply


@njit
def _store_nothing(place, c_stride):
    """Does nothing: without a matrix unit, blocks are stored when they are computed."""


def _make_products(
    by_sums: Callable, by_registers: Callable
) -> tuple[Callable, Callable, Callable]:
    if not has_matrix_unit():
        return _make_product_without_unit(by_sums), nothing, nothing

    @njit
    def matmul(c, c_stride, a, b, rows, columns, steps, accumulate, are_small):
        whole = rows // 16 * 16 if are_small else 0
        by_registers(c, c_stride, a, b, whole, columns, steps, accumulate)
        if whole < rows:
            rest = shift(c, whole * c_stride)
            by_sums(rest, c_stride, moved(a, whole, 0), b, rows - whole, columns, steps, accumulate)

    @njit
    def begin():
        matrix_configure()

    @njit
    def end():
        matrix_release()

    return matmul, begin, end


@njit
def moved(a, row, step):
    """Return the left matrix from a row and a step on; the step must be the first of a group."""
    pointer, row_stride, group_stride, limb_stride = a
    place = row * row_stride + step // GROUP * group_stride
    return shift(pointer, place), row_stride, group_stride, limb_stride


def _make_product_without_unit(by_sums: Callable) -> Callable:
    @njit
    def matmul(c, c_stride, a, b, rows, columns, steps, accumulate, are_small):
        by_sums(c, c_stride, a, b, rows, columns, steps, accumulate)

    return matmul


@functools.cache
def _make_product_of_sums(limbs: int) -> Callable:
    """Make the product on vectors, of the sums of the limbs."""
    LANES = lanes_of("float32")
    as_elements = pointer_to("bfloat16")

    @njit
    def number(elements, index, limb_stride):
        result = load(elements, index)
        for other in range(1, limbs):
            result += load(elements, index + other * 2 * limb_stride)
        return splat(result, LANES)

    @njit
    def pair_of_vectors(pairs, index, limb_stride):
        vector = load_vector(pairs, index, LANES)
        first, second = first_of_pairs(vector), second_of_pairs(vector)
        for other in range(1, limbs):
            vector = load_vector(pairs, index + other * limb_stride, LANES)
            first, second = first + first_of_pairs(vector), second + second_of_pairs(vector)
        return first, second

    @njit
    def product(c, c_stride, a, b, rows, columns, steps, accumulate):
        left, row_stride, group_stride, left_limb_stride = a
        right, stride, right_limb_stride = b
        elements = as_elements(address_of(left))
        for row in range(rows):
            for column in range(0, columns, LANES):
                index = row * c_stride + column
                total = splat(types.float32(0.0), LANES)
                for step in range(steps):
                    place = row * row_stride + step // GROUP * group_stride + step % GROUP
                    first, second = pair_of_vectors(
                        right, step * stride + column, right_limb_stride
                    )
                    total = fma(number(elements, 2 * place, left_limb_stride), first, total)
                    total = fma(number(elements, 2 * place + 1, left_limb_stride), second, total)
                if accumulate:
                    total = total + load_vector(c, index, LANES)
                store(c, index, total)

    return product


@functools.cache
def _make_product_of_bytes(a: str, b: str) -> Callable:
    """Make the product of bytes without a matrix unit."""
    as_left, as_right = pointer_to(a), pointer_to(b)

    @njit
    def product(c, c_stride, a, b, rows, columns, steps, accumulate):
        left, row_stride, group_stride, _ = a
        right, stride, _ = b
        lefts, rights = as_left(address_of(left)), as_right(address_of(right))
        for row in range(rows):
            for column in range(columns):
                index = row * c_stride + column
                total = load(c, index) if accumulate else types.int32(0)
                for step in range(steps):
                    place = row * row_stride + step // GROUP * group_stride + step % GROUP
                    for byte in range(4):
                        factor = types.int32(load(lefts, 4 * place + byte))
                        total += factor * load(rights, 4 * (step * stride + column) + byte)
                store(c, index, total)

    return product


def _make_product_by_registers(limbs: int, matrix_dot: Callable) -> Callable:
    """Make the product for a multiple of 16 rows."""
    band, half_band = (_make_band(limbs, matrix_dot, ROWS) for ROWS in (2, 1))
    in_limbs = limbs > 1

    @njit
    def bands(c, c_stride, a, b, rows, columns, steps, accumulate):
        for row in range(0, rows - 16, 32):
            place = shift(c, row * c_stride)
            band(place, c_stride, moved(a, row, 0), b, columns, steps, accumulate)
        if rows % 32 != 0:
            place = shift(c, (rows - 16) * c_stride)
            half_band(place, c_stride, moved(a, rows - 16, 0), b, columns, steps, accumulate)

    @njit
    def product(c, c_stride, a, b, rows, columns, steps, accumulate):
        pointer, stride, limb_stride = b
        some = STEPS_AT_ONCE if in_limbs else steps
        for step in range(0, steps, some):
            bands(
                c, c_stride, moved(a, 0, step),
                (shift(pointer, step * stride), stride, limb_stride),
                rows, columns, min(some, steps - step), accumulate or step > 0,
            )  # fmt: skip

    return product


def _make_band(limbs: int, matrix_dot: Callable, ROWS: int) -> Callable:
    """Make the product for ``ROWS`` times 16 rows."""
    multiply_pair, store_pair = _make_block(limbs, matrix_dot, ROWS, 2)
    multiply_single, store_single = _make_block(limbs, matrix_dot, ROWS, 1)

    @njit
    def band(c, c_stride, a, b, columns, steps, accumulate):
        pointer, stride, limb_stride = b
        for column in range(0, columns - 16, 32):
            place = (shift(pointer, column), stride, limb_stride)
            multiply_pair(shift(c, column), c_stride, a, place, steps, accumulate)
            store_pair(shift(c, column), c_stride)
        if columns % 32 != 0:
            place = (shift(pointer, columns - 16), stride, limb_stride)
            multiply_single(shift(c, columns - 16), c_stride, a, place, steps, accumulate)
            store_single(shift(c, columns - 16), c_stride)

    return band


def _make_block(
    limbs: int, matrix_dot: Callable, ROWS: int, COLUMNS: int
) -> tuple[Callable, Callable]:
    """Make the product for ``ROWS`` x ``COLUMNS`` registers of sums, 0 and 1 above 2 and 3.

    ``multiply(c, c_stride, a, b, steps, accumulate)`` leaves the sums in the registers, and
    ``store_sums(c, c_stride)`` stores them.

    Registers 4 and 5 hold rows of one limb of a, 6 and 7 columns of one limb of b.
    """
    has_two, has_three = limbs >= 2, limbs == 3

    @njit
    def zero():
        matrix_zero(0)
        if COLUMNS == 2:
            matrix_zero(1)
        if ROWS == 2:
            matrix_zero(2)
            if COLUMNS == 2:
                matrix_zero(3)

    def make_for_sums(operation: Callable) -> Callable:
        @njit
        def apply(c, stride):
            operation(0, c, stride)
            if COLUMNS == 2:
                operation(1, shift(c, 16), stride)
            if ROWS == 2:
                operation(2, shift(c, 16 * stride), stride)
                if COLUMNS == 2:
                    operation(3, shift(c, 16 * stride + 16), stride)

        return apply

    load_sums, store_sums = make_for_sums(matrix_load), make_for_sums(matrix_store)

    @njit
    def load_a(a, stride):
        matrix_load(4, a, stride)
        if ROWS == 2:
            matrix_load(5, shift(a, 16 * stride), stride)

    @njit
    def load_b(b, stride):
        matrix_load(6, b, stride)
        if COLUMNS == 2:
            matrix_load(7, shift(b, 16), stride)

    @njit
    def dot():
        matrix_dot(0, 4, 6)
        if COLUMNS == 2:
            matrix_dot(1, 4, 7)
        if ROWS == 2:
            matrix_dot(2, 5, 6)
            if COLUMNS == 2:
                matrix_dot(3, 5, 7)

    @njit
    def products(a, a_row, a_limb_stride, b, b_stride, b_limb_stride):
        """Multiply the limbs in an order that keeps one of the two matrices in its registers."""
        load_a(a, a_row)
        if has_three:
            load_b(shift(b, 2 * b_limb_stride), b_stride)
            dot()
        if has_two:
            load_b(shift(b, b_limb_stride), b_stride)
            dot()
            load_a(shift(a, a_limb_stride), a_row)
            dot()
        load_b(b, b_stride)
        dot()
        if has_two:
            load_a(a, a_row)
            dot()
        if has_three:
            load_a(shift(a, 2 * a_limb_stride), a_row)
            dot()

    @njit
    def multiply(c, c_stride, a, b, steps, accumulate):
        left, row_stride, group_stride, left_limb_stride = a
        right, stride, right_limb_stride = b
        if accumulate:
            load_sums(c, c_stride)
        else:
            zero()
        for group in range(steps // GROUP):
            products(
                shift(left, group * group_stride), row_stride, left_limb_stride,
                shift(right, group * GROUP * stride), stride, right_limb_stride,
            )  # fmt: skip

    return multiply, store_sums
