"""Attend to some of the keys with few queries: output and logsumexp.

Where a block has no more than a vector of queries, vectors lie along the head dimension instead.
Keys and values are then read as they are, once, at the speed of memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import njit

from foo_ops.kernels.attention.int8_cache import make_int8_rows, make_no_scaler, make_tile_scaler
from foo_ops.kernels.attention.key_tiles import lie_together, make_key_row
from foo_ops.kernels.attention.output import make_finish, make_row_writer
from foo_ops.kernels.attention.parameters import (
    KEY_BLOCK,
    QUERY_BLOCK,
    TILE,
    TILE_STRIDE,
    argument_types,
    dim_name_of,
)
from foo_ops.kernels.attention.rows import make_block_loader
from foo_ops.kernels.attention.scores import (
    ROW_FACTS,
    make_dropout_mask,
    make_mask,
    make_row_facts_filler,
    make_score_mod,
)
from foo_ops.kernels.attention.softmax import make_online_softmax, make_softmax_start
from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.products.operands import step_of, vector_product_dtype
from foo_ops.kernels.vectors.arithmetic import fma, splat
from foo_ops.kernels.vectors.elements import ELEMENTS, compute_dtype, lanes_of
from foo_ops.kernels.vectors.memory import (
    address_of,
    load,
    load_vector,
    pointer_to,
    prefetch,
    shift,
    store,
)
from foo_ops.kernels.vectors.pairs import PAIRS
from foo_ops.kernels.vectors.register_tiles import (
    tile_dot,
    tile_load,
    tile_outer,
    tile_splat,
    tile_store,
    tile_store_sums,
    tile_zero,
)
from foo_ops.kernels.vectors.rows import make_copy_row, make_fill, round_up
from foo_ops.kernels.vectors.scratch import Scratch, make_kernel_with_scratch
from foo_ops.kernels.vectors.struct import field

# A block of more queries is for the forward kernel.
MOST_ROWS = 8
# Queries that are computed together.
GROUP = 4
# Rows that are prefetched before they are used, whole and in the order of memory, which the
# processor then follows by itself: 0.8 of the bandwidth, and half of it without.
AHEAD = 8


def _make_rows(dtype: str, operand: str) -> Callable:
    """Make ``rows(parameters, piece, scratch, key_start, count)``: a pointer and the stride of a
    key.

    The tensor itself is read where its rows are whole vectors of adjacent elements. Otherwise the
    rows are copied and filled up with zeros.
    """
    step = step_of(vector_product_dtype(dtype))
    vector = lanes_of(compute_dtype(dtype)) * step
    as_stored = pointer_to(dtype)
    copy_row, key_row = make_copy_row(compute_dtype(dtype)), make_key_row(operand)
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


@functools.cache
def _make_row_prefetcher(dtype: str) -> Callable:
    """Make ``prefetch_row(row, width)``, which fetches a row of elements of a dtype."""
    LINE = 64 // ELEMENTS[dtype].size

    @njit
    def prefetch_row(row, width):
        for column in range(0, width, LINE):
            prefetch(row, column)

    return prefetch_row


def _make_products(dtype: str) -> Callable:
    """Make ``products(target, keys, key_stride, queries, width, rows, count)``: k.q, transposed.

    Keys and queries are of dtype bfloat16x2 if products are of pairs. Otherwise keys are as they
    are stored and queries are in the compute dtype.
    """
    LANES = lanes_of(compute_dtype(dtype))
    prefetch_row = _make_row_prefetcher(PAIRS if vector_product_dtype(dtype) == PAIRS else dtype)

    def panel(KEYS: int, QUERIES: int) -> Callable:
        @njit
        def tile(target, keys, key_stride, queries, width):
            sums = tile_zero(target, KEYS, QUERIES, LANES)
            for key in range(AHEAD, AHEAD + KEYS):
                prefetch_row(shift(keys, key * key_stride), width)
            for column in range(0, width, LANES):
                sums = tile_dot(
                    sums, shift(keys, column), key_stride, shift(queries, column), width
                )
            tile_store_sums(sums, target, TILE_STRIDE)

        @njit
        def products(target, keys, key_stride, queries, width, first_key, count):
            key = first_key
            while key + KEYS <= count:
                place = shift(target, key * TILE_STRIDE)
                tile(place, shift(keys, key * key_stride), key_stride, queries, width)
                key += KEYS
            return key

        return products

    QUERIES = min(GROUP, LANES)
    for_groups, for_group = panel(LANES // QUERIES, QUERIES), panel(1, QUERIES)
    for_singles, for_single = panel(LANES, 1), panel(1, 1)

    @njit
    def all_products(target, keys, key_stride, queries, width, rows, count):
        if rows == 1:
            key = for_singles(target, keys, key_stride, queries, width, 0, count)
            for_single(target, keys, key_stride, queries, width, key, count)
        else:
            for row in range(0, rows, QUERIES):
                place, some = shift(target, row), shift(queries, row * width)
                key = for_groups(place, keys, key_stride, some, width, 0, count)
                for_group(place, keys, key_stride, some, width, key, count)

    return all_products


def _make_query_matrix(dtype: str) -> Callable:
    """Make ``as_queries(target, block, count)``, which packs the block in pairs where needed."""
    if vector_product_dtype(dtype) != PAIRS:

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


def _make_weighted_sums(dtype: str) -> Callable:
    """Make ``weighted_sums(sums, width, weights, values, value_stride, rows, count)``.

    sums[row] grows by the sum over the keys of weights[key, row] * values[key]. ``weights`` is a
    score tile, whose row after the last is overwritten; sums and weights must have room for whole
    groups of rows. Two keys are added at a time, so that values are read in the order in which they
    lie in memory: column by column, as in a product of matrices, they come at two thirds of its
    speed.
    """
    LANES = lanes_of(compute_dtype(dtype))
    prefetch_row, scalar = _make_row_prefetcher(dtype), ELEMENTS[dtype].compute

    def make_group(ROWS: int) -> Callable:
        @njit
        def add_two(sums, width, weights, first, second):
            left = tile_splat(weights, 1, ROWS, LANES)
            right = tile_splat(shift(weights, TILE_STRIDE), 1, ROWS, LANES)
            for column in range(0, width, LANES):
                place = shift(sums, column)
                group = tile_load(place, width, ROWS, 1, LANES)
                group = tile_outer(group, left, load_vector(first, column, LANES))
                group = tile_outer(group, right, load_vector(second, column, LANES))
                tile_store(group, place, width)

        return add_two

    add_single, add_group = make_group(1), make_group(GROUP)

    @njit
    def weighted_sums(sums, width, weights, values, value_stride, rows, count):
        if count % 2 == 1:
            # The last key is taken twice, by halves: an infinite value times 0 would be NaN.
            last = shift(weights, (count - 1) * TILE_STRIDE)
            for row in range(0, MOST_ROWS, LANES):
                halves = load_vector(last, row, LANES) * splat(scalar(0.5), LANES)
                store(last, row, halves)
                store(last, TILE_STRIDE + row, halves)
        for key in range(0, count, 2):
            factors, first = shift(weights, key * TILE_STRIDE), shift(values, key * value_stride)
            second = shift(first, value_stride if key + 1 < count else 0)
            for row in range(AHEAD, AHEAD + 2):
                prefetch_row(shift(first, row * value_stride), width)
            if rows == 1:
                add_single(sums, width, factors, first, second)
            else:
                for row in range(0, rows, GROUP):
                    add_group(shift(sums, row * width), width, shift(factors, row), first, second)

    return weighted_sums


@functools.cache
def make_scratch(dtype: str) -> Scratch:
    compute = compute_dtype(dtype)
    WIDTH = lanes_of(compute) * step_of(vector_product_dtype(dtype))

    @njit
    def sizes_of_block(parameters, piece):
        return round_up(parameters.head_dim, WIDTH), round_up(parameters.value_dim, WIDTH)

    def describe(head_width: Any, value_width: Any) -> dict[str, Any]:
        return {
            "scores": TILE,
            "dropout_mask": TILE,
            "largest": QUERY_BLOCK,
            "total": QUERY_BLOCK,
            "correction": QUERY_BLOCK,
            "row_facts": ROW_FACTS * QUERY_BLOCK,
            "block": head_width * MOST_ROWS,
            "queries": head_width * MOST_ROWS,
            "accumulator": value_width * MOST_ROWS,
            "sums": value_width * MOST_ROWS,
            "keys": head_width * KEY_BLOCK,
            "values": value_width * KEY_BLOCK,
        }

    return Scratch(compute, sizes_of_block, describe)


def make_decode_kernel(
    dtype: str, has_options: bool = True, cache_dtype: str | None = None
) -> Kernel:
    """Make the kernel for few queries. ``has_options``: bias, soft cap, ALiBi and dropout.

    ``cache_dtype`` is int8 for keys and values with scales, and None for those of the dtype.
    """
    compute = compute_dtype(dtype)
    LANES = lanes_of(compute)
    fill, weighted_sums = make_fill(compute), _make_weighted_sums(dtype)
    load_block, fill_row_facts = make_block_loader(dtype, "query"), make_row_facts_filler(dtype)
    make_rows = _make_rows if cache_dtype is None else make_int8_rows
    key_rows, value_rows = make_rows(dtype, "key"), make_rows(dtype, "value")
    scale_scores, scale_weights = (
        make_no_scaler() if cache_dtype is None else make_tile_scaler(dtype, operand)
        for operand in ("key", "value")
    )
    products, apply_score_mod, hide = _make_products(dtype), make_score_mod(dtype), make_mask(dtype)
    load_dropout_mask, step = make_dropout_mask(dtype), step_of(vector_product_dtype(dtype))
    as_queries = _make_query_matrix(dtype)
    as_keys = pointer_to(PAIRS if step == 2 else dtype)
    start_softmax, online_softmax = (
        make_softmax_start(dtype),
        make_online_softmax(dtype, compute, has_options),
    )
    finish, write = make_finish(dtype), make_row_writer(dtype, "output")
    scalar, layout = ELEMENTS[dtype].compute, make_scratch(dtype)
    sizes_of_block = layout.sizes_of

    @njit
    def add_tile(accumulator, sums, factors, rows, width):
        """Rescale the sums of all keys so far and add those of a tile.

        If each key were added to sums of thousands, it would be rounded to the digits of all of
        them.
        """
        for row in range(rows):
            factor = splat(scalar(load(factors, row)), LANES)
            for column in range(0, width, LANES):
                index = row * width + column
                before, own = (
                    load_vector(accumulator, index, LANES),
                    load_vector(sums, index, LANES),
                )
                store(accumulator, index, fma(before, factor, own))

    def decode(parameters, piece, memory):
        head_width, value_width = sizes_of_block(parameters, piece)
        rows = piece.heads * piece.query_count
        columns = round_up(rows, LANES)
        scores, dropout_mask, row_facts = memory.scores, memory.dropout_mask, memory.row_facts
        largest, total, correction = memory.largest, memory.total, memory.correction
        block, accumulator, sums = memory.block, memory.accumulator, memory.sums

        fill_row_facts(parameters, piece, row_facts, columns)
        load_block(parameters, piece, block, parameters.head_dim, MOST_ROWS, head_width)
        queries = as_queries(memory.queries, block, MOST_ROWS * head_width)
        start_softmax(parameters, piece, largest, total, columns)
        fill(accumulator, MOST_ROWS * value_width, 0.0)
        # Columns without a query are never written.
        for key in range(KEY_BLOCK):
            fill(shift(scores, key * TILE_STRIDE), columns, 0.0)

        for key_start in range(piece.key_start, piece.key_stop, KEY_BLOCK):
            count = min(KEY_BLOCK, piece.key_stop - key_start)
            keys, key_stride = key_rows(parameters, piece, memory.keys, key_start, count)
            values, value_stride = value_rows(parameters, piece, memory.values, key_start, count)
            products(
                scores, as_keys(address_of(keys)), key_stride // step,
                queries, head_width // step, rows, count,
            )  # fmt: skip
            scale_scores(parameters, piece, scores, key_start, columns, count)
            if has_options and parameters.modifies:
                apply_score_mod(
                    parameters,
                    piece,
                    row_facts,
                    scores,
                    dropout_mask,
                    dropout_mask,
                    key_start,
                    columns,
                    count,
                )
            hide(
                piece, row_facts, scores, piece.query_start, piece.query_count,
                key_start, columns, count,
            )  # fmt: skip
            if has_options and parameters.dropout_threshold > 0:
                load_dropout_mask(parameters, row_facts, dropout_mask, key_start, 0, columns, count)
            online_softmax(
                parameters, scores, dropout_mask, scores, largest, total, correction, columns, count
            )
            scale_weights(parameters, piece, scores, key_start, columns, count)
            fill(sums, (1 if rows == 1 else round_up(rows, GROUP)) * value_width, 0.0)
            weighted_sums(sums, value_width, scores, values, value_stride, rows, count)
            add_tile(accumulator, sums, correction, rows, value_width)

        is_key_split = piece.slot >= 0
        finish(parameters, piece, largest, total, correction, is_key_split)
        for block_row in range(rows):
            row, factor = shift(accumulator, block_row * value_width), load(correction, block_row)
            write(parameters, piece, row, factor, block_row, 0, parameters.value_dim, is_key_split)

    return make_kernel_with_scratch(decode, layout, argument_types(dtype, cache_dtype))
