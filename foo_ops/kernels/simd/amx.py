"""The matrix unit of a processor: AMX, with eight registers of 16 rows of 64 bytes.

    matrix_configure(), matrix_release()    around a kernel that uses the registers
    matrix_zero(NUMBER)                     zero a register
    matrix_load(NUMBER, pointer, stride)    16 rows of 16 elements, which are ``stride`` apart
    matrix_store(NUMBER, pointer, stride)
    matrix_dot(C, A, B)                     c[i, j] += sum over k of both products of a pair,
                                            a[i, k] and b[k, j]
    BYTE_DOTS[a, b](C, A, B)                the same with the four products of bytes

C has dtype float32, A and B have dtype bfloat16x2; pairs are neighbours in a's rows and in b's
columns. With bytes, int8 or uint8, four are neighbours, and C has dtype int32. NUMBER, A, B and C
are the numbers of registers, from 0 to 7. Subnormal numbers count as zero, as for AVX512-BF16.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from foo_ops.kernels.simd.types import ELEMENTS, INT8, INT64

ROWS = 16
_REGISTERS, _ROW_BYTES = 8, 64


def _call(builder: ir.IRBuilder, name: str, args: list[ir.Value]) -> None:
    """Call an AMX intrinsic that names its registers; LLVM keeps these calls in program order."""
    function_type = ir.FunctionType(ir.VoidType(), [argument.type for argument in args])
    function = cgutils.get_or_insert_function(builder.module, function_type, f"llvm.x86.{name}")
    builder.call(function, args)


def _configuration() -> bytearray:
    """Return the configuration: palette 1, and each register's bytes in a row and rows."""
    data = bytearray(64)
    data[0] = 1
    for register in range(_REGISTERS):
        data[16 + 2 * register] = _ROW_BYTES
        data[48 + register] = ROWS
    return data


@intrinsic
def matrix_configure(typing_context):
    def generate(context, builder, signature, args):
        value = ir.Constant(ir.ArrayType(INT8, 64), _configuration())
        place = cgutils.global_constant(builder, "matrix_configuration", value)
        _call(builder, "ldtilecfg", [builder.bitcast(place, INT8.as_pointer())])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def matrix_release(typing_context):
    """Release the registers, so that a context switch need not save them."""

    def generate(context, builder, signature, args):
        _call(builder, "tilerelease", [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic(prefer_literal=True)
def matrix_zero(typing_context, number):
    def generate(context, builder, signature, args):
        _call(builder, "tilezero", [INT8(number.literal_value)])
        return context.get_dummy_value()

    return types.void(number), generate


@intrinsic(prefer_literal=True)
def matrix_load(typing_context, number, pointer, stride):
    def generate(context, builder, signature, args):
        _call(builder, "tileloadd64", _place(builder, number, pointer, args))
        return context.get_dummy_value()

    return types.void(number, pointer, types.intp), generate


@intrinsic(prefer_literal=True)
def matrix_store(typing_context, number, pointer, stride):
    def generate(context, builder, signature, args):
        _call(builder, "tilestored64", _place(builder, number, pointer, args))
        return context.get_dummy_value()

    return types.void(number, pointer, types.intp), generate


def _place(builder, number, pointer, args) -> list[ir.Value]:
    """Return a register's number, the address of its rows, and their stride in bytes."""
    _, address, stride = args
    step = builder.mul(stride, INT64(ELEMENTS[pointer.dtype].size))
    return [INT8(number.literal_value), builder.bitcast(address, INT8.as_pointer()), step]


def _make_dot(name: str) -> Callable:
    @intrinsic(prefer_literal=True)
    def matrix_dot(typing_context, c, a, b):
        def generate(context, builder, signature, args):
            _call(builder, name, [INT8(number.literal_value) for number in (c, a, b)])
            return context.get_dummy_value()

        return types.void(c, a, b), generate

    return matrix_dot


matrix_dot = _make_dot("tdpbf16ps")
BYTE_DOTS = {
    ("int8", "int8"): _make_dot("tdpbssd"),
    ("int8", "uint8"): _make_dot("tdpbsud"),
    ("uint8", "int8"): _make_dot("tdpbusd"),
    ("uint8", "uint8"): _make_dot("tdpbuud"),
}
