"""Choose how to multiply matrices: on vectors or a matrix unit, as numbers, pairs or limbs.

bfloat16 enters products in pairs if the processor multiplies pairs (dtype bfloat16x2, a step of two
along the dimension that is summed over), else as float32. float16 enters as float32. For a matrix
unit all of these enter as limbs of bfloat16, in pairs: see foo_ops/kernels/products/limbs.py.

The matrices of a product are tuples. The left matrix, whose elements are broadcast, is a pointer,
the stride of a row, the stride of a group of steps (a single step on vectors), and the distance of
its limbs. The right matrix, whose rows are vectors, is a pointer, the stride of a step, and the
distance of its limbs. If a left matrix is copied for a matrix unit, its groups lie one after the
other, so that the rows of a register are adjacent.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.compiler.processor import use_pairs
from foo_ops.kernels.products.limbs import limbs_of
from foo_ops.kernels.products.on_amx import TILE_MULTIPLE, make_amx_products, nothing
from foo_ops.kernels.products.on_vectors import make_matmul
from foo_ops.kernels.simd.narrow import PAIRS
from foo_ops.kernels.simd.transpose import round_up
from foo_ops.kernels.simd.types import compute_dtype, lanes_of


def vector_product_dtype(dtype: str) -> str:
    """The dtype in which matrices of a dtype enter products on vectors."""
    return PAIRS if dtype == "bfloat16" and use_pairs() else compute_dtype(dtype)


def product_dtype(dtype: str) -> str:
    """The dtype in which matrices of a dtype enter products."""
    return PAIRS if limbs_of(dtype) else vector_product_dtype(dtype)


def step_of(in_products: str) -> int:
    """The number of elements that a step of a product sums over."""
    return 2 if in_products == PAIRS else 1


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Multiples of the sizes of a matrix product; matrices are padded with zeros to them.

    Attributes:
        rows: a multiple for the rows of the left matrix.
        columns: a multiple for the columns of the right matrix.
        depth: a multiple for the elements that are summed over.
        room: the memory for the limbs of a matrix, as a multiple of that for the compute dtype.
    """

    rows: int
    columns: int
    depth: int
    room: int


def sizes_of(dtype: str) -> Sizes:
    limbs = limbs_of(dtype)
    if limbs:
        return Sizes(TILE_MULTIPLE, TILE_MULTIPLE, TILE_MULTIPLE, 2 if limbs > 1 else 1)
    return Sizes(1, lanes_of(compute_dtype(dtype)), step_of(product_dtype(dtype)), 1)


@functools.cache
def make_products(dtype: str) -> tuple[Callable, Callable, Callable]:
    """Make ``matmul``, and ``begin()`` and ``end()``, called around a kernel's products.

    ``matmul(c, c_stride, a, b, rows, columns, steps, accumulate, are_small)`` computes c = a b, or
    c += a b. ``are_small``: all numbers of both matrices are small, see
    foo_ops/kernels/products/limbs.py.
    """
    limbs = limbs_of(dtype)
    return make_amx_products(limbs) if limbs else make_vector_products(dtype)


@functools.cache
def make_vector_products(dtype: str) -> tuple[Callable, Callable, Callable]:
    """SIMD version of `make_products`."""
    return make_products_on_vectors(compute_dtype(dtype), vector_product_dtype(dtype))


@functools.cache
def make_products_on_vectors(compute: str, in_products: str) -> tuple[Callable, Callable, Callable]:
    """Like `make_vector_products`, with the compute dtype and the dtype in products given."""
    on_vectors = make_matmul(compute, in_products, in_products)

    @njit
    def matmul(c, c_stride, a, b, rows, columns, steps, accumulate, are_small):
        left, row_stride, step_stride, _ = a
        right, stride, _ = b
        on_vectors(
            c, c_stride, left, row_stride, step_stride, right, stride,
            rows, columns, steps, accumulate,
        )  # fmt: skip

    return matmul, nothing, nothing


@functools.cache
def make_step_counter(dtype: str) -> Callable:
    """Make ``steps(count)``: the number of steps of a product summed over ``count`` elements."""
    DEPTH, STEP = sizes_of(dtype).depth, step_of(product_dtype(dtype))

    @njit
    def steps(count):
        return round_up(count, DEPTH) // STEP

    return steps
