"""Functions of float32 as polynomials on 16 pieces, whose coefficients are looked up.

With AVX-512 one instruction looks up the coefficients of all lanes, in a table of a register. So a
polynomial of a low degree is enough, without the exponentials and the quotients that functions over
a wide domain else take.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numpy.polynomial import Chebyshev, Polynomial

from foo_ops.kernels.compiler.processor import has_table_of_registers, vector_bits
from foo_ops.kernels.vectors.instructions import FLOAT, INT32, call_intrinsic
from foo_ops.kernels.vectors.number import Number

PIECES = 16
# Added to a number it leaves the nearest integer in the lower bits of the sum.
_MAGIC = 1.5 * 2**23


def has_quick_tables() -> bool:
    """Whether a vector of float32 holds a table."""
    return has_table_of_registers() and vector_bits() == 32 * PIECES


def fit(function: Callable[[float], float], centre: float, width: float, degree: int) -> np.ndarray:
    """Return the coefficients of a polynomial in x - centre, that of the highest power first."""
    offsets = [-width / 2, width / 2]
    moved = np.vectorize(lambda offset: function(centre + offset))
    interpolant = Chebyshev.interpolate(moved, degree, domain=offsets)
    coefficients = np.zeros(degree + 1)
    found = interpolant.convert(kind=Polynomial).coef[::-1]
    coefficients[degree + 1 - len(found) :] = found
    return coefficients


def piecewise(x: Number, width: float, tables: Sequence[Sequence[float]]) -> Number:
    """Evaluate the polynomial of the piece that a number from 0 to 15.49 widths lies in.

    Args:
        x: the number. For a NaN the result is NaN.
        width: of a piece; the multiples of it are the centres.
        tables: for each power, the highest first, the coefficients of the pieces.
    """
    shifted = x.fma(1 / width, _MAGIC)
    offset = (shifted - _MAGIC).fma(-width, x)
    piece = shifted.bits()
    result = _look_up(x, piece, tables[0])
    for table in tables[1:]:
        result = result.fma(offset, _look_up(x, piece, table))
    return result


def _look_up(x: Number, place: ir.Value, table: Sequence[float]) -> Number:
    """Return the elements of a table at places modulo 16, which have the shape of ``x``."""
    builder = x.builder
    if not isinstance(x.type, ir.VectorType):
        return x.made(_load(builder, builder.and_(place, INT32(PIECES - 1)), table))
    if x.type.count == PIECES:
        values = ir.Constant(x.type, list(table))
        name = "llvm.x86.avx512.permvar.sf.512"
        return x.made(call_intrinsic(builder, name, x.type, [values, place]))
    result = x.value
    for lane in range(x.type.count):
        lane = INT32(lane)
        number = Number(builder, builder.extract_element(x.value, lane))
        value = _look_up(number, builder.extract_element(place, lane), table)
        result = builder.insert_element(result, value.value, lane)
    return x.made(result)


def _load(builder: ir.IRBuilder, place: ir.Value, table: Sequence[float]) -> ir.Value:
    """Load an element of a table that is part of the object code."""
    constant = ir.Constant(ir.ArrayType(FLOAT, len(table)), list(table))
    name = f"foo_ops.pieces.{zlib.crc32(str(table).encode()):x}"
    known = builder.module.globals.get(name)
    if known is None:
        known = cgutils.global_constant(builder.module, name, constant)
    return builder.load(builder.gep(known, [INT32(0), place], inbounds=True))
