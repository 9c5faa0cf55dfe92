"""Emit LLVM instructions that work on scalars and vectors alike."""

from __future__ import annotations

from collections.abc import Iterable

from llvmlite import ir
from numba.core import cgutils

INT8, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))

HALF, FLOAT, DOUBLE = ir.HalfType(), ir.FloatType(), ir.DoubleType()


def shaped(element: ir.Type, like: ir.Type) -> ir.Type:
    """Return the element type, as a vector with as many lanes as ``like`` has, if it is one."""
    return ir.VectorType(element, like.count) if isinstance(like, ir.VectorType) else element


def constant_of(type_: ir.Type, value: float) -> ir.Constant:
    """Make a constant of a scalar or vector type, the same in every lane."""
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
    """Pick the lanes with these numbers of a followed by b."""
    numbers = list(lanes)
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT32, len(numbers)), numbers))


def emit_splat(builder: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    vector = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, INT32(0))
    mask = ir.Constant(ir.VectorType(INT32, lanes), [0] * lanes)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), mask)


def emit_multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """Return a * b + c of integers."""
    return builder.add(builder.mul(a, b), c)


def emit_fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return call_intrinsic(builder, f"llvm.fma.{suffix(a.type)}", a.type, [a, b, c])
