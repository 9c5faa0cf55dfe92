"""Tiles of vectors in registers, from which products of matrices are made.

    tile_zero(pointer, ROWS, COLUMNS, LANES)    ROWS x COLUMNS vectors of zeros
    tile_load(pointer, stride, ROWS, COLUMNS, LANES)
    tile_add(tile, pointer, stride)         tile[i, j] += what tile_load gives
    tile_store(tile, pointer, stride)
    tile_fma(tile, a, a_stride, b)          tile[i, j] += a[i * a_stride] * b[j-th vector]
    tile_splat(pointer, stride, ROWS, LANES)    tile[i, 0] = pointer[i * stride] in every lane
    tile_outer(tile, factors, vector)       tile[i, 0] += factors[i, 0] * vector
    tile_dot(tile, a, a_stride, b, b_stride)    tile[i, j] += a[i-th row] * b[j-th row], vectors
    tile_store_sums(tile, pointer, stride)  pointer[i * stride + j] = sum of the lanes of tile[i, j]
    transpose_square(target, target_stride, source, source_stride, LANES)
    transpose_pairs(target, target_stride, source, source_stride, LANES)    of pairs of rows
    pack_pairs(a, b)                        a vector of bfloat16x2, each pair a lane of a and of b

ROWS, COLUMNS and LANES are constants of the kernel, so that every tile unrolls into registers.
Where a and b are of dtype bfloat16x2, tile_fma and tile_dot add both products of a pair: in one
instruction if the processor has it (AVX512-BF16).
"""

from __future__ import annotations

from collections.abc import Iterable

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from foo_ops.kernels.simd import (
    ELEMENTS,
    FLOAT,
    INT16,
    INT32,
    INT64,
    Tile,
    Vector,
    call_intrinsic,
    constant_of,
    emit_fma,
    emit_load_vector,
    emit_splat,
    narrow,
    round_to_bfloat16,
    widen,
)
from foo_ops.kernels.target import has_bfloat16_dot

PAIRS = "bfloat16x2"


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"


BFLOAT = _BFloat()


@intrinsic(prefer_literal=True)
def tile_zero(typing_context, pointer, rows, columns, lanes):
    """Of the compute type that ``pointer`` points to; nothing is read."""
    tile = _tile_type(pointer, rows, columns, lanes)

    def generate(context, builder, signature, args):
        return ir.Constant(context.get_value_type(tile), None)

    return tile(pointer, rows, columns, lanes), generate


def _tile_type(pointer, rows, columns, lanes) -> Tile:
    vector = Vector(ELEMENTS[pointer.dtype].compute, lanes.literal_value)
    return Tile(rows.literal_value, columns.literal_value, vector)


@intrinsic(prefer_literal=True)
def tile_load(typing_context, pointer, stride, rows, columns, lanes):
    tile = _tile_type(pointer, rows, columns, lanes)

    def generate(context, builder, signature, args):
        result = ir.Constant(context.get_value_type(tile), ir.Undefined)
        for row, column, index in _places(builder, tile, args[1]):
            value = emit_load_vector(builder, pointer.dtype, args[0], index, tile.vector.lanes)
            result = builder.insert_value(result, value, row * tile.columns + column)
        return result

    return tile(pointer, types.intp, rows, columns, lanes), generate


@intrinsic
def tile_add(typing_context, tile, pointer, stride):
    def generate(context, builder, signature, args):
        result = args[0]
        for row, column, index in _places(builder, tile, args[2]):
            position = row * tile.columns + column
            value = emit_load_vector(builder, pointer.dtype, args[1], index, tile.vector.lanes)
            total = builder.fadd(builder.extract_value(result, position), value)
            result = builder.insert_value(result, total, position)
        return result

    return tile(tile, pointer, types.intp), generate


@intrinsic
def tile_store(typing_context, tile, pointer, stride):
    def generate(context, builder, signature, args):
        for row, column, index in _places(builder, tile, args[2]):
            value = builder.extract_value(args[0], row * tile.columns + column)
            stored = narrow(builder, pointer.dtype, value)
            address = builder.bitcast(builder.gep(args[1], [index]), stored.type.as_pointer())
            builder.store(stored, address, align=ELEMENTS[pointer.dtype].size)
        return context.get_dummy_value()

    return types.void(tile, pointer, types.intp), generate


def _places(builder, tile, stride):
    """(row, column, index of its first element in memory) for each vector of a tile."""
    for row in range(tile.rows):
        start = builder.mul(stride, stride.type(row))
        for column in range(tile.columns):
            offset = stride.type(column * tile.vector.lanes)
            yield row, column, builder.add(start, offset)


@intrinsic
def tile_fma(typing_context, tile, a, a_stride, b):
    rows, columns, lanes = tile.rows, tile.columns, tile.vector.lanes
    multiply_add = _pair_fma if a.dtype == PAIRS else emit_fma

    def generate(context, builder, signature, args):
        result, a_pointer, stride, b_pointer = args
        vectors = [
            emit_load_vector(builder, b.dtype, b_pointer, INT64(column * lanes), lanes)
            for column in range(columns)
        ]
        for row in range(rows):
            address = builder.gep(a_pointer, [builder.mul(stride, stride.type(row))])
            # Two bytes: a pair may begin at any bfloat16.
            element = builder.load(address, align=min(ELEMENTS[a.dtype].size, 2))
            scalar = emit_splat(builder, widen(builder, a.dtype, element), lanes)
            for column in range(columns):
                position = row * columns + column
                total = builder.extract_value(result, position)
                value = multiply_add(builder, scalar, vectors[column], total)
                result = builder.insert_value(result, value, position)
        return result

    return tile(tile, a, types.intp, b), generate


@intrinsic(prefer_literal=True)
def tile_splat(typing_context, pointer, stride, rows, lanes):
    vector = Vector(ELEMENTS[pointer.dtype].compute, lanes.literal_value)
    tile = Tile(rows.literal_value, 1, vector)

    def generate(context, builder, signature, args):
        result = ir.Constant(context.get_value_type(tile), ir.Undefined)
        for row in range(tile.rows):
            address = builder.gep(args[0], [builder.mul(args[1], INT64(row))])
            scalar = widen(builder, pointer.dtype, builder.load(address))
            result = builder.insert_value(result, emit_splat(builder, scalar, vector.lanes), row)
        return result

    return tile(pointer, types.intp, rows, lanes), generate


@intrinsic
def tile_outer(typing_context, tile, factors, vector):
    def generate(context, builder, signature, args):
        result = args[0]
        for row in range(tile.rows):
            factor, total = (builder.extract_value(value, row) for value in (args[1], result))
            value = emit_fma(builder, factor, args[2], total)
            result = builder.insert_value(result, value, row)
        return result

    return tile(tile, factors, vector), generate


def _pair_fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, total: ir.Value) -> ir.Value:
    """total + a[0] * b[0] + a[1] * b[1] for vectors of pairs."""
    lanes = total.type.count
    if has_bfloat16_dot():
        pairs = ir.VectorType(BFLOAT, 2 * lanes)
        name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}"
        factors = [builder.bitcast(a, pairs), builder.bitcast(b, pairs)]
        return call_intrinsic(builder, name, total.type, [total, *factors])
    for part in (emit_first_of_pairs, emit_second_of_pairs):
        total = emit_fma(builder, part(builder, a), part(builder, b), total)
    return total


def emit_first_of_pairs(builder: ir.IRBuilder, pairs: ir.Value) -> ir.Value:
    upper = builder.shl(pairs, constant_of(pairs.type, 16))
    return builder.bitcast(upper, ir.VectorType(FLOAT, pairs.type.count))


def emit_second_of_pairs(builder: ir.IRBuilder, pairs: ir.Value) -> ir.Value:
    upper = builder.and_(pairs, constant_of(pairs.type, 0xFFFF0000))
    return builder.bitcast(upper, ir.VectorType(FLOAT, pairs.type.count))


@intrinsic
def pack_pairs(typing_context, a, b):
    result = Vector(types.int32, a.lanes)

    def generate(context, builder, signature, args):
        if has_bfloat16_dot():
            return _pack_natively(builder, *args)
        wide = ir.VectorType(INT32, a.lanes)
        first, second = (builder.zext(round_to_bfloat16(builder, value), wide) for value in args)
        return builder.or_(first, builder.shl(second, constant_of(wide, 16)))

    return result(a, a), generate


def _pack_natively(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    lanes = a.type.count
    name = f"llvm.x86.avx512bf16.cvtne2ps2bf16.{32 * lanes}"
    halves = call_intrinsic(builder, name, ir.VectorType(BFLOAT, 2 * lanes), [b, a])
    halves = builder.bitcast(halves, ir.VectorType(INT16, 2 * lanes))
    order = [half for lane in range(lanes) for half in (lane, lanes + lane)]
    return builder.bitcast(_shuffle(builder, halves, halves, order), ir.VectorType(INT32, lanes))


@intrinsic
def tile_dot(typing_context, tile, a, a_stride, b, b_stride):
    rows, columns, lanes = tile.rows, tile.columns, tile.vector.lanes
    multiply_add = _pair_fma if a.dtype == PAIRS else emit_fma

    def generate(context, builder, signature, args):
        result, a_pointer, a_step, b_pointer, b_step = args
        vectors = []
        for column in range(columns):
            index = builder.mul(b_step, INT64(column))
            vectors.append(emit_load_vector(builder, b.dtype, b_pointer, index, lanes))
        for row in range(rows):
            index = builder.mul(a_step, INT64(row))
            factor = emit_load_vector(builder, a.dtype, a_pointer, index, lanes)
            for column in range(columns):
                position = row * columns + column
                total = builder.extract_value(result, position)
                value = multiply_add(builder, factor, vectors[column], total)
                result = builder.insert_value(result, value, position)
        return result

    return tile(tile, a, types.intp, b, types.intp), generate


@intrinsic
def tile_store_sums(typing_context, tile, pointer, stride):
    """ROWS * COLUMNS must be a power of two and not more than the lanes."""
    count, lanes = tile.rows * tile.columns, tile.vector.lanes

    def generate(context, builder, signature, args):
        vectors = [builder.extract_value(args[0], position) for position in range(count)]
        distance = lanes // 2
        while distance > 0:
            half = len(vectors) // 2
            pairs = zip(vectors[:half], vectors[half:], strict=True) if half else [vectors * 2]
            vectors = [_fold(builder, *pair, distance) for pair in pairs]
            distance //= 2
        for row in range(tile.rows):
            first = row * tile.columns
            places = [place * lanes // count for place in range(first, first + tile.columns)]
            stored = _shuffle(builder, vectors[0], vectors[0], places)
            address = builder.gep(args[1], [builder.mul(args[2], INT64(row))])
            address = builder.bitcast(address, stored.type.as_pointer())
            builder.store(stored, address, align=ELEMENTS[pointer.dtype].size)
        return context.get_dummy_value()

    return types.void(tile, pointer, types.intp), generate


def _fold(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, distance: int) -> ir.Value:
    """The sums of lanes that are ``distance`` apart: a's in the lower lane of each two, b's above.

    Neighbouring lanes come last, since LLVM adds these by horizontal additions, of four operations
    each: 8 vectors become one in 20 instructions, of which one is such.
    """
    count = a.type.count
    upper = [lane & distance for lane in range(count)]
    own = [lane + count if up else lane for lane, up in enumerate(upper)]
    other = [lane + count - distance if up else lane + distance for lane, up in enumerate(upper)]
    return builder.fadd(_shuffle(builder, a, b, own), _shuffle(builder, a, b, other))


def _shuffle(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: Iterable[int]) -> ir.Value:
    """The lanes with these numbers of a followed by b."""
    numbers = list(lanes)
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT32, len(numbers)), numbers))


@intrinsic(prefer_literal=True)
def transpose_square(typing_context, target, target_stride, source, source_stride, lanes):
    """target[j, i] = source[i, j] for LANES x LANES elements, which are adjacent in each row."""

    def generate(context, builder, signature, args):
        target_pointer, target_step, *square, _ = args
        rows = _load_rows(builder, source, *square, lanes.literal_value)
        _store_transposed(builder, target, target_pointer, target_step, rows)
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp, lanes), generate


@intrinsic(prefer_literal=True)
def transpose_products(
    typing_context, target, target_stride, source, source_stride, factors, lanes
):
    """As `transpose_square`, with target[j, i] = source[i, j] * factors[j]."""

    def generate(context, builder, signature, args):
        target_pointer, target_step, *square, factor_pointer, _ = args
        count = lanes.literal_value
        vector = emit_load_vector(builder, factors.dtype, factor_pointer, INT64(0), count)
        rows = _load_rows(builder, source, *square, count)
        rows = [builder.fmul(row, vector) for row in rows]
        _store_transposed(builder, target, target_pointer, target_step, rows)
        return context.get_dummy_value()

    arguments = (target, types.intp, source, types.intp, factors, lanes)
    return types.void(*arguments), generate


def _load_rows(builder, source, pointer, stride, count: int) -> list[ir.Value]:
    indices = [builder.mul(stride, INT64(row)) for row in range(count)]
    return [emit_load_vector(builder, source.dtype, pointer, index, count) for index in indices]


def _store_transposed(builder, target, pointer, stride, rows: list[ir.Value]) -> None:
    columns = [narrow(builder, target.dtype, value) for value in _transposed(builder, rows)]
    _store_rows(builder, target, pointer, stride, columns)


@intrinsic(prefer_literal=True)
def transpose_pairs(typing_context, target, target_stride, source, source_stride, lanes):
    """target[j, i] = the pair of source[2 * i, j] and source[2 * i + 1, j], LANES x LANES pairs.

    The source is of bfloat16 and the target of bfloat16x2. Strides are in elements of each.
    """
    count = lanes.literal_value

    def generate(context, builder, signature, args):
        target_pointer, target_step, source_pointer, source_step, _ = args
        half, wide = ir.VectorType(INT16, count), ir.VectorType(INT32, count)

        def load_half(row):
            place = builder.gep(source_pointer, [builder.mul(source_step, INT64(row))])
            value = builder.load(builder.bitcast(place, half.as_pointer()), align=2)
            return builder.zext(value, wide)

        pairs = [
            builder.or_(load_half(row), builder.shl(load_half(row + 1), constant_of(wide, 16)))
            for row in range(0, 2 * count, 2)
        ]
        rows = _transposed(builder, pairs)
        _store_rows(builder, target, target_pointer, target_step, rows)
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp, lanes), generate


def _store_rows(builder, target, pointer, stride, rows: list[ir.Value]) -> None:
    """Vectors in how ``target`` lies in memory, each to its row."""
    for row, value in enumerate(rows):
        address = builder.gep(pointer, [builder.mul(stride, INT64(row))])
        address = builder.bitcast(address, value.type.as_pointer())
        builder.store(value, address, align=ELEMENTS[target.dtype].size)


def _transposed(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """Swap the off-diagonal blocks of every 2 x 2 blocks, for blocks of 1, 2, 4 ... elements."""
    count = len(rows)
    size = 1
    while size < count:
        # A number below count is a lane of the upper row, one from there on of the lower row.
        upper = [lane if lane & size == 0 else count + lane - size for lane in range(count)]
        lower = [lane + size if lane & size == 0 else count + lane for lane in range(count)]
        swapped = list(rows)
        for row in range(count):
            if row & size == 0:
                pair = (rows[row], rows[row + size])
                swapped[row] = _shuffle(builder, *pair, upper)
                swapped[row + size] = _shuffle(builder, *pair, lower)
        rows = swapped
        size *= 2
    return rows
