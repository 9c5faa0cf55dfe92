"""Multiply few queries by keys, which are read as they are stored."""

from __future__ import annotations

from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention.decode_sums import make_line_prefetcher
from foo_ops.kernels.attention.key_tiles import lie_together, make_key_row
from foo_ops.kernels.attention.parameters import TILE_STRIDE, dim_name_of
from foo_ops.kernels.lang.scratch import field
from foo_ops.kernels.simd.memory import address_of, load_vector, pointer_to, shift, store
from foo_ops.kernels.simd.narrow import PAIRS
from foo_ops.kernels.simd.register_tiles import tile_dot, tile_store_sums, tile_zero
from foo_ops.kernels.simd.transpose import make_copy_row, round_up
from foo_ops.kernels.simd.types import compute_dtype, lanes_of

# Queries that are computed together.
MOST_OF_GROUP = 4


def make_rows(dtype: str, stored: str, step: int, operand: str) -> Callable:
    """Make ``rows(parameters, piece, scratch, key_start, count)``: a pointer and the stride of a
    key.

    The tensor, of dtype ``stored``, is read itself where its rows are whole vectors of adjacent
    elements, ``step`` of which enter a product at a time. Otherwise the rows are copied and filled
    up with zeros.
    """
    vector = lanes_of(compute_dtype(dtype)) * step
    as_stored = pointer_to(stored)
    copy_row, key_row = make_copy_row(compute_dtype(stored)), make_key_row(operand)
    row_stride_name, column_stride_name = f"{operand}_row_stride", f"{operand}_column_stride"
    dim_name = dim_name_of(operand)

    @njit
    def rows(parameters, piece, scratch, key_start, count):
        columns = field(parameters, dim_name)
        column_stride = field(parameters, column_stride_name)
        row_stride = field(parameters, row_stride_name)
        whole = column_stride == 1 and columns % vector == 0 and row_stride % step == 0
        if whole and lie_together(parameters, key_start, count):
            return key_row(parameters, piece, key_start), row_stride
        width = round_up(columns, vector)
        target = as_stored(address_of(scratch))
        for row in range(count):
            source = key_row(parameters, piece, key_start + row)
            copy_row(shift(target, row * width), source, column_stride, columns, width)
        return target, width

    return rows


def make_products(dtype: str, stored: str, in_products: str) -> Callable:
    """Make ``products(target, keys, key_stride, queries, width, rows, ahead, count)``: k.q,
    transposed. ``ahead`` is how many rows further on are fetched.

    Keys and queries are of dtype bfloat16x2 if ``in_products`` is. Otherwise keys are as they are
    ``stored`` and queries are in the compute dtype.
    """
    LANES = lanes_of(compute_dtype(dtype))

    loaded = PAIRS if in_products == PAIRS else stored

    def panel(KEYS: int, QUERIES: int) -> Callable:
        prefetch_lines = make_line_prefetcher(loaded, KEYS, LANES)

        @njit
        def tile(target, keys, key_stride, queries, width, ahead):
            sums = tile_zero(target, KEYS, QUERIES, LANES)
            later = shift(keys, ahead * key_stride)
            for column in range(0, width, LANES):
                prefetch_lines(later, key_stride, width, column)
                sums = tile_dot(
                    sums, shift(keys, column), key_stride, shift(queries, column), width
                )
            tile_store_sums(sums, target, TILE_STRIDE)

        @njit
        def products(target, keys, key_stride, queries, width, ahead, first_key, count):
            key = first_key
            while key + KEYS <= count:
                place = shift(target, key * TILE_STRIDE)
                tile(place, shift(keys, key * key_stride), key_stride, queries, width, ahead)
                key += KEYS
            return key

        return products

    QUERIES = min(MOST_OF_GROUP, LANES)
    for_groups, for_group = panel(LANES // QUERIES, QUERIES), panel(1, QUERIES)
    for_singles, for_single = panel(LANES, 1), panel(1, 1)

    @njit
    def all_products(target, keys, key_stride, queries, width, rows, ahead, count):
        if rows == 1:
            key = for_singles(target, keys, key_stride, queries, width, ahead, 0, count)
            for_single(target, keys, key_stride, queries, width, ahead, key, count)
        else:
            for row in range(0, rows, QUERIES):
                place, some = shift(target, row), shift(queries, row * width)
                key = for_groups(place, keys, key_stride, some, width, ahead, 0, count)
                for_group(place, keys, key_stride, some, width, ahead, key, count)

    return all_products


def make_query_matrix(dtype: str, in_products: str) -> Callable:
    """Make ``as_queries(target, block, count)``, which packs the block in pairs where needed."""
    if in_products != PAIRS:

        @njit
        def themselves(target, block, count):
            return block

        return themselves

    LANES = lanes_of(compute_dtype(dtype))
    as_elements, as_pairs = pointer_to(dtype), pointer_to(PAIRS)

    @njit
    def rounded(target, block, count):
        elements = as_elements(address_of(target))
        for index in range(0, count, LANES):
            store(elements, index, load_vector(block, index, LANES))
        return as_pairs(address_of(target))

    return rounded
