"""The queries of a forward kernel's block, as right factors of the products with the keys."""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention.operands import (
    packer_of,
    panel_of,
    part_turner_of,
    sizes_of,
    steps_of,
    stored_row_splitter_of,
)
from foo_ops.kernels.attention.parameters import compute_dtype
from foo_ops.kernels.attention.rows import block_of, fill_of, lane_row_of, turn_of
from foo_ops.kernels.products.limbs import GROUP_ELEMENTS, parts_of
from foo_ops.kernels.vectors.memory import address_of, pointer_to, shift, store
from foo_ops.kernels.vectors.pairs import PAIRS


@functools.cache
def query_packer_of(dtype: str) -> Callable:
    """``pack_queries(parameters, piece, target, small_panels, block, scratch, width, columns)``.

    The ``columns`` queries become the panels of `packer_of`. For each panel, where it begins,
    ``small_panels`` gets 1 if its numbers are small and 0 if not. Not for the block: which of them
    are in it depends on the threads. ``block`` has room for all queries in the compute type.
    """
    if parts_of(dtype):
        return _packer_on_tiles(dtype)
    load_block, fill = block_of(dtype, "query"), fill_of(compute_dtype(dtype))
    query_row = lane_row_of("query")
    (pack, _), is_compute_type = packer_of(dtype), dtype == compute_dtype(dtype)

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


def _packer_on_tiles(dtype: str) -> Callable:
    """Without the block: from memory to parts, or of bfloat16 to the panel itself."""
    next_panel, turn, turn_parts = panel_of(dtype), turn_of("float32"), part_turner_of(dtype)
    split_row, steps = stored_row_splitter_of(dtype, "query"), steps_of(dtype)
    DEPTH, ROOM = sizes_of(dtype).depth, sizes_of(dtype).room  # noqa: N806
    as_elements, as_pairs = pointer_to("bfloat16"), pointer_to(PAIRS)
    fill, PARTS, is_stored_in_pairs = fill_of("float32"), parts_of(dtype), dtype == "bfloat16"  # noqa: N806
    query_row, group = lane_row_of("query"), GROUP_ELEMENTS

    @njit
    def has_pairs(parameters, piece, stop):
        """Whether the lanes up to ``stop`` can be read as pairs, one stride apart: of one head."""
        is_whole = parameters.head_dim % DEPTH == 0 and parameters.query_column_stride == 1
        is_even = parameters.query_row_stride % 2 == 0
        return is_whole and is_even and stop <= piece.query_count

    @njit
    def pack_panel(parameters, piece, target, stride, line, scratch, width, start, columns):
        if is_stored_in_pairs and has_pairs(parameters, piece, start + columns):
            source = as_pairs(address_of(query_row(parameters, piece, start)))
            row_stride = parameters.query_row_stride // 2
            packed = as_pairs(address_of(target))
            turn(packed, stride, source, row_stride, columns, steps(parameters.head_dim))
            return True
        small, part = True, columns * width // 2
        elements, rows = as_elements(address_of(scratch)), piece.heads * piece.query_count - start
        for row in range(min(columns, rows)):
            source, place = (
                query_row(parameters, piece, start + row),
                shift(elements, row * width),
            )
            small = split_row(parameters, place, group, 2 * part, line, source, width) and small
        for row in range(rows, columns):
            for number in range(PARTS):
                fill(shift(scratch, number * part + row * width // 2), width // 2, 0.0)
        turn_parts(target, stride, scratch, parameters.head_dim, width, columns)
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
