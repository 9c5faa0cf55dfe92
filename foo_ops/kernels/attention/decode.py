"""The decode kernel of attention: few queries, and keys read as they are stored."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from numba import njit

from foo_ops.kernels.attention.operands import (
    KEY_BLOCK,
    QUERY_BLOCK,
    TILE,
    TILE_STRIDE,
    argument_types,
    dim_name_of,
    make_block_loader,
    make_finish,
    make_row_writer,
)
from foo_ops.kernels.attention.scores import (
    ROW_FACTS,
    lie_together,
    make_dropout_mask,
    make_key_row,
    make_mask,
    make_row_facts_filler,
    make_score_mod,
)
from foo_ops.kernels.attention.softmax import make_softmax_start
from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.compiler.processor import bytes_ahead, has_masks
from foo_ops.kernels.lang.scratch import Scratch, field, make_kernel_with_scratch
from foo_ops.kernels.math.exponential import exp2
from foo_ops.kernels.products.operands import step_of, vector_product_dtype
from foo_ops.kernels.simd.arithmetic import fma, less, maximum, select, splat
from foo_ops.kernels.simd.memory import (
    address_of,
    load,
    load_pieces,
    load_repeated,
    load_vector,
    pointer_to,
    prefetch_in_stream,
    shift,
    store,
)
from foo_ops.kernels.simd.narrow import PAIRS, pack_pairs
from foo_ops.kernels.simd.register_tiles import (
    tile_dot,
    tile_load,
    tile_outer,
    tile_splat,
    tile_store,
    tile_store_sums,
    tile_zero,
)
from foo_ops.kernels.simd.transpose import make_copy_row, make_fill, round_up
from foo_ops.kernels.simd.types import ELEMENTS, compute_dtype, lanes_of

# ----------------------------------------------------------------------------------- online softmax

# The online softmax of few queries: each key has fewer scores than a vector has lanes.


def make_decode_softmax(dtype: str, in_products: str, has_options: bool, ROWS: int) -> Callable:
    """Make the function that turns ``ROWS`` columns of a tile of scores into weights.

    ``softmax(parameters, scores, dropout_mask, weights, line, largest, total, correction, count)``
    computes the same as `foo_ops.kernels.attention.softmax.make_online_softmax`, but writes the
    weights without gaps, key after key (if ``in_products`` is pairs, in pairs of keys): so vectors
    are full, while a row of the tile has only ``ROWS`` numbers. Weights after the last are 0.
    ``line`` has room for two vectors.
    """
    scalar, LANES = ELEMENTS[dtype].compute, lanes_of(compute_dtype(dtype))
    fill, packs = make_fill(compute_dtype(dtype)), in_products == PAIRS
    # Lanes of the maxima and sums. Vectors of one lane do not exist: a single row uses a whole one.
    STATE, KEYS = LANES if ROWS == 1 else ROWS, LANES // ROWS
    # Keys of two vectors, which are packed to one vector of pairs.
    BLOCK = 2 * KEYS
    # Distance between a vector's keys, and the first key of the second vector.
    STEP, SECOND = (2, 1) if packs else (1, KEYS)
    as_pairs = pointer_to(PAIRS)

    @njit
    def load_two(tile, key):
        row = shift(tile, key * TILE_STRIDE)
        first = load_pieces(row, STEP * TILE_STRIDE, ROWS, LANES)
        row = shift(row, SECOND * TILE_STRIDE)
        return first, load_pieces(row, STEP * TILE_STRIDE, ROWS, LANES)

    @njit
    def gather(scores, target, stop):
        """Copy the scores to adjacent vectors; return their maximum."""
        top = splat(scalar(-math.inf), LANES)
        other = top
        for key in range(0, stop, BLOCK):
            first, second = load_two(scores, key)
            top, other = maximum(first, top), maximum(second, other)
            store(target, key * ROWS, first)
            store(target, key * ROWS + LANES, second)
        return maximum(top, other)

    @njit
    def grow(largest, total, correction, top):
        """Update the running maximum with ``top``; return the number to subtract from scores."""
        zero, lowest = splat(scalar(0.0), STATE), splat(scalar(-math.inf), STATE)
        before = load_vector(largest, 0, STATE)
        after = maximum(top, before)
        # A query that has seen no key yet has the maximum -infinity: any finite base will do.
        base = select(less(lowest, after), after, zero)
        # For an infinite maximum that does not grow, the difference would be NaN.
        scaled = exp2(select(less(before, after), before - base, zero))
        store(largest, 0, after)
        store(total, 0, load_vector(total, 0, STATE) * scaled)
        store(correction, 0, scaled)
        return base

    @njit
    def softmax(parameters, scores, dropout_mask, weights, line, largest, total, correction, count):
        factor, stop = scalar(parameters.factor), round_up(count, BLOCK)
        has_dropout = has_options and parameters.dropout_threshold > 0
        for key in range(count, stop):
            fill(shift(scores, key * TILE_STRIDE), ROWS, -math.inf)
            if has_dropout:
                fill(shift(dropout_mask, key * TILE_STRIDE), ROWS, 0.0)
        store(line, 0, gather(scores, weights, stop))
        top = load_vector(line, 0, STATE)
        for piece in range(ROWS, LANES, ROWS):
            top = maximum(load_vector(line, piece, STATE), top)
        base = grow(largest, total, correction, top * splat(factor, STATE))
        for piece in range(0, LANES, ROWS):
            store(line, piece, base)

        factors, offset = splat(factor, LANES), load_vector(line, 0, LANES)
        sum_ = splat(scalar(0.0), LANES)
        pairs = as_pairs(address_of(weights))
        for key in range(0, stop, BLOCK):
            index = key * ROWS
            # No fma: the product must be rounded like the maximum. For scores near 1e10 a
            # difference of hundreds would remain, and 2^x overflow.
            first = exp2(load_vector(weights, index, LANES) * factors - offset)
            second = exp2(load_vector(weights, index + LANES, LANES) * factors - offset)
            sum_ = sum_ + (first + second)
            if has_dropout:
                left, right = load_two(dropout_mask, key)
                first, second = first * left, second * right
            if packs:
                store(pairs, index // 2, pack_pairs(first, second))
            else:
                store(weights, index, first)
                store(weights, index + LANES, second)
        # Sum the tile first: adding each weight to the total would round it to the total's
        # precision.
        store(line, 0, sum_)
        own = load_vector(line, 0, STATE)
        for piece in range(ROWS, LANES, ROWS):
            own = own + load_vector(line, piece, STATE)
        store(total, 0, load_vector(total, 0, STATE) + own)

    return softmax


# ----------------------------------------------------------------------------------- sums of values

# Adds up the weighted values of a tile of keys, for few queries.


# Keys, or pairs of keys, added between a load of the sums and their store.
STEPS = 4


def make_line_prefetcher(dtype: str, ROWS: int, COLUMNS: int) -> Callable:
    """Make the function that prefetches ``ROWS`` x ``COLUMNS`` elements.

    ``prefetch_lines(later, stride, columns, column)`` fetches the rows ``later``, while the same
    column of the current rows is read. Adjacent rows, each of ``columns`` elements, are fetched in
    the order of memory, not row by row: for bfloat16 this reaches 0.79 of the bandwidth instead of
    0.65.
    """
    LINE = 64 // ELEMENTS[dtype].size
    LINES = -(-ROWS * COLUMNS // LINE)

    @njit
    def prefetch_lines(later, stride, columns, column):
        if stride == columns:
            for line in range(LINES):
                prefetch_in_stream(later, column * ROWS + line * LINE)
        else:
            for row in range(ROWS):
                prefetch_in_stream(later, row * stride + column)

    return prefetch_lines


def make_weighted_sums(dtype: str, stored: str, in_products: str, GROUP: int) -> Callable:
    """Make the function that adds up weighted values.

    ``weighted_sums(sums, width, weights, values, stride, columns, zeros, rows, ahead, count)`` adds
    the sum over the keys of weights[key, row] * values[key] to sums[row]. `make_decode_softmax`
    writes the weights, each ``GROUP`` of rows in room for KEY_BLOCK keys. ``sums`` must have room
    for whole groups, whose rows are whole vectors; values have ``columns`` elements; ``zeros`` is a
    row of zeros; rows are prefetched ``ahead`` rows in advance.

    Several keys are added at a time, so that values are read in the order of memory: column by
    column, as in a matrix product, they come at two thirds of the speed of memory.
    """
    LANES = lanes_of(compute_dtype(dtype))
    STEP = step_of(in_products)
    # Two rows of two vectors give two vectors of pairs.
    COLUMNS = STEP * LANES
    as_weights, SIZE = pointer_to(in_products), ELEMENTS[stored].size
    HAS_MASKS = has_masks()

    def make_adder(ROWS: int, STEPS: int) -> Callable:
        prefetch_lines = make_line_prefetcher(stored, STEPS * STEP, COLUMNS)

        @njit
        def add(sums, width, weights, values, stride, columns, ahead):
            factors = tile_splat(weights, 1, STEPS * ROWS, LANES)
            later = shift(values, ahead * stride)
            for column in range(0, columns, COLUMNS):
                prefetch_lines(later, stride, columns, column)
                some, place, left = shift(values, column), shift(sums, column), columns - column
                total = tile_load(place, width, ROWS, STEP, LANES)
                if HAS_MASKS and left < COLUMNS:
                    total = tile_outer(total, factors, some, stride, left)
                else:
                    total = tile_outer(total, factors, some, stride, None)
                tile_store(total, place, width)

        return add

    def make_group(ROWS: int) -> Callable:
        add_some, add_one = make_adder(ROWS, STEPS), make_adder(ROWS, 1)

        @njit
        def add_group(sums, width, weights, values, stride, columns, zeros, ahead, count):
            steps = count // STEP
            whole = steps // STEPS * STEPS
            for step in range(0, whole, STEPS):
                some = shift(values, step * STEP * stride)
                add_some(sums, width, shift(weights, step * ROWS), some, stride, columns, ahead)
            for step in range(whole, steps):
                some = shift(values, step * STEP * stride)
                add_one(sums, width, shift(weights, step * ROWS), some, stride, columns, ahead)
            if steps * STEP < count:
                # The last of an odd number of keys pairs with the row of zeros.
                last = shift(values, (count - 1) * stride)
                distance = (address_of(zeros) - address_of(last)) // SIZE
                add_one(sums, width, shift(weights, steps * ROWS), last, distance, columns, 0)

        return add_group

    add_single, add_group = make_group(1), make_group(GROUP)

    @njit
    def weighted_sums(
        sums, width, weights, values, value_stride, columns, zeros, rows, ahead, count
    ):
        if rows == 1:
            factors = as_weights(address_of(weights))
            add_single(sums, width, factors, values, value_stride, columns, zeros, ahead, count)
        else:
            for row in range(0, rows, GROUP):
                factors = as_weights(address_of(shift(weights, row * KEY_BLOCK)))
                place = shift(sums, row * width)
                add_group(place, width, factors, values, value_stride, columns, zeros, ahead, count)

    return weighted_sums


# ------------------------------------------------------------------------------- products with keys

# Multiplies few queries by keys, which are read as they are stored.


# Queries computed together, at most.
MOST_OF_GROUP = 4


def make_rows(dtype: str, stored: str, step: int, operand: str) -> Callable:
    """Make ``rows(parameters, piece, scratch, key_start, count)``.

    Returns a pointer, a row stride, and the number of columns there. The tensor, of dtype
    ``stored``, is read in place where its rows are adjacent elements, ``step`` of which enter a
    product at a time: whole vectors of them, or any number if loads have masks. Otherwise the rows
    are copied and padded with zeros to whole vectors.
    """
    vector = lanes_of(compute_dtype(dtype)) * step
    multiple = step if has_masks() else vector
    as_stored = pointer_to(stored)
    copy_row, key_row = make_copy_row(compute_dtype(stored)), make_key_row(operand)
    row_stride_name, column_stride_name = f"{operand}_row_stride", f"{operand}_column_stride"
    dim_name = dim_name_of(operand)

    @njit
    def rows(parameters, piece, scratch, key_start, count):
        columns = field(parameters, dim_name)
        column_stride = field(parameters, column_stride_name)
        row_stride = field(parameters, row_stride_name)
        whole = column_stride == 1 and columns % multiple == 0 and row_stride % step == 0
        # Finding a row in its page takes divisions: do it once where the rows have one stride.
        together = lie_together(parameters, key_start, count)
        first = key_row(parameters, piece, key_start)
        if whole and together:
            return first, row_stride, columns
        width = round_up(columns, vector)
        target = as_stored(address_of(scratch))
        for row in range(count):
            source = shift(first, row * row_stride)
            if not together:
                source = key_row(parameters, piece, key_start + row)
            copy_row(shift(target, row * width), source, column_stride, columns, width)
        return target, width, width

    return rows


def make_products(dtype: str, stored: str, in_products: str) -> Callable:
    """Make ``products(target, keys, stride, columns, queries, width, rows, ahead, count)``: k.q.

    The target has a row for each key, which has ``columns`` elements; those of a query are padded
    to ``width``. Keys are prefetched ``ahead`` rows in advance. Keys and queries have dtype
    bfloat16x2 if ``in_products`` is. Otherwise keys have the dtype ``stored``, and queries the
    compute dtype.
    """
    LANES = lanes_of(compute_dtype(dtype))

    loaded = PAIRS if in_products == PAIRS else stored
    HAS_MASKS = has_masks()

    def panel(KEYS: int, QUERIES: int) -> Callable:
        prefetch_lines = make_line_prefetcher(loaded, KEYS, LANES)

        @njit
        def tile(target, keys, key_stride, columns, queries, width, ahead):
            sums = tile_zero(target, KEYS, QUERIES, LANES)
            later = shift(keys, ahead * key_stride)
            for column in range(0, columns, LANES):
                prefetch_lines(later, key_stride, columns, column)
                some, queries_, left = shift(keys, column), shift(queries, column), columns - column
                if HAS_MASKS and left < LANES:
                    sums = tile_dot(sums, some, key_stride, queries_, width, left)
                else:
                    sums = tile_dot(sums, some, key_stride, queries_, width, None)
            tile_store_sums(sums, target, TILE_STRIDE)

        @njit
        def products(target, keys, key_stride, columns, queries, width, ahead, first_key, count):
            key = first_key
            while key + KEYS <= count:
                place, some = shift(target, key * TILE_STRIDE), shift(keys, key * key_stride)
                tile(place, some, key_stride, columns, queries, width, ahead)
                key += KEYS
            return key

        return products

    QUERIES = min(MOST_OF_GROUP, LANES)
    for_groups, for_group = panel(LANES // QUERIES, QUERIES), panel(1, QUERIES)
    for_singles, for_single = panel(LANES, 1), panel(1, 1)

    @njit
    def all_products(target, keys, key_stride, columns, queries, width, rows, ahead, count):
        if rows == 1:
            key = for_singles(target, keys, key_stride, columns, queries, width, ahead, 0, count)
            for_single(target, keys, key_stride, columns, queries, width, ahead, key, count)
        else:
            for row in range(0, rows, QUERIES):
                place, some = shift(target, row), shift(queries, row * width)
                key = for_groups(place, keys, key_stride, columns, some, width, ahead, 0, count)
                for_group(place, keys, key_stride, columns, some, width, ahead, key, count)

    return all_products


def make_query_matrix(dtype: str, in_products: str) -> Callable:
    """Make ``as_queries(target, block, count)``: pack the block in pairs where needed."""
    if in_products != PAIRS:

        @njit
        def themselves(target, block, count):
            return block

        return themselves

    LANES = lanes_of(compute_dtype(dtype))
    as_elements, as_pairs = pointer_to(dtype), pointer_to(PAIRS)

    @njit
    def rounded(target, block, count):
        elements = as_elements(address_of(target))
        for index in range(0, count, LANES):
            store(elements, index, load_vector(block, index, LANES))
        return as_pairs(address_of(target))

    return rounded


# ------------------------------------------------------------------------ keys and values of 8 bits

# The scales of keys and values of 8 bits, one for each head and position.
#
# 8-bit integers are exact in every dtype, and are converted when loaded. A key's scale multiplies
# its scores; a value's scale multiplies its weights.


def _make_scales_loader(dtype: str, operand: str) -> Callable:
    """Make ``load_scales(parameters, piece, target, key_start, count)``.

    Pads with zeros to a whole vector.
    """
    LANES, scale_row = lanes_of(compute_dtype(dtype)), make_key_row(f"{operand}_scale")
    copy_row, row_stride_name = make_copy_row(compute_dtype(dtype)), f"{operand}_scale_row_stride"

    @njit
    def load_scales(parameters, piece, target, key_start, count):
        first, stride = scale_row(parameters, piece, key_start), field(parameters, row_stride_name)
        # Finding a row in its page takes divisions: do it once where the rows have one stride.
        if lie_together(parameters, key_start, count):
            copy_row(target, first, stride, count, round_up(count, LANES))
            return
        for key in range(count):
            store(target, key, load(scale_row(parameters, piece, key_start + key), 0))
        for key in range(count, round_up(count, LANES)):
            store(target, key, 0.0)

    return load_scales


def make_score_scaler(dtype: str) -> Callable:
    """Make ``scale(parameters, piece, memory, key_start, columns, count)`` for a score tile."""
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
    """Make ``scale(parameters, piece, memory, key_start, columns, count)`` for a tile's weights.

    The weights are in the order of `make_decode_softmax`.
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
    """Make the function with the same arguments for keys and values without scales."""

    @njit
    def leave(parameters, piece, memory, key_start, columns, count):
        pass

    return leave


# --------------------------------------------------------------------------------------- the kernel

# Computes output and logsumexp of few queries over some of the keys.
#
# Vectors lie along the head dimension, not along the queries, since a block has at most a vector of
# queries. Keys and values are read in place, once, at the speed of memory.


# The forward kernel takes blocks of more queries.
MOST_ROWS = 8


def _products_of(dtype: str, cache_dtype: str | None) -> str:
    """The dtype in products. Integers, exact in the compute dtype, are converted when loaded."""
    return vector_product_dtype(dtype) if cache_dtype is None else compute_dtype(dtype)


@functools.cache
def make_decode_scratch(dtype: str, cache_dtype: str | None = None) -> Scratch:
    compute = compute_dtype(dtype)
    LANES = lanes_of(compute)
    WIDTH = LANES * step_of(_products_of(dtype, cache_dtype))

    @njit
    def sizes_of_block(parameters, piece):
        return round_up(parameters.head_dim, WIDTH), round_up(parameters.value_dim, WIDTH)

    def describe(head_width: Any, value_width: Any) -> dict[str, Any]:
        return {
            "scores": TILE,
            "dropout_mask": TILE,
            "largest": QUERY_BLOCK,
            "total": QUERY_BLOCK,
            "correction": QUERY_BLOCK,
            "row_facts": ROW_FACTS * QUERY_BLOCK,
            "block": head_width * MOST_ROWS,
            "queries": head_width * MOST_ROWS,
            "accumulator": value_width * MOST_ROWS,
            "sums": value_width * MOST_ROWS,
            "keys": head_width * KEY_BLOCK,
            "values": value_width * KEY_BLOCK,
            "weights": KEY_BLOCK * MOST_ROWS,
            "line": 2 * LANES,
            "zeros": value_width,
            "scales": KEY_BLOCK + LANES,
        }

    return Scratch(compute, sizes_of_block, describe)


def make_decode_kernel(
    dtype: str, has_options: bool = True, cache_dtype: str | None = None
) -> Kernel:
    """Make the kernel for few queries. ``has_options``: bias, soft cap, ALiBi and dropout.

    ``cache_dtype`` is int8 for keys and values with scales, and None if they have the dtype.
    """
    compute, stored = compute_dtype(dtype), cache_dtype or dtype
    in_products = _products_of(dtype, cache_dtype)
    LANES, step = lanes_of(compute), step_of(in_products)
    GROUP, AHEAD = min(MOST_OF_GROUP, LANES), bytes_ahead() // ELEMENTS[stored].size
    fill, weighted_sums = (
        make_fill(compute),
        make_weighted_sums(dtype, stored, in_products, GROUP),
    )
    load_block, fill_row_facts = make_block_loader(dtype, "query"), make_row_facts_filler(dtype)
    key_rows, value_rows = (make_rows(dtype, stored, step, operand) for operand in ("key", "value"))
    scale_scores, scale_weights = (
        (make_no_scaler(), make_no_scaler())
        if cache_dtype is None
        else (make_score_scaler(dtype), make_weight_scaler(dtype))
    )
    products = make_products(dtype, stored, in_products)
    apply_score_mod, hide = make_score_mod(dtype), make_mask(dtype)
    load_dropout_mask, as_queries = (
        make_dropout_mask(dtype),
        make_query_matrix(dtype, in_products),
    )
    as_keys = pointer_to(PAIRS if step == 2 else stored)
    start_softmax = make_softmax_start(dtype)
    softmax_of_one, softmax_of_group = (
        make_decode_softmax(dtype, in_products, has_options, rows) for rows in (1, GROUP)
    )
    finish, write = make_finish(dtype), make_row_writer(dtype, "output")
    scalar, layout = ELEMENTS[dtype].compute, make_decode_scratch(dtype, cache_dtype)
    sizes_of_block = layout.sizes_of

    @njit
    def softmax(parameters, memory, rows, count):
        scores, dropout_mask, weights, line = (
            memory.scores, memory.dropout_mask, memory.weights, memory.line
        )  # fmt: skip
        largest, total, correction = memory.largest, memory.total, memory.correction
        if rows == 1:
            softmax_of_one(
                parameters, scores, dropout_mask, weights, line, largest, total, correction, count
            )
            return
        for row in range(0, rows, GROUP):
            softmax_of_group(
                parameters, shift(scores, row), shift(dropout_mask, row),
                shift(weights, row * KEY_BLOCK), line, shift(largest, row), shift(total, row),
                shift(correction, row), count,
            )  # fmt: skip

    @njit
    def add_tile(accumulator, sums, factors, rows, width):
        """Rescale the sums of all keys so far, and add a tile's sums.

        Adding each key to the sum of thousands would round it to that sum's precision.
        """
        for row in range(rows):
            factor = splat(scalar(load(factors, row)), LANES)
            for column in range(0, width, LANES):
                index = row * width + column
                before, own = (
                    load_vector(accumulator, index, LANES),
                    load_vector(sums, index, LANES),
                )
                store(accumulator, index, fma(before, factor, own))

    @njit
    def zero_unused_columns(scores, keys):
        """Products never write columns without a query."""
        zeros = splat(scalar(0.0), LANES)
        for key in range(keys):
            # Their number is a constant: else LLVM would call memset for each key.
            for column in range(0, MOST_ROWS, LANES):
                store(scores, key * TILE_STRIDE + column, zeros)

    def decode(parameters, piece, memory):
        head_width, value_width = sizes_of_block(parameters, piece)
        rows = piece.heads * piece.query_count
        columns = round_up(rows, LANES)
        scores, dropout_mask, row_facts = memory.scores, memory.dropout_mask, memory.row_facts
        largest, total, correction = memory.largest, memory.total, memory.correction
        block, accumulator, sums = memory.block, memory.accumulator, memory.sums

        fill_row_facts(parameters, piece, row_facts, columns)
        load_block(parameters, piece, block, parameters.head_dim, MOST_ROWS, head_width)
        queries = as_queries(memory.queries, block, MOST_ROWS * head_width)
        start_softmax(parameters, piece, largest, total, columns)
        fill(accumulator, MOST_ROWS * value_width, 0.0)
        fill(memory.zeros, value_width, 0.0)
        keys_ahead, values_ahead = AHEAD // head_width, AHEAD // value_width
        zero_unused_columns(scores, min(KEY_BLOCK, piece.key_stop - piece.key_start))

        for key_start in range(piece.key_start, piece.key_stop, KEY_BLOCK):
            count = min(KEY_BLOCK, piece.key_stop - key_start)
            keys, key_stride, key_columns = key_rows(
                parameters, piece, memory.keys, key_start, count
            )
            values, value_stride, value_columns = value_rows(
                parameters, piece, memory.values, key_start, count
            )
            products(
                scores, as_keys(address_of(keys)), key_stride // step, key_columns // step,
                queries, head_width // step, rows, keys_ahead, count,
            )  # fmt: skip
            scale_scores(parameters, piece, memory, key_start, columns, count)
            if has_options and parameters.modifies:
                apply_score_mod(
                    parameters,
                    piece,
                    row_facts,
                    scores,
                    dropout_mask,
                    dropout_mask,
                    key_start,
                    columns,
                    count,
                )
            hide(
                piece, row_facts, scores, piece.query_start, piece.query_count,
                key_start, columns, count,
            )  # fmt: skip
            if has_options and parameters.dropout_threshold > 0:
                load_dropout_mask(parameters, row_facts, dropout_mask, key_start, 0, columns, count)
            softmax(parameters, memory, rows, count)
            scale_weights(parameters, piece, memory, key_start, columns, count)
            fill(sums, (1 if rows == 1 else round_up(rows, GROUP)) * value_width, 0.0)
            weighted_sums(
                sums, value_width, memory.weights, values, value_stride, value_columns,
                memory.zeros, rows, values_ahead, count,
            )  # fmt: skip
            add_tile(accumulator, sums, correction, rows, value_width)

        is_key_split = piece.slot >= 0
        finish(parameters, piece, largest, total, correction, is_key_split)
        for block_row in range(rows):
            row, factor = shift(accumulator, block_row * value_width), load(correction, block_row)
            write(parameters, piece, row, factor, block_row, 0, parameters.value_dim, is_key_split)

    return make_kernel_with_scratch(decode, layout, argument_types(dtype, cache_dtype))
