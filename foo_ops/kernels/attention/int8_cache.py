"""The scales of keys and values of 8 bits, of which there is one for each head and position.

An integer is exact in every dtype, and becomes a number where it is loaded. The scale of a key is a
factor of its scores, and that of a value one of its weights.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention.decode_products import MOST_OF_GROUP
from foo_ops.kernels.attention.key_tiles import lie_together, make_key_row
from foo_ops.kernels.attention.parameters import KEY_BLOCK, TILE_STRIDE
from foo_ops.kernels.lang.scratch import field
from foo_ops.kernels.simd.arithmetic import splat
from foo_ops.kernels.simd.memory import load, load_repeated, load_vector, shift, store
from foo_ops.kernels.simd.transpose import make_copy_row, round_up
from foo_ops.kernels.simd.types import ELEMENTS, compute_dtype, lanes_of


def _make_scales_loader(dtype: str, operand: str) -> Callable:
    """Make ``load_scales(parameters, piece, target, key_start, count)``, which writes zeros up to a
    whole vector.
    """
    LANES, scale_row = lanes_of(compute_dtype(dtype)), make_key_row(f"{operand}_scale")
    copy_row, row_stride_name = make_copy_row(compute_dtype(dtype)), f"{operand}_scale_row_stride"

    @njit
    def load_scales(parameters, piece, target, key_start, count):
        first, stride = scale_row(parameters, piece, key_start), field(parameters, row_stride_name)
        # A row in its page is found by divisions.
        if lie_together(parameters, key_start, count):
            copy_row(target, first, stride, count, round_up(count, LANES))
            return
        for key in range(count):
            store(target, key, load(scale_row(parameters, piece, key_start + key), 0))
        for key in range(count, round_up(count, LANES)):
            store(target, key, 0.0)

    return load_scales


def make_score_scaler(dtype: str) -> Callable:
    """Make ``scale(parameters, piece, memory, key_start, columns, count)`` for a tile of scores."""
    LANES, scalar = lanes_of(compute_dtype(dtype)), ELEMENTS[dtype].compute
    load_scales = _make_scales_loader(dtype, "key")

    @njit
    def scale(parameters, piece, memory, key_start, columns, count):
        load_scales(parameters, piece, memory.scales, key_start, count)
        for key in range(count):
            row = shift(memory.scores, key * TILE_STRIDE)
            factor = splat(scalar(load(memory.scales, key)), LANES)
            for column in range(0, columns, LANES):
                store(row, column, load_vector(row, column, LANES) * factor)

    return scale


def make_weight_scaler(dtype: str) -> Callable:
    """Make ``scale(parameters, piece, memory, key_start, columns, count)`` for the weights that
    `foo_ops.kernels.attention.decode_softmax.make_decode_softmax` makes of a tile.
    """
    LANES, load_scales = lanes_of(compute_dtype(dtype)), _make_scales_loader(dtype, "value")
    GROUP = min(MOST_OF_GROUP, LANES)

    def make_group(ROWS: int) -> Callable:
        KEYS = LANES // ROWS

        @njit
        def scale_group(weights, scales, count):
            for key in range(0, count, KEYS):
                factors = load_repeated(scales, key, ROWS, LANES)
                store(weights, key * ROWS, load_vector(weights, key * ROWS, LANES) * factors)

        return scale_group

    scale_one, scale_group = make_group(1), make_group(GROUP)

    @njit
    def scale(parameters, piece, memory, key_start, columns, count):
        load_scales(parameters, piece, memory.scales, key_start, count)
        rows = piece.heads * piece.query_count
        if rows == 1:
            scale_one(memory.weights, memory.scales, count)
            return
        for row in range(0, rows, GROUP):
            scale_group(shift(memory.weights, row * KEY_BLOCK), memory.scales, count)

    return scale


def make_no_scaler() -> Callable:
    """Make the function of the same arguments for keys and values that are numbers."""

    @njit
    def leave(parameters, piece, memory, key_start, columns, count):
        pass

    return leave
