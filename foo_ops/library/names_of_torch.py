"""Functions of torch.library that take an operator, and look at its name before all else."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from foo_ops.library.implementations import register_fake
from foo_ops.library.operators import find, parse

Function = TypeVar("Function", bound=Callable[..., Any])


def _parsing(define: Function) -> Function:
    """Return a function that defines an operator, and first refuses what cannot be its name."""

    @functools.wraps(define)
    def parsing(name: str, *args: Any, **kwargs: Any) -> Any:
        parse(name)
        return define(name, *args, **kwargs)

    return cast(Function, parsing)


custom_op = _parsing(torch.library.custom_op)
triton_op = _parsing(torch.library.triton_op)


def get_kernel(
    op: str | torch._ops.OpOverload | torch.library.CustomOpDef,
    dispatch_key: str | torch.DispatchKey,
) -> torch._C._SafeKernelFunction:
    """Return the kernel that an operator has for a dispatch key, as torch.library does.

    Example:
        >>> kernel = foo_ops.library.get_kernel("foo::abs", "CPU")
        >>> keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
        >>> kernel.call_boxed(keys, torch.tensor([-1.0]))
        tensor([1.])
    """
    return torch.library.get_kernel(find(op), dispatch_key)


def impl_abstract(
    qualname: str,
    func: Callable[..., Any] | None = None,
    *,
    lib: torch.library.Library | None = None,
    _stacklevel: int = 1,
) -> Any:
    """Register a fake kernel: the older name of `register_fake`.

    Example:
        >>> foo_ops.library.define("mylib::column_count", "(Tensor input) -> Tensor")
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")
        ...     @foo_ops.library.impl_abstract("mylib::column_count")
        ...     def column_count_fake(input):
        ...         return input.new_empty((), dtype=torch.int64)
        >>> torch.ops.mylib.column_count(torch.empty(2, 3, device="meta")).dtype
        torch.int64
    """
    warnings.warn(
        "`torch.library.impl_abstract` was renamed to `torch.library.register_fake`. Please use "
        "that instead; we will remove `torch.library.impl_abstract` in a future version of "
        "PyTorch.",
        FutureWarning,
        stacklevel=2,
    )
    # torch asks which module calls; this one is between only where no decorator is returned.
    level = _stacklevel if func is None else _stacklevel + 1
    return register_fake(qualname, func, lib=lib, _stacklevel=level)
