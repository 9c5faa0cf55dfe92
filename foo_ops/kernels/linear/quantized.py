"""Multiply by integers of 8 and of 4 bits, which are weights.

Integers of 8 bits enter products as they are, and the sums of a column are multiplied by its scale.
Integers of 4 bits, whose scales and zeros belong to groups of a column, are multiplied as integers
where rows are few (`foo_ops.kernels.linear.int4_tiles`); else they become numbers on the way to a
panel, for all rows of a block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from numba import njit

from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.linear.few_rows import (
    Tiles,
    make_element_tiles,
    make_few_rows_kernel,
)
from foo_ops.kernels.linear.int4_tiles import make_int4_tiles
from foo_ops.kernels.linear.output import leave_sums
from foo_ops.kernels.linear.packing import (
    in_pairs,
    make_right_packer,
    make_share_prefetcher,
    on_matrix_unit,
)
from foo_ops.kernels.linear.parameters import quantized_argument_types
from foo_ops.kernels.linear.product import Panels, make_product_kernel
from foo_ops.kernels.products.on_amx import GROUP
from foo_ops.kernels.simd.memory import address_of, load, load_vector, pointer_to, shift, store
from foo_ops.kernels.simd.narrow import unpack_int4, unpack_int8
from foo_ops.kernels.simd.register_tiles import tile_dot, tile_store_sums, tile_zero
from foo_ops.kernels.simd.transpose import make_copy_row
from foo_ops.kernels.simd.types import ELEMENTS, compute_dtype, lanes_of

# Sections of the depth are whole groups, of any size.
LARGEST_GROUP = 128


def make_int8_few_rows_kernel(dtype: str) -> Kernel:
    """Make the kernel for few rows and integers of 8 bits."""
    return make_few_rows_kernel(dtype, _make_int8_tiles)


def make_int4_few_rows_kernel(dtype: str, group_size: int) -> Kernel:
    """Make the kernel for few rows and integers of 4 bits."""
    if dtype == "float64":
        return make_few_rows_kernel(dtype, _make_unpacked_tiles)
    return make_few_rows_kernel(dtype, lambda dtype: make_int4_tiles(dtype, group_size))


def make_int8_product_kernel(dtype: str) -> Kernel:
    """Make the kernel for any number of rows and integers of 8 bits."""

    def make_panels(dtype: str, WIDTH: int, SECTION: int) -> Panels:
        unpack, scale_sums = _make_int8_unpacker(dtype), _make_sums_scaler(dtype)
        return _make_unpacked_panels(dtype, WIDTH, SECTION, 1, unpack, scale_sums)

    return make_product_kernel(dtype, make_panels)


def make_int4_product_kernel(dtype: str) -> Kernel:
    """Make the kernel for any number of rows and integers of 4 bits."""

    def make_panels(dtype: str, WIDTH: int, SECTION: int) -> Panels:
        unpack = _make_int4_unpacker(dtype)
        return _make_unpacked_panels(dtype, WIDTH, SECTION, 2, unpack, leave_sums)

    return make_product_kernel(dtype, make_panels, multiple=LARGEST_GROUP)


# --------------------------------------------------------------------------------------- few rows


def _make_int8_tiles(dtype: str) -> Tiles:
    arguments, scale_sums = quantized_argument_types(dtype, "int8"), _make_sums_scaler(dtype)
    return make_element_tiles(compute_dtype(dtype), "int8", "int8", arguments, scale_sums)


def _make_unpacked_tiles(dtype: str) -> Tiles:
    """Make tiles for which columns of 4 bits become numbers first."""
    LANES, unpack = lanes_of(dtype), _make_int4_unpacker(dtype)
    tiles = make_element_tiles(
        dtype, dtype, dtype, quantized_argument_types(dtype, "uint8"), leave_sums
    )

    def make_tile(ROWS: int, COLUMNS: int) -> Callable:
        @njit
        def tile(product, right, memory, sums, width, left, depth, column):
            numbers = memory.numbers
            for other in range(COLUMNS):
                unpack(product, shift(numbers, other * depth), column + other, 0, product.depth)
            total = tile_zero(sums, ROWS, COLUMNS, LANES)
            for step in range(0, product.depth, LANES):
                total = tile_dot(total, shift(left, step), depth, shift(numbers, step), depth)
            tile_store_sums(total, sums, width)

        return tile

    def regions(depth: Any) -> dict[str, Any]:
        return {"numbers": max(tiles.columns_of_row, tiles.columns_of_group) * depth}

    return dataclasses.replace(tiles, make_tile=make_tile, regions=regions)


# ----------------------------------------------------------------------------------------- panels


def _make_unpacked_panels(
    dtype: str, WIDTH: int, SECTION: int, PER_BYTE: int, unpack: Callable, scale_sums: Callable
) -> Panels:
    """Make panels of numbers, which a strip of columns at a time are packed from.

    ``unpack(product, target, column, start, count)`` makes numbers of a part of a column.
    """
    pack_right, prefetch_share = make_right_packer(dtype, WIDTH), make_share_prefetcher("uint8")
    # What packing rounds up to, so that the strips of a panel do not get into each other's way.
    STRIP = GROUP if on_matrix_unit(dtype) else lanes_of(compute_dtype(dtype))
    as_numbers = pointer_to(_strip_dtype(dtype))

    @njit
    def pack(product, part, memory, start, column, columns, count, distance):
        strip = as_numbers(address_of(memory.strip))
        for first in range(0, columns, STRIP):
            some = min(STRIP, columns - first)
            for other in range(some):
                unpack(product, shift(strip, other * SECTION), column + first + other, start, count)
            panel = shift(memory.right, first // WIDTH * distance + first % WIDTH)
            pack_right(panel, distance, strip, SECTION, 1, some, count)

    @njit
    def prefetch_panel(product, part, start, column, columns, count, share, shares):
        stride = product.right_column_stride
        prefetch_share(
            shift(product.right, column * stride + start // PER_BYTE), stride, 1, columns,
            count // PER_BYTE, share, shares,
        )  # fmt: skip

    arguments = quantized_argument_types(dtype, "int8" if PER_BYTE == 1 else "uint8")
    return Panels(arguments, pack, prefetch_panel, {"strip": STRIP * SECTION}, scale_sums)


def _strip_dtype(dtype: str) -> str:
    """The dtype of numbers that are packed: pairs are made of bfloat16."""
    return "bfloat16" if in_pairs(dtype) else compute_dtype(dtype)


def _make_int8_unpacker(dtype: str) -> Callable:
    LANES, number = lanes_of(compute_dtype(dtype)), ELEMENTS[compute_dtype(dtype)].compute

    @njit
    def unpack(product, target, column, start, count):
        source = shift(product.right, column * product.right_column_stride + start)
        whole = count // LANES * LANES
        for step in range(0, whole, LANES):
            unpack_int8(shift(target, step), shift(source, step), LANES)
        for step in range(whole, count):
            store(target, step, number(load(source, step)))

    return unpack


def _make_int4_unpacker(dtype: str) -> Callable:
    LANES = lanes_of(compute_dtype(dtype))

    @njit
    def unpack(product, target, column, start, count):
        size, half = product.group_size, product.group_size // 2
        source = shift(product.right, column * product.right_column_stride + start // 2)
        scales = shift(product.scale, column * product.scale_column_stride)
        zeros = shift(product.zero, column * product.zero_column_stride)
        for step in range(0, count, size):
            group = (start + step) // size
            scale = load(scales, group)
            zero = load(zeros, group)
            for part in range(0, half, LANES):
                unpack_int4(
                    shift(target, step + part), half, shift(source, step // 2 + part), scale,
                    zero, LANES,
                )  # fmt: skip

    return unpack


# ------------------------------------------------------------------------------------------ scale


def _make_sums_scaler(dtype: str) -> Callable:
    """Make ``scale_sums(product, block, memory, width, panel)``, which multiplies by the scales of
    columns. The sums lie as `foo_ops.kernels.linear.output.make_writer` has them.
    """
    compute = compute_dtype(dtype)
    LANES, copy_row = lanes_of(compute), make_copy_row(compute)

    @njit
    def scale_sums(product, block, memory, width, panel):
        rows, columns = block.row_stop - block.row_start, block.column_stop - block.column_start
        for start in range(0, columns, width):
            # Sums fill up whole vectors, and so do the scales, in the memory of the bias.
            count, stride = min(width, columns - start), product.scale_column_stride
            source = shift(product.scale, (block.column_start + start) * stride)
            whole = (count + LANES - 1) // LANES * LANES
            copy_row(memory.bias, source, stride, count, whole)
            for row in range(rows):
                sums = shift(memory.sums, start // width * panel + row * width)
                for column in range(0, whole, LANES):
                    product_of = load_vector(sums, column, LANES)
                    store(sums, column, product_of * load_vector(memory.bias, column, LANES))

    return scale_sums
