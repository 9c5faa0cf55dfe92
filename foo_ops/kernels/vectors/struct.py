"""Read the parameters that a launcher hands to a kernel: a C struct of fields of 8 bytes."""

from __future__ import annotations

import hashlib
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.imputils import lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import intrinsic, models, register_model

from foo_ops.kernels.vectors.values import Pointer


class Struct(types.Type):
    """A pointer to a struct. ``fields`` are (name, type) in the order of the C++ struct.

    A type is int64, float64 or a `Pointer`.
    """

    def __init__(self, name: str, fields: tuple[tuple[str, types.Type], ...]) -> None:
        self.fields = dict(fields)
        # The name tells types apart and is part of every symbol: spelt out, the fields of
        # attention's parameters would take kilobytes of each.
        digest = hashlib.sha256(repr([(field, str(type_)) for field, type_ in fields]).encode())
        super().__init__(f"{name}_{digest.hexdigest()[:8]}")


@register_model(Struct)
class _StructModel(models.PrimitiveModel):
    def __init__(self, manager: Any, type_: Struct) -> None:
        super().__init__(manager, type_, ir.IntType(64).as_pointer())


@infer_getattr
class _StructAttributes(AttributeTemplate):
    key = Struct

    def generic_resolve(self, struct: Struct, name: str) -> types.Type | None:
        return struct.fields.get(name)


@lower_getattr_generic(Struct)
def _get_attribute(context, builder, struct, value, name):
    return _load_field(context, builder, struct, value, name)


def _load_field(context, builder, struct, value, name):
    position = list(struct.fields).index(name)
    bits = builder.load(builder.gep(value, [ir.IntType(64)(position)]))
    type_ = struct.fields[name]
    if isinstance(type_, Pointer):
        return builder.inttoptr(bits, context.get_value_type(type_))
    return builder.bitcast(bits, context.get_value_type(type_))


@intrinsic(prefer_literal=True)
def field(typing_context, struct, name):
    """Read the field whose name is a constant of the kernel."""

    def generate(context, builder, signature, args):
        return _load_field(context, builder, struct, args[0], name.literal_value)

    return struct.fields[name.literal_value](struct, name), generate


@intrinsic(prefer_literal=True)
def row_of(typing_context, struct, operand, batch, head, row):
    """Return the pointer to the first element of a row of an operand, whose name is a constant.

    The struct has the operand's pointer and its strides in elements, named after it: query,
    query_batch_stride, query_head_stride, query_row_stride.
    """
    name = operand.literal_value

    def generate(context, builder, signature, args):
        value, _, *indices = args
        pointer = _load_field(context, builder, struct, value, name)
        for axis, index in zip(("batch", "head", "row"), indices):
            stride = _load_field(context, builder, struct, value, f"{name}_{axis}_stride")
            pointer = builder.gep(pointer, [builder.mul(index, stride)])
        return pointer

    places = (types.int64, types.int64, types.int64)
    return struct.fields[name](struct, operand, *places), generate
