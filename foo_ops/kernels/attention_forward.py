"""Attention: the output and the logsumexp for a block of queries and some of the keys."""

from __future__ import annotations

from numba import njit

from foo_ops.kernels.attention import (
    KEY_BLOCK,
    TILE,
    TILE_STRIDE,
    argument_types,
    block_of,
    compute_dtype,
    factor_dtype,
    factors_of,
    fill_of,
    queries_of,
    round_up,
    seen_keys,
    tile_of,
    turn_back_of,
    turn_of,
    turned_tile_of,
)
from foo_ops.kernels.attention_scores import (
    LANE_ROWS,
    kept_of,
    lanes_filler_of,
    scores_of,
)
from foo_ops.kernels.attention_softmax import (
    factors_filler_of,
    softmax_of,
    softmax_start_of,
    writer_of,
)
from foo_ops.kernels.jit import Kernel
from foo_ops.kernels.matmul import lanes_of, matmul_of, next_panel_of
from foo_ops.kernels.simd import address_of, load_vector, pointer_to, shift, store


def build(dtype: str, plain: bool = False) -> Kernel:
    """``plain``: without bias, soft cap, ALiBi and dropout."""
    has_options = not plain
    compute, factor = compute_dtype(dtype), factor_dtype(dtype)
    LANES = lanes_of(compute)  # noqa: N806
    next_panel = next_panel_of(compute)
    matmul, fill, turn = matmul_of(compute, factor, factor), fill_of(compute), turn_of(compute)
    step, as_factors = factors_of(dtype)
    as_factor = pointer_to(factor)
    load_block, fill_lanes = block_of(dtype, "query"), lanes_filler_of(dtype)
    key_tile, value_tile = tile_of(dtype, "key"), tile_of(dtype, "value")
    turned_tile, turn_back = turned_tile_of(dtype), turn_back_of(compute)
    scores_tile, load_kept = scores_of(dtype, has_options), kept_of(dtype)
    start_softmax, online_softmax = softmax_start_of(dtype), softmax_of(dtype, factor, has_options)
    fill_factors, write = factors_filler_of(dtype), writer_of(dtype)

    @njit
    def rescale(accumulator, factors, rows, columns):
        for row in range(rows):
            for column in range(0, columns, LANES):
                index = row * TILE_STRIDE + column
                product = load_vector(accumulator, index, LANES) * load_vector(
                    factors, column, LANES
                )
                store(accumulator, index, product)

    def forward(parameters, piece, scratch):
        head_width = round_up(parameters.head_dim, LANES)
        value_width = round_up(parameters.value_dim, LANES)
        columns = round_up(piece.heads * piece.query_count, LANES)

        scores = scratch
        kept = shift(scores, TILE)
        largest = shift(kept, TILE)
        total = shift(largest, TILE_STRIDE)
        correction = shift(total, TILE_STRIDE)
        lanes = shift(correction, TILE_STRIDE)
        block = shift(lanes, LANE_ROWS * TILE_STRIDE)
        turned = shift(block, TILE_STRIDE * max(head_width, value_width))
        queries_memory = shift(turned, (head_width + 1) * TILE_STRIDE)
        accumulator = shift(queries_memory, head_width * TILE_STRIDE)
        key_memory = shift(accumulator, value_width * TILE_STRIDE)
        value_memory = shift(key_memory, KEY_BLOCK * head_width)
        turned_memory = shift(value_memory, KEY_BLOCK * value_width)

        fill_lanes(parameters, piece, lanes)
        load_block(parameters, piece, block, parameters.head_dim, columns, head_width)
        turn(turned, block, head_width, columns, head_width)
        fill(shift(turned, head_width * TILE_STRIDE), columns, 0.0)
        queries = as_factors(queries_memory, turned, TILE_STRIDE, parameters.head_dim, columns)
        start_softmax(parameters, piece, largest, total)
        fill(accumulator, value_width * TILE_STRIDE, 0.0)

        for key_start in range(piece.key_start, piece.key_stop, KEY_BLOCK):
            count = min(KEY_BLOCK, piece.key_stop - key_start)
            keys, key_stride, key_step = key_tile(parameters, piece, key_memory, key_start, count)
            values, value_stride, value_step = value_tile(
                parameters, piece, value_memory, key_start, count
            )
            turned_values, column_stride, step_stride = turned_tile(
                turned_memory, values, value_stride, value_step, count, parameters.value_dim
            )
            # Panel by panel, so that the scores stay in the nearest cache from their product to
            # that with the values: 0.03 of the peak. A bias is loaded for the whole block.
            start, stop = 0, 0
            while stop < columns:
                start = stop
                some = columns if parameters.modifies else next_panel(columns - start)
                stop += some
                first_query, query_count = queries_of(piece, start, some)
                seen = seen_keys(piece, first_query, query_count, key_start, count)
                if seen == 0:
                    continue
                panel, panel_kept = shift(scores, start), shift(kept, start)
                sums = shift(accumulator, start)
                scores_tile(
                    parameters, piece, shift(lanes, start), panel, panel_kept, panel_kept,
                    keys, key_stride, key_step, shift(queries, start),
                    first_query, query_count, key_start, some, seen,
                )  # fmt: skip
                if has_options and parameters.dropout_threshold > 0:
                    load_kept(parameters, lanes, panel_kept, key_start, start, some, seen)
                if online_softmax(
                    parameters, panel, panel_kept, panel, shift(largest, start),
                    shift(total, start), shift(correction, start), some, seen,
                ):  # fmt: skip
                    rescale(sums, shift(correction, start), parameters.value_dim, some)
                matmul(
                    sums, TILE_STRIDE, turned_values, column_stride, step_stride,
                    as_factor(address_of(panel)), TILE_STRIDE,
                    parameters.value_dim, some, (seen + step - 1) // step, True,
                )  # fmt: skip

        fill_factors(parameters, total, correction, columns)
        rescale(accumulator, correction, parameters.value_dim, columns)
        turn_back(block, accumulator, value_width, columns)
        write(parameters, piece, block, value_width, largest, total)

    return Kernel(forward, argument_types(dtype))
