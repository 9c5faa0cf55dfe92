"""Write the whole matrix of what dropout keeps, for formulas that work on all weights at once."""

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
)
from foo_ops.kernels.attention.scores import ROW_FACTS, make_dropout_mask, make_row_facts_filler
from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.lang.scratch import Scratch, make_kernel_with_scratch, row_of
from foo_ops.kernels.simd.memory import load, store
from foo_ops.kernels.simd.transpose import round_up
from foo_ops.kernels.simd.types import compute_dtype, lanes_of


@functools.cache
def make_scratch(dtype: str) -> Scratch:
    @njit
    def sizes_of_block(parameters, piece):
        return ()

    def describe() -> dict[str, Any]:
        return {"dropout_mask": TILE, "row_facts": ROW_FACTS * QUERY_BLOCK}

    return Scratch(compute_dtype(dtype), sizes_of_block, describe)


def make_dropout_mask_kernel(dtype: str) -> Kernel:
    """Make the kernel that writes rows of partial_output, (batch, heads, queries, keys)."""
    LANES = lanes_of(compute_dtype(dtype))
    fill_row_facts, load_dropout_mask = make_row_facts_filler(dtype), make_dropout_mask(dtype)

    def dropout_mask_rows(parameters, piece, memory):
        dropout_mask, row_facts = memory.dropout_mask, memory.row_facts
        columns = round_up(piece.query_count, LANES)
        fill_row_facts(parameters, piece, row_facts, columns)
        for key_start in range(piece.key_start, piece.key_stop, KEY_BLOCK):
            count = min(KEY_BLOCK, piece.key_stop - key_start)
            load_dropout_mask(parameters, row_facts, dropout_mask, key_start, 0, columns, count)
            for row in range(piece.query_count):
                query = piece.query_start + row
                target = row_of(parameters, "partial_output", piece.batch, piece.head, query)
                for key in range(count):
                    store(target, key_start + key, load(dropout_mask, key * TILE_STRIDE + row))

    return make_kernel_with_scratch(dropout_mask_rows, make_scratch(dtype), argument_types(dtype))
