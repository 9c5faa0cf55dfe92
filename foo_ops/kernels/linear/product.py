"""Products of any number of rows: parameters, sums and epilogues."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core import types

from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.compiler.processor import spreads_prefetches, vector_registers
from foo_ops.kernels.lang.scratch import Scratch, Struct, larger, make_kernel_with_scratch
from foo_ops.kernels.linear.packing import (
    behind_bands,
    chunk_of_prefetches,
    in_pairs,
    make_left_packer,
    make_lines_ahead,
    make_right_packer,
    make_share_prefetcher,
    on_matrix_unit,
    prefetch_chunk,
    share_of_lines,
)
from foo_ops.kernels.math.exponential import exp, tanh
from foo_ops.kernels.math.special import erf
from foo_ops.kernels.products.on_amx import GROUP, TILE_MULTIPLE, make_amx_products, nothing
from foo_ops.kernels.products.on_vectors import make_tall_matmul, tall_shape
from foo_ops.kernels.products.operands import step_of
from foo_ops.kernels.simd.arithmetic import maximum, splat
from foo_ops.kernels.simd.memory import address_of, load, load_vector, pointer_to, shift, store
from foo_ops.kernels.simd.narrow import PAIRS
from foo_ops.kernels.simd.transpose import make_copy_row, make_fill, round_up, transpose_square
from foo_ops.kernels.simd.types import ELEMENTS, Pointer, compute_dtype, lanes_of

# ---------------------------------------------------------------------------- activations and gates

# Epilogues of a linear layer, applied to its sums before rounding: activations and gates.


NOTHING = "nothing"
GATE = "silu_mul"
"""The silu of one product, times another product of the same input."""


def parts_of(finish: str) -> int:
    """Return the number of products that a result is computed from."""
    return 2 if finish == GATE else 1


@functools.cache
def make_finish(compute: str, finish: str) -> Callable:
    """Make ``finish(value, other)`` for vectors; only a gate uses ``other``.

    gelu is Hendrycks and Gimpel 2016, exact or with tanh; silu is x / (1 + exp(-x)).
    """
    return {
        NOTHING: _nothing,
        "relu": _make_relu,
        "silu": _make_silu,
        "gelu": _make_gelu,
        "gelu_tanh": _make_gelu_tanh,
        GATE: _make_gate,
    }[finish](compute)


def _make_constant(compute: str) -> Callable:
    """Make ``constant(number)``: a vector with the number in all lanes."""
    LANES, type_ = lanes_of(compute), ELEMENTS[compute].compute

    @njit
    def constant(number):
        return splat(type_(number), LANES)

    return constant


def _nothing(compute: str) -> Callable:
    @njit
    def nothing(value, other):
        return value

    return nothing


def _make_relu(compute: str) -> Callable:
    constant = _make_constant(compute)

    @njit
    def relu(value, other):
        return maximum(constant(0.0), value)

    return relu


def _make_silu(compute: str) -> Callable:
    constant = _make_constant(compute)

    @njit
    def silu(value, other):
        return value / (constant(1.0) + exp(constant(0.0) - value))

    return silu


def _make_gate(compute: str) -> Callable:
    silu = _make_silu(compute)

    @njit
    def gate(value, other):
        return silu(value, other) * other

    return gate


def _make_gelu(compute: str) -> Callable:
    constant, FACTOR = _make_constant(compute), math.sqrt(0.5)

    @njit
    def gelu(value, other):
        return constant(0.5) * value * (constant(1.0) + erf(value * constant(FACTOR)))

    return gelu


def _make_gelu_tanh(compute: str) -> Callable:
    constant, FACTOR = _make_constant(compute), math.sqrt(2 / math.pi)

    @njit
    def gelu_tanh(value, other):
        cubed = constant(0.044715) * value * value * value
        return constant(0.5) * value * (constant(1.0) + tanh(constant(FACTOR) * (value + cubed)))

    return gelu_tanh


# -------------------------------------------------------------------------- parameters of launchers

# Launchers pass the kernels of linear layers a product and a block of its output.


BLOCK_FIELDS = ("row_start", "row_stop", "column_start", "column_stop")

BLOCK = Struct("ProductBlock", tuple((name, types.int64) for name in BLOCK_FIELDS))


def argument_types(dtype: str, output_dtype: str | None = None) -> tuple[Any, ...]:
    """Types of the product, the block, scratch memory and the pointer for its size."""
    fields = _product_fields(dtype, dtype, output_dtype or dtype)
    return _arguments(dtype, Struct("Product", fields))


def quantized_argument_types(dtype: str, stored: str, scale: str | None = None) -> tuple[Any, ...]:
    """Like `argument_types`, with a right matrix of few bits.

    ``scale`` is the dtype of scales, by default that of the left matrix. The struct is
    QuantizedProduct of foo_ops/csrc/ops/linear/quantized.h.
    """
    number, pointer = types.int64, Pointer(dtype)
    fields = (
        *_product_fields(dtype, stored, dtype),
        *(("scale", Pointer(scale or dtype)), ("scale_column_stride", number)),
        *(("zero", pointer), ("zero_column_stride", number)),
        *(("group_size", number), ("table", Pointer(compute_dtype(dtype)))),
    )
    return _arguments(dtype, Struct("QuantizedProduct", fields))


def _arguments(dtype: str, product: Struct) -> tuple[Any, ...]:
    return (product, BLOCK, Pointer(compute_dtype(dtype)), Pointer("int64"))


def _product_fields(
    dtype: str, right_dtype: str, output_dtype: str
) -> tuple[tuple[str, types.Type], ...]:
    """The struct Product of foo_ops/csrc/ops/linear/product.h. Strides are in elements."""
    number, pointer = types.int64, Pointer(dtype)
    right, result = Pointer(right_dtype), Pointer(output_dtype)
    return (
        *((name, number) for name in ("rows", "columns", "depth", "is_transposed")),
        *(("left", pointer), ("left_row_stride", number), ("left_step_stride", number)),
        *(("right", right), ("right_column_stride", number), ("right_step_stride", number)),
        ("second", right),
        *(("has_bias", number), ("bias", result), ("bias_stride", number)),
        *(("output", result), ("output_stride", number)),
    )


# ------------------------------------------------------------------------------- results of a block

# Adds the bias to a block's sums, applies the epilogue, adds the output's previous values, and
# rounds once.


@njit
def leave_sums(product, block, memory, width, panel):
    """Does nothing, where sums need no scaling."""


def describe_lines(compute: str, finish: str) -> dict[str, int]:
    """Describe a writer's scratch memory: a square to transpose sums, and a line's last vector."""
    LANES = lanes_of(compute)
    return {"square": parts_of(finish) * LANES * LANES, "rest": LANES}


@functools.cache
def make_writer(dtype: str, finish: str = NOTHING, adds: bool = False) -> Callable:
    """Make ``write(product, block, memory, sums, width, panel, part)``.

    ``sums`` are panels of ``width`` columns at a distance of ``panel`` elements; the sums of a
    second product follow at a distance of ``part`` elements. With ``adds``, the output has the
    compute type, and its previous values are added.
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

    # A line of a panel is a vector or two, for which a call takes long.
    @njit(forceinline=True)
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

    The product's left matrix holds those sums, of this block only, followed by the sums of a gate's
    second product. They have the output's dtype.
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


# --------------------------------------------------------------------------------------- the kernel

# Computes a block of a product, of any number of rows.


# Steps summed over at a time: as many as keep a panel of columns in L1. On a matrix unit, 256 steps
# of a panel and of a band of rows are 64 KB. In a simulation of an L1 of 48 KB and 12 ways, with
# rows of 2816, all lines then miss it, and L2 would take 1.5 times as long as the products; with
# 128 steps 0.88 times.
STEPS_ON_UNIT = 128


def steps_on_vectors() -> int:
    """Return the steps summed over at a time on vectors.

    With 16 registers panels are narrower: 256 steps make the 256 rows of a weight's gradient one
    section, which takes 0.85 of the time on a Zen 3.
    """
    return 256 if vector_registers() == 16 else 192


@dataclasses.dataclass(frozen=True)
class Panels:
    """Panels of columns of the right matrix, or of both right matrices of a gate.

    Attributes:
        arguments: the types of the kernel's arguments.
        pack: ``pack(product, part, memory, start, column, columns, count, distance)`` packs
            panels of columns from ``column`` on, with ``count`` steps from ``start`` on, at a
            distance of ``distance``.
        chunk: the number of elements of a column that are prefetched at a time.
        lines_ahead: ``lines_ahead(product, part, start, column, columns, count, shares)`` returns
            the lines of such a panel to prefetch, in equal shares: see `make_lines_ahead`.
        regions: the scratch memory of packing.
        scale_sums: ``scale_sums(product, block, memory, width, panel)`` runs before the sums are
            written.
    """

    arguments: tuple[Any, ...]
    pack: Callable
    chunk: int
    lines_ahead: Callable
    regions: dict[str, int]
    scale_sums: Callable


def make_stored_panels(dtype: str, WIDTH: int, SECTION: int, finish: str = NOTHING) -> Panels:
    """Make the panels of a right matrix that has the left matrix's dtype."""
    SIZE = ELEMENTS[dtype].size
    CHUNK = chunk_of_prefetches(SECTION, SIZE)
    pack_right, lines_of = make_right_packer(dtype, WIDTH), make_lines_ahead(CHUNK, SIZE)
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
    def lines_ahead(product, part, start, column, columns, count, shares):
        return lines_of(
            panel_of(product, part, start, column), product.right_column_stride,
            product.right_step_stride, columns, count, shares,
        )  # fmt: skip

    return Panels(argument_types(dtype), pack, CHUNK, lines_ahead, {}, leave_sums)


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
    """Functions and sizes with which kernels compute the sums of a block.

    Attributes:
        compute: ``compute(product, block, memory)`` leaves the sums in ``memory.sums``, in the
            compute type, in panels of ``width`` columns. A product is a struct with the fields of
            the factors in `foo_ops.kernels.linear.product`.
        may_store: ``may_store(product, block)``: whether the sums can be computed in the output
            itself, if it has the compute type, and they are neither scaled nor finished.
        store: ``store(product, block, memory)`` then computes them there.
        panel_of_block: ``panel_of_block(product, block)``: the distance of panels.
        part_of_block: ``part_of_block(product, block)``: the distance of two products' sums.
        width: a panel's number of columns.
        sizes_of_block: returns the sizes that the regions depend on.
        describe: the regions of scratch memory, including one for a bias: see `Scratch`.
        arguments: the argument types of a kernel that writes the sums.
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
    """Make the block sums for sections of the depth that are multiples of ``multiple`` steps."""
    compute, on_unit = compute_dtype(dtype), on_matrix_unit(dtype)
    in_products = PAIRS if in_pairs(dtype) else compute
    LANES, STEP = lanes_of(compute), step_of(in_products)
    WIDTH = TILE_MULTIPLE if on_unit else tall_shape()[1] * LANES
    STEPS = (STEPS_ON_UNIT if on_unit else steps_on_vectors()) // multiple * multiple
    SECTION = STEPS * STEP
    # Multiples of rows, columns and steps that a product needs.
    ROW_MULTIPLE, MULTIPLE, STEP_MULTIPLE = (
        (TILE_MULTIPLE, GROUP, GROUP) if on_unit else (1, LANES, 1)
    )
    # Panels packed at a time. A matrix unit is limited by memory: several panels make longer runs
    # of adjacent columns. On vectors, a single packed panel is still in L1.
    PANELS = 4 if on_unit else 1
    # Rows multiplied between two shares of prefetching.
    BAND = TILE_MULTIPLE if on_unit else tall_shape()[0]
    PARTS, left_of = parts_of(finish), _second_left if finish == GATE else _only_left
    panels = (
        make_panels(dtype, WIDTH, SECTION)
        if finish == NOTHING
        else make_panels(dtype, WIDTH, SECTION, finish)
    )
    pack_panels, panel_ahead, scale_sums = panels.pack, panels.lines_ahead, panels.scale_sums
    pack_left, prefetch_share = make_left_packer(dtype, BAND, STEPS), make_share_prefetcher(dtype)
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
    def next_panel(product, block, part, start, column):
        """Return the product, the first step and the first column of the panel after this one."""
        if column + WIDTH < block.column_stop - block.column_start:
            return part, start, column + WIDTH
        return (part + 1, start, 0) if part + 1 < PARTS else (0, start + SECTION, 0)

    @njit
    def lines_ahead(product, block, part, start, column, shares):
        """Return the next panel's lines, in equal shares, to be prefetched into L2."""
        next_part, next_start, next_column = next_panel(product, block, part, start, column)
        place = block.column_start + next_column
        return panel_ahead(
            product, next_part, next_start, place, min(WIDTH, block.column_stop - place),
            max(0, min(SECTION, product.depth - next_start)), shares,
        )  # fmt: skip

    @njit
    def prefetch_rows(product, block, part, start, column, band, bands):
        """Prefetch a share of the rows of the next section into L2, during the panel before it."""
        next_part, next_start, _ = next_panel(product, block, part, start, column)
        if start < next_start < product.depth:
            prefetch_share(
                rows_of(product, block, next_part, next_start), product.left_row_stride,
                product.left_step_stride, block.row_stop - block.row_start,
                min(SECTION, product.depth - next_start), band, bands,
            )  # fmt: skip

    if on_unit:
        on_tiles, begin_products, end_products = make_amx_products(1)

        @njit
        def multiply(product, block, sums, stride, left, right, part, start, column, steps):
            """Multiply bands of rows by a packed panel. Prefetching would be waited for."""
            rows, _, bands = sizes_of_block(product, block)
            columns = min(WIDTH, block.column_stop - block.column_start - column)
            factors, distance, row_stride, step_stride = left
            for band in range(bands):
                row = band * BAND
                on_tiles(
                    shift(sums, row * stride), stride,
                    (shift(factors, band * distance), row_stride, step_stride, 0),
                    (as_matrix(address_of(right)), WIDTH, 0),
                    min(BAND, rows - row), round_up(columns, MULTIPLE), steps, start > 0, True,
                )  # fmt: skip

    else:
        SPREADS, begin_products, end_products = spreads_prefetches(), nothing, nothing
        tall_matmul = make_tall_matmul(
            compute,
            in_products,
            in_products,
            panels.chunk // STEP if SPREADS else 0,
            STEPS if SPREADS else 0,
        )

        @njit
        def multiply(product, block, sums, stride, left, right, part, start, column, steps):
            """Multiply bands of rows by a packed panel, and prefetch the next panel meanwhile."""
            rows, _, bands = sizes_of_block(product, block)
            columns = min(WIDTH, block.column_stop - block.column_start - column)
            factors, distance, row_stride, step_stride = left
            # The rows that are no whole band prefetch nothing.
            ahead = lines_ahead(product, block, part, start, column, max(1, rows // BAND))
            for band in range(bands):
                prefetch_rows(product, block, part, start, column, band, bands)
                lines, row = share_of_lines(ahead, band), band * BAND
                if not SPREADS:
                    prefetch_chunk(lines)
                tall_matmul(
                    shift(sums, row * stride), stride,
                    shift(factors, band * distance), row_stride, step_stride,
                    as_matrix(address_of(right)), WIDTH,
                    min(BAND, rows - row), round_up(columns, MULTIPLE), steps, start > 0, lines,
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
        """Whether the sums are the output: one section, whole vectors, no bias, not transposed."""
        columns = block.column_stop - block.column_start
        is_stored_as_is = not product.has_bias and not product.is_transposed
        return is_stored_as_is and 0 < product.depth <= SECTION and columns % MULTIPLE == 0

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
    """Make the kernel of a product of any number of rows.

    output[row, column] = bias[column] + sum over step of left[row, step] * right[column, step],
    followed by the epilogue ``finish``. A gate has a second product, with other weights. With
    ``adds``, the output has the compute type, and is added to. Sections of the depth are multiples
    of ``multiple`` steps.
    """
    sums, compute = make_block_sums(dtype, make_panels, finish, multiple), compute_dtype(dtype)
    compute_sums, WIDTH = sums.compute, sums.width
    panel_of_block, part_of_block = sums.panel_of_block, sums.part_of_block
    write = make_writer(dtype, finish, adds)
    # With few steps, copying the sums takes as long as multiplying: the gradient of a float32
    # weight for 64 rows reaches 0.53 of the peak by way of scratch memory.
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
