"""Products of integers: rows are rounded to 8 bits, and multiplied by weights of 8 or 4 bits.

A row is ``integers * scale``, with a scale for the row, or for each group of steps if the weights
have groups: the largest magnitude / 127. An element of the output is the sum, over cuts of the
depth, of

    sum(integers * (weights - zero)) * scale of the row * scale of the column.

A cut is a group, or a section of the depth without groups. The sum is exact: it adds up products of
bytes in 32 bits. One of the bytes has no sign, as VNNI wants it.

Few rows are multiplied by weights without a sign, of which those of 8 bits have BYTE_OFFSET added,
and ``zero * sum(integers)`` is subtracted from the floating-point sums. Many rows get BYTE_OFFSET
added instead, and weights have a sign: a zero's whole part is subtracted when they are packed. The
sums of integers then begin with minus BYTE_OFFSET times the sum of the weights, which costs no
instruction for each row. Rests of zeros that are no such integers are subtracted separately.

Each cut ends with a conversion and a scaling of its sums, for which vectors take longer than a
matrix unit for the products of a group. So many rows may be multiplied by section: weights of
groups are rounded to 8 bits once more while they are packed, and a section is a cut with a scale
for each row and for each column. On a Granite Rapids, 768 rows and 2816 x 1024 weights of 4 bits in
groups of 64 take 0.53 of the time, and of 8 bits in groups of 32, which fill no register of the
unit, 0.31.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core import types

from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.compiler.processor import use_matrix_unit
from foo_ops.kernels.lang.scratch import Scratch, Struct, larger, make_kernel_with_scratch
from foo_ops.kernels.linear.few_rows import (
    Tiles,
    columns_of_group,
    columns_of_row,
    fetching_of,
    make_few_rows_kernel,
    make_tiles_ahead,
)
from foo_ops.kernels.linear.packing import make_share_prefetcher
from foo_ops.kernels.linear.product import (
    BLOCK,
    NOTHING,
    describe_lines,
    leave_sums,
    make_writer,
    parts_of,
    quantized_argument_types,
)
from foo_ops.kernels.linear.quantized import (
    COMPUTE,
    Rounding,
    Weights,
    int4_weights,
    make_group_tiles,
)
from foo_ops.kernels.products.on_amx import (
    GROUP,
    TILE_MULTIPLE,
    make_amx_products_of_bytes,
    nothing,
)
from foo_ops.kernels.products.on_vectors import make_sum
from foo_ops.kernels.simd.arithmetic import splat
from foo_ops.kernels.simd.fixed_point import (
    BYTE,
    CODE_BITS,
    INT4,
    LANE_BYTES,
    RANGES,
    SMALLEST_ROUNDED,
    bits_of_float,
    larger_magnitudes,
    largest_lane,
    round_codes,
    scale_of_bytes,
    split_codes,
    split_zeros,
    store_bytes,
    sum_of_lanes,
)
from foo_ops.kernels.simd.memory import (
    address_of,
    load,
    load_first,
    load_vector,
    pointer_to,
    prefetch,
    shift,
    store,
)
from foo_ops.kernels.simd.narrow import BYTE_OFFSET, QUADS, UNSIGNED_QUADS, subtract_offsets
from foo_ops.kernels.simd.register_tiles import (
    tile_add,
    tile_add_scaled,
    tile_dot_bytes,
    tile_load,
    tile_repeat,
    tile_store,
    tile_store_sums,
    tile_zero,
)
from foo_ops.kernels.simd.transpose import (
    make_copy_row,
    make_fill,
    round_up,
    transpose_adjacent,
    transpose_square,
)
from foo_ops.kernels.simd.types import ELEMENTS, Pointer, lanes_of

LARGEST_FINITE = 0x7F7F_FFFF
"""Bits of the largest finite float32."""
SMALLEST_CUT = 32
PADDING = 64
"""Multiple of the steps of a cut that has no group: a row of a matrix unit's register."""
BAND, VECTORS, REST = 6, 2, 2
"""Rows and vectors of a register tile, and rows of those behind the last whole one, which end with
the rows. 12 sums of integers hide the latency of products, and leave registers for as many sums of
float32: with 12 rows, a Zen 4 takes 1.07 times as long."""
ROWS_OF_UNIT = 4
"""Rows of the tiles that add a matrix unit's integers to sums of float32."""
UNROLLED = 2
"""Steps per iteration. With 4, LLVM loads all rows first and moves them to the stack: a Zen 4
takes 1.5 times as long."""


# ------------------------------------------------------------------------------------------- rows

# Rounds rows to bytes.


def rounding_to_bytes() -> Rounding:
    smallest = bits_of_float(SMALLEST_ROUNDED)
    return Rounding(8, scale_of_bytes, smallest, LARGEST_FINITE, is_zero_below=True)


def _make_largest() -> Callable:
    """Make ``largest(line, count)``: the bits of the largest of adjacent magnitudes."""
    LANES = lanes_of(COMPUTE)

    @njit
    def largest(line, count):
        found, whole = splat(types.int32(0), LANES), count // LANES * LANES
        for step in range(0, whole, LANES):
            found = larger_magnitudes(found, load_vector(line, step, LANES))
        if whole < count:
            found = larger_magnitudes(found, load_first(line, whole, count - whole, LANES))
        return largest_lane(found)

    return largest


def _make_byte_rounder() -> Callable:
    """Make ``round_bytes(target, line, count, padded, factor)``, which returns the integers' sum.

    It writes ``padded`` bytes, a multiple of LANES. If they are uint8, BYTE_OFFSET is added.
    """
    LANES, none = lanes_of(COMPUTE), ELEMENTS[COMPUTE].compute(0)

    @njit
    def round_bytes(target, line, count, padded, factor):
        total, whole = splat(types.int32(0), LANES), count // LANES * LANES
        for step in range(0, whole, LANES):
            total = total + store_bytes(target, step, load_vector(line, step, LANES), factor)
        if whole < count:
            rest = load_first(line, whole, count - whole, LANES)
            total = total + store_bytes(target, whole, rest, factor)
        for step in range(round_up(count, LANES), padded, LANES):
            store_bytes(target, step, splat(none, LANES), none)
        return sum_of_lanes(total)

    return round_bytes


def rows_argument_types(dtype: str) -> tuple[Any, ...]:
    """The struct IntegerRows of foo_ops/csrc/ops/linear/integer.h, and a block of its rows."""
    number, numbers = types.int64, Pointer(COMPUTE)
    fields = (
        *(("rows", number), ("depth", number), ("source", Pointer(dtype)), ("row_stride", number)),
        *(("group_size", number), ("section", number), ("padded_rows", number)),
        *(("integers", Pointer("uint8")), ("scales", numbers), ("sums", numbers)),
    )
    return Struct("IntegerRows", fields), BLOCK, numbers, Pointer("int64")


def make_rows_kernel(dtype: str) -> Kernel:
    """Make the kernel that rounds rows to bytes, with their scales and the sums of each cut."""
    LANES, largest, round_bytes = lanes_of(COMPUTE), _make_largest(), _make_byte_rounder()
    number, as_integers = ELEMENTS[COMPUTE].compute, pointer_to("int32")

    @njit
    def sizes_of_block(rows, block):
        cuts = (block.row_stop - block.row_start) * (rows.section // SMALLEST_CUT)
        return (round_up(cuts, LANES),)

    def describe(cuts: Any) -> dict[str, Any]:
        return {"magnitudes": cuts, "scales": cuts, "inverses": cuts}

    @njit
    def find_scales(rows, block, memory, start, count, size):
        """Find the scales of a block's cuts, row by row, and their inverses.

        All at once, since a scale takes long and processors do not look so far ahead: with groups
        of 64, a Zen 4 rounds rows in 0.5 to 0.7 of the time that it takes group by group. It waits
        for a vector of magnitudes that have just been stored one by one.
        """
        magnitudes, cuts = as_integers(address_of(memory.magnitudes)), 0
        for row in range(block.row_start, block.row_stop):
            line = shift(rows.source, row * rows.row_stride + start)
            for first in range(0, count, size):
                store(magnitudes, cuts, largest(shift(line, first), min(size, count - first)))
                cuts += 1
        for cut in range(0, cuts, LANES):
            scale, inverse = scale_of_bytes(load_vector(magnitudes, cut, LANES))
            store(memory.scales, cut, scale)
            store(memory.inverses, cut, inverse)

    @njit
    def round_section(rows, memory, row, start, count, found):
        """Round the steps of a row from ``start`` on; ``found`` is the place of its first scale."""
        size = rows.group_size if rows.group_size != 0 else rows.section
        line = shift(rows.source, row * rows.row_stride + start)
        integers = shift(rows.integers, start * rows.padded_rows + row * rows.section)
        factor = start // size * rows.padded_rows + row
        for cut in range((count + size - 1) // size):
            first = cut * size
            some, scale = min(size, count - first), load(memory.scales, found + cut)
            padded = round_up(some, PADDING) if size == rows.section else some
            total = round_bytes(
                shift(integers, first), shift(line, first), some, padded,
                load(memory.inverses, found + cut),
            )  # fmt: skip
            store(rows.scales, factor, scale)
            store(rows.sums, factor, number(total) * scale)
            factor += rows.padded_rows

    def round_block(rows, block, memory):
        depth, section, size = rows.depth, rows.section, rows.group_size
        if size == 0:
            find_scales(rows, block, memory, 0, depth, max(1, depth))
        for start in range(0, depth, section):
            count, scales_of_row = min(section, depth - start), 1
            if size != 0:
                find_scales(rows, block, memory, start, count, size)
                scales_of_row = (count + size - 1) // size
            for row in range(block.row_start, block.row_stop):
                found = (row - block.row_start) * scales_of_row
                round_section(rows, memory, row, start, count, found)

    layout = Scratch(COMPUTE, sizes_of_block, describe)
    return make_kernel_with_scratch(round_block, layout, rows_argument_types(dtype))


# --------------------------------------------------------------------------------------- few rows


def make_int8_few_rows_kernel(dtype: str, group_size: int | None = None) -> Kernel:
    """Make the kernel for few rows and 8-bit integers, with a scale per column or per group."""
    if group_size is None:
        return make_few_rows_kernel(dtype, _make_row_tiles)
    return _make_group_kernel(dtype, group_size, _int8_weights)


def make_int4_few_rows_kernel(dtype: str, group_size: int) -> Kernel:
    """Make the kernel for few rows and 4-bit integers."""
    return _make_group_kernel(dtype, group_size, int4_weights)


def _make_group_kernel(
    dtype: str, group_size: int, weights_of: Callable[[str, int], Weights]
) -> Kernel:
    def make_tiles(dtype: str) -> Tiles:
        weights = weights_of(dtype, group_size)
        return make_group_tiles(group_size, weights, rounding_to_bytes(), leave_sums)

    return make_few_rows_kernel(dtype, make_tiles)


def _int8_weights(dtype: str, GROUP_SIZE: int) -> Weights:
    """Read integers of 8 bits, with a scale for each group."""
    LANES, offset = lanes_of(COMPUTE), ELEMENTS[COMPUTE].compute(BYTE_OFFSET)

    @njit
    def load_groups(product, column, group, groups):
        scales = shift(product.scale, column * product.scale_column_stride)
        if group + LANES <= groups:
            return load_vector(scales, group, LANES), splat(offset, LANES)
        return load_first(scales, group, groups - group, LANES), splat(offset, LANES)

    @njit
    def prefetch_groups(product, column, group):
        prefetch(product.scale, column * product.scale_column_stride + group)

    arguments = quantized_argument_types(dtype, "int8")
    return Weights(BYTE, arguments, load_groups, prefetch_groups, load_pair=None)


def _make_row_tiles(dtype: str) -> Tiles:
    """Make tiles of rows that have been copied as bytes, for weights with a scale per column.

    The bytes of a row, padded to whole vectors, are followed by the vector with which its sums of
    integers begin, and by its scale.
    """
    LANES = lanes_of(COMPUTE)
    BYTES = LANE_BYTES * LANES
    as_bytes, as_quads = pointer_to("int8"), pointer_to(QUADS)
    as_integers = pointer_to("int32")
    arguments = quantized_argument_types(dtype, "int8")
    largest, round_bytes, tiles_ahead = _make_largest(), _make_byte_rounder(), make_tiles_ahead()

    @njit
    def row_size(depth):
        return round_up(depth, BYTES) // LANE_BYTES + 2 * LANES

    @njit
    def copy_row(target, source, stride, depth, row_size):
        scale, inverse = scale_of_bytes(largest(source, depth))
        padded = round_up(depth, BYTES)
        total = round_bytes(as_bytes(address_of(target)), source, depth, padded, inverse)
        tail = shift(target, padded // LANE_BYTES)
        begin = as_integers(address_of(tail))
        store(begin, 0, splat(types.int32(0), LANES))
        store(begin, 0, types.int32(-BYTE_OFFSET * total))
        store(tail, LANES, scale)

    @functools.cache
    def make_tile(ROWS: int, COLUMNS: int) -> Callable:
        fetch = fetching_of(ROWS, COLUMNS)

        @njit
        def tile(product, right, memory, sums, width, left, depth, column):
            stride = product.right_column_stride
            right = shift(right, column * stride)
            rows, begin = as_quads(address_of(left)), shift(left, depth - 2 * LANES)
            total = tile_repeat(as_integers(address_of(begin)), depth, ROWS, COLUMNS, LANES)
            ahead = COLUMNS * stride * tiles_ahead(COLUMNS * stride)
            whole = product.depth // BYTES * BYTES
            for step in range(0, whole, BYTES):
                fetch(right, ahead + COLUMNS * step, BYTES, COLUMNS)
                total = tile_dot_bytes(
                    total, shift(rows, step // LANE_BYTES), depth, shift(right, step), stride, None
                )
            if whole < product.depth:
                total = tile_dot_bytes(
                    total, shift(rows, whole // LANE_BYTES), depth, shift(right, whole), stride,
                    product.depth - whole,
                )  # fmt: skip
            tile_store_sums(total, sums, width)

        return tile

    return Tiles(
        COMPUTE, row_size, copy_row, arguments, make_tile,
        columns_of_row(True), columns_of_group(LANES, False), lambda ROWS: make_tile(ROWS, 1),
        lambda depth: {}, _make_scaler(row_size),
    )  # fmt: skip


def _make_scaler(row_size: Callable) -> Callable:
    """Make ``scale_sums(product, block, memory, width, panel)`` for rows of `_make_row_tiles`."""
    LANES, copy_row = lanes_of(COMPUTE), make_copy_row(COMPUTE)

    @njit
    def scale_sums(product, block, memory, width, panel):
        rows, columns = block.row_stop - block.row_start, block.column_stop - block.column_start
        stride, size = product.scale_column_stride, row_size(product.depth)
        scales = shift(product.scale, block.column_start * stride)
        copy_row(memory.bias, scales, stride, columns, round_up(columns, LANES))
        for row in range(rows):
            scale = splat(load(memory.left, (row + 1) * size - LANES), LANES)
            sums = shift(memory.sums, row * width)
            for column in range(0, columns, LANES):
                factor = scale * load_vector(memory.bias, column, LANES)
                store(sums, column, load_vector(sums, column, LANES) * factor)

    return scale_sums


# -------------------------------------------------------------------------------------- many rows


def integer_argument_types(dtype: str, stored: str) -> tuple[Any, ...]:
    """The struct IntegerProduct of foo_ops/csrc/ops/linear/integer.h, and what else a kernel takes.

    The left matrix are bytes without a sign, and all other numbers of the output's dtype.
    """
    product, *others = quantized_argument_types(dtype, stored)
    numbers = Pointer(COMPUTE)
    fields = (
        *(product.fields | {"left": Pointer("uint8")}).items(),
        *(("cut_size", types.int64), ("padded_rows", types.int64)),
        *(("row_scales", numbers), ("row_sums", numbers)),
    )
    return Struct("IntegerProduct", fields), *others


def make_int8_product_kernel(dtype: str, finish: str = NOTHING) -> Kernel:
    """Make the kernel for any number of rows and 8-bit integers."""
    return _make_product_kernel(dtype, "int8", BYTE, finish)


def make_int4_product_kernel(dtype: str, finish: str = NOTHING) -> Kernel:
    """Make the kernel for any number of rows and 4-bit integers."""
    return _make_product_kernel(dtype, "uint8", INT4, finish)


def _make_product_kernel(dtype: str, stored: str, CODES: str, finish: str) -> Kernel:
    """Make the kernel that multiplies integer rows, in sections of the depth.

    The right matrix of a gate has the columns of both products, one product after the other.

    A panel of columns is packed as bytes, four steps of a column in 32 bits, and multiplied by all
    rows of the block. Sums of integers stay in registers for a cut, and are then added to sums of
    float32. A matrix unit takes cuts of whole registers, which groups of 32 are not.
    """
    LANES, on_unit, has_zeros = lanes_of(COMPUTE), use_matrix_unit(), CODES == INT4
    ROW_MULTIPLE = TILE_MULTIPLE if on_unit else REST
    WIDTH = TILE_MULTIPLE if on_unit else VECTORS * LANES
    PER_BYTE, PARTS = 8 // CODE_BITS[CODES], parts_of(finish)
    fill, write = make_fill(COMPUTE), make_writer(dtype, finish)
    pack_panel = _make_panel_packer(CODES, WIDTH)
    multiply_band, multiply_rest = (_make_band(CODES, ROWS, WIDTH) for ROWS in (BAND, REST))
    multiply_on_unit, begin_products, end_products = _make_unit_band(CODES, WIDTH)
    prefetch_share = make_share_prefetcher("uint8")
    as_quads, as_panel = pointer_to(UNSIGNED_QUADS), pointer_to(QUADS)

    @njit
    def sizes_of_block(product, block):
        rows = round_up(block.row_stop - block.row_start, ROW_MULTIPLE)
        columns = round_up(block.column_stop - block.column_start, WIDTH)
        section = product.left_row_stride
        return rows, columns, section // LANE_BYTES, section // SMALLEST_CUT

    def describe(rows: Any, columns: Any, quads: Any, cuts: Any) -> dict[str, Any]:
        return {
            "panel": WIDTH * quads,
            "scales": WIDTH * cuts,
            "first_sums": WIDTH * cuts,
            **({"codes": WIDTH // PER_BYTE * quads, "rests": WIDTH * cuts} if has_zeros else {}),
            **({"products": TILE_MULTIPLE * WIDTH} if on_unit else {}),
            "sums": PARTS * rows * columns,
            "bias": larger(rows, columns) + LANES,
            **describe_lines(COMPUTE, finish),
        }

    @njit
    def prefetch_next(product, block, start, part, column, share, shares):
        """Prefetch a share of the next panel into L2."""
        next_start, next_part, next_column = start, part, column + WIDTH
        if block.column_start + next_column >= block.column_stop:
            next_part, next_column = part + 1, 0
        if next_part == PARTS:
            next_start, next_part = start + product.left_row_stride, 0
        if next_start >= product.depth:
            return
        first = block.column_start + next_column
        count = min(product.left_row_stride, product.depth - next_start) // PER_BYTE
        place = (first + next_part * product.columns) * product.right_column_stride
        prefetch_share(
            shift(product.right, place + next_start // PER_BYTE), product.right_column_stride, 1,
            min(WIDTH, block.column_stop - first), count, share, shares,
        )  # fmt: skip

    @njit
    def add_panel(product, block, memory, sums, start, part, column, has_rests):
        """Add the products of a section and a panel, band by band."""
        section = product.left_row_stride
        rows, _, _, _ = sizes_of_block(product, block)
        first_row = start // section * product.padded_rows + block.row_start
        left, panel = shift(product.left, first_row * section), as_panel(address_of(memory.panel))
        quads = as_quads(address_of(left))
        if on_unit and product.cut_size % PADDING == 0:
            for row in range(0, rows, TILE_MULTIPLE):
                prefetch_next(
                    product, block, start, part, column,
                    row // TILE_MULTIPLE, rows // TILE_MULTIPLE,
                )  # fmt: skip
                multiply_on_unit(product, block, memory, sums, quads, panel, start, row, has_rests)
            return
        bands = rows // BAND
        for band in range(bands):
            prefetch_next(product, block, start, part, column, band, bands)
            multiply_band(product, block, memory, sums, quads, panel, start, band * BAND, has_rests)
        for row in range(bands * BAND, rows, REST):
            multiply_rest(product, block, memory, sums, quads, panel, start, row, has_rests)

    def compute_block(product, block, memory):
        (rows, columns, _, _), section = sizes_of_block(product, block), product.left_row_stride
        if product.depth == 0:
            fill(memory.sums, PARTS * rows * columns, 0.0)
        begin_products()
        for start in range(0, product.depth, section):
            for part in range(PARTS):
                first, before = block.column_start, part * product.columns
                for column in range(0, columns, WIDTH):
                    has_rests = pack_panel(
                        product, memory, start, before + first + column, before + block.column_stop
                    )
                    sums = shift(memory.sums, (part * columns + column) * rows)
                    add_panel(product, block, memory, sums, start, part, column, has_rests)
        end_products()
        write(product, block, memory, memory.sums, WIDTH, rows * WIDTH, rows * columns)

    layout = Scratch(COMPUTE, sizes_of_block, describe)
    return make_kernel_with_scratch(compute_block, layout, integer_argument_types(dtype, stored))


def _make_band(CODES: str, ROWS: int, WIDTH: int) -> Callable:
    """Make ``multiply_band(product, block, memory, sums, quads, panel, start, row, has_rests)``.

    It adds the products of ``ROWS`` rows and a panel.
    """
    LANES, add_products = lanes_of(COMPUTE), make_sum(UNROLLED)
    as_integers, subtract_rests = pointer_to("int32"), _make_rests(CODES, WIDTH)

    @njit
    def multiply_band(product, block, memory, sums, quads, panel, start, row, has_rests):
        stride, size = product.left_row_stride // LANE_BYTES, product.cut_size
        left, count = shift(quads, row * stride), count_of_section(product, start)
        factor = place_of_factors(product, block, start, row)
        scales, first_sums = (
            shift(product.row_scales, factor),
            as_integers(address_of(memory.first_sums)),
        )
        for column in range(0, WIDTH, VECTORS * LANES):
            target = shift(sums, row * WIDTH + column)
            result = tile_zero(target, ROWS, VECTORS, LANES)
            if start > 0:
                result = tile_load(target, WIDTH, ROWS, VECTORS, LANES)
            for cut in range((count + size - 1) // size):
                begin, place = cut * size // LANE_BYTES, cut * WIDTH + column
                total = add_products(
                    tile_load(shift(first_sums, place), 0, ROWS, VECTORS, LANES),
                    shift(left, begin), stride, 1, shift(panel, begin * WIDTH + column), WIDTH,
                    quads_of(min(size, count - cut * size), LANE_BYTES), None,
                )  # fmt: skip
                of_rows = shift(scales, cut * product.padded_rows)
                result = tile_add_scaled(result, total, of_rows, shift(memory.scales, place))
            if has_rests:
                result = subtract_rests(result, product, memory, factor, column, count)
            tile_store(result, target, WIDTH)

    return multiply_band


@njit
def is_rounded_again(product):
    """Whether weights of groups are rounded to bytes, since a section is a cut."""
    return product.group_size != 0 and product.group_size != product.cut_size


@njit
def count_of_section(product, start):
    """Return the number of steps of the section from ``start`` on."""
    return min(product.left_row_stride, product.depth - start)


@njit
def quads_of(steps, multiple):
    """Return the number of quads of some steps, padded to a multiple."""
    return round_up(steps, multiple) // LANE_BYTES


@njit
def place_of_factors(product, block, start, row):
    """Return the place of the scale and the sum of a block's row, for the cut from ``start`` on."""
    return start // product.cut_size * product.padded_rows + block.row_start + row


def _make_rests(CODES: str, WIDTH: int) -> Callable:
    """Make ``subtract_rests(result, product, memory, factor, column, count)``.

    It subtracts the products of a section's sums of rows and what is left of the columns' zeros,
    from a tile of sums. Only integers of 4 bits have zeros.
    """
    add_products = make_sum(1)

    @njit
    def subtract_nothing(result, product, memory, factor, column, count):
        return result

    @njit
    def subtract_rests(result, product, memory, factor, column, count):
        return add_products(
            result, shift(product.row_sums, factor), 1, product.padded_rows,
            shift(memory.rests, column), WIDTH, count // product.group_size, None,
        )  # fmt: skip

    return subtract_rests if CODES == INT4 else subtract_nothing


def _make_unit_band(CODES: str, WIDTH: int) -> tuple[Callable, Callable, Callable]:
    """Make ``multiply_on_unit``, like `_make_band` for TILE_MULTIPLE rows.

    Returns also ``begin()`` and ``end()`` for a kernel that calls it.
    """
    if not use_matrix_unit():
        return nothing, nothing, nothing
    LANES = lanes_of(COMPUTE)
    matmul, begin, end = make_amx_products_of_bytes("uint8", "int8")
    as_integers, subtract_rests = pointer_to("int32"), _make_rests(CODES, WIDTH)

    @njit
    def multiply_on_unit(product, block, memory, sums, quads, panel, start, row, has_rests):
        stride, size = product.left_row_stride // LANE_BYTES, product.cut_size
        left, count = shift(quads, row * stride), count_of_section(product, start)
        products = as_integers(address_of(memory.products))
        first_sums = as_integers(address_of(memory.first_sums))
        first_factor = place_of_factors(product, block, start, row)
        for cut in range((count + size - 1) // size):
            begin, steps = cut * size // LANE_BYTES, min(size, count - cut * size)
            matmul(
                products, WIDTH, (shift(left, begin), stride, GROUP, 0),
                (shift(panel, begin * WIDTH), WIDTH, 0), TILE_MULTIPLE, WIDTH,
                quads_of(steps, PADDING), False, True,
            )  # fmt: skip
            scales = shift(product.row_scales, first_factor + cut * product.padded_rows)
            for band in range(0, TILE_MULTIPLE, ROWS_OF_UNIT):
                for column in range(0, WIDTH, VECTORS * LANES):
                    place, target = cut * WIDTH + column, shift(sums, (row + band) * WIDTH + column)
                    total = tile_load(
                        shift(products, band * WIDTH + column), WIDTH, ROWS_OF_UNIT, VECTORS, LANES
                    )
                    total = tile_add(total, shift(first_sums, place), 0)
                    result = tile_zero(target, ROWS_OF_UNIT, VECTORS, LANES)
                    if start > 0 or cut > 0:
                        result = tile_load(target, WIDTH, ROWS_OF_UNIT, VECTORS, LANES)
                    result = tile_add_scaled(
                        result, total, shift(scales, band), shift(memory.scales, place)
                    )
                    tile_store(result, target, WIDTH)
        if not has_rests:
            return
        for band in range(0, TILE_MULTIPLE, ROWS_OF_UNIT):
            for column in range(0, WIDTH, VECTORS * LANES):
                target = shift(sums, (row + band) * WIDTH + column)
                result = tile_load(target, WIDTH, ROWS_OF_UNIT, VECTORS, LANES)
                result = subtract_rests(result, product, memory, first_factor + band, column, count)
                tile_store(result, target, WIDTH)

    return multiply_on_unit, begin, end


def _make_panel_packer(CODES: str, WIDTH: int) -> Callable:
    """Make ``pack_panel(product, memory, start, column, stop)``: a section of up to WIDTH columns.

    The scales of its cuts, the sums that their integers begin with, and the rests of zeros are
    packed, too; it returns whether any of these is not 0. Integers behind the last column or step
    may be any: their results are not written, or rows have zeros there.
    """
    LANES, PER_BYTE = lanes_of(COMPUTE), 8 // CODE_BITS[CODES]
    HAS_ZEROS, ON_UNIT, BYTES = CODES == INT4, use_matrix_unit(), LANE_BYTES * LANES
    as_bytes, as_quads, as_integers = pointer_to("int8"), pointer_to(QUADS), pointer_to("int32")
    number = ELEMENTS[COMPUTE].compute
    none, (lowest, highest) = number(0), map(number, RANGES[CODES])

    @njit
    def transpose_bytes(target, square, source, stride, columns, count):
        """Set target[quad, column] to four adjacent bytes of a column, for ``count`` bytes.

        Behind the last byte and the last column it reads nothing, and writes any number.
        """
        copied = as_bytes(address_of(square))
        for first in range(0, columns, LANES):
            some_columns = min(LANES, columns - first)
            for byte in range(0, count, BYTES):
                corner = shift(target, byte // LANE_BYTES * WIDTH + first)
                place, some = shift(source, first * stride + byte), min(BYTES, count - byte)
                if some_columns == LANES and some == BYTES:
                    transpose_adjacent(corner, WIDTH, place, stride, LANES)
                    continue
                for column in range(some_columns):
                    for index in range(some):
                        value = types.int8(load(place, column * stride + index))
                        store(copied, column * BYTES + index, value)
                transpose_adjacent(corner, WIDTH, copied, BYTES, LANES)

    @njit
    def transpose_numbers(target, square, source, stride, columns, count):
        """Set target[number, column] to a number of a column, and to 0 behind the last column."""
        for first in range(0, WIDTH, LANES):
            some_columns = max(0, min(LANES, columns - first))
            for number in range(0, count, LANES):
                for column in range(some_columns):
                    place = shift(source, (first + column) * stride)
                    some = load_first(place, number, min(LANES, count - number), LANES)
                    store(square, column * LANES, some)
                for column in range(some_columns, LANES):
                    store(square, column * LANES, splat(none, LANES))
                corner = shift(target, number * WIDTH + first)
                transpose_square(corner, WIDTH, square, LANES, LANES)

    @njit
    def pack_scales(product, memory, start, count, column, columns):
        has_groups = product.group_size != 0
        cuts, group = 1, 0
        if has_groups:
            cuts, group = count // product.group_size, start // product.group_size
        scales = shift(product.scale, column * product.scale_column_stride + group)
        transpose_numbers(
            memory.scales, memory.square, scales, product.scale_column_stride, columns, cuts
        )

    @njit
    def split_panel(memory, panel, cuts, size):
        """Split bytes into integers of 4 bits, from which the whole parts of zeros are subtracted.

        It returns whether any zero has a rest; rests times scales take the place of the zeros.
        """
        codes, half = as_quads(address_of(memory.codes)), size // PER_BYTE // LANE_BYTES
        largest = splat(types.int32(0), LANES)
        for cut in range(cuts):
            for column in range(0, WIDTH, LANES):
                place = cut * WIDTH + column
                integers, rests = split_zeros(load_vector(memory.rests, place, LANES))
                largest = larger_magnitudes(largest, rests)
                store(memory.rests, place, rests * load_vector(memory.scales, place, LANES))
                target = shift(panel, cut * half * PER_BYTE * WIDTH + column)
                for quad in range(half):
                    source = (cut * half + quad) * WIDTH + column
                    split_codes(shift(target, quad * WIDTH), half * WIDTH, codes, source, integers)
        return largest_lane(largest) != 0

    @njit
    def zeros_of(memory, place):
        return load_vector(memory.rests, place, LANES) if HAS_ZEROS else splat(none, LANES)

    @njit
    def largest_of_section(memory, groups, column):
        """Return the bits of the largest magnitudes that numbers of LANES columns may have."""
        found = splat(types.int32(0), LANES)
        for group in range(groups):
            place = group * WIDTH + column
            scale, zero = load_vector(memory.scales, place, LANES), zeros_of(memory, place)
            found = larger_magnitudes(found, scale * (splat(highest, LANES) - zero))
            found = larger_magnitudes(found, scale * (splat(lowest, LANES) - zero))
        return found

    @njit
    def round_again(memory, panel, codes, groups, size):
        """Round the numbers of a section's codes to bytes, with one scale for each column.

        These take the place of the first group's scales.
        """
        quads = size // PER_BYTE // LANE_BYTES
        for column in range(0, WIDTH, LANES):
            scale, inverse = scale_of_bytes(largest_of_section(memory, groups, column))
            for group in range(groups):
                place = group * WIDTH + column
                factor = load_vector(memory.scales, place, LANES) * inverse
                zero, first = zeros_of(memory, place), group * quads * WIDTH + column
                target = shift(panel, group * PER_BYTE * quads * WIDTH + column)
                for quad in range(quads):
                    some = load_vector(codes, first + quad * WIDTH, LANES)
                    round_codes(
                        shift(target, quad * WIDTH), quads * WIDTH, some, zero, factor, CODES
                    )
            store(memory.scales, column, scale)

    @njit
    def begin_sums(product, memory, panel, count):
        size = product.cut_size
        multiple = PADDING if ON_UNIT and size % PADDING == 0 else LANE_BYTES
        first_sums = as_integers(address_of(memory.first_sums))
        for cut in range((count + size - 1) // size):
            begin = cut * size // LANE_BYTES
            quads = quads_of(min(size, count - cut * size), multiple)
            for column in range(0, WIDTH, LANES):
                total = splat(types.int32(0), LANES)
                for quad in range(begin, begin + quads):
                    total = subtract_offsets(total, panel, quad * WIDTH + column)
                store(first_sums, cut * WIDTH + column, total)

    @njit
    def pack_integers(product, memory, panel, start, count, column, columns):
        """Pack the integers of a section, and return whether zeros have rests."""
        stride = product.right_column_stride
        source = shift(product.right, column * stride + start // PER_BYTE)
        size = product.group_size
        if not HAS_ZEROS:
            transpose_bytes(panel, memory.square, source, stride, columns, count)
            if is_rounded_again(product):
                round_again(memory, panel, panel, count // size, size)
            return False
        zeros = shift(product.zero, column * product.zero_column_stride + start // size)
        transpose_numbers(
            memory.rests, memory.square, zeros, product.zero_column_stride, columns, count // size
        )
        codes = as_quads(address_of(memory.codes))
        transpose_bytes(codes, memory.square, source, stride, columns, count // PER_BYTE)
        if is_rounded_again(product):
            round_again(memory, panel, codes, count // size, size)
            return False
        return split_panel(memory, panel, count // size, size)

    @njit
    def pack_panel(product, memory, start, column, stop):
        count, columns = count_of_section(product, start), min(WIDTH, stop - column)
        panel = as_quads(address_of(memory.panel))
        pack_scales(product, memory, start, count, column, columns)
        has_rests = pack_integers(product, memory, panel, start, count, column, columns)
        begin_sums(product, memory, panel, count)
        return has_rests

    return pack_panel
