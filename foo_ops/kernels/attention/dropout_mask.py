"""Attention: which weights dropout keeps, for formulas that work on the whole matrix of them."""

from __future__ import annotations

import functools
from typing import Any

from numba import njit

from foo_ops.kernels.attention.parameters import (
    KEY_BLOCK,
    QUERY_BLOCK,
    TILE,
    TILE_STRIDE,
    argument_types,
    compute_dtype,
)
from foo_ops.kernels.attention.rows import round_up
from foo_ops.kernels.attention.scores import LANE_ROWS, kept_of, lanes_filler_of
from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.vectors.elements import lanes_of
from foo_ops.kernels.vectors.memory import load, store
from foo_ops.kernels.vectors.scratch import Scratch, kernel_with_scratch
from foo_ops.kernels.vectors.struct import row_of


@functools.cache
def scratch_of(dtype: str) -> Scratch:
    @njit
    def sizes_of_block(parameters, piece):
        return ()

    def describe() -> dict[str, Any]:
        return {"kept": TILE, "lanes": LANE_ROWS * QUERY_BLOCK}

    return Scratch(compute_dtype(dtype), sizes_of_block, describe)


def build(dtype: str) -> Kernel:
    """Writes rows of partial_output, (batch, heads, queries, keys)."""
    LANES = lanes_of(compute_dtype(dtype))  # noqa: N806
    fill_lanes, load_kept = lanes_filler_of(dtype), kept_of(dtype)

    def kept_rows(parameters, piece, memory):
        kept, lanes = memory.kept, memory.lanes
        columns = round_up(piece.query_count, LANES)
        fill_lanes(parameters, piece, lanes, columns)
        for key_start in range(piece.key_start, piece.key_stop, KEY_BLOCK):
            count = min(KEY_BLOCK, piece.key_stop - key_start)
            load_kept(parameters, lanes, kept, key_start, 0, columns, count)
            for row in range(piece.query_count):
                query = piece.query_start + row
                target = row_of(parameters, "partial_output", piece.batch, piece.head, query)
                for key in range(count):
                    store(target, key_start + key, load(kept, key * TILE_STRIDE + row))

    return kernel_with_scratch(kept_rows, scratch_of(dtype), argument_types(dtype))
