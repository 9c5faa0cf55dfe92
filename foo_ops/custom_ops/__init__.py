"""The older way to define an operator in Python, for code that was written against it.

These are the names of ``torch._custom_ops``, with its semantics and its errors, on the present
``torch.library``: that module of torch is private and deprecated. New code should use
``torch.library`` itself. Device foo is one more device type, and its kernels are like those for the
cpu.

Example:
    >>> import torch
    >>> from torch import Tensor
    >>> from foo_ops import custom_ops
    >>> @custom_ops.custom_op("mylib::scaled")
    ... def scaled(x: Tensor, factor: float) -> Tensor:
    ...     raise NotImplementedError
    >>> @custom_ops.impl("mylib::scaled", device_types=("cpu", "foo"))
    ... def scaled_kernel(x, factor):
    ...     return x * factor
    >>> @custom_ops.impl_abstract("mylib::scaled")
    ... def scaled_abstract(x, factor):
    ...     return torch.empty_like(x)
    >>> @custom_ops.impl_save_for_backward("mylib::scaled")
    ... def save_for_backward(inputs, output):
    ...     return inputs.factor
    >>> @custom_ops.impl_backward("mylib::scaled")
    ... def backward(ctx, factor, grad):
    ...     return {"x": grad * factor}
    >>> x = torch.ones(3, requires_grad=True)
    >>> torch.ops.mylib.scaled(x, 2.0).sum().backward()
    >>> x.grad
    tensor([2., 2., 2.])
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.library import get_ctx, infer_schema

from foo_ops.custom_ops.operators import (
    OPERATORS,
    define_operator,
    find_operator,
    find_overload,
    parse,
    validate_namespace,
)
from foo_ops.library.operators import DISPATCH_KEYS

__all__ = [
    "custom_op",
    "destroy",
    "get_ctx",
    "impl",
    "impl_abstract",
    "impl_backward",
    "impl_save_for_backward",
]

Function = TypeVar("Function", bound=Callable[..., Any])


def custom_op(qualname: str, func_or_schema: Callable[..., Any] | str | None = None) -> Any:
    """Define an operator; it must be functional: write no argument and return no view of one.

    Args:
        qualname: ``"namespace::name"``.
        func_or_schema: a function called ``name``, whose annotations become the schema and whose
            body is never run; or the schema, ``"(Tensor x, float factor) -> Tensor"``. If omitted,
            returns a decorator of the function.

    Returns:
        The function, or a decorator; for a schema None.

    Raises:
        ValueError: for a qualname without a namespace, with an overload or in a namespace of
            PyTorch, for a function of another name or without annotations, for a schema that is not
            functional or has an argument ``self``.

    Example:
        >>> custom_op("mylib::shifted", "(Tensor x, float offset=1.) -> Tensor")
        >>> torch.ops.mylib.shifted.default._schema
        mylib::shifted(Tensor x, float offset=1.) -> Tensor
    """
    namespace, name = parse(qualname)
    validate_namespace(namespace)
    if isinstance(func_or_schema, str):
        define_operator(namespace, name, func_or_schema)
        return None

    def define(function: Function) -> Function:
        if not inspect.isfunction(function):
            raise ValueError(
                "custom_op(...)(func): Expected `func` to be a Python function, "
                f"got: {type(function)}"
            )
        if function.__name__ != name:
            raise ValueError(
                f"custom_op(qualname='{qualname}', ...)(func): expected `func` to have name "
                f"'{name}' but got '{function.__name__}'. Please either change the name of `func` "
                "or the qualname that is passed to `custom_op`"
            )
        define_operator(namespace, name, infer_schema(function, mutates_args=()))
        return function

    return define if func_or_schema is None else define(func_or_schema)


def impl(
    qualname: str,
    *,
    device_types: str | Iterable[str] = ("cpu", "cuda", "foo"),
    func: Callable[..., Any] | None = None,
) -> Any:
    """Register a kernel for device types; returns a decorator unless the function is given.

    Args:
        qualname: an operator, defined here or with torch.library or in C++.
        device_types: any of ``cpu``, ``cuda`` and ``foo``.
        func: takes the operator's arguments.

    Raises:
        ValueError: for another device type, and for an operator that does not exist.
        RuntimeError: if there is a kernel already.

    Example:
        >>> custom_op("mylib::halved", "(Tensor x) -> Tensor")
        >>> @impl("mylib::halved", device_types=("cpu", "foo"))
        ... def halved(x):
        ...     return x / 2
        >>> torch.ops.mylib.halved(torch.ones(2, device="foo"))
        tensor([0.5000, 0.5000], device='foo:0')
    """
    types = (device_types,) if isinstance(device_types, str) else tuple(device_types)
    find_overload(qualname)

    def register(function: Function) -> Function:
        operator = find_operator(qualname, of_others_too=True)
        for device_type in types:
            if device_type not in DISPATCH_KEYS:
                raise ValueError(
                    f"CustomOp.impl(device_types=[{device_type}, ...]): we only support "
                    f"device_type in {DISPATCH_KEYS.keys()}."
                )
        for device_type in dict.fromkeys(types):
            operator.register_kernel(device_type, function, _caller())
        return function

    return register if func is None else register(func)


def impl_abstract(qualname: str, *, func: Callable[..., Any] | None = None) -> Any:
    """Register a fake kernel, for tensors without data, as torch.library.register_fake does.

    If a size depends on data, ``get_ctx().new_dynamic_size()`` stands for it.

    Example:
        >>> custom_op("mylib::positive", "(Tensor x) -> Tensor")
        >>> @impl_abstract("mylib::positive")
        ... def positive_abstract(x):
        ...     return x.new_empty(get_ctx().new_dynamic_size())
    """
    find_overload(qualname)

    def register(function: Function) -> Function:
        library = OPERATORS[qualname].library if qualname in OPERATORS else None
        torch.library.register_fake(qualname, function, lib=library, _stacklevel=3)
        return function

    return register if func is None else register(func)


def impl_save_for_backward(qualname: str, *, func: Callable[..., Any] | None = None) -> Any:
    """Register the first half of a formula for gradients: the values to save from a call.

    Args:
        qualname: an operator.
        func: ``func(inputs, output)``, with the arguments as a named tuple; returns tensors and
            other values, in lists, tuples and dicts. `impl_backward` registers the second half.

    Example:
        >>> custom_op("mylib::power", "(Tensor x, int exponent) -> Tensor")
        >>> @impl_save_for_backward("mylib::power")
        ... def save_for_backward(inputs, output):
        ...     return inputs.x, inputs.exponent
    """
    find_overload(qualname)

    def register(function: Function) -> Function:
        operator = find_operator(qualname, of_others_too=True)
        operator.register_formula_part("save_for_backward", function, _caller())
        return function

    return register if func is None else register(func)


def impl_backward(
    qualname: str,
    output_differentiability: list[bool] | None = None,
    *,
    func: Callable[..., Any] | None = None,
) -> Any:
    """Register the second half of a formula for gradients: the gradients.

    Args:
        qualname: an operator that is functional and returns something.
        output_differentiability: for each output, whether it may have a gradient.
        func: ``func(ctx, saved, *grads)``, with the values from `impl_save_for_backward` and a
            gradient for each output; returns a dict with a gradient, or None, for the name of each
            argument that is a tensor, and a list of them for a list of tensors.

    Raises:
        RuntimeError: for another ``output_differentiability``, for an operator that is not
            functional, and if there is a formula already.

    Example:
        >>> custom_op("mylib::product", "(Tensor a, Tensor b) -> Tensor")
        >>> _ = impl("mylib::product", func=torch.mul)
        >>> _ = impl_save_for_backward("mylib::product", func=lambda inputs, output: inputs)
        >>> @impl_backward("mylib::product")
        ... def backward(ctx, saved, grad):
        ...     return {"a": grad * saved.b, "b": grad * saved.a}
        >>> a, b = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0)
        >>> torch.ops.mylib.product(a, b).backward()
        >>> a.grad
        tensor(3.)
    """
    find_overload(qualname)

    def register(function: Function) -> Function:
        operator = find_operator(qualname, of_others_too=True)
        operator.set_output_differentiability(output_differentiability)
        operator.register_formula_part("backward", function, _caller())
        return function

    return register if func is None else register(func)


def destroy(qualname: str) -> None:
    """Remove an operator and its registrations by this module, so that it can be defined again.

    Raises:
        RuntimeError: when it was not defined, or extended, here.

    Example:
        >>> custom_op("mylib::gone", "(Tensor x) -> Tensor")
        >>> destroy("mylib::gone")
        >>> hasattr(torch.ops.mylib, "gone")
        False
    """
    find_operator(qualname).destroy()


def _caller() -> str:
    """Return the file and line of the code that called this module."""
    frame: Any = sys._getframe(1)
    while frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
