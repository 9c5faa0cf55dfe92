"""Make the fake kernels of ``f.out`` and ``f_``, which that of ``f`` tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from foo_ops import _C
from foo_ops.library.kernels import cpp_parameter
from foo_ops.library.operators import Parameter, find, parameters_of, short_name
from foo_ops.library.symbols import have_sizes

Fake = Callable[..., Any]


def make_fake(operator: torch._ops.OpOverload, parameters: Sequence[Parameter]) -> Fake | None:
    """Make the fake kernel of ``f.out`` or ``f_``; None where the operator's author brings it."""
    if any(p.role == "out" for p in parameters):
        return _fake_of_out(operator, parameters)
    if short_name(operator).endswith("_") and not _has_fake(operator):
        return _fake_in_place(operator, parameters)
    return None


def _has_fake(operator: torch._ops.OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "Meta")


def _fake_of_out(operator: torch._ops.OpOverload, parameters: Sequence[Parameter]) -> Fake:
    outs = [p.name for p in parameters if p.role == "out"]
    functional = _functional(operator, parameters)
    name, taken = short_name(operator), [cpp_parameter(parameter) for parameter in parameters]

    def fake(*args: Any, **kwargs: Any) -> Any:
        given = {p.name: argument for p, argument in zip(parameters, args)} | kwargs
        tensors = [given.get(p.name) if p.is_tensor else None for p in parameters]
        _C.check_devices(name, taken, tensors)
        targets: list[Tensor] = [kwargs.pop(out) for out in outs]
        results = functional(*args, **kwargs)
        results = (results,) if len(targets) == 1 else results
        for out, target, result in zip(outs, targets, results):
            others = [x for p, x in zip(parameters, tensors) if x is not None and p.name != out]
            _C.check_out(name, out, target, result, others)
        for out, target, result in zip(outs, targets, results):
            if not have_sizes(target.shape, result.shape):
                # It is resized, and then alone in its memory.
                given[out] = None
        _C.check_written_memory(name, taken, [given.get(p.name) for p in parameters])
        for target, result in zip(targets, results):
            if not have_sizes(target.shape, result.shape):
                target.resize_(result.shape)
        return targets[0] if len(targets) == 1 else tuple(targets)

    return fake


def _functional(
    operator: torch._ops.OpOverload, parameters: Sequence[Parameter]
) -> torch._ops.OpOverload:
    """Return the operator ``f`` of ``f.out``, which tells what the results are."""
    functional = find(operator.name().partition(".")[0])
    inputs = [p for p in parameters if p.role != "out"]
    if (
        list(parameters_of(functional)) != inputs
        or [p.role for p in parameters[len(inputs) :]] != ["out"] * len(functional._schema.returns)
    ):  # fmt: skip
        raise TypeError(
            f"{operator.name()}: it must take the arguments of {functional.name()}, and then an "
            f"out for each result: {functional._schema}, got {operator._schema}"
        )
    return functional


def _fake_in_place(operator: torch._ops.OpOverload, parameters: Sequence[Parameter]) -> Fake:
    name, names = short_name(operator), [p.name for p in parameters]
    taken = [cpp_parameter(parameter) for parameter in parameters]
    written = [p.name for p in parameters if p.role == "in place"]
    count = len(operator._schema.returns)

    def fake(*args: Any, **kwargs: Any) -> Any:
        twin = _twin(operator, parameters)
        if twin is None or not _has_fake(twin):
            raise RuntimeError(
                f"{operator.name()}: the results of a tile kernel are allocated as the operator's "
                "fake kernel says, and it has none: register one with "
                "foo_ops.library.register_fake"
            )
        given = dict(zip(names, args)) | kwargs
        renamed = dict(zip(names, (it.name for it in twin._schema.arguments)))
        results = twin(**{renamed[argument]: value for argument, value in given.items()})
        results = results if isinstance(results, (tuple, list)) else (results,)
        for argument, result in zip(written, results):
            target = given.get(argument)
            if target is None:
                continue
            if not have_sizes(target.shape, result.shape):
                raise ValueError(
                    f"{name}: {argument} must have shape {list(result.shape)} as the result has, "
                    f"got {list(target.shape)}"
                )
            _C.check_out(name, argument, target, result, [])
        _C.check_written_memory(name, taken, [given.get(argument) for argument in names])
        targets = [given[argument] for argument in written[:count]]
        return targets[0] if count == 1 else tuple(targets) or None

    return fake


def _twin(
    operator: torch._ops.OpOverload, parameters: Sequence[Parameter]
) -> torch._ops.OpOverload | None:
    """Return the operator ``f`` beside ``f_``, whose results are what ``f_`` writes."""
    name = operator.name().partition(".")[0].removesuffix("_")
    if not torch._C._dispatch_has_kernel(name):
        return None
    twin = find(name)
    arguments, schema = operator._schema.arguments, twin._schema
    is_twin = (
        not schema.is_mutable
        and [str(it.real_type) for it in schema.arguments]
        == [str(it.real_type) for it in arguments]
        and len(schema.returns) == sum(p.role == "in place" for p in parameters)
    )
    return twin if is_twin else None
