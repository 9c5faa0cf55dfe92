"""Guard the accesses of a kernel that is checked: what is outside is not touched, and recorded.

An access outside goes to a slot of its own instead, which reads as zero. The first one of a call is
described in the struct ``Outside`` (csrc/ops/view.h), from which the launcher makes an IndexError
when the kernel is done.
"""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from foo_ops.kernels.vectors.instructions import INT64
from foo_ops.kernels.vectors.values import Pointer, Row

# The fields of the C++ struct View, each of eight bytes.
DATA, NDIM, SIZES, STRIDES, SIZE, ROWS, OUTSIDE = range(7)
# The fields of the C++ struct Outside; INDICES is the first of MOST_INDICES.
IS_FOUND, VIEW, KIND, ROW, COUNT, PLACE, INDICES = range(7)
MOST_INDICES = 64
# The kinds of accesses.
OF_ELEMENT, OF_ROW, OF_FLAT, IN_ROW, OF_SHAPE, OF_PRODUCT, OF_LIST = range(7)


def is_in(builder: ir.IRBuilder, index: ir.Value, size: ir.Value) -> ir.Value:
    """Whether an index is in [0, size): a negative one is a large number without a sign."""
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
    """Describe an access that is not inside of a view, where it is the first of the call."""
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
    """Return the text that says where the statement is that is being compiled."""
    place = context.place
    line = linecache.getline(place.filename, place.line).strip()
    text = f"{place.filename}:{place.line}" + (f": {line}" if line else "")
    return context.insert_const_string(builder.module, text)


def guarded(builder: ir.IRBuilder, is_inside: ir.Value, address: ir.Value) -> ir.Value:
    """Return an address, or where it is outside that of a slot with zeros."""
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
    """Return the address of an element behind a pointer or in a row, or of a vector of them.

    What is outside is said to be at ``told``, or else at the index, counted from the first element.
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
    """Return the plain pointer behind a pointer or a row, for what cannot be checked."""
    if isinstance(type_, Pointer):
        return value
    return cgutils.create_struct_proxy(type_)(context, builder, value=value).data


def shifted(
    context: Any, builder: ir.IRBuilder, type_: Pointer | Row, value: ir.Value, count: ir.Value
) -> ir.Value:
    """Let a pointer or a row begin ``count`` elements further on."""
    if isinstance(type_, Pointer):
        return builder.gep(value, [count])
    row = cgutils.create_struct_proxy(type_)(context, builder, value=value)
    offset = count if type_.is_contiguous else builder.mul(count, row.stride)
    row.data = builder.gep(row.data, [offset])
    row.stop = builder.sub(row.stop, count)
    if type_.is_checked:
        row.first = builder.sub(row.first, count)
    return row._getvalue()
