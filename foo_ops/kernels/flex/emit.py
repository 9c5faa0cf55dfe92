"""Emit a program on the vectors of a score tile, and call it from the attention kernels."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from foo_ops.kernels.flex.captured import Captured, Index, Lanes, Place
from foo_ops.kernels.flex.operations import ELEMENT_TYPES, emit_cast, emit_operation
from foo_ops.kernels.flex.program import Gradient, Node, Program
from foo_ops.kernels.simd.types import (
    DOUBLE,
    INT32,
    INT64,
    Pointer,
    constant_of,
    emit_shuffle,
    emit_splat,
    lanes_of,
)

# ----------------------------------------------------------------------------------------- programs

# Emits a program on the vectors of a score tile, which hold several queries for one key.
#
# A value is a vector if it depends on the query, and a scalar otherwise. Values are hoisted out of
# the loop over the scores: those that depend on neither query nor key are computed once for a tile,
# those that depend on one of them once for a vector of queries or a key:
#
#     values of the head
#     for each vector of queries:
#         values of the query
#         for each key:
#             values of the key, values of both; the score
#         gradients of elements that depend on the query
#     gradients of elements that depend on the head only


# Arguments of all calls from a launcher, in words of 8 bytes: the factor that turns products into
# scores, the numbers, the integers, the descriptions of captured tensors, and the address to which
# to write the number, from 1 on, of a tensor that was indexed outside.
SCALE, NUMBERS, INTEGERS, CAPTURED, OUTSIDE = range(5)

# The place of a call: the numbers of queries and keys of a tile and their positions, and the sums
# of the captured tensors' gradients.
PLACES = (
    *("queries", "keys", "first_query", "first_key"),
    *("batch", "head", "key_head", "chunk"),
)

# Dependencies of a value, as bits.
OF_HEAD, OF_KEY, OF_QUERY, OF_BOTH = range(4)


@dataclasses.dataclass(frozen=True)
class TilePrograms:
    """The programs that are applied to a tile's scores.

    Attributes:
        dtype: the compute type of the tile.
        tile_stride: the stride of a key, in elements.
        score_mod: turns the product of query and key into a score, or None.
        mask_mod: returns whether the query sees the key, or None.
        backward: turns the gradient of the modified score into that of the product, or None.
        lowest: finite scores are limited to this and to its negative.
        counts: read no scores; write to ``gradients`` the number of scores, as an int64, that
            ``mask_mod`` lets through.
    """

    dtype: str
    tile_stride: int
    lowest: float
    score_mod: Program | None = None
    mask_mod: Program | None = None
    backward: Program | None = None
    counts: bool = False


def emit_tile_programs(
    builder: ir.IRBuilder, programs: TilePrograms, pointers: dict[str, ir.Value]
) -> None:
    """Emit the loops over a tile.

    Args:
        builder: the builder to emit to.
        programs: the programs to emit: ``score_mod`` and ``mask_mod``, or ``backward`` alone.
        pointers: ``arguments``, from the launcher; the tile ``scores``, which holds products; the
            tile ``gradients``, for ``backward``; and a number for each of `PLACES`.
    """
    _TileEmitter(builder, programs, pointers).emit()


class _TileEmitter:
    def __init__(
        self, builder: ir.IRBuilder, programs: TilePrograms, pointers: dict[str, ir.Value]
    ) -> None:
        self.builder, self.programs = builder, programs
        self.scores, self.gradients = pointers["scores"], pointers["gradients"]
        self.places = {name: pointers[name] for name in PLACES}
        self.words = pointers["arguments"]
        self.lanes = lanes_of(programs.dtype)
        self.vector = ir.VectorType(ELEMENT_TYPES[programs.dtype], self.lanes)
        self.inputs: dict[str, ir.Value] = {
            "batch": builder.trunc(self.places["batch"], INT32),
            "head": builder.trunc(self.places["head"], INT32),
        }
        # The type of the visible scores' count, in each lane.
        self.counted = ir.VectorType(INT32, self.lanes)
        given = (programs.score_mod, programs.mask_mod, programs.backward)
        self.values = [_Values(self, program) for program in given if program is not None]

    def emit(self) -> None:
        builder = self.builder
        self._emit_level(OF_HEAD)
        self._begin_sums(OF_HEAD)
        if self.programs.counts:
            self.count = cgutils.alloca_once(builder, self.counted)
            builder.store(constant_of(self.counted, 0), self.count)
        stop, step = self.places["queries"], INT64(self.lanes)
        with cgutils.for_range_slice(builder, INT64(0), stop, step) as (column, _):
            self._emit_column(column)
        for sum_ in self._sums_at(OF_HEAD):
            sum_.add(self._reduced(builder.load(sum_.total)), None)
        if self.programs.counts:
            count = builder.zext(self._reduced(builder.load(self.count)), INT64)
            builder.store(count, builder.bitcast(self.gradients, INT64.as_pointer()))

    def _emit_column(self, column: ir.Value) -> None:
        builder = self.builder
        left = builder.sub(self.places["queries"], column)
        is_whole = builder.icmp_signed("<", INT64(self.lanes), left)
        count = builder.select(is_whole, INT64(self.lanes), left)
        numbers = ir.Constant(ir.VectorType(INT32, self.lanes), list(range(self.lanes)))
        last = emit_splat(builder, builder.trunc(builder.sub(count, INT64(1)), INT32), self.lanes)
        valid = builder.icmp_signed("<=", numbers, last)
        lanes = Lanes(self.lanes, valid, count)
        first = builder.trunc(builder.add(self.places["first_query"], column), INT32)
        # Lanes without a query repeat the last one.
        near = builder.select(valid, numbers, last)
        self.inputs["query"] = builder.add(emit_splat(builder, first, self.lanes), near)
        self._emit_level(OF_QUERY, lanes)
        self._begin_sums(OF_QUERY)
        with cgutils.for_range(builder, self.places["keys"], intp=INT64) as loop:
            self._emit_key(column, loop.index, lanes)
        for sum_ in self._sums_at(OF_QUERY):
            sum_.add(builder.load(sum_.total), lanes)

    def _emit_key(self, column: ir.Value, key: ir.Value, lanes: Lanes) -> None:
        builder, programs = self.builder, self.programs
        self.inputs["key"] = builder.trunc(builder.add(self.places["first_key"], key), INT32)
        self._emit_level(OF_KEY, lanes)
        if programs.counts:
            self._emit_level(OF_BOTH, lanes)
            self._count(lanes)
            return
        index = builder.add(builder.mul(key, INT64(programs.tile_stride)), column)
        scale = emit_splat(builder, self._scale, self.lanes)
        score = builder.fmul(builder.load(self._address(self.scores, index), align=4), scale)
        self.inputs["score"] = score
        if programs.backward is not None:
            target = self._address(self.gradients, index)
            self.inputs["grad"] = builder.load(target, align=4)
            self._emit_level(OF_BOTH, lanes)
            (values,) = self.values
            if programs.backward.nodes[programs.backward.output].name != "grad":
                result = self._output(values, programs.backward)
                nothing = constant_of(self.vector, 0.0)
                builder.store(builder.select(lanes.valid, result, nothing), target, align=4)
            self._add_to_sums(values, lanes)
            return
        self._emit_level(OF_BOTH, lanes)
        rest = list(self.values)
        if programs.score_mod is not None:
            score = self._limited(self._output(rest.pop(0), programs.score_mod))
        if programs.mask_mod is not None:
            (values,) = rest
            sees = values.vector(programs.mask_mod.output, "bool")
            score = builder.select(sees, score, constant_of(self.vector, -math.inf))
        builder.store(score, self._address(self.scores, index), align=4)

    def _count(self, lanes: Lanes) -> None:
        builder, mask_mod = self.builder, self.programs.mask_mod
        assert mask_mod is not None
        (values,) = self.values
        sees = builder.and_(values.vector(mask_mod.output, "bool"), lanes.valid)
        count = builder.add(builder.load(self.count), builder.zext(sees, self.counted))
        builder.store(count, self.count)

    def _output(self, values: _Values, program: Program) -> ir.Value:
        return values.vector(program.output, self.programs.dtype)

    def _limited(self, score: ir.Value) -> ir.Value:
        """Keep finite scores finite in units of log 2 too; infinities and NaN are kept."""
        builder = self.builder
        for relation, sign in ((">", 1.0), ("<", -1.0)):
            infinite = constant_of(self.vector, -sign * math.inf)
            bound = constant_of(self.vector, sign * self.programs.lowest)
            is_finite = builder.fcmp_ordered(relation, score, infinite)
            is_beyond = builder.fcmp_ordered(relation, bound, score)
            score = builder.select(builder.and_(is_finite, is_beyond), bound, score)
        return score

    def _address(self, tile: ir.Value, index: ir.Value) -> ir.Value:
        return self.builder.bitcast(self.builder.gep(tile, [index]), self.vector.as_pointer())

    def _emit_level(self, level: int, lanes: Lanes | None = None) -> None:
        for values in self.values:
            values.emit(level, lanes)
        if level == OF_HEAD:
            scale = self.builder.bitcast(self.word(SCALE), DOUBLE)
            self._scale = emit_cast(self.builder, "float64", scale, self.programs.dtype)

    def word(self, position: int) -> ir.Value:
        return self.builder.load(self.builder.gep(self.words, [INT64(position)]))

    def captured(self, number: int) -> Captured:
        pointer = INT64.as_pointer()
        words, outside = (
            self.builder.inttoptr(self.word(position), pointer) for position in (CAPTURED, OUTSIDE)
        )
        return Captured(self.builder, number, words, outside)

    # ---------------------------------------------------------------------------------- gradients

    def _sums_at(self, level: int) -> list[_Sum]:
        sums = [sum_ for values in self.values for sum_ in values.sums]
        return [sum_ for sum_ in sums if sum_.level == level]

    def _begin_sums(self, level: int) -> None:
        """Allocate a sum over keys for each gradient whose element is the same for all keys."""
        for sum_ in self._sums_at(level):
            sum_.total = cgutils.alloca_once(self.builder, self.vector)
            self.builder.store(constant_of(self.vector, 0.0), sum_.total)

    def _add_to_sums(self, values: _Values, lanes: Lanes) -> None:
        builder = self.builder
        for sum_ in values.sums:
            value = values.vector(sum_.gradient.value, self.programs.dtype)
            value = builder.select(lanes.valid, value, constant_of(self.vector, 0.0))
            if sum_.level == OF_BOTH:
                sum_.add(value, lanes)
            elif sum_.level == OF_KEY:
                sum_.add(self._reduced(value), lanes)
            else:
                builder.store(builder.fadd(builder.load(sum_.total), value), sum_.total)

    def _reduced(self, vector: ir.Value) -> ir.Value:
        """Sum the lanes, in the same order on every processor."""
        count = self.lanes
        while count > 1:
            count //= 2
            other = [lane + count for lane in range(count)]
            upper, lower = (
                emit_shuffle(self.builder, vector, vector, lanes) for lanes in (other, range(count))
            )
            add = self.builder.add if vector.type.element == INT32 else self.builder.fadd
            vector = add(lower, upper)
        return self.builder.extract_element(vector, INT32(0))


class _Values:
    """The values of a program's nodes that have been emitted so far."""

    def __init__(self, tile: _TileEmitter, program: Program) -> None:
        self.tile, self.builder, self.program = tile, tile.builder, program
        self.levels: list[int] = []
        self.steps: list[int | None] = []
        for node in program.nodes:
            self.levels.append(self._level_of(node))
            self.steps.append(self._step_of(node))
        self.emitted: dict[int, ir.Value] = {}
        self.sums = [_Sum(self, gradient) for gradient in program.gradients]

    def _level_of(self, node: Node) -> int:
        if node.operation == "input":
            return {"query": OF_QUERY, "key": OF_KEY, "score": OF_BOTH, "grad": OF_BOTH}.get(
                node.name, OF_HEAD
            )
        level = OF_HEAD
        for operand in node.arguments:
            level |= self.levels[operand]
        return level

    def _step_of(self, node: Node) -> int | None:
        """Return the step of an integer from lane to lane, or None if it is not known."""
        if not self.levels[len(self.steps)] & OF_QUERY:
            return 0
        if node.operation == "input":
            return 1 if node.name == "query" else None
        steps = [step for operand in node.arguments if (step := self.steps[operand]) is not None]
        dtypes = [self.program.nodes[operand].dtype for operand in node.arguments]
        are_exact = all(dtype in ("int32", "int64") for dtype in (*dtypes, node.dtype))
        if not are_exact or len(steps) < len(node.arguments):
            return None
        if node.operation == "cast":
            return steps[0]
        if node.operation == "neg":
            return -steps[0]
        if node.operation in ("add", "sub"):
            return steps[0] + steps[1] if node.operation == "add" else steps[0] - steps[1]
        return None

    def emit(self, level: int, lanes: Lanes | None) -> None:
        for number, node in enumerate(self.program.nodes):
            if self.levels[number] == level:
                self.emitted[number] = self._emitted(node, level, lanes)

    def _emitted(self, node: Node, level: int, lanes: Lanes | None) -> ir.Value:
        builder, tile = self.builder, self.tile
        if node.operation == "input":
            given = "int32" if node.name not in ("score", "grad") else tile.programs.dtype
            return emit_cast(builder, given, tile.inputs[node.name], node.dtype)
        if node.operation in ("number", "integer"):
            is_number = node.operation == "number"
            element, source = (DOUBLE, "float64") if is_number else (INT64, "int64")
            words = tile.word(NUMBERS if is_number else INTEGERS)
            pointer = builder.inttoptr(words, element.as_pointer())
            value = builder.load(builder.gep(pointer, [INT64(node.operands[0])]))
            return emit_cast(builder, source, value, node.dtype)
        if node.operation == "load":
            indices = [self.index(operand) for operand in node.arguments]
            return tile.captured(node.operands[0]).read(node.dtype, indices, lanes)
        operands = [self._operand(operand, level) for operand in node.arguments]
        return emit_operation(builder, node.operation, node.dtype, operands)

    def _operand(self, number: int, level: int) -> tuple[str, ir.Value]:
        value = self.emitted[number]
        if level & OF_QUERY and not self.levels[number] & OF_QUERY:
            value = emit_splat(self.builder, value, self.tile.lanes)
        return self.program.nodes[number].dtype, value

    def vector(self, number: int, dtype: str) -> ir.Value:
        """Return a value as a vector of ``dtype``."""
        own, value = self._operand(number, OF_BOTH)
        return emit_cast(self.builder, own, value, dtype)

    def index(self, number: int) -> Index:
        dtype, value = self.program.nodes[number].dtype, self.emitted[number]
        return Index(emit_cast(self.builder, dtype, value, "int64"), self.steps[number])


class _Sum:
    """A sum that a program adds to the gradient of a captured tensor."""

    def __init__(self, values: _Values, gradient: Gradient) -> None:
        self.values, self.gradient = values, gradient
        # The sum of each lane, if the element is the same for all keys.
        self.total: Any = None
        self.level = OF_HEAD
        for index in gradient.indices:
            self.level |= values.levels[index]

    def add(self, value: ir.Value, lanes: Lanes | None) -> None:
        tile = self.values.tile
        place = Place(*(tile.places[name] for name in ("batch", "key_head", "chunk")))
        indices = [self.values.index(index) for index in self.gradient.indices]
        captured = tile.captured(self.gradient.captured)
        captured.add(tile.programs.dtype, value, indices, lanes, place)


# -------------------------------------------------------------------------------- calls of programs

# Runs programs on score tiles in a kernel, and calls such a kernel by its address.


def argument_types(dtype: str) -> tuple[Any, ...]:
    """Types of the launcher's arguments, the tiles of scores and gradients, and a call's place."""
    return (
        Pointer("int64"), Pointer(dtype), Pointer(dtype), *(types.int64 for _ in PLACES)
    )  # fmt: skip


def make_program_runner(programs: TilePrograms) -> Callable:
    """Make ``run(arguments, scores, gradients, *places)``: the code of the programs."""
    names = ("arguments", "scores", "gradients", *PLACES)

    @intrinsic
    def run(
        typing_context, arguments, scores, gradients, queries, keys, first_query, first_key, batch,
        head, key_head, chunk,
    ):  # fmt: skip
        def generate(context, builder, signature, args):
            emit_tile_programs(builder, programs, dict(zip(names, args)))
            return context.get_dummy_value()

        return types.void(*argument_types(programs.dtype)), generate

    return run


@functools.cache
def make_program_caller(dtype: str) -> Callable:
    """Make ``call(address, arguments, scores, gradients, *places)``."""

    @intrinsic
    def call(
        typing_context, address, arguments, scores, gradients, queries, keys, first_query,
        first_key, batch, head, key_head, chunk,
    ):  # fmt: skip
        def generate(context, builder, signature, args):
            operands = list(args[1:])
            function = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
            builder.call(builder.inttoptr(args[0], function.as_pointer()), operands)
            return context.get_dummy_value()

        return types.void(types.int64, *argument_types(dtype)), generate

    return call
