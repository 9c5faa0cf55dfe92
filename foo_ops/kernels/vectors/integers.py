"""Make floating-point numbers of integers of 8 and of 4 bits, as weights are stored.

Of 4 bits there are two in a byte. Those of LANES adjacent bytes are two vectors: the lower ones are
LANES adjacent numbers, the upper ones as many numbers half a group further on. A number is the
integer times a scale, plus an offset.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from foo_ops.kernels.compiler.processor import has_bfloat16_dot, has_table_of_registers
from foo_ops.kernels.vectors.elements import ELEMENTS, narrow
from foo_ops.kernels.vectors.instructions import (
    FLOAT,
    INT8,
    INT16,
    INT32,
    INT64,
    call_intrinsic,
    constant_of,
    emit_fma,
    emit_splat,
)
from foo_ops.kernels.vectors.pairs import BFLOAT
from foo_ops.kernels.vectors.values import vector_ir

# Elements of a table in a register, which is looked up lane by lane.
TABLE = 16


@intrinsic(prefer_literal=True)
def unpack_int8(typing_context, target, source, lanes):
    """Store LANES adjacent integers of 8 bits as numbers of the target's dtype."""
    compute = ELEMENTS[target.dtype].compute

    def generate(context, builder, signature, args):
        count = lanes.literal_value
        number = ir.VectorType(context.get_value_type(compute), count)
        value = builder.sitofp(_load_bytes(builder, args[1], count), number)
        _store_numbers(builder, target.dtype, args[0], value)
        return context.get_dummy_value()

    return types.void(target, source, lanes), generate


@intrinsic(prefer_literal=True)
def unpack_int4(typing_context, target, half, source, scale, offset, lanes):
    """Store the lower numbers of LANES adjacent bytes, and ``half`` elements further the upper."""
    compute = ELEMENTS[target.dtype].compute

    def generate(context, builder, signature, args):
        target_pointer, distance, source_pointer, *factors, _ = args
        count = lanes.literal_value
        scales, offsets = (emit_splat(builder, factor, count) for factor in factors)
        lower, upper = _numbers_of_int4(builder, source_pointer, scales, offsets)
        _store_numbers(builder, target.dtype, target_pointer, lower)
        _store_numbers(builder, target.dtype, builder.gep(target_pointer, [distance]), upper)
        return context.get_dummy_value()

    return types.void(target, types.intp, source, compute, compute, lanes), generate


@intrinsic
def tile_dot_int4(typing_context, tile, a, a_stride, half, b, b_stride, scales, offsets, stride):
    """Add to tile[i, j] the products of vectors of a's i-th row and of b's j-th row.

    Those of b are numbers of 4 bits, those of a are where they are and ``half`` elements further
    on. The factors of b's rows are ``stride`` elements apart.
    """
    rows, columns, lanes = tile.rows, tile.columns, tile.vector.lanes

    def generate(context, builder, signature, args):
        total, a_pointer, a_step, distance, b_pointer, b_step, *factors, factor_step = args
        vector = vector_ir(tile.vector)

        def factor(pointer, column):
            place = builder.gep(pointer, [builder.mul(factor_step, INT64(column))])
            return emit_splat(builder, builder.load(place), lanes)

        numbers = [
            _numbers_of_int4(
                builder,
                builder.gep(b_pointer, [builder.mul(b_step, INT64(column))]),
                *(factor(pointer, column) for pointer in factors),
            )
            for column in range(columns)
        ]
        for row in range(rows):
            place = builder.gep(a_pointer, [builder.mul(a_step, INT64(row))])
            for part, start in enumerate((place, builder.gep(place, [distance]))):
                address = builder.bitcast(start, vector.as_pointer())
                left = builder.load(address, align=ELEMENTS[a.dtype].size)
                for column in range(columns):
                    position = row * columns + column
                    value = builder.extract_value(total, position)
                    value = emit_fma(builder, left, numbers[column][part], value)
                    total = builder.insert_value(total, value, position)
        return total

    strides = (types.intp, types.intp)
    arguments = (tile, a, *strides, b, types.intp, scales, offsets, types.intp)
    return tile(*arguments), generate


def _load_bytes(builder: ir.IRBuilder, pointer: ir.Value, lanes: int) -> ir.Value:
    return builder.load(builder.bitcast(pointer, ir.VectorType(INT8, lanes).as_pointer()), align=1)


def _numbers_of_int4(
    builder: ir.IRBuilder, pointer: ir.Value, scale: ir.Value, offset: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Return the lower and the upper numbers of as many bytes as ``scale`` has lanes."""
    type_ = scale.type
    wide = ir.VectorType(INT32, type_.count)
    lower = builder.zext(_load_bytes(builder, pointer, type_.count), wide)
    upper = builder.lshr(lower, constant_of(wide, 4))
    if has_table_of_registers() and type_ == ir.VectorType(FLOAT, TABLE):
        # All 16 numbers at once: a lookup, which takes the lowest bits, in place of three
        # operations on each vector.
        numbers = ir.Constant(type_, [float(number) for number in range(TABLE)])
        table = emit_fma(builder, numbers, scale, offset)
        name = "llvm.x86.avx512.permvar.sf.512"
        return tuple(
            call_intrinsic(builder, name, type_, [table, index]) for index in (lower, upper)
        )
    lower = builder.and_(lower, constant_of(wide, 15))
    return tuple(
        emit_fma(builder, builder.sitofp(number, type_), scale, offset) for number in (lower, upper)
    )


def _store_numbers(builder: ir.IRBuilder, dtype: str, pointer: ir.Value, value: ir.Value) -> None:
    """Store adjacent numbers, rounded to the dtype."""
    if dtype == "bfloat16" and has_bfloat16_dot():
        halves = builder.fptrunc(value, ir.VectorType(BFLOAT, value.type.count))
        stored = builder.bitcast(halves, ir.VectorType(INT16, value.type.count))
    else:
        stored = narrow(builder, dtype, value)
    address = builder.bitcast(pointer, stored.type.as_pointer())
    builder.store(stored, address, align=ELEMENTS[dtype].size)
