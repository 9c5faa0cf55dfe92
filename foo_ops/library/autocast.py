"""Autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foo_ops.library.operators import find, impl_forever


def register_autocast(name: str) -> None:
    """Under torch.autocast, floating-point tensors but float64 are cast to autocast's dtype.

    As for torch's own matrix products, on cpu and foo.
    """
    operator = find(name)
    for device_type, key in (("cpu", "AutocastCPU"), ("foo", "AutocastPrivateUse1")):
        impl_forever(name, _autocast_kernel(operator, device_type, key), key)


def _autocast_kernel(
    operator: torch._ops.OpOverload, device_type: str, key: str
) -> Callable[..., Any]:
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast(argument: Any) -> Any:
        if (
            isinstance(argument, Tensor)
            and argument.is_floating_point()
            and argument.dtype != torch.float64
        ):
            return argument.to(torch.get_autocast_dtype(device_type))
        return argument

    def kernel(*inputs: Any, **keywords: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return operator(*map(cast, inputs), **keywords)

    return kernel
