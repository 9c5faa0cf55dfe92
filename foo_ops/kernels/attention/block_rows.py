"""Pack the rows of query and grad_output of a backward kernel's block as right matrices."""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention.operands import (
    make_limb_transpose,
    make_next_panel,
    make_panel_packer,
    make_right_matrix,
)
from foo_ops.kernels.attention.rows import make_block_loader, make_operand_row
from foo_ops.kernels.lang.scratch import field
from foo_ops.kernels.products.limbs import GROUP_ELEMENTS, limbs_of, make_row_splitter
from foo_ops.kernels.products.operands import sizes_of
from foo_ops.kernels.simd.memory import address_of, pointer_to, shift
from foo_ops.kernels.simd.narrow import PAIRS, interleave
from foo_ops.kernels.simd.types import compute_dtype, lanes_of


@functools.cache
def make_block_rows(dtype: str, operand: str) -> Callable:
    """Make ``block_rows(parameters, piece, scratch, columns, rows, width)``, which finds a block's
    rows.

    It returns a pointer to them and their stride. They are copied to ``scratch`` as
    `make_block_loader` does it, unless a matrix unit can take its matrices from where they are.
    """
    load_block, operand_row = make_block_loader(dtype, operand), make_operand_row(operand)
    row_stride_name, column_stride_name = f"{operand}_row_stride", f"{operand}_column_stride"
    may_stay = limbs_of(dtype) > 0 and dtype == compute_dtype(dtype)
    DEPTH = sizes_of(dtype).depth

    @njit
    def block_rows(parameters, piece, scratch, columns, rows, width):
        is_whole = columns % DEPTH == 0 and field(parameters, column_stride_name) == 1
        if may_stay and is_whole and piece.heads == 1 and piece.query_count == rows:
            return operand_row(parameters, piece, 0), field(parameters, row_stride_name)
        load_block(parameters, piece, scratch, columns, rows, width)
        return scratch, width

    return block_rows


@functools.cache
def make_row_packer(dtype: str) -> Callable:
    """Make the function that packs a block's rows for both kinds of products.

    ``pack_rows(parameters, panels, pairs, pair_stride, pair_width, scratch, rows, stride, dim,
    width, columns)`` fills ``panels`` as `make_panel_packer` does, for sums over the head
    dimension. It returns the right matrix of all rows for sums over these, with at least
    ``pair_width`` numbers in each step, and whether all numbers are small.
    """
    if limbs_of(dtype):
        return _make_row_packer_for_matrix_unit(dtype)
    (pack, _), as_right_matrix = make_panel_packer(dtype), make_right_matrix(dtype)

    @njit
    def pack_rows(
        parameters, panels, pairs, pair_stride, pair_width, scratch, rows, stride, dim, width,
        columns,
    ):  # fmt: skip
        pack(parameters, panels, scratch, rows, stride, dim, width, columns)
        factor = as_right_matrix(pairs, pair_stride, rows, stride, columns, pair_width)
        return factor, True

    return pack_rows


def _make_row_packer_for_matrix_unit(dtype: str) -> Callable:
    """Split each row once: the pairs of two rows are their limbs side by side."""
    LIMBS, LANES, ROOM = limbs_of(dtype), lanes_of("float32"), sizes_of(dtype).room
    next_panel, transpose_limbs = make_next_panel(dtype), make_limb_transpose(dtype)
    split_row = make_row_splitter(LIMBS, LANES)
    as_elements, as_pairs = pointer_to("bfloat16"), pointer_to(PAIRS)

    @njit
    def pair_rows(pairs, pair_stride, limb_stride, elements, width, rows):
        for number in range(LIMBS):
            for row in range(0, rows, 2):
                upper = shift(elements, (number * rows + row) * width)
                line = number * limb_stride + row // 2 * pair_stride
                for column in range(0, width, 2 * LANES):
                    first = shift(upper, column)
                    interleave(pairs, line + column, first, shift(first, width), LANES)

    @njit
    def pack_rows(
        parameters, panels, pairs, pair_stride, pair_width, scratch, rows, stride, dim, width,
        columns,
    ):  # fmt: skip
        elements, factor = as_elements(address_of(scratch)), as_pairs(address_of(pairs))
        start, small, limb_stride = 0, True, columns // 2 * pair_stride
        while start < columns:
            some, panel_stride = next_panel(parameters, columns - start)
            for row in range(some):
                line, source = shift(elements, row * width), shift(rows, (start + row) * stride)
                small = split_row(line, GROUP_ELEMENTS, some * width, source, width) and small
            place = shift(panels, start * (width + 1) * ROOM)
            transpose_limbs(place, panel_stride, scratch, dim, width, some)
            first = shift(factor, start // 2 * pair_stride)
            pair_rows(first, pair_stride, limb_stride, elements, width, some)
            start += some
        return (factor, pair_stride, limb_stride), small or LIMBS == 1

    return pack_rows
