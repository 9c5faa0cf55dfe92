"""Read in a kernel what its texts may be: ``mode: typing.Literal["same", "valid"]``."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from foo_ops.library.operators import Parameter, describe


def with_choices(
    operator: torch._ops.OpOverload,
    parameters: Sequence[Parameter],
    function: Callable[..., Any],
    inherited: Mapping[str, tuple[str, ...]] | None = None,
) -> tuple[Parameter, ...]:
    """Return the parameters of an operator, with the choices that its kernel is annotated with.

    Args:
        operator: the operator.
        parameters: all of its arguments.
        function: takes them in this order.
        inherited: the choices of arguments that are not annotated, by their names.

    Raises:
        TypeError: for a text without choices.
    """
    names = list(inspect.signature(function).parameters)
    found = []
    for parameter, name in zip(parameters, names):
        if parameter.kind == "text":
            choices = choices_in(_annotation(function, name))
            choices = choices or (inherited or {}).get(parameter.name, ())
            if not choices:
                raise TypeError(
                    f"{operator.name()}: {parameter.name} is str, and its kernel must say which "
                    f"texts there are: annotate {name} in {describe(function)} with "
                    'typing.Literal["a", "b"]'
                )
            parameter = dataclasses.replace(parameter, choices=choices)
        found.append(parameter)
    return (*found, *parameters[len(found) :])


def choices_in(hint: Any) -> tuple[str, ...]:
    """Return the texts of a Literal, or of one that may be None; nothing for anything else.

    Raises:
        ValueError: for a text that no signature of a kernel can have.
    """
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next((it for it in typing.get_args(hint) if it is not type(None)), None)
    texts = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
    if not all(isinstance(text, str) for text in texts):
        return ()
    for text in texts:
        if not text.isprintable() or any(sign in text for sign in ",'\"\\"):
            raise ValueError(f"a choice must have no comma, quote or backslash, got {text!r}")
    return texts


def _annotation(function: Callable[..., Any], name: str) -> Any:
    hint = getattr(function, "__annotations__", {}).get(name)
    if not isinstance(hint, str):
        return hint
    # Others may be names that only a type checker knows.
    alone = types.SimpleNamespace(__annotations__={name: hint}, __globals__=function.__globals__)
    return typing.get_type_hints(alone, globalns=function.__globals__)[name]
