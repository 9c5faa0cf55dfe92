"""Turn a tile of weights, or of gradients of the scores, into matrices of the backward products."""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention.operands import make_right_matrix
from foo_ops.kernels.attention.parameters import KEY_BLOCK, TILE_STRIDE
from foo_ops.kernels.products.limbs import GROUP_ELEMENTS, limbs_of, make_row_splitter
from foo_ops.kernels.products.on_amx import GROUP
from foo_ops.kernels.products.operands import make_step_counter, product_dtype, sizes_of
from foo_ops.kernels.simd.memory import address_of, load_vector, pointer_to, shift, store
from foo_ops.kernels.simd.narrow import PAIRS, interleave
from foo_ops.kernels.simd.transpose import make_fill, round_up
from foo_ops.kernels.simd.types import lanes_of


@functools.cache
def make_tile_matrices(dtype: str) -> tuple[Callable, Callable, Callable]:
    """Make the functions that turn a tile of weights, or of gradients, into matrices of products.

    ``split(limbs, tile, start, columns, rows)`` has to be called for a panel before the others.

    ``as_right_matrix(target, limbs, panel, start, columns, rows)`` makes the right matrix of a
    panel, summed over the keys. The row after the last must be zero.

    ``as_left_matrix(limbs, tile, columns, count)`` makes the left matrix of all panels, summed over
    the queries: rows as they are, or as pairs of neighbouring columns, with rows of zeros up to the
    multiple that a product takes.
    """
    if limbs_of(dtype):
        return _make_tile_matrices_of_limbs(dtype)
    right_matrix, as_left_matrix = make_right_matrix(dtype), _make_left_matrix(dtype)

    @njit
    def split(limbs, tile, start, columns, rows):
        pass

    @njit
    def as_right_matrix(target, limbs, panel, start, columns, rows):
        return right_matrix(target, TILE_STRIDE, panel, TILE_STRIDE, rows, columns)

    return split, as_right_matrix, as_left_matrix


def _make_left_matrix(dtype: str) -> Callable:
    """Make ``as_left_matrix`` for products on vectors."""
    if product_dtype(dtype) != PAIRS:

        @njit
        def themselves(limbs, tile, columns, count):
            return tile, TILE_STRIDE, 1, 0

        return themselves

    LANES = lanes_of("float32")
    as_elements, as_pairs = pointer_to("bfloat16"), pointer_to(PAIRS)

    @njit
    def rounded(limbs, tile, columns, count):
        elements = as_elements(address_of(limbs))
        for key in range(count):
            for column in range(0, columns, LANES):
                index = key * TILE_STRIDE + column
                store(elements, index, load_vector(tile, index, LANES))
        return as_pairs(address_of(limbs)), TILE_STRIDE // 2, 1, 0

    return rounded


def _make_tile_matrices_of_limbs(dtype: str) -> tuple[Callable, Callable, Callable]:
    """Split each number once: the pairs of two keys are their limbs side by side."""
    LANES, LIMBS, ROWS = lanes_of("float32"), limbs_of(dtype), sizes_of(dtype).rows
    split_row, fill, steps = (
        make_row_splitter(LIMBS, LANES),
        make_fill("float32"),
        make_step_counter(dtype),
    )
    as_elements, as_pairs = pointer_to("bfloat16"), pointer_to(PAIRS)
    # All keys of a group of queries, and then those of the next.
    group, limb_stride = KEY_BLOCK * GROUP, KEY_BLOCK * TILE_STRIDE // 2

    @njit
    def split(limbs, tile, start, columns, rows):
        elements = as_elements(address_of(shift(limbs, start // GROUP_ELEMENTS * group)))
        for key in range(round_up(rows, 2)):
            source = shift(tile, key * TILE_STRIDE + start)
            split_row(
                shift(elements, key * GROUP_ELEMENTS), 2 * group, 2 * limb_stride, source, columns
            )

    @njit
    def as_right_matrix(target, limbs, panel, start, columns, rows):
        pairs, target_limb_stride = as_pairs(address_of(target)), steps(rows) * TILE_STRIDE
        first_group = shift(limbs, start // GROUP_ELEMENTS * group)
        for number in range(LIMBS):
            elements = as_elements(address_of(shift(first_group, number * limb_stride)))
            for key in range(0, rows, 2):
                line = number * target_limb_stride + key // 2 * TILE_STRIDE
                for column in range(0, columns, 2 * LANES):
                    place = column // GROUP_ELEMENTS * 2 * group + column % GROUP_ELEMENTS
                    upper = shift(elements, place + key * GROUP_ELEMENTS)
                    lower = shift(upper, GROUP_ELEMENTS)
                    interleave(pairs, line + column, upper, lower, LANES)
            for step in range((rows + 1) // 2, steps(rows)):
                fill(shift(target, number * target_limb_stride + step * TILE_STRIDE), columns, 0.0)
        return pairs, TILE_STRIDE, target_limb_stride

    @njit
    def as_left_matrix(limbs, tile, columns, count):
        missing = round_up(count, ROWS) - count
        for number in range(LIMBS):
            for first in range(0, columns, GROUP_ELEMENTS):
                place = number * limb_stride + first // GROUP_ELEMENTS * group + count * GROUP
                fill(shift(limbs, place), missing * GROUP, 0.0)
        return as_pairs(address_of(limbs)), GROUP, group, limb_stride

    return split, as_right_matrix, as_left_matrix
