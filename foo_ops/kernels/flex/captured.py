"""Captured tensors of a program: find their elements, read them, and add to their gradients.

A negative index counts from the end. An index outside reads element 0, and reports its tensor to
the launcher: see `Captured.outside`. If one index goes up or down by one from lane to lane, and the
others are the same in all lanes, the elements may be adjacent: then one load reads them all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from foo_ops.kernels.simd.memory import emit_masked_load
from foo_ops.kernels.simd.types import (
    ELEMENTS,
    INT32,
    INT64,
    call_intrinsic,
    constant_of,
    emit_shuffle,
    emit_splat,
    suffix,
    widen,
)

# A launcher's description of a captured tensor, in words of 8 bytes: the pointers of its elements
# and of its gradient; the strides of the gradient's sums for batch, key head and chunk of a
# backward pass; then sizes, strides, and strides of the gradient.
MOST_DIMENSIONS = 5
DATA, GRADIENT, OF_BATCH, OF_HEAD, OF_CHUNK, SIZES = range(6)
STRIDES, GRADIENT_STRIDES = SIZES + MOST_DIMENSIONS, SIZES + 2 * MOST_DIMENSIONS
WORDS = SIZES + 3 * MOST_DIMENSIONS


@dataclasses.dataclass(frozen=True)
class Index:
    """An index: an int64, or one for each lane, and its step from lane to lane.

    The step is None if it is not known.
    """

    value: ir.Value
    step: int | None

    @property
    def is_vector(self) -> bool:
        return isinstance(self.value.type, ir.VectorType)


@dataclasses.dataclass(frozen=True)
class Lanes:
    """The lanes of a vector: ``valid`` masks the lanes that hold a query, ``count`` counts them."""

    number: int
    valid: ir.Value
    count: ir.Value


@dataclasses.dataclass(frozen=True)
class Place:
    """The sums of a gradient to add to: batch, key head and chunk may have separate sums."""

    batch: ir.Value
    key_head: ir.Value
    chunk: ir.Value


class Captured:
    """Emits reads of a captured tensor, which `words` describe, and sums of its gradient."""

    def __init__(
        self, builder: ir.IRBuilder, number: int, words: ir.Value, outside: ir.Value
    ) -> None:
        self.builder, self.number, self.outside = builder, number, outside
        self.words = builder.gep(words, [INT64(number * WORDS)])

    def _word(self, position: int) -> ir.Value:
        return self.builder.load(self.builder.gep(self.words, [INT64(position)]))

    def read(self, dtype: str, indices: Sequence[Index], lanes: Lanes | None) -> ir.Value:
        """Read an element, or one for each lane if an index is a vector."""
        builder, element = self.builder, ELEMENTS[dtype].storage
        base = builder.inttoptr(self._word(DATA), element.as_pointer())
        if lanes is None or not any(index.is_vector for index in indices):
            value = builder.load(builder.gep(base, [self._offset(indices, STRIDES, None)]))
            return _as_value(builder, dtype, value)
        vector = ir.VectorType(element, lanes.number)

        def read_adjacent(first: ir.Value) -> ir.Value:
            place = builder.bitcast(builder.gep(base, [first]), vector.as_pointer())
            mask = self._turned(indices, lanes.valid)
            return self._turned(indices, emit_masked_load(builder, dtype, place, mask))

        def read_each() -> ir.Value:
            offsets = self._offset(indices, STRIDES, lanes)
            value = ir.Constant(vector, ir.Undefined)
            for lane in range(lanes.number):
                place = builder.gep(base, [builder.extract_element(offsets, INT32(lane))])
                value = builder.insert_element(value, builder.load(place), INT32(lane))
            return value

        value = self._by_adjacency(indices, STRIDES, lanes, read_adjacent, read_each)
        return _as_value(builder, dtype, value)

    def add(
        self,
        dtype: str,
        value: ir.Value,
        indices: Sequence[Index],
        lanes: Lanes | None,
        place: Place,
    ) -> None:
        """Add a vector to the gradient, or a scalar if all lanes have the same element.

        Lanes without a query must be zero.
        """
        builder = self.builder
        base = builder.inttoptr(self._word(GRADIENT), ELEMENTS[dtype].storage.as_pointer())
        for position, count in zip(
            (OF_BATCH, OF_HEAD, OF_CHUNK), (place.batch, place.key_head, place.chunk)
        ):
            base = builder.gep(base, [builder.mul(self._word(position), count)])
        if lanes is None or not isinstance(value.type, ir.VectorType):
            self._add_one(builder.gep(base, [self._offset(indices, GRADIENT_STRIDES, None)]), value)
            return

        def add_adjacent(first: ir.Value) -> None:
            mask = self._turned(indices, lanes.valid)
            address = builder.bitcast(builder.gep(base, [first]), value.type.as_pointer())
            before = emit_masked_load(builder, dtype, address, mask)
            total = builder.fadd(before, self._turned(indices, value))
            name = f"llvm.masked.store.{suffix(value.type)}.p0"
            call_intrinsic(builder, name, ir.VoidType(), [total, address, mask])

        def add_each() -> None:
            offsets = self._offset(indices, GRADIENT_STRIDES, lanes)
            with cgutils.for_range(builder, lanes.count) as loop:
                lane = builder.trunc(loop.index, INT32)
                address = builder.gep(base, [builder.extract_element(offsets, lane)])
                self._add_one(address, builder.extract_element(value, lane))

        self._by_adjacency(indices, GRADIENT_STRIDES, lanes, add_adjacent, add_each)

    def _add_one(self, address: ir.Value, value: ir.Value) -> None:
        self.builder.store(self.builder.fadd(self.builder.load(address), value), address)

    def _offset(self, indices: Sequence[Index], strides: int, lanes: Lanes | None) -> ir.Value:
        """Return an element's offset from the first one, or each lane's."""
        builder = self.builder
        count = None if lanes is None else lanes.number
        offset = INT64(0) if count is None else constant_of(ir.VectorType(INT64, count), 0)
        for axis, index in enumerate(indices):
            value = index.value
            if count is not None and not index.is_vector:
                value = emit_splat(builder, self._inside(value, axis, None), count)
            else:
                value = self._inside(value, axis, lanes)
            stride = self._word(strides + axis)
            if count is not None:
                stride = emit_splat(builder, stride, count)
            offset = builder.add(offset, builder.mul(value, stride))
        return offset

    def _inside(self, index: ir.Value, axis: int, lanes: Lanes | None) -> ir.Value:
        builder, size = self.builder, self._word(SIZES + axis)
        if lanes is not None:
            size = emit_splat(builder, size, lanes.number)
        zero = constant_of(index.type, 0)
        from_end = builder.icmp_signed("<", index, zero)
        index = builder.select(from_end, builder.add(index, size), index)
        is_outside = builder.icmp_unsigned(">=", index, size)
        self._tell(is_outside, lanes)
        return builder.select(is_outside, zero, index)

    def _tell(self, is_outside: ir.Value, lanes: Lanes | None) -> None:
        builder, any_ = self.builder, is_outside
        if lanes is not None:
            bits = builder.bitcast(builder.and_(is_outside, lanes.valid), ir.IntType(lanes.number))
            any_ = builder.icmp_unsigned("!=", bits, bits.type(0))
        with builder.if_then(any_, likely=False):
            builder.store(INT64(self.number + 1), self.outside)

    def _by_adjacency(
        self,
        indices: Sequence[Index],
        strides: int,
        lanes: Lanes,
        adjacent: Callable[[ir.Value], Any],
        each: Callable[[], Any],
    ) -> Any:
        """Emit both ways if elements may be adjacent, and a test of strides at run time."""
        axis = _moving_axis(indices)
        if axis is None:
            return each()
        builder, step = self.builder, indices[axis].step
        first = builder.extract_element(indices[axis].value, INT32(0))
        distance = builder.sub(lanes.count, INT64(1))
        last = builder.add(first, distance) if step == 1 else builder.sub(first, distance)
        size = self._word(SIZES + axis)
        inside = builder.and_(
            builder.icmp_unsigned("<", first, size), builder.icmp_unsigned("<", last, size)
        )
        is_adjacent = builder.icmp_unsigned("==", self._word(strides + axis), INT64(1))
        with builder.if_else(builder.and_(inside, is_adjacent)) as (then, otherwise):
            with then:
                # With a falling index, the first lane's element is the last of the vector.
                start = first if step == 1 else builder.sub(first, INT64(lanes.number - 1))
                others = [*indices[:axis], Index(INT64(0), 0), *indices[axis + 1 :]]
                offset = builder.add(self._offset(others, strides, None), start)
                from_adjacent = adjacent(offset), builder.block
            with otherwise:
                from_each = each(), builder.block
        if from_each[0] is None:
            return None
        phi = builder.phi(from_each[0].type)
        phi.add_incoming(*from_adjacent)
        phi.add_incoming(*from_each)
        return phi

    def _turned(self, indices: Sequence[Index], vector: ir.Value) -> ir.Value:
        """Reverse the lanes if the index falls from lane to lane."""
        axis = _moving_axis(indices)
        assert axis is not None
        if indices[axis].step == 1:
            return vector
        return emit_shuffle(self.builder, vector, vector, reversed(range(vector.type.count)))


def _moving_axis(indices: Sequence[Index]) -> int | None:
    """Return the only axis whose index changes from lane to lane, if by one element."""
    moving = [axis for axis, index in enumerate(indices) if index.is_vector]
    is_one = len(moving) == 1 and indices[moving[0]].step in (1, -1)
    return moving[0] if is_one else None


def _as_value(builder: ir.IRBuilder, dtype: str, stored: ir.Value) -> ir.Value:
    """Convert a loaded element to the form that operations take."""
    if dtype == "bool":
        return builder.icmp_unsigned("!=", stored, constant_of(stored.type, 0))
    return widen(builder, dtype, stored)
