"""Compute a block of a product, of any number of rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from numba import njit

from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.compiler.processor import vector_registers
from foo_ops.kernels.lang.scratch import Scratch, larger, make_kernel_with_scratch
from foo_ops.kernels.linear.finish import GATE, NOTHING, parts_of
from foo_ops.kernels.linear.output import describe_lines, leave_sums, make_writer
from foo_ops.kernels.linear.packing import (
    behind_bands,
    in_pairs,
    make_left_packer,
    make_right_packer,
    make_share_prefetcher,
    on_matrix_unit,
)
from foo_ops.kernels.linear.parameters import argument_types
from foo_ops.kernels.products.on_amx import GROUP, TILE_MULTIPLE, make_amx_products
from foo_ops.kernels.products.on_vectors import make_tall_matmul, tall_shape
from foo_ops.kernels.products.operands import make_vector_products, step_of
from foo_ops.kernels.simd.memory import address_of, pointer_to, shift
from foo_ops.kernels.simd.narrow import PAIRS
from foo_ops.kernels.simd.transpose import make_fill, round_up
from foo_ops.kernels.simd.types import compute_dtype, lanes_of

# Steps that are summed over at a time: so many that a panel of columns stays in the nearest cache.
STEPS_ON_UNIT = 256


def steps_on_vectors() -> int:
    """Return as much for vectors, whose panels are narrower where there are 16 registers.

    There a Zen 3 takes 0.85 of the time for the gradient of a weight of 256 rows, all of which are
    one section with 256 steps.
    """
    return 256 if vector_registers() == 16 else 192


@dataclasses.dataclass(frozen=True)
class Panels:
    """Panels of columns of the right matrix, or of those of a gate.

    Attributes:
        arguments: the types of the kernel's.
        pack: ``pack(product, part, memory, start, column, columns, count, distance)`` packs panels
            of columns from ``column`` on, and of ``count`` steps from ``start`` on, to places that
            are ``distance`` apart.
        prefetch: ``prefetch(product, part, start, column, columns, count, share, shares)`` begins
            to bring a share of what is packed to the second cache.
        regions: the scratch memory of packing.
        scale_sums: ``scale_sums(product, block, memory, width, panel)``, before they are written.
    """

    arguments: tuple[Any, ...]
    pack: Callable
    prefetch: Callable
    regions: dict[str, int]
    scale_sums: Callable


def make_stored_panels(dtype: str, WIDTH: int, SECTION: int, finish: str = NOTHING) -> Panels:
    """Make the panels of a right matrix of the left one's dtype."""
    pack_right, prefetch_share = make_right_packer(dtype, WIDTH), make_share_prefetcher(dtype)
    right_of = _second_right if finish == GATE else _only_right

    @njit
    def panel_of(product, part, start, column):
        place = column * product.right_column_stride
        return shift(right_of(product, part), place + start * product.right_step_stride)

    @njit
    def pack(product, part, memory, start, column, columns, count, distance):
        pack_right(
            memory.right, distance, panel_of(product, part, start, column),
            product.right_column_stride, product.right_step_stride, columns, count,
        )  # fmt: skip

    @njit
    def prefetch(product, part, start, column, columns, count, share, shares):
        prefetch_share(
            panel_of(product, part, start, column), product.right_column_stride,
            product.right_step_stride, columns, count, share, shares,
        )  # fmt: skip

    return Panels(argument_types(dtype), pack, prefetch, {}, leave_sums)


@njit
def _only_left(product, part):
    return product.left


@njit
def _only_right(product, part):
    return product.right


@njit
def _second_left(product, part):
    return product.second if part == 1 and product.is_transposed else product.left


@njit
def _second_right(product, part):
    return product.second if part == 1 and not product.is_transposed else product.right


@dataclasses.dataclass(frozen=True)
class BlockSums:
    """How kernels compute the sums of a block, which they then do something with.

    Attributes:
        compute: ``compute(product, block, memory)`` leaves them in ``memory.sums``, in the compute
            type, in panels of ``width`` columns. A product is a struct with the fields that the
            factors have in `foo_ops.kernels.linear.parameters`.
        may_store: ``may_store(product, block)``: whether these may be the output itself, where
            it is of the compute type and they are neither scaled nor finished.
        store: ``store(product, block, memory)`` then computes them there.
        panel_of_block: ``panel_of_block(product, block)``: how far panels are apart.
        part_of_block: ``part_of_block(product, block)``: how far the sums of two products are.
        width: that of a panel.
        sizes_of_block: what the regions depend on.
        describe: the regions of scratch memory that it needs, and one for a bias: see `Scratch`.
        arguments: the types of a kernel's that writes them.
    """

    compute: Callable
    may_store: Callable
    store: Callable
    panel_of_block: Callable
    part_of_block: Callable
    width: int
    sizes_of_block: Callable
    describe: Callable[..., dict[str, Any]]
    arguments: tuple[Any, ...]


@functools.cache
def make_block_sums(
    dtype: str,
    make_panels: Callable[..., Panels] = make_stored_panels,
    finish: str = NOTHING,
    multiple: int = 1,
) -> BlockSums:
    """Make it for sections of the depth that are multiples of so many steps."""
    compute, on_unit = compute_dtype(dtype), on_matrix_unit(dtype)
    in_products = PAIRS if in_pairs(dtype) else compute
    LANES, STEP = lanes_of(compute), step_of(in_products)
    WIDTH = TILE_MULTIPLE if on_unit else tall_shape()[1] * LANES
    STEPS = (STEPS_ON_UNIT if on_unit else steps_on_vectors()) // multiple * multiple
    SECTION = STEPS * STEP
    # What a product takes rows, columns and steps in multiples of.
    ROW_MULTIPLE, MULTIPLE, STEP_MULTIPLE = (
        (TILE_MULTIPLE, GROUP, GROUP) if on_unit else (1, LANES, 1)
    )
    # Panels that are packed at a time. A matrix unit waits for memory: where columns are adjacent,
    # it reads longer runs of them. On vectors a panel that was packed is still in the first cache.
    PANELS = 4 if on_unit else 1
    # Rows that are multiplied between two shares of prefetching.
    BAND = TILE_MULTIPLE if on_unit else tall_shape()[0]
    PARTS, left_of = parts_of(finish), _second_left if finish == GATE else _only_left
    products = make_amx_products(1) if on_unit else make_vector_products(dtype, make_tall_matmul)
    matmul, begin_products, end_products = products
    panels = (
        make_panels(dtype, WIDTH, SECTION)
        if finish == NOTHING
        else make_panels(dtype, WIDTH, SECTION, finish)
    )
    pack_panels, prefetch_panel, scale_sums = panels.pack, panels.prefetch, panels.scale_sums
    pack_left, prefetch_share = make_left_packer(dtype, BAND), make_share_prefetcher(dtype)
    fill, as_matrix = make_fill(compute), pointer_to(in_products)

    @njit
    def rows_of(product, block, part, start):
        place = block.row_start * product.left_row_stride + start * product.left_step_stride
        return shift(left_of(product, part), place)

    @njit
    def sizes_of_block(product, block):
        rows = block.row_stop - block.row_start
        columns = round_up(block.column_stop - block.column_start, WIDTH)
        return round_up(rows, ROW_MULTIPLE), columns, (rows + BAND - 1) // BAND

    def describe(rows: Any, columns: Any, bands: Any) -> dict[str, Any]:
        return {
            "left": bands * (BAND * STEPS + behind_bands(compute, BAND)),
            "right": PANELS * WIDTH * STEPS,
            **panels.regions,
            "sums": PARTS * rows * columns,
            "bias": larger(rows, columns) + LANES,
        }

    @njit
    def panel_of_block(product, block):
        rows, _, _ = sizes_of_block(product, block)
        return rows * WIDTH

    @njit
    def part_of_block(product, block):
        rows, columns, _ = sizes_of_block(product, block)
        return (PARTS - 1) * rows * columns

    @njit
    def prefetch_next(product, block, part, start, column, share, shares):
        """Begin to bring a share of what is packed next to the second cache."""
        rows, columns = block.row_stop - block.row_start, block.column_stop - block.column_start
        next_part, next_start, next_column = part, start, column + WIDTH
        if next_column >= columns:
            next_part, next_column = part + 1, 0
        if next_part == PARTS:
            next_part, next_start = 0, start + SECTION
        count = min(SECTION, product.depth - next_start)
        if count <= 0:
            return
        prefetch_panel(
            product, next_part, next_start, block.column_start + next_column,
            min(WIDTH, columns - next_column), count, share, shares,
        )  # fmt: skip
        if next_start > start:
            prefetch_share(
                rows_of(product, block, next_part, next_start), product.left_row_stride,
                product.left_step_stride, rows, count, share, shares,
            )  # fmt: skip

    @njit
    def multiply(product, block, sums, stride, left, right, part, start, column, steps):
        """Multiply bands of rows by a packed panel. Meanwhile the next one comes to the cache."""
        rows, _, bands = sizes_of_block(product, block)
        columns = min(WIDTH, block.column_stop - block.column_start - column)
        factors, distance, row_stride, step_stride = left
        for band in range(bands):
            # A matrix unit is quicker than what comes to the cache meanwhile: it would wait for it.
            if not on_unit:
                prefetch_next(product, block, part, start, column, band, bands)
            row = band * BAND
            matmul(
                shift(sums, row * stride), stride,
                (shift(factors, band * distance), row_stride, step_stride, 0),
                (as_matrix(address_of(right)), WIDTH, 0),
                min(BAND, rows - row), round_up(columns, MULTIPLE), steps, start > 0, True,
            )  # fmt: skip

    @njit
    def add_section(product, block, memory, sums, panel_distance, stride, part, start):
        """Add the products of a section of the depth."""
        rows, columns = block.row_stop - block.row_start, block.column_stop - block.column_start
        count = min(SECTION, product.depth - start)
        steps = round_up((count + STEP - 1) // STEP, STEP_MULTIPLE)
        left = pack_left(
            memory.left, rows_of(product, block, part, start), product.left_row_stride,
            product.left_step_stride, rows, count,
        )  # fmt: skip
        for first in range(0, columns, PANELS * WIDTH):
            stop = min(first + PANELS * WIDTH, columns)
            pack_panels(
                product, part, memory, start, block.column_start + first, stop - first, count,
                WIDTH * steps,
            )  # fmt: skip
            for column in range(first, stop, WIDTH):
                panel = shift(memory.right, (column - first) * steps)
                place = shift(sums, column // WIDTH * panel_distance)
                multiply(product, block, place, stride, left, panel, part, start, column, steps)

    @njit
    def compute_sums(product, block, memory):
        rows, columns, _ = sizes_of_block(product, block)
        if product.depth == 0:
            fill(memory.sums, PARTS * rows * columns, 0.0)
        begin_products()
        for start in range(0, product.depth, SECTION):
            for part in range(PARTS):
                sums = shift(memory.sums, part * rows * columns)
                add_section(product, block, memory, sums, rows * WIDTH, WIDTH, part, start)
        end_products()
        scale_sums(product, block, memory, WIDTH, rows * WIDTH)

    @njit
    def may_store(product, block):
        """Whether the sums are the output as it is, all of them made at once by whole vectors."""
        columns = block.column_stop - block.column_start
        is_plain = not product.has_bias and not product.is_transposed
        return is_plain and 0 < product.depth <= SECTION and columns % MULTIPLE == 0

    @njit
    def store_sums(product, block, memory):
        place = block.row_start * product.output_stride + block.column_start
        output = shift(product.output, place)
        add_section(product, block, memory, output, WIDTH, product.output_stride, 0, 0)

    return BlockSums(
        compute_sums, may_store, store_sums, panel_of_block, part_of_block, WIDTH, sizes_of_block,
        describe, panels.arguments,
    )  # fmt: skip


def make_product_kernel(
    dtype: str,
    make_panels: Callable[..., Panels] = make_stored_panels,
    *,
    finish: str = NOTHING,
    adds: bool = False,
    multiple: int = 1,
) -> Kernel:
    """Make the kernel for output[row, column] = bias[column] + sum over step of left[row, step] *
    right[column, step].

    See `foo_ops.kernels.linear.finish` for what becomes of that sum. A gate has a second product,
    with other weights. If the kernel ``adds``, the output is of the compute type, and added to.
    Sections of the depth are multiples of ``multiple`` steps.
    """
    sums, compute = make_block_sums(dtype, make_panels, finish, multiple), compute_dtype(dtype)
    compute_sums, WIDTH = sums.compute, sums.width
    panel_of_block, part_of_block = sums.panel_of_block, sums.part_of_block
    write = make_writer(dtype, finish, adds)
    # Of few steps it takes as long to copy sums as to multiply: the gradient of a weight of float32
    # for 64 rows is at 0.53 of the peak by way of scratch memory.
    STORES = (
        dtype == compute and finish == NOTHING and not adds and make_panels is make_stored_panels
    )
    may_store, store = sums.may_store, sums.store

    def describe(rows: Any, columns: Any, bands: Any) -> dict[str, Any]:
        return {**sums.describe(rows, columns, bands), **describe_lines(compute, finish)}

    def compute_block(product, block, memory):
        if STORES and may_store(product, block):
            store(product, block, memory)
            return
        compute_sums(product, block, memory)
        panel, part = panel_of_block(product, block), part_of_block(product, block)
        write(product, block, memory, memory.sums, WIDTH, panel, part)

    layout = Scratch(compute, sums.sizes_of_block, describe)
    types_ = argument_types(dtype, compute) if adds else sums.arguments
    return make_kernel_with_scratch(compute_block, layout, types_)
