"""Describe the memory that a tile kernel works in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from foo_ops.library.functions import is_function

Size = int | Callable[..., int]


@dataclasses.dataclass(frozen=True)
class Scratch:
    """Memory that `scratch` describes."""

    sizes: tuple[Size, ...]
    like: str
    per_call: bool

    @property
    def dimensions(self) -> int:
        return len(self.sizes)

    def functions(self) -> list[Callable[..., int]]:
        """Return what gives each size."""
        return [_constant(size) if isinstance(size, int) else size for size in self.sizes]


def _constant(size: int) -> Callable[[], int]:
    def constant() -> int:
        return size

    return constant


def scratch(*sizes: Size, like: str, per_call: bool = False) -> Scratch:
    """Describe memory for a tile kernel to work in, for its option ``scratch``.

    The function gets it as a view, like a tensor's, of adjacent elements. What is in it at first is
    undefined; under `check_bounds` it is NaN, and -1 where elements are integers.

    Args:
        sizes: for each dimension a number, or a function that is compiled and gets those of the
            kernel's arguments and results that it names, as ``lambda input: input.shape[-1]``.
        like: the argument or result in whose compute type elements are: float32 where that is
            bfloat16 or float16.
        per_call: all threads of a call have the same memory, and ``finish`` may take it. Without it
            each thread has memory of its own, which one tile leaves to the next.

    Raises:
        TypeError: for sizes that are neither, or none.

    Example:
        >>> from foo_ops import language
        >>> foo_ops.library.define("mylib::column_sum", "(Tensor input) -> Tensor")
        >>> @foo_ops.library.register_fake("mylib::column_sum")
        ... def column_sum_fake(input):
        ...     return input.new_empty(input.shape[-1:])
        >>> def add_up(output, sums):
        ...     for part in range(1, sums.rows):
        ...         total, other = sums.row(0), sums.row(part)
        ...         for i in range(output.size):
        ...             total[i] += other[i]
        ...     for i in range(output.size):
        ...         output[i] = sums[0, i]
        >>> @foo_ops.library.register_kernel("mylib::column_sum", ("cpu", "foo"))
        ... @foo_ops.library.tile_kernel(
        ...     tiles=lambda: 16,
        ...     scratch={
        ...         "sums": foo_ops.library.scratch(
        ...             16, lambda input: input.shape[-1], like="input", per_call=True
        ...         )
        ...     },
        ...     finish=add_up,
        ... )
        ... def column_sum(input, output, sums, parts):
        ...     for part in parts:
        ...         for i in range(input.shape[-1]):
        ...             sums[part, i] = 0.0
        ...         for row in range(part, input.rows, 16):
        ...             x = input.row(row)
        ...             for i in range(input.shape[-1]):
        ...                 sums[part, i] += x[i]
        >>> torch.ops.mylib.column_sum(torch.ones(5, 3))
        tensor([5., 5., 5.])
    """
    _require(sizes)
    return Scratch(tuple(sizes), like, per_call)


def _require(sizes: Sequence[object]) -> None:
    is_right = all(is_function(size) or type(size) is int for size in sizes)
    if not sizes or not is_right:
        raise TypeError(
            f"scratch: sizes must be ints or functions, one for each dimension, got {sizes}"
        )
