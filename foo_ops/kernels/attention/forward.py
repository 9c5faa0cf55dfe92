"""The forward kernel of attention, the merge of key splits, and the dropout mask."""

from __future__ import annotations

import functools
import math
from typing import Any

from numba import njit

from foo_ops.kernels.attention.operands import (
    KEY_BLOCK,
    QUERY_BLOCK,
    TILE,
    TILE_STRIDE,
    argument_types,
    make_finish,
    make_next_panel,
    make_panel_packer,
    make_panel_writer,
    make_query_packer,
    make_row_writer,
    make_sums_starter,
    queries_of,
    seen_keys,
)
from foo_ops.kernels.attention.programs import sees_window
from foo_ops.kernels.attention.scores import (
    ROW_FACTS,
    make_dropout_mask,
    make_key_tile,
    make_row_facts_filler,
    make_scores,
    make_transposed_tile,
)
from foo_ops.kernels.attention.softmax import (
    WEIGHTS_LIMB_STRIDE,
    make_online_softmax,
    make_rescale,
    make_softmax_start,
)
from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.lang.scratch import Scratch, larger, make_kernel_with_scratch, row_of
from foo_ops.kernels.math.exponential import exp2
from foo_ops.kernels.products.limbs import limbs_of
from foo_ops.kernels.products.operands import (
    make_products,
    make_step_counter,
    product_dtype,
    sizes_of,
)
from foo_ops.kernels.simd.arithmetic import fma, splat
from foo_ops.kernels.simd.memory import address_of, load, load_vector, pointer_to, shift, store
from foo_ops.kernels.simd.transpose import (
    make_fill,
    round_up,
)
from foo_ops.kernels.simd.types import ELEMENTS, compute_dtype, lanes_of

# --------------------------------------------------------------------------------------- the kernel

# Computes output and logsumexp of a block of queries over some of the keys.


@functools.cache
def make_forward_scratch(dtype: str) -> Scratch:
    sizes, has_limbs = sizes_of(dtype), limbs_of(dtype) > 1
    COLUMNS, ROOM = sizes.columns, sizes.room
    WIDTH = max(sizes.depth, lanes_of(compute_dtype(dtype)))

    @njit
    def sizes_of_block(parameters, piece):
        head_width, value_width = (
            round_up(parameters.head_dim, WIDTH), round_up(parameters.value_dim, WIDTH),
        )  # fmt: skip
        # A panel of modified scores has the stride of a tile.
        rows = max(round_up(piece.heads * piece.query_count, COLUMNS), TILE_STRIDE)
        return head_width, value_width, rows

    def describe(head_width: Any, value_width: Any, rows: Any) -> dict[str, Any]:
        return {
            "scores": TILE,
            "dropout_mask": TILE,
            # Limbs take more room than the scores they are split from.
            "weights": TILE * ROOM if has_limbs else "scores",
            "largest": QUERY_BLOCK,
            "total": QUERY_BLOCK,
            "correction": QUERY_BLOCK,
            "row_facts": ROW_FACTS * QUERY_BLOCK,
            "small_panels": QUERY_BLOCK,
            "block": rows * larger(head_width, value_width),
            "transposed": (head_width + 1) * TILE_STRIDE * ROOM,
            "queries": (head_width + 1) * rows * ROOM,
            "accumulator": value_width * rows,
            "keys": head_width * KEY_BLOCK * ROOM,
            "values": value_width * KEY_BLOCK * ROOM,
            "transposed_values": value_width * KEY_BLOCK * ROOM,
        }

    return Scratch(compute_dtype(dtype), sizes_of_block, describe)


def make_forward_kernel(dtype: str, has_options: bool = True, has_programs: bool = False) -> Kernel:
    """Make the forward kernel.

    ``has_options``: bias, soft cap, ALiBi and dropout. ``has_programs``: users' programs modify the
    scores, and a block mask hides some.
    """
    compute, matrix_dtype = compute_dtype(dtype), product_dtype(dtype)
    next_panel, (matmul, begin_products, end_products) = (
        make_next_panel(dtype),
        make_products(dtype),
    )
    sizes, steps = sizes_of(dtype), make_step_counter(dtype)
    COLUMNS, ROWS = sizes.columns, sizes.rows
    layout = make_forward_scratch(dtype)
    sizes_of_block = layout.sizes_of
    fill, (_, panel) = make_fill(compute), make_panel_packer(dtype)
    start_sums = make_sums_starter(compute)
    as_matrix = pointer_to(matrix_dtype)
    pack_queries, fill_row_facts = make_query_packer(dtype), make_row_facts_filler(dtype)
    key_tile, value_tile = make_key_tile(dtype, "key"), make_key_tile(dtype, "value")
    transposed_tile = make_transposed_tile(dtype)
    scores_tile, load_dropout_mask = (
        make_scores(dtype, has_options, has_programs),
        make_dropout_mask(dtype),
    )
    start_softmax, online_softmax = (
        make_softmax_start(dtype),
        make_online_softmax(dtype, matrix_dtype, has_options),
    )
    finish, write = make_finish(dtype), make_panel_writer(dtype, "output")
    rescale = make_rescale(dtype)

    def forward(parameters, piece, memory):
        head_width, value_width, rows = sizes_of_block(parameters, piece)
        columns = round_up(piece.heads * piece.query_count, COLUMNS)
        scores, dropout_mask, weights = memory.scores, memory.dropout_mask, memory.weights
        largest, total, correction = memory.largest, memory.total, memory.correction
        row_facts, small_panels, accumulator = (
            memory.row_facts,
            memory.small_panels,
            memory.accumulator,
        )

        fill_row_facts(parameters, piece, row_facts, columns)
        pack_queries(
            parameters, piece, memory.queries, small_panels, memory.block, memory.transposed,
            head_width, columns,
        )  # fmt: skip
        start_softmax(parameters, piece, largest, total, columns)
        # The first visible tile sets the sums; panels that do not see it start from zeros.
        has_sums = False

        begin_products()
        for key_start in range(piece.key_start, piece.key_stop, KEY_BLOCK):
            if has_programs and not sees_window(
                parameters, piece, piece.query_start, piece.query_count, key_start
            ):
                continue
            count = min(KEY_BLOCK, piece.key_stop - key_start)
            keys, small_keys = key_tile(parameters, piece, memory.keys, key_start, count)
            values, small_values = value_tile(parameters, piece, memory.values, key_start, count)
            transposed_values = transposed_tile(
                memory.transposed_values, values, count, parameters.value_dim
            )
            # Panel by panel, so that the scores stay in L1 between the two products: 0.03 of the
            # peak.
            start, stop = 0, 0
            while stop < columns:
                start = stop
                some, stride = next_panel(parameters, columns - start)
                stop += some
                first_query, query_count = queries_of(piece, start, some)
                seen = seen_keys(piece, first_query, query_count, key_start, count)
                if has_programs and not sees_window(
                    parameters, piece, first_query, query_count, key_start
                ):
                    seen = 0
                sums, factors = shift(accumulator, start * value_width), shift(correction, start)
                if not has_sums:
                    start_sums(sums, stride, parameters.value_dim if seen > 0 else 0, value_width)
                if seen == 0:
                    continue
                queries = panel(memory.queries, start, stride, parameters.head_dim, head_width)
                scores_tile(
                    parameters, piece, shift(row_facts, start), scores, dropout_mask, dropout_mask,
                    keys, queries, small_keys and load(small_panels, start) > 0.0,
                    first_query, query_count, key_start, some, seen,
                )  # fmt: skip
                if has_options and parameters.dropout_threshold > 0:
                    load_dropout_mask(
                        parameters, row_facts, dropout_mask, key_start, start, some, seen
                    )
                grew = online_softmax(
                    parameters, scores, dropout_mask, weights, shift(largest, start),
                    shift(total, start), factors, some, seen,
                )  # fmt: skip
                if grew and has_sums:
                    rescale(sums, stride, factors, parameters.value_dim, some)
                matmul(
                    sums, stride, transposed_values,
                    (as_matrix(address_of(weights)), TILE_STRIDE, WEIGHTS_LIMB_STRIDE),
                    round_up(parameters.value_dim, ROWS), some, steps(seen), has_sums, small_values,
                )  # fmt: skip
            has_sums = True
        end_products()
        if not has_sums:
            fill(accumulator, value_width * rows, 0.0)

        finish(parameters, piece, largest, total, correction, piece.slot >= 0)
        write(parameters, piece, accumulator, correction, value_width, columns, memory.block)

    return make_kernel_with_scratch(forward, layout, argument_types(dtype))


# ------------------------------------------------------------------------------ merge of key splits

# Merges the results of key splits into the output and the logsumexp of a block of queries.
#
# Each split stores, for each query, the largest score, the sum of 2^(score - largest) and the
# values summed with these weights. The splits, in their order, are rescaled to the largest of all
# (Dao et al. 2023, Flash-Decoding). One logsumexp for each split would not do: beside a mask of
# -1e9, rounding loses the logarithm of the number of keys.


@functools.cache
def make_merge_scratch(dtype: str) -> Scratch:
    LANES = lanes_of(compute_dtype(dtype))

    @njit
    def sizes_of_block(parameters, piece):
        return round_up(parameters.value_dim, LANES), piece.heads * piece.query_count

    def describe(width: Any, rows: Any) -> dict[str, Any]:
        return {
            "largest": QUERY_BLOCK,
            "total": QUERY_BLOCK,
            "factors": QUERY_BLOCK,
            "sums": rows * width,
        }

    return Scratch(compute_dtype(dtype), sizes_of_block, describe)


def make_merge_kernel(dtype: str) -> Kernel:
    """Make the merge kernel. Its work item is the forward kernel's, for all splits at once."""
    compute = ELEMENTS[dtype].compute
    LANES = lanes_of(compute_dtype(dtype))
    fill, finish = make_fill(compute_dtype(dtype)), make_finish(dtype)
    write, layout = make_row_writer(dtype, "output"), make_merge_scratch(dtype)
    sizes_of_block = layout.sizes_of

    @njit
    def largest_of_key_splits(parameters, piece, block_row):
        largest = compute(-math.inf)
        for key_split in range(piece.key_splits):
            value = load(row_of(parameters, "partial_largest", key_split, piece.slot, block_row), 0)
            # `value != value` propagates NaN, which no comparison with `largest` would.
            if value > largest or value != value:
                largest = value
        return largest

    @njit
    def scale_of(parameters, piece, key_split, block_row, largest):
        value = load(row_of(parameters, "partial_largest", key_split, piece.slot, block_row), 0)
        # The difference of equal infinities (a sink, or a query that sees no key) is NaN.
        exponent = value - largest if value != largest else compute(0.0)
        return compute(exp2(exponent))

    @njit
    def add_key_splits(parameters, piece, block_row, largest, sums, width):
        """Add the weighted values of all splits to ``sums``; return the sum of the weights."""
        fill(sums, width, 0.0)
        total = compute(0.0)
        for key_split in range(piece.key_splits):
            scale = scale_of(parameters, piece, key_split, block_row, largest)
            total += scale * load(
                row_of(parameters, "partial_total", key_split, piece.slot, block_row), 0
            )
            scales = splat(scale, LANES)
            source = row_of(parameters, "partial_output", key_split, piece.slot, block_row)
            for column in range(0, width, LANES):
                sum_ = load_vector(sums, column, LANES)
                store(sums, column, fma(scales, load_vector(source, column, LANES), sum_))
        return total

    def merge(parameters, piece, memory):
        width, rows = sizes_of_block(parameters, piece)
        largest, total, factors, sums = memory.largest, memory.total, memory.factors, memory.sums
        for block_row in range(rows):
            top = largest_of_key_splits(parameters, piece, block_row)
            store(largest, block_row, top)
            row = shift(sums, block_row * width)
            store(total, block_row, add_key_splits(parameters, piece, block_row, top, row, width))
        finish(parameters, piece, largest, total, factors, False)
        for block_row in range(rows):
            row = shift(sums, block_row * width)
            factor = load(factors, block_row)
            write(parameters, piece, row, factor, block_row, 0, parameters.value_dim, False)

    return make_kernel_with_scratch(merge, layout, argument_types(dtype))


# ------------------------------------------------------------------------------------- dropout mask

# Writes the whole dropout mask, for formulas that work on all weights at once.


@functools.cache
def make_dropout_mask_scratch(dtype: str) -> Scratch:
    @njit
    def sizes_of_block(parameters, piece):
        return ()

    def describe() -> dict[str, Any]:
        return {"dropout_mask": TILE, "row_facts": ROW_FACTS * QUERY_BLOCK}

    return Scratch(compute_dtype(dtype), sizes_of_block, describe)


def make_dropout_mask_kernel(dtype: str) -> Kernel:
    """Make the kernel that writes rows of partial_output, (batch, heads, queries, keys)."""
    LANES = lanes_of(compute_dtype(dtype))
    fill_row_facts, load_dropout_mask = make_row_facts_filler(dtype), make_dropout_mask(dtype)

    def dropout_mask_rows(parameters, piece, memory):
        dropout_mask, row_facts = memory.dropout_mask, memory.row_facts
        columns = round_up(piece.query_count, LANES)
        fill_row_facts(parameters, piece, row_facts, columns)
        for key_start in range(piece.key_start, piece.key_stop, KEY_BLOCK):
            count = min(KEY_BLOCK, piece.key_stop - key_start)
            load_dropout_mask(parameters, row_facts, dropout_mask, key_start, 0, columns, count)
            for row in range(piece.query_count):
                query = piece.query_start + row
                target = row_of(parameters, "partial_output", piece.batch, piece.head, query)
                for key in range(count):
                    store(target, key_start + key, load(dropout_mask, key * TILE_STRIDE + row))

    return make_kernel_with_scratch(
        dropout_mask_rows, make_dropout_mask_scratch(dtype), argument_types(dtype)
    )
