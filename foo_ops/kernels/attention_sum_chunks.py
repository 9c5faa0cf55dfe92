"""Attention: grad_key or grad_value, from the sums of its chunks, rounded once."""

from __future__ import annotations

from numba.core import types

from foo_ops.kernels.attention import compute_dtype
from foo_ops.kernels.jit import Kernel
from foo_ops.kernels.simd import ELEMENTS, Pointer, load, store


def build(dtype: str) -> Kernel:
    """Arguments: gradient (rows, columns), sums (chunks, rows, width), and these four sizes."""
    compute = ELEMENTS[dtype].compute

    def sum_chunks(gradient, sums, rows, columns, width, chunks):
        for row in range(rows):
            for column in range(columns):
                total = compute(0.0)
                for chunk in range(chunks):
                    total += load(sums, (chunk * rows + row) * width + column)
                store(gradient, row * columns + column, total)

    pointers = (Pointer(dtype), Pointer(compute_dtype(dtype)))
    return Kernel(sum_chunks, (*pointers, *(types.int64,) * 4))
