"""What the kernels of attention share: their parameters, and how query, key and value are packed.

All of them work on tiles that lie *transposed* in scratch memory: a row for each key (or each
column of the value), with the queries of a block side by side in it. A vector then holds the scores
of several queries for one key, so that the softmax needs no operation across lanes, and on vectors
keys and values enter the products one broadcast element at a time, most often from where they are.

They go over a block's queries panel by panel: as many as a register tile takes (or as are quickest
for a matrix unit), or all where the scores are modified. What is kept of the queries between tiles
(themselves, the sums of the output) lies panel after panel, so that a product reads neighbouring
lines of few pages.

A block has up to QUERY_BLOCK queries, and up to TILE_STRIDE where a tile holds all of them: of one
head, or all the queries of several heads that share a key head. A tile has up to KEY_BLOCK keys.

bfloat16 enters the products in pairs if the processor multiplies pairs (dtype bfloat16x2, a step of
two along the dimension that is summed over), else as float32. float16 enters as float32. For a
matrix unit all of these enter as parts of bfloat16, in pairs: see foo_ops/kernels/parts.py.

The factors of a product are tuples: of the left one, whose elements are broadcast, the pointer, the
strides of a row and of a group of steps (a single one on vectors), and how far its parts are apart;
of the right one, whose rows are vectors, the pointer, the stride of a step, and how far its parts
are apart. The groups of a factor that is copied for a matrix unit lie one after the other, so that
the rows of a register are adjacent.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numba.core import types

from foo_ops.kernels.matmul import lanes_of, matmul_of, next_panel_of
from foo_ops.kernels.parts import (
    pair_storer_of,
    parts_of,
    row_splitter_of,
    smallness_of,
)
from foo_ops.kernels.simd import (
    ELEMENTS,
    Pointer,
    address_of,
    load,
    load_vector,
    pointer_to,
    shift,
    splat,
    store,
)
from foo_ops.kernels.struct import Struct, field, row_of
from foo_ops.kernels.target import multiplies_pairs
from foo_ops.kernels.tile_products import TILE_MULTIPLE, nothing, tile_products_of
from foo_ops.kernels.tiles import PAIRS, pack_pairs, transpose_square

# csrc/ops/attention_parameters.h has these as well, and tests/test_agreement.py compares them.
QUERY_BLOCK = 1024
KEY_BLOCK = 128
# Elements from a row of a tile to the next. A power of two would put the rows of a panel on few
# sets of the cache; this is an odd number of its lines.
TILE_STRIDE = 176
TILE = (KEY_BLOCK + 1) * TILE_STRIDE

# The queries of a panel for a matrix unit.
PANEL_ON_TILES = 64

# Values of bias_kind.
BIAS_NONE, BIAS_BOOL, BIAS_OF_QUERY_DTYPE, BIAS_FLOAT32 = range(4)
# Values of bias_gradient: none, a tile is written by one block, blocks add to sums.
GRADIENT_NONE, GRADIENT_STORED, GRADIENT_ADDED = range(3)

NUMBERS = ("scale", "factor", "softcap", "kept_scale")
SIZES = (
    *("head_dim", "value_dim", "query_heads", "group", "key_heads", "batch"),
    *("modifies", "bias_kind", "bias_rows", "bias_columns", "bias_gradient"),
    *("has_alibi_slopes", "has_sinks", "dropout_threshold", "seed"),
    *("page_size", "block_table_stride", "query_length", "key_length", "chunks"),
)
OPERANDS = (
    *("query", "key", "value", "attn_bias", "alibi_slopes", "sinks", "output", "logsumexp"),
    *("grad_output", "grad_logsumexp", "grad_query", "grad_key", "grad_value", "grad_attn_bias"),
    *("grad_alibi_slopes", "grad_sinks", "partial_output", "partial_largest", "partial_total"),
)
IN_COMPUTE_TYPE = (
    *("alibi_slopes", "sinks", "logsumexp", "grad_logsumexp", "grad_key", "grad_value"),
    *("grad_alibi_slopes", "grad_sinks", "partial_output", "partial_largest", "partial_total"),
)

PIECE_FIELDS = (
    *("batch", "head", "heads", "query_start", "query_count", "query_offset", "key_offset"),
    *("key_start", "key_stop", "first_visible", "last_visible", "alignment"),
    *("slot", "part", "parts", "block", "bias", "begins_sums", "statistics"),
)
PIECE = Struct("AttentionPiece", tuple((name, types.int64) for name in PIECE_FIELDS))

# Scores and maxima are in units of this: exp(x) = 2^(x / LOG2).
LOG2 = math.log(2.0)


def compute_dtype(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def lowest_score(dtype: str) -> float:
    """So that a score remains finite in units of log 2; the highest is as far from 0.

    One of finfo.min, by which masks of some libraries hide, is lower than all others and yet not
    hidden where all are of that size.
    """
    return 0.69 * float(np.finfo(compute_dtype(dtype)).min)


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
    foo_ops/kernels/parts.py.
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


def argument_types(dtype: str) -> tuple[Any, ...]:
    """Parameters, the piece of work, scratch memory, and where to write how much of it there is."""
    return (_parameters(dtype), PIECE, Pointer(compute_dtype(dtype)), Pointer("int64"))


def _parameters(dtype: str) -> Struct:
    """The struct Parameters of csrc/ops/attention_parameters.h.

    An operand is a pointer with its strides, in elements, for batch, head, row and column.
    grad_key and grad_value are sums in the compute type, which a last kernel rounds.
    """
    dtypes = dict.fromkeys(OPERANDS, dtype)
    dtypes |= dict.fromkeys(IN_COMPUTE_TYPE, compute_dtype(dtype))
    # The dtype of the bias is known at run time only, by bias_kind.
    dtypes |= dict.fromkeys(("attn_bias", "grad_attn_bias"), "uint8")
    fields: list[tuple[str, types.Type]] = [(number, types.float64) for number in NUMBERS]
    fields += [(size, types.int64) for size in SIZES]
    fields.append(("block_table", Pointer("int32")))
    for operand, operand_dtype in dtypes.items():
        fields.append((operand, Pointer(operand_dtype)))
        fields += [
            (f"{operand}_{axis}_stride", types.int64) for axis in ("batch", "head", "row", "column")
        ]
    return Struct("AttentionParameters", tuple(fields))


@njit
def round_up(count, multiple):
    return (count + multiple - 1) // multiple * multiple


@functools.cache
def fill_of(dtype: str) -> Callable:
    """``fill(target, count, value)``, where the target is in the compute type ``dtype``."""
    LANES = lanes_of(dtype)  # noqa: N806
    compute = ELEMENTS[dtype].compute

    @njit
    def fill(target, count, value):
        values = splat(compute(value), LANES)
        whole = count // LANES * LANES
        for index in range(0, whole, LANES):
            store(target, index, values)
        for index in range(whole, count):
            store(target, index, value)

    return fill


@functools.cache
def sums_starter_of(dtype: str) -> Callable:
    """``start_sums(sums, stride, first_row, rows)``: zeros for a panel's rows from first_row on."""
    fill = fill_of(dtype)

    @njit
    def start_sums(sums, stride, first_row, rows):
        fill(shift(sums, first_row * stride), (rows - first_row) * stride, 0.0)

    return start_sums


@functools.cache
def tile_operation_of(dtype: str, operation: Callable) -> Callable:
    """``apply(target, source, columns, count)``, on tiles of the compute type ``dtype``.

    Each element of the target becomes operation(its own value, the source's).
    """
    LANES = lanes_of(dtype)  # noqa: N806

    @njit
    def apply(target, source, columns, count):
        for key in range(count):
            for column in range(0, columns, LANES):
                index = key * TILE_STRIDE + column
                result = operation(
                    load_vector(target, index, LANES), load_vector(source, index, LANES)
                )
                store(target, index, result)

    return apply


def dim_name_of(operand: str) -> str:
    """How the number of columns of an operand is called: its own size, or that of value."""
    has_head_dim = operand in ("query", "key", "grad_query", "grad_key")
    return "head_dim" if has_head_dim else "value_dim"


@functools.cache
def copy_row_of(dtype: str) -> Callable:
    """``copy_row(target, source, column_stride, columns, width)``, to adjacent elements.

    Converts between dtypes of the compute type ``dtype``, and writes zeros up to width.
    """
    LANES = lanes_of(dtype)  # noqa: N806

    @njit
    def copy_row(target, source, column_stride, columns, width):
        whole = columns // LANES * LANES if column_stride == 1 else 0
        for column in range(0, whole, LANES):
            store(target, column, load_vector(source, column, LANES))
        for column in range(whole, columns):
            store(target, column, load(source, column * column_stride))
        for column in range(columns, width):
            store(target, column, 0.0)

    return copy_row


@functools.cache
def lane_row_of(operand: str) -> Callable:
    """``lane_row(parameters, piece, lane)``: the pointer to the row of query, output or a gradient
    of these that belongs to a lane of a block.
    """

    @njit
    def lane_row(parameters, piece, lane):
        head, row = piece.head + lane // piece.query_count, lane % piece.query_count
        query = piece.query_offset + piece.query_start + row
        return row_of(parameters, operand, piece.batch, head, query)

    return lane_row


@functools.cache
def block_of(dtype: str, operand: str) -> Callable:
    """``load_block(parameters, piece, target, columns, rows, width)``: the rows of a block.

    Those of query, output or a gradient of these, as ``rows`` rows of ``width`` elements of the
    compute type, with zeros where the block has fewer.
    """
    copy_row, fill = copy_row_of(compute_dtype(dtype)), fill_of(compute_dtype(dtype))
    column_stride_name = f"{operand}_column_stride"

    @njit
    def load_block(parameters, piece, target, columns, rows, width):
        count = piece.query_count
        column_stride = field(parameters, column_stride_name)
        for head in range(piece.heads):
            for row in range(count):
                query = piece.query_offset + piece.query_start + row
                source = row_of(parameters, operand, piece.batch, piece.head + head, query)
                line = shift(target, (head * count + row) * width)
                copy_row(line, source, column_stride, columns, width)
        used = piece.heads * count
        fill(shift(target, used * width), (rows - used) * width, 0.0)

    return load_block


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
def turn_of(dtype: str) -> Callable:
    """``turn(target, target_stride, block, stride, rows, width)``: rows of the compute type
    ``dtype``, or of pairs, transposed.

    rows and width must be multiples of the lanes.
    """
    LANES = lanes_of(dtype)  # noqa: N806

    @njit
    def turn(target, target_stride, block, stride, rows, width):
        for row in range(0, rows, LANES):
            for column in range(0, width, LANES):
                transpose_square(
                    shift(target, column * target_stride + row), target_stride,
                    shift(block, row * stride + column), stride, LANES,
                )  # fmt: skip

    return turn


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
    infinity: see `foo_ops.kernels.parts.pair_storer_of`.
    """
    if parts_of(dtype):
        return pair_storer_of(parts_of(dtype))

    @njit
    def store_pairs(target, index, part, a, b):
        store(target, index, pack_pairs(a, b))

    return store_pairs


@functools.cache
def small_of(dtype: str) -> Callable:
    """``are_small(source, count)``, for products: see foo_ops/kernels/parts.py."""
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
    memory, with zeros up to ``width``; as `foo_ops.kernels.parts.row_splitter_of` has it.

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


@njit
def queries_of(piece, start, columns):
    """The first query of a panel, and how many there are."""
    if piece.heads > 1:
        return piece.query_start, piece.query_count
    return piece.query_start + start, min(columns, piece.query_count - start)


@njit
def seen_keys(piece, first_query, query_count, key_start, count):
    """How many of a tile's keys, from its first on, a panel has to visit."""
    if first_query + piece.first_visible >= key_start + count:
        return 0
    stop = first_query + query_count + piece.last_visible - key_start
    return max(0, min(count, stop))
