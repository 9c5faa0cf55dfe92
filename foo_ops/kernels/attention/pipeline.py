"""The backward pass of attention over a tile of keys, pipelined for a matrix unit.

While the vector units turn a panel's scores into weights and gradients of the scores, the matrix
unit multiplies for the panels before and after it::

    panel 0    scores, products    weights, gradients    grad_query
    panel 1                        scores, products      weights, gradients    grad_query

where products are those of values and gradients. A processor executes some hundred instructions
out of order, while those of a panel's exponentials are tens of thousands. So blocks of a product,
of 32 x 32 sums, begin between parts of that work.

On an Intel with AMX (a Granite Rapids by its caches), this takes 0.86 to 0.92 of the time with
heads of 64, and 0.93 to 1.04 with heads of 128. The forward pass has less work between its
products: pipelined in the same way, it took 1.1 to 1.35 times as long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention.operands import (
    TILE_STRIDE,
    make_next_panel,
    make_panel_packer,
    make_sums_starter,
    queries_of,
    seen_keys,
)
from foo_ops.kernels.attention.scores import make_mask
from foo_ops.kernels.attention.softmax import make_weight_matrices
from foo_ops.kernels.products.limbs import limbs_of
from foo_ops.kernels.products.on_amx import TILE_MULTIPLE, make_amx_blocks
from foo_ops.kernels.products.operands import make_step_counter, product_dtype
from foo_ops.kernels.simd.memory import address_of, pointer_to, shift
from foo_ops.kernels.simd.transpose import round_up
from foo_ops.kernels.simd.types import compute_dtype, lanes_of

# Keys of a part of the vector work, between which blocks begin. By the model of ports, two vectors
# of queries take 190 cycles. The matrix unit computes a block in 128 or 256 cycles for heads of 64.
PART = 8


def is_pipelined(dtype: str, has_options: bool, has_programs: bool) -> bool:
    """Whether the backward kernel is pipelined: its scores need no more than a mask."""
    return limbs_of(dtype) == 1 and not has_options and not has_programs


# ------------------------------------------------------------------------------------------- blocks

# A product is a tuple: c, its row stride, a, b, rows, columns, steps, and whether it adds to c.
# Work is a tuple of three products, which are computed in this order.


@njit
def blocks_of(product):
    _, _, _, _, rows, columns, _, _ = product
    return rows // TILE_MULTIPLE * (columns // TILE_MULTIPLE)


@njit
def blocks_of_all(work):
    first, second, third = work
    return blocks_of(first) + blocks_of(second) + blocks_of(third)


@njit
def blocks_due(work, part, parts):
    """Return how many blocks have begun after ``part`` of equal parts: all after the last."""
    return (part * blocks_of_all(work) + parts - 1) // parts


@njit
def without_rows(product):
    """Return a product that has no blocks."""
    c, c_stride, a, b, _, columns, steps, adds = product
    return c, c_stride, a, b, 0, columns, steps, adds


@functools.cache
def _make_block_computer() -> tuple[Callable, Callable]:
    """Make ``advance`` and ``multiply``.

    ``advance(work, number, place, stride)`` stores the block at ``place`` and begins the block
    ``number``. It returns the place and the row stride of the new block.
    ``multiply(work, number, place, stride)`` computes and stores all blocks from ``number`` on.
    """
    start_block, store_block = make_amx_blocks()

    @njit
    def advance(work, number, place, stride):
        count = blocks_of_all(work)
        if 0 < number <= count:
            store_block(place, stride)
        if number >= count:
            return place, stride
        product, second, third = work
        if number >= blocks_of(product):
            number -= blocks_of(product)
            product = second
            if number >= blocks_of(product):
                number -= blocks_of(product)
                product = third
        c, c_stride, a, b, _, columns, steps, adds = product
        return start_block(c, c_stride, a, b, columns, steps, adds, number), c_stride

    @njit
    def multiply(work, number, place, stride):
        for rest in range(number, blocks_of_all(work) + 1):
            place, stride = advance(work, rest, place, stride)

    return advance, multiply


def _make_parts_beside_blocks(add_part: Callable, WIDTH: int) -> Callable:
    """Make the function that computes a panel in parts, and begins blocks of products between them.

    ``compute(panel, place, start, columns, seen, work)`` calls ``add_part(panel, column, key,
    stop)`` for each ``WIDTH`` columns from ``start`` on and each ``PART`` of the keys that are
    seen, and computes all blocks of ``work``. Any ``place`` will do before the first block.
    """
    advance, multiply = _make_block_computer()

    @njit
    def compute(panel, place, start, columns, seen, work):
        parts = columns // WIDTH * ((seen + PART - 1) // PART)
        part, begun, stride = 0, 0, TILE_STRIDE
        for column in range(start, start + columns, WIDTH):
            for key in range(0, seen, PART):
                part += 1
                due = blocks_due(work, part, parts)
                for number in range(begun, due):
                    place, stride = advance(work, number, place, stride)
                begun = due
                add_part(panel, column, key, min(key + PART, seen))
        multiply(work, begun, place, stride)

    return compute


@functools.cache
def _make_next_seen(dtype: str) -> Callable:
    """Make the function that finds the next panel of which a query sees a key.

    ``next_seen(parameters, piece, sums, start, columns, key_start, count, width, has_sums)``
    returns the panel's start, columns, and the keys that it visits, in multiples of TILE_MULTIPLE
    except at the tile's end. There are no columns if there is no such panel. Without sums, it
    starts those of all panels that it passes.
    """
    next_panel, start_sums = make_next_panel(dtype), make_sums_starter(compute_dtype(dtype))

    @njit
    def next_seen(parameters, piece, sums, start, columns, key_start, count, width, has_sums):
        while start < columns:
            some, stride = next_panel(parameters, columns - start)
            first_query, query_count = queries_of(piece, start, some)
            seen = seen_keys(piece, first_query, query_count, key_start, count)
            if not has_sums:
                first_row = parameters.head_dim if seen > 0 else 0
                start_sums(shift(sums, start * width), stride, first_row, width)
            if seen > 0:
                return start, some, min(count, round_up(seen, TILE_MULTIPLE))
            start += some
        return start, 0, 0

    return next_seen


# ------------------------------------------------------------------------------------------- passes


@functools.cache
def make_pipelined_backward(dtype: str) -> Callable:
    """Make the function that adds a tile of keys to grad_query, and leaves its matrices.

    ``add_tile(parameters, piece, memory, keys, values, transposed_keys, key_start, count, columns,
    key_width, value_width, has_sums)`` computes what the loop over panels of the
    backward kernel does without options, if `may_fuse`.
    """
    LANES, as_matrix = lanes_of(compute_dtype(dtype)), pointer_to(product_dtype(dtype))
    (_, panel_of), steps = make_panel_packer(dtype), make_step_counter(dtype)
    next_seen, hide = _make_next_seen(dtype), make_mask(dtype)
    weight_matrices, pad_pairs = make_weight_matrices(dtype)
    _, multiply = _make_block_computer()

    @njit
    def product_of(target, keys, packed, start, columns, seen, dim, width):
        """Return the product of keys and queries, or of values and gradients."""
        right = panel_of(packed, start, columns, dim, width)
        rows = round_up(seen, TILE_MULTIPLE)
        return shift(target, start), TILE_STRIDE, keys, right, rows, columns, steps(dim), False

    @njit
    def sums_of(parameters, memory, keys, start, columns, seen, width, has_sums):
        pairs = as_matrix(address_of(shift(memory.dropout_mask, start)))
        return (
            shift(memory.grad_queries, start * width), columns, keys, (pairs, TILE_STRIDE, 0),
            round_up(parameters.head_dim, TILE_MULTIPLE), columns, steps(seen), has_sums,
        )  # fmt: skip

    @njit
    def add_part(panel, column, key, stop):
        parameters, memory = panel
        weight_matrices(parameters, memory, column, key, stop)

    matrices = _make_parts_beside_blocks(add_part, 2 * LANES)

    @njit
    def add_tile(
        parameters, piece, memory, keys, values, transposed_keys, key_start, count, columns,
        key_width, value_width, has_sums,
    ):  # fmt: skip
        sums = without_rows(
            sums_of(parameters, memory, transposed_keys, 0, 0, 0, key_width, has_sums)
        )
        start, some, seen, following = 0, 0, 0, 0
        while True:
            following, next_columns, next_count = next_seen(
                parameters, piece, memory.grad_queries, following, columns, key_start, count,
                key_width, has_sums,
            )  # fmt: skip
            scores = product_of(
                memory.weights, keys, memory.packed, following, next_columns, next_count,
                parameters.head_dim, key_width,
            )  # fmt: skip
            products = product_of(
                memory.grad_scores, values, memory.grad_packed, following, next_columns,
                next_count, parameters.value_dim, value_width,
            )  # fmt: skip
            work = (sums, scores, products)
            if some > 0:
                first_query, queries = queries_of(piece, start, some)
                hide(
                    piece, shift(memory.row_facts, start), shift(memory.weights, start),
                    first_query, queries, key_start, some, seen,
                )  # fmt: skip
                pad_pairs(memory, start, some, seen)
                matrices((parameters, memory), memory.weights, start, some, seen, work)
                sums = sums_of(
                    parameters, memory, transposed_keys, start, some, seen, key_width, has_sums
                )
            else:
                multiply(work, 0, memory.weights, TILE_STRIDE)
            start, some, seen = following, next_columns, next_count
            if some == 0:
                break
            following += some
        none = without_rows(sums)
        multiply((sums, none, none), 0, memory.weights, TILE_STRIDE)

    return add_tile
