"""What an operator does with the rows of its tensors, as its tile kernel says."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from foo_ops.library.row_kernels import row_dimensions


@dataclasses.dataclass(frozen=True)
class Rows:
    """How many dimensions of each tensor lie within a row; None for one that is read whole.

    Attributes:
        arguments: of those that are tensors, by their names in the schema.
        results: in their order.
    """

    arguments: dict[str, int | None]
    results: Sequence[int | None]


RowReader = Callable[[], Rows | None]
"""Looks into a kernel's source; None for an operator that does not compute each row on its own."""


def make_row_reader(
    operator: torch._ops.OpOverload, function: Callable[..., Any] | None, names: Sequence[str]
) -> RowReader:
    """Make what looks into a kernel's source when it is needed: it takes too long for an import.

    Args:
        function: the kernel; None for one whose tiles are no rows.
        names: its arguments, those of the operator and then the results.
    """
    arguments, returns = operator._schema.arguments, operator._schema.returns
    own = {it.name: name for it, name in zip(arguments, names) if "Tensor" in str(it.type)}
    results = list(names[len(arguments) :])
    # A result that is an argument, where the function has no name for it of its own.
    results = results or [_alias(it, arguments, names) for it in returns]
    written = [*(own[it.name] for it in arguments if it.is_write), *results]

    @functools.cache
    def read() -> Rows | None:
        found = function and row_dimensions(function, [*own.values(), *results], written)
        # The first tensor has the rows that are counted.
        if not found or found[next(iter(own.values()))] != 1:
            return None
        of_arguments = {argument: found[name] for argument, name in own.items()}
        return Rows(of_arguments, [found[name] for name in results])

    return read


def _alias(result: Any, arguments: Sequence[Any], names: Sequence[str]) -> str:
    aliases = result.alias_info.before_set
    return next(
        name
        for argument, name in zip(arguments, names)
        if argument.alias_info is not None and argument.alias_info.before_set == aliases
    )
