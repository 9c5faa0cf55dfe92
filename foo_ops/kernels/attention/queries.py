"""Pack the queries of a forward kernel's block as right matrices of the products with the keys."""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention.operands import (
    make_limb_transpose,
    make_next_panel,
    make_panel_packer,
    make_stored_row_splitter,
)
from foo_ops.kernels.attention.rows import make_block_loader, make_operand_row
from foo_ops.kernels.products.limbs import GROUP_ELEMENTS, limbs_of
from foo_ops.kernels.products.operands import make_step_counter, sizes_of
from foo_ops.kernels.simd.memory import address_of, pointer_to, shift, store
from foo_ops.kernels.simd.narrow import PAIRS
from foo_ops.kernels.simd.transpose import make_fill, make_transpose
from foo_ops.kernels.simd.types import compute_dtype


@functools.cache
def make_query_packer(dtype: str) -> Callable:
    """Make ``pack_queries(parameters, piece, target, small_panels, block, scratch, width,
    columns)``.

    The ``columns`` queries become the panels of `make_panel_packer`. Where a panel begins,
    ``small_panels`` gets 1 if its numbers are small and 0 if not. The block as a whole would not
    do: which queries are in it depends on the threads. ``block`` has room for all queries in the
    compute dtype.
    """
    if limbs_of(dtype):
        return _make_packer_for_matrix_unit(dtype)
    load_block, fill = make_block_loader(dtype, "query"), make_fill(compute_dtype(dtype))
    query_row = make_operand_row("query")
    (pack, _), is_compute_type = make_panel_packer(dtype), dtype == compute_dtype(dtype)

    @njit
    def pack_queries(parameters, piece, target, small_panels, block, scratch, width, columns):
        fill(small_panels, columns, 1.0)
        dim = parameters.head_dim
        has_whole_rows = dim == width and parameters.query_column_stride == 1
        if is_compute_type and has_whole_rows and piece.query_count == columns:
            rows = query_row(parameters, piece, 0)
            stride = parameters.query_row_stride
            pack(parameters, target, scratch, rows, stride, dim, width, columns)
        else:
            load_block(parameters, piece, block, dim, columns, width)
            pack(parameters, target, scratch, block, width, dim, width, columns)

    return pack_queries


def _make_packer_for_matrix_unit(dtype: str) -> Callable:
    """Pack from memory to limbs without the block in between; bfloat16 goes to the panel itself."""
    next_panel, transpose, transpose_limbs = (
        make_next_panel(dtype),
        make_transpose("float32"),
        make_limb_transpose(dtype),
    )
    split_row, steps = make_stored_row_splitter(dtype, "query"), make_step_counter(dtype)
    DEPTH, ROOM = sizes_of(dtype).depth, sizes_of(dtype).room
    as_elements, as_pairs = pointer_to("bfloat16"), pointer_to(PAIRS)
    fill, LIMBS, is_stored_in_pairs = make_fill("float32"), limbs_of(dtype), dtype == "bfloat16"
    query_row, group = make_operand_row("query"), GROUP_ELEMENTS

    @njit
    def has_pairs(parameters, piece, stop):
        """Whether the rows up to ``stop`` are of one head and can be read as pairs with one
        stride.
        """
        is_whole = parameters.head_dim % DEPTH == 0 and parameters.query_column_stride == 1
        is_even = parameters.query_row_stride % 2 == 0
        return is_whole and is_even and stop <= piece.query_count

    @njit
    def pack_panel(parameters, piece, target, stride, line, scratch, width, start, columns):
        if is_stored_in_pairs and has_pairs(parameters, piece, start + columns):
            source = as_pairs(address_of(query_row(parameters, piece, start)))
            row_stride = parameters.query_row_stride // 2
            packed = as_pairs(address_of(target))
            transpose(packed, stride, source, row_stride, columns, steps(parameters.head_dim))
            return True
        small, limb_stride = True, columns * width // 2
        elements, rows = as_elements(address_of(scratch)), piece.heads * piece.query_count - start
        for row in range(min(columns, rows)):
            source, place = (
                query_row(parameters, piece, start + row),
                shift(elements, row * width),
            )
            small = (
                split_row(parameters, place, group, 2 * limb_stride, line, source, width) and small
            )
        for row in range(rows, columns):
            for number in range(LIMBS):
                fill(shift(scratch, number * limb_stride + row * width // 2), width // 2, 0.0)
        transpose_limbs(target, stride, scratch, parameters.head_dim, width, columns)
        return small

    @njit
    def pack_queries(parameters, piece, target, small_panels, block, scratch, width, columns):
        start = 0
        while start < columns:
            some, stride = next_panel(parameters, columns - start)
            place = shift(target, start * (width + 1) * ROOM)
            small = pack_panel(parameters, piece, place, stride, block, scratch, width, start, some)
            store(small_panels, start, 1.0 if small else 0.0)
            start += some

    return pack_queries
