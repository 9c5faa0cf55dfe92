"""Arrays as a tile kernel sees them: data pointer, sizes and strides; and their rows.

The number of dimensions of a `View` is part of its type. Strides count elements.

    x.ndim, x.size, x.rows          the number of dimensions, of elements, and of rows
    x.shape[d], x.strides[d]        size and stride of one dimension; d may be negative
    x[i, j], x[i, j] = value        one element, with as many indices as dimensions
    x.flat[i], x.flat[i] = value    the i-th element, counted over all dimensions
    x.row(i)                        a `Row`, which can be indexed: rows span the last dimension, and
                                    are counted over all others
    x.data                          the memory, for `language.load` and similar functions, at
                                    offsets computed from the strides

With ``contiguous_rows=True`` the elements of a row are adjacent, and can be read as vectors. An
element is read in the compute type (see foo_ops/kernels/simd/types.py); a value is converted to it
and rounded when written. See foo_ops/kernels/lang/indexing.py for indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.imputils import lower_cast, lower_getattr_generic
from numba.core.typeconv import Conversion
from numba.core.typing.templates import (
    AbstractTemplate,
    AttributeTemplate,
    infer_getattr,
    infer_global,
    signature,
)
from numba.extending import lower_builtin, models, register_model

from foo_ops.kernels.simd.memory import (
    DATA,
    OF_ROW,
    ROWS,
    SIZE,
    SIZES,
    STRIDES,
    is_in,
    record_unless,
)
from foo_ops.kernels.simd.types import INT64, Pointer, Row

NUMBERS = types.CPointer(types.int64)


class View(types.Type):
    """A pointer to the C++ struct ``View``.

    Attributes:
        dtype: the dtype of the elements.
        ndim: the number of dimensions.
        contiguous_rows: the elements of a row are adjacent.
        is_checked: no element outside is read or written: see foo_ops/kernels/simd/memory.py.
        argument: the argument's name in the kernel, for messages; empty for a variable that may be
            one of several arguments.
    """

    def __init__(
        self, dtype: str, ndim: int, contiguous_rows: bool, is_checked: bool, argument: str = ""
    ) -> None:
        self.dtype = dtype
        self.ndim = ndim
        self.contiguous_rows = contiguous_rows
        self.is_checked = is_checked
        self.argument = argument
        self.row = Row(dtype, contiguous_rows, is_checked)
        # With strides, the i-th element is not i elements after the first.
        self.memory = Row(dtype, True, is_checked, contiguous_rows and ndim <= 1)
        super().__init__(f"View({ndim}d, {self.row}, {argument})")

    def nameless(self) -> View:
        return View(self.dtype, self.ndim, self.contiguous_rows, self.is_checked)

    def unify(self, typing_context: Any, other: types.Type) -> View | None:
        """Return the type of a variable that may be either of two arguments."""
        return self.nameless() if is_alike(self, other) else None

    def can_convert_to(self, typing_context: Any, other: types.Type) -> Conversion | None:
        return Conversion.safe if is_alike(self, other) else None

    def described(self) -> str:
        dimensions = f"{self.ndim} dimension{'s' * (self.ndim != 1)}"
        return f"{self.argument or 'the tensor'} has {dimensions}"


def is_alike(view: View, other: types.Type) -> bool:
    return isinstance(other, View) and view.nameless() == other.nameless()


class Flat(types.Type):
    """The elements of a view, counted over all dimensions."""

    def __init__(self, view: View) -> None:
        self.view = view
        super().__init__(f"Flat({view})")


class Extents(types.Type):
    """The sizes or the strides of a view."""

    def __init__(self, view: View) -> None:
        self.view = view
        super().__init__(f"Extents({view})")


@register_model(View)
class _ViewModel(models.PrimitiveModel):
    def __init__(self, manager: Any, type_: View) -> None:
        super().__init__(manager, type_, INT64.as_pointer())


@register_model(Flat)
class _FlatModel(models.PrimitiveModel):
    def __init__(self, manager: Any, type_: Flat) -> None:
        super().__init__(manager, type_, INT64.as_pointer())


@register_model(Extents)
class _ExtentsModel(models.StructModel):
    def __init__(self, manager: Any, type_: Extents) -> None:
        super().__init__(manager, type_, [("numbers", NUMBERS), ("view", type_.view)])


@lower_cast(View, View)
def _same_view(context, builder, from_type, to_type, value):
    return value


# ----------------------------------------------------------------------------------- attributes


@infer_getattr
class _ViewAttributes(AttributeTemplate):
    key = View

    def resolve_ndim(self, view: View) -> types.Type:
        return types.int64

    def resolve_size(self, view: View) -> types.Type:
        return types.int64

    def resolve_rows(self, view: View) -> types.Type:
        return types.int64

    def resolve_shape(self, view: View) -> types.Type:
        return Extents(view)

    def resolve_strides(self, view: View) -> types.Type:
        return Extents(view)

    def resolve_data(self, view: View) -> types.Type:
        return view.memory

    def resolve_flat(self, view: View) -> types.Type:
        return Flat(view)

    def resolve_row(self, view: View) -> types.Type:
        class Method(AbstractTemplate):
            key = "foo_ops.View.row"
            prefer_literal = True

            def generic(self, args, kws):
                if len(args) != 1 or kws or not isinstance(args[0], types.Integer):
                    return None
                return signature(view.row, index_type(args[0]), recvr=view)

        return types.BoundFunction(Method, view)


def number_of(builder: ir.IRBuilder, numbers: ir.Value, position: int | ir.Value) -> ir.Value:
    """Load one of the numbers that describe an array, which do not change during a call.

    The load is marked invariant; otherwise LLVM assumes that writing an element may change the
    number: a loop with ``weight[i]`` would not be vectorised, and take 5 to 10 times as long.
    """
    index = INT64(position) if isinstance(position, int) else position
    number = builder.load(builder.gep(numbers, [index]))
    number.set_metadata("invariant.load", builder.module.add_metadata([]))
    return number


def numbers_of(builder: ir.IRBuilder, view: ir.Value, field: int) -> ir.Value:
    """Return the pointer to the sizes or to the strides."""
    return builder.inttoptr(number_of(builder, view, field), INT64.as_pointer())


def data_of(context: Any, builder: ir.IRBuilder, type_: View, view: ir.Value) -> ir.Value:
    pointer = context.get_value_type(Pointer(type_.dtype))
    return builder.inttoptr(number_of(builder, view, DATA), pointer)


def stride_of(builder: ir.IRBuilder, type_: View, view: ir.Value, dimension: int) -> ir.Value:
    if type_.contiguous_rows and dimension == type_.ndim - 1:
        return INT64(1)
    return number_of(builder, numbers_of(builder, view, STRIDES), dimension)


@lower_getattr_generic(View)
def _get_attribute(context, builder, type_, view, name):
    if name == "ndim":
        return INT64(type_.ndim)
    if name in ("size", "rows"):
        return number_of(builder, view, SIZE if name == "size" else ROWS)
    if name == "flat":
        return view
    if name == "data":
        return _memory(context, builder, type_, view)
    extents = cgutils.create_struct_proxy(Extents(type_))(context, builder)
    extents.numbers = numbers_of(builder, view, SIZES if name == "shape" else STRIDES)
    extents.view = view
    return extents._getvalue()


def _memory(context: Any, builder: ir.IRBuilder, type_: View, view: ir.Value) -> ir.Value:
    """Return the memory of a tensor, from its first element to its last one."""
    stop = INT64(1)
    for dimension in range(type_.ndim):
        size = number_of(builder, numbers_of(builder, view, SIZES), dimension)
        stride = stride_of(builder, type_, view, dimension)
        stop = builder.add(stop, builder.mul(builder.sub(size, INT64(1)), stride))
    is_empty = builder.icmp_signed("==", number_of(builder, view, SIZE), INT64(0))
    memory = cgutils.create_struct_proxy(type_.memory)(context, builder)
    memory.data = data_of(context, builder, type_, view)
    memory.stop = builder.select(is_empty, INT64(0), stop)
    if type_.is_checked:
        _let_check(builder, memory, view, INT64(-1))
    return memory._getvalue()


def _let_check(builder: ir.IRBuilder, row: Any, view: ir.Value, number: ir.Value) -> None:
    """Set the fields that a checked row needs."""
    row.first = INT64(0)
    row.view = builder.ptrtoint(view, INT64)
    row.number = number


# ---------------------------------------------------------------------------- numbers of elements


def index_type(type_: types.Integer) -> types.Type:
    """Return the type that an index is converted to: negative constants stay literals."""
    is_constant = isinstance(type_, types.IntegerLiteral)
    return type_ if is_constant and type_.literal_value < 0 else types.int64


def from_start(
    builder: ir.IRBuilder, type_: types.Type, index: ir.Value, size: ir.Value
) -> ir.Value:
    """Count a negative constant from the end; variables never count from the end."""
    return builder.add(index, size) if isinstance(type_, types.IntegerLiteral) else index


def offset_of_number(
    builder: ir.IRBuilder, type_: View, view: ir.Value, number: ir.Value, dimensions: Sequence[int]
) -> ir.Value:
    """Return the offset of the element or row ``number``, counted over the given dimensions."""
    offset, rest = INT64(0), number
    for dimension in reversed(dimensions):
        index = rest
        # The first dimension needs no division, which takes 10 ns.
        if dimension > 0:
            size = number_of(builder, numbers_of(builder, view, SIZES), dimension)
            if type_.is_checked:
                # An empty dimension must not divide by zero; the number is then outside.
                is_empty = builder.icmp_signed("==", size, INT64(0))
                size = builder.select(is_empty, INT64(1), size)
            index, rest = builder.srem(rest, size), builder.sdiv(rest, size)
        stride = stride_of(builder, type_, view, dimension)
        offset = builder.add(offset, builder.mul(index, stride))
    return offset


@lower_builtin("foo_ops.View.row", View, types.Integer)
def _row(context, builder, signature, args):
    type_, view = signature.args[0], args[0]
    rows = number_of(builder, view, ROWS)
    number = from_start(builder, signature.args[1], args[1], rows)
    # A view without dimensions has one row, of one element.
    outer = max(type_.ndim - 1, 0)
    stop = number_of(builder, numbers_of(builder, view, SIZES), outer) if type_.ndim else INT64(1)
    offset = offset_of_number(builder, type_, view, number, range(outer))
    row = cgutils.create_struct_proxy(signature.return_type)(context, builder)
    if type_.is_checked:
        is_inside = is_in(builder, number, rows)
        record_unless(context, builder, is_inside, view, OF_ROW, [args[1]])
        offset = builder.select(is_inside, offset, INT64(0))
        stop = builder.select(is_inside, stop, INT64(0))
        _let_check(builder, row, view, number)
    row.data = builder.gep(data_of(context, builder, type_, view), [offset])
    row.stop = stop
    if not type_.contiguous_rows:
        row.stride = stride_of(builder, type_, view, outer) if type_.ndim else INT64(0)
    return row._getvalue()


@infer_global(len)
class _ExtentsLength(AbstractTemplate):
    def generic(self, args, kws):
        is_extents = len(args) == 1 and isinstance(args[0], Extents)
        return signature(types.int64, *args) if is_extents else None


@lower_builtin(len, Extents)
def _length(context, builder, signature, args):
    return INT64(signature.args[0].view.ndim)
