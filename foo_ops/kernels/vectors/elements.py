"""How the elements of a dtype lie in memory, and the type that they are computed in.

A load widens an element to its *compute type*: float32 for float16 and bfloat16, the dtype itself
for all others. A store rounds to nearest even.

Some dtypes exist in kernels only. "mask" is a bool that loads as what it adds to a score: nothing
where it is true, else -infinity. "bfloat16x2" and "int16x2" are pairs in 32 bits, which are loaded
and stored as they are and multiplied by tile_fma, "int8x4" four bytes for a matrix unit.
"""

from __future__ import annotations

import dataclasses
import math

from llvmlite import ir
from numba.core import types

from foo_ops.kernels.compiler.processor import vector_bits
from foo_ops.kernels.vectors.instructions import (
    DOUBLE,
    FLOAT,
    HALF,
    INT8,
    INT16,
    INT32,
    INT64,
    constant_of,
    shaped,
)


@dataclasses.dataclass(frozen=True)
class Element:
    """How a dtype lies in memory, and the Numba type that it is computed in.

    ``parts`` says how many numbers an element is of.
    """

    storage: ir.Type
    size: int
    compute: types.Type
    parts: int = 1

    @property
    def alignment(self) -> int:
        """Return that of vectors in bytes. A pair may begin at any of its numbers."""
        return self.size // self.parts


ELEMENTS = {
    "bool": Element(INT8, 1, types.uint8),
    "uint8": Element(INT8, 1, types.uint8),
    "uint16": Element(INT16, 2, types.uint16),
    "uint32": Element(INT32, 4, types.uint32),
    "uint64": Element(INT64, 8, types.uint64),
    "int8": Element(INT8, 1, types.int8),
    "int16": Element(INT16, 2, types.int16),
    "int32": Element(INT32, 4, types.int32),
    "int64": Element(INT64, 8, types.int64),
    "float16": Element(HALF, 2, types.float32),
    "bfloat16": Element(INT16, 2, types.float32),
    "float32": Element(FLOAT, 4, types.float32),
    "float64": Element(DOUBLE, 8, types.float64),
    "bfloat16x2": Element(INT32, 4, types.int32, parts=2),
    "int16x2": Element(INT32, 4, types.int32, parts=2),
    "int8x4": Element(INT32, 4, types.int32, parts=4),
    "mask": Element(INT8, 1, types.float32),
    "complex32": Element(ir.ArrayType(HALF, 2), 4, types.complex64),
    "complex64": Element(ir.ArrayType(FLOAT, 2), 8, types.complex64),
    "complex128": Element(ir.ArrayType(DOUBLE, 2), 16, types.complex128),
}

COMPLEX_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def widen(builder: ir.IRBuilder, dtype: str, value: ir.Value) -> ir.Value:
    """Convert from how the dtype lies in memory to its compute type; scalars and vectors alike."""
    if dtype == "float16":
        return builder.fpext(value, shaped(FLOAT, value.type))
    if dtype == "bfloat16":
        wide = shaped(INT32, value.type)
        shifted = builder.shl(builder.zext(value, wide), constant_of(wide, 16))
        return builder.bitcast(shifted, shaped(FLOAT, value.type))
    if dtype == "mask":
        visible = builder.icmp_unsigned("!=", value, constant_of(value.type, 0))
        result = shaped(FLOAT, value.type)
        return builder.select(visible, constant_of(result, 0.0), constant_of(result, -math.inf))
    return value


def narrow(builder: ir.IRBuilder, dtype: str, value: ir.Value) -> ir.Value:
    """Convert back from what `widen` returns, rounded to nearest even."""
    if dtype == "float16":
        return builder.fptrunc(value, shaped(HALF, value.type))
    if dtype == "bfloat16":
        return round_to_bfloat16(builder, value)
    return value


def round_to_bfloat16(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    upper = builder.lshr(
        round_upper_half(builder, value), constant_of(shaped(INT32, value.type), 16)
    )
    return builder.trunc(upper, shaped(INT16, value.type))


def round_upper_half(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Round to bfloat16, which is the upper half of what is returned; the lower half is junk."""
    wide = shaped(INT32, value.type)
    bits = builder.bitcast(value, wide)
    odd = builder.and_(builder.lshr(bits, constant_of(wide, 16)), constant_of(wide, 1))
    rounded = builder.add(bits, builder.add(odd, constant_of(wide, 0x7FFF)))
    # Rounding could carry a NaN into infinity, so a NaN keeps its upper half and is made quiet.
    quiet = builder.or_(bits, constant_of(wide, 0x40_0000))
    return builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)


def compute_dtype(dtype: str) -> str:
    """The name of the compute type of a floating-point dtype."""
    return str(ELEMENTS[dtype].compute)


def lanes_of(dtype: str) -> int:
    """The number of elements of a compute dtype in a vector."""
    return vector_bits() // 8 // ELEMENTS[dtype].size
