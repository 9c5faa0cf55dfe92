"""Cast the arguments of operators under autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foo_ops.compat import (
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    OpOverload,
    is_autocast_available,
    key_for_device,
)
from foo_ops.library.operators import find, library_of

AUTOCASTS: dict[str, dict[str, torch.dtype | None]] = {}
"""For each operator, the device types whose autocast it follows, and a dtype other than theirs."""


def register_autocast(
    op: str | OpOverload | torch.library.CustomOpDef,
    device_type: str | None = None,
    cast_inputs: torch.dtype | None = None,
    /,
    *,
    lib: torch.library.Library | None = None,
) -> None:
    """Register autocast as torch.library does, for operators with keyword arguments, too.

    Under torch.autocast, floating-point tensors on the device are cast, except float64.

    Args:
        op: the operator.
        device_type: cpu, foo, or another that has autocast. By default, both cpu and foo.
        cast_inputs: the dtype to cast to. By default, that of autocast, as for matrix products.
        lib: the registration ends with this library; by default, with the process.

    Raises:
        ValueError: for a device type that has no autocast.

    Example:
        >>> @foo_ops.library.numba_op("mylib::scaled_by")
        ... def scaled_by(x: float, *, factor: float = 1.0) -> float:
        ...     return x * factor
        >>> foo_ops.library.register_autocast("mylib::scaled_by")
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     torch.ops.mylib.scaled_by(torch.ones(2), factor=3.0)
        tensor([3., 3.], dtype=torch.bfloat16)
    """
    operator = find(op)
    for type_ in ("cpu", "foo") if device_type is None else (device_type,):
        if not is_autocast_available(type_):
            raise ValueError(f"Device type '{type_}' does not support autocast.")
        key = "Autocast" + key_for_device(type_)
        kernel = _autocast_kernel(operator, type_, cast_inputs, key)
        AUTOCASTS.setdefault(operator.name(), {})[type_] = cast_inputs
        library_of(operator.name(), lib).impl(operator.name().partition("::")[2], kernel, key)


def cast_as_autocast(*arguments: Any) -> tuple[Any, ...]:
    """Cast tensors as for an operator with `register_autocast`, if autocast is on.

    For functions that call other operators in its place, which then get the same dtypes.
    """
    for type_ in ("cpu", "foo"):
        if torch.is_autocast_enabled(type_):
            arguments = tuple(_cast(it, type_, torch.get_autocast_dtype(type_)) for it in arguments)
    return arguments


def _autocast_kernel(
    operator: OpOverload, device_type: str, dtype: torch.dtype | None, key: str
) -> Callable[..., Any]:
    excluded = DispatchKeySet(getattr(DispatchKey, key))

    def kernel(*inputs: Any, **keywords: Any) -> Any:
        to = dtype or torch.get_autocast_dtype(device_type)
        with ExcludeDispatchKeyGuard(excluded):
            return operator(
                *(_cast(it, device_type, to) for it in inputs),
                **{name: _cast(value, device_type, to) for name, value in keywords.items()},
            )

    return kernel


def _cast(argument: Any, device_type: str, dtype: torch.dtype) -> Any:
    if isinstance(argument, (list, tuple)):
        return type(argument)(_cast(it, device_type, dtype) for it in argument)
    if (
        isinstance(argument, Tensor)
        and argument.is_floating_point()
        and argument.dtype != torch.float64
        and argument.device.type == device_type
    ):
        return argument.to(dtype)
    return argument
