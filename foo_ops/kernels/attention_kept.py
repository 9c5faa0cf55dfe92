"""Attention: which weights dropout keeps, for formulas that work on the whole matrix of them."""

from __future__ import annotations

from foo_ops.kernels.attention import (
    KEY_BLOCK,
    TILE,
    TILE_STRIDE,
    argument_types,
    compute_dtype,
    round_up,
)
from foo_ops.kernels.attention_scores import kept_of, lanes_filler_of
from foo_ops.kernels.jit import Kernel
from foo_ops.kernels.matmul import lanes_of
from foo_ops.kernels.simd import load, shift, store
from foo_ops.kernels.struct import row_of


def build(dtype: str) -> Kernel:
    """Writes rows of partial_output, (batch, heads, queries, keys)."""
    LANES = lanes_of(compute_dtype(dtype))  # noqa: N806
    fill_lanes, load_kept = lanes_filler_of(dtype), kept_of(dtype)

    def kept_rows(parameters, piece, scratch):
        kept, lanes = scratch, shift(scratch, TILE)
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

    return Kernel(kept_rows, argument_types(dtype))
