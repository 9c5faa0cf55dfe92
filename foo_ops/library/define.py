"""Define operators: torch.library's `Library`, `define`, `impl` and others, extended."""

from __future__ import annotations

import functools
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

from foo_ops.compat import OpOverload, SafeKernelFunction
from foo_ops.library.kernels import NumbaKernel, register_kernel
from foo_ops.library.operators import (
    DEFINITIONS,
    counted,
    define_or_take,
    find,
    own_library,
    parse,
    qualified,
)
from foo_ops.library.tensor_numbers import let_numbers_vary
from foo_ops.library.tiles import checking, has_values

# ---------------------------------------------------------------------------------- define and impl

# `Library`, `define` and `impl`, which extend those of torch.library.


class Library(torch.library.Library):
    """A torch.library.Library whose ``impl`` also takes an `elementwise_kernel` or `tile_kernel`.

    Example:
        >>> lib = foo_ops.library.Library("mylib", "FRAGMENT")
        >>> name = lib.define("thrice(Tensor input) -> Tensor")
        >>> lib.impl("thrice", foo_ops.library.elementwise_kernel(lambda x: 3 * x), "CPU")
    """

    def impl(
        self,
        op_name: str | OpOverload,
        fn: Any,
        dispatch_key: str = "",
        **options: Any,
    ) -> Any:
        name = qualified(op_name, self)
        if not isinstance(fn, NumbaKernel):
            return super().impl(op_name, counted(name, "kernel", fn), dispatch_key, **options)
        return register_kernel(name, dispatch_key or self.dispatch_key, fn, lib=self)


def define(
    qualname: str | torch.library.Library,
    schema: str,
    alias_analysis: str = "",
    *,
    lib: torch.library.Library | None = None,
    tags: torch.Tag | Sequence[torch.Tag] = (),
) -> Any:
    """Define an operator as torch.library.define does; a cell of a notebook may do it again.

    Args:
        qualname: the operator, such as ``"mylib::f"``. If the same module has defined it before,
            also without ``lib``, that operator is replaced, and this package's registrations for it
            without ``lib`` end. In older code, a library.
        schema: without the name, such as ``"(Tensor input) -> Tensor"``.
        alias_analysis: only if a library is given first, as in older code.
        lib: the operator ends with this library; by default, with the process.
        tags: of torch.Tag. An operator with a generator gets nondeterministic_seeded as well.

    Example:
        >>> for _ in range(2):
        ...     foo_ops.library.define("mylib::again", "(Tensor input) -> Tensor")
    """
    if isinstance(qualname, torch.library.Library):
        return torch.library.define(qualname, schema, alias_analysis)  # type: ignore[call-arg]
    if re.search(r"\bGenerator\b", schema):
        given = (tags,) if isinstance(tags, torch.Tag) else tags
        tags = (*given, torch.Tag.nondeterministic_seeded)
    # torch itself refuses names without a namespace, and names that are no strings.
    if isinstance(qualname, str) and qualname.count("::") == 1:
        parse(qualname)
    if lib is not None or not isinstance(qualname, str):
        return torch.library.define(qualname, schema, lib=lib, tags=tags)
    module = sys._getframe(1).f_globals.get("__name__")
    if qualname in DEFINITIONS and DEFINITIONS[qualname].module == module:
        DEFINITIONS.pop(qualname).library._destroy()
    given = (tags,) if isinstance(tags, torch.Tag) else tuple(tags)
    DEFINITIONS[qualname] = define_or_take(qualname, module, schema, given)
    let_numbers_vary(qualname, schema)
    return None


def register_fake(
    op: str | OpOverload | torch.library.CustomOpDef,
    func: Callable[..., Any] | None = None,
    /,
    *,
    lib: torch.library.Library | None = None,
    _stacklevel: int = 1,
    allow_override: bool = True,
) -> Any:
    """Register a fake kernel as torch.library does, for as long as the operator exists.

    Example:
        >>> foo_ops.library.define("mylib::row_count", "(Tensor input) -> Tensor")
        >>> @foo_ops.library.register_fake("mylib::row_count")
        ... def row_count_fake(input):
        ...     return input.new_empty((), dtype=torch.int64)
        >>> torch.ops.mylib.row_count(torch.empty(2, 3, device="meta")).dtype
        torch.int64
    """
    operator = find(op)
    if not isinstance(op, torch.library.CustomOpDef):
        if func is None:
            return functools.partial(register_fake, op, lib=lib, allow_override=allow_override)
        func = counted(operator, "fake kernel", func)
        if has_values(operator._schema):
            func = checking(operator.name(), func)
    # torch looks up the calling module; this frame is in between only if no decorator is returned.
    level = _stacklevel if func is None else _stacklevel + 1
    own = own_library(op, lib)
    return torch.library.register_fake(
        op, func, lib=own, _stacklevel=level, allow_override=allow_override
    )


def register_torch_dispatch(
    op: str | OpOverload | torch.library.CustomOpDef,
    torch_dispatch_class: type,
    func: Callable[..., Any] | None = None,
    /,
    *,
    lib: torch.library.Library | None = None,
) -> Any:
    """Register an operator's function for a subclass or a mode, as long as the operator exists.

    Example:
        >>> class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        ...     calls = 0
        ...     def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        ...         return function(*args, **(kwargs or {}))
        >>> foo_ops.library.define("mylib::counted", "(Tensor input) -> Tensor")
        >>> foo_ops.library.register_kernel("mylib::counted", "cpu", lambda input: input.clone())
        >>> @foo_ops.library.register_torch_dispatch("mylib::counted", Counting)
        ... def count(mode, function, types, args, kwargs):
        ...     mode.calls += 1
        ...     return function(*args, **kwargs)
        >>> with Counting() as counting:
        ...     copy = torch.ops.mylib.counted(torch.ones(2))
        >>> counting.calls
        1
    """
    find(op)
    own = own_library(op, lib)
    return torch.library.register_torch_dispatch(op, torch_dispatch_class, func, lib=own)


def impl(
    qualname: str | torch.library.Library,
    types: str | Sequence[str] = "",
    func: Any = None,
    *,
    lib: torch.library.Library | None = None,
) -> Any:
    """Register an implementation as torch.library.impl does, or a Numba kernel.

    Args:
        qualname: the operator; or, as in older code, a library, and then ``types`` is the name of
            the operator and ``func`` the dispatch key.
        types: device types, dispatch keys, or "default" for all devices.
        func: the implementation; if omitted, returns a decorator.
        lib: the registration ends with this library; by default, with the process.

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
    find(qualname)
    if func is None:

        def register(func: Any) -> Any:
            return impl(qualname, types, func, lib=lib)

        return register
    if isinstance(func, NumbaKernel):
        return register_kernel(qualname, types, func, lib=lib)
    own = own_library(qualname, lib)
    return torch.library.impl(qualname, types, counted(qualname, "kernel", func), lib=own)


def _impl_in(library: torch.library.Library, name: Any, key: str) -> Callable[[Any], Any]:
    qualified(name, library)

    def register(func: Any) -> Any:
        library.impl(name, func, key)
        return func

    return register


# ------------------------------------------------------------------ torch.library's other functions

# Functions of torch.library that take an operator; these check its name first.


Function = TypeVar("Function", bound=Callable[..., Any])


def _parsing(define: Function) -> Function:
    """Wrap a function that defines an operator, to check the operator's name first."""

    @functools.wraps(define)
    def parsing(name: str, *args: Any, **kwargs: Any) -> Any:
        parse(name)
        return define(name, *args, **kwargs)

    return cast(Function, parsing)


custom_op = _parsing(torch.library.custom_op)
triton_op = _parsing(torch.library.triton_op)


def get_kernel(
    op: str | OpOverload | torch.library.CustomOpDef,
    dispatch_key: str | torch.DispatchKey,
) -> SafeKernelFunction:
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
    # torch looks up the calling module; this frame is in between only if no decorator is returned.
    level = _stacklevel if func is None else _stacklevel + 1
    return register_fake(qualname, func, lib=lib, _stacklevel=level)
