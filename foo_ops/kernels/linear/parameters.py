"""What launchers hand to the kernels of linear layers: a product, and a block of its output."""

from __future__ import annotations

from typing import Any

from numba.core import types

from foo_ops.kernels.lang.scratch import Struct
from foo_ops.kernels.simd.types import Pointer, compute_dtype

BLOCK_FIELDS = ("row_start", "row_stop", "column_start", "column_stop")

BLOCK = Struct("ProductBlock", tuple((name, types.int64) for name in BLOCK_FIELDS))


def argument_types(dtype: str, output_dtype: str | None = None) -> tuple[Any, ...]:
    """A product, a block, scratch memory, and where to write how much of it is needed."""
    fields = _product_fields(dtype, dtype, output_dtype or dtype)
    return _arguments(dtype, Struct("Product", fields))


def quantized_argument_types(dtype: str, stored: str) -> tuple[Any, ...]:
    """The same, with a right matrix of integers.

    The struct is QuantizedProduct of foo_ops/csrc/ops/linear/quantized.h.
    """
    number, pointer = types.int64, Pointer(dtype)
    fields = (
        *_product_fields(dtype, stored, dtype),
        *(("scale", pointer), ("scale_column_stride", number)),
        *(("zero", pointer), ("zero_column_stride", number)),
        ("group_size", number),
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
