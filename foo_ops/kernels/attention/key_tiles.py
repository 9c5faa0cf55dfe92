"""Find tiles of keys and of values, or copy them, as the left matrices of products."""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention.operands import make_stored_row_splitter
from foo_ops.kernels.attention.parameters import KEY_BLOCK, dim_name_of
from foo_ops.kernels.lang.scratch import field, row_of
from foo_ops.kernels.products.limbs import GROUP_ELEMENTS, limbs_of, make_row_splitter
from foo_ops.kernels.products.on_amx import GROUP
from foo_ops.kernels.products.operands import product_dtype, sizes_of
from foo_ops.kernels.simd.memory import address_of, load, load_vector, pointer_to, shift, store
from foo_ops.kernels.simd.narrow import PAIRS, pack_pairs
from foo_ops.kernels.simd.transpose import make_copy_row, make_fill, round_up, transpose_pairs
from foo_ops.kernels.simd.types import ELEMENTS, compute_dtype, lanes_of


@functools.cache
def make_key_row(operand: str) -> Callable:
    """Make ``key_row(parameters, piece, key)``: the address of a row of key or value, in its
    page.
    """

    @njit
    def key_row(parameters, piece, key):
        head = piece.head // parameters.group
        if parameters.page_size > 0:
            place = piece.batch * parameters.block_table_stride + key // parameters.page_size
            page = load(parameters.block_table, place)
            return row_of(parameters, operand, page, head, key % parameters.page_size)
        return row_of(parameters, operand, piece.batch, head, piece.key_offset + key)

    return key_row


@njit
def lie_together(parameters, key_start, count):
    """Whether the rows of these keys have one stride, which they lose where a page ends."""
    if parameters.page_size > 0:
        return key_start % parameters.page_size + count <= parameters.page_size
    return True


@functools.cache
def make_key_tile(dtype: str, operand: str) -> Callable:
    """Make the function that gives a tile of keys, or of values, as the left matrix of a product.

    ``tile(parameters, piece, scratch, key_start, count)`` returns the matrix, whose steps go along
    the head dimension, and whether its numbers are small. It points to the tensor where that can be
    multiplied as it is, and to a converted copy in scratch memory otherwise. Rows and columns go on
    with zeros up to the multiples that a product takes.
    """
    if limbs_of(dtype) > 1:
        return _make_key_tile_of_limbs(dtype, operand)
    as_matrix = pointer_to(product_dtype(dtype))
    in_pairs = product_dtype(dtype) == PAIRS
    stored, step = pointer_to(dtype if in_pairs else compute_dtype(dtype)), 2 if in_pairs else 1
    may_stay = product_dtype(dtype) in (dtype, PAIRS)
    ROWS, DEPTH = sizes_of(dtype).rows, sizes_of(dtype).depth
    copy_row, key_row = make_copy_row(compute_dtype(dtype)), make_key_row(operand)
    row_stride_name, column_stride_name = f"{operand}_row_stride", f"{operand}_column_stride"
    dim_name = dim_name_of(operand)
    # Rows that are a multiple of a kilobyte apart share few sets of the cache.
    aliasing = 1024 // ELEMENTS[dtype].size

    @njit
    def copied(parameters, piece, scratch, key_start, count):
        columns = field(parameters, dim_name)
        width = round_up(columns, max(DEPTH, 2))
        target = stored(address_of(scratch))
        for row in range(count):
            source = key_row(parameters, piece, key_start + row)
            column_stride = field(parameters, column_stride_name)
            copy_row(shift(target, row * width), source, column_stride, columns, width)
        for row in range(count, round_up(count, ROWS)):
            copy_row(shift(target, row * width), target, 1, 0, width)
        return (as_matrix(address_of(target)), width // step, DEPTH // step, 0), True

    if not may_stay:
        return copied

    @njit
    def tile(parameters, piece, scratch, key_start, count):
        row_stride = field(parameters, row_stride_name)
        column_stride = field(parameters, column_stride_name)
        together = lie_together(parameters, key_start, count)
        if step == 2:
            odd = row_stride % 2 != 0 or field(parameters, dim_name) % DEPTH != 0
            together = together and column_stride == 1 and count % ROWS == 0 and not odd
        if not together or row_stride % aliasing == 0:
            return copied(parameters, piece, scratch, key_start, count)
        source = key_row(parameters, piece, key_start)
        group_stride = column_stride * DEPTH // step
        return (as_matrix(address_of(source)), row_stride // step, group_stride, 0), True

    return tile


def _make_key_tile_of_limbs(dtype: str, operand: str) -> Callable:
    """Make a tile as `make_key_tile` does, for dtypes of several limbs."""
    ROWS = sizes_of(dtype).rows
    as_elements, as_pairs = pointer_to("bfloat16"), pointer_to(PAIRS)
    fill, key_row = make_fill("float32"), make_key_row(operand)
    split_row = make_row_splitter(limbs_of(dtype), lanes_of("float32"))
    split_stored_row = make_stored_row_splitter(dtype, operand)
    dim_name = dim_name_of(operand)
    # All rows of a group of columns, and then those of the next.
    group = KEY_BLOCK * GROUP_ELEMENTS

    @njit
    def tile(parameters, piece, scratch, key_start, count):
        width = round_up(field(parameters, dim_name), ROWS)
        limb_stride = KEY_BLOCK * width // 2
        elements = as_elements(address_of(scratch))
        # It lies behind three limbs.
        line = shift(scratch, 3 * limb_stride)
        small = True
        for row in range(count):
            source = key_row(parameters, piece, key_start + row)
            target = shift(elements, row * GROUP_ELEMENTS)
            small = (
                split_stored_row(parameters, target, group, 2 * limb_stride, line, source, width)
                and small
            )
        if count % ROWS != 0:
            fill(line, width, 0.0)
            for row in range(count, round_up(count, ROWS)):
                target = shift(elements, row * GROUP_ELEMENTS)
                split_row(target, group, 2 * limb_stride, line, width)
        return (as_pairs(address_of(scratch)), GROUP, group // 2, limb_stride), small

    return tile


@functools.cache
def make_transposed_tile(dtype: str) -> Callable:
    """Make the function that gives a tile as the left matrix of a product that is summed over the
    keys.

    ``transposed_tile(scratch, tile, count, columns)`` takes the matrix that ``tile`` returned.
    """
    if limbs_of(dtype):
        return _make_transposed_tile_of_limbs(dtype)
    if product_dtype(dtype) != PAIRS:

        @njit
        def swapped(scratch, tile, count, columns):
            pointer, row_stride, group_stride, limb_stride = tile
            return pointer, group_stride, row_stride, limb_stride

        return swapped

    LANES = lanes_of("float32")
    as_elements, as_pairs = pointer_to("bfloat16"), pointer_to(PAIRS)

    @njit
    def pack_two(line, upper, lower, columns):
        whole = columns // LANES * LANES
        for column in range(0, whole, LANES):
            first, second = load_vector(upper, column, LANES), load_vector(lower, column, LANES)
            store(line, column, pack_pairs(first, second))
        elements = as_elements(address_of(line))
        for column in range(whole, columns):
            store(elements, 2 * column, load(upper, column))
            store(elements, 2 * column + 1, load(lower, column))

    @njit
    def pack_one(line, upper, columns):
        elements = as_elements(address_of(line))
        for column in range(columns):
            store(elements, 2 * column, load(upper, column))
            store(elements, 2 * column + 1, 0.0)

    @njit
    def packed(scratch, tile, count, columns):
        pointer, row_stride, _, limb_stride = tile
        source, target = as_elements(address_of(pointer)), as_pairs(address_of(scratch))
        for key in range(0, count - 1, 2):
            upper = shift(source, key * row_stride * 2)
            lower = shift(upper, row_stride * 2)
            pack_two(shift(target, key // 2 * columns), upper, lower, columns)
        if count % 2 == 1:
            last = shift(source, (count - 1) * row_stride * 2)
            pack_one(shift(target, count // 2 * columns), last, columns)
        return target, 1, columns, limb_stride

    return packed


def _make_transposed_tile_of_limbs(dtype: str) -> Callable:
    """Transpose a tile so that the keys of a column are adjacent, as a matrix unit takes them.

    It holds a group of keys for all columns, and then the next group.
    """
    LANES, ROWS, LIMBS = lanes_of("float32"), sizes_of(dtype).rows, limbs_of(dtype)
    as_elements, as_pairs = pointer_to("bfloat16"), pointer_to(PAIRS)

    @njit
    def transposed(scratch, tile, count, columns):
        pointer, row_stride, group_stride, limb_stride = tile
        width = round_up(columns, ROWS)
        transposed_group, transposed_limb_stride = width * GROUP, width * KEY_BLOCK // 2
        for number in range(LIMBS):
            source = as_elements(address_of(shift(pointer, number * limb_stride)))
            target = as_pairs(address_of(shift(scratch, number * transposed_limb_stride)))
            for key in range(0, round_up(count, ROWS), 2 * LANES):
                line = shift(target, key // GROUP_ELEMENTS * transposed_group + key // 2 % GROUP)
                for column in range(0, width, LANES):
                    group = column // GROUP_ELEMENTS * group_stride * 2
                    place = key * row_stride * 2 + group + column % GROUP_ELEMENTS
                    transpose_pairs(
                        shift(line, column * GROUP), GROUP,
                        shift(source, place), row_stride * 2, LANES,
                    )  # fmt: skip
        return as_pairs(address_of(scratch)), GROUP, transposed_group, transposed_limb_stride

    return transposed
