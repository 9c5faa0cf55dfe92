"""Kernels that repack the weights of files for foo's kernels, each in one pass.

Chains of PyTorch's operators take several times as long, since each reads and writes all weights.
They are operators of their own namespace, ``foo_files``, which are no part of the package's
interface: their callers have checked the layout of the tensors.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foo_ops import language, library
from foo_ops.ops.dequantize import as_float32

# --------------------------------------------------------------------------- words of eight nibbles

LOWER = 0x0F0F0F0F
"""The lower nibble of each byte of a word."""
ROWS, COLUMNS = 128, 16
"""Rows or columns of adjacent words that a tile has: whole cache lines."""

library.define("foo_files::pack_rows", "(Tensor words, int group_size) -> Tensor")
library.define(
    "foo_files::pack_rows_in_order", "(Tensor words, Tensor order, int group_size) -> Tensor"
)
library.define("foo_files::pack_transposed", "(Tensor words, int group_size) -> Tensor")
library.define("foo_files::pack_columns", "(Tensor words, int group_size) -> Tensor")


def pack_rows(words: Tensor, group_size: int, order: Tensor | None = None) -> Tensor:
    """Repack (N, K / 8) int32, nibbles of adjacent inputs, as `foo_ops.quantize_weight` does.

    Args:
        words: with any strides; the first nibble of a word is the lowest.
        group_size: 32, 64 or 128.
        order: (K,) int64, the input for each column of the result; None for the same.

    Returns:
        (N, K / 2) uint8.
    """
    if order is not None:
        packed = torch.ops.foo_files.pack_rows_in_order(words, order, group_size)
    elif words.stride(0) == 1:
        packed = torch.ops.foo_files.pack_transposed(words.t(), group_size)
    else:
        packed = torch.ops.foo_files.pack_rows(words, group_size)
    return packed.view(torch.uint8)


def pack_columns(words: Tensor, group_size: int) -> Tensor:
    """Repack (K, N / 8) int32, nibbles of adjacent outputs in AWQ's order, likewise."""
    packed = torch.ops.foo_files.pack_columns(words, group_size)
    return packed.view(torch.uint8)


@library.register_fake("foo_files::pack_rows")
def pack_rows_fake(words: Tensor, group_size: int) -> Tensor:
    return words.new_empty((words.shape[0], words.shape[1] // 2), dtype=torch.int64)


@library.register_fake("foo_files::pack_transposed")
def pack_transposed_fake(words: Tensor, group_size: int) -> Tensor:
    return words.new_empty((words.shape[1], words.shape[0] // 2), dtype=torch.int64)


@library.register_fake("foo_files::pack_rows_in_order")
def pack_rows_in_order_fake(words: Tensor, order: Tensor, group_size: int) -> Tensor:
    return words.new_empty((words.shape[0], words.shape[1] // 2), dtype=torch.int64)


@library.register_fake("foo_files::pack_columns")
def pack_columns_fake(words: Tensor, group_size: int) -> Tensor:
    return words.new_empty((8 * words.shape[1], words.shape[0] // 16), dtype=torch.int64)


def spread(bytes: Any) -> Any:
    """Move the four bytes of a word to the even bytes of 64 bits."""
    pairs = (bytes | bytes << 16) & 0x0000FFFF0000FFFF
    return (pairs | pairs << 8) & 0x00FF00FF00FF00FF


def even_nibbles(lower: Any, upper: Any) -> Any:
    """Pair the even nibbles of two words, each in the lower half of a byte with one above it."""
    return lower & LOWER | (upper & LOWER) << 4


def odd_nibbles(lower: Any, upper: Any) -> Any:
    return lower >> 4 & LOWER | upper & LOWER << 4


def packed_word(lower: Any, upper: Any) -> Any:
    """Pair the nibbles of two words in order."""
    return spread(even_nibbles(lower, upper)) | spread(odd_nibbles(lower, upper)) << 8


@library.register_kernel("foo_files::pack_rows", ("cpu", "foo"))
@library.tile_kernel(contiguous_rows=True)
def pack_rows_kernel(words: Any, group_size: Any, packed: Any, rows: Any) -> None:
    half = group_size // 16
    for row in rows:
        source, target = words.row(row), packed.row(row)
        for start in range(0, packed.shape[1], half):
            for place in range(start, start + half):
                target[place] = packed_word(source[start + place], source[start + place + half])


@library.register_kernel("foo_files::pack_transposed", ("cpu", "foo"))
@library.tile_kernel(tiles=lambda words: (words.shape[1] + ROWS - 1) // ROWS, contiguous_rows=True)
def pack_transposed_kernel(words: Any, group_size: Any, packed: Any, tiles: Any) -> None:
    half = group_size // 16
    for tile in tiles:
        first, last = tile * ROWS, min((tile + 1) * ROWS, words.shape[1])
        for start in range(0, packed.shape[1], half):
            for place in range(start, start + half):
                lower, upper = words.row(start + place), words.row(start + place + half)
                for row in range(first, last):
                    packed[row, place] = packed_word(lower[row], upper[row])


def nibble(words: Any, row: Any, column: Any) -> Any:
    return words[row, column >> 3] >> 4 * (column & 7) & 15


@library.register_kernel("foo_files::pack_rows_in_order", ("cpu", "foo"))
@library.tile_kernel(tiles=lambda words: (words.shape[0] + COLUMNS - 1) // COLUMNS)
def pack_rows_in_order_kernel(
    words: Any, order: Any, group_size: Any, packed: Any, tiles: Any
) -> None:
    half = group_size // 2
    for tile in tiles:
        for start in range(0, 8 * packed.shape[1], half):
            for first in range(start, start + half, 8):
                for row in range(tile * COLUMNS, min((tile + 1) * COLUMNS, words.shape[0])):
                    total = 0
                    for byte in range(8):
                        lower = nibble(words, row, order[start + first + byte])
                        upper = nibble(words, row, order[start + first + half + byte])
                        total |= (lower | upper << 4) << 8 * byte
                    packed[row, first // 8] = total


def paired(words: Any, row: Any, half: Any, column: Any) -> Any:
    """Pair the nibbles of two inputs and, in the upper half of 64 bits, of the fourth ones after.

    Returns:
        The bytes of the even nibbles, and those of the odd ones.
    """
    lower, upper = words[row, column], words[row + half, column]
    fourth, above = words[row + 4, column], words[row + 4 + half, column]
    even = even_nibbles(lower, upper) | even_nibbles(fourth, above) << 32
    return even, odd_nibbles(lower, upper) | odd_nibbles(fourth, above) << 32


BYTES, PAIRS = 0x00FF00FF00FF00FF, 0x0000FFFF0000FFFF
"""Every other byte of 64 bits, and every other pair of bytes."""


def transposed(first: Any, second: Any, third: Any, fourth: Any) -> Any:
    """Transpose the bytes of four words of 64 bits, in each half by itself."""
    upper_even = first & BYTES | (second & BYTES) << 8
    upper_odd = first >> 8 & BYTES | second & ~BYTES
    lower_even = third & BYTES | (fourth & BYTES) << 8
    lower_odd = third >> 8 & BYTES | fourth & ~BYTES
    return (
        upper_even & PAIRS | (lower_even & PAIRS) << 16,
        upper_odd & PAIRS | (lower_odd & PAIRS) << 16,
        upper_even >> 16 & PAIRS | lower_even & ~PAIRS,
        upper_odd >> 16 & PAIRS | lower_odd & ~PAIRS,
    )


@library.register_kernel("foo_files::pack_columns", ("cpu", "foo"))
@library.tile_kernel(
    tiles=lambda words: (words.shape[1] + COLUMNS - 1) // COLUMNS,
    contiguous_rows=True,
    # Outputs are copied by groups, so that whole cache lines are written.
    scratch={"outputs": library.scratch(8, 8 * COLUMNS, like="packed")},
)
def pack_columns_kernel(words: Any, group_size: Any, packed: Any, outputs: Any, tiles: Any) -> None:
    half = group_size // 2
    for tile in tiles:
        first_column = tile * COLUMNS
        columns = min(COLUMNS, words.shape[1] - first_column)
        for group in range(8 * packed.shape[1] // half):
            for place in range(half // 8):
                row, target = group * group_size + 8 * place, outputs.row(place)
                for index in range(columns):
                    column, start = first_column + index, 8 * index
                    even_0, odd_0 = paired(words, row, half, column)
                    even_1, odd_1 = paired(words, row + 1, half, column)
                    even_2, odd_2 = paired(words, row + 2, half, column)
                    even_3, odd_3 = paired(words, row + 3, half, column)
                    # Nibbles of a word are outputs 0, 2, 4, 6, 1, 3, 5 and 7.
                    bytes = transposed(even_0, even_1, even_2, even_3)
                    target[start], target[start + 4] = bytes[0], bytes[1]
                    target[start + 1], target[start + 5] = bytes[2], bytes[3]
                    bytes = transposed(odd_0, odd_1, odd_2, odd_3)
                    target[start + 2], target[start + 6] = bytes[0], bytes[1]
                    target[start + 3], target[start + 7] = bytes[2], bytes[3]
            for output in range(8 * columns):
                to = packed.row(8 * first_column + output)
                for place in range(half // 8):
                    to[group * half // 8 + place] = outputs[place, output]


# ---------------------------------------------------------------------------------- blocks of GGUF

# A block of K-quants has 8 groups of 32 weights; one of Q4_0 and Q8_0 has one. Integers and scales
# are written into tensors of the whole matrix, of which a call has some rows.

library.define(
    "foo_files::read_groups", "(Tensor blocks, Tensor(a!) integers, Tensor(b!) scale) -> ()"
)
library.define(
    "foo_files::read_q4_k",
    "(Tensor blocks, Tensor(a!) integers, Tensor(b!) scale, Tensor(c!) zero) -> ()",
)
library.define("foo_files::pair_codes", "(Tensor blocks, int start, Tensor(a!) codes) -> ()")
for kind in ("q5_k", "q6_k"):
    library.define(
        f"foo_files::read_{kind}",
        "(Tensor blocks, Tensor(a!) integers, Tensor(b!) scale, float spacing, float smallest) "
        "-> ()",
    )
GROUPS = 8
"""Groups of 32 weights in a block."""
GROUP_SIZE = 32


def read_groups(blocks: Tensor, integers: Tensor, scale: Tensor) -> None:
    """Copy integers and scales of Q4_0 or Q8_0.

    Args:
        blocks: (N, G, 18 or 34) uint8.
        integers: (N, G * 16) uint8, or (N, G * 32) int8.
        scale: (N, G), float16, bfloat16, float32 or float64.
    """
    torch.ops.foo_files.read_groups(blocks, integers.view(torch.uint8), scale)


def read_q4_k(blocks: Tensor, integers: Tensor, scale: Tensor, zero: Tensor) -> None:
    """Write integers of 4 bits, scales and zeros.

    Args:
        blocks: (N, B, 144) uint8.
        integers: (N, B * 128) uint8.
        scale, zero: (N, B * 8), as for `read_groups`.
    """
    torch.ops.foo_files.read_q4_k(blocks, integers, scale, zero)


def read_q5_k(blocks: Tensor, integers: Tensor, scale: Tensor) -> None:
    """Write the nearest integers of 8 bits, and scales, as `foo_ops.quantize_weight` does.

    Args:
        blocks: (N, B, 176) uint8.
        integers: (N, B * 256) int8.
        scale: (N, B * 8), as for `read_groups`.
    """
    torch.ops.foo_files.read_q5_k(blocks, integers, scale, *limits_of(scale.dtype))


def read_q6_k(blocks: Tensor, integers: Tensor, scale: Tensor) -> None:
    """Write the nearest integers of 8 bits from blocks (N, B, 210), as `read_q5_k`."""
    torch.ops.foo_files.read_q6_k(blocks, integers, scale, *limits_of(scale.dtype))


def pair_codes(blocks: Tensor, start: int, codes: Tensor) -> None:
    """Write codes of 4 bits so that adjacent weights share a byte, the first in the lower bits.

    Args:
        blocks: (N, B, bytes) uint8, with 16 bytes for 32 weights: the lower bits have the first 16.
        start: the first byte of a block with codes, which are its last bytes.
        codes: (N, K / 2) uint8.
    """
    torch.ops.foo_files.pair_codes(blocks, start, codes)


def limits_of(dtype: torch.dtype) -> tuple[float, float]:
    """Return the relative spacing of numbers, and the smallest one."""
    info = torch.finfo(dtype)
    return info.eps, info.smallest_normal * info.eps


@library.register_fake("foo_files::read_groups")
@library.register_fake("foo_files::read_q4_k")
@library.register_fake("foo_files::read_q5_k")
@library.register_fake("foo_files::read_q6_k")
@library.register_fake("foo_files::pair_codes")
def read_fake(*arguments: Any) -> None:
    """Return nothing."""


def half_at(block: Any, place: Any) -> Any:
    """Return the float16 at a byte as float32: not all processors convert them."""
    bits = block[place] | block[place + 1] << 8
    exponent, fraction = bits >> 10 & 31, bits & 1023
    if exponent == 31:
        magnitude = np.float32(math.nan if fraction else math.inf)
    elif exponent == 0:
        magnitude = as_float32(fraction) * np.float32(2.0**-24)
    else:
        magnitude = as_float32(fraction + 1024) * as_float32(1 << exponent) * np.float32(2.0**-25)
    return -magnitude if bits >> 15 else magnitude


@library.register_kernel("foo_files::read_groups", ("cpu", "foo"))
@library.tile_kernel(contiguous_rows=True, tiles=lambda blocks: blocks.shape[0])
def read_groups_kernel(blocks: Any, integers: Any, scale: Any, rows: Any) -> None:
    size = blocks.shape[2] - 2
    for row in rows:
        target, scales = integers.row(row), scale.row(row)
        for group in range(blocks.shape[1]):
            block = blocks.row(row * blocks.shape[1] + group)
            scales[group] = half_at(block, 0)
            # LLVM copies a vector where the number of steps is a constant.
            if size == 16:
                for byte in range(16):
                    target[16 * group + byte] = block[2 + byte]
            else:
                for byte in range(32):
                    target[32 * group + byte] = block[2 + byte]


def factors_of_group(block: Any, factor: Any, factor_of_minimum: Any, group: Any) -> Any:
    """Return the scale and the minimum of a group of Q4_K or Q5_K.

    They are integers of 6 bits, times a factor each. The last 4 groups have 4 bits in the last 4
    bytes, and their upper 2 bits above the integers of the first 4 groups.
    """
    if group < 4:
        scale, minimum = block[group + 4] & 63, block[group + 8] & 63
    else:
        scale = block[group + 8] & 15 | block[group] >> 6 << 4
        minimum = block[group + 8] >> 4 | block[group + 4] >> 6 << 4
    return factor * as_float32(scale), factor_of_minimum * as_float32(minimum)


@library.register_kernel("foo_files::read_q4_k", ("cpu", "foo"))
@library.tile_kernel(contiguous_rows=True, tiles=lambda blocks: blocks.shape[0])
def read_q4_k_kernel(blocks: Any, packed: Any, scales: Any, zeros: Any, rows: Any) -> None:
    for row in rows:
        integers, scale, zero = packed.row(row), scales.row(row), zeros.row(row)
        for place in range(blocks.shape[1]):
            block = blocks.row(row * blocks.shape[1] + place)
            own_factors = half_at(block, 0), half_at(block, 2)
            for group in range(GROUPS):
                index = GROUPS * place + group
                start, source = 16 * index, 16 + group // 2 * 32
                # With shifts by constants, LLVM computes on vectors of bytes.
                if group % 2 == 0:
                    for byte in range(16):
                        lower, upper = block[source + byte], block[source + 16 + byte]
                        integers[start + byte] = lower & 15 | (upper & 15) << 4
                else:
                    for byte in range(16):
                        lower, upper = block[source + byte], block[source + 16 + byte]
                        integers[start + byte] = lower >> 4 | upper & 240
                factor, minimum = factors_of_group(block, *own_factors, group)
                scale[index] = factor
                zero[index] = minimum / scale[index]
                if not math.isfinite(zero[index]):
                    # Equal weights have no scale, and one by which dtype cannot divide is far below
                    # the minimum.
                    scale[index] = minimum if minimum != 0 else 1
                    zero[index] = minimum != 0
                    for byte in range(16):
                        integers[start + byte] = 0


@library.register_kernel("foo_files::pair_codes", ("cpu", "foo"))
@library.tile_kernel(contiguous_rows=True, tiles=lambda blocks: blocks.shape[0])
def pair_codes_kernel(blocks: Any, start: Any, codes: Any, rows: Any) -> None:
    groups = (blocks.shape[2] - start) // 16
    for row in rows:
        target = codes.row(row)
        for place in range(blocks.shape[1]):
            block = blocks.row(row * blocks.shape[1] + place)
            for group in range(groups):
                source, index = start + 16 * group, 16 * (groups * place + group)
                for byte in range(8):
                    first, second = block[source + 2 * byte], block[source + 2 * byte + 1]
                    target[index + byte] = first & 15 | (second & 15) << 4
                    target[index + 8 + byte] = first >> 4 | second & 240


def write_scale(scale: Any, index: Any, highest: Any, spacing: Any, smallest: Any) -> Any:
    """Write the scale of a group's integers of 8 bits, and return it as it was rounded.

    It is rounded up, so that no integer is too large. A choice of values instead of branches lets
    the processor work on several groups at once.
    """
    exact = highest / np.float32(127)
    scale[index] = exact
    step = np.float32(scale[index])
    above = step * (np.float32(1) + np.float32(spacing)) + np.float32(smallest)
    scale[index] = np.float32(1) if highest == 0 else (above if step < exact else step)
    return np.float32(scale[index])


def rounded(weight: Any, step: Any) -> Any:
    """Return the nearest integer of a weight in units of a scale.

    Positive numbers are rounded as they are converted, without a function that not all processors
    have.
    """
    return np.int8(np.int32(weight / step + np.float32(128.5)) - 128)


@library.register_kernel("foo_files::read_q5_k", ("cpu", "foo"))
@library.tile_kernel(contiguous_rows=True, tiles=lambda blocks: blocks.shape[0])
def read_q5_k_kernel(
    blocks: Any, signed: Any, scales: Any, spacing: Any, smallest: Any, rows: Any
) -> None:
    for row in rows:
        integers, scale = signed.row(row), scales.row(row)
        for place in range(blocks.shape[1]):
            block = blocks.row(row * blocks.shape[1] + place)
            own_factors = half_at(block, 0), half_at(block, 2)
            for group in range(GROUPS):
                index = GROUPS * place + group
                source, bit, start = 48 + group // 2 * 32, 1 << group, GROUP_SIZE * index
                for it in range(GROUP_SIZE):
                    byte = block[source + it]
                    lower = byte & 15 if group % 2 == 0 else byte >> 4
                    integers[start + it] = lower + (16 if block[16 + it] & bit else 0)
                lowest, largest = np.int32(31), np.int32(0)
                for it in range(GROUP_SIZE):
                    integer = np.int32(integers[start + it])
                    lowest = integer if integer < lowest else lowest
                    largest = integer if integer > largest else largest
                factor, minimum = factors_of_group(block, *own_factors, group)
                highest = language.accumulate_maximum(
                    abs(factor * as_float32(largest) - minimum),
                    abs(factor * as_float32(lowest) - minimum),
                )
                step = write_scale(scale, index, highest, spacing, smallest)
                for it in range(GROUP_SIZE):
                    weight = factor * as_float32(integers[start + it]) - minimum
                    integers[start + it] = rounded(weight, step)


@library.register_kernel("foo_files::read_q6_k", ("cpu", "foo"))
@library.tile_kernel(contiguous_rows=True, tiles=lambda blocks: blocks.shape[0])
def read_q6_k_kernel(
    blocks: Any, signed: Any, scales: Any, spacing: Any, smallest: Any, rows: Any
) -> None:
    for row in rows:
        integers, scale = signed.row(row), scales.row(row)
        for place in range(blocks.shape[1]):
            block = blocks.row(row * blocks.shape[1] + place)
            for part in range(2):
                low, high, start = 64 * part, 128 + 32 * part, 256 * place + 128 * part
                for it in range(32):
                    first, second, bits = block[low + it], block[low + 32 + it], block[high + it]
                    integers[start + it] = (first & 15 | (bits & 3) << 4) - 32
                    integers[start + 32 + it] = (second & 15 | (bits & 12) << 2) - 32
                    integers[start + 64 + it] = (first >> 4 | bits & 48) - 32
                    integers[start + 96 + it] = (second >> 4 | bits >> 2 & 48) - 32
            factor = half_at(block, 208)
            for group in range(GROUPS):
                index = GROUPS * place + group
                start = GROUP_SIZE * index
                # Signed, and shared by 16 weights.
                first = factor * as_float32((block[192 + 2 * group] ^ 128) - 128)
                second = factor * as_float32((block[193 + 2 * group] ^ 128) - 128)
                highest = language.accumulate_maximum(
                    abs(first) * as_float32(largest_of(integers, start)),
                    abs(second) * as_float32(largest_of(integers, start + 16)),
                )
                step = write_scale(scale, index, highest, spacing, smallest)
                for it in range(16):
                    weight = first * as_float32(integers[start + it])
                    integers[start + it] = rounded(weight, step)
                for it in range(start + 16, start + 32):
                    integers[it] = rounded(second * as_float32(integers[it]), step)


def largest_of(integers: Any, start: Any) -> Any:
    """Return the largest magnitude of 16 integers."""
    largest = np.int32(0)
    for it in range(16):
        magnitude = np.int32(abs(np.int32(integers[start + it])))
        largest = magnitude if magnitude > largest else largest
    return largest


# ------------------------------------------------------------------------------- tables of numbers

library.define(
    "foo_files::read_codes",
    "(Tensor codes, Tensor table, Tensor factors, ScalarType dtype, float spacing, float smallest) "
    "-> (Tensor, Tensor)",
)


def read_codes(
    codes: Tensor, table: Tensor, factors: Tensor, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return the nearest integers of 8 bits, and scales for 32 weights, as `read_q5_k`.

    Args:
        codes: (N, K / 2) uint8, two in a byte, the first one in the upper bits.
        table: (16,) float32, the number of each code.
        factors: (N, B) float32, for each block of K / B weights, a multiple of 32.
        dtype: of scales.
    """
    found: tuple[Tensor, ...] = torch.ops.foo_files.read_codes(
        codes, table, factors, dtype, *limits_of(dtype)
    )
    return found


@library.register_fake("foo_files::read_codes")
def read_codes_fake(
    codes: Tensor,
    table: Tensor,
    factors: Tensor,
    dtype: torch.dtype,
    spacing: float,
    smallest: float,
) -> tuple[Tensor, ...]:
    rows, half = codes.shape
    integers = codes.new_empty((rows, 2 * half), dtype=torch.int8)
    return integers, codes.new_empty((rows, 2 * half // GROUP_SIZE), dtype=dtype)


@library.register_kernel("foo_files::read_codes", ("cpu", "foo"))
@library.tile_kernel(
    contiguous_rows=True,
    tiles=lambda codes: codes.shape[0],
    scratch={"weights": library.scratch(GROUP_SIZE, like="table")},
)
def read_codes_kernel(
    codes: Any, table: Any, factors: Any, dtype: Any, spacing: Any, smallest: Any,
    signed: Any, scales: Any, weights: Any, rows: Any,
) -> None:  # fmt: skip
    half, numbers = GROUP_SIZE // 2, table.row(0)
    for row in rows:
        integers, scale, group_weights = signed.row(row), scales.row(row), weights.row(0)
        pairs, factor_of_block = codes.row(row), factors.row(row)
        groups = scales.shape[1] // factors.shape[1]
        for index in range(scales.shape[1]):
            factor = factor_of_block[index // groups]
            for byte in range(half):
                pair = pairs[half * index + byte]
                group_weights[2 * byte] = factor * numbers[pair >> 4]
                group_weights[2 * byte + 1] = factor * numbers[pair & 15]
            highest = language.zero(weights)
            for it in range(GROUP_SIZE):
                highest = language.accumulate_maximum(highest, abs(group_weights[it]))
            step = write_scale(scale, index, highest, spacing, smallest)
            for it in range(GROUP_SIZE):
                integers[GROUP_SIZE * index + it] = rounded(group_weights[it], step)
