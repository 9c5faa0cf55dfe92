"""The loop around a user's tile kernel: arguments out of numbers, and a range of tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from foo_ops.kernels.elementwise import scalar_of
from foo_ops.kernels.jit import Kernel
from foo_ops.kernels.simd import ELEMENTS, INT64
from foo_ops.kernels.view import View

# const int64_t* arguments, int64_t* count, int64_t begin, int64_t end: see csrc/ops/tile.cpp.
ARGUMENT_TYPES = (
    types.CPointer(types.int64),
    types.CPointer(types.int64),
    types.int64,
    types.int64,
)
SCALARS = {"float": types.float64, "int": types.int64, "bool": types.boolean}


def tile(
    signature: str,
    kinds: tuple[str, ...],
    contiguous_rows: bool,
    names: tuple[str, ...],
    function: Callable,
    *others: Callable,
) -> Kernel:
    """Kernel that runs a function over ranges of tiles.

    Args:
        signature: a dtype for each tensor, "none" or "given" for what is optional.
        kinds: "tensor" or one of `SCALARS` for each argument, with "?" after it where it is
            optional.
        contiguous_rows: the elements of a row are adjacent.
        names: what the other functions are.
        function: ``function(*arguments, tiles)``.
        others: "tiles" of the arguments is the number of tiles, by default that of the rows of the
            first tensor; "check" tells whether there may be any.
    """
    named = dict(zip(names, others))
    tiles = named["tiles"] if "tiles" in named else _rows_of(kinds.index("tensor"))
    check = named.get("check", _always)
    arguments_at = _arguments_at(_argument_types(signature, kinds, contiguous_rows))

    def loop(arguments, count, begin, end):
        values = arguments_at(arguments)
        if begin == end:
            count[0] = tiles(*values) if check(*values) else -1
        else:
            function(*values, range(begin, end))

    return Kernel(loop, ARGUMENT_TYPES, vectorizes=True)


@njit
def _always(*arguments):
    return True


def _rows_of(position: int) -> Callable:
    @njit
    def rows(*arguments):
        return arguments[position].rows

    return rows


def _argument_types(
    signature: str, kinds: tuple[str, ...], contiguous_rows: bool
) -> tuple[types.Type, ...]:
    """The Numba type of each argument."""
    codes = iter(signature.split(","))
    return tuple(_argument_type(kind, codes, contiguous_rows) for kind in kinds)


def _argument_type(kind: str, codes: Any, contiguous_rows: bool) -> types.Type:
    plain = kind.removesuffix("?")
    code = next(codes) if plain == "tensor" or kind != plain else "given"
    if code == "none":
        return types.none
    if plain != "tensor":
        return SCALARS[plain]
    if code not in ELEMENTS:
        raise TypeError(f"a kernel cannot read {code}")
    return View(code, contiguous_rows)


def _arguments_at(argument_types: tuple[types.Type, ...]) -> Callable:
    """The function that gives a tuple with each argument's value."""
    values_type = types.Tuple(argument_types)

    @intrinsic
    def arguments_at(typing_context, numbers):
        def generate(context, builder, signature, args):
            values = []
            for position, type_ in enumerate(argument_types):
                bits = builder.load(builder.gep(args[0], [INT64(position)]))
                values.append(_value(context, builder, type_, bits))
            return context.make_tuple(builder, values_type, values)

        return values_type(numbers), generate

    return arguments_at


def _value(context: Any, builder: ir.IRBuilder, type_: types.Type, bits: ir.Value) -> ir.Value:
    if type_ == types.none:
        return context.get_dummy_value()
    if isinstance(type_, View):
        return builder.inttoptr(bits, context.get_value_type(type_))
    return scalar_of(context, builder, type_, bits)
