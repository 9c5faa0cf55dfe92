"""Register tiles: vectors that stay in registers, for products of matrices.

    tile_zero(pointer, ROWS, COLUMNS, LANES)    ROWS x COLUMNS vectors of zeros
    tile_load(pointer, stride, ROWS, COLUMNS, LANES)
    tile_add(tile, pointer, stride)         tile += tile_load(pointer, stride, ...)
    tile_store(tile, pointer, stride)
    tile_store_sums_of_pairs(tile, pointer, stride) tile_store of what tile_fma has added up from
                                            pairs
    tile_fma(tile, a, a_row, a_step, b, b_step, STEPS)  tile[i, j] += a[i * a_row + k * a_step] *
                                            b[k * b_step, j-th vector], for each k of STEPS
    tile_splat(pointer, stride, ROWS, LANES)    tile[i, 0] = pointer[i * stride] in every lane
    tile_outer(tile, factors, b, b_stride, count)   tile[i, j] += factors[k * ROWS + i, 0] *
                                            b[k * b_stride, j-th vector], for each k; with pairs,
                                            for 2k and 2k + 1; b may be int8 or float8_e4m3fn
    tile_dot(tile, a, a_stride, b, b_stride, count) tile[i, j] += a[i-th row] * b[j-th row],
                                            vectors; either may be int8 or float8_e4m3fn
    tile_dot_along(tile, a, a_stride, b)    tile[i, j] += a[i-th row, j-th vector] * b[j-th vector]
    tile_sum_columns(tile)                  ROWS x 1 vectors: the sums of each row's vectors
    tile_dot_scaled(tile, a, a_stride, b, b_stride, factors)    tile_dot, with b[j-th row] *
                                            factors[j, 0] in place of b[j-th row]
    tile_store_sums(tile, pointer, stride)  pointer[i * stride + j] = sum of the lanes of tile[i, j]
    tile_dot_bytes(tile, a, a_stride, b, b_stride, count)   tile_dot of int8x4 and int8, with
                                            BYTE_OFFSET added to b's; ``count`` bytes, or None
    tile_repeat(pointer, stride, ROWS, COLUMNS, LANES)  tile[i, j] = the vector at i * stride
    tile_add_scaled(tile, integers, row_scales, scales) tile[i, j] += integers[i, j] *
                                            row_scales[i] * scales[j], for a tile of integers

ROWS, COLUMNS, LANES and STEPS are constants of a kernel, so that a tile unrolls into registers.
``count`` is None, or the number of elements that are read of each row: of b's in tile_outer, of a's
in tile_dot. The others count as zeros.
If a and b have dtype bfloat16x2, tile_fma and tile_dot add both products of a pair: in one
instruction if the processor has it (AVX512-BF16). tile_fma also takes int16x2, and of int8x4 and
uint8x4 one for a and the other for b.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from foo_ops.kernels.simd.memory import (
    emit_load_elements,
    emit_load_first,
    emit_load_vector,
)
from foo_ops.kernels.simd.narrow import (
    INTEGER_PAIRS,
    PAIRS,
    QUADS,
    UNSIGNED_QUADS,
    emit_integer_pair_fma,
    emit_pair_fma,
    emit_quad_fma,
    emit_unsigned_bytes,
    emit_unsigned_quad_fma,
    narrow_sums_of_pairs,
)
from foo_ops.kernels.simd.types import (
    ELEMENTS,
    FLOAT,
    INT32,
    INT64,
    Tile,
    Vector,
    emit_fma,
    emit_multiply_add,
    emit_numbers_of_bytes,
    emit_shuffle,
    emit_splat,
    narrow,
    shaped,
    vector_ir,
    widen,
)

BYTES = ("int8", "float8_e4m3fn")


@intrinsic(prefer_literal=True)
def tile_zero(typing_context, pointer, rows, columns, lanes):
    """Make a tile of zeros in the compute type of ``pointer``, which is not read."""
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
            add = builder.add if isinstance(tile.vector.element, types.Integer) else builder.fadd
            total = add(builder.extract_value(result, position), value)
            result = builder.insert_value(result, total, position)
        return result

    return tile(tile, pointer, types.intp), generate


@intrinsic
def tile_store(typing_context, tile, pointer, stride):
    return _storing(tile, pointer, narrow)


@intrinsic
def tile_store_sums_of_pairs(typing_context, tile, pointer, stride):
    return _storing(tile, pointer, narrow_sums_of_pairs)


def _storing(tile, pointer, narrow_vector):
    """Return the signature and the code of a store that converts vectors to the stored type."""

    def generate(context, builder, signature, args):
        for row, column, index in _places(builder, tile, args[2]):
            value = builder.extract_value(args[0], row * tile.columns + column)
            stored = narrow_vector(builder, pointer.dtype, value)
            address = builder.bitcast(builder.gep(args[1], [index]), stored.type.as_pointer())
            builder.store(stored, address, align=ELEMENTS[pointer.dtype].size)
        return context.get_dummy_value()

    return types.void(tile, pointer, types.intp), generate


def _places(builder, tile, stride):
    """Yield (row, column, index of its first element in memory) for each vector of a tile."""
    for row in range(tile.rows):
        start = builder.mul(stride, stride.type(row))
        for column in range(tile.columns):
            offset = stride.type(column * tile.vector.lanes)
            yield row, column, builder.add(start, offset)


_OF_PARTS = {
    PAIRS: emit_pair_fma,
    INTEGER_PAIRS: emit_integer_pair_fma,
    QUADS: emit_quad_fma,
    UNSIGNED_QUADS: emit_unsigned_quad_fma,
}
"""Products of elements of several numbers."""


@intrinsic(prefer_literal=True)
def tile_fma(typing_context, tile, a, a_row, a_step, b, b_step, steps):
    rows, columns, lanes = tile.rows, tile.columns, tile.vector.lanes
    is_integer = isinstance(tile.vector.element, types.Integer)
    usual = emit_multiply_add if is_integer else emit_fma
    multiply_add = _OF_PARTS.get(a.dtype, usual)

    def generate(context, builder, signature, args):
        result, a_pointer, row_stride, a_stride, b_pointer, b_stride, _ = args
        for step in range(steps.literal_value):
            a_start, b_start = (builder.mul(it, INT64(step)) for it in (a_stride, b_stride))
            places = (builder.add(b_start, INT64(column * lanes)) for column in range(columns))
            vectors = [
                emit_load_vector(builder, b.dtype, b_pointer, place, lanes) for place in places
            ]
            for row in range(rows):
                place = builder.add(a_start, builder.mul(row_stride, INT64(row)))
                address = builder.gep(a_pointer, [place])
                element = builder.load(address, align=ELEMENTS[a.dtype].alignment)
                scalar = emit_splat(builder, widen(builder, a.dtype, element), lanes)
                for column in range(columns):
                    position = row * columns + column
                    total = builder.extract_value(result, position)
                    value = multiply_add(builder, scalar, vectors[column], total)
                    result = builder.insert_value(result, value, position)
        return result

    return tile(tile, a, types.intp, types.intp, b, types.intp, steps), generate


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


@intrinsic(prefer_literal=True)
def tile_outer(typing_context, tile, factors, b, stride, count):
    """Add rows of ``b``, times one factor for each of the tile's rows, to a tile.

    A factor that is a pair belongs to two rows of ``b``, whose vectors are interleaved to pairs.
    """
    rows, columns, lanes = tile.rows, tile.columns, tile.vector.lanes
    of_pairs = factors.vector.element == types.int32
    multiply_add = emit_pair_fma if of_pairs else emit_fma

    def load_columns(builder, pointer, step, stride, count):
        if not of_pairs:
            start = builder.mul(stride, stride.type(step))
            places = (builder.add(start, INT64(column * lanes)) for column in range(columns))
            return [
                _load_numbers(builder, tile, b.dtype, pointer, place, count) for place in places
            ]
        size = columns * lanes
        upper, lower = (
            _load_stored(
                builder, b.dtype, pointer, builder.mul(stride, stride.type(row)), size, count
            )
            for row in (2 * step, 2 * step + 1)
        )
        vectors = []
        for start in range(0, size, lanes):
            order = [half for lane in range(start, start + lanes) for half in (lane, size + lane)]
            pairs = emit_shuffle(builder, upper, lower, order)
            vectors.append(builder.bitcast(pairs, ir.VectorType(INT32, lanes)))
        return vectors

    def generate(context, builder, signature, args):
        result, factor_tile, pointer, step_stride, given = args
        some = _given(count, given)
        for step in range(factors.rows // rows):
            vectors = load_columns(builder, pointer, step, step_stride, some)
            for row in range(rows):
                factor = builder.extract_value(factor_tile, step * rows + row)
                for column in range(columns):
                    position = row * columns + column
                    total = builder.extract_value(result, position)
                    value = multiply_add(builder, factor, vectors[column], total)
                    result = builder.insert_value(result, value, position)
        return result

    return tile(tile, factors, b, types.intp, count), generate


def _given(count, value) -> ir.Value | None:
    return None if isinstance(count, types.NoneType) else value


def _load_stored(builder, dtype, pointer, index, lanes, count) -> ir.Value:
    """Emit the load of a vector in its storage type: of ``count`` elements, or all for None."""
    if count is None:
        return emit_load_elements(builder, dtype, pointer, index, lanes)
    return emit_load_first(builder, dtype, builder.gep(pointer, [index]), count, lanes)


def _load_numbers(builder, tile, dtype, pointer, index, count=None) -> ir.Value:
    """Emit the load of a vector of a tile; bytes are converted to its numbers."""
    stored = _load_stored(builder, dtype, pointer, index, tile.vector.lanes, count)
    vector = widen(builder, dtype, stored)
    if dtype not in BYTES:
        return vector
    return emit_numbers_of_bytes(builder, dtype, vector, vector_ir(tile.vector))


@intrinsic(prefer_literal=True)
def tile_dot(typing_context, tile, a, a_stride, b, b_stride, count):
    def generate(context, builder, signature, args):
        vectors = _load_rows(builder, tile, b, *args[3:5])
        return _add_dots(builder, tile, a.dtype, args[:3], vectors, _given(count, args[5]))

    return tile(tile, a, types.intp, b, types.intp, count), generate


@intrinsic
def tile_dot_along(typing_context, tile, a, a_stride, b):
    multiply_add = _OF_PARTS.get(a.dtype, emit_fma)

    def generate(context, builder, signature, args):
        result, left, stride, right = args
        for column in range(tile.columns):
            first = INT64(column * tile.vector.lanes)
            vector = _load_numbers(builder, tile, b.dtype, right, first)
            for row in range(tile.rows):
                position = row * tile.columns + column
                index = builder.add(builder.mul(stride, INT64(row)), first)
                factor = _load_numbers(builder, tile, a.dtype, left, index)
                total = builder.extract_value(result, position)
                value = multiply_add(builder, factor, vector, total)
                result = builder.insert_value(result, value, position)
        return result

    return tile(tile, a, types.intp, b), generate


@intrinsic
def tile_sum_columns(typing_context, tile):
    sums = Tile(tile.rows, 1, tile.vector)

    def generate(context, builder, signature, args):
        result = ir.Constant(context.get_value_type(sums), ir.Undefined)
        for row in range(tile.rows):
            first = row * tile.columns
            total = builder.extract_value(args[0], first)
            for position in range(first + 1, first + tile.columns):
                total = builder.fadd(total, builder.extract_value(args[0], position))
            result = builder.insert_value(result, total, row)
        return result

    return sums(tile), generate


@intrinsic
def tile_dot_scaled(typing_context, tile, a, a_stride, b, b_stride, factors):
    def generate(context, builder, signature, args):
        vectors = [
            builder.fmul(vector, builder.extract_value(args[5], column))
            for column, vector in enumerate(_load_rows(builder, tile, b, *args[3:5]))
        ]
        return _add_dots(builder, tile, a.dtype, args[:3], vectors)

    return tile(tile, a, types.intp, b, types.intp, factors), generate


@intrinsic
def tile_dot_bytes(typing_context, tile, a, a_stride, b, b_stride, count):
    size = 4 * tile.vector.lanes

    def generate(context, builder, signature, args):
        _, _, _, pointer, stride, given = args
        words, vectors = vector_ir(tile.vector), []
        for column in range(tile.columns):
            place = builder.mul(stride, INT64(column))
            stored = _load_stored(builder, b.dtype, pointer, place, size, _given(count, given))
            vectors.append(builder.bitcast(emit_unsigned_bytes(builder, stored), words))
        return _add_dots(builder, tile, a.dtype, args[:3], vectors)

    return tile(tile, a, types.intp, b, types.intp, count), generate


def _load_rows(builder, tile, b, pointer, stride) -> list[ir.Value]:
    """Load a vector of each row of b, one for each column of a tile."""
    places = (builder.mul(stride, INT64(column)) for column in range(tile.columns))
    return [_load_numbers(builder, tile, b.dtype, pointer, place) for place in places]


def _add_dots(builder, tile, dtype, args, vectors, count=None) -> ir.Value:
    """Add the products of each row of a, which has a dtype, and each of the vectors."""
    multiply_add = _OF_PARTS.get(dtype, emit_fma)
    result, pointer, stride = args
    for row in range(tile.rows):
        index = builder.mul(stride, INT64(row))
        factor = _load_numbers(builder, tile, dtype, pointer, index, count)
        for column, vector in enumerate(vectors):
            position = row * tile.columns + column
            total = builder.extract_value(result, position)
            value = multiply_add(builder, factor, vector, total)
            result = builder.insert_value(result, value, position)
    return result


@intrinsic(prefer_literal=True)
def tile_repeat(typing_context, pointer, stride, rows, columns, lanes):
    """Load a vector for each row, the same for all columns."""
    tile = _tile_type(pointer, rows, columns, lanes)

    def generate(context, builder, signature, args):
        result = ir.Constant(context.get_value_type(tile), ir.Undefined)
        for row in range(tile.rows):
            index = builder.mul(args[1], INT64(row))
            value = emit_load_vector(builder, pointer.dtype, args[0], index, tile.vector.lanes)
            for column in range(tile.columns):
                result = builder.insert_value(result, value, row * tile.columns + column)
        return result

    return tile(pointer, types.intp, rows, columns, lanes), generate


@intrinsic
def tile_add_scaled(typing_context, tile, integers, row_scales, scales):
    """Add scaled integers, which are exact in float32 up to 2**24, to a tile."""
    rows, columns, lanes = tile.rows, tile.columns, tile.vector.lanes

    def generate(context, builder, signature, args):
        result, values, of_rows, of_columns = args
        vectors = [
            emit_load_vector(builder, scales.dtype, of_columns, INT64(column * lanes), lanes)
            for column in range(columns)
        ]
        for row in range(rows):
            scale = builder.load(builder.gep(of_rows, [INT64(row)]))
            scale = emit_splat(builder, scale, lanes)
            for column, vector in enumerate(vectors):
                position = row * columns + column
                number = builder.sitofp(builder.extract_value(values, position), scale.type)
                before = builder.extract_value(result, position)
                after = emit_fma(builder, number, builder.fmul(scale, vector), before)
                result = builder.insert_value(result, after, position)
        return result

    return tile(tile, integers, row_scales, scales), generate


@intrinsic
def tile_store_sums(typing_context, tile, pointer, stride):
    """Store the sum of each vector's lanes; those of integers are converted to the pointer's."""
    lanes, columns = tile.vector.lanes, tile.columns

    def generate(context, builder, signature, args):
        count = tile.rows * columns
        # Sums that are reduced at a time: as many as fill a vector, or the next power of two.
        size = min(lanes, 1 << (count - 1).bit_length())
        vectors = [builder.extract_value(args[0], position) for position in range(count)]
        vectors += [vectors[-1]] * (-count % size)
        parts = [
            _sums_of_lanes(builder, vectors[first : first + size], lanes)
            for first in range(0, count, size)
        ]
        for row in range(tile.rows):
            part, first = divmod(row * columns, size)
            places = [place * lanes // size for place in range(first, first + columns)]
            following = parts[min(part + 1, len(parts) - 1)]
            stored = emit_shuffle(builder, parts[part], following, places)
            if isinstance(tile.vector.element, types.Integer):
                stored = builder.sitofp(stored, shaped(FLOAT, stored.type))
            address = builder.gep(args[1], [builder.mul(args[2], INT64(row))])
            address = builder.bitcast(address, stored.type.as_pointer())
            builder.store(stored, address, align=ELEMENTS[pointer.dtype].size)
        return context.get_dummy_value()

    return types.void(tile, pointer, types.intp), generate


def _sums_of_lanes(builder: ir.IRBuilder, vectors: list[ir.Value], lanes: int) -> ir.Value:
    """Return the sums of each vector's lanes, evenly spaced in one vector.

    The number of vectors is a power of two.
    """
    distance = lanes // 2
    while distance > 0:
        half = max(len(vectors) // 2, 1)
        pairs = zip(vectors[:half], vectors[-half:], strict=True)
        vectors = [_fold(builder, one, other, distance) for one, other in pairs]
        distance //= 2
    return vectors[0]


def _fold(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, distance: int) -> ir.Value:
    """Add lanes that are ``distance`` apart: a's sums to the lower lane, b's to the upper.

    Neighbouring lanes come last, since LLVM adds these by horizontal additions of four operations:
    8 vectors become one in 20 instructions, one of which is horizontal.
    """
    count = a.type.count
    upper = [lane & distance for lane in range(count)]
    own = [lane + count if up else lane for lane, up in enumerate(upper)]
    other = [lane + count - distance if up else lane + distance for lane, up in enumerate(upper)]
    add = builder.add if isinstance(a.type.element, ir.IntType) else builder.fadd
    return add(emit_shuffle(builder, a, b, own), emit_shuffle(builder, a, b, other))
