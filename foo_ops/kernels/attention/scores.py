"""Score tiles, and the tiles of keys, values and weights for the products around them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention.operands import (
    BIAS_BOOL,
    BIAS_NONE,
    BIAS_OF_QUERY_DTYPE,
    KEY_BLOCK,
    QUERY_BLOCK,
    TILE_STRIDE,
    dim_name_of,
    lowest_score,
    make_block_loader,
    make_limb_transpose,
    make_next_panel,
    make_operand_row,
    make_panel_packer,
    make_right_matrix,
    make_stored_row_splitter,
    make_tile_operation,
    second,
)
from foo_ops.kernels.attention.programs import make_program_steps
from foo_ops.kernels.lang.random import WORDS, store_dropout_mask
from foo_ops.kernels.lang.scratch import field, row_of
from foo_ops.kernels.math.exponential import tanh, tanh_derivative
from foo_ops.kernels.products.limbs import GROUP_ELEMENTS, limbs_of, make_row_splitter
from foo_ops.kernels.products.on_amx import GROUP
from foo_ops.kernels.products.operands import (
    make_products,
    make_step_counter,
    product_dtype,
    sizes_of,
)
from foo_ops.kernels.simd.arithmetic import absolute, less, maximum, select, splat
from foo_ops.kernels.simd.memory import address_of, load, load_vector, pointer_to, shift, store
from foo_ops.kernels.simd.narrow import PAIRS, interleave, pack_pairs
from foo_ops.kernels.simd.transpose import (
    make_copy_row,
    make_fill,
    round_up,
    transpose_pairs,
    transpose_square,
)
from foo_ops.kernels.simd.types import ELEMENTS, compute_dtype, lanes_of

# ------------------------------------------------------------------------------------------- scores

# Computes a score tile: scale, soft cap, bias, ALiBi and mask.
#
#     score = softcap * tanh(scale * k.q / softcap) + bias - slope * |distance|
#
# (soft cap: Gemma Team 2024, Gemma 2, section 2; ALiBi: Press et al. 2022, section 3). Query i sees
# the keys from i + first_visible to i + last_visible.


# Rows of `row_facts`, of QUERY_BLOCK elements each: a query's position in its head's part of the
# block, in the compute type; its ALiBi slope; and, as int32, its query and head number.
POSITIONS, SLOPES, QUERIES, HEADS = (row * QUERY_BLOCK for row in range(4))
ROW_FACTS = 4


@functools.cache
def make_row_facts_filler(dtype: str) -> Callable:
    """Make ``fill_row_facts(parameters, piece, row_facts, columns)``, called once for a block."""
    fill = make_fill(compute_dtype(dtype))
    as_int32 = pointer_to("int32")

    @njit
    def fill_row_facts(parameters, piece, row_facts, columns):
        for row in range(ROW_FACTS):
            fill(shift(row_facts, row * QUERY_BLOCK), columns, 0.0)
        queries = as_int32(address_of(shift(row_facts, QUERIES)))
        heads = as_int32(address_of(shift(row_facts, HEADS)))
        for index in range(piece.heads):
            head = piece.head + index
            slope = 0.0
            if parameters.has_alibi_slopes:
                slope = load(row_of(parameters, "alibi_slopes", piece.batch, head, 0), 0)
            number = piece.batch * parameters.query_heads + head
            if parameters.has_dropout_heads:
                number = load(row_of(parameters, "dropout_heads", piece.batch, head, 0), 0)
            for row in range(piece.query_count):
                block_row = index * piece.query_count + row
                store(row_facts, POSITIONS + block_row, row)
                store(row_facts, SLOPES + block_row, slope)
                store(queries, block_row, piece.query_start + row)
                store(heads, block_row, number)

    return fill_row_facts


@functools.cache
def make_transpose_to_tile(dtype: str, source_dtype: str) -> Callable:
    """Make ``transpose(target, source, row_stride, column_stride, rows, columns)`` for any strides.

    target[column * TILE_STRIDE + row] = source[row, column].
    """
    LANES = lanes_of(dtype)
    in_squares = ELEMENTS[source_dtype].compute is ELEMENTS[dtype].compute

    @njit
    def one_by_one(
        target, source, row_stride, column_stride, first_row, rows, first_column, columns
    ):
        for column in range(first_column, columns):
            line = shift(target, column * TILE_STRIDE)
            start = shift(source, column * column_stride)
            for row in range(first_row, rows):
                store(line, row, load(start, row * row_stride))

    if not in_squares:

        @njit
        def transpose(target, source, row_stride, column_stride, rows, columns):
            one_by_one(target, source, row_stride, column_stride, 0, rows, 0, columns)

        return transpose

    @njit
    def transpose_by_squares(target, source, row_stride, column_stride, rows, columns):
        whole_rows = rows // LANES * LANES if column_stride == 1 else 0
        whole_columns = columns // LANES * LANES
        for row in range(0, whole_rows, LANES):
            for column in range(0, whole_columns, LANES):
                transpose_square(
                    shift(target, column * TILE_STRIDE + row), TILE_STRIDE,
                    shift(source, row * row_stride + column), row_stride, LANES,
                )  # fmt: skip
        one_by_one(target, source, row_stride, column_stride, 0, whole_rows, whole_columns, columns)
        one_by_one(target, source, row_stride, column_stride, whole_rows, rows, 0, columns)

    return transpose_by_squares


@functools.cache
def make_bias_adder(dtype: str) -> Callable:
    """Make ``add_bias(parameters, piece, target, scratch, key_start, columns, count)``."""
    compute, scalar = compute_dtype(dtype), ELEMENTS[dtype].compute
    LANES = lanes_of(compute)
    as_mask, as_own, as_float32 = pointer_to("mask"), pointer_to(dtype), pointer_to("float32")
    fill = make_fill(compute)
    transpose_mask, transpose_own, transpose_float32 = (
        make_transpose_to_tile(compute, source) for source in ("mask", dtype, "float32")
    )

    LOWEST = lowest_score(dtype)

    @njit
    def load_bias(parameters, piece, target, key_start, count):
        row_stride = parameters.attn_bias_row_stride
        column_stride = parameters.attn_bias_column_stride
        kind, address = parameters.bias_kind, address_of(parameters.attn_bias)
        rows = piece.query_count
        for index in range(piece.heads):
            offset = (
                piece.batch * parameters.attn_bias_batch_stride
                + (piece.head + index) * parameters.attn_bias_head_stride
                + piece.query_start * row_stride
                + key_start * column_stride
            )
            place = shift(target, index * rows)
            if kind == BIAS_BOOL:
                mask = shift(as_mask(address), offset)
                transpose_mask(place, mask, row_stride, column_stride, rows, count)
            elif kind == BIAS_OF_QUERY_DTYPE:
                own = shift(as_own(address), offset)
                transpose_own(place, own, row_stride, column_stride, rows, count)
            else:
                wide = shift(as_float32(address), offset)
                transpose_float32(place, wide, row_stride, column_stride, rows, count)

    @njit
    def add_bias(parameters, piece, target, scratch, key_start, columns, count):
        used = piece.heads * piece.query_count
        for key in range(count):
            fill(shift(scratch, key * TILE_STRIDE + used), columns - used, 0.0)
        load_bias(parameters, piece, scratch, key_start, count)
        # A False in the mask hides even a NaN, which a sum would keep.
        limit = splat(scalar(0.0 if parameters.bias_kind == BIAS_BOOL else -math.inf), LANES)
        hidden, lowest = splat(scalar(-math.inf), LANES), splat(scalar(LOWEST), LANES)
        highest, infinite = splat(scalar(-LOWEST), LANES), splat(scalar(math.inf), LANES)
        for key in range(count):
            for column in range(0, columns, LANES):
                index = key * TILE_STRIDE + column
                score, bias = load_vector(target, index, LANES), load_vector(scratch, index, LANES)
                sum_ = score + bias
                sum_ = select(less(hidden, sum_), maximum(lowest, sum_), sum_)
                limited = select(less(sum_, infinite), highest, sum_)
                sum_ = select(less(highest, sum_), limited, sum_)
                store(target, index, select(less(bias, limit), bias, sum_))

    return add_bias


@functools.cache
def make_score_mod(dtype: str, differentiates: bool = False) -> Callable:
    """Make the function that turns products k.q into scores, without the mask.

    ``apply_score_mod(parameters, piece, row_facts, target, scratch, slopes, key_start, columns,
    count)``. Scores are natural logarithms. With ``differentiates`` and a soft cap, the derivative
    of the soft cap, 1 - tanh^2, is written to ``slopes``, a tile; otherwise ``slopes`` may be
    ``scratch``.
    """
    compute = ELEMENTS[dtype].compute
    LANES = lanes_of(compute_dtype(dtype))
    add_bias, LOWEST = make_bias_adder(dtype), lowest_score(dtype)

    @njit
    def multiply(target, factor, columns, count):
        factors = splat(compute(factor), LANES)
        for key in range(count):
            for column in range(0, columns, LANES):
                index = key * TILE_STRIDE + column
                store(target, index, load_vector(target, index, LANES) * factors)

    @njit
    def cap(target, slopes, softcap, columns, count):
        # The inverse of a very small cap would overflow float32.
        inverse = splat(compute(min(1.0 / softcap, -LOWEST)), LANES)
        caps = splat(compute(softcap), LANES)
        for key in range(count):
            for column in range(0, columns, LANES):
                index = key * TILE_STRIDE + column
                share = load_vector(target, index, LANES) * inverse
                if differentiates:
                    store(slopes, index, tanh_derivative(share))
                store(target, index, caps * tanh(share))

    @njit
    def subtract_distances(row_facts, target, first_distance, columns, count):
        """Subtract ALiBi.

        ``first_distance`` is from the block's first query to the tile's first key.
        """
        for key in range(count):
            offset = splat(compute(first_distance - key), LANES)
            for column in range(0, columns, LANES):
                distance = absolute(load_vector(row_facts, POSITIONS + column, LANES) + offset)
                slope = load_vector(row_facts, SLOPES + column, LANES)
                index = key * TILE_STRIDE + column
                store(target, index, load_vector(target, index, LANES) - slope * distance)

    @njit
    def apply_score_mod(
        parameters, piece, row_facts, target, scratch, slopes, key_start, columns, count
    ):
        multiply(target, parameters.scale, columns, count)
        if parameters.softcap > 0.0:
            cap(target, slopes, parameters.softcap, columns, count)
        if parameters.bias_kind != BIAS_NONE:
            add_bias(parameters, piece, target, scratch, key_start, columns, count)
        if parameters.has_alibi_slopes:
            first_distance = piece.query_start + piece.alignment - key_start
            subtract_distances(row_facts, target, first_distance, columns, count)

    return apply_score_mod


@functools.cache
def make_mask(dtype: str) -> Callable:
    """Make ``hide(piece, row_facts, target, first_query, queries, key_start, columns, count)``.

    A score becomes -infinity where the query does not see the key. The columns hold ``queries``
    queries from ``first_query`` on.
    """
    compute = ELEMENTS[dtype].compute
    LANES = lanes_of(compute_dtype(dtype))

    @njit
    def hide_outside(row_facts, target, first, last, columns, count):
        """Hide all keys except those from ``first`` to ``last``, for the block's first query."""
        hidden = splat(compute(-math.inf), LANES)
        for key in range(count):
            smallest = splat(compute(key - last), LANES)
            largest = splat(compute(key - first), LANES)
            for column in range(0, columns, LANES):
                index = key * TILE_STRIDE + column
                position = load_vector(row_facts, POSITIONS + column, LANES)
                score = load_vector(target, index, LANES)
                score = select(less(position, smallest), hidden, score)
                store(target, index, select(less(largest, position), hidden, score))

    @njit
    def hide(piece, row_facts, target, first_query, queries, key_start, columns, count):
        first = piece.first_visible - key_start
        last = piece.last_visible - key_start
        if first_query + last < count - 1 or first_query + queries - 1 + first > 0:
            start = piece.query_start
            hide_outside(row_facts, target, start + first, start + last, columns, count)

    return hide


@functools.cache
def make_scores(
    dtype: str, has_options: bool, has_programs: bool, differentiates: bool = False
) -> Callable:
    """Make the function that computes a score tile.

    ``scores(parameters, piece, row_facts, target, scratch, slopes, keys, queries, are_small,
    first_query, query_count, key_start, columns, count)``: target[key, query] is the score before
    the multiplication by parameters.factor (log2(e), times the scale if there is no score_mod), and
    -infinity where the query does not see the key. ``scratch`` and ``slopes`` have room for a tile:
    see `make_score_mod`. If programs modify the scores and have gradients, ``slopes`` receives the
    products. Rows beyond ``count``, up to the multiple that a product needs, are undefined.
    """
    matmul, _, _ = make_products(dtype)
    steps, ROWS = make_step_counter(dtype), sizes_of(dtype).rows
    apply_score_mod, hide = make_score_mod(dtype, differentiates), make_mask(dtype)
    modify, _ = make_program_steps(dtype)
    copy = make_tile_operation(compute_dtype(dtype), second)

    @njit
    def scores(
        parameters, piece, row_facts, target, scratch, slopes, keys, queries, are_small,
        first_query, query_count, key_start, columns, count,
    ):  # fmt: skip
        matmul(
            target, TILE_STRIDE, keys, queries, round_up(count, ROWS), columns,
            steps(parameters.head_dim), False, are_small,
        )  # fmt: skip
        if has_options and parameters.modifies:
            apply_score_mod(
                parameters, piece, row_facts, target, scratch, slopes, key_start, columns, count
            )
        if has_programs:
            if differentiates and parameters.gradient_function != 0:
                copy(slopes, target, columns, count)
            modify(parameters, piece, target, first_query, query_count, key_start, columns, count)
        else:
            hide(piece, row_facts, target, first_query, query_count, key_start, columns, count)

    return scores


@functools.cache
def make_dropout_mask(dtype: str) -> Callable:
    """Make the function that writes a tile of the dropout mask.

    ``load_dropout_mask(parameters, row_facts, target, key_start, first_column, columns, count)``
    writes 1.0 where dropout keeps a weight and 0.0 elsewhere. ``key_start`` must be a multiple of
    WORDS.
    """
    LANES = lanes_of(compute_dtype(dtype))
    as_int32 = pointer_to("int32")

    @njit
    def load_dropout_mask(parameters, row_facts, target, key_start, first_column, columns, count):
        queries = shift(as_int32(address_of(shift(row_facts, QUERIES))), first_column)
        heads = shift(as_int32(address_of(shift(row_facts, HEADS))), first_column)
        for key in range(0, count, WORDS):
            for column in range(0, columns, LANES):
                store_dropout_mask(
                    shift(target, key * TILE_STRIDE + column), TILE_STRIDE,
                    (key_start + key) // WORDS, shift(queries, column), shift(heads, column),
                    parameters.seed, parameters.dropout_threshold, LANES,
                )  # fmt: skip

    return load_dropout_mask


# ------------------------------------------------------------------------- tiles of keys and values

# Finds tiles of keys and values, or copies them, as the left matrices of products.


@functools.cache
def make_key_row(operand: str) -> Callable:
    """Make ``key_row(parameters, piece, key)``: the address of a key's or value's row.

    With a paged cache, the row lies in the page that the block table names.
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
    """Whether the rows of these keys have one stride: they lie in one page."""
    if parameters.page_size > 0:
        return key_start % parameters.page_size + count <= parameters.page_size
    return True


@functools.cache
def make_key_tile(dtype: str, operand: str) -> Callable:
    """Make the function that returns a tile of keys or values as the left matrix of a product.

    ``tile(parameters, piece, scratch, key_start, count)`` returns the matrix, whose steps go along
    the head dimension, and whether its numbers are small. The matrix is the tensor itself where its
    layout allows, and a converted copy in scratch memory otherwise. Rows and columns are padded
    with zeros to the multiples that a product needs.
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
    # Rows at a distance of a multiple of 1 KiB share few sets of the cache.
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
    """`make_key_tile` for dtypes of several limbs."""
    ROWS = sizes_of(dtype).rows
    as_elements, as_pairs = pointer_to("bfloat16"), pointer_to(PAIRS)
    fill, key_row = make_fill("float32"), make_key_row(operand)
    split_row = make_row_splitter(limbs_of(dtype), lanes_of("float32"))
    split_stored_row = make_stored_row_splitter(dtype, operand)
    dim_name = dim_name_of(operand)
    # All rows of a group of columns lie before those of the next group.
    group = KEY_BLOCK * GROUP_ELEMENTS

    @njit
    def tile(parameters, piece, scratch, key_start, count):
        width = round_up(field(parameters, dim_name), ROWS)
        limb_stride = KEY_BLOCK * width // 2
        elements = as_elements(address_of(scratch))
        # The line lies after the room of three limbs.
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
    """Make the function that returns a tile as the left matrix of a product summed over the keys.

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
    """Transpose a tile so that the keys of a column are adjacent, as a matrix unit needs them.

    All columns of a group of keys lie before those of the next group.
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


# ---------------------------------------------------------------- matrices of the backward products

# Turns a tile of weights, or of gradients of the scores, into matrices of the backward products.


# On a matrix unit, all keys of a group of queries lie before those of the next group.
LIMB_GROUP = KEY_BLOCK * GROUP


@functools.cache
def make_tile_matrices(dtype: str) -> tuple[Callable, Callable, Callable]:
    """Make the functions that turn a tile of weights, or of gradients, into matrices of products.

    ``split(limbs, tile, start, columns, rows)`` must be called for a panel before the others.

    ``as_right_matrix(target, limbs, panel, start, columns, rows)`` makes the right matrix of a
    panel, summed over the keys. The row after the last must be zero.

    ``as_left_matrix(limbs, tile, columns, count)`` makes the left matrix of all panels, summed over
    the queries: unchanged rows, or pairs of neighbouring columns, padded with rows of zeros to the
    multiple that a product needs.
    """
    if limbs_of(dtype):
        return _make_tile_matrices_of_limbs(dtype)
    right_matrix, as_left_matrix = make_right_matrix(dtype), _make_left_matrix(dtype)

    @njit
    def split(limbs, tile, start, columns, rows):
        pass

    @njit
    def as_right_matrix(target, limbs, panel, start, columns, rows):
        return right_matrix(target, TILE_STRIDE, panel, TILE_STRIDE, rows, columns)

    return split, as_right_matrix, as_left_matrix


def _make_left_matrix(dtype: str) -> Callable:
    """Make ``as_left_matrix`` for products on vectors."""
    if product_dtype(dtype) != PAIRS:

        @njit
        def themselves(limbs, tile, columns, count):
            return tile, TILE_STRIDE, 1, 0

        return themselves

    LANES = lanes_of("float32")
    as_elements, as_pairs = pointer_to("bfloat16"), pointer_to(PAIRS)

    @njit
    def rounded(limbs, tile, columns, count):
        elements = as_elements(address_of(limbs))
        for key in range(count):
            for column in range(0, columns, LANES):
                index = key * TILE_STRIDE + column
                store(elements, index, load_vector(tile, index, LANES))
        return as_pairs(address_of(limbs)), TILE_STRIDE // 2, 1, 0

    return rounded


def _make_tile_matrices_of_limbs(dtype: str) -> tuple[Callable, Callable, Callable]:
    """Split each number once; a pair of two keys is their limbs side by side."""
    LANES, LIMBS, ROWS = lanes_of("float32"), limbs_of(dtype), sizes_of(dtype).rows
    split_row, fill, steps = (
        make_row_splitter(LIMBS, LANES),
        make_fill("float32"),
        make_step_counter(dtype),
    )
    as_elements, as_pairs = pointer_to("bfloat16"), pointer_to(PAIRS)
    group, limb_stride = LIMB_GROUP, KEY_BLOCK * TILE_STRIDE // 2

    @njit
    def split(limbs, tile, start, columns, rows):
        elements = as_elements(address_of(shift(limbs, start // GROUP_ELEMENTS * group)))
        for key in range(round_up(rows, 2)):
            source = shift(tile, key * TILE_STRIDE + start)
            split_row(
                shift(elements, key * GROUP_ELEMENTS), 2 * group, 2 * limb_stride, source, columns
            )

    @njit
    def as_right_matrix(target, limbs, panel, start, columns, rows):
        pairs, target_limb_stride = as_pairs(address_of(target)), steps(rows) * TILE_STRIDE
        first_group = shift(limbs, start // GROUP_ELEMENTS * group)
        for number in range(LIMBS):
            elements = as_elements(address_of(shift(first_group, number * limb_stride)))
            for key in range(0, rows, 2):
                line = number * target_limb_stride + key // 2 * TILE_STRIDE
                for column in range(0, columns, 2 * LANES):
                    place = column // GROUP_ELEMENTS * 2 * group + column % GROUP_ELEMENTS
                    upper = shift(elements, place + key * GROUP_ELEMENTS)
                    lower = shift(upper, GROUP_ELEMENTS)
                    interleave(pairs, line + column, upper, lower, LANES)
            for step in range((rows + 1) // 2, steps(rows)):
                fill(shift(target, number * target_limb_stride + step * TILE_STRIDE), columns, 0.0)
        return pairs, TILE_STRIDE, target_limb_stride

    @njit
    def as_left_matrix(limbs, tile, columns, count):
        missing = round_up(count, ROWS) - count
        for number in range(LIMBS):
            for first in range(0, columns, GROUP_ELEMENTS):
                place = number * limb_stride + first // GROUP_ELEMENTS * group + count * GROUP
                fill(shift(limbs, place), missing * GROUP, 0.0)
        return as_pairs(address_of(limbs)), GROUP, group, limb_stride

    return split, as_right_matrix, as_left_matrix


# ------------------------------------------------------------------------ rows of the backward pass

# Packs the rows of query and grad_output of a backward kernel's block as right matrices.


@functools.cache
def make_block_rows(dtype: str, operand: str) -> Callable:
    """Make the function that finds a block's rows.

    ``block_rows(parameters, piece, scratch, columns, rows, width)`` returns a pointer to the rows
    and their stride. `make_block_loader` copies them to ``scratch``, unless a matrix unit can load
    them in place.
    """
    load_block, operand_row = make_block_loader(dtype, operand), make_operand_row(operand)
    row_stride_name, column_stride_name = f"{operand}_row_stride", f"{operand}_column_stride"
    may_stay = limbs_of(dtype) > 0 and dtype == compute_dtype(dtype)
    DEPTH = sizes_of(dtype).depth

    @njit
    def block_rows(parameters, piece, scratch, columns, rows, width):
        is_whole = columns % DEPTH == 0 and field(parameters, column_stride_name) == 1
        if may_stay and is_whole and piece.heads == 1 and piece.query_count == rows:
            return operand_row(parameters, piece, 0), field(parameters, row_stride_name)
        load_block(parameters, piece, scratch, columns, rows, width)
        return scratch, width

    return block_rows


@functools.cache
def make_row_packer(dtype: str) -> Callable:
    """Make the function that packs a block's rows for both kinds of products.

    ``pack_rows(parameters, panels, pairs, pair_stride, pair_width, scratch, rows, stride, dim,
    width, columns)`` fills ``panels`` like `make_panel_packer`, for sums over the head dimension.
    It returns the right matrix for sums over the rows, with at least ``pair_width`` numbers in each
    step, and whether all numbers are small.
    """
    if limbs_of(dtype):
        return _make_row_packer_for_matrix_unit(dtype)
    (pack, _), as_right_matrix = make_panel_packer(dtype), make_right_matrix(dtype)

    @njit
    def pack_rows(
        parameters, panels, pairs, pair_stride, pair_width, scratch, rows, stride, dim, width,
        columns,
    ):  # fmt: skip
        pack(parameters, panels, scratch, rows, stride, dim, width, columns)
        factor = as_right_matrix(pairs, pair_stride, rows, stride, columns, pair_width)
        return factor, True

    return pack_rows


def _make_row_packer_for_matrix_unit(dtype: str) -> Callable:
    """Split each row once; a pair of two rows is their limbs side by side."""
    LIMBS, LANES, ROOM = limbs_of(dtype), lanes_of("float32"), sizes_of(dtype).room
    next_panel, transpose_limbs = make_next_panel(dtype), make_limb_transpose(dtype)
    split_row = make_row_splitter(LIMBS, LANES)
    as_elements, as_pairs = pointer_to("bfloat16"), pointer_to(PAIRS)

    @njit
    def pair_rows(pairs, pair_stride, limb_stride, elements, width, rows):
        for number in range(LIMBS):
            for row in range(0, rows, 2):
                upper = shift(elements, (number * rows + row) * width)
                line = number * limb_stride + row // 2 * pair_stride
                for column in range(0, width, 2 * LANES):
                    first = shift(upper, column)
                    interleave(pairs, line + column, first, shift(first, width), LANES)

    @njit
    def pack_rows(
        parameters, panels, pairs, pair_stride, pair_width, scratch, rows, stride, dim, width,
        columns,
    ):  # fmt: skip
        elements, factor = as_elements(address_of(scratch)), as_pairs(address_of(pairs))
        start, small, limb_stride = 0, True, columns // 2 * pair_stride
        while start < columns:
            some, panel_stride = next_panel(parameters, columns - start)
            for row in range(some):
                line, source = shift(elements, row * width), shift(rows, (start + row) * stride)
                small = split_row(line, GROUP_ELEMENTS, some * width, source, width) and small
            place = shift(panels, start * (width + 1) * ROOM)
            transpose_limbs(place, panel_stride, scratch, dim, width, some)
            first = shift(factor, start // 2 * pair_stride)
            pair_rows(first, pair_stride, limb_stride, elements, width, some)
            start += some
        return (factor, pair_stride, limb_stride), small or LIMBS == 1

    return pack_rows
