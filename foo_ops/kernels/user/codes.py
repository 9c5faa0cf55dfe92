"""Read the arguments of a user's function from a signature.

Each argument has a kind, followed by "?" if it may be missing:

    tensor      a tensor of the common dtype in an elementwise kernel; a view in a tile kernel
    tensors     a list of tensors of one dtype and number of dimensions in a tile kernel
    own         a tensor that has its own dtype in an elementwise kernel
    float int bool generator    a number; a generator is passed as a seed
    scalar      a number in the compute type of the tensors
    ints floats ints[2]         a list of numbers; [2] is its length
    text dtype  a constant
    scratch     scratch memory of a tile kernel

A signature has a code for each property that a kernel is compiled for: see
foo_ops/csrc/launch/kernel_table.h.
"""

from __future__ import annotations

from collections.abc import Iterator

from numba.core import types

from foo_ops.kernels.compiler.numba_target.constants import Text
from foo_ops.kernels.lang.arguments import numbers_type

ABSENT, GIVEN = "none", "given"

_NUMBERS = {"int": types.int64, "bool": types.boolean, "generator": types.int64}
_LISTS = {"ints": "int64", "floats": "float64"}


def code_of(kind: str, rest: Iterator[str], coded: tuple[str, ...] = ("own",)) -> str:
    """Take the code of an argument from a signature, or return GIVEN if it has none.

    Args:
        kind: the argument's kind.
        rest: the codes from this argument on.
        coded: the kinds of tensors that have codes.
    """
    base_kind = kind.removesuffix("?")
    return next(rest) if base_kind != kind or base_kind in ("text", "dtype", *coded) else GIVEN


def type_of_value(
    kind: str,
    code: str,
    floats: types.Type,
    compute: types.Type | None,
    is_checked: bool,
    name: str = "",
) -> types.Type:
    """Return the type of an argument that is not missing and not a tensor.

    Args:
        kind: the argument's kind, without "?".
        code: its code in the signature.
        floats: the type in which floats are passed.
        compute: the type in which a Scalar is passed.
        is_checked: indices of lists are checked.
        name: the argument's name in the function, for messages.
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
