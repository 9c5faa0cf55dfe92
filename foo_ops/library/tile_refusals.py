"""Refuse tile kernels that their operators cannot have, where they are defined."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from foo_ops.library.operators import Parameter, describe
from foo_ops.library.returns import returned_counts
from foo_ops.library.scratch import Scratch


def require_no_result(function: Callable[..., Any]) -> None:
    """Refuse a function that returns something, but for the value of a lambda's expression."""
    for count, line in returned_counts(function):
        if count != 0 and function.__name__ != "<lambda>":
            raise TypeError(
                "a tile kernel writes its results, which are arguments, and must return nothing: "
                f"{describe(function)} returns a value in line {line}"
            )


def require_verdict(function: Callable[..., Any]) -> None:
    """Refuse a function whose end, or a return statement, gives no True or False."""
    for count, line in returned_counts(function):
        if count not in (1, None):
            raise TypeError(
                "a tile kernel with refuse and without check must return True, or False where it "
                f"cannot use what it reads: {describe(function)} returns "
                f"{'nothing' if count == 0 else f'{count} values'} in line {line}"
            )


def require_scratch(function: Callable[..., Any], scratch: Mapping[str, Scratch] | None) -> None:
    """Refuse what is no scratch memory, or is not what the function takes before the tiles."""
    given = scratch or {}
    if not isinstance(given, Mapping) or not all(isinstance(s, Scratch) for s in given.values()):
        raise TypeError(
            "tile_kernel: scratch must be a dict of names and library.scratch(...), got "
            f"{scratch!r}"
        )
    names = list(inspect.signature(function).parameters)
    taken = names[-1 - len(given) : -1]
    if taken != list(given):
        raise TypeError(
            f"tile_kernel: scratch has {', '.join(given)}, which {describe(function)} must take "
            f"before its tiles, and it takes {', '.join(taken)}"
        )


def check_late_refusal(operator: torch._ops.OpOverload, parameters: Sequence[Parameter]) -> None:
    for parameter in parameters:
        if parameter.role == "in place" or parameter.kind == "generator":
            raise TypeError(
                f"{operator.name()}: a kernel that returns whether it could use what it read must "
                f"write to no argument and draw no random numbers, and {parameter.name} is "
                f"{'drawn from' if parameter.kind == 'generator' else 'written'}: give it check="
            )


def check_lists(operator: torch._ops.OpOverload, parameters: Sequence[Parameter]) -> None:
    for parameter in parameters:
        is_written = parameter.kind == "tensors" and parameter.role != "read"
        if is_written and operator._schema.returns:
            raise TypeError(
                f"{operator.name()}: an operator that writes to a list of tensors must return "
                f"nothing, -> (), got {parameter.name}"
            )
    for result in operator._schema.returns:
        if str(result.real_type) not in ("Tensor", "Optional[Tensor]"):
            raise TypeError(
                f"{operator.name()}: the results of a tile kernel are tensors, got {result.type}"
            )


def refuse_scalars_alone(operator: torch._ops.OpOverload, parameters: Sequence[Parameter]) -> None:
    if any(p.is_tensor and not p.is_optional for p in parameters):
        return
    for parameter in parameters:
        if parameter.kind == "scalar":
            raise TypeError(
                f"{operator.name()}: a Scalar comes in the compute type of the first tensor that "
                f"is always there, and there is none for {parameter.name}"
            )
