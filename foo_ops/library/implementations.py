"""Provide `Library` and `impl`, which take kernels of Numba as well as functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from foo_ops.library.kernels import NumbaKernel, register_kernel


class Library(torch.library.Library):
    """A torch.library.Library whose ``impl`` also takes an `elementwise_kernel` or `tile_kernel`.

    Example:
        >>> lib = foo_ops.library.Library("mylib", "FRAGMENT")
        >>> name = lib.define("thrice(Tensor input) -> Tensor")
        >>> lib.impl("thrice", foo_ops.library.elementwise_kernel(lambda x: 3 * x), "CPU")
    """

    def impl(
        self,
        op_name: str | torch._ops.OpOverload,
        fn: Any,
        dispatch_key: str = "",
        **options: Any,
    ) -> Any:
        if not isinstance(fn, NumbaKernel):
            return super().impl(op_name, fn, dispatch_key, **options)
        name = op_name if isinstance(op_name, str) else op_name.name()
        qualified = name if "::" in name else f"{self.ns}::{name}"
        return register_kernel(qualified, dispatch_key or self.dispatch_key, fn, lib=self)


def impl(
    qualname: str | torch.library.Library,
    types: str | Sequence[str] = "",
    func: Any = None,
    *,
    lib: torch.library.Library | None = None,
) -> Any:
    """Register as torch.library.impl does, and take a kernel of Numba, too.

    Args:
        qualname: the operator; or, as in older code, a library, and then ``types`` is the name of
            the operator and ``func`` the dispatch key.
        types: device types, dispatch keys, or "default" for all devices.
        func: the implementation; without it this is a decorator.
        lib: the registration ends with it; without it, with the process.

    Example:
        >>> foo_ops.library.define("mylib::third", "(Tensor input) -> Tensor")
        >>> @foo_ops.library.impl("mylib::third", "cpu")
        ... @foo_ops.library.elementwise_kernel
        ... def third(x):
        ...     return x / 3
        >>> torch.ops.mylib.third(torch.tensor([3.0, 6.0]))
        tensor([1., 2.])
    """
    if isinstance(qualname, torch.library.Library):
        return _impl_in(qualname, types, func or "")
    if func is None:

        def register(func: Any) -> Any:
            return impl(qualname, types, func, lib=lib)

        return register
    if isinstance(func, NumbaKernel):
        return register_kernel(qualname, types, func, lib=lib)
    return torch.library.impl(qualname, types, func, lib=lib)


def _impl_in(library: torch.library.Library, name: Any, key: str) -> Callable[[Any], Any]:
    def register(func: Any) -> Any:
        library.impl(name, func, key)
        return func

    return register
