"""The types of kernels that Numba does not have: pointers, vectors and register tiles."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import models, register_model

from foo_ops.kernels.vectors.elements import ELEMENTS
from foo_ops.kernels.vectors.instructions import DOUBLE, FLOAT, INT32, INT64


class Pointer(types.Type):
    """Points to elements of a dtype."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        super().__init__(f"Pointer({dtype})")


class Vector(types.Type):
    """``lanes`` values of one type, in a register."""

    def __init__(self, element: types.Type, lanes: int) -> None:
        self.element = element
        self.lanes = lanes
        super().__init__(f"Vector({element} x {lanes})")


class Tile(types.Type):
    """``rows`` x ``columns`` vectors, in registers."""

    def __init__(self, rows: int, columns: int, vector: Vector) -> None:
        self.rows = rows
        self.columns = columns
        self.vector = vector
        super().__init__(f"Tile({rows} x {columns} x {vector})")


def _element_ir(type_: types.Type) -> ir.Type:
    return {
        types.float32: FLOAT,
        types.float64: DOUBLE,
        types.int32: INT32,
        types.int64: INT64,
        types.boolean: ir.IntType(1),
    }[type_]


def vector_ir(vector: Vector) -> ir.VectorType:
    return ir.VectorType(_element_ir(vector.element), vector.lanes)


@register_model(Pointer)
class _PointerModel(models.PrimitiveModel):
    def __init__(self, manager: Any, type_: Pointer) -> None:
        super().__init__(manager, type_, ELEMENTS[type_.dtype].storage.as_pointer())


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, type_: Vector) -> None:
        super().__init__(manager, type_, vector_ir(type_))


@register_model(Tile)
class _TileModel(models.PrimitiveModel):
    def __init__(self, manager: Any, type_: Tile) -> None:
        backend = ir.ArrayType(vector_ir(type_.vector), type_.rows * type_.columns)
        super().__init__(manager, type_, backend)
