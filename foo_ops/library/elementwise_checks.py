"""Refuse operators that an elementwise kernel does not fit, where it is registered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from foo_ops.library.kernels import count_parameters
from foo_ops.library.operators import Parameter, describe
from foo_ops.library.returns import returned_counts

Functions = Sequence[Callable[..., Any]]
"""What a kernel computes with, one for each way in which it may be called."""


def refuse_whole(operator: torch._ops.OpOverload, parameters: Sequence[Parameter]) -> None:
    """Refuse what is no element, nor the same for all elements."""
    for parameter in parameters:
        if parameter.kind == "tensors":
            raise TypeError(
                f"{operator.name()}: an elementwise kernel takes no lists of tensors, got "
                f"{parameter.name}; a tile_kernel does"
            )
        if parameter.kind == "generator":
            raise TypeError(
                f"{operator.name()}: an elementwise kernel takes no generator, since it does not "
                f"know which element it computes, got {parameter.name}; a tile_kernel does"
            )


def check_parameters(
    operator: torch._ops.OpOverload,
    parameters: Sequence[Parameter],
    functions: Functions,
    own: Collection[str],
) -> None:
    inputs = [p for p in parameters if p.role != "out"]
    if not any(p.is_tensor and not p.is_optional and p.name not in own for p in inputs):
        kind = "tensor that is promoted" if own else "tensor"
        raise TypeError(f"{operator.name()}: an elementwise kernel needs a {kind}")
    read = [p.name for p in parameters if p.is_tensor and p.role == "read"]
    for name in set(own) - set(read):
        raise TypeError(
            f"{operator.name()}: own_dtypes must name tensors that are read ({', '.join(read)}), "
            f"got {name}"
        )
    for function in functions:
        taken = count_parameters(function)
        if taken != len(inputs):
            names = ", ".join(p.name for p in inputs)
            raise TypeError(
                f"{operator.name()}: its kernel must take {len(inputs)} arguments ({names}), and "
                f"{describe(function)} takes {taken}"
            )


def check_returned(operator: torch._ops.OpOverload, functions: Functions, results: int) -> None:
    """Refuse another number of values where the code says it; the compiler refuses any other."""
    for function in functions:
        for count, line in returned_counts(function):
            if count not in (None, 0, results):
                raise TypeError(
                    f"{operator.name()}: its kernel must return {results} "
                    f"value{'s' * (results != 1)}, one for each result, and "
                    f"{describe(function)} returns {count} in line {line}"
                )
