"""The types of kernels that Numba does not have: pointers, rows, vectors and register tiles."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import errors, types
from numba.extending import models, register_model

from foo_ops.kernels.vectors.elements import ELEMENTS
from foo_ops.kernels.vectors.instructions import DOUBLE, FLOAT, INT8, INT32, INT64

HAS_STRIDE = (
    "a row has a stride, and is no pointer to vectors, unless tile_kernel is given "
    "contiguous_rows=True"
)


class Pointer(types.Type):
    """Points to elements of a dtype."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        super().__init__(f"Pointer({dtype})")


class Row(types.Type):
    """Elements of a dtype that are a stride apart, or adjacent.

    Attributes:
        element: the dtype.
        is_contiguous: the stride is 1, so that they can be read as vectors.
        is_checked: no element outside is read or written; see bounds.py.
        is_indexable: ``row[i]`` is an element. It is not for a tensor's memory, where strides are
            for the kernel to follow.
    """

    def __init__(
        self, element: str, is_contiguous: bool, is_checked: bool, is_indexable: bool = True
    ) -> None:
        self.element = element
        self.is_contiguous = is_contiguous
        self.is_checked = is_checked
        self.is_indexable = is_indexable
        words = ["contiguous"] * is_contiguous + ["checked"] * is_checked
        words += ["memory"] * (not is_indexable)
        super().__init__(f"Row({', '.join([element, *words])})")

    @property
    def dtype(self) -> str:
        """Return the dtype to functions of vectors, which take adjacent elements only."""
        if not self.is_contiguous:
            raise errors.TypingError(HAS_STRIDE)
        return self.element


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
        types.int8: INT8,
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


@register_model(Row)
class _RowModel(models.StructModel):
    """The elements before ``stop`` are inside; in a checked row those from ``first`` on.

    ``view`` is the tensor's, and ``number`` says which row this is, or -1 for its whole memory.
    """

    def __init__(self, manager: Any, type_: Row) -> None:
        fields = [("data", Pointer(type_.element)), ("stop", types.int64)]
        if not type_.is_contiguous:
            fields.append(("stride", types.int64))
        if type_.is_checked:
            fields += [(name, types.int64) for name in ("first", "view", "number")]
        super().__init__(manager, type_, fields)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, type_: Vector) -> None:
        super().__init__(manager, type_, vector_ir(type_))


@register_model(Tile)
class _TileModel(models.PrimitiveModel):
    def __init__(self, manager: Any, type_: Tile) -> None:
        backend = ir.ArrayType(vector_ir(type_.vector), type_.rows * type_.columns)
        super().__init__(manager, type_, backend)
