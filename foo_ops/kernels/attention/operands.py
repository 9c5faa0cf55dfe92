"""Bring query, key and value into the form that matrix products take.

See foo_ops/kernels/products/operands.py for these forms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention.parameters import TILE_STRIDE, dim_name_of
from foo_ops.kernels.lang.scratch import field
from foo_ops.kernels.products.limbs import (
    limbs_of,
    make_pair_storer,
    make_row_splitter,
    make_smallness_check,
)
from foo_ops.kernels.products.on_amx import TILE_MULTIPLE
from foo_ops.kernels.products.on_vectors import make_next_register_panel
from foo_ops.kernels.products.operands import make_step_counter, product_dtype, sizes_of, step_of
from foo_ops.kernels.simd.memory import address_of, load_vector, pointer_to, shift, store
from foo_ops.kernels.simd.narrow import PAIRS, pack_pairs
from foo_ops.kernels.simd.transpose import make_copy_row, make_fill, make_transpose
from foo_ops.kernels.simd.types import compute_dtype, lanes_of

# The queries of a panel for a matrix unit.
PANEL_ON_TILES = 64


@functools.cache
def make_next_panel(dtype: str) -> Callable:
    """Make ``next_panel(parameters, columns)``, which takes a panel off the ``columns`` that are
    left.

    It returns how many columns the panel has, and the elements from one of its rows to the next.
    """
    next_of_product = make_next_register_panel(compute_dtype(dtype))
    on_tiles, WIDEST = limbs_of(dtype) > 0, PANEL_ON_TILES

    @njit
    def next_panel(parameters, columns):
        # A bias is loaded for the whole block.
        if parameters.modifies:
            return columns, TILE_STRIDE
        if on_tiles:
            some = WIDEST if columns >= WIDEST else TILE_MULTIPLE
        else:
            some = next_of_product(columns)
        return some, some

    return next_panel


@functools.cache
def make_right_matrix(dtype: str) -> Callable:
    """Make the function that brings rows, which are summed over, into the form of a right matrix.

    ``as_right_matrix(target, target_stride, source, stride, rows, columns)``: the source's rows, in
    the compute dtype, become the steps of a product on vectors. They stay where they are if a step
    is one element. Otherwise pairs of neighbouring rows are packed to the target, with zeros up to
    the steps of a product. ``rows`` may be odd; the row after the last must then be zero.
    ``columns`` must be a multiple of the vector's lanes.
    """
    if product_dtype(dtype) != PAIRS:

        @njit
        def themselves(target, target_stride, source, stride, rows, columns):
            return source, stride, 0

        return themselves

    LANES = lanes_of(compute_dtype(dtype))
    as_pairs = pointer_to(PAIRS)

    @njit
    def as_pairs_of_rows(target, target_stride, source, stride, rows, columns):
        pairs = as_pairs(address_of(target))
        for row in range(0, rows, 2):
            upper, lower = shift(source, row * stride), shift(source, (row + 1) * stride)
            line = shift(pairs, row // 2 * target_stride)
            for column in range(0, columns, LANES):
                first = load_vector(upper, column, LANES)
                store(line, column, pack_pairs(first, load_vector(lower, column, LANES)))
        return pairs, target_stride, 0

    return as_pairs_of_rows


@functools.cache
def make_pairs_storer(dtype: str) -> Callable:
    """Make ``store_pairs(target, index, limb_stride, a, b)`` for vectors of the compute dtype.

    None of them may hold an infinity: see `foo_ops.kernels.products.limbs.make_pair_storer`.
    """
    if limbs_of(dtype):
        return make_pair_storer(limbs_of(dtype))

    @njit
    def store_pairs(target, index, limb_stride, a, b):
        store(target, index, pack_pairs(a, b))

    return store_pairs


@functools.cache
def make_product_smallness_check(dtype: str) -> Callable:
    """Make ``are_small(source, count)`` for products: see foo_ops/kernels/products/limbs.py."""
    if limbs_of(dtype) > 1:
        return make_smallness_check(lanes_of("float32"))

    @njit
    def are_small(source, count):
        return True

    return are_small


@functools.cache
def make_panel_packer(dtype: str) -> tuple[Callable, Callable]:
    """Make the functions that pack a block's rows as right matrices, summed over the head
    dimension.

    ``pack(parameters, target, scratch, block, stride, dim, width, columns)`` turns the ``columns``
    rows of ``width`` elements of the compute dtype, of which ``dim`` count, into panels. A panel
    has a row for each element (or each two) and takes the room of ``width + 1`` rows; target and
    scratch memory have that times the room of limbs. ``panel(target, start, stride, dim, width)``
    returns the panel that begins with the column ``start``.
    """
    next_panel, pack_panel = make_next_panel(dtype), _make_panel_packer(dtype)
    steps, as_matrix = make_step_counter(dtype), pointer_to(product_dtype(dtype))
    ROOM = sizes_of(dtype).room

    @njit
    def pack(parameters, target, scratch, block, stride, dim, width, columns):
        start = 0
        while start < columns:
            some, panel_stride = next_panel(parameters, columns - start)
            place = start * (width + 1) * ROOM
            pack_panel(
                shift(target, place), panel_stride, scratch, shift(block, start * stride), stride,
                dim, width, some,
            )  # fmt: skip
            start += some

    @njit
    def panel(target, start, stride, dim, width):
        place = shift(target, start * (width + 1) * ROOM)
        return as_matrix(address_of(place)), stride, steps(dim) * stride

    return pack, panel


def _make_panel_packer(dtype: str) -> Callable:
    """Make ``pack_panel(target, target_stride, scratch, block, stride, dim, width, columns)``."""
    compute, step = compute_dtype(dtype), step_of(product_dtype(dtype))
    transpose, fill, as_right_matrix = (
        make_transpose(compute),
        make_fill(compute),
        make_right_matrix(dtype),
    )

    @njit
    def pack_panel(target, target_stride, scratch, block, stride, dim, width, columns):
        rows = target if step == 1 else scratch
        transpose(rows, target_stride, block, stride, columns, width)
        # The last of an odd number of elements has this for its neighbour.
        fill(shift(rows, width * target_stride), columns, 0.0)
        as_right_matrix(target, target_stride, rows, target_stride, dim, columns)

    return pack_panel


@functools.cache
def make_limb_transpose(dtype: str) -> Callable:
    """Make ``transpose_limbs(target, target_stride, source, dim, width, columns)``.

    It makes a panel for a matrix unit out of the limbs of ``columns`` rows of ``width`` bfloat16.
    """
    LIMBS, transpose, steps = limbs_of(dtype), make_transpose("float32"), make_step_counter(dtype)
    as_pairs = pointer_to(PAIRS)

    @njit
    def transpose_limbs(target, target_stride, source, dim, width, columns):
        limb_stride = columns * width // 2
        for number in range(LIMBS):
            rows = as_pairs(address_of(shift(source, number * limb_stride)))
            packed = as_pairs(address_of(shift(target, number * steps(dim) * target_stride)))
            transpose(packed, target_stride, rows, width // 2, columns, steps(dim))

    return transpose_limbs


@functools.cache
def make_stored_row_splitter(dtype: str, operand: str) -> Callable:
    """Make ``split(parameters, target, group, limb_stride, line, source, width)`` for rows in
    memory.

    It splits a row into limbs, with zeros up to ``width``, as
    `foo_ops.kernels.products.limbs.make_row_splitter` does. ``line`` has room for a row in float32.
    """
    split_row, copy_row = (
        make_row_splitter(limbs_of(dtype), lanes_of("float32")),
        make_copy_row("float32"),
    )
    column_stride_name, is_float32 = f"{operand}_column_stride", dtype == "float32"
    dim_name = dim_name_of(operand)

    @njit
    def split(parameters, target, group, limb_stride, line, source, width):
        columns, column_stride = field(parameters, dim_name), field(parameters, column_stride_name)
        if is_float32 and column_stride == 1 and columns == width:
            return split_row(target, group, limb_stride, source, width)
        copy_row(line, source, column_stride, columns, width)
        return split_row(target, group, limb_stride, line, width)

    return split
