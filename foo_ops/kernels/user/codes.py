"""Read in a signature what the arguments of a user's function are.

Each argument has a kind, with "?" after it where it may be missing:

    tensor      of the common dtype in an elementwise kernel; a view in a tile kernel
    tensors     a list of tensors of one dtype and number of dimensions in a tile kernel
    own         a tensor that has its own dtype in an elementwise kernel
    float int bool generator    a number; a generator comes as a seed
    scalar      a number in the compute type of the tensors
    ints floats ints[2]         a list of numbers, or of so many
    text dtype  a constant
    scratch     scratch memory of a tile kernel

The signature has a code for what a kernel is compiled for: see foo_ops/csrc/launch/kernel_table.h.
"""

from __future__ import annotations

from collections.abc import Iterator

from numba.core import types

from foo_ops.kernels.compiler.numba_target.texts import Text
from foo_ops.kernels.lang.arguments import numbers_type

ABSENT, GIVEN = "none", "given"

_NUMBERS = {"int": types.int64, "bool": types.boolean, "generator": types.int64}
_LISTS = {"ints": "int64", "floats": "float64"}


def code_of(kind: str, rest: Iterator[str], coded: tuple[str, ...] = ("own",)) -> str:
    """Take the code of an argument from a signature, where it has one.

    Args:
        kind: of the argument.
        rest: the codes of this argument and those after it.
        coded: the kinds of tensors that have codes.
    """
    plain = kind.removesuffix("?")
    return next(rest) if plain != kind or plain in ("text", "dtype", *coded) else GIVEN


def type_of_value(
    kind: str,
    code: str,
    floats: types.Type,
    compute: types.Type | None,
    is_checked: bool,
    name: str = "",
) -> types.Type:
    """Return the type of an argument that is there and no tensor.

    Args:
        kind: of the argument, without "?".
        code: in the signature.
        floats: the type in which floats are given.
        compute: the type in which a Scalar is given.
        is_checked: indices of lists are checked.
        name: what the function calls it, for messages.
    """
    if kind == "text":
        return Text(code[1:-1])
    if kind == "dtype":
        return Text(code)
    if kind == "scalar":
        return compute
    list_, _, count = kind.partition("[")
    if list_ in _LISTS:
        element = floats if list_ == "floats" else types.int64
        size = int(count[:-1]) if count else None
        return numbers_type(_LISTS[list_], element, size, is_checked, name)
    return floats if kind == "float" else _NUMBERS[kind]
