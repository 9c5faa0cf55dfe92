"""The matrix product that attention is made of, on register tiles."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from numba import njit

from foo_ops.kernels.matrix_unit import (
    matrix_configure,
    matrix_dot,
    matrix_load,
    matrix_release,
    matrix_store,
    matrix_zero,
)
from foo_ops.kernels.simd import ELEMENTS, shift
from foo_ops.kernels.target import (
    has_matrix_unit,
    multiplies_tiles,
    vector_bits,
    vector_registers,
)
from foo_ops.kernels.tiles import PAIRS, tile_fma, tile_load, tile_store, tile_zero


def lanes_of(dtype: str) -> int:
    """Number of elements of a compute dtype in a vector."""
    return vector_bits() // 8 // ELEMENTS[dtype].size


def _shapes() -> tuple[tuple[int, int], ...]:
    """Rows and vectors of the register tiles, the widest first."""
    if vector_registers() == 16:
        # 12 sums, 3 vectors of b and 1 element of a fill them all.
        return (4, 3), (4, 2), (8, 1)
    # 16 independent sums hide the latency of fma, and heads of 64 are 4 vectors of 16 lanes.
    return (4, 4), (8, 2), (8, 1)


@dataclasses.dataclass(frozen=True)
class Multiples:
    """What the sizes of a product have to be multiples of.

    Attributes:
        rows: of c.
        columns: of c.
        depth: elements that a row of a and a column of b have, of which pairs hold two.
    """

    rows: int
    columns: int
    depth: int


def on_tiles(factor: str) -> bool:
    """Whether products of this dtype are cut into tiles for a matrix unit."""
    return factor == PAIRS and multiplies_tiles()


def multiples_of(c: str, factor: str) -> Multiples:
    """Those of the products of `matmul_of` with c in this compute type."""
    if on_tiles(factor):
        # Two by two registers of sums: each factor is used twice for a load.
        return Multiples(32, 32, 32)
    return Multiples(1, lanes_of(c), 2 if factor == PAIRS else 1)


@functools.cache
def next_panel_of(dtype: str, factor: str) -> Callable:
    """``next_panel(columns)``: how many of these columns one register tile takes, or as many as
    are quickest for a matrix unit.
    """
    if on_tiles(factor):

        @njit
        def next_panel_on_tiles(columns):
            return 64 if columns >= 64 else 32

        return next_panel_on_tiles

    return _next_panel_of_vectors(dtype)


@functools.cache
def _next_panel_of_vectors(dtype: str) -> Callable:
    lanes = lanes_of(dtype)
    widest, pair, _ = (vectors * lanes for _, vectors in _shapes())
    # Two tiles of two vectors are quicker than one of three and one of one.
    halved = 2 * pair if 2 * pair == widest + lanes else 0

    @njit
    def next_panel(columns):
        if columns >= widest and columns != halved:
            return widest
        return pair if columns >= pair else lanes

    return next_panel


@functools.cache
def matmul_of(c: str, a: str, b: str) -> Callable:
    """The matrix product for a compute dtype c, and dtypes a and b that load as it.

    ``matmul(c, c_stride, a, a_row_stride, a_step_stride, b, b_stride, rows, columns, steps,
    accumulate)`` computes, for row < rows and column < columns,

        c[row, column] = sum over step of a[row, step] * b[step, column]   (+ c if accumulate)

    Elements of a, at any strides, are broadcast; rows of b and c are vectors of adjacent elements.
    ``columns`` must be a multiple of the vector's lanes. Where a and b are both bfloat16x2, a step
    is a pair. On tiles a_step_stride must be 1, columns and steps multiples of 16; rows should be
    of 32.
    """
    if on_tiles(a):
        return _matmul_on_tiles((c, a, b))
    return _matmul_on_vectors((c, a, b))


@functools.cache
def _matmul_on_vectors(dtypes: tuple[str, str, str]) -> Callable:
    lanes = lanes_of(dtypes[0])
    panel, pair, single = (_panel(dtypes, *shape) for shape in _shapes())
    next_panel = _next_panel_of_vectors(dtypes[0])

    @njit
    def matmul(c, c_stride, a, a_row, a_step, b, b_stride, rows, columns, steps, accumulate):
        start = 0
        while start < columns:
            width = next_panel(columns - start)
            sums, vectors = shift(c, start), shift(b, start)
            if width == lanes:
                single(sums, c_stride, a, a_row, a_step, vectors, b_stride, rows, steps, accumulate)
            elif width == 2 * lanes:
                pair(sums, c_stride, a, a_row, a_step, vectors, b_stride, rows, steps, accumulate)
            else:
                panel(sums, c_stride, a, a_row, a_step, vectors, b_stride, rows, steps, accumulate)
            start += width

    return matmul


def _panel(dtypes: tuple[str, str, str], ROWS: int, COLUMNS: int) -> Callable:  # noqa: N803
    """The product for ``COLUMNS`` vectors: ``ROWS`` rows at a time, then row by row.

    The sums of a tile of c stay in registers over all steps.
    """
    LANES = lanes_of(dtypes[0])  # noqa: N806

    @njit
    def panel(c, c_stride, a, a_row, a_step, b, b_stride, rows, steps, accumulate):
        row = 0
        while row + ROWS <= rows:
            target, factors = shift(c, row * c_stride), shift(a, row * a_row)
            if accumulate:
                sums = tile_load(target, c_stride, ROWS, COLUMNS, LANES)
            else:
                sums = tile_zero(c, ROWS, COLUMNS, LANES)
            for step in range(steps):
                factor, vectors = shift(factors, step * a_step), shift(b, step * b_stride)
                sums = tile_fma(sums, factor, a_row, vectors)
            tile_store(sums, target, c_stride)
            row += ROWS
        while row < rows:
            target, factors = shift(c, row * c_stride), shift(a, row * a_row)
            if accumulate:
                row_sums = tile_load(target, c_stride, 1, COLUMNS, LANES)
            else:
                row_sums = tile_zero(c, 1, COLUMNS, LANES)
            for step in range(steps):
                factor, vectors = shift(factors, step * a_step), shift(b, step * b_stride)
                row_sums = tile_fma(row_sums, factor, a_row, vectors)
            tile_store(row_sums, target, c_stride)
            row += 1

    return panel


@functools.cache
def products_of(factor: str) -> tuple[Callable, Callable]:
    """``begin()`` and ``end()``, which a kernel calls before its first product and after its last.

    Of one product they are a sixth of the time.
    """

    @njit
    def nothing():
        pass

    if on_tiles(factor) and has_matrix_unit():

        @njit
        def begin():
            matrix_configure()

        @njit
        def end():
            matrix_release()

        return begin, end
    return nothing, nothing


@functools.cache
def _matmul_on_tiles(dtypes: tuple[str, str, str]) -> Callable:
    """By a matrix unit, and what is left of the rows by vectors."""
    by_vectors = _matmul_on_vectors(dtypes)
    if not has_matrix_unit():
        return by_vectors
    band, half_band = _band(2), _band(1)

    @njit
    def matmul(c, c_stride, a, a_row, a_step, b, b_stride, rows, columns, steps, accumulate):
        row = 0
        while row + 32 <= rows:
            target, factors = shift(c, row * c_stride), shift(a, row * a_row)
            band(target, c_stride, factors, a_row, b, b_stride, columns, steps, accumulate)
            row += 32
        if row + 16 <= rows:
            target, factors = shift(c, row * c_stride), shift(a, row * a_row)
            half_band(target, c_stride, factors, a_row, b, b_stride, columns, steps, accumulate)
            row += 16
        if row < rows:
            by_vectors(
                shift(c, row * c_stride), c_stride, shift(a, row * a_row), a_row, a_step,
                b, b_stride, rows - row, columns, steps, accumulate,
            )  # fmt: skip

    return matmul


def _band(ROWS: int) -> Callable:  # noqa: N803
    """The product for ``ROWS`` times 16 rows."""
    pair, single = _block(ROWS, 2), _block(ROWS, 1)

    @njit
    def band(c, c_stride, a, a_row, b, b_stride, columns, steps, accumulate):
        column = 0
        while column + 32 <= columns:
            target, vectors = shift(c, column), shift(b, column)
            pair(target, c_stride, a, a_row, vectors, b_stride, steps, accumulate)
            column += 32
        if column < columns:
            target, vectors = shift(c, column), shift(b, column)
            single(target, c_stride, a, a_row, vectors, b_stride, steps, accumulate)

    return band


def _block(ROWS: int, COLUMNS: int) -> Callable:  # noqa: N803
    """The product for ``ROWS`` x ``COLUMNS`` registers of sums: 0 and 1 above 2 and 3.

    4 and 5 hold rows of a, 6 and 7 columns of b.
    """

    @njit
    def zero():
        matrix_zero(0)
        if COLUMNS == 2:
            matrix_zero(1)
        if ROWS == 2:
            matrix_zero(2)
            if COLUMNS == 2:
                matrix_zero(3)

    @njit
    def load_sums(c, stride):
        matrix_load(0, c, stride)
        if COLUMNS == 2:
            matrix_load(1, shift(c, 16), stride)
        if ROWS == 2:
            matrix_load(2, shift(c, 16 * stride), stride)
            if COLUMNS == 2:
                matrix_load(3, shift(c, 16 * stride + 16), stride)

    @njit
    def store_sums(c, stride):
        matrix_store(0, c, stride)
        if COLUMNS == 2:
            matrix_store(1, shift(c, 16), stride)
        if ROWS == 2:
            matrix_store(2, shift(c, 16 * stride), stride)
            if COLUMNS == 2:
                matrix_store(3, shift(c, 16 * stride + 16), stride)

    @njit
    def block(c, c_stride, a, a_row, b, b_stride, steps, accumulate):
        if accumulate:
            load_sums(c, c_stride)
        else:
            zero()
        for step in range(0, steps, 16):
            factors, vectors = shift(a, step), shift(b, step * b_stride)
            matrix_load(4, factors, a_row)
            matrix_load(6, vectors, b_stride)
            matrix_dot(0, 4, 6)
            if COLUMNS == 2:
                matrix_load(7, shift(vectors, 16), b_stride)
                matrix_dot(1, 4, 7)
            if ROWS == 2:
                matrix_load(5, shift(factors, 16 * a_row), a_row)
                matrix_dot(2, 5, 6)
                if COLUMNS == 2:
                    matrix_dot(3, 5, 7)
        store_sums(c, c_stride)

    return block
