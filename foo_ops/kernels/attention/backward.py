"""Attention: the gradients for all inputs from a block of queries.

With the weights P = exp(S - logsumexp), recomputed tile by tile (Dao et al. 2022, algorithm 4):

    delta = rowsum(dO * O) - dLogsumexp       dV = P^T dO
    dP = dO V^T,  dS = P * (dP - delta)       dQ = scale * dS' K,   dK = scale * dS'^T Q

where dS' is dS times the derivative of the soft cap. The gradient of the bias is dS, that of a
slope the sum of -dS * |distance|, that of a sink the sum of -exp(sink - logsumexp) * delta: see
foo_ops/kernels/attention/row_sums.py.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

from numba import njit

from foo_ops.kernels.attention.bias_gradient import bias_gradient_of
from foo_ops.kernels.attention.block_rows import block_rows_of, row_packer_of
from foo_ops.kernels.attention.key_tiles import tile_of, turned_tile_of
from foo_ops.kernels.attention.operands import (
    factors_of,
    packer_of,
    panel_of,
    product_dtype,
    products_of,
    sizes_of,
    small_of,
    step_of,
    steps_of,
)
from foo_ops.kernels.attention.output import panel_writer_of
from foo_ops.kernels.attention.parameters import (
    GRADIENT_NONE,
    KEY_BLOCK,
    QUERY_BLOCK,
    TILE,
    TILE_STRIDE,
    argument_types,
    compute_dtype,
)
from foo_ops.kernels.attention.row_sums import (
    SUM_ROWS,
    needs_row_sums,
    row_sums_of,
    row_sums_writer_of,
)
from foo_ops.kernels.attention.rows import (
    fill_of,
    queries_of,
    round_up,
    seen_keys,
    sums_starter_of,
    tile_operation_of,
)
from foo_ops.kernels.attention.scores import LANE_ROWS, lanes_filler_of
from foo_ops.kernels.attention.weights import statistics_of, weights_of
from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.products.limbs import GROUP_ELEMENTS, parts_of, row_splitter_of
from foo_ops.kernels.products.on_amx import GROUP
from foo_ops.kernels.vectors.elements import lanes_of
from foo_ops.kernels.vectors.limbs import interleave
from foo_ops.kernels.vectors.memory import address_of, load_vector, pointer_to, shift, store
from foo_ops.kernels.vectors.pairs import PAIRS
from foo_ops.kernels.vectors.scratch import Scratch, kernel_with_scratch
from foo_ops.kernels.vectors.struct import row_of

# Keys whose sums over the queries are computed together, or as many as a product takes: the more,
# the more products with weights of zero beside the diagonal, the fewer, the more calls.
ROW_GROUP = 16
# Elements between the rows of a block: without them rows of 128 elements share few sets of the
# cache.
PADDING = 16


@functools.cache
def _tile_factors_of(dtype: str) -> tuple[Callable, Callable, Callable]:
    """The functions that make factors of a tile.

    ``split(parts, tile, start, columns, rows)``: to be called for a panel before the others.
    ``as_rows(target, parts, panel, start, columns, rows)``: of a panel a right factor,
    summed over the keys. The row after the last must be zero.
    ``as_lanes(parts, tile, columns, count)``: of all panels a left factor, summed over the queries:
    rows as they are, or as pairs of neighbouring lanes, which go on with rows of zeros up to the
    multiple that a product takes.
    """
    if parts_of(dtype):
        return _tile_factors_in_parts_of(dtype)
    as_factors, as_lanes = factors_of(dtype), _lane_factors_of(dtype)

    @njit
    def split(parts, tile, start, columns, rows):
        pass

    @njit
    def as_rows(target, parts, panel, start, columns, rows):
        return as_factors(target, TILE_STRIDE, panel, TILE_STRIDE, rows, columns)

    return split, as_rows, as_lanes


def _lane_factors_of(dtype: str) -> Callable:
    """``as_lanes`` for products on vectors."""
    if product_dtype(dtype) != PAIRS:

        @njit
        def themselves(parts, tile, columns, count):
            return tile, TILE_STRIDE, 1, 0

        return themselves

    LANES = lanes_of("float32")  # noqa: N806
    as_elements, as_pairs = pointer_to("bfloat16"), pointer_to(PAIRS)

    @njit
    def rounded(parts, tile, columns, count):
        elements = as_elements(address_of(parts))
        for key in range(count):
            for column in range(0, columns, LANES):
                index = key * TILE_STRIDE + column
                store(elements, index, load_vector(tile, index, LANES))
        return as_pairs(address_of(parts)), TILE_STRIDE // 2, 1, 0

    return rounded


def _tile_factors_in_parts_of(dtype: str) -> tuple[Callable, Callable, Callable]:
    """Numbers are split once: the pairs of two keys are their parts side by side."""
    LANES, PARTS, ROWS = lanes_of("float32"), parts_of(dtype), sizes_of(dtype).rows  # noqa: N806
    split_row, fill, steps = row_splitter_of(PARTS, LANES), fill_of("float32"), steps_of(dtype)
    as_elements, as_pairs = pointer_to("bfloat16"), pointer_to(PAIRS)
    # All keys of a group of queries, and then those of the next.
    group, part = KEY_BLOCK * GROUP, KEY_BLOCK * TILE_STRIDE // 2

    @njit
    def split(parts, tile, start, columns, rows):
        elements = as_elements(address_of(shift(parts, start // GROUP_ELEMENTS * group)))
        for key in range(round_up(rows, 2)):
            source = shift(tile, key * TILE_STRIDE + start)
            split_row(shift(elements, key * GROUP_ELEMENTS), 2 * group, 2 * part, source, columns)

    @njit
    def as_rows(target, parts, panel, start, columns, rows):
        pairs, target_part = as_pairs(address_of(target)), steps(rows) * TILE_STRIDE
        first_group = shift(parts, start // GROUP_ELEMENTS * group)
        for number in range(PARTS):
            elements = as_elements(address_of(shift(first_group, number * part)))
            for key in range(0, rows, 2):
                line = number * target_part + key // 2 * TILE_STRIDE
                for column in range(0, columns, 2 * LANES):
                    place = column // GROUP_ELEMENTS * 2 * group + column % GROUP_ELEMENTS
                    upper = shift(elements, place + key * GROUP_ELEMENTS)
                    lower = shift(upper, GROUP_ELEMENTS)
                    interleave(pairs, line + column, upper, lower, LANES)
            for step in range((rows + 1) // 2, steps(rows)):
                fill(shift(target, number * target_part + step * TILE_STRIDE), columns, 0.0)
        return pairs, TILE_STRIDE, target_part

    @njit
    def as_lanes(parts, tile, columns, count):
        missing = round_up(count, ROWS) - count
        for number in range(PARTS):
            for first in range(0, columns, GROUP_ELEMENTS):
                place = number * part + first // GROUP_ELEMENTS * group + count * GROUP
                fill(shift(parts, place), missing * GROUP, 0.0)
        return as_pairs(address_of(parts)), GROUP, group, part

    return split, as_rows, as_lanes


@functools.cache
def scratch_of(dtype: str) -> Scratch:
    sizes = sizes_of(dtype)
    ROOM, WIDTH = sizes.room, max(sizes.depth, lanes_of(compute_dtype(dtype)))  # noqa: N806

    @njit
    def sizes_of_block(parameters, piece):
        """The widths of the block's rows, and those of a product that sums over them."""
        width = max(parameters.grad_key_row_stride, parameters.grad_value_row_stride) + PADDING
        key_width, value_width = (
            round_up(parameters.head_dim, WIDTH), round_up(parameters.value_dim, WIDTH),
        )  # fmt: skip
        return width, key_width, value_width

    def describe(width: Any, key_width: Any, value_width: Any) -> dict[str, Any]:
        rows, panels = width * TILE_STRIDE, (width + 1) * TILE_STRIDE * ROOM
        return {
            "weights": TILE,
            "grad_scores": TILE,
            "kept": TILE * ROOM,
            "weight_parts": TILE * ROOM,
            "score_parts": TILE * ROOM,
            "slopes": TILE,
            "base": TILE_STRIDE,
            "shares": TILE_STRIDE,
            "delta": TILE_STRIDE,
            "row_sums": SUM_ROWS * TILE_STRIDE,
            "scales": TILE_STRIDE,
            "lanes": LANE_ROWS * QUERY_BLOCK,
            "block": rows,
            "grad_block": rows,
            "turned": panels,
            "grad_queries": rows,
            "packed": panels,
            "grad_packed": panels,
            "row_pairs": rows * ROOM,
            "grad_row_pairs": rows * ROOM,
            "keys": key_width * KEY_BLOCK * ROOM,
            "values": value_width * KEY_BLOCK * ROOM,
            "turned_keys": key_width * KEY_BLOCK * ROOM,
        }

    return Scratch(compute_dtype(dtype), sizes_of_block, describe)


def build(dtype: str, has_options: bool = True) -> Kernel:
    """``has_options``: bias, soft cap, ALiBi and dropout.

    grad_key and grad_value are sums in the compute type, which a block adds to: those of the
    piece's slot. Which blocks share a slot, and in which order, does not depend on the threads.
    """
    compute = compute_dtype(dtype)
    next_panel, pack_rows, (_, packed_panel) = (
        panel_of(dtype), row_packer_of(dtype), packer_of(dtype),
    )  # fmt: skip
    matmul, begin_products, end_products = products_of(dtype)
    sizes, steps, are_small = sizes_of(dtype), steps_of(dtype), small_of(dtype)
    COLUMNS, ROWS, DEPTH = sizes.columns, sizes.rows, sizes.depth  # noqa: N806
    KEY_GROUP, layout = max(ROW_GROUP, ROWS), scratch_of(dtype)  # noqa: N806
    sizes_of_block = layout.sizes_of
    fill, write_grad_query = fill_of(compute), panel_writer_of(dtype, "grad_query")
    start_sums = sums_starter_of(compute)
    step, (split, as_rows, as_lanes) = step_of(product_dtype(dtype)), _tile_factors_of(dtype)
    query_rows_of, grad_rows_of = block_rows_of(dtype, "query"), block_rows_of(dtype, "grad_output")
    key_tile, value_tile = tile_of(dtype, "key"), tile_of(dtype, "value")
    turned_tile = turned_tile_of(dtype)
    fill_lanes, load_statistics = lanes_filler_of(dtype), statistics_of(dtype)
    weights_tile = weights_of(dtype, has_options)
    (start_row_sums, _), write_row_sums = row_sums_of(dtype), row_sums_writer_of(dtype)
    multiply, write_bias = tile_operation_of(compute, operator.mul), bias_gradient_of(dtype)

    @njit
    def seen_rows(piece, start, columns, key_start, count):
        """How many rows of a tile a panel needs: whole groups, as `add_products` reads them."""
        first_query, query_count = queries_of(piece, start, columns)
        seen = seen_keys(piece, first_query, query_count, key_start, count)
        return min(count, round_up(seen, KEY_GROUP))

    @njit
    def sees_all(piece, key_start, count):
        last_query = piece.query_start + piece.query_count - 1
        seen = key_start + count - 1 <= piece.query_start + piece.last_visible
        return piece.heads > 1 or (seen and key_start >= last_query + piece.first_visible)

    @njit
    def add_products(piece, sums, width, factors, block, rows, are_small, key_start, count):
        """sums[key] += the sum over the queries that see the key of factor * row of the block.

        Or = that, where the block begins the sums: of each group of keys that it visits one of its
        queries sees some.
        """
        pointer, row_stride, group_stride, part = factors
        line, block_stride, block_part = block
        # All at once where all are seen, so that the rows of the block are read once: 1 to 4 %.
        group_size = KEY_BLOCK if sees_all(piece, key_start, count) else KEY_GROUP
        for key in range(0, count, group_size):
            group = round_up(min(group_size, count - key), ROWS)
            first, stop = 0, rows
            if piece.heads == 1:
                place = key_start + key - piece.query_start
                first = max(0, place - piece.last_visible) // DEPTH * DEPTH
                stop = min(rows, place + group - piece.first_visible)
            if first < stop:
                place = shift(pointer, key * row_stride + first // DEPTH * group_stride)
                matmul(
                    shift(sums, key * width), width, (place, row_stride, group_stride, part),
                    (shift(line, first // step * block_stride), block_stride, block_part),
                    group, width, steps(stop - first), piece.begins_sums == 0, are_small,
                )  # fmt: skip

    def backward(parameters, piece, memory):
        head_dim, value_dim = parameters.head_dim, parameters.value_dim
        # The sums' rows are whole vectors, and so are those of the blocks they are computed from.
        head_width, value_width = parameters.grad_key_row_stride, parameters.grad_value_row_stride
        query_row, value_row = head_width + PADDING, value_width + PADDING
        rows = piece.heads * piece.query_count
        columns = round_up(rows, COLUMNS)
        _, key_width, value_tile_width = sizes_of_block(parameters, piece)
        weights, grad_scores, slopes = memory.weights, memory.grad_scores, memory.slopes
        kept, weight_parts, score_parts = memory.kept, memory.weight_parts, memory.score_parts
        base, shares, delta, scales = memory.base, memory.shares, memory.delta, memory.scales
        row_sums, lanes, block = memory.row_sums, memory.lanes, memory.block
        turned, packed, grad_packed = memory.turned, memory.packed, memory.grad_packed
        grad_queries = memory.grad_queries

        fill_lanes(parameters, piece, lanes, columns)
        queries, query_stride = query_rows_of(
            parameters, piece, block, head_dim, columns, query_row
        )
        grads, grad_stride = grad_rows_of(
            parameters, piece, memory.grad_block, value_dim, columns, value_row
        )
        load_statistics(
            parameters, piece, grads, grad_stride, value_width, packed, base, shares, delta, columns
        )
        query_rows, small = pack_rows(
            parameters, packed, memory.row_pairs, query_row, head_width, turned, queries,
            query_stride, head_dim, key_width, columns,
        )  # fmt: skip
        grad_rows, small_grads = pack_rows(
            parameters, grad_packed, memory.grad_row_pairs, value_row, value_width, turned, grads,
            grad_stride, value_dim, value_tile_width, columns,
        )  # fmt: skip
        small = small and small_grads and are_small(delta, columns)
        if piece.key_start == piece.key_stop:
            fill(grad_queries, key_width * TILE_STRIDE, 0.0)
        start_row_sums(row_sums)

        begin_products()
        for key_start in range(piece.key_start, piece.key_stop, KEY_BLOCK):
            count = min(KEY_BLOCK, piece.key_stop - key_start)
            keys, small_keys = key_tile(parameters, piece, memory.keys, key_start, count)
            values, small_values = value_tile(parameters, piece, memory.values, key_start, count)
            small_tile = small and small_keys and small_values
            turned_keys = turned_tile(memory.turned_keys, keys, count, head_dim)
            stop = 0
            while stop < columns:
                start = stop
                some, stride = next_panel(parameters, columns - start)
                stop += some
                seen = seen_rows(piece, start, some, key_start, count)
                sums = shift(grad_queries, start * key_width)
                # With the first tile there are no sums yet, but zeros where it is not seen.
                has_sums = key_start > piece.key_start
                if not has_sums:
                    start_sums(sums, stride, head_dim if seen > 0 else 0, key_width)
                if seen == 0:
                    continue
                weights_tile(
                    parameters, piece, lanes, weights, grad_scores, kept, slopes, keys, values,
                    packed_panel(packed, start, stride, head_dim, key_width),
                    packed_panel(grad_packed, start, stride, value_dim, value_tile_width),
                    small_tile, base, shares, delta, row_sums, key_start, start, some, seen,
                )  # fmt: skip
                panel, panel_kept = shift(grad_scores, start), shift(kept, start)
                if has_options and parameters.bias_gradient != GRADIENT_NONE:
                    write_bias(parameters, piece, grad_scores, kept, key_start, seen)
                if has_options and parameters.softcap > 0.0:
                    multiply(panel, shift(slopes, start), some, seen)
                fill(shift(panel, seen * TILE_STRIDE), some, 0.0)
                split(weight_parts, weights, start, some, seen)
                split(score_parts, grad_scores, start, some, seen)
                factors = as_rows(panel_kept, score_parts, panel, start, some, seen)
                matmul(
                    sums, stride, turned_keys, factors,
                    round_up(head_dim, ROWS), some, steps(seen), has_sums, small_tile,
                )  # fmt: skip
            factors = as_lanes(weight_parts, weights, columns, count)
            add_products(
                piece, row_of(parameters, "grad_value", piece.slot, 0, key_start), value_width,
                factors, grad_rows, rows, small_tile, key_start, count,
            )  # fmt: skip
            factors = as_lanes(score_parts, grad_scores, columns, count)
            add_products(
                piece, row_of(parameters, "grad_key", piece.slot, 0, key_start), head_width,
                factors, query_rows, rows, small_tile, key_start, count,
            )  # fmt: skip

        end_products()
        fill(scales, columns, parameters.scale)
        write_grad_query(parameters, piece, grad_queries, scales, key_width, columns, block)
        if needs_row_sums(parameters):
            write_row_sums(parameters, piece, row_sums, base, shares, delta)

    return kernel_with_scratch(backward, layout, argument_types(dtype))
