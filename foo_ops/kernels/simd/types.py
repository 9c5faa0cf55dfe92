"""Types of kernels that Numba lacks, elements of dtypes, and LLVM instructions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, errors, types
from numba.extending import models, register_model

from foo_ops.kernels.compiler.processor import vector_bits

# ------------------------------------------------------------------------------------- instructions

# Emits LLVM instructions that work on scalars and vectors alike.


INT8, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))

HALF, FLOAT, DOUBLE = ir.HalfType(), ir.FloatType(), ir.DoubleType()


def shaped(element: ir.Type, like: ir.Type) -> ir.Type:
    """Return the element type, as a vector of the same lanes if ``like`` is a vector."""
    return ir.VectorType(element, like.count) if isinstance(like, ir.VectorType) else element


def constant_of(type_: ir.Type, value: float) -> ir.Constant:
    """Make a constant of a scalar or vector type, the same in every lane."""
    if isinstance(type_, ir.VectorType):
        return ir.Constant(type_, [value] * type_.count)
    return ir.Constant(type_, value)


def call_intrinsic(
    builder: ir.IRBuilder, name: str, result: ir.Type, args: list[ir.Value]
) -> ir.Value:
    """Call an LLVM intrinsic by its name; llvmlite's declare_intrinsic has no vector types."""
    function_type = ir.FunctionType(result, [argument.type for argument in args])
    function = cgutils.get_or_insert_function(builder.module, function_type, name)
    return builder.call(function, args)


def suffix(type_: ir.Type) -> str:
    """Return the ending of an overloaded LLVM intrinsic: f32, v8i32 ..."""
    if isinstance(type_, ir.VectorType):
        return f"v{type_.count}{suffix(type_.element)}"
    if isinstance(type_, ir.IntType):
        return f"i{type_.width}"
    return {HALF: "f16", FLOAT: "f32", DOUBLE: "f64"}[type_]


def bits_of(type_: ir.Type) -> int:
    """Return the size of a number, or of a vector's element."""
    element = type_.element if isinstance(type_, ir.VectorType) else type_
    if isinstance(element, ir.IntType):
        return int(element.width)
    return {HALF: 16, FLOAT: 32, DOUBLE: 64}[element]


def emit_shuffle(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: Iterable[int]) -> ir.Value:
    """Select lanes, by number, from the lanes of a followed by those of b."""
    numbers = list(lanes)
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT32, len(numbers)), numbers))


def emit_splat(builder: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    vector = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, INT32(0))
    mask = ir.Constant(ir.VectorType(INT32, lanes), [0] * lanes)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), mask)


def emit_multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """Return a * b + c for integers."""
    return builder.add(builder.mul(a, b), c)


def emit_fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return call_intrinsic(builder, f"llvm.fma.{suffix(a.type)}", a.type, [a, b, c])


# ------------------------------------------------------------------------------- elements of dtypes

# The storage of a dtype's elements, and the type in which they are computed.
#
# A load widens an element to its *compute type*: float32 for float16 and bfloat16, the dtype itself
# for all others. A store rounds to nearest even.
#
# Some dtypes exist in kernels only. "mask" is a bool that loads as its contribution to a score: 0
# if true, else -infinity. "bfloat16x2" and "int16x2" are pairs in 32 bits, which are loaded and
# stored without conversion and multiplied by tile_fma; "int8x4" and "uint8x4" are four bytes.
# "float8_e4m3fn" is loaded and stored as a byte, and converted by `emit_numbers_of_bytes`.


@dataclasses.dataclass(frozen=True)
class Element:
    """The storage of a dtype, and the Numba type in which it is computed.

    ``parts`` is the number of numbers in an element.
    """

    storage: ir.Type
    size: int
    compute: types.Type
    parts: int = 1

    @property
    def alignment(self) -> int:
        """Return the alignment of vectors in bytes. A pair may begin at any number."""
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
    "uint8x4": Element(INT32, 4, types.int32, parts=4),
    "mask": Element(INT8, 1, types.float32),
    "float8_e4m3fn": Element(INT8, 1, types.uint8),
    "complex32": Element(ir.ArrayType(HALF, 2), 4, types.complex64),
    "complex64": Element(ir.ArrayType(FLOAT, 2), 8, types.complex64),
    "complex128": Element(ir.ArrayType(DOUBLE, 2), 16, types.complex128),
}

COMPLEX_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def widen(builder: ir.IRBuilder, dtype: str, value: ir.Value) -> ir.Value:
    """Convert from a dtype's storage type to its compute type; scalars and vectors alike."""
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


def emit_numbers_of_bytes(
    builder: ir.IRBuilder, dtype: str, bytes_: ir.Value, result: ir.Type
) -> ir.Value:
    """Convert vectors of int8 or float8_e4m3fn to a floating-point type."""
    if dtype == "int8":
        return builder.sitofp(bytes_, result)
    wide, single = shaped(INT32, bytes_.type), shaped(FLOAT, bytes_.type)
    code = builder.zext(bytes_, wide)
    magnitude = builder.and_(code, constant_of(wide, 0x7F))
    # The exponents of float32 are 120 larger.
    bits = builder.add(builder.shl(magnitude, constant_of(wide, 20)), constant_of(wide, 120 << 23))
    multiple = builder.fmul(builder.sitofp(magnitude, single), constant_of(single, 2.0**-9))
    is_subnormal = builder.icmp_unsigned("<", magnitude, constant_of(wide, 8))
    number = builder.select(is_subnormal, multiple, builder.bitcast(bits, single))
    is_nan = builder.icmp_unsigned("==", magnitude, constant_of(wide, 0x7F))
    number = builder.select(is_nan, constant_of(single, math.nan), number)
    sign = builder.shl(builder.and_(code, constant_of(wide, 0x80)), constant_of(wide, 24))
    number = builder.bitcast(builder.xor(builder.bitcast(number, wide), sign), single)
    return number if result == single else builder.fpext(number, result)


def narrow(builder: ir.IRBuilder, dtype: str, value: ir.Value) -> ir.Value:
    """Convert from a dtype's compute type to its storage type, rounded to nearest even."""
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
    """Round to bfloat16, in the upper half of the result; the lower half is undefined."""
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


# -------------------------------------------------------------------------------------------- types

# Types of kernels that Numba lacks: pointers, rows, vectors and register tiles.


HAS_STRIDE = (
    "a row may have a stride, so vectors cannot be read from it; pass contiguous_rows=True to "
    "tile_kernel"
)


class Pointer(types.Type):
    """A pointer to elements of a dtype."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        super().__init__(f"Pointer({dtype})")


class Row(types.Type):
    """Elements of a dtype that are a stride apart, or adjacent.

    Attributes:
        element: the dtype.
        is_contiguous: the stride is 1, so that elements can be read as vectors.
        is_checked: no element outside is read or written: see foo_ops/kernels/simd/memory.py.
        is_indexable: ``row[i]`` is an element. False for a tensor's memory, where the kernel has to
            apply the strides.
    """

    def __init__(
        self, element: str, is_contiguous: bool, is_checked: bool, is_indexable: bool = True
    ) -> None:
        self.element = element
        self.is_contiguous = is_contiguous
        self.is_checked = is_checked
        self.is_indexable = is_indexable
        words = ["contiguous"] * is_contiguous + ["checked"] * is_checked
        words += ["memory"] * (not is_indexable)
        super().__init__(f"Row({', '.join([element, *words])})")

    @property
    def dtype(self) -> str:
        """Return the dtype, for functions of vectors; raise an error if elements have a stride."""
        if not self.is_contiguous:
            raise errors.TypingError(HAS_STRIDE)
        return self.element


class Vector(types.Type):
    """``lanes`` values of one type, in a register."""

    def __init__(self, element: types.Type, lanes: int) -> None:
        self.element = element
        self.lanes = lanes
        super().__init__(f"Vector({element} x {lanes})")


class Tile(types.Type):
    """``rows`` x ``columns`` vectors, in registers."""

    def __init__(self, rows: int, columns: int, vector: Vector) -> None:
        self.rows = rows
        self.columns = columns
        self.vector = vector
        super().__init__(f"Tile({rows} x {columns} x {vector})")


def _element_ir(type_: types.Type) -> ir.Type:
    return {
        types.float32: FLOAT,
        types.float64: DOUBLE,
        types.int8: INT8,
        types.int32: INT32,
        types.int64: INT64,
        types.boolean: ir.IntType(1),
    }[type_]


def vector_ir(vector: Vector) -> ir.VectorType:
    return ir.VectorType(_element_ir(vector.element), vector.lanes)


@register_model(Pointer)
class _PointerModel(models.PrimitiveModel):
    def __init__(self, manager: Any, type_: Pointer) -> None:
        super().__init__(manager, type_, ELEMENTS[type_.dtype].storage.as_pointer())


@register_model(Row)
class _RowModel(models.StructModel):
    """Elements before ``stop`` are inside; in a checked row, from ``first`` on.

    ``view`` is the tensor's view; ``number`` is the row's number, or -1 for the whole memory.
    """

    def __init__(self, manager: Any, type_: Row) -> None:
        fields = [("data", Pointer(type_.element)), ("stop", types.int64)]
        if not type_.is_contiguous:
            fields.append(("stride", types.int64))
        if type_.is_checked:
            fields += [(name, types.int64) for name in ("first", "view", "number")]
        super().__init__(manager, type_, fields)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, type_: Vector) -> None:
        super().__init__(manager, type_, vector_ir(type_))


@register_model(Tile)
class _TileModel(models.PrimitiveModel):
    def __init__(self, manager: Any, type_: Tile) -> None:
        backend = ir.ArrayType(vector_ir(type_.vector), type_.rows * type_.columns)
        super().__init__(manager, type_, backend)
