"""Registries of Python functions' meanings in kernels, and in no other code of Numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from llvmlite import ir
from numba.core import types
from numba.core.imputils import Registry
from numba.core.typing import Signature, templates

# --------------------------------------------------------------------------------------- registries


NAME = "foo_ops kernel"

functions = Registry("foo_ops functions")
signatures = templates.Registry()


def define_signature(
    function: Callable[..., Any], find: Callable[[tuple[Any, ...]], Any | None]
) -> None:
    """Let ``find`` choose the signature for argument types, before Numba's own signatures."""

    class Template(templates.AbstractTemplate):
        # Signatures with a target take precedence over those for all targets.
        metadata: ClassVar[dict[str, str]] = {"target": NAME}

        def generic(self, args: tuple[Any, ...], kws: Any) -> Any | None:
            return find(args) if not kws else None

    signatures.register_global(function)(Template)


# -------------------------------------------------------------------------------------------- range

# Loops over range take a quarter of the instructions of Numba's own.
#
# Numba builds each range, each iterator and each pair (next number, whether there is one) in
# memory, and counts the numbers at run time. LLVM removes all that, but it is half of LLVM's input
# for an attention kernel.


registry = Registry("foo_ops ranges")

# Numba's layouts, which its len() reads: a range is start, stop, step; an iterator is a pointer to
# the next number, stop (undefined here), step, and a pointer to the remaining count.
_STEP, _NEXT, _COUNT = 2, 0, 3


def part_of(builder: ir.IRBuilder, struct: ir.Value, position: int) -> ir.Value:
    """Return a field of a struct: the value that was inserted there, if it is known."""
    inserted = struct
    while isinstance(inserted, ir.InsertValue):
        if list(inserted.indices) == [position]:
            return inserted.operands[1]
        inserted = inserted.operands[0]
    return builder.extract_value(struct, position)


def _struct_of(builder: ir.IRBuilder, type_: ir.Type, parts: dict[int, ir.Value]) -> ir.Value:
    value: ir.Value = ir.Constant(type_, ir.Undefined)
    for position, part in parts.items():
        value = builder.insert_value(value, part, position)
    return value


def _range(
    context: Any, builder: ir.IRBuilder, signature: Signature, args: list[ir.Value]
) -> ir.Value:
    zero, one = args[0].type(0), args[0].type(1)
    parts = {1: (zero, *args, one), 2: (*args, one), 3: args}[len(args)]
    type_ = context.get_value_type(signature.return_type)
    return _struct_of(builder, type_, dict(enumerate(parts)))


def _get_iterator(
    context: Any, builder: ir.IRBuilder, signature: Signature, args: list[ir.Value]
) -> ir.Value:
    start, stop, step = (part_of(builder, args[0], position) for position in range(3))
    count = _count(builder, start, stop, step)
    parts = {_NEXT: _slot(builder, start), _STEP: step, _COUNT: _slot(builder, count)}
    return _struct_of(builder, context.get_value_type(signature.return_type), parts)


def _slot(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    with builder.goto_entry_block():
        slot = builder.alloca(value.type)
    builder.store(value, slot)
    return slot


def _count(builder: ir.IRBuilder, start: ir.Value, stop: ir.Value, step: ir.Value) -> ir.Value:
    """Return the count of numbers; zero or less if there are none, as with a step of zero."""
    zero, one, minus_one = (step.type(value) for value in (0, 1, -1))
    distance = stop if start == zero else builder.sub(stop, start)
    if step == one:
        return distance
    if isinstance(step, ir.Constant) and step.constant > 0:
        return builder.sdiv(builder.add(distance, step.type(step.constant - 1)), step)
    is_zero = builder.icmp_signed("==", step, zero)
    sign = builder.select(builder.icmp_signed(">", step, zero), one, minus_one)
    dividend = builder.sub(builder.add(distance, step), sign)
    count = builder.sdiv(dividend, builder.select(is_zero, one, step))
    return builder.select(is_zero, zero, count)


def _next(
    context: Any, builder: ir.IRBuilder, signature: Signature, args: list[ir.Value]
) -> ir.Value:
    following, step, remaining = (
        part_of(builder, args[0], position) for position in (_NEXT, _STEP, _COUNT)
    )
    number, count = builder.load(following), builder.load(remaining)
    builder.store(builder.add(number, step), following)
    builder.store(builder.sub(count, count.type(1), flags=["nsw"]), remaining)
    is_valid = builder.icmp_signed(">", count, count.type(0))
    pair = context.get_value_type(signature.return_type)
    return _struct_of(builder, pair, {0: number, 1: is_valid})


for _number, _state, _iterator in (
    (types.int32, types.range_state32_type, types.range_iter32_type),
    (types.int64, types.range_state64_type, types.range_iter64_type),
):
    for _arguments in (1, 2, 3):
        registry.lower(range, *[_number] * _arguments)(_range)
    registry.lower("getiter", _state)(_get_iterator)
    registry.lower("iternext", _iterator)(_next)
