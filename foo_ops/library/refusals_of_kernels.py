"""Refuse kernels that their operators cannot have, when they are defined."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from foo_ops.compat import OpOverload
from foo_ops.kernels.compiler.inspection import returned_counts
from foo_ops.library.kernels import Scratch, count_parameters
from foo_ops.library.operators import Parameter, describe

# ------------------------------------------------------------------------------ elementwise kernels

# Refuse operators that an elementwise kernel does not fit, when it is registered.


Functions = Sequence[Callable[..., Any]]
"""The functions of a kernel, one for each way in which it may be called."""


def refuse_whole(operator: OpOverload, parameters: Sequence[Parameter]) -> None:
    """Refuse arguments that are neither elements nor the same for all elements."""
    for parameter in parameters:
        if parameter.kind == "tensors":
            raise TypeError(
                f"{operator.name()}: an elementwise kernel must not take a list of tensors, "
                f"got {parameter.name}; use a tile_kernel"
            )
        if parameter.kind == "generator":
            raise TypeError(
                f"{operator.name()}: an elementwise kernel must not take a generator, since it "
                f"does not know its element, got {parameter.name}; use a tile_kernel"
            )


def check_parameters(
    operator: OpOverload,
    parameters: Sequence[Parameter],
    functions: Functions,
    own: Collection[str],
) -> None:
    inputs = [p for p in parameters if p.role != "out"]
    if not any(p.is_tensor and not p.is_optional and p.name not in own for p in inputs):
        kind = "neither optional nor in own_dtypes" if own else "not optional"
        raise TypeError(
            f"{operator.name()}: an elementwise kernel must take a tensor that is {kind}"
        )
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
                f"{operator.name()}: its kernel must take {len(inputs)} arguments ({names}), got "
                f"{describe(function)}, which takes {taken}"
            )


def check_returned(operator: OpOverload, functions: Functions, results: int) -> None:
    """Refuse a wrong number of values if the code shows it; otherwise the compiler does.

    A kernel of gradients is first compiled in a backward pass, which is late to hear of it.
    """
    for function in functions:
        for count, line in returned_counts(function):
            if count not in (None, 0, results):
                raise TypeError(
                    f"{operator.name()}: its kernel must return {results} "
                    f"value{'s' * (results != 1)}, one for each result, got "
                    f"{describe(function)}, which returns {count} in line {line}"
                )


# ------------------------------------------------------------------------------------- tile kernels

# Refuse tile kernels that their operators cannot have, when they are defined.


def require_no_result(function: Callable[..., Any]) -> None:
    """Refuse a function that returns a value, except a lambda, which always does."""
    for count, line in returned_counts(function):
        if count != 0 and function.__name__ != "<lambda>":
            raise TypeError(
                "a tile kernel must write its results to its arguments and return nothing, got "
                f"{describe(function)}, which returns a value in line {line}"
            )


def require_verdict(function: Callable[..., Any]) -> None:
    """Refuse a function that may return nothing, or several values, instead of True or False."""
    for count, line in returned_counts(function):
        if count not in (1, None):
            raise TypeError(
                "a tile kernel with refuse and without check must return True, or False to refuse "
                f"its arguments, got {describe(function)}, which returns "
                f"{'nothing' if count == 0 else f'{count} values'} in line {line}"
            )


def require_scratch(function: Callable[..., Any], scratch: Mapping[str, Scratch] | None) -> None:
    """Require a dict of scratch memory, with the names that the function has before the tiles."""
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
            f"tile_kernel: {describe(function)} must take the scratch memory ({', '.join(given)}) "
            f"before its tiles, got {', '.join(taken)}"
        )


def check_late_refusal(operator: OpOverload, parameters: Sequence[Parameter]) -> None:
    for parameter in parameters:
        if parameter.role == "in place" or parameter.kind == "generator":
            raise TypeError(
                f"{operator.name()}: a kernel that returns False to refuse its arguments must "
                f"write to no argument and draw no random numbers, got {parameter.name}, which is "
                f"{'drawn from' if parameter.kind == 'generator' else 'written'}; use check="
            )


def check_lists(operator: OpOverload, parameters: Sequence[Parameter]) -> None:
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
                f"{operator.name()}: the results of a tile kernel must be tensors, got "
                f"{result.type}"
            )


def refuse_scalars_alone(operator: OpOverload, parameters: Sequence[Parameter]) -> None:
    if any(p.is_tensor and not p.is_optional for p in parameters):
        return
    for parameter in parameters:
        if parameter.kind == "scalar":
            raise TypeError(
                f"{operator.name()}: an operator with a Scalar must have a tensor that is not "
                f"optional, which gives the Scalar its type, got none for {parameter.name}"
            )
