"""Parameters, operands and results of the attention kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numba.core import types

from foo_ops.kernels.lang.scratch import Struct, field, row_of
from foo_ops.kernels.math.exponential import log
from foo_ops.kernels.products.limbs import (
    GROUP_ELEMENTS,
    limbs_of,
    make_pair_storer,
    make_row_splitter,
    make_smallness_check,
)
from foo_ops.kernels.products.on_amx import TILE_MULTIPLE
from foo_ops.kernels.products.on_vectors import make_next_register_panel
from foo_ops.kernels.products.operands import make_step_counter, product_dtype, sizes_of, step_of
from foo_ops.kernels.simd.arithmetic import absolute, fma, less, select, splat
from foo_ops.kernels.simd.memory import address_of, load, load_vector, pointer_to, shift, store
from foo_ops.kernels.simd.narrow import PAIRS, pack_pairs
from foo_ops.kernels.simd.transpose import (
    make_copy_row,
    make_fill,
    make_transpose,
    transpose_products,
)
from foo_ops.kernels.simd.types import ELEMENTS, Pointer, compute_dtype, lanes_of

# -------------------------------------------------------------------------- parameters of launchers

# Launchers pass the kernels parameters and a work item (`piece`).


# Also in foo_ops/csrc/ops/attention/arguments.h; tests/project/test_agreement.py compares them.
QUERY_BLOCK = 1024

KEY_BLOCK = 128

# Row stride of a tile. With a power of two, the rows of a panel would share few sets of the cache;
# this is an odd number of cache lines.
TILE_STRIDE = 176

TILE = (KEY_BLOCK + 1) * TILE_STRIDE

# Values of bias_kind.
BIAS_NONE, BIAS_BOOL, BIAS_OF_QUERY_DTYPE, BIAS_FLOAT32 = range(4)

# Values of bias_gradient: none; one block writes each tile; blocks add to sums.
GRADIENT_NONE, GRADIENT_STORED, GRADIENT_ADDED = range(3)

NUMBERS = ("scale", "factor", "softcap", "dropout_scale")

SIZES = (
    *("head_dim", "value_dim", "query_heads", "group", "key_heads", "batch"),
    *("modifies", "bias_kind", "bias_rows", "bias_columns", "bias_gradient"),
    *("has_alibi_slopes", "has_sinks", "dropout_threshold", "seed"),
    *("has_dropout_heads", "is_part"),
    *("page_size", "block_table_stride", "query_length", "key_length", "chunks"),
    "has_int8_cache",
    *("score_function", "masked_score_function", "gradient_function"),
    *("windows", "mask_batch_stride", "mask_head_stride", "mask_columns"),
    *("mask_query_block", "mask_key_block"),
    *("begin_turn", "end_turn"),
)

# Arguments of programs, and the block mask's states of windows and blocks: see programs.py.
PROGRAM_POINTERS = {"programs": "int64", "window_states": "int8", "block_states": "int8"}

OPERANDS = (
    *("query", "key", "value", "attn_bias", "alibi_slopes", "sinks", "output", "logsumexp"),
    *("grad_output", "grad_logsumexp", "grad_query", "grad_key", "grad_value", "grad_attn_bias"),
    *("grad_alibi_slopes", "grad_sinks", "partial_output", "partial_largest", "partial_total"),
    *("key_scale", "value_scale", "dropout_heads"),
)

IN_COMPUTE_TYPE = (
    *("alibi_slopes", "sinks", "logsumexp", "grad_logsumexp", "grad_key", "grad_value"),
    *("grad_alibi_slopes", "grad_sinks", "partial_output", "partial_largest", "partial_total"),
    *("key_scale", "value_scale"),
)

PIECE_FIELDS = (
    *("batch", "head", "heads", "query_start", "query_count", "query_offset", "key_offset"),
    *("key_start", "key_stop", "first_visible", "last_visible", "alignment"),
    *("slot", "key_split", "key_splits", "block", "bias", "begins_sums", "statistics"),
    *("chunk", "sums", "turns", "turn"),
)

# Arguments of the functions begin_turn and end_turn: the chunk's turns, the piece's turn and a key.
TURN_ARGUMENTS = (types.int64,) * 3

PIECE = Struct("AttentionPiece", tuple((name, types.int64) for name in PIECE_FIELDS))

# The unit of scores and maxima: exp(x) = 2^(x / LOG2).
LOG2 = math.log(2.0)


def lowest_score(dtype: str) -> float:
    """The lowest score, which is finite in units of log 2 too; the highest is its negative.

    Some libraries mask with finfo.min: such scores are below all others, yet a row in which all
    keys have it hides nothing.
    """
    return 0.69 * float(np.finfo(compute_dtype(dtype)).min)


def argument_types(dtype: str, cache_dtype: str | None = None) -> tuple[Any, ...]:
    """Types of the parameters, the work item, scratch memory and the pointer for its size.

    Key and value have ``cache_dtype`` if given, else ``dtype``.
    """
    return (
        _parameters(dtype, cache_dtype or dtype),
        PIECE,
        Pointer(compute_dtype(dtype)),
        Pointer("int64"),
    )


def _parameters(dtype: str, cache_dtype: str) -> Struct:
    """The struct Parameters of foo_ops/csrc/ops/attention/arguments.h.

    An operand is a pointer and its strides, in elements, for batch, head, row and column. grad_key
    and grad_value are sums in the compute dtype, which a final kernel rounds.
    """
    dtypes = dict.fromkeys(OPERANDS, dtype) | dict.fromkeys(("key", "value"), cache_dtype)
    dtypes |= dict.fromkeys(IN_COMPUTE_TYPE, compute_dtype(dtype))
    dtypes["dropout_heads"] = "int64"
    # The bias's dtype is known only at run time, from bias_kind.
    dtypes |= dict.fromkeys(("attn_bias", "grad_attn_bias"), "uint8")
    fields: list[tuple[str, types.Type]] = [(number, types.float64) for number in NUMBERS]
    fields += [(size, types.int64) for size in SIZES]
    fields.append(("block_table", Pointer("int32")))
    fields += [(name, Pointer(of)) for name, of in PROGRAM_POINTERS.items()]
    for operand, operand_dtype in dtypes.items():
        fields.append((operand, Pointer(operand_dtype)))
        fields += [
            (f"{operand}_{axis}_stride", types.int64) for axis in ("batch", "head", "row", "column")
        ]
    return Struct("AttentionParameters", tuple(fields))


def dim_name_of(operand: str) -> str:
    """The name of an operand's number of columns: head_dim or value_dim."""
    has_head_dim = operand in ("query", "key", "grad_query", "grad_key")
    return "head_dim" if has_head_dim else "value_dim"


# ----------------------------------------------------------------------------------------- operands

# Brings query, key and value into the form that matrix products need.
#
# See foo_ops/kernels/products/operands.py for these forms.


# Queries in a panel for a matrix unit.
PANEL_ON_TILES = 64


@functools.cache
def make_next_panel(dtype: str) -> Callable:
    """Make ``next_panel(parameters, columns)``: the next panel of the ``columns`` that are left.

    Returns the number of the panel's columns, and its row stride.
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
    """Make the function that turns rows, which are summed over, into a right matrix.

    ``as_right_matrix(target, target_stride, source, stride, rows, columns)``: the source's rows, in
    the compute dtype, become the steps of a product on vectors. If a step is one element, they are
    used in place. Otherwise pairs of neighbouring rows are packed to the target, with zeros up to
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

    The vectors must not hold an infinity: see `foo_ops.kernels.products.limbs.make_pair_storer`.
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
    """Make the functions that pack a block's rows as right matrices, summed over the head_dim.

    ``pack(parameters, target, scratch, block, stride, dim, width, columns)`` turns ``columns`` rows
    of ``width`` elements of the compute dtype, of which the first ``dim`` are used, into panels. A
    panel has a row for each element (or each two) and takes the room of ``width + 1`` rows; target
    and scratch memory have that times the room of limbs. ``panel(target, start, stride, dim,
    width)`` returns the panel that begins at the column ``start``.
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
        # Pairs with the last of an odd number of elements.
        fill(shift(rows, width * target_stride), columns, 0.0)
        as_right_matrix(target, target_stride, rows, target_stride, dim, columns)

    return pack_panel


@functools.cache
def make_limb_transpose(dtype: str) -> Callable:
    """Make the function that turns rows of limbs into a panel for a matrix unit.

    ``transpose_limbs(target, target_stride, source, dim, width, columns)`` reads the limbs of
    ``columns`` rows of ``width`` bfloat16.
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
    """Make the function that splits a tensor's row into limbs.

    ``split(parameters, target, group, limb_stride, line, source, width)`` pads with zeros up to
    ``width``: see `foo_ops.kernels.products.limbs.make_row_splitter`. ``line`` has room for a row
    in float32.
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


# ---------------------------------------------------------------------------------- rows of a block

# Finds and loads the rows of a block, and works on the rows of score tiles.


@functools.cache
def make_sums_starter(dtype: str) -> Callable:
    """Make ``start_sums(sums, stride, first_row, rows)``: zero a panel's rows from first_row on."""
    fill = make_fill(dtype)

    @njit
    def start_sums(sums, stride, first_row, rows):
        fill(shift(sums, first_row * stride), (rows - first_row) * stride, 0.0)

    return start_sums


@functools.cache
def make_tile_operation(dtype: str, operation: Callable) -> Callable:
    """Make ``apply(target, source, columns, count)`` for score tiles of the compute dtype.

    Each element of the target becomes ``operation(target, source)``.
    """
    LANES = lanes_of(dtype)

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


@njit
def second(first, second):
    """Return the second argument: the operation that copies a tile."""
    return second


@functools.cache
def make_operand_row(operand: str) -> Callable:
    """Make ``operand_row(parameters, piece, block_row)``: the address of a row of a block.

    The operand is query, output, or the gradient of one of them. A block's rows are its queries,
    one head after the other.
    """

    @njit
    def operand_row(parameters, piece, block_row):
        head, row = piece.head + block_row // piece.query_count, block_row % piece.query_count
        query = piece.query_offset + piece.query_start + row
        return row_of(parameters, operand, piece.batch, head, query)

    return operand_row


@functools.cache
def make_block_loader(dtype: str, operand: str) -> Callable:
    """Make ``load_block(parameters, piece, target, columns, rows, width)``: copy a block's rows.

    The operand is query, output, or the gradient of one of them. The copy has ``rows`` rows of
    ``width`` elements of the compute dtype, padded with zeros.
    """
    copy_row, fill = make_copy_row(compute_dtype(dtype)), make_fill(compute_dtype(dtype))
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


@njit
def queries_of(piece, start, columns):
    """The first query of a panel, and the number of its queries."""
    if piece.heads > 1:
        return piece.query_start, piece.query_count
    return piece.query_start + start, min(columns, piece.query_count - start)


@njit
def seen_keys(piece, first_query, query_count, key_start, count):
    """The number of a tile's keys, from its first on, that a panel has to visit."""
    if first_query + piece.first_visible >= key_start + count:
        return 0
    stop = first_query + query_count + piece.last_visible - key_start
    return max(0, min(count, stop))


# ------------------------------------------------------------------------------------------ queries

# Packs the queries of a forward kernel's block as right matrices of the products with the keys.


@functools.cache
def make_query_packer(dtype: str) -> Callable:
    """Make the function that packs a block's queries.

    ``pack_queries(parameters, piece, target, small_panels, block, scratch, width, columns)`` packs
    the ``columns`` queries into the panels of `make_panel_packer`. At a panel's first column,
    ``small_panels`` gets 1 if the panel's numbers are small and 0 if not. One flag for the block
    would not do: which queries a block holds depends on the number of threads. ``block`` has room
    for all queries in the compute dtype.
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
    """Pack from the tensor to limbs without copying the block; bfloat16 goes straight to panels."""
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
        """Whether the rows up to ``stop`` have one head, and can be read as pairs at one stride."""
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


# ------------------------------------------------------------------------------- results of a block

# Writes the results of a block: output and logsumexp, a key split's partial results, or grad_query.


@functools.cache
def make_finish(dtype: str) -> Callable:
    """Make ``finish(parameters, piece, largest, total, factors, is_key_split)``: write logsumexps.

    For a key split, writes the largest score and the sum instead, which the merge combines.
    ``factors`` receives the factor of each row's sums; ``total`` is overwritten.
    """
    compute, LANES = ELEMENTS[dtype].compute, lanes_of(compute_dtype(dtype))
    copy_row, fill = make_copy_row(compute_dtype(dtype)), make_fill(compute_dtype(dtype))
    SMALLEST, LARGEST = (
        float(getattr(np.finfo(compute_dtype(dtype)), name)) for name in ("tiny", "max")
    )

    @njit
    def finish_rows(largest, total, factors, block_row, dropout_scale):
        zero, smallest = splat(compute(0.0), LANES), splat(compute(SMALLEST), LANES)
        top, sum_ = load_vector(largest, block_row, LANES), load_vector(total, block_row, LANES)
        # A query that sees no key has a sum of zero; its output is zero.
        factor = select(less(sum_, smallest), zero, splat(compute(dropout_scale), LANES) / sum_)
        store(factors, block_row, factor)
        logsumexp = fma(top, splat(compute(LOG2), LANES), log(sum_))
        # With a score of +infinity the sum is NaN, but the logsumexp is +infinity.
        is_infinite = less(splat(compute(LARGEST), LANES), top)
        logsumexp = select(is_infinite, top, logsumexp)
        # Finite scores end at 0.9955 of the largest number, in units of log 2: see lowest_score.
        size, largest_number = absolute(top), splat(compute(LARGEST), LANES)
        end = select(less(zero, top), largest_number, zero - largest_number)
        end_or_nan = end + logsumexp * zero
        is_end = less(splat(compute(0.9954 * LARGEST), LANES), size)
        is_finite = less(size, splat(compute(math.inf), LANES))
        logsumexp = select(is_finite, select(is_end, end_or_nan, logsumexp), logsumexp)
        store(total, block_row, logsumexp)

    @njit
    def finish(parameters, piece, largest, total, factors, is_key_split):
        count = piece.query_count
        rows = piece.heads * count
        if is_key_split:
            largest_row = row_of(parameters, "partial_largest", piece.key_split, piece.slot, 0)
            total_row = row_of(parameters, "partial_total", piece.key_split, piece.slot, 0)
            copy_row(largest_row, largest, 1, rows, rows)
            copy_row(total_row, total, 1, rows, rows)
            fill(factors, rows, 1.0)
            return
        for block_row in range(0, rows, LANES):
            finish_rows(largest, total, factors, block_row, parameters.dropout_scale)
        query, stride = piece.query_offset + piece.query_start, parameters.logsumexp_row_stride
        for index in range(piece.heads):
            target = row_of(parameters, "logsumexp", piece.batch, piece.head + index, query)
            for row in range(count):
                store(target, row * stride, load(total, index * count + row))

    return finish


@functools.cache
def make_row_writer(dtype: str, operand: str) -> Callable:
    """Make the function that writes part of a block's row, multiplied by a factor.

    ``write(parameters, piece, source, factor, block_row, column, count, is_key_split)`` writes
    ``count`` columns from ``column`` on. For a key split the output goes to partial_output.
    """
    LANES, operand_row = lanes_of(compute_dtype(dtype)), make_operand_row(operand)

    @njit
    def write_row(target, source, factor, count):
        factors, whole = splat(factor, LANES), count // LANES * LANES
        for column in range(0, whole, LANES):
            store(target, column, load_vector(source, column, LANES) * factors)
        for column in range(whole, count):
            store(target, column, load(source, column) * factor)

    @njit
    def write(parameters, piece, source, factor, block_row, column, count, is_key_split):
        if is_key_split:
            target = row_of(parameters, "partial_output", piece.key_split, piece.slot, block_row)
            write_row(shift(target, column), source, factor, count)
        else:
            write_row(
                shift(operand_row(parameters, piece, block_row), column), source, factor, count
            )

    return write


@functools.cache
def make_panel_writer(dtype: str, operand: str) -> Callable:
    """Make the function that writes panels, transposed, to an operand's rows.

    ``write(parameters, piece, panels, factors, width, columns, scratch)`` writes the columns of the
    panels, each multiplied by its factor. A panel has ``width`` rows; all panels together have
    ``columns`` columns. ``scratch`` has room for a square of vectors.
    """
    LANES = lanes_of(compute_dtype(dtype))
    next_panel, transpose = make_next_panel(dtype), make_transpose(compute_dtype(dtype))
    operand_row, write_row = make_operand_row(operand), make_row_writer(dtype, operand)
    row_stride_name, dim_name = f"{operand}_row_stride", dim_name_of(operand)

    @njit
    def write_square(parameters, piece, source, stride, factors, block_row, column, count, scratch):
        """Write up to LANES rows from ``block_row`` on, and LANES of ``count`` columns."""
        rows_left = piece.heads * piece.query_count - block_row
        is_key_split = piece.slot >= 0
        if rows_left >= LANES and count >= LANES and piece.heads == 1 and not is_key_split:
            target = shift(operand_row(parameters, piece, block_row), column)
            row_stride = field(parameters, row_stride_name)
            transpose_products(target, row_stride, source, stride, factors, LANES)
            return
        transpose(scratch, LANES, source, stride, LANES, LANES)
        for index in range(min(rows_left, LANES)):
            row, factor = shift(scratch, index * LANES), load(factors, index)
            some = min(count, LANES)
            write_row(parameters, piece, row, factor, block_row + index, column, some, is_key_split)

    @njit
    def write(parameters, piece, panels, factors, width, columns, scratch):
        start, size = 0, field(parameters, dim_name)
        while start < columns:
            some, stride = next_panel(parameters, columns - start)
            stop = min(start + some, piece.heads * piece.query_count)
            for block_row in range(start, stop, LANES):
                for column in range(0, size, LANES):
                    source = shift(panels, start * width + column * stride + block_row - start)
                    write_square(
                        parameters, piece, source, stride, shift(factors, block_row), block_row,
                        column, size - column, scratch,
                    )  # fmt: skip
            start += some

    return write
