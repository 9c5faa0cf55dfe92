"""What launchers hand to the kernels of linear layers: a product, and a block of its output."""

from __future__ import annotations

from typing import Any

from numba.core import types

from foo_ops.kernels.vectors.elements import compute_dtype
from foo_ops.kernels.vectors.struct import Struct
from foo_ops.kernels.vectors.values import Pointer

BLOCK_FIELDS = ("row_start", "row_stop", "column_start", "column_stop")

BLOCK = Struct("ProductBlock", tuple((name, types.int64) for name in BLOCK_FIELDS))


def argument_types(dtype: str) -> tuple[Any, ...]:
    """A product, a block, scratch memory, and where to write how much of it is needed."""
    return (_product(dtype), BLOCK, Pointer(compute_dtype(dtype)), Pointer("int64"))


def _product(dtype: str) -> Struct:
    """The struct Product of foo_ops/csrc/ops/linear/product.h. Strides are in elements."""
    number, pointer = types.int64, Pointer(dtype)
    return Struct(
        "Product",
        (
            *((name, number) for name in ("rows", "columns", "depth", "has_bias")),
            *(("left", pointer), ("left_row_stride", number), ("left_step_stride", number)),
            *(("right", pointer), ("right_column_stride", number), ("right_step_stride", number)),
            *(("bias", pointer), ("bias_row_stride", number), ("bias_column_stride", number)),
            *(("output", pointer), ("output_row_stride", number)),
            ("output_column_stride", number),
        ),
    )
