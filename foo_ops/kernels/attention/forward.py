"""Attention: the output and the logsumexp for a block of queries and some of the keys."""

from __future__ import annotations

import functools
from typing import Any

from numba import njit

from foo_ops.kernels.attention.key_tiles import tile_of, turned_tile_of
from foo_ops.kernels.attention.operands import (
    packer_of,
    panel_of,
    product_dtype,
    products_of,
    sizes_of,
    steps_of,
)
from foo_ops.kernels.attention.output import finisher_of, panel_writer_of
from foo_ops.kernels.attention.parameters import (
    KEY_BLOCK,
    QUERY_BLOCK,
    TILE,
    TILE_STRIDE,
    argument_types,
    compute_dtype,
)
from foo_ops.kernels.attention.queries import query_packer_of
from foo_ops.kernels.attention.rows import (
    fill_of,
    queries_of,
    round_up,
    seen_keys,
    sums_starter_of,
)
from foo_ops.kernels.attention.scores import LANE_ROWS, kept_of, lanes_filler_of, scores_of
from foo_ops.kernels.attention.softmax import WEIGHTS_PART, softmax_of, softmax_start_of
from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.products.limbs import parts_of
from foo_ops.kernels.vectors.elements import lanes_of
from foo_ops.kernels.vectors.memory import address_of, load, load_vector, pointer_to, shift, store
from foo_ops.kernels.vectors.scratch import Scratch, kernel_with_scratch, larger


@functools.cache
def scratch_of(dtype: str) -> Scratch:
    sizes, has_parts = sizes_of(dtype), parts_of(dtype) > 1
    COLUMNS, ROOM = sizes.columns, sizes.room  # noqa: N806
    WIDTH = max(sizes.depth, lanes_of(compute_dtype(dtype)))  # noqa: N806

    @njit
    def sizes_of_block(parameters, piece):
        head_width, value_width = (
            round_up(parameters.head_dim, WIDTH), round_up(parameters.value_dim, WIDTH),
        )  # fmt: skip
        # The stride of a panel of modified scores is that of a tile.
        rows = max(round_up(piece.heads * piece.query_count, COLUMNS), TILE_STRIDE)
        return head_width, value_width, rows

    def describe(head_width: Any, value_width: Any, rows: Any) -> dict[str, Any]:
        return {
            "scores": TILE,
            "kept": TILE,
            # Numbers in parts take more room than the scores that they come from.
            "weights": TILE * ROOM if has_parts else "scores",
            "largest": QUERY_BLOCK,
            "total": QUERY_BLOCK,
            "correction": QUERY_BLOCK,
            "lanes": LANE_ROWS * QUERY_BLOCK,
            "small_panels": QUERY_BLOCK,
            "block": rows * larger(head_width, value_width),
            "turned": (head_width + 1) * TILE_STRIDE * ROOM,
            "queries": (head_width + 1) * rows * ROOM,
            "accumulator": value_width * rows,
            "keys": head_width * KEY_BLOCK * ROOM,
            "values": value_width * KEY_BLOCK * ROOM,
            "turned_values": value_width * KEY_BLOCK * ROOM,
        }

    return Scratch(compute_dtype(dtype), sizes_of_block, describe)


def build(dtype: str, has_options: bool = True) -> Kernel:
    """``has_options``: bias, soft cap, ALiBi and dropout."""
    compute, factor = compute_dtype(dtype), product_dtype(dtype)
    LANES = lanes_of(compute)  # noqa: N806
    next_panel, (matmul, begin_products, end_products) = panel_of(dtype), products_of(dtype)
    sizes, steps = sizes_of(dtype), steps_of(dtype)
    COLUMNS, ROWS = sizes.columns, sizes.rows  # noqa: N806
    layout = scratch_of(dtype)
    sizes_of_block = layout.sizes_of
    fill, (_, panel) = fill_of(compute), packer_of(dtype)
    start_sums = sums_starter_of(compute)
    as_factor = pointer_to(factor)
    pack_queries, fill_lanes = query_packer_of(dtype), lanes_filler_of(dtype)
    key_tile, value_tile = tile_of(dtype, "key"), tile_of(dtype, "value")
    turned_tile = turned_tile_of(dtype)
    scores_tile, load_kept = scores_of(dtype, has_options), kept_of(dtype)
    start_softmax, online_softmax = softmax_start_of(dtype), softmax_of(dtype, factor, has_options)
    finish, write = finisher_of(dtype), panel_writer_of(dtype, "output")

    @njit
    def rescale(sums, stride, factors, rows, columns):
        for row in range(rows):
            for column in range(0, columns, LANES):
                index = row * stride + column
                product = load_vector(sums, index, LANES) * load_vector(factors, column, LANES)
                store(sums, index, product)

    def forward(parameters, piece, memory):
        head_width, value_width, rows = sizes_of_block(parameters, piece)
        columns = round_up(piece.heads * piece.query_count, COLUMNS)
        scores, kept, weights = memory.scores, memory.kept, memory.weights
        largest, total, correction = memory.largest, memory.total, memory.correction
        lanes, small_panels, accumulator = memory.lanes, memory.small_panels, memory.accumulator

        fill_lanes(parameters, piece, lanes, columns)
        pack_queries(
            parameters, piece, memory.queries, small_panels, memory.block, memory.turned,
            head_width, columns,
        )  # fmt: skip
        start_softmax(parameters, piece, largest, total, columns)
        if piece.key_start == piece.key_stop:
            fill(accumulator, value_width * rows, 0.0)

        begin_products()
        for key_start in range(piece.key_start, piece.key_stop, KEY_BLOCK):
            count = min(KEY_BLOCK, piece.key_stop - key_start)
            keys, small_keys = key_tile(parameters, piece, memory.keys, key_start, count)
            values, small_values = value_tile(parameters, piece, memory.values, key_start, count)
            turned_values = turned_tile(memory.turned_values, values, count, parameters.value_dim)
            # Panel by panel, so that the scores stay in the nearest cache from their product to
            # that with the values: 0.03 of the peak.
            start, stop = 0, 0
            while stop < columns:
                start = stop
                some, stride = next_panel(parameters, columns - start)
                stop += some
                first_query, query_count = queries_of(piece, start, some)
                seen = seen_keys(piece, first_query, query_count, key_start, count)
                sums, factors = shift(accumulator, start * value_width), shift(correction, start)
                # With the first tile there are no sums yet, but zeros where it is not seen.
                has_sums = key_start > piece.key_start
                if not has_sums:
                    start_sums(sums, stride, parameters.value_dim if seen > 0 else 0, value_width)
                if seen == 0:
                    continue
                queries = panel(memory.queries, start, stride, parameters.head_dim, head_width)
                scores_tile(
                    parameters, piece, shift(lanes, start), scores, kept, kept,
                    keys, queries, small_keys and load(small_panels, start) > 0.0,
                    first_query, query_count, key_start, some, seen,
                )  # fmt: skip
                if has_options and parameters.dropout_threshold > 0:
                    load_kept(parameters, lanes, kept, key_start, start, some, seen)
                grew = online_softmax(
                    parameters, scores, kept, weights, shift(largest, start), shift(total, start),
                    factors, some, seen,
                )  # fmt: skip
                if grew and has_sums:
                    rescale(sums, stride, factors, parameters.value_dim, some)
                matmul(
                    sums, stride, turned_values,
                    (as_factor(address_of(weights)), TILE_STRIDE, WEIGHTS_PART),
                    round_up(parameters.value_dim, ROWS), some, steps(seen), has_sums, small_values,
                )  # fmt: skip
        end_products()

        finish(parameters, piece, largest, total, correction, piece.slot >= 0)
        write(parameters, piece, accumulator, correction, value_width, columns, memory.block)

    return kernel_with_scratch(forward, layout, argument_types(dtype))
