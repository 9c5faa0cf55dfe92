"""The backward kernel of attention: the gradients of all inputs, from a block of queries."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core import types

from foo_ops.kernels.attention.operands import (
    GRADIENT_NONE,
    GRADIENT_STORED,
    KEY_BLOCK,
    QUERY_BLOCK,
    TILE,
    TILE_STRIDE,
    argument_types,
    make_next_panel,
    make_panel_packer,
    make_panel_writer,
    make_product_smallness_check,
    make_sums_starter,
    make_tile_operation,
    queries_of,
    second,
    seen_keys,
)
from foo_ops.kernels.attention.pipeline import is_pipelined, make_pipelined_backward
from foo_ops.kernels.attention.programs import make_program_steps, sees_window
from foo_ops.kernels.attention.scores import (
    ROW_FACTS,
    make_block_rows,
    make_key_tile,
    make_row_facts_filler,
    make_row_packer,
    make_tile_matrices,
    make_transposed_tile,
)
from foo_ops.kernels.attention.softmax import (
    SUM_ROWS,
    adds_row_sums,
    make_row_sums,
    make_row_sums_writer,
    make_statistics_loader,
    make_weights,
    may_fuse,
    needs_row_sums,
)
from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.lang.scratch import (
    Scratch,
    call_function,
    make_kernel_with_scratch,
    row_of,
)
from foo_ops.kernels.products.operands import (
    make_products,
    make_step_counter,
    product_dtype,
    sizes_of,
    step_of,
)
from foo_ops.kernels.simd.arithmetic import splat
from foo_ops.kernels.simd.memory import address_of, load, load_vector, pointer_to, shift, store
from foo_ops.kernels.simd.transpose import make_copy_row, make_fill, round_up, transpose_square
from foo_ops.kernels.simd.types import ELEMENTS, Pointer, compute_dtype, lanes_of

# ----------------------------------------------------------------------------- gradient of the bias

# Writes the gradient of the bias, a score tile at a time.
#
# The gradient of the bias is the gradient of the scores, summed over the dimensions that the bias
# was broadcast to. A block of queries of one head stores its tiles if no other block adds to them.
# Otherwise the tiles are added to sums in the compute dtype. The launcher runs blocks that add to
# the same sums one after the other, in an order that does not depend on the number of threads.


@functools.cache
def _make_tile_writers(dtype: str) -> tuple[Callable, Callable]:
    """Make the functions that store a tile, transposed, or add it.

    Both are called as ``(target, row_stride, tile, scratch, rows, columns)``. target[row, column]
    becomes, or grows by, tile[column, row]. The target's columns are adjacent.
    """
    LANES = lanes_of(compute_dtype(dtype))

    @njit
    def store_square(target, row_stride, tile, scratch):
        transpose_square(target, row_stride, tile, TILE_STRIDE, LANES)

    @njit
    def add_square(target, row_stride, tile, scratch):
        transpose_square(scratch, LANES, tile, TILE_STRIDE, LANES)
        for row in range(LANES):
            sum_ = load_vector(target, row * row_stride, LANES)
            store(target, row * row_stride, sum_ + load_vector(scratch, row * LANES, LANES))

    def make_writer(write_square: Callable, combine: Callable) -> Callable:
        @njit
        def one_by_one(target, row_stride, tile, first_row, rows, first_column, columns):
            for row in range(first_row, rows):
                for column in range(first_column, columns):
                    index = row * row_stride + column
                    value = load(tile, column * TILE_STRIDE + row)
                    store(target, index, combine(load(target, index), value))

        @njit
        def write_tile(target, row_stride, tile, scratch, rows, columns):
            whole_rows, whole_columns = rows // LANES * LANES, columns // LANES * LANES
            for row in range(0, whole_rows, LANES):
                for column in range(0, whole_columns, LANES):
                    place = shift(target, row * row_stride + column)
                    source = shift(tile, column * TILE_STRIDE + row)
                    write_square(place, row_stride, source, scratch)
            one_by_one(target, row_stride, tile, 0, whole_rows, whole_columns, columns)
            one_by_one(target, row_stride, tile, whole_rows, rows, 0, columns)

        return write_tile

    return make_writer(store_square, second), make_writer(add_square, operator.add)


@functools.cache
def _make_row_adder(dtype: str) -> Callable:
    """Make ``add_rows(target, column_stride, tile, scratch, rows, columns)``.

    target[column] grows by the sum over the rows of tile[column, row].
    """
    LANES = lanes_of(compute_dtype(dtype))
    compute = ELEMENTS[dtype].compute

    @njit
    def add_lanes(target, stride, source, count):
        for block_row in range(count):
            store(
                target,
                block_row * stride,
                load(target, block_row * stride) + load(source, block_row),
            )

    @njit
    def add_rows(target, column_stride, tile, scratch, rows, columns):
        whole = rows // LANES * LANES
        for column in range(columns):
            line = shift(tile, column * TILE_STRIDE)
            sum_ = splat(compute(0.0), LANES)
            for row in range(0, whole, LANES):
                sum_ = sum_ + load_vector(line, row, LANES)
            store(scratch, 0, sum_)
            place = shift(target, column * column_stride)
            add_lanes(place, 0, scratch, LANES)
            add_lanes(place, 0, shift(line, whole), rows - whole)

    return add_rows


@functools.cache
def make_bias_gradient_writer(dtype: str) -> Callable:
    """Make ``write_bias(parameters, piece, grad_scores, scratch, key_start, count)``.

    ``grad_scores`` is the gradient of a score tile of ``count`` keys. ``scratch`` has room for
    another tile.
    """
    own_dtype, as_sums = pointer_to(dtype), pointer_to(compute_dtype(dtype))
    store_tile, add_tile = _make_tile_writers(dtype)
    add_rows = _make_row_adder(dtype)

    @njit
    def write_bias(parameters, piece, grad_scores, scratch, key_start, count):
        rows = piece.query_count
        row_stride = parameters.grad_attn_bias_row_stride
        column_stride = parameters.grad_attn_bias_column_stride
        address = address_of(parameters.grad_attn_bias)
        for index in range(piece.heads):
            tile = shift(grad_scores, index * rows)
            offset = piece.bias + index * parameters.grad_attn_bias_head_stride
            offset += key_start * column_stride
            sums = shift(as_sums(address), offset)
            if adds_row_sums(parameters):
                # `make_row_sums_writer` adds them, once for the block.
                continue
            if parameters.bias_gradient == GRADIENT_STORED:
                own = shift(own_dtype(address), offset)
                store_tile(own, row_stride, tile, scratch, rows, count)
            elif parameters.bias_rows == 1:
                add_rows(sums, column_stride, tile, scratch, rows, count)
            else:
                add_tile(sums, row_stride, tile, scratch, rows, count)

    return write_bias


# ------------------------------------------------------------------------------ all other gradients

# Computes the gradients of all inputs from a block of queries.
#
# With the weights P = exp(S - logsumexp), recomputed tile by tile (Dao et al. 2022, algorithm 4):
#
#     delta = rowsum(dO * O) - dLogsumexp       dV = P^T dO
#     dP = dO V^T,  dS = P * (dP - delta)       dQ = scale * dS' K,   dK = scale * dS'^T Q
#
# where dS' is dS times the derivative of the soft cap. The gradient of the bias is dS, of a slope
# the sum of -dS * |distance|, and of a sink the sum of -exp(sink - logsumexp) * delta: see "exact
# sums of rows" in foo_ops/kernels/attention/softmax.py.


# Keys whose sums over the queries are computed together, unless a product needs more rows. Larger
# groups multiply more zeros beside the diagonal; smaller groups need more calls.
ROW_GROUP = 16

# Padding between the rows of a block: without it, rows of 128 elements share few sets of the cache.
PADDING = 16


@functools.cache
def make_backward_scratch(dtype: str) -> Scratch:
    sizes = sizes_of(dtype)
    ROOM, WIDTH = sizes.room, max(sizes.depth, lanes_of(compute_dtype(dtype)))

    @njit
    def sizes_of_block(parameters, piece):
        """The width of the block's rows, and the widths that a product summed over them needs."""
        width = max(parameters.grad_key_row_stride, parameters.grad_value_row_stride) + PADDING
        key_width, value_width = (
            round_up(parameters.head_dim, WIDTH), round_up(parameters.value_dim, WIDTH),
        )  # fmt: skip
        return width, key_width, value_width

    def describe(width: Any, key_width: Any, value_width: Any) -> dict[str, Any]:
        rows, panels = width * TILE_STRIDE, (width + 1) * TILE_STRIDE * ROOM
        return {
            "weights": TILE,
            "grad_scores": TILE,
            "dropout_mask": TILE * ROOM,
            "weight_limbs": TILE * ROOM,
            "score_limbs": TILE * ROOM,
            "slopes": TILE,
            "base": TILE_STRIDE,
            "shares": TILE_STRIDE,
            "delta": TILE_STRIDE,
            "row_sums": SUM_ROWS * TILE_STRIDE,
            "scales": TILE_STRIDE,
            "row_facts": ROW_FACTS * QUERY_BLOCK,
            "block": rows,
            "grad_block": rows,
            "transposed": panels,
            "grad_queries": rows,
            "packed": panels,
            "grad_packed": panels,
            "row_pairs": rows * ROOM,
            "grad_row_pairs": rows * ROOM,
            "keys": key_width * KEY_BLOCK * ROOM,
            "values": value_width * KEY_BLOCK * ROOM,
            "transposed_keys": key_width * KEY_BLOCK * ROOM,
        }

    return Scratch(compute_dtype(dtype), sizes_of_block, describe)


def make_backward_kernel(
    dtype: str, has_options: bool = True, has_programs: bool = False
) -> Kernel:
    """Make the backward kernel.

    ``has_options``: bias, soft cap, ALiBi and dropout. ``has_programs``: users' programs modify the
    scores, and a block mask hides some.

    A block adds to grad_key and grad_value, which are sums in the compute dtype, in the work item's
    slot of them. Which blocks share a slot, and in which order, does not depend on the number of
    threads: for each tile of keys, blocks take turns.
    """
    compute, scalar = compute_dtype(dtype), ELEMENTS[dtype].compute
    next_panel, pack_rows, (_, packed_panel) = (
        make_next_panel(dtype), make_row_packer(dtype), make_panel_packer(dtype),
    )  # fmt: skip
    matmul, begin_products, end_products = make_products(dtype)
    sizes, steps, are_small = (
        sizes_of(dtype),
        make_step_counter(dtype),
        make_product_smallness_check(dtype),
    )
    COLUMNS, ROWS, DEPTH = sizes.columns, sizes.rows, sizes.depth
    KEY_GROUP, layout = max(ROW_GROUP, ROWS), make_backward_scratch(dtype)
    sizes_of_block = layout.sizes_of
    fill, write_grad_query = make_fill(compute), make_panel_writer(dtype, "grad_query")
    start_sums = make_sums_starter(compute)
    step, (split, as_right_matrix, as_left_matrix) = (
        step_of(product_dtype(dtype)),
        make_tile_matrices(dtype),
    )
    query_rows_of, grad_rows_of = (
        make_block_rows(dtype, "query"),
        make_block_rows(dtype, "grad_output"),
    )
    key_tile, value_tile = make_key_tile(dtype, "key"), make_key_tile(dtype, "value")
    transposed_tile = make_transposed_tile(dtype)
    fill_row_facts, load_statistics = make_row_facts_filler(dtype), make_statistics_loader(dtype)
    weights_tile = make_weights(dtype, has_options, has_programs)
    PIPELINED = is_pipelined(dtype, has_options, has_programs)
    add_tile = make_pipelined_backward(dtype)
    _, differentiate = make_program_steps(dtype)
    (start_row_sums, _), write_row_sums = make_row_sums(dtype), make_row_sums_writer(dtype)
    multiply, write_bias = (
        make_tile_operation(compute, operator.mul),
        make_bias_gradient_writer(dtype),
    )

    @njit
    def clear_columns(panel, first, columns, count):
        """Columns without a query are factors of zeros, but programs may make them NaN."""
        for key in range(count):
            for column in range(first, columns):
                store(panel, key * TILE_STRIDE + column, scalar(0.0))

    @njit
    def seen_rows(piece, start, columns, key_start, count):
        """The number of a tile's rows that a panel needs, in whole groups for `add_products`."""
        first_query, query_count = queries_of(piece, start, columns)
        seen = seen_keys(piece, first_query, query_count, key_start, count)
        return min(count, round_up(seen, KEY_GROUP))

    @njit
    def sees_all(piece, key_start, count):
        last_query = piece.query_start + piece.query_count - 1
        seen = key_start + count - 1 <= piece.query_start + piece.last_visible
        return piece.heads > 1 or (seen and key_start >= last_query + piece.first_visible)

    @njit
    def add_products(piece, sums, width, factors, block, rows, are_small, key_start, count):
        """Add factors[key, query] * block[query] to sums[key], for the queries that see the key.

        A block that begins the sums sets them instead: for each group of keys it visits, at least
        one of its queries sees a key.
        """
        pointer, row_stride, group_stride, limb_stride = factors
        line, block_stride, block_limb_stride = block
        # If all keys are visible, one product reads the rows of the block once: 1 to 4 %.
        group_size = KEY_BLOCK if sees_all(piece, key_start, count) else KEY_GROUP
        for key in range(0, count, group_size):
            group = round_up(min(group_size, count - key), ROWS)
            first, stop = 0, rows
            if piece.heads == 1:
                place = key_start + key - piece.query_start
                first = max(0, place - piece.last_visible) // DEPTH * DEPTH
                stop = min(rows, place + group - piece.first_visible)
            if first < stop:
                place = shift(pointer, key * row_stride + first // DEPTH * group_stride)
                matmul(
                    shift(sums, key * width), width, (place, row_stride, group_stride, limb_stride),
                    (shift(line, first // step * block_stride), block_stride, block_limb_stride),
                    group, width, steps(stop - first), piece.begins_sums == 0, are_small,
                )  # fmt: skip

    def backward(parameters, piece, memory):
        head_dim, value_dim = parameters.head_dim, parameters.value_dim
        # Rows of the sums, and of the blocks they are computed from, are whole vectors.
        head_width, value_width = parameters.grad_key_row_stride, parameters.grad_value_row_stride
        query_row, value_row = head_width + PADDING, value_width + PADDING
        rows = piece.heads * piece.query_count
        columns = round_up(rows, COLUMNS)
        _, key_width, value_tile_width = sizes_of_block(parameters, piece)
        weights, grad_scores, slopes = memory.weights, memory.grad_scores, memory.slopes
        dropout_mask, weight_limbs, score_limbs = (
            memory.dropout_mask,
            memory.weight_limbs,
            memory.score_limbs,
        )
        base, shares, delta, scales = memory.base, memory.shares, memory.delta, memory.scales
        row_sums, row_facts, block = memory.row_sums, memory.row_facts, memory.block
        transposed, packed, grad_packed = memory.transposed, memory.packed, memory.grad_packed
        grad_queries = memory.grad_queries

        fill_row_facts(parameters, piece, row_facts, columns)
        queries, query_stride = query_rows_of(
            parameters, piece, block, head_dim, columns, query_row
        )
        grads, grad_stride = grad_rows_of(
            parameters, piece, memory.grad_block, value_dim, columns, value_row
        )
        load_statistics(
            parameters, piece, grads, grad_stride, value_width, packed, base, shares, delta, columns
        )
        query_rows, small = pack_rows(
            parameters, packed, memory.row_pairs, query_row, head_width, transposed, queries,
            query_stride, head_dim, key_width, columns,
        )  # fmt: skip
        grad_rows, small_grads = pack_rows(
            parameters, grad_packed, memory.grad_row_pairs, value_row, value_width, transposed,
            grads, grad_stride, value_dim, value_tile_width, columns,
        )  # fmt: skip
        small = small and small_grads and are_small(delta, columns)
        start_row_sums(row_sums)
        # The first visible tile sets the sums; panels that do not see it start from zeros.
        has_sums = False

        begin_products()
        for key_start in range(piece.key_start, piece.key_stop, KEY_BLOCK):
            if has_programs and not sees_window(
                parameters, piece, piece.query_start, piece.query_count, key_start
            ):
                continue
            count = min(KEY_BLOCK, piece.key_stop - key_start)
            keys, small_keys = key_tile(parameters, piece, memory.keys, key_start, count)
            values, small_values = value_tile(parameters, piece, memory.values, key_start, count)
            small_tile = small and small_keys and small_values
            transposed_keys = transposed_tile(memory.transposed_keys, keys, count, head_dim)
            stop = 0
            if PIPELINED and may_fuse(parameters, piece):
                add_tile(
                    parameters, piece, memory, keys, values, transposed_keys, key_start, count,
                    columns, key_width, value_tile_width, has_sums,
                )  # fmt: skip
                stop = columns
            while stop < columns:
                start = stop
                some, stride = next_panel(parameters, columns - start)
                stop += some
                seen = seen_rows(piece, start, some, key_start, count)
                sums = shift(grad_queries, start * key_width)
                if not has_sums:
                    start_sums(sums, stride, head_dim if seen > 0 else 0, key_width)
                if seen == 0:
                    continue
                weights_tile(
                    parameters, piece, row_facts, weights, grad_scores, dropout_mask, slopes,
                    keys, values,
                    packed_panel(packed, start, stride, head_dim, key_width),
                    packed_panel(grad_packed, start, stride, value_dim, value_tile_width),
                    small_tile, base, shares, delta, row_sums, key_start, start, some, seen,
                )  # fmt: skip
                panel, panel_dropout_mask = shift(grad_scores, start), shift(dropout_mask, start)
                if has_options and parameters.bias_gradient != GRADIENT_NONE:
                    write_bias(parameters, piece, grad_scores, dropout_mask, key_start, seen)
                if has_options and parameters.softcap > 0.0:
                    multiply(panel, shift(slopes, start), some, seen)
                if has_programs and parameters.gradient_function != 0:
                    first_query, query_count = queries_of(piece, start, some)
                    differentiate(
                        parameters, piece, shift(slopes, start), panel, first_query, query_count,
                        key_start, some, seen,
                    )  # fmt: skip
                if has_programs:
                    clear_columns(shift(weights, start), rows - start, some, seen)
                    clear_columns(panel, rows - start, some, seen)
                fill(shift(panel, seen * TILE_STRIDE), some, 0.0)
                split(weight_limbs, weights, start, some, seen)
                split(score_limbs, grad_scores, start, some, seen)
                factors = as_right_matrix(panel_dropout_mask, score_limbs, panel, start, some, seen)
                matmul(
                    sums, stride, transposed_keys, factors,
                    round_up(head_dim, ROWS), some, steps(seen), has_sums, small_tile,
                )  # fmt: skip
            # Other threads may run blocks that add to the same sums.
            call_function(parameters.begin_turn, piece.turns, piece.turn, key_start)
            factors = as_left_matrix(weight_limbs, weights, columns, count)
            add_products(
                piece, row_of(parameters, "grad_value", piece.sums, 0, key_start), value_width,
                factors, grad_rows, rows, small_tile, key_start, count,
            )  # fmt: skip
            factors = as_left_matrix(score_limbs, grad_scores, columns, count)
            add_products(
                piece, row_of(parameters, "grad_key", piece.sums, 0, key_start), head_width,
                factors, query_rows, rows, small_tile, key_start, count,
            )  # fmt: skip
            call_function(parameters.end_turn, piece.turns, piece.turn, key_start + count)

            has_sums = True
        end_products()
        if not has_sums:
            fill(grad_queries, key_width * TILE_STRIDE, 0.0)
        fill(scales, columns, parameters.scale)
        write_grad_query(parameters, piece, grad_queries, scales, key_width, columns, block)
        if needs_row_sums(parameters):
            write_row_sums(parameters, piece, row_sums, base, shares, delta)

    return make_kernel_with_scratch(backward, layout, argument_types(dtype))


# ----------------------------------------------------------------------------------- sums of chunks

# Adds up the chunks of grad_key or grad_value, and rounds once.


def make_sum_chunks_kernel(dtype: str) -> Kernel:
    """Make the kernel that sums chunks.

    gradient[row, column] = factor * sum over chunks of sums[chunk, row, column]. The kernel's
    arguments are gradient and its row stride, sums and its strides of chunks and rows (the row
    stride is whole vectors), the number of rows, columns and chunks, and the factor. It overwrites
    sums.
    """
    compute = ELEMENTS[dtype].compute
    LANES = lanes_of(compute_dtype(dtype))
    copy_row = make_copy_row(compute_dtype(dtype))

    def sum_chunks(gradient, row_stride, sums, chunk_stride, width, rows, columns, chunks, factor):
        factors = splat(compute(factor), LANES)
        for row in range(rows):
            source = shift(sums, row * width)
            for column in range(0, columns, LANES):
                total = load_vector(source, column, LANES)
                for chunk in range(1, chunks):
                    total = total + load_vector(source, chunk * chunk_stride + column, LANES)
                store(source, column, total * factors)
            copy_row(shift(gradient, row * row_stride), source, 1, columns, columns)

    size = types.int64
    pointers = (Pointer(dtype), size, Pointer(compute_dtype(dtype)))
    return Kernel(sum_chunks, (*pointers, *(size,) * 5, types.float64))
