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


def packed_word(lower: Any, upper: Any) -> Any:
    """Pair the nibbles of two words, each in the lower half of a byte with one above it."""
    even = lower & LOWER | (upper & LOWER) << 4
    odd = lower >> 4 & LOWER | upper & LOWER << 4
    return spread(even) | spread(odd) << 8


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


@library.register_kernel("foo_files::pack_columns", ("cpu", "foo"))
@library.tile_kernel(
    tiles=lambda words: (words.shape[1] + COLUMNS - 1) // COLUMNS, contiguous_rows=True
)
def pack_columns_kernel(words: Any, group_size: Any, packed: Any, tiles: Any) -> None:
    half = group_size // 2
    for tile in tiles:
        for start in range(0, 8 * packed.shape[1], half):
            for first in range(start, start + half, 8):
                for output in range(8):
                    # Nibbles of a word are outputs 0, 2, 4, 6, 1, 3, 5 and 7.
                    bits = 4 * (output // 2 + output % 2 * 4)
                    for column in range(tile * COLUMNS, min((tile + 1) * COLUMNS, words.shape[1])):
                        total = 0
                        for byte in range(8):
                            lower = words[start + first + byte, column] >> bits & 15
                            upper = words[start + first + half + byte, column] >> bits & 15
                            total |= (lower | upper << 4) << 8 * byte
                        packed[8 * column + output, first // 8] = total


# ---------------------------------------------------------------------------------- blocks of GGUF

# A block of these kinds has 8 groups of 32 weights. `halves` has its numbers of float16,
# which not all processors convert, in float32.

library.define(
    "foo_files::read_q4_k",
    "(Tensor blocks, Tensor halves, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
)
for kind in ("q5_k", "q6_k"):
    library.define(
        f"foo_files::read_{kind}",
        "(Tensor blocks, Tensor halves, ScalarType dtype, float spacing, float smallest) "
        "-> (Tensor, Tensor)",
    )
GROUPS = 8
"""Groups of 32 weights in a block."""
GROUP_SIZE = 32


def read_q4_k(blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return integers of 4 bits, scales and zeros.

    Args:
        blocks: (N, blocks in a row, 144) uint8.
        dtype: of scales and zeros.
    """
    halves = blocks.view(torch.float16)[..., :2].float()
    found: tuple[Tensor, ...] = torch.ops.foo_files.read_q4_k(blocks, halves, dtype)
    return found


def read_rounded(kind: str, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the nearest integers of 8 bits, and scales, as `foo_ops.quantize_weight` does.

    Args:
        kind: q5_k or q6_k.
        blocks: (N, blocks in a row, 176 or 210) uint8.
        dtype: of scales.
    """
    halves, read = blocks.view(torch.float16), getattr(torch.ops.foo_files, f"read_{kind}")
    halves = (halves[..., :2] if kind == "q5_k" else halves[..., -1:]).float()
    found: tuple[Tensor, ...] = read(blocks, halves, dtype, *limits_of(dtype))
    return found


def limits_of(dtype: torch.dtype) -> tuple[float, float]:
    """Return the relative spacing of numbers, and the smallest one."""
    info = torch.finfo(dtype)
    return info.eps, info.smallest_normal * info.eps


@library.register_fake("foo_files::read_q4_k")
def read_q4_k_fake(blocks: Tensor, halves: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    rows, count, _ = blocks.shape
    scale = blocks.new_empty((rows, GROUPS * count), dtype=dtype)
    return blocks.new_empty((rows, 128 * count)), scale, torch.empty_like(scale)


@library.register_fake("foo_files::read_q5_k")
@library.register_fake("foo_files::read_q6_k")
def read_rounded_fake(
    blocks: Tensor,
    halves: Tensor,
    dtype: torch.dtype,
    spacing: float,
    smallest: float,
) -> tuple[Tensor, ...]:
    rows, count, _ = blocks.shape
    integers = blocks.new_empty((rows, 256 * count), dtype=torch.int8)
    return integers, blocks.new_empty((rows, GROUPS * count), dtype=dtype)


def as_float32(integer: Any) -> Any:
    """Convert a small integer: vectors have no fast conversion from 64 bits."""
    return np.float32(np.int32(integer))


def masked(byte: Any, mask: Any, factor: Any) -> Any:
    """Return some bits of a byte as a number.

    Vectors multiply numbers faster than they shift integers of 64 bits.
    """
    return as_float32(byte & mask) * factor


def factors_of_group(block: Any, halves: Any, group: Any) -> Any:
    """Return the scale and the minimum of a group of Q4_K or Q5_K.

    They are integers of 6 bits, times a float16 each. The last 4 groups have 4 bits in the last 4
    bytes, and their upper 2 bits above the integers of the first 4 groups.
    """
    if group < 4:
        scale, minimum = block[group + 4] & 63, block[group + 8] & 63
    else:
        scale = block[group + 8] & 15 | block[group] >> 6 << 4
        minimum = block[group + 8] >> 4 | block[group + 4] >> 6 << 4
    return halves[0] * as_float32(scale), halves[1] * as_float32(minimum)


@library.register_kernel("foo_files::read_q4_k", ("cpu", "foo"))
@library.tile_kernel(contiguous_rows=True, tiles=lambda blocks: blocks.shape[0])
def read_q4_k_kernel(
    blocks: Any, halves: Any, dtype: Any, packed: Any, scales: Any, zeros: Any, rows: Any
) -> None:
    for row in rows:
        integers, scale, zero = packed.row(row), scales.row(row), zeros.row(row)
        for place in range(blocks.shape[1]):
            block = blocks.row(row * blocks.shape[1] + place)
            numbers = halves.row(row * blocks.shape[1] + place)
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
                factor, minimum = factors_of_group(block, numbers, group)
                scale[index] = factor
                zero[index] = minimum / scale[index]
                if not math.isfinite(zero[index]):
                    # Equal weights have no scale, and one by which dtype cannot divide is far below
                    # the minimum.
                    scale[index] = minimum if minimum != 0 else 1
                    zero[index] = minimum != 0
                    for byte in range(16):
                        integers[start + byte] = 0


def round_group(
    weights: Any, integers: Any, scale: Any, index: Any, spacing: Any, smallest: Any
) -> None:
    """Round the 32 weights of a group to 8 bits."""
    highest = language.zero(weights)
    for place in range(32):
        highest = language.accumulate_maximum(highest, abs(weights[place]))
    exact, one = highest / np.float32(127), np.float32(1)
    scale[index] = exact
    step = np.float32(scale[index])
    # Rounded up, so that no integer is too large.
    if step < exact:
        scale[index] = step * (one + spacing) + smallest
    if highest == 0:
        scale[index] = one
    step, start = np.float32(scale[index]), 32 * index
    # Positive numbers are rounded as they are converted, without a function that not all processors
    # have.
    above = np.float32(128.5)
    for place in range(32):
        integers[start + place] = np.int8(np.int32(weights[place] / step + above) - 128)


ROW = {"weights": library.scratch(32, like="halves")}


@library.register_kernel("foo_files::read_q5_k", ("cpu", "foo"))
@library.tile_kernel(contiguous_rows=True, tiles=lambda blocks: blocks.shape[0], scratch=ROW)
def read_q5_k_kernel(
    blocks: Any, halves: Any, dtype: Any, spacing: Any, smallest: Any,
    rounded: Any, scales: Any, weights: Any, rows: Any,
) -> None:  # fmt: skip
    spacing, smallest = np.float32(spacing), np.float32(smallest)
    for row in rows:
        integers, scale, group_weights = rounded.row(row), scales.row(row), weights.row(0)
        for place in range(blocks.shape[1]):
            block = blocks.row(row * blocks.shape[1] + place)
            numbers = halves.row(row * blocks.shape[1] + place)
            for group in range(GROUPS):
                factor, minimum = factors_of_group(block, numbers, group)
                source, bits, bit = 48 + group // 2 * 32, group % 2 * 4, 1 << group
                of_lower = as_float32(1) / as_float32(1 << bits)
                of_upper = as_float32(16) / as_float32(bit)
                for it in range(32):
                    lower = masked(block[source + it], 15 << bits, of_lower)
                    upper = masked(block[16 + it], bit, of_upper)
                    group_weights[it] = factor * (lower + upper) - minimum
                index = GROUPS * place + group
                round_group(group_weights, integers, scale, index, spacing, smallest)


@library.register_kernel("foo_files::read_q6_k", ("cpu", "foo"))
@library.tile_kernel(contiguous_rows=True, tiles=lambda blocks: blocks.shape[0], scratch=ROW)
def read_q6_k_kernel(
    blocks: Any, halves: Any, dtype: Any, spacing: Any, smallest: Any,
    rounded: Any, scales: Any, weights: Any, rows: Any,
) -> None:  # fmt: skip
    spacing, smallest = np.float32(spacing), np.float32(smallest)
    for row in rows:
        integers, scale, group_weights = rounded.row(row), scales.row(row), weights.row(0)
        for place in range(blocks.shape[1]):
            block = blocks.row(row * blocks.shape[1] + place)
            factor = halves[row, place, 0]
            for group in range(GROUPS):
                part, quarter = group // 4, group % 4
                bits, pair = quarter // 2 * 4, 3 << 2 * quarter
                of_lower = as_float32(1) / as_float32(1 << bits)
                of_upper = as_float32(16) / as_float32(1 << 2 * quarter)
                for half in range(2):
                    start = 16 * half
                    lowest = 64 * part + 32 * (quarter % 2) + start
                    highest = 128 + 32 * part + start
                    # Signed, and shared by 16 weights.
                    of_half = block[192 + 2 * group + half]
                    scaled = factor * as_float32((of_half ^ 128) - 128)
                    # LLVM vectorizes loops whose number of steps is a constant here.
                    for it in range(16):
                        lower = masked(block[lowest + it], 15 << bits, of_lower)
                        upper = masked(block[highest + it], pair, of_upper)
                        group_weights[start + it] = scaled * (lower + upper - as_float32(32))
                index = GROUPS * place + group
                round_group(group_weights, integers, scale, index, spacing, smallest)


# ------------------------------------------------------------------------------- tables of numbers

library.define(
    "foo_files::read_codes",
    "(Tensor codes, Tensor table, Tensor factors, ScalarType dtype, float spacing, float smallest) "
    "-> (Tensor, Tensor)",
)


def read_codes(
    codes: Tensor, table: Tensor, factors: Tensor, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return the nearest integers of 8 bits, and scales for 32 weights, as `read_rounded`.

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
    rounded: Any, scales: Any, weights: Any, rows: Any,
) -> None:  # fmt: skip
    spacing, smallest = np.float32(spacing), np.float32(smallest)
    half, numbers = GROUP_SIZE // 2, table.row(0)
    for row in rows:
        integers, scale, group_weights = rounded.row(row), scales.row(row), weights.row(0)
        pairs, factor_of_block = codes.row(row), factors.row(row)
        groups = scales.shape[1] // factors.shape[1]
        for index in range(scales.shape[1]):
            factor = factor_of_block[index // groups]
            for byte in range(half):
                pair = pairs[half * index + byte]
                group_weights[2 * byte] = factor * numbers[pair >> 4]
                group_weights[2 * byte + 1] = factor * numbers[pair & 15]
            round_group(group_weights, integers, scale, index, spacing, smallest)
