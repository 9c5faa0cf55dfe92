"""Add the bias, or what the output held, to the sums of a block, finish them, and round once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import njit

from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.lang.scratch import Scratch, make_kernel_with_scratch
from foo_ops.kernels.linear.finish import NOTHING, make_finish, parts_of
from foo_ops.kernels.linear.parameters import argument_types
from foo_ops.kernels.simd.memory import load, load_vector, shift, store
from foo_ops.kernels.simd.transpose import make_copy_row, make_fill, round_up, transpose_square
from foo_ops.kernels.simd.types import compute_dtype, lanes_of


@njit
def leave_sums(product, block, memory, width, panel):
    """Stand for the scaling of sums that need none."""


def describe_lines(compute: str, finish: str) -> dict[str, int]:
    """Describe the scratch memory in which a writer transposes sums, and that of a line's end."""
    LANES = lanes_of(compute)
    return {"square": parts_of(finish) * LANES * LANES, "rest": LANES}


@functools.cache
def make_writer(dtype: str, finish: str = NOTHING, adds: bool = False) -> Callable:
    """Make ``write(product, block, memory, sums, width, panel, part)``.

    ``sums`` are panels of ``width`` columns, which are ``panel`` elements after one another; those
    of a second product are ``part`` elements behind. If it ``adds``, what the output held, in the
    compute type, is added to them.
    """
    compute = compute_dtype(dtype)
    LANES, PARTS, finished = lanes_of(compute), parts_of(finish), make_finish(compute, finish)
    fill, copy_row = make_fill(compute), make_copy_row(compute)

    @njit
    def load_bias(product, memory, start, count):
        if product.has_bias:
            source = shift(product.bias, start * product.bias_stride)
            copy_row(memory.bias, source, product.bias_stride, count, count)
        else:
            fill(memory.bias, count, 0.0)

    @njit
    def finished_sums(sums, part, bias, start):
        value = load_vector(sums, start, LANES) + load_vector(bias, start, LANES)
        return finished(value, load_vector(sums, start + part, LANES))

    @njit
    def write_line(memory, target, sums, part, bias, count):
        whole = count // LANES * LANES
        for start in range(0, whole, LANES):
            value = finished_sums(sums, part, bias, start)
            if adds:
                value = value + load_vector(target, start, LANES)
            store(target, start, value)
        if whole < count:
            store(memory.rest, 0, finished_sums(sums, part, bias, whole))
            for index in range(whole, count):
                single = load(memory.rest, index - whole)
                if adds:
                    single += load(target, index)
                store(target, index, single)

    @njit
    def write_rows(product, block, memory, sums, width, panel, part):
        columns = block.column_stop - block.column_start
        load_bias(product, memory, block.column_start, columns)
        for row in range(block.row_stop - block.row_start):
            place = (block.row_start + row) * product.output_stride + block.column_start
            line = shift(product.output, place)
            for start in range(0, columns, width):
                place = start // width * panel + row * width
                write_line(
                    memory, shift(line, start), shift(sums, place), part,
                    shift(memory.bias, start), min(width, columns - start),
                )  # fmt: skip

    @njit
    def transpose(square, sums, width, rows, columns):
        if rows == LANES:
            transpose_square(square, LANES, sums, width, LANES)
            return
        for column in range(columns):
            for row in range(rows):
                store(square, column * LANES + row, load(sums, row * width + column))

    @njit
    def write_columns(product, block, memory, sums, width, panel, part):
        rows, columns = block.row_stop - block.row_start, block.column_stop - block.column_start
        load_bias(product, memory, block.row_start, rows)
        for start in range(0, columns, LANES):
            some_columns = min(LANES, columns - start)
            place = (block.column_start + start) * product.output_stride + block.row_start
            line = shift(product.output, place)
            first = shift(sums, start // width * panel + start % width)
            for row in range(0, rows, LANES):
                some_rows, corner = min(LANES, rows - row), shift(first, row * width)
                for number in range(PARTS):
                    square = shift(memory.square, number * LANES * LANES)
                    transpose(square, shift(corner, number * part), width, some_rows, some_columns)
                for column in range(some_columns):
                    write_line(
                        memory, shift(line, column * product.output_stride + row),
                        shift(memory.square, column * LANES), (PARTS - 1) * LANES * LANES,
                        shift(memory.bias, row), some_rows,
                    )  # fmt: skip

    @njit
    def write(product, block, memory, sums, width, panel, part):
        if product.is_transposed:
            write_columns(product, block, memory, sums, width, panel, part)
        else:
            write_rows(product, block, memory, sums, width, panel, part)

    return write


def make_finish_kernel(dtype: str, *, finish: str = NOTHING) -> Kernel:
    """Make the kernel that writes a block of an output from the sums of another kernel.

    The product's left matrix are those sums, of this block alone, and behind them the sums of the
    second product of a gate. They have the output's dtype.
    """
    write = make_writer(dtype, finish)
    LANES = lanes_of(dtype)

    @njit
    def sizes_of_block(product, block):
        return (round_up(block.column_stop - block.column_start, LANES),)

    def describe(columns: Any) -> dict[str, Any]:
        return {"bias": columns + LANES, **describe_lines(dtype, finish)}

    def finish_block(product, block, memory):
        rows, width = block.row_stop - block.row_start, product.left_row_stride
        write(product, block, memory, product.left, width, 0, rows * width)

    layout = Scratch(dtype, sizes_of_block, describe)
    return make_kernel_with_scratch(finish_block, layout, argument_types(dtype))
