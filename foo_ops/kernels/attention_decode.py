"""Attention for few queries: the output and the logsumexp for some of the keys.

Where a block has no more than a vector of queries, vectors lie along the head dimension instead:
keys and values are then read as they are, once, at the speed of memory.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention import (
    KEY_BLOCK,
    TILE,
    TILE_STRIDE,
    argument_types,
    block_of,
    compute_dtype,
    copy_row_of,
    fill_of,
    key_row_of,
    lie_together,
    round_up,
)
from foo_ops.kernels.attention_scores import (
    LANE_ROWS,
    hide_of,
    kept_of,
    lanes_filler_of,
    modify_of,
)
from foo_ops.kernels.attention_softmax import (
    factors_filler_of,
    softmax_of,
    softmax_start_of,
    writer_of,
)
from foo_ops.kernels.jit import Kernel
from foo_ops.kernels.matmul import lanes_of, matmul_of
from foo_ops.kernels.simd import (
    ELEMENTS,
    address_of,
    load,
    load_vector,
    pointer_to,
    shift,
    splat,
    store,
)
from foo_ops.kernels.struct import field
from foo_ops.kernels.tiles import tile_dot, tile_store_sums, tile_zero


def _rows_of(dtype: str, operand: str) -> Callable:
    """``rows(parameters, piece, scratch, key_start, count)``: a pointer and the stride of a key.

    Of the tensor itself where its rows are whole vectors of adjacent elements, else of a copy whose
    rows are filled up with zeros.
    """
    LANES = lanes_of(compute_dtype(dtype))  # noqa: N806
    as_stored = pointer_to(dtype)
    copy_row, key_row = copy_row_of(compute_dtype(dtype)), key_row_of(operand)
    row_stride_name, column_stride_name = f"{operand}_row_stride", f"{operand}_column_stride"
    size_name = "head_dim" if operand == "key" else "value_dim"

    @njit
    def rows(parameters, piece, scratch, key_start, count):
        columns = field(parameters, size_name)
        column_stride = field(parameters, column_stride_name)
        whole = column_stride == 1 and columns % LANES == 0
        if whole and lie_together(parameters, key_start, count):
            return key_row(parameters, piece, key_start), field(parameters, row_stride_name)
        width = round_up(columns, LANES)
        target = as_stored(address_of(scratch))
        for row in range(count):
            source = key_row(parameters, piece, key_start + row)
            copy_row(shift(target, row * width), source, column_stride, columns, width)
        return target, width

    return rows


def _products_of(dtype: str) -> Callable:
    """``products(target, keys, key_stride, queries, width, rows, count)``: k.q, transposed."""
    LANES = lanes_of(compute_dtype(dtype))  # noqa: N806

    def panel(KEYS: int, QUERIES: int) -> Callable:  # noqa: N803
        @njit
        def tile(target, keys, key_stride, queries, width):
            sums = tile_zero(target, KEYS, QUERIES, LANES)
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

    GROUP = min(4, LANES)  # noqa: N806
    for_groups, for_group = panel(LANES // GROUP, GROUP), panel(1, GROUP)
    for_singles, for_single = panel(LANES, 1), panel(1, 1)

    @njit
    def all_products(target, keys, key_stride, queries, width, rows, count):
        if rows == 1:
            key = for_singles(target, keys, key_stride, queries, width, 0, count)
            for_single(target, keys, key_stride, queries, width, key, count)
        else:
            for row in range(0, rows, GROUP):
                place, some = shift(target, row), shift(queries, row * width)
                key = for_groups(place, keys, key_stride, some, width, 0, count)
                for_group(place, keys, key_stride, some, width, key, count)

    return all_products


def build(dtype: str, plain: bool = False) -> Kernel:
    """``plain``: without bias, soft cap, ALiBi and dropout."""
    has_options = not plain
    compute = compute_dtype(dtype)
    LANES = lanes_of(compute)  # noqa: N806
    matmul, fill = matmul_of(compute, compute, dtype), fill_of(compute)
    load_block, fill_lanes = block_of(dtype, "query"), lanes_filler_of(dtype)
    key_rows, value_rows = _rows_of(dtype, "key"), _rows_of(dtype, "value")
    products, modify, hide = _products_of(dtype), modify_of(dtype), hide_of(dtype)
    load_kept = kept_of(dtype)
    start_softmax, online_softmax = softmax_start_of(dtype), softmax_of(dtype, compute, has_options)
    fill_factors, write = factors_filler_of(dtype), writer_of(dtype)
    scalar = ELEMENTS[dtype].compute

    @njit
    def rescale(accumulator, factors, rows, width):
        for row in range(rows):
            factor = splat(scalar(load(factors, row)), LANES)
            for column in range(0, width, LANES):
                index = row * width + column
                store(accumulator, index, load_vector(accumulator, index, LANES) * factor)

    def decode(parameters, piece, scratch):
        head_width = round_up(parameters.head_dim, LANES)
        value_width = round_up(parameters.value_dim, LANES)
        rows = piece.heads * piece.query_count
        columns = round_up(rows, LANES)

        scores = scratch
        kept = shift(scores, TILE)
        largest = shift(kept, TILE)
        total = shift(largest, TILE_STRIDE)
        correction = shift(total, TILE_STRIDE)
        lanes = shift(correction, TILE_STRIDE)
        queries = shift(lanes, LANE_ROWS * TILE_STRIDE)
        accumulator = shift(queries, TILE_STRIDE * head_width)
        key_memory = shift(accumulator, TILE_STRIDE * value_width)
        value_memory = shift(key_memory, KEY_BLOCK * head_width)

        fill_lanes(parameters, piece, lanes)
        load_block(parameters, piece, queries, parameters.head_dim, round_up(rows, 4), head_width)
        start_softmax(parameters, piece, largest, total)
        fill(accumulator, rows * value_width, 0.0)
        fill(scores, TILE, 0.0)

        for key_start in range(piece.key_start, piece.key_stop, KEY_BLOCK):
            count = min(KEY_BLOCK, piece.key_stop - key_start)
            keys, key_stride = key_rows(parameters, piece, key_memory, key_start, count)
            values, value_stride = value_rows(parameters, piece, value_memory, key_start, count)
            products(scores, keys, key_stride, queries, head_width, rows, count)
            if has_options and parameters.modifies:
                modify(parameters, piece, lanes, scores, kept, kept, key_start, columns, count)
            hide(
                piece, lanes, scores, piece.query_start, piece.query_count,
                key_start, columns, count,
            )  # fmt: skip
            if has_options and parameters.dropout_threshold > 0:
                load_kept(parameters, lanes, kept, key_start, 0, columns, count)
            if online_softmax(
                parameters, scores, kept, scores, largest, total, correction, columns, count
            ):
                rescale(accumulator, correction, rows, value_width)
            matmul(
                accumulator, value_width, scores, 1, TILE_STRIDE, values, value_stride,
                rows, value_width, count, True,
            )  # fmt: skip

        fill_factors(parameters, total, correction, columns)
        rescale(accumulator, correction, rows, value_width)
        write(parameters, piece, accumulator, value_width, largest, total)

    return Kernel(decode, argument_types(dtype))
