"""Operators that compute the numbers of quantised weights.

Gradients of linear layers need them. Chains of torch's own operators take 2 to 60 times as long,
since each reads and writes all numbers; here they are the composites, which differentiate. What
does not fit is refused with the checks of the linear layer that has the format.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foo_ops import _C, language, library
from foo_ops.library.operators import FLOATING, Condition, dtype_name, either, holds
from foo_ops.ops.arguments import require_device, require_like

# ---------------------------------------------------------------------------------- groups of a row

GROUP_SIZES = (32, 64, 128)


def groups_of(scale: Tensor) -> int | None:
    """Return how many scales a row has, (N, groups), or None for one, (N,)."""
    return scale.shape[1] if scale.dim() == 2 else None


def in_groups(columns: Tensor, groups: int | None) -> Tensor:
    """Return (N, K) as (N, groups, K / groups), or as it is without groups."""
    if groups is None:
        return columns
    return columns.reshape(columns.shape[0], groups, columns.shape[1] // torch.sym_max(groups, 1))


def rule_of(scale: Any) -> str:
    """Return the sharding rule of weights of 8 bits."""
    return f"n k, {'n k' if len(scale.shape) == 2 else 'n'} -> n k"


def as_float32(integer: Any) -> Any:
    """Convert a small integer: vectors have no fast conversion from 64 bits."""
    return np.float32(np.int32(integer))


# ------------------------------------------------------------------------------------------ checks


def check_quantized(name: str, weight: Tensor, scale: Tensor, zero: Tensor | None) -> None:
    """Refuse what linear_int8 and linear_int4 would refuse."""
    expected = torch.int8 if zero is None else torch.uint8
    if weight.dtype != expected:
        raise TypeError(
            f"{name}: weight must be {dtype_name(expected)} "
            f"if zero is {'None' if zero is None else 'given'}, got {dtype_name(weight.dtype)}"
        )
    require_dimensions(name, "weight", weight, "N", "K" if zero is None else "K / 2")
    if zero is None and scale.dim() not in (1, 2):
        raise ValueError(
            f"{name}: scale must have 1 dimension (N) or 2 (N, K / group_size), got {scale.dim()}"
        )
    if zero is not None:
        require_dimensions(name, "scale", scale, "N", "K / group_size")
    require_floating(name, "scale", scale)
    require_device(name, weight=weight, scale=scale, zero=zero)
    rows = weight.shape[0]
    if not holds(scale.shape[0] == rows):
        kind = "elements" if scale.dim() == 1 else "rows"
        raise ValueError(
            f"{name}: scale must have {rows} {kind}, one for each row of weight, got "
            f"{scale.shape[0]}"
        )
    if scale.dim() == 2:
        _check_groups(name, weight.shape[1] * (1 if zero is None else 2), scale.shape[1])
    if zero is not None:
        require_like(name, "zero", zero, "scale", scale)


def _check_groups(function: str, elements: int, groups: int) -> None:
    fits: Condition = False
    for size in GROUP_SIZES:
        fits = either(fits, elements == groups * size)
    if not holds(fits):
        raise ValueError(
            f"{function}: scale must have a column for each 32, 64 or 128 of the {elements} "
            f"elements of a row, got {groups}"
        )


def require_dimensions(function: str, name: str, tensor: Tensor, *layout: str) -> None:
    if tensor.dim() != len(layout):
        dimensions = "1 dimension" if len(layout) == 1 else f"{len(layout)} dimensions"
        raise ValueError(
            f"{function}: {name} must have {dimensions} ({', '.join(layout)}), got {tensor.dim()}"
        )


def require_floating(function: str, name: str, tensor: Tensor) -> None:
    if tensor.dtype not in FLOATING:
        raise TypeError(
            f"{function}: {name} must be float16, bfloat16, float32 or float64, "
            f"got {dtype_name(tensor.dtype)}"
        )


def input_for(weight: Tensor, dtype: torch.dtype, per_byte: int = 1) -> Tensor:
    """Return an input of no rows for a linear layer, whose checks see it."""
    depth = per_byte * weight.shape[-1] if weight.dim() else 0
    return weight.new_empty((0, depth), dtype=dtype)


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
        return torch.ops.foo.dequantize_int4.default(weight, scale, zero)
    return torch.ops.foo.dequantize_int8.default(weight, scale)


library.define(
    "foo::dequantize_int8",
    "(Tensor weight, Tensor scale) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


@library.register_kernel("foo::dequantize_int8", ("cpu", "foo"))
@library.tile_kernel(contiguous_rows=True)
def int8_kernel(weight: Any, scale: Any, numbers: Any, rows: Any) -> None:
    # A scale of one dimension has one group.
    groups = scale.size // max(weight.shape[0], 1)
    size = weight.shape[1] // max(groups, 1)
    for row in rows:
        integers, target = weight.row(row), numbers.row(row)
        for group in range(groups):
            factor = scale.flat[row * groups + group]
            for index in range(group * size, group * size + size):
                target[index] = as_float32(integers[index]) * factor


@library.register_fake("foo::dequantize_int8")
def int8_fake(weight: Tensor, scale: Tensor) -> Tensor:
    check_quantized("dequantize_int8", weight, scale, None)
    return scale.new_empty(weight.shape)


def int8_composite(weight: Tensor, scale: Tensor) -> Tensor:
    wide = in_groups(weight, groups_of(scale)).to(torch.promote_types(scale.dtype, torch.float32))
    return (wide * scale.unsqueeze(-1)).to(scale.dtype).flatten(1)


library.register_autograd("foo::dequantize_int8", composite=int8_composite)


@library.register_sharding("foo::dequantize_int8")
def int8_sharding(weight: Any, scale: Any) -> str:
    return rule_of(scale)


library.define(
    "foo::dequantize_int4",
    "(Tensor weight, Tensor scale, Tensor zero) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


@library.register_kernel("foo::dequantize_int4", ("cpu", "foo"))
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


@library.register_fake("foo::dequantize_int4")
def int4_fake(weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    check_quantized("dequantize_int4", weight, scale, zero)
    return scale.new_empty(weight.shape[0], 2 * weight.shape[1])


def int4_composite(weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    wide = unpack_integers(weight, scale.shape[1]).to(
        torch.promote_types(scale.dtype, torch.float32)
    )
    return ((wide - zero.unsqueeze(-1)) * scale.unsqueeze(-1)).to(scale.dtype).flatten(1)


library.register_autograd("foo::dequantize_int4", composite=int4_composite)


@library.register_sharding("foo::dequantize_int4")
def int4_sharding(weight: Any, scale: Any, zero: Any) -> str:
    # A byte has two numbers, so that the columns of weight and result are cut at different places.
    return "n ., n ., n . -> n ."


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
    "foo::dequantize_mxfp4",
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
    rows = (it.flatten(0, -2) if it.dim() > 1 else it.unsqueeze(0) for it in (weight, scale))
    numbers = torch.ops.foo.dequantize_mxfp4.default(*rows, dtype=dtype)
    return numbers.reshape(*weight.shape[:-1], numbers.shape[1])


def float4_of(code: Any) -> Any:
    magnitude = code & 7
    exponent, fraction = magnitude >> 1, magnitude & 1
    doubled = fraction if exponent == 0 else (2 + fraction) << exponent >> 1
    number = as_float32(doubled) * np.float32(0.5)
    return -number if code >= 8 else number


@library.register_kernel("foo::dequantize_mxfp4", ("cpu", "foo"))
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


@library.register_fake("foo::dequantize_mxfp4")
def mxfp4_fake(weight: Tensor, scale: Tensor, *, dtype: torch.dtype) -> Tensor:
    _C.check_linear_mxfp4(input_for(weight, dtype, 2), weight, scale, None)
    return weight.new_empty((weight.shape[0], 2 * weight.shape[1]), dtype=dtype)


@library.register_sharding("foo::dequantize_mxfp4")
def mxfp4_sharding(weight: Any, scale: Any, *, dtype: torch.dtype) -> str:
    return "n ., n . -> n ."


# --------------------------------------------------------------------------------- codes of a table

library.define(
    "foo::dequantize_table4",
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
    return torch.ops.foo.dequantize_table4.default(weight, scale, table, dtype=dtype)


@library.register_kernel("foo::dequantize_table4", ("cpu", "foo"))
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


@library.register_fake("foo::dequantize_table4")
def table4_fake(weight: Tensor, scale: Tensor, table: Tensor, *, dtype: torch.dtype) -> Tensor:
    _C.check_linear_table4(input_for(weight, dtype, 2), weight, scale, table, None)
    return scale.new_empty((weight.shape[0], 2 * weight.shape[1]), dtype=dtype)


def adjacent_codes(weight: Tensor) -> Tensor:
    """Return the codes, (N, K) int32, of two in a byte."""
    # For a DTensor, torch 2.13 computes ``weight >> 4`` as weight.
    pair = weight & 15, torch.bitwise_right_shift(weight, 4)
    return torch.stack(pair, -1).flatten(1).int()


def table4_composite(weight: Tensor, scale: Tensor, table: Tensor, *, dtype: torch.dtype) -> Tensor:
    numbers = in_groups(table[adjacent_codes(weight)], groups_of(scale))
    return (numbers * scale.unsqueeze(-1)).flatten(1).to(dtype)


library.register_autograd("foo::dequantize_table4", composite=table4_composite)


@library.register_sharding("foo::dequantize_table4")
def table4_sharding(weight: Any, scale: Any, table: Any, *, dtype: torch.dtype) -> str:
    return "n ., n ., . -> n ."


# ------------------------------------------------------------------------------------ float8_e4m3fn

library.define(
    "foo::dequantize_fp8",
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
    return torch.ops.foo.dequantize_fp8.default(weight, scale, dtype=dtype)


def float8_of(code: Any) -> Any:
    magnitude = code & 0x7F
    exponent, fraction = magnitude >> 3, magnitude & 7
    scaled = fraction << 1 if exponent == 0 else (8 + fraction) << exponent
    number = as_float32(scaled) * np.float32(2.0**-10)
    number = np.float32(math.nan) if magnitude == 0x7F else number
    return -number if code >= 0x80 else number


@library.register_kernel("foo::dequantize_fp8", ("cpu", "foo"))
@library.tile_kernel(contiguous_rows=True)
def fp8_kernel(weight: Any, scale: Any, dtype: Any, numbers: Any, rows: Any) -> None:
    # A scale of one dimension has one group.
    groups = scale.size // max(weight.shape[0], 1)
    size = weight.shape[1] // max(groups, 1)
    for row in rows:
        codes, target = weight.row(row), numbers.row(row)
        for group in range(groups):
            factor = scale.flat[row * groups + group]
            for index in range(group * size, group * size + size):
                target[index] = float8_of(codes[index]) * factor


@library.register_fake("foo::dequantize_fp8")
def fp8_fake(weight: Tensor, scale: Tensor, *, dtype: torch.dtype) -> Tensor:
    _C.check_linear_fp8(input_for(weight, dtype), weight, scale, None)
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


library.register_autograd("foo::dequantize_fp8", composite=fp8_composite)


@library.register_sharding("foo::dequantize_fp8")
def fp8_sharding(weight: Any, scale: Any, *, dtype: torch.dtype) -> str:
    return rule_of(scale)


# ------------------------------------------------------------------------------------------ FLOPs


@library.register_flops(
    *("foo::dequantize_int8", "foo::dequantize_mxfp4"),
    *("foo::dequantize_table4", "foo::dequantize_fp8"),
)
def flops(*_: Any, out_shape: torch.Size, **__: Any) -> int:
    """Count a product with the scale for each number."""
    return math.prod(out_shape)


@library.register_flops("foo::dequantize_int4")
def int4_flops(*_: Any, out_shape: torch.Size, **__: Any) -> int:
    """Count the difference from zero, too."""
    return 2 * math.prod(out_shape)
