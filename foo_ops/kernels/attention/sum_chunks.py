"""Add up the chunks of grad_key or grad_value, and round once."""

from __future__ import annotations

from numba.core import types

from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.simd.arithmetic import splat
from foo_ops.kernels.simd.memory import load_vector, shift, store
from foo_ops.kernels.simd.transpose import make_copy_row
from foo_ops.kernels.simd.types import ELEMENTS, Pointer, compute_dtype, lanes_of


def make_sum_chunks_kernel(dtype: str) -> Kernel:
    """Make the kernel for gradient[row, column] = factor * sum over chunks of sums[chunk, row,
    column].

    Its arguments are gradient with the stride of its rows, sums with the strides of chunks and rows
    (the latter whole vectors), the number of rows, columns and chunks, and the factor. It
    overwrites sums.
    """
    compute = ELEMENTS[dtype].compute
    LANES = lanes_of(compute_dtype(dtype))
    copy_row = make_copy_row(compute_dtype(dtype))

    def sum_chunks(gradient, row_stride, sums, chunk_stride, width, rows, columns, chunks, factor):
        factors = splat(compute(factor), LANES)
        for row in range(rows):
            source = shift(sums, row * width)
            for column in range(0, columns, LANES):
                total = load_vector(source, column, LANES)
                for chunk in range(1, chunks):
                    total = total + load_vector(source, chunk * chunk_stride + column, LANES)
                store(source, column, total * factors)
            copy_row(shift(gradient, row * row_stride), source, 1, columns, columns)

    size = types.int64
    pointers = (Pointer(dtype), size, Pointer(compute_dtype(dtype)))
    return Kernel(sum_chunks, (*pointers, *(size,) * 5, types.float64))
