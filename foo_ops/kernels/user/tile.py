"""The loop around a user's tile kernel: decode the arguments, and run a range of tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from numba import njit
from numba.core import types

from foo_ops.kernels.compiler.kernel import CHECKED, Kernel, size_name
from foo_ops.kernels.lang.arguments import (
    ABSENT,
    Tensors,
    code_of,
    make_argument_reader,
    type_of_value,
)
from foo_ops.kernels.lang.views import View
from foo_ops.kernels.simd.types import ELEMENTS

# const int64_t* arguments, int64_t phase, int64_t* count, int64_t begin, int64_t end: see
# csrc/ops/tile.h.
ARGUMENT_TYPES = (
    types.CPointer(types.int64),
    types.int64,
    types.CPointer(types.int64),
    types.int64,
    types.int64,
)

# The phases of a call. tests/project/test_agreement.py compares them with C++'s.
COUNT_TILES, RUN_TILES, FINISH_TILES = range(3)
REFUSED = -(2**63)
"""The number of tiles that reports a failed check."""


def make_tile_kernel(
    signature: str,
    kinds: tuple[str, ...],
    names: tuple[str, ...],
    contiguous_rows: bool,
    taken: Mapping[str, tuple[int, ...]],
    scratch: tuple[tuple[int, int], ...],
    refuses_late: bool,
    function: Callable,
    *others: Callable,
) -> Kernel:
    """Make the kernel that runs a function over ranges of tiles.

    Args:
        signature: a dtype with a number of dimensions for each tensor, and the codes of other
            arguments; at the end "checked" if accesses are checked. kernels/lang/arguments.py has
            the codes and the kinds.
        kinds: the kind of each argument; at the end "scratch" for each view of scratch memory.
        names: the names of the function's arguments.
        contiguous_rows: the elements of a row are adjacent.
        taken: the name of each of the other functions, and the arguments that it takes.
        scratch: for each view of scratch memory, the argument whose compute type it has, and its
            number of dimensions.
        refuses_late: the function returns whether the values it read are valid.
        function: ``function(*arguments, tiles)``.
        others: "tiles" returns the number of tiles, by default the first tensor's number of rows;
            "check" returns whether to run at all; "finish" is called after all tiles; "size 0",
            "size 1", ... return the sizes of all views of scratch memory, one after the other.
    """
    argument_types = types_of_arguments(signature, kinds, names, contiguous_rows, scratch)
    arguments_at = make_argument_reader(argument_types, range(len(kinds)))

    def called(name: str, default: Callable, *default_taken: int) -> Callable:
        given = dict(zip(taken, others)).get(name, default)
        picked_at = make_argument_reader(argument_types, taken.get(name, default_taken))

        @njit
        def call(arguments):
            return given(*picked_at(arguments))

        return call

    tiles = called("tiles", _rows, *[kinds.index("tensor")] if "tensor" in kinds else [])
    check = called("check", _always)
    finish = called("finish", _always)
    write_sizes = _nothing
    for position in range(sum(dimensions for _, dimensions in scratch)):
        write_sizes = _then(write_sizes, called(size_name(position), _always), position + 1)

    @njit
    def run_all(arguments, count, begin, end):
        function(*arguments_at(arguments), range(begin, end))

    @njit
    def run_or_refuse(arguments, count, begin, end):
        if not function(*arguments_at(arguments), range(begin, end)):
            count[0] = REFUSED

    run = run_or_refuse if refuses_late else run_all

    def loop(arguments, phase, count, begin, end):
        if phase == COUNT_TILES:
            count[0] = tiles(arguments) if check(arguments) else REFUSED
            if count[0] >= 0:
                write_sizes(arguments, count)
        elif phase == RUN_TILES:
            run(arguments, count, begin, end)
        else:
            finish(arguments)

    return Kernel(loop, ARGUMENT_TYPES, vectorizes=True)


@njit
def _nothing(arguments, count):
    return None


def _then(first: Callable, size: Callable, position: int) -> Callable:
    """Make a function that writes one more size to ``count`` after ``first`` has run."""

    @njit
    def write(arguments, count):
        first(arguments, count)
        count[position] = size(arguments)

    return write


@njit
def _always():
    return True


@njit
def _rows(view):
    return view.rows


def types_of_arguments(
    signature: str,
    kinds: tuple[str, ...],
    names: tuple[str, ...],
    contiguous_rows: bool,
    scratch: tuple[tuple[int, int], ...],
) -> tuple[types.Type, ...]:
    """The Numba type of each argument."""
    codes = signature.split(",")
    is_checked = codes[-1] == CHECKED

    def view(code: str, name: str) -> View:
        dtype, _, dimensions = code.partition("-")
        if dtype not in ELEMENTS:
            raise TypeError(f"a kernel cannot read {dtype}")
        return View(dtype, int(dimensions.removesuffix("d")), contiguous_rows, is_checked, name)

    rest, described, argument_types = iter(codes), iter(scratch), list[types.Type]()
    given = [code_of(kind, rest, ("tensor", "tensors")) for kind in kinds]
    # A Scalar may come before the tensor whose compute type it has.
    first = next(
        (code.partition("-")[0] for kind, code in zip(kinds, given) if kind == "tensor"), ""
    )
    scalars = ELEMENTS[first].compute if first in ELEMENTS else None
    for kind, name, code in zip(kinds, names, given):
        base_kind = kind.removesuffix("?")
        if base_kind == "scratch":
            like, dimensions = next(described)
            compute = str(ELEMENTS[argument_types[like].dtype].compute)
            argument_types.append(View(compute, dimensions, True, is_checked, name))
            continue
        if code == ABSENT:
            argument_types.append(types.none)
        elif base_kind == "tensor":
            argument_types.append(view(code, name))
        elif base_kind == "tensors":
            argument_types.append(Tensors(view(code, name)))
        else:
            argument_types.append(
                type_of_value(base_kind, code, types.float64, scalars, is_checked, name)
            )
    return tuple(argument_types)
