"""Read and write memory through a `Pointer` or a `Row`, checked or not."""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from foo_ops.kernels.compiler.processor import fetches_streams_to_first, fetches_to_first
from foo_ops.kernels.simd.types import (
    COMPLEX_PARTS,
    ELEMENTS,
    INT8,
    INT32,
    INT64,
    Pointer,
    Row,
    Vector,
    call_intrinsic,
    emit_shuffle,
    emit_splat,
    narrow,
    suffix,
    widen,
)

# --------------------------------------------------------------------------------- checked accesses

# Guards the accesses of a checked kernel: memory outside is not touched, and the access recorded.
#
# An access outside goes to a separate slot instead, which reads as zero. The struct ``Outside``
# (csrc/ops/view.h) describes the first one of a call; the launcher raises an IndexError from it
# when the kernel is done.


# The fields of the C++ struct View, each of eight bytes.
DATA, NDIM, SIZES, STRIDES, SIZE, ROWS, OUTSIDE = range(7)
# The fields of the C++ struct Outside; INDICES is the first of MOST_INDICES.
IS_FOUND, VIEW, KIND, ROW, COUNT, PLACE, INDICES = range(7)
MOST_INDICES = 64
# The kinds of accesses.
OF_ELEMENT, OF_ROW, OF_FLAT, IN_ROW, OF_SHAPE, OF_PRODUCT, OF_LIST = range(7)


def is_in(builder: ir.IRBuilder, index: ir.Value, size: ir.Value) -> ir.Value:
    """Whether an index is in [0, size); as an unsigned number, a negative one is large."""
    return builder.icmp_unsigned("<", index, size)


def record_unless(
    context: Any,
    builder: ir.IRBuilder,
    is_inside: ir.Value,
    view: ir.Value,
    kind: int,
    indices: Sequence[ir.Value],
    row: ir.Value | None = None,
    lanes: int | None = None,
) -> None:
    """Record an access outside of a view, if it is the first one of the call."""
    told = indices[:MOST_INDICES]
    with builder.if_then(builder.not_(is_inside), likely=False):
        address = builder.load(builder.gep(view, [INT64(OUTSIDE)]))
        outside = builder.inttoptr(address, INT64.as_pointer())
        found = builder.cmpxchg(outside, INT64(0), INT64(1), "monotonic")
        with builder.if_then(builder.extract_value(found, 1), likely=False):
            fields = {
                VIEW: builder.ptrtoint(view, INT64),
                KIND: INT64(kind),
                ROW: INT64(-1) if row is None else row,
                COUNT: INT64(len(told) if lanes is None else lanes),
                PLACE: builder.ptrtoint(_place(context, builder), INT64),
            }
            fields |= {INDICES + i: index for i, index in enumerate(told)}
            for position, value in fields.items():
                builder.store(value, builder.gep(outside, [INT64(position)]))


def _place(context: Any, builder: ir.IRBuilder) -> ir.Value:
    """Return a text with file, line and source of the statement that is being compiled."""
    place = context.place
    line = linecache.getline(place.filename, place.line).strip()
    text = f"{place.filename}:{place.line}" + (f": {line}" if line else "")
    return context.insert_const_string(builder.module, text)


def guarded(builder: ir.IRBuilder, is_inside: ir.Value, address: ir.Value) -> ir.Value:
    """Return an address if it is inside, else the address of a slot with zeros."""
    slot = cgutils.alloca_once(builder, address.type.pointee)
    with builder.if_then(builder.not_(is_inside), likely=False):
        builder.store(ir.Constant(address.type.pointee, None), slot)
    return builder.select(is_inside, address, slot)


def address_in(
    context: Any,
    builder: ir.IRBuilder,
    type_: Pointer | Row,
    value: ir.Value,
    index: ir.Value,
    lanes: int = 1,
    told: ir.Value | None = None,
) -> ir.Value:
    """Return the address of an element, or of a vector of them, at a pointer or in a row.

    An access outside is reported at ``told``, by default at the index from the first element.
    """
    if isinstance(type_, Pointer):
        return _as_vector(builder, builder.gep(value, [index]), lanes)
    row = cgutils.create_struct_proxy(type_)(context, builder, value=value)
    offset = index if type_.is_contiguous else builder.mul(index, row.stride)
    address = _as_vector(builder, builder.gep(row.data, [offset]), lanes)
    if not type_.is_checked:
        return address
    place, size = builder.sub(index, row.first), builder.sub(row.stop, row.first)
    is_inside = is_in(builder, place, size)
    if lanes > 1:
        last = builder.add(place, INT64(lanes - 1))
        is_inside = builder.and_(is_inside, builder.icmp_signed("<", last, size))
    view = builder.inttoptr(row.view, INT64.as_pointer())
    indices = [place if told is None else told]
    record_unless(context, builder, is_inside, view, IN_ROW, indices, row.number, lanes)
    return guarded(builder, is_inside, address)


def _as_vector(builder: ir.IRBuilder, address: ir.Value, lanes: int) -> ir.Value:
    if lanes == 1:
        return address
    return builder.bitcast(address, ir.VectorType(address.type.pointee, lanes).as_pointer())


def pointer_in(context: Any, builder: ir.IRBuilder, type_: Pointer | Row, value: ir.Value) -> Any:
    """Return the unchecked LLVM pointer of a pointer or a row."""
    if isinstance(type_, Pointer):
        return value
    return cgutils.create_struct_proxy(type_)(context, builder, value=value).data


def shifted(
    context: Any, builder: ir.IRBuilder, type_: Pointer | Row, value: ir.Value, count: ir.Value
) -> ir.Value:
    """Return a pointer or a row that begins ``count`` elements further on."""
    if isinstance(type_, Pointer):
        return builder.gep(value, [count])
    row = cgutils.create_struct_proxy(type_)(context, builder, value=value)
    offset = count if type_.is_contiguous else builder.mul(count, row.stride)
    row.data = builder.gep(row.data, [offset])
    row.stop = builder.sub(row.stop, count)
    if type_.is_checked:
        row.first = builder.sub(row.first, count)
    return row._getvalue()


# ------------------------------------------------------------------------------------------- memory

# Reads and writes memory through a `Pointer` or a `Row`: elements, and vectors of adjacent ones.


CACHE_LINE = 64
"""The size of a cache line, in bytes."""
FIRST, SECOND = 3, 2
"""LLVM's numbers of the caches to prefetch into."""


@functools.cache
def pointer_to(dtype: str) -> Callable[[int], Any]:
    """Make the function that turns an address in bytes into a pointer to elements of ``dtype``."""
    pointer = Pointer(dtype)

    @intrinsic
    def make(typing_context, address):
        def generate(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(pointer))

        return pointer(types.intp), generate

    return make


@intrinsic
def address_of(typing_context, pointer):
    """Return the address of a pointer's first element, in bytes.

    Example:
        >>> is_aligned = language.address_of(x) % 64 == 0
    """

    def generate(context, builder, signature, args):
        return builder.ptrtoint(pointer_in(context, builder, pointer, args[0]), INT64)

    return types.intp(pointer), generate


@intrinsic
def shift(typing_context, pointer, count):
    """Return a pointer moved on by ``count`` elements.

    Example:
        >>> second_half = language.shift(x, size // 2)
        >>> y[i] = second_half[0]
    """

    def generate(context, builder, signature, args):
        return shifted(context, builder, pointer, *args)

    return pointer(pointer, types.intp), generate


@intrinsic
def shift_bytes(typing_context, pointer, count):
    """Return a pointer moved on by ``count`` bytes.

    Example:
        >>> third_of_float32 = language.shift_bytes(x, 8)
        >>> y[i] = third_of_float32[0]
    """
    size = ELEMENTS[pointer.dtype].size

    def generate(context, builder, signature, args):
        if isinstance(pointer, Pointer):
            address = builder.add(builder.ptrtoint(args[0], INT64), args[1])
            return builder.inttoptr(address, args[0].type)
        return shifted(context, builder, pointer, args[0], builder.sdiv(args[1], INT64(size)))

    return pointer(pointer, types.intp), generate


@intrinsic
def load(typing_context, pointer, index):
    """Return an element in the compute type, like ``pointer[index]``.

    Example:
        >>> y[i] = 2 * language.load(x, i)
    """

    def generate(context, builder, signature, args):
        address = address_in(context, builder, pointer, *args)
        return load_element(context, builder, pointer.dtype, address)

    return ELEMENTS[pointer.dtype].compute(pointer, types.intp), generate


def load_element(context: Any, builder: ir.IRBuilder, dtype: str, address: ir.Value) -> ir.Value:
    """Emit the code of `load`, for intrinsics."""
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
    """Write a scalar, or the lanes of a vector one after the other, rounded to the dtype.

    Example:
        >>> language.store(y, i, 0.5)
        >>> vector = language.load_vector(x, 0, language.lanes(x))
        >>> language.store(y, 0, vector + vector)
    """

    dtype = pointer.dtype
    target_type = value if isinstance(value, Vector) else ELEMENTS[dtype].compute

    def generate(context, builder, signature, args):
        lanes = target_type.lanes if isinstance(target_type, Vector) else 1
        address = address_in(context, builder, pointer, args[0], args[1], lanes)
        if isinstance(target_type, Vector):
            builder.store(narrow(builder, dtype, args[2]), address, align=ELEMENTS[dtype].size)
        else:
            store_element(context, builder, dtype, address, args[2])
        return context.get_dummy_value()

    return types.void(pointer, types.intp, target_type), generate


def store_element(
    context: Any, builder: ir.IRBuilder, dtype: str, address: ir.Value, value: ir.Value
) -> None:
    """Emit the code of `store` for a scalar, for intrinsics."""
    part = COMPLEX_PARTS.get(dtype)
    if part is None:
        builder.store(narrow(builder, dtype, value), address, align=ELEMENTS[dtype].size)
        return
    number = cgutils.create_struct_proxy(ELEMENTS[dtype].compute)(context, builder, value=value)
    for position, component in enumerate((number.real, number.imag)):
        place = cgutils.gep_inbounds(builder, address, 0, position)
        builder.store(narrow(builder, part, component), place, align=ELEMENTS[part].size)


@intrinsic
def prefetch(typing_context, pointer, index):
    """Prefetch an element into L2. It need not exist.

    Example:
        >>> language.prefetch(x, i + 256)
    """

    def generate(context, builder, signature, args):
        # More lines can be in flight to L2 than to L1.
        return _emit_prefetch(context, builder, pointer, args, SECOND)

    return types.void(pointer, types.intp), generate


@intrinsic
def prefetch_in_stream(typing_context, pointer, index):
    """Prefetch an element of a stream: into L1 or L2, by `fetches_streams_to_first`."""

    def generate(context, builder, signature, args):
        return _emit_prefetch(context, builder, pointer, args, _of_streams())

    return types.void(pointer, types.intp), generate


@intrinsic(prefer_literal=True)
def prefetch_vectors(typing_context, pointer, index, lanes, count):
    """Prefetch ``count`` adjacent vectors into L1, or into L2 where that is faster.

    They need not exist. Use this some rows ahead for rows found through indices, which a processor
    cannot predict. The numbers of lanes and of vectors are constants.

    Example:
        >>> language.prefetch_vectors(a.row(i + 8), 0, language.lanes(a), 4)
    """
    return _prefetching(pointer, lanes, count, _of_lookups)


@intrinsic(prefer_literal=True)
def prefetch_vectors_in_stream(typing_context, pointer, index, lanes, count):
    """Prefetch vectors as `prefetch_in_stream` does elements."""
    return _prefetching(pointer, lanes, count, _of_streams)


def _prefetching(pointer, lanes, count, level_of):
    """Return the signature and the code that prefetches vectors into a cache.

    Numba keeps that code, but calls it for each processor: so ``level_of`` is called there.
    """
    line = max(1, CACHE_LINE // ELEMENTS[pointer.dtype].size)
    elements = lanes.literal_value * count.literal_value

    def generate(context, builder, signature, args):
        for offset in range(0, elements, line):
            place = builder.add(args[1], args[1].type(offset))
            _emit_prefetch(context, builder, pointer, (args[0], place), level_of())
        return context.get_dummy_value()

    return types.void(pointer, types.intp, lanes, count), generate


def _of_lookups() -> int:
    return FIRST if fetches_to_first() else SECOND


def _of_streams() -> int:
    return FIRST if fetches_streams_to_first() else SECOND


def _emit_prefetch(context: Any, builder: ir.IRBuilder, pointer: Any, args: Any, level: int) -> Any:
    element = pointer_in(context, builder, pointer, shifted(context, builder, pointer, *args))
    address = builder.bitcast(element, INT8.as_pointer())
    # Prefetch for reading, as data.
    options = [INT32(0), INT32(level), INT32(1)]
    types_ = [address.type, *(it.type for it in options)]
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), types_), "llvm.prefetch.p0"
    )
    builder.call(function, [address, *options])
    return context.get_dummy_value()


@intrinsic(prefer_literal=True)
def load_vector(typing_context, pointer, index, lanes):
    """Return ``lanes`` adjacent elements, a constant number, in the compute type.

    Example:
        >>> vector = language.load_vector(x, 0, language.lanes(x))
    """

    vector = Vector(ELEMENTS[pointer.dtype].compute, lanes.literal_value)

    def generate(context, builder, signature, args):
        address = address_in(context, builder, pointer, args[0], args[1], vector.lanes)
        return _load_vector(builder, pointer.dtype, address)

    return vector(pointer, types.intp, lanes), generate


@intrinsic(prefer_literal=True)
def load_first(typing_context, pointer, index, count, lanes):
    """Return a vector of ``count`` adjacent elements, filled up with zeros."""
    vector = Vector(ELEMENTS[pointer.dtype].compute, lanes.literal_value)

    def generate(context, builder, signature, args):
        place = builder.gep(args[0], [args[1]])
        return widen(
            builder,
            pointer.dtype,
            emit_load_first(builder, pointer.dtype, place, args[2], vector.lanes),
        )

    return vector(pointer, types.intp, types.intp, lanes), generate


@intrinsic(prefer_literal=True)
def load_pieces(typing_context, pointer, stride, count, lanes):
    """Return a vector of pieces of ``count`` adjacent numbers; pieces begin a stride apart."""
    size, vector = count.literal_value, Vector(ELEMENTS[pointer.dtype].compute, lanes.literal_value)

    def generate(context, builder, signature, args):
        places = [builder.mul(args[1], INT64(piece)) for piece in range(vector.lanes // size)]
        pieces = [emit_load_vector(builder, pointer.dtype, args[0], it, size) for it in places]
        while len(pieces) > 1:
            order = range(2 * pieces[0].type.count)
            pairs = zip(pieces[::2], pieces[1::2], strict=True)
            pieces = [emit_shuffle(builder, *pair, order) for pair in pairs]
        return pieces[0]

    return vector(pointer, types.intp, count, lanes), generate


@intrinsic(prefer_literal=True)
def load_repeated(typing_context, pointer, index, times, lanes):
    """Return a vector of adjacent numbers, each repeated in ``times`` adjacent lanes."""
    vector = Vector(ELEMENTS[pointer.dtype].compute, lanes.literal_value)

    def generate(context, builder, signature, args):
        count = vector.lanes // times.literal_value
        numbers = emit_load_vector(builder, pointer.dtype, args[0], args[1], count)
        order = (lane // times.literal_value for lane in range(vector.lanes))
        return emit_shuffle(builder, numbers, numbers, order)

    return vector(pointer, types.intp, times, lanes), generate


def emit_load_vector(builder, dtype, pointer, index, lanes) -> ir.Value:
    return widen(builder, dtype, emit_load_elements(builder, dtype, pointer, index, lanes))


def emit_load_elements(builder, dtype, pointer, index, count) -> ir.Value:
    """Emit the load of adjacent elements in their storage type."""
    stored = ir.VectorType(ELEMENTS[dtype].storage, count).as_pointer()
    address = builder.bitcast(builder.gep(pointer, [index]), stored)
    return builder.load(address, align=ELEMENTS[dtype].alignment)


def emit_load_first(builder, dtype, address, count, lanes) -> ir.Value:
    """Emit the load of ``count`` elements in their storage type; the other lanes are zeros."""
    order = ir.Constant(ir.VectorType(INT8, lanes), list(range(lanes)))
    most = emit_splat(builder, builder.trunc(count, INT8), lanes)
    return emit_masked_load(builder, dtype, address, builder.icmp_signed("<", order, most))


def emit_masked_load(builder, dtype, address, mask) -> ir.Value:
    """Emit the load of elements, in their storage type, where a mask is true; zeros elsewhere."""
    stored = ir.VectorType(ELEMENTS[dtype].storage, mask.type.count)
    name = f"llvm.masked.load.{suffix(stored)}.p0"
    return call_intrinsic(builder, name, stored, [address, mask, ir.Constant(stored, None)])


def _load_vector(builder: ir.IRBuilder, dtype: str, address: ir.Value) -> ir.Value:
    return widen(builder, dtype, builder.load(address, align=ELEMENTS[dtype].alignment))
