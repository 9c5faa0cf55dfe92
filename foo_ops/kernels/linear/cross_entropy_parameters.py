"""What launchers hand to the kernels of foo::linear_cross_entropy."""

from __future__ import annotations

from typing import Any

from numba.core import types

from foo_ops.kernels.lang.scratch import Struct
from foo_ops.kernels.linear.parameters import BLOCK
from foo_ops.kernels.simd.types import Pointer, compute_dtype

COUNTS = (
    *("rows", "columns", "depth", "has_bias", "ignore_index", "split_columns", "first_column"),
    *("has_grad_loss", "has_grad_logsumexp", "kept_rows", "block_columns"),
)
NUMBERS = ("softcap", "softcap_inverse", "label_smoothing", "grad_mean_share")


def gradient_dtype(dtype: str) -> str:
    """The dtype in which gradients of logits enter products.

    They may be smaller than the numbers of float16 are, whose products are of float32 anyway.
    """
    return dtype if dtype == "bfloat16" else compute_dtype(dtype)


def argument_types(dtype: str) -> tuple[Any, ...]:
    """Parameters, a block, scratch memory, and where to write how much of it is needed."""
    return (_parameters(dtype), BLOCK, Pointer(compute_dtype(dtype)), Pointer("int64"))


def _parameters(dtype: str) -> Struct:
    """The struct CrossEntropy of foo_ops/csrc/ops/linear/cross_entropy.h. Strides are in
    elements.
    """
    number, pointer, sums = types.int64, Pointer(dtype), Pointer(compute_dtype(dtype))
    fields: list[tuple[str, types.Type]] = [(name, number) for name in COUNTS]
    fields += [(name, types.float64) for name in NUMBERS]
    fields += [("left", pointer), ("left_row_stride", number), ("left_step_stride", number)]
    fields += [("right", pointer), ("right_column_stride", number), ("right_step_stride", number)]
    fields += [("bias", pointer), ("bias_column_stride", number), ("target", Pointer("int64"))]
    fields += [(name, sums) for name in ("largest", "total", "plain", "loss", "logsumexp")]
    fields += [(name, sums) for name in ("grad_loss", "grad_logsumexp")]
    factors = Pointer(gradient_dtype(dtype))
    fields += [("grad_logits", factors), ("grad_logits_row_stride", number)]
    fields += [("exponentials", factors), ("bases", sums)]
    return Struct("CrossEntropy", tuple(fields))
