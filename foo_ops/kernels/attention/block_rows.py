"""The rows of a backward kernel's block, those of query and grad_output, as right factors."""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention.operands import (
    factors_of,
    packer_of,
    panel_of,
    part_turner_of,
    sizes_of,
)
from foo_ops.kernels.attention.parameters import compute_dtype
from foo_ops.kernels.attention.rows import block_of, lane_row_of
from foo_ops.kernels.products.limbs import GROUP_ELEMENTS, parts_of, row_splitter_of
from foo_ops.kernels.vectors.elements import lanes_of
from foo_ops.kernels.vectors.limbs import interleave
from foo_ops.kernels.vectors.memory import address_of, pointer_to, shift
from foo_ops.kernels.vectors.pairs import PAIRS
from foo_ops.kernels.vectors.struct import field


@functools.cache
def block_rows_of(dtype: str, operand: str) -> Callable:
    """``block_rows(parameters, piece, scratch, columns, rows, width)``: as `block_of`, but the rows
    themselves, and how far they are apart, where a matrix unit's factors can be made of these.
    """
    load_block, lane_row = block_of(dtype, operand), lane_row_of(operand)
    row_stride_name, column_stride_name = f"{operand}_row_stride", f"{operand}_column_stride"
    may_stay = parts_of(dtype) > 0 and dtype == compute_dtype(dtype)
    DEPTH = sizes_of(dtype).depth  # noqa: N806

    @njit
    def block_rows(parameters, piece, scratch, columns, rows, width):
        is_whole = columns % DEPTH == 0 and field(parameters, column_stride_name) == 1
        if may_stay and is_whole and piece.heads == 1 and piece.query_count == rows:
            return lane_row(parameters, piece, 0), field(parameters, row_stride_name)
        load_block(parameters, piece, scratch, columns, rows, width)
        return scratch, width

    return block_rows


@functools.cache
def row_packer_of(dtype: str) -> Callable:
    """The function that makes of a block's rows right factors of both kinds.

    ``pack_rows(parameters, panels, pairs, pair_stride, pair_width, scratch, rows, stride, dim,
    width, columns)``: the panels of `packer_of`, for sums over the head dimension, and of all rows
    the factor for sums over them, with ``pair_width`` numbers in each step, or more. Returns this
    and whether its numbers are small.
    """
    if parts_of(dtype):
        return _row_packer_on_tiles(dtype)
    (pack, _), as_factors = packer_of(dtype), factors_of(dtype)

    @njit
    def pack_rows(
        parameters, panels, pairs, pair_stride, pair_width, scratch, rows, stride, dim, width,
        columns,
    ):  # fmt: skip
        pack(parameters, panels, scratch, rows, stride, dim, width, columns)
        factor = as_factors(pairs, pair_stride, rows, stride, columns, pair_width)
        return factor, True

    return pack_rows


def _row_packer_on_tiles(dtype: str) -> Callable:
    """Rows are split once: the pairs of two are their parts side by side."""
    PARTS, LANES, ROOM = parts_of(dtype), lanes_of("float32"), sizes_of(dtype).room  # noqa: N806
    next_panel, turn_parts = panel_of(dtype), part_turner_of(dtype)
    split_row = row_splitter_of(PARTS, LANES)
    as_elements, as_pairs = pointer_to("bfloat16"), pointer_to(PAIRS)

    @njit
    def pair_rows(pairs, pair_stride, part, elements, width, rows):
        for number in range(PARTS):
            for row in range(0, rows, 2):
                upper = shift(elements, (number * rows + row) * width)
                line = number * part + row // 2 * pair_stride
                for column in range(0, width, 2 * LANES):
                    first = shift(upper, column)
                    interleave(pairs, line + column, first, shift(first, width), LANES)

    @njit
    def pack_rows(
        parameters, panels, pairs, pair_stride, pair_width, scratch, rows, stride, dim, width,
        columns,
    ):  # fmt: skip
        elements, factor = as_elements(address_of(scratch)), as_pairs(address_of(pairs))
        start, small, part = 0, True, columns // 2 * pair_stride
        while start < columns:
            some, panel_stride = next_panel(parameters, columns - start)
            for row in range(some):
                line, source = shift(elements, row * width), shift(rows, (start + row) * stride)
                small = split_row(line, GROUP_ELEMENTS, some * width, source, width) and small
            place = shift(panels, start * (width + 1) * ROOM)
            turn_parts(place, panel_stride, scratch, dim, width, some)
            first = shift(factor, start // 2 * pair_stride)
            pair_rows(first, pair_stride, part, elements, width, some)
            start += some
        return (factor, pair_stride, part), small or PARTS == 1

    return pack_rows
