"""Apply users' programs to score tiles: separate kernels, which the attention kernels call.

A user's new function thus compiles one small kernel only. A tile is a *window* of keys, which
begins at a multiple of KEY_BLOCK. For each row of blocks, the block mask holds the state of each
window: no key is visible, ``mask_mod`` decides, all queries see all keys, or the window holds
blocks of different states.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.attention.operands import KEY_BLOCK, TILE_STRIDE, lowest_score
from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.flex.emit import (
    TilePrograms,
    argument_types,
    make_program_caller,
    make_program_runner,
)
from foo_ops.kernels.flex.program import Program
from foo_ops.kernels.simd.memory import load, shift
from foo_ops.kernels.simd.transpose import make_fill
from foo_ops.kernels.simd.types import compute_dtype

# States of a window, or of a block, for the queries of a row of blocks.
HIDDEN, MASKED, SEEN, MIXED = range(4)


def make_program_kernel(signature: str, text: str, counts: bool = False) -> Kernel:
    """Make the kernel that runs the programs of ``text`` on a tile.

    The text is a line with a call's counts of numbers and integers, then the programs of score_mod,
    of mask_mod and of the gradients, each after an empty line and each possibly empty. See
    `foo_ops.kernels.flex.emit.emit_tile_programs` for the kernel; if ``counts``, it counts the
    scores that mask_mod lets through instead. The signature is the compute type, then the dtype and
    dimensions of each captured tensor: "float32,int64-1d,float32".

    Raises:
        ValueError: the text does not fit the signature.
    """
    dtype, *tensors = signature.split(",")
    sizes, *parts = text.split("\n\n")
    if len(parts) != 3:
        raise ValueError("a program must have no empty lines")
    score_mod, mask_mod, backward = (Program.parse(part) if part else None for part in parts)
    numbers, integers = map(int, sizes.split())
    captured = [_dtype_and_dimensions(tensor) for tensor in tensors]
    for program in (score_mod, mask_mod, backward):
        if program is not None:
            program.check(captured, numbers, integers)
    programs = TilePrograms(
        dtype, TILE_STRIDE, lowest_score(dtype), score_mod, mask_mod, backward, counts
    )
    run = make_program_runner(programs)

    def kernel(
        arguments, scores, gradients, queries, keys, first_query, first_key, batch, head, key_head,
        chunk,
    ):  # fmt: skip
        run(
            arguments, scores, gradients, queries, keys, first_query, first_key, batch, head,
            key_head, chunk,
        )  # fmt: skip

    return Kernel(kernel, argument_types(dtype))


def _dtype_and_dimensions(tensor: str) -> tuple[str, int]:
    dtype, _, dimensions = tensor.partition("-")
    return dtype, int(dimensions.removesuffix("d") or 0)


@njit
def row_of_blocks(parameters, piece, first_query):
    """The row of the block mask that holds ``first_query``."""
    row = piece.batch * parameters.mask_batch_stride + piece.head * parameters.mask_head_stride
    return row + first_query // parameters.mask_query_block


@njit
def state_of_window(parameters, piece, first_query, key_start):
    row = row_of_blocks(parameters, piece, first_query)
    return load(parameters.window_states, row * parameters.windows + key_start // KEY_BLOCK)


@njit
def sees_window(parameters, piece, first_query, queries, key_start):
    """Whether any of the queries sees a key of the window."""
    query, stop = first_query, first_query + queries
    while query < stop:
        if state_of_window(parameters, piece, query, key_start) != HIDDEN:
            return True
        query = next_row(parameters, query)
    return False


@njit
def next_row(parameters, query):
    """The first query after the row of blocks that holds ``query``."""
    return (query // parameters.mask_query_block + 1) * parameters.mask_query_block


@functools.cache
def make_program_steps(dtype: str) -> tuple[Callable, Callable]:
    """Make the functions that apply programs to panels.

    ``modify(parameters, piece, scores, first_query, queries, key_start, columns, count)`` turns
    products into scores, -infinity where a query does not see a key. ``differentiate(parameters,
    piece, products, gradients, first_query, queries, key_start, columns, count)`` turns the
    gradients of these scores into the gradients of the products, without their factor, and adds to
    the gradients of captured tensors.
    """
    compute = compute_dtype(dtype)
    call, fill = make_program_caller(compute), make_fill(compute)

    @njit
    def apply(
        parameters, piece, function, masked, hides, scores, gradients, first_query, queries,
        key_start, columns, count, state,
    ):  # fmt: skip
        """Apply ``function``, or ``masked`` where mask_mod decides, to keys of one state."""
        if state == HIDDEN:
            if hides:
                for key in range(count):
                    fill(shift(scores, key * TILE_STRIDE), columns, -math.inf)
            return
        address = function if state == SEEN else masked
        if address != 0:
            call(
                address, parameters.programs, scores, gradients, queries, count, first_query,
                key_start, piece.batch, piece.head, piece.head // parameters.group, piece.chunk,
            )  # fmt: skip

    @njit
    def apply_to_row(
        parameters, piece, function, masked, hides, scores, gradients, first_query, queries,
        key_start, columns, count,
    ):  # fmt: skip
        state = state_of_window(parameters, piece, first_query, key_start)
        if state != MIXED:
            apply(
                parameters, piece, function, masked, hides, scores, gradients, first_query,
                queries, key_start, columns, count, state,
            )  # fmt: skip
            return
        row = row_of_blocks(parameters, piece, first_query) * parameters.mask_columns
        start, stop = key_start, key_start + count
        while start < stop:
            block = start // parameters.mask_key_block
            end = min(stop, (block + 1) * parameters.mask_key_block)
            place = (start - key_start) * TILE_STRIDE
            apply(
                parameters, piece, function, masked, hides, shift(scores, place),
                shift(gradients, place), first_query, queries, start, columns, end - start,
                load(parameters.block_states, row + block),
            )  # fmt: skip
            start = end

    @njit
    def apply_to_window(
        parameters, piece, function, masked, hides, scores, gradients, first_query, queries,
        key_start, columns, count,
    ):  # fmt: skip
        """Apply a function to the queries of each row of blocks.

        With few registers a panel may span two rows of blocks, split at a whole vector.
        """
        query, stop = first_query, first_query + queries
        while query < stop:
            place, end = query - first_query, min(stop, next_row(parameters, query))
            width = columns - place if end == stop else end - query
            apply_to_row(
                parameters, piece, function, masked, hides, shift(scores, place),
                shift(gradients, place), query, end - query, key_start, width, count,
            )  # fmt: skip
            query = end

    @njit
    def modify(parameters, piece, scores, first_query, queries, key_start, columns, count):
        apply_to_window(
            parameters, piece, parameters.score_function, parameters.masked_score_function, True,
            scores, scores, first_query, queries, key_start, columns, count,
        )  # fmt: skip

    @njit
    def differentiate(
        parameters, piece, products, gradients, first_query, queries, key_start, columns, count
    ):
        function = parameters.gradient_function
        apply_to_window(
            parameters, piece, function, function, False, products, gradients, first_query,
            queries, key_start, columns, count,
        )  # fmt: skip

    return modify, differentiate
