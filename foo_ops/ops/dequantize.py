"""Operators that compute the numbers of quantised weights.

Gradients of linear layers need them. Chains of torch's own operators take 5 to 60 times as long,
since each reads and writes all numbers; here they are the composites, which differentiate. The
operators have their own namespace, ``foo_weights``, and are no part of the package's interface:
their callers have checked the tensors.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foo_ops import language, library

# ---------------------------------------------------------------------------------- groups of a row


def groups_of(scale: Tensor) -> int | None:
    """Return how many scales a row has, (N, groups), or None for one, (N,)."""
    return scale.shape[1] if scale.dim() == 2 else None


def in_groups(columns: Tensor, groups: int | None) -> Tensor:
    """Return (N, K) as (N, groups, K / groups), or as it is without groups."""
    if groups is None:
        return columns
    return columns.reshape(columns.shape[0], groups, columns.shape[1] // torch.sym_max(groups, 1))


def by_groups(scale: Tensor) -> Tensor:
    """Return one scale for each row, (N,), as that of one group, (N, 1)."""
    return scale.unsqueeze(-1) if scale.dim() == 1 else scale


def rule_of(scale: Any) -> str:
    """Return the sharding rule of weights of 8 bits."""
    return f"n k, n {'k' if scale.shape[1] > 1 else '.'} -> n k"


def as_float32(integer: Any) -> Any:
    """Convert a small integer: vectors have no fast conversion from 64 bits."""
    return np.float32(np.int32(integer))


# ----------------------------------------------------------------------- integers of 8 and 4 bits


def numbers_of_integers(weight: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    """Return the numbers, (N, K), in scale's dtype, computed in float32 (float64 for float64).

    Args:
        weight: (N, K) int8; or with ``zero`` (N, K / 2) uint8, packed by groups as
            `foo_ops.quantize_weight` does.
        scale: (N, groups), or without ``zero`` also (N,).
        zero: (N, groups).
    """
    if zero is not None:
        return torch.ops.foo_weights.numbers_of_int4.default(weight, scale, zero)
    return torch.ops.foo_weights.numbers_of_int8.default(weight, by_groups(scale))


library.define(
    "foo_weights::numbers_of_int8",
    "(Tensor weight, Tensor scale) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


@library.register_kernel("foo_weights::numbers_of_int8", ("cpu", "foo"))
@library.tile_kernel(contiguous_rows=True)
def int8_kernel(weight: Any, scale: Any, numbers: Any, rows: Any) -> None:
    size = weight.shape[1] // max(scale.shape[1], 1)
    for row in rows:
        integers, scales, target = weight.row(row), scale.row(row), numbers.row(row)
        for group in range(scale.shape[1]):
            factor = scales[group]
            for index in range(group * size, group * size + size):
                target[index] = as_float32(integers[index]) * factor


@library.register_fake("foo_weights::numbers_of_int8")
def int8_fake(weight: Tensor, scale: Tensor) -> Tensor:
    return scale.new_empty(weight.shape)


def int8_composite(weight: Tensor, scale: Tensor) -> Tensor:
    wide = in_groups(weight, groups_of(scale)).to(torch.promote_types(scale.dtype, torch.float32))
    return (wide * scale.unsqueeze(-1)).to(scale.dtype).flatten(1)


library.register_autograd("foo_weights::numbers_of_int8", composite=int8_composite)


@library.register_sharding("foo_weights::numbers_of_int8")
def int8_sharding(weight: Any, scale: Any) -> str:
    return rule_of(scale)


library.define(
    "foo_weights::numbers_of_int4",
    "(Tensor weight, Tensor scale, Tensor zero) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


@library.register_kernel("foo_weights::numbers_of_int4", ("cpu", "foo"))
@library.tile_kernel(contiguous_rows=True)
def int4_kernel(weight: Any, scale: Any, zero: Any, numbers: Any, rows: Any) -> None:
    half = weight.shape[1] // max(scale.shape[1], 1)
    for row in rows:
        bytes, target = weight.row(row), numbers.row(row)
        scales, zeros = scale.row(row), zero.row(row)
        for group in range(scale.shape[1]):
            factor, offset, start = scales[group], zeros[group], group * half
            for index in range(half):
                pair, place = bytes[start + index], 2 * start + index
                target[place] = (as_float32(pair & 15) - offset) * factor
                target[place + half] = (as_float32(pair >> 4) - offset) * factor


@library.register_fake("foo_weights::numbers_of_int4")
def int4_fake(weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return scale.new_empty(weight.shape[0], 2 * weight.shape[1])


def int4_composite(weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    wide = unpack_integers(weight, scale.shape[1]).to(
        torch.promote_types(scale.dtype, torch.float32)
    )
    return ((wide - zero.unsqueeze(-1)) * scale.unsqueeze(-1)).to(scale.dtype).flatten(1)


library.register_autograd("foo_weights::numbers_of_int4", composite=int4_composite)


@library.register_sharding("foo_weights::numbers_of_int4")
def int4_sharding(weight: Any, scale: Any, zero: Any) -> str:
    return "n k, n k, n k -> n k"


def pack_integers(integers: Tensor) -> Tensor:
    """Pack integers of 4 bits, (N, groups, group_size), into (N, K / 2) uint8."""
    lower, upper = integers.chunk(2, -1)
    return (lower | upper << 4).flatten(1)


def unpack_integers(weight: Tensor, groups: int | None) -> Tensor:
    """Return integers of 8 or 4 bits as (N, groups, group_size), or (N, K) without groups."""
    pairs = in_groups(weight, groups)
    if weight.dtype == torch.int8:
        return pairs
    # For a DTensor, torch 2.13 computes ``pairs >> 4`` as pairs.
    return torch.cat((pairs & 15, torch.bitwise_right_shift(pairs, 4)), -1)


# ------------------------------------------------------------------------------------------- MXFP4

EXPONENT_BIAS, NAN_EXPONENT = 127, 255
"""The exponent of scale 1, and the code of a scale that is NaN."""

library.define(
    "foo_weights::numbers_of_mxfp4",
    "(Tensor weight, Tensor scale, *, ScalarType dtype) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def numbers_of_mxfp4(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers, (..., K), each rounded once.

    Args:
        weight: (..., K / 2) uint8, adjacent codes in each.
        scale: (..., K / 32) uint8, exponents.
        dtype: of the result.
    """
    return torch.ops.foo_weights.numbers_of_mxfp4.default(weight, scale, dtype=dtype)


def float4_of(code: Any) -> Any:
    magnitude = code & 7
    exponent, fraction = magnitude >> 1, magnitude & 1
    doubled = fraction if exponent == 0 else (2 + fraction) << exponent >> 1
    number = as_float32(doubled) * np.float32(0.5)
    return -number if code >= 8 else number


@library.register_kernel("foo_weights::numbers_of_mxfp4", ("cpu", "foo"))
@library.tile_kernel(contiguous_rows=True)
def mxfp4_kernel(weight: Any, scale: Any, dtype: Any, numbers: Any, rows: Any) -> None:
    for row in rows:
        bytes, scales, target = weight.row(row), scale.row(row), numbers.row(row)
        for group in range(scale.shape[-1]):
            exponent = scales[group]
            power = language.cast(language.exp2(np.float64(exponent) - EXPONENT_BIAS), numbers)
            if exponent == NAN_EXPONENT:
                power = language.cast(math.nan, numbers)
            for index in range(16 * group, 16 * group + 16):
                pair = bytes[index]
                target[2 * index] = float4_of(pair & 15) * power
                target[2 * index + 1] = float4_of(pair >> 4) * power


@library.register_fake("foo_weights::numbers_of_mxfp4")
def mxfp4_fake(weight: Tensor, scale: Tensor, *, dtype: torch.dtype) -> Tensor:
    return weight.new_empty((*weight.shape[:-1], 2 * weight.shape[-1]), dtype=dtype)


@library.register_sharding("foo_weights::numbers_of_mxfp4")
def mxfp4_sharding(weight: Any, scale: Any, *, dtype: torch.dtype) -> str:
    rows = " ".join("abcdefgh"[: len(weight.shape) - 1])
    return f"{rows} k, {rows} k -> {rows} k"


# --------------------------------------------------------------------------------- codes of a table

library.define(
    "foo_weights::numbers_of_table4",
    "(Tensor weight, Tensor scale, Tensor table, *, ScalarType dtype) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def numbers_of_table4(weight: Tensor, scale: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``table[codes] * scale``, (N, K), computed in scale's dtype and rounded to another.

    Args:
        weight: (N, K / 2) uint8, adjacent codes in each.
        scale: (N, groups), float32 or float64.
        table: (16,), of scale's dtype.
        dtype: of the result.
    """
    return torch.ops.foo_weights.numbers_of_table4.default(weight, scale, table, dtype=dtype)


@library.register_kernel("foo_weights::numbers_of_table4", ("cpu", "foo"))
@library.tile_kernel(contiguous_rows=True)
def table4_kernel(weight: Any, scale: Any, table: Any, dtype: Any, numbers: Any, rows: Any) -> None:
    half = weight.shape[1] // max(scale.shape[1], 1)
    for row in rows:
        bytes, scales, target = weight.row(row), scale.row(row), numbers.row(row)
        for group in range(scale.shape[1]):
            factor = scales[group]
            for index in range(group * half, group * half + half):
                pair = bytes[index]
                target[2 * index] = table[pair & 15] * factor
                target[2 * index + 1] = table[pair >> 4] * factor


@library.register_fake("foo_weights::numbers_of_table4")
def table4_fake(weight: Tensor, scale: Tensor, table: Tensor, *, dtype: torch.dtype) -> Tensor:
    return scale.new_empty((weight.shape[0], 2 * weight.shape[1]), dtype=dtype)


def adjacent_codes(weight: Tensor) -> Tensor:
    """Return the codes, (N, K) int32, of two in a byte."""
    # For a DTensor, torch 2.13 computes ``weight >> 4`` as weight.
    pair = weight & 15, torch.bitwise_right_shift(weight, 4)
    return torch.stack(pair, -1).flatten(1).int()


def table4_composite(weight: Tensor, scale: Tensor, table: Tensor, *, dtype: torch.dtype) -> Tensor:
    numbers = in_groups(table[adjacent_codes(weight)], groups_of(scale))
    return (numbers * scale.unsqueeze(-1)).flatten(1).to(dtype)


library.register_autograd("foo_weights::numbers_of_table4", composite=table4_composite)


@library.register_sharding("foo_weights::numbers_of_table4")
def table4_sharding(weight: Any, scale: Any, table: Any, *, dtype: torch.dtype) -> str:
    return "n k, n k, . -> n k"


# ------------------------------------------------------------------------------------ float8_e4m3fn

library.define(
    "foo_weights::numbers_of_fp8",
    "(Tensor weight, Tensor scale, *, ScalarType dtype) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def numbers_of_fp8(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers, (N, K), computed in scale's dtype and rounded to another.

    Args:
        weight: (N, K) uint8, the bits of float8_e4m3fn.
        scale: (N, groups) or (N,), float32 or float64.
        dtype: of the result.
    """
    return torch.ops.foo_weights.numbers_of_fp8.default(weight, by_groups(scale), dtype=dtype)


def float8_of(code: Any) -> Any:
    magnitude = code & 0x7F
    exponent, fraction = magnitude >> 3, magnitude & 7
    scaled = fraction << 1 if exponent == 0 else (8 + fraction) << exponent
    number = as_float32(scaled) * np.float32(2.0**-10)
    number = np.float32(math.nan) if magnitude == 0x7F else number
    return -number if code >= 0x80 else number


@library.register_kernel("foo_weights::numbers_of_fp8", ("cpu", "foo"))
@library.tile_kernel(contiguous_rows=True)
def fp8_kernel(weight: Any, scale: Any, dtype: Any, numbers: Any, rows: Any) -> None:
    size = weight.shape[1] // max(scale.shape[1], 1)
    for row in rows:
        codes, scales, target = weight.row(row), scale.row(row), numbers.row(row)
        for group in range(scale.shape[1]):
            factor = scales[group]
            for index in range(group * size, group * size + size):
                target[index] = float8_of(codes[index]) * factor


@library.register_fake("foo_weights::numbers_of_fp8")
def fp8_fake(weight: Tensor, scale: Tensor, *, dtype: torch.dtype) -> Tensor:
    return scale.new_empty(weight.shape, dtype=dtype)


def decoded_fp8(codes: Tensor) -> Tensor:
    """Return the numbers of codes in float32, by arithmetic, as for DTensors and graphs."""
    magnitude = codes & 0x7F
    # For a DTensor, torch 2.13 computes ``magnitude >> 3`` as magnitude.
    exponent = torch.bitwise_right_shift(magnitude, 3).float()
    fraction = (magnitude & 7).float()
    subnormal = fraction * 2.0**-9
    normal = (8 + fraction) * torch.exp2(exponent - 10)
    number = torch.where(exponent == 0, subnormal, normal)
    number = number.masked_fill(magnitude == 0x7F, torch.nan)
    return torch.where(codes >= 0x80, -number, number)


def fp8_composite(weight: Tensor, scale: Tensor, *, dtype: torch.dtype) -> Tensor:
    numbers = in_groups(decoded_fp8(weight).to(scale.dtype), groups_of(scale))
    return (numbers * scale.unsqueeze(-1)).flatten(1).to(dtype)


library.register_autograd("foo_weights::numbers_of_fp8", composite=fp8_composite)


@library.register_sharding("foo_weights::numbers_of_fp8")
def fp8_sharding(weight: Any, scale: Any, *, dtype: torch.dtype) -> str:
    return rule_of(scale)
