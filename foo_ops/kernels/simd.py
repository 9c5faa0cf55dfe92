"""Explicit vectors for Numba: the vocabulary that kernels are written in.

Memory is reached through a `Pointer`, which knows the dtype it points to; indices and strides
count elements. Values are scalars or `Vector`s of the dtype's *compute type*: float32 for float16
and bfloat16, the dtype itself for all others. A load widens, a store rounds to nearest even.

    pointer_to(dtype)(address)              a pointer to elements of dtype
    address_of(pointer)                     its address in bytes
    shift(pointer, count)                   the pointer, moved on by count elements
    shift_bytes(pointer, count)             the pointer, moved on by count bytes
    load(pointer, index)                    one element
    load_vector(pointer, index, LANES)      LANES adjacent elements
    store(pointer, index, value)            a scalar or a vector
    prefetch(pointer, index)                begin to bring an element to the second cache
    splat(scalar, LANES)                    a vector with the scalar in every lane
    a + b, a - b, a * b, a / b              lane by lane
    fma(a, b, c)                            a * b + c, rounded once
    absolute(a)                             |a|
    maximum(a, b)                           lane by lane; where one is NaN it is b
    less(a, b), select(mask, a, b)          a mask, and a where the mask is true, else b
    any_lane(mask)                          whether a lane of the mask is true
    exp2(a), tanh(a)                        see foo_ops/kernels/functions.py

    tile_zero, tile_load, tile_fma ...      see foo_ops/kernels/tiles.py

Two dtypes are of kernels only. "mask" is a bool that loads as what it adds to a score: nothing
where it is true, else -infinity. "bfloat16x2" is a pair of bfloat16 in 32 bits, which is loaded
and stored as it is and multiplied by tile_fma.

LANES is a constant of the kernel (module level or closure).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import (
    intrinsic,
    lower_builtin,
    models,
    register_model,
)

INT8, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
HALF, FLOAT, DOUBLE = ir.HalfType(), ir.FloatType(), ir.DoubleType()


# ------------------------------------------------------------------------------------- elements


@dataclasses.dataclass(frozen=True)
class Element:
    """How a dtype lies in memory, and the Numba type that it is computed in."""

    storage: ir.Type
    size: int
    compute: types.Type


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
    "bfloat16x2": Element(INT32, 4, types.int32),
    "mask": Element(INT8, 1, types.float32),
    "complex32": Element(ir.ArrayType(HALF, 2), 4, types.complex64),
    "complex64": Element(ir.ArrayType(FLOAT, 2), 8, types.complex64),
    "complex128": Element(ir.ArrayType(DOUBLE, 2), 16, types.complex128),
}
COMPLEX_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def shaped(element: ir.Type, like: ir.Type) -> ir.Type:
    """The element type, as a vector with as many lanes as the type ``like`` has, if it is one."""
    return ir.VectorType(element, like.count) if isinstance(like, ir.VectorType) else element


def constant_of(type_: ir.Type, value: float) -> ir.Constant:
    """A constant of a scalar or vector type, the same in every lane."""
    if isinstance(type_, ir.VectorType):
        return ir.Constant(type_, [value] * type_.count)
    return ir.Constant(type_, value)


def call_intrinsic(
    builder: ir.IRBuilder, name: str, result: ir.Type, args: list[ir.Value]
) -> ir.Value:
    """Call an LLVM intrinsic by its name: llvmlite's declare_intrinsic knows no vector types."""
    function_type = ir.FunctionType(result, [argument.type for argument in args])
    function = cgutils.get_or_insert_function(builder.module, function_type, name)
    return builder.call(function, args)


def suffix(type_: ir.Type) -> str:
    """The ending of an overloaded LLVM intrinsic: f32, v8f32 ..."""
    if isinstance(type_, ir.VectorType):
        return f"v{type_.count}{suffix(type_.element)}"
    return {FLOAT: "f32", DOUBLE: "f64"}[type_]


def widen(builder: ir.IRBuilder, dtype: str, value: ir.Value) -> ir.Value:
    """From how the dtype lies in memory to its compute type; scalars and vectors alike."""
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
    """The way back from `widen`, rounded to nearest even."""
    if dtype == "float16":
        return builder.fptrunc(value, shaped(HALF, value.type))
    if dtype == "bfloat16":
        return round_to_bfloat16(builder, value)
    return value


def round_to_bfloat16(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    wide = shaped(INT32, value.type)
    narrow = shaped(INT16, value.type)
    bits = builder.bitcast(value, wide)
    upper = builder.lshr(bits, constant_of(wide, 16))
    odd = builder.and_(upper, constant_of(wide, 1))
    rounded = builder.lshr(
        builder.add(bits, builder.add(odd, constant_of(wide, 0x7FFF))), constant_of(wide, 16)
    )
    # Rounding could carry a NaN into infinity, so a NaN keeps its upper half and is made quiet.
    quiet = builder.or_(upper, constant_of(wide, 0x40))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, quiet, rounded), narrow)


# ---------------------------------------------------------------------------------------- types


class Pointer(types.Type):
    """Points to elements of a dtype."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        super().__init__(f"Pointer({dtype})")


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


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, type_: Vector) -> None:
        super().__init__(manager, type_, vector_ir(type_))


@register_model(Tile)
class _TileModel(models.PrimitiveModel):
    def __init__(self, manager: Any, type_: Tile) -> None:
        backend = ir.ArrayType(vector_ir(type_.vector), type_.rows * type_.columns)
        super().__init__(manager, type_, backend)


# --------------------------------------------------------------------------------------- memory


@functools.cache
def pointer_to(dtype: str) -> Callable[[int], Any]:
    """The function that makes a pointer to elements of ``dtype`` of an address in bytes."""
    pointer = Pointer(dtype)

    @intrinsic
    def make(typing_context, address):
        def generate(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(pointer))

        return pointer(types.intp), generate

    return make


@intrinsic
def address_of(typing_context, pointer):
    def generate(context, builder, signature, args):
        return builder.ptrtoint(args[0], INT64)

    return types.intp(pointer), generate


@intrinsic
def shift(typing_context, pointer, count):
    def generate(context, builder, signature, args):
        return builder.gep(args[0], [args[1]])

    return pointer(pointer, types.intp), generate


@intrinsic
def shift_bytes(typing_context, pointer, count):
    def generate(context, builder, signature, args):
        address = builder.add(builder.ptrtoint(args[0], INT64), args[1])
        return builder.inttoptr(address, args[0].type)

    return pointer(pointer, types.intp), generate


@intrinsic
def load(typing_context, pointer, index):
    def generate(context, builder, signature, args):
        return load_element(context, builder, pointer.dtype, builder.gep(args[0], [args[1]]))

    return ELEMENTS[pointer.dtype].compute(pointer, types.intp), generate


def load_element(context: Any, builder: ir.IRBuilder, dtype: str, address: ir.Value) -> ir.Value:
    """The code of `load`, for intrinsics."""
    if dtype not in COMPLEX_PARTS:
        return widen(builder, dtype, builder.load(address))
    # Part by part: LLVM's vectoriser does not see through the load of a whole struct.
    value = cgutils.create_struct_proxy(ELEMENTS[dtype].compute)(context, builder)
    part = COMPLEX_PARTS[dtype]
    for position, name in enumerate(("real", "imag")):
        place = cgutils.gep_inbounds(builder, address, 0, position)
        setattr(value, name, widen(builder, part, builder.load(place)))
    return value._getvalue()


@intrinsic
def store(typing_context, pointer, index, value):
    dtype = pointer.dtype
    target_type = value if isinstance(value, Vector) else ELEMENTS[dtype].compute

    def generate(context, builder, signature, args):
        address = builder.gep(args[0], [args[1]])
        if dtype in COMPLEX_PARTS:
            _store_complex(context, builder, dtype, address, target_type, args[2])
            return context.get_dummy_value()
        stored = narrow(builder, dtype, args[2])
        if isinstance(target_type, Vector):
            address = builder.bitcast(address, stored.type.as_pointer())
        builder.store(stored, address, align=ELEMENTS[dtype].size)
        return context.get_dummy_value()

    return types.void(pointer, types.intp, target_type), generate


def _store_complex(context, builder, dtype, address, type_, value) -> None:
    parts = cgutils.create_struct_proxy(type_)(context, builder, value=value)
    for position, part in enumerate((parts.real, parts.imag)):
        place = cgutils.gep_inbounds(builder, address, 0, position)
        builder.store(narrow(builder, COMPLEX_PARTS[dtype], part), place)


@intrinsic
def prefetch(typing_context, pointer, index):
    """The element need not exist."""

    def generate(context, builder, signature, args):
        address = builder.bitcast(builder.gep(args[0], [args[1]]), INT8.as_pointer())
        types_ = [address.type, INT32, INT32, INT32]
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), types_), "llvm.prefetch.p0"
        )
        # To be read, and to come to the second cache: more lines can be on their way there than to
        # the first, which makes 4 % in decoding.
        builder.call(function, [address, INT32(0), INT32(2), INT32(1)])
        return context.get_dummy_value()

    return types.void(pointer, types.intp), generate


@intrinsic(prefer_literal=True)
def load_vector(typing_context, pointer, index, lanes):
    vector = Vector(ELEMENTS[pointer.dtype].compute, lanes.literal_value)

    def generate(context, builder, signature, args):
        return emit_load_vector(builder, pointer.dtype, args[0], args[1], vector.lanes)

    return vector(pointer, types.intp, lanes), generate


def emit_load_vector(builder, dtype, pointer, index, lanes) -> ir.Value:
    element = ELEMENTS[dtype]
    stored = ir.VectorType(element.storage, lanes).as_pointer()
    address = builder.bitcast(builder.gep(pointer, [index]), stored)
    return widen(builder, dtype, builder.load(address, align=element.size))


# ----------------------------------------------------------------------------------- arithmetic


def emit_splat(builder: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    vector = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, INT32(0))
    mask = ir.Constant(ir.VectorType(INT32, lanes), [0] * lanes)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), mask)


@intrinsic(prefer_literal=True)
def splat(typing_context, value, lanes):
    scalar = types.unliteral(value)

    def generate(context, builder, signature, args):
        return emit_splat(builder, args[0], lanes.literal_value)

    return Vector(scalar, lanes.literal_value)(scalar, lanes), generate


def _define_arithmetic(function: Callable[..., Any], instruction: str) -> None:
    """Make an operator of Python work on two vectors of one type."""

    @infer_global(function)
    class Template(AbstractTemplate):
        def generic(self, args, kws):
            if len(args) == 2 and isinstance(args[0], Vector) and args[0] == args[1]:
                return signature(args[0], *args)
            return None

    @lower_builtin(function, Vector, Vector)
    def generate(context, builder, signature, args):
        return getattr(builder, instruction)(*args)


for _function, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _define_arithmetic(_function, _instruction)


def emit_fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return call_intrinsic(builder, f"llvm.fma.{suffix(a.type)}", a.type, [a, b, c])


@intrinsic
def fma(typing_context, a, b, c):
    def generate(context, builder, signature, args):
        return emit_fma(builder, *args)

    return a(a, a, a), generate


@intrinsic
def absolute(typing_context, a):
    def generate(context, builder, signature, args):
        return call_intrinsic(builder, f"llvm.fabs.{suffix(args[0].type)}", args[0].type, [args[0]])

    return a(a), generate


@intrinsic
def maximum(typing_context, a, b):
    def generate(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return a(a, a), generate


@intrinsic
def less(typing_context, a, b):
    mask = Vector(types.boolean, a.lanes)

    def generate(context, builder, signature, args):
        return builder.fcmp_ordered("<", *args)

    return mask(a, a), generate


@intrinsic
def select(typing_context, mask, a, b):
    def generate(context, builder, signature, args):
        return builder.select(*args)

    return a(mask, a, a), generate


@intrinsic
def any_lane(typing_context, mask):
    def generate(context, builder, signature, args):
        bits = builder.bitcast(args[0], ir.IntType(mask.lanes))
        return builder.icmp_unsigned("!=", bits, bits.type(0))

    return types.boolean(mask), generate
