"""How query, key and value enter the matrix products of attention.

bfloat16 enters them in pairs if the processor multiplies pairs (dtype bfloat16x2, a step of two
along the dimension that is summed over), else as float32. float16 enters as float32. For a matrix
unit all of these enter as parts of bfloat16, in pairs: see foo_ops/kernels/products/limbs.py.

The factors of a product are tuples: of the left one, whose elements are broadcast, the pointer, the
strides of a row and of a group of steps (a single one on vectors), and how far its parts are apart;
of the right one, whose rows are vectors, the pointer, the stride of a step, and how far its parts
are apart. The groups of a factor that is copied for a matrix unit lie one after the other, so that
the rows of a register are adjacent.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention.parameters import TILE_STRIDE, compute_dtype, dim_name_of
from foo_ops.kernels.attention.rows import copy_row_of, fill_of, round_up, turn_of
from foo_ops.kernels.compiler.processor import multiplies_pairs
from foo_ops.kernels.products.limbs import pair_storer_of, parts_of, row_splitter_of, smallness_of
from foo_ops.kernels.products.on_amx import TILE_MULTIPLE, nothing, tile_products_of
from foo_ops.kernels.products.on_vectors import matmul_of, next_panel_of
from foo_ops.kernels.vectors.elements import lanes_of
from foo_ops.kernels.vectors.memory import address_of, load_vector, pointer_to, shift, store
from foo_ops.kernels.vectors.pairs import PAIRS, pack_pairs
from foo_ops.kernels.vectors.struct import field

# The queries of a panel for a matrix unit.
PANEL_ON_TILES = 64


def factor_dtype(dtype: str) -> str:
    """The dtype in which query, key, value and weights enter products on vectors."""
    return PAIRS if dtype == "bfloat16" and multiplies_pairs() else compute_dtype(dtype)


def product_dtype(dtype: str) -> str:
    """The dtype in which they enter matrix products."""
    return PAIRS if parts_of(dtype) else factor_dtype(dtype)


def step_of(factor: str) -> int:
    """How many elements are summed over in a step."""
    return 2 if factor == PAIRS else 1


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the sizes in a matrix product are multiples of.

    Keys and head dimensions are rows of one product and summed over in another: what is missing to
    a multiple is zeros.

    Attributes:
        rows: of the left factor.
        columns: of the right one.
        depth: the elements that are summed over.
        room: how many times the memory of the compute type the parts of a factor may take.
    """

    rows: int
    columns: int
    depth: int
    room: int


def sizes_of(dtype: str) -> Sizes:
    parts = parts_of(dtype)
    if parts:
        return Sizes(TILE_MULTIPLE, TILE_MULTIPLE, TILE_MULTIPLE, 2 if parts > 1 else 1)
    return Sizes(1, lanes_of(compute_dtype(dtype)), step_of(product_dtype(dtype)), 1)


@functools.cache
def products_of(dtype: str) -> tuple[Callable, Callable, Callable]:
    """``matmul``, and ``begin()`` and ``end()`` around a kernel's products.

    ``matmul(c, c_stride, a, b, rows, columns, steps, accumulate, are_small)`` computes
    c = a b, or adds it. ``are_small``: whether all numbers of both factors are, see
    foo_ops/kernels/products/limbs.py.
    """
    if parts_of(dtype):
        return tile_products_of(parts_of(dtype))
    factor = factor_dtype(dtype)
    on_vectors = matmul_of(compute_dtype(dtype), factor, factor)

    @njit
    def matmul(c, c_stride, a, b, rows, columns, steps, accumulate, are_small):
        left, row_stride, step_stride, _ = a
        right, stride, _ = b
        on_vectors(
            c, c_stride, left, row_stride, step_stride, right, stride,
            rows, columns, steps, accumulate,
        )  # fmt: skip

    return matmul, nothing, nothing


@functools.cache
def panel_of(dtype: str) -> Callable:
    """``next_panel(parameters, columns)``, of the ``columns`` that are left.

    How many columns the next panel has, and the elements from one of its rows to the next.
    """
    next_of_product = next_panel_of(compute_dtype(dtype))
    on_tiles, WIDEST = parts_of(dtype) > 0, PANEL_ON_TILES  # noqa: N806

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
def steps_of(dtype: str) -> Callable:
    """``steps(count)``: the steps of a product that is summed over ``count`` elements."""
    DEPTH, STEP = sizes_of(dtype).depth, step_of(product_dtype(dtype))  # noqa: N806

    @njit
    def steps(count):
        return round_up(count, DEPTH) // STEP

    return steps


@functools.cache
def factors_of(dtype: str) -> Callable:
    """The function that makes the right factor of a product of rows, which are summed over, on
    vectors.

    ``as_factors(target, target_stride, source, stride, rows, columns)``: the source's rows, in the
    compute type, become the steps of a product: themselves if a step is one element, else pairs of
    neighbouring rows, packed to the target, and zeros up to the steps of a product. rows may be
    odd; the row after the last must then be zero. columns must be a multiple of the lanes.
    """
    if product_dtype(dtype) != PAIRS:

        @njit
        def themselves(target, target_stride, source, stride, rows, columns):
            return source, stride, 0

        return themselves

    LANES = lanes_of(compute_dtype(dtype))  # noqa: N806
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
def pairs_storer_of(dtype: str) -> Callable:
    """``store_pairs(target, index, part, a, b)``, of vectors of the compute type without an
    infinity: see `foo_ops.kernels.products.limbs.pair_storer_of`.
    """
    if parts_of(dtype):
        return pair_storer_of(parts_of(dtype))

    @njit
    def store_pairs(target, index, part, a, b):
        store(target, index, pack_pairs(a, b))

    return store_pairs


@functools.cache
def small_of(dtype: str) -> Callable:
    """``are_small(source, count)``, for products: see foo_ops/kernels/products/limbs.py."""
    if parts_of(dtype) > 1:
        return smallness_of(lanes_of("float32"))

    @njit
    def are_small(source, count):
        return True

    return are_small


@functools.cache
def packer_of(dtype: str) -> tuple[Callable, Callable]:
    """The functions that make right factors, summed over the head dimension, of a block's rows.

    ``pack(parameters, target, scratch, block, stride, dim, width, columns)``: the ``columns`` rows
    of ``width`` elements of the compute type, of which ``dim`` count, become panels with a row for
    each element (or each two), each of ``width + 1`` rows. Target and scratch have room for as many
    times the room of parts. ``panel(target, start, stride, dim, width)``: the one that begins with
    the column ``start``.
    """
    next_panel, pack_panel = panel_of(dtype), _panel_packer_of(dtype)
    steps, as_factor = steps_of(dtype), pointer_to(product_dtype(dtype))
    ROOM = sizes_of(dtype).room  # noqa: N806

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
        return as_factor(address_of(place)), stride, steps(dim) * stride

    return pack, panel


def _panel_packer_of(dtype: str) -> Callable:
    """``pack_panel(target, target_stride, scratch, block, stride, dim, width, columns)``."""
    compute, step = compute_dtype(dtype), step_of(product_dtype(dtype))
    turn, fill, as_factors = turn_of(compute), fill_of(compute), factors_of(dtype)

    @njit
    def pack_panel(target, target_stride, scratch, block, stride, dim, width, columns):
        rows = target if step == 1 else scratch
        turn(rows, target_stride, block, stride, columns, width)
        # Of an odd number of elements the last has this for its neighbour.
        fill(shift(rows, width * target_stride), columns, 0.0)
        as_factors(target, target_stride, rows, target_stride, dim, columns)

    return pack_panel


@functools.cache
def part_turner_of(dtype: str) -> Callable:
    """``turn_parts(target, target_stride, source, dim, width, columns)``: a panel for a matrix
    unit, of the parts of ``columns`` rows of ``width`` bfloat16.
    """
    PARTS, turn, steps = parts_of(dtype), turn_of("float32"), steps_of(dtype)  # noqa: N806
    as_pairs = pointer_to(PAIRS)

    @njit
    def turn_parts(target, target_stride, source, dim, width, columns):
        part = columns * width // 2
        for number in range(PARTS):
            rows = as_pairs(address_of(shift(source, number * part)))
            packed = as_pairs(address_of(shift(target, number * steps(dim) * target_stride)))
            turn(packed, target_stride, rows, width // 2, columns, steps(dim))

    return turn_parts


@functools.cache
def stored_row_splitter_of(dtype: str, operand: str) -> Callable:
    """``split(parameters, target, group, part, line, source, width)``: the parts of a row in
    memory, with zeros up to ``width``; as `foo_ops.kernels.products.limbs.row_splitter_of` has it.

    ``line`` has room for a row in float32.
    """
    split_row, copy_row = (
        row_splitter_of(parts_of(dtype), lanes_of("float32")),
        copy_row_of("float32"),
    )
    column_stride_name, is_float32 = f"{operand}_column_stride", dtype == "float32"
    dim_name = dim_name_of(operand)

    @njit
    def split(parameters, target, group, part, line, source, width):
        columns, column_stride = field(parameters, dim_name), field(parameters, column_stride_name)
        if is_float32 and column_stride == 1 and columns == width:
            return split_row(target, group, part, source, width)
        copy_row(line, source, column_stride, columns, width)
        return split_row(target, group, part, line, width)

    return split
