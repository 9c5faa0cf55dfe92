"""The forward pass over a tile of keys, pipelined for a matrix unit.

While the vector units turn the scores of a panel into weights, the matrix unit multiplies the
values by the weights of the panel before it, and the keys by the queries of the panel after it::

    panel          0            1            2
    scores         keys q0      keys q1      keys q2
    softmax                     exp 0        exp 1        exp 2
    accumulator                              values w0    values w1    values w2

A processor executes some hundred instructions out of order, while a panel's exponentials are tens
of thousands. So a block of a product, of 32 x 32 sums, begins after the exponentials of some keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention.operands import (
    PANEL_ON_TILES,
    TILE_STRIDE,
    make_next_panel,
    make_panel_packer,
    make_sums_starter,
    queries_of,
    seen_keys,
)
from foo_ops.kernels.attention.scores import make_mask
from foo_ops.kernels.attention.softmax import make_rescale, make_softmax_by_parts
from foo_ops.kernels.products.limbs import limbs_of
from foo_ops.kernels.products.on_amx import TILE_MULTIPLE, make_amx_blocks
from foo_ops.kernels.products.operands import make_step_counter, product_dtype
from foo_ops.kernels.simd.memory import address_of, pointer_to, shift
from foo_ops.kernels.simd.transpose import round_up
from foo_ops.kernels.simd.types import compute_dtype, lanes_of

KEYS_BESIDE = 32
"""Keys of a vector of queries whose exponentials are computed between two blocks: 260 cycles, of
which a block of heads of 64 keeps the matrix unit busy for 128 or 256."""


def is_pipelined(dtype: str, has_options: bool, has_programs: bool) -> bool:
    """Whether a forward kernel is pipelined: its scores need no more than a mask."""
    return limbs_of(dtype) == 1 and not has_options and not has_programs


@njit
def blocks_of(product):
    _, _, _, _, rows, columns, _, _ = product
    return rows // TILE_MULTIPLE * (columns // TILE_MULTIPLE)


@functools.cache
def make_pipelined_panels(dtype: str) -> Callable:
    """Make the function that adds a tile of keys and values to all panels.

    ``add_tile(parameters, piece, memory, keys, transposed_values, key_start, count, columns,
    head_width, value_width, has_sums)`` computes what the loop over panels in
    `foo_ops.kernels.attention.forward` does without options.
    """
    LANES, as_matrix = lanes_of(compute_dtype(dtype)), pointer_to(product_dtype(dtype))
    next_panel, (_, panel_of) = make_next_panel(dtype), make_panel_packer(dtype)
    start_sums, rescale = make_sums_starter(compute_dtype(dtype)), make_rescale(dtype)
    steps, hide = make_step_counter(dtype), make_mask(dtype)
    update_maxima, add_weights, pad_weights = make_softmax_by_parts(dtype)
    start_block, store_block = make_amx_blocks()

    # A product is a tuple: c, its row stride, a, b, rows, columns, steps, and whether it adds to c.

    @njit
    def advance(values, scores, number, place, stride):
        """Store a block and begin the next: of the values' product, then of the scores'.

        The block ``number`` begins. Returns its place, to be stored, and the row stride there.
        """
        first = blocks_of(values)
        last = first + blocks_of(scores)
        if 0 < number <= last:
            store_block(place, stride)
        if number < first:
            c, stride, a, b, _, columns, depth, adds = values
            place = start_block(c, stride, a, b, columns, depth, adds, number)
        elif number < last:
            c, stride, a, b, _, columns, depth, adds = scores
            place = start_block(c, stride, a, b, columns, depth, adds, number - first)
        return place, stride

    @njit
    def multiply(values, scores, number, place, stride):
        """Compute and store all blocks from ``number`` on."""
        for rest in range(number, blocks_of(values) + blocks_of(scores) + 1):
            place, stride = advance(values, scores, rest, place, stride)

    @njit
    def next_seen(parameters, piece, memory, start, columns, key_start, count, width, has_sums):
        """Return start, columns and seen keys of the next panel that sees a key, or no columns."""
        while start < columns:
            some, stride = next_panel(parameters, columns - start)
            first_query, query_count = queries_of(piece, start, some)
            seen = seen_keys(piece, first_query, query_count, key_start, count)
            if not has_sums:
                sums = shift(memory.accumulator, start * width)
                start_sums(sums, stride, parameters.value_dim if seen > 0 else 0, width)
            if seen > 0:
                return start, some, seen
            start += some
        return start, 0, 0

    @njit
    def scores_of(parameters, memory, keys, target, start, columns, seen, head_width):
        queries = panel_of(memory.queries, start, columns, parameters.head_dim, head_width)
        return (
            target, TILE_STRIDE, keys, queries, round_up(seen, TILE_MULTIPLE), columns,
            steps(parameters.head_dim), False,
        )  # fmt: skip

    @njit
    def values_of(parameters, memory, values, weights, start, columns, seen, width, has_sums):
        return (
            shift(memory.accumulator, start * width), columns, values,
            (as_matrix(address_of(weights)), TILE_STRIDE, 0),
            round_up(parameters.value_dim, TILE_MULTIPLE), columns, steps(seen), has_sums,
        )  # fmt: skip

    @njit
    def exponentials(parameters, panel_scores, largest, total, columns, seen, values, scores):
        """Turn a panel's scores into weights, while the matrix unit computes two products."""
        blocks, number = blocks_of(values) + blocks_of(scores), 0
        parts = columns // LANES * ((seen + KEYS_BESIDE - 1) // KEYS_BESIDE)
        at_once = (blocks + parts - 1) // parts
        place, stride = panel_scores, TILE_STRIDE
        for column in range(0, columns, LANES):
            for key in range(0, seen, KEYS_BESIDE):
                for _ in range(at_once):
                    place, stride = advance(values, scores, number, place, stride)
                    number += 1
                stop = min(key + KEYS_BESIDE, seen)
                add_weights(parameters, panel_scores, largest, total, column, key, stop)
        pad_weights(panel_scores, columns, seen)
        multiply(values, scores, number, place, stride)

    @njit
    def add_tile(
        parameters, piece, memory, keys, transposed_values, key_start, count, columns, head_width,
        value_width, has_sums,
    ):  # fmt: skip
        # The scores of neighbouring panels lie side by side.
        target, other = memory.scores, shift(memory.scores, PANEL_ON_TILES)
        start, some, seen = next_seen(
            parameters, piece, memory, 0, columns, key_start, count, value_width, has_sums
        )
        # No product has been begun before the first panel.
        values = values_of(
            parameters, memory, transposed_values, other, 0, 0, 0, value_width, has_sums
        )
        scores = scores_of(parameters, memory, keys, target, start, some, seen, head_width)
        multiply(values, scores, 0, target, TILE_STRIDE)
        while some > 0:
            following, next_columns, next_count = next_seen(
                parameters, piece, memory, start + some, columns, key_start, count, value_width,
                has_sums,
            )  # fmt: skip
            first_query, queries = queries_of(piece, start, some)
            hide(
                piece, shift(memory.row_facts, start), target, first_query, queries, key_start,
                some, seen,
            )  # fmt: skip
            largest, total = shift(memory.largest, start), shift(memory.total, start)
            factors = shift(memory.correction, start)
            grew = update_maxima(parameters, target, largest, total, factors, some, seen)
            if grew and has_sums:
                sums = shift(memory.accumulator, start * value_width)
                rescale(sums, some, factors, parameters.value_dim, some)
            scores = scores_of(
                parameters, memory, keys, other, following, next_columns, next_count, head_width
            )
            exponentials(parameters, target, largest, total, some, seen, values, scores)
            values = values_of(
                parameters, memory, transposed_values, target, start, some, seen, value_width,
                has_sums,
            )  # fmt: skip
            start, some, seen = following, next_columns, next_count
            target, other = other, target
        scores = scores_of(parameters, memory, keys, target, start, 0, 0, head_width)
        multiply(values, scores, 0, target, TILE_STRIDE)

    return add_tile
