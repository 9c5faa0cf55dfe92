"""Attend to some of the keys with few queries: output and logsumexp.

Where a block has no more than a vector of queries, vectors lie along the head dimension instead.
Keys and values are then read as they are, once, at the speed of memory.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import njit

from foo_ops.kernels.attention.decode_products import (
    MOST_OF_GROUP,
    make_products,
    make_query_matrix,
    make_rows,
)
from foo_ops.kernels.attention.decode_softmax import make_decode_softmax
from foo_ops.kernels.attention.decode_sums import make_weighted_sums
from foo_ops.kernels.attention.int8_cache import (
    make_no_scaler,
    make_score_scaler,
    make_weight_scaler,
)
from foo_ops.kernels.attention.output import make_finish, make_row_writer
from foo_ops.kernels.attention.parameters import (
    KEY_BLOCK,
    QUERY_BLOCK,
    TILE,
    TILE_STRIDE,
    argument_types,
)
from foo_ops.kernels.attention.rows import make_block_loader
from foo_ops.kernels.attention.scores import (
    ROW_FACTS,
    make_dropout_mask,
    make_mask,
    make_row_facts_filler,
    make_score_mod,
)
from foo_ops.kernels.attention.softmax import make_softmax_start
from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.compiler.processor import bytes_ahead
from foo_ops.kernels.lang.scratch import Scratch, make_kernel_with_scratch
from foo_ops.kernels.products.operands import step_of, vector_product_dtype
from foo_ops.kernels.simd.arithmetic import fma, splat
from foo_ops.kernels.simd.memory import address_of, load, load_vector, pointer_to, shift, store
from foo_ops.kernels.simd.narrow import PAIRS
from foo_ops.kernels.simd.transpose import make_fill, round_up
from foo_ops.kernels.simd.types import ELEMENTS, compute_dtype, lanes_of

# A block of more queries is for the forward kernel.
MOST_ROWS = 8


def _products_of(dtype: str, cache_dtype: str | None) -> str:
    """Integers are exact in the compute dtype, and become that where they are loaded."""
    return vector_product_dtype(dtype) if cache_dtype is None else compute_dtype(dtype)


@functools.cache
def make_scratch(dtype: str, cache_dtype: str | None = None) -> Scratch:
    compute = compute_dtype(dtype)
    LANES = lanes_of(compute)
    WIDTH = LANES * step_of(_products_of(dtype, cache_dtype))

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
            "weights": KEY_BLOCK * MOST_ROWS,
            "line": 2 * LANES,
            "zeros": value_width,
            "scales": KEY_BLOCK + LANES,
        }

    return Scratch(compute, sizes_of_block, describe)


def make_decode_kernel(
    dtype: str, has_options: bool = True, cache_dtype: str | None = None
) -> Kernel:
    """Make the kernel for few queries. ``has_options``: bias, soft cap, ALiBi and dropout.

    ``cache_dtype`` is int8 for keys and values with scales, and None for those of the dtype.
    """
    compute, stored = compute_dtype(dtype), cache_dtype or dtype
    in_products = _products_of(dtype, cache_dtype)
    LANES, step = lanes_of(compute), step_of(in_products)
    GROUP, AHEAD = min(MOST_OF_GROUP, LANES), bytes_ahead() // ELEMENTS[stored].size
    fill, weighted_sums = (
        make_fill(compute),
        make_weighted_sums(dtype, stored, in_products, GROUP),
    )
    load_block, fill_row_facts = make_block_loader(dtype, "query"), make_row_facts_filler(dtype)
    key_rows, value_rows = (make_rows(dtype, stored, step, operand) for operand in ("key", "value"))
    scale_scores, scale_weights = (
        (make_no_scaler(), make_no_scaler())
        if cache_dtype is None
        else (make_score_scaler(dtype), make_weight_scaler(dtype))
    )
    products = make_products(dtype, stored, in_products)
    apply_score_mod, hide = make_score_mod(dtype), make_mask(dtype)
    load_dropout_mask, as_queries = (
        make_dropout_mask(dtype),
        make_query_matrix(dtype, in_products),
    )
    as_keys = pointer_to(PAIRS if step == 2 else stored)
    start_softmax = make_softmax_start(dtype)
    softmax_of_one, softmax_of_group = (
        make_decode_softmax(dtype, in_products, has_options, rows) for rows in (1, GROUP)
    )
    finish, write = make_finish(dtype), make_row_writer(dtype, "output")
    scalar, layout = ELEMENTS[dtype].compute, make_scratch(dtype, cache_dtype)
    sizes_of_block = layout.sizes_of

    @njit
    def softmax(parameters, memory, rows, count):
        scores, dropout_mask, weights, line = (
            memory.scores, memory.dropout_mask, memory.weights, memory.line
        )  # fmt: skip
        largest, total, correction = memory.largest, memory.total, memory.correction
        if rows == 1:
            softmax_of_one(
                parameters, scores, dropout_mask, weights, line, largest, total, correction, count
            )
            return
        for row in range(0, rows, GROUP):
            softmax_of_group(
                parameters, shift(scores, row), shift(dropout_mask, row),
                shift(weights, row * KEY_BLOCK), line, shift(largest, row), shift(total, row),
                shift(correction, row), count,
            )  # fmt: skip

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
        fill(memory.zeros, value_width, 0.0)
        keys_ahead, values_ahead = AHEAD // head_width, AHEAD // value_width
        # Columns without a query are never written.
        for key in range(KEY_BLOCK):
            fill(shift(scores, key * TILE_STRIDE), columns, 0.0)

        for key_start in range(piece.key_start, piece.key_stop, KEY_BLOCK):
            count = min(KEY_BLOCK, piece.key_stop - key_start)
            keys, key_stride = key_rows(parameters, piece, memory.keys, key_start, count)
            values, value_stride = value_rows(parameters, piece, memory.values, key_start, count)
            products(
                scores, as_keys(address_of(keys)), key_stride // step,
                queries, head_width // step, rows, keys_ahead, count,
            )  # fmt: skip
            scale_scores(parameters, piece, memory, key_start, columns, count)
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
            softmax(parameters, memory, rows, count)
            scale_weights(parameters, piece, memory, key_start, columns, count)
            fill(sums, (1 if rows == 1 else round_up(rows, GROUP)) * value_width, 0.0)
            weighted_sums(
                sums, value_width, memory.weights, values, value_stride, memory.zeros, rows,
                values_ahead, count,
            )  # fmt: skip
            add_tile(accumulator, sums, correction, rows, value_width)

        is_key_split = piece.slot >= 0
        finish(parameters, piece, largest, total, correction, is_key_split)
        for block_row in range(rows):
            row, factor = shift(accumulator, block_row * value_width), load(correction, block_row)
            write(parameters, piece, row, factor, block_row, 0, parameters.value_dim, is_key_split)

    return make_kernel_with_scratch(decode, layout, argument_types(dtype, cache_dtype))
