"""Register kernels of Numba for operators: what `elementwise_kernel` and `tile_kernel` make."""

from __future__ import annotations

import abc
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch

from foo_ops import _C
from foo_ops.kernels.compiler.interpret import INTERPRETS
from foo_ops.kernels.compiler.kernel import KERNELS, Maker
from foo_ops.kernels.user.sources import UserKernel
from foo_ops.library.functions import by_position
from foo_ops.library.operators import (
    DISPATCH_KEYS,
    Parameter,
    find,
    functionalize_out,
    keep,
    own_library,
    parameters_of,
)
from foo_ops.library.python_results import counted
from foo_ops.library.random_vmap import register_random_vmap
from foo_ops.library.refusals import refuse_derivatives
from foo_ops.library.sharding import Rule as ShardingRule
from foo_ops.library.sharding import register_default_sharding
from foo_ops.library.tensor_numbers import let_numbers_vary
from foo_ops.library.vmap import Rule, register_default_vmap

_DEVICE_KEYS = {device_type: DISPATCH_KEYS[device_type] for device_type in ("cpu", "foo")}

_serial_numbers = itertools.count(2)

if INTERPRETS:
    _C.interpret_kernels()


@dataclasses.dataclass(frozen=True)
class Launcher:
    """How an operator calls its kernel.

    Attributes:
        register_for: makes the registrations for a dispatch key.
        fake: the fake kernel; None where the operator's author brings it.
        vmap: the rule for torch.vmap; None for an operator that has an argument ``out``.
        sharding: the rule for DTensors.
    """

    register_for: Callable[[str], tuple[Any, ...]]
    fake: Callable[..., Any] | None
    vmap: Rule | None
    sharding: ShardingRule


class NumbaKernel(abc.ABC):
    """A kernel that `elementwise_kernel` or `tile_kernel` made of a function."""

    function: Callable[..., Any]

    @abc.abstractmethod
    def launcher(
        self, operator: torch._ops.OpOverload, parameters: Sequence[Parameter]
    ) -> Launcher:
        """Make the launcher of an operator; TypeError where the kernel takes other parameters."""

    def register(
        self,
        operator: torch._ops.OpOverload,
        keys: Sequence[str],
        lib: torch.library.Library | None,
    ) -> None:
        """Make this an operator's kernel for some dispatch keys."""
        parameters = parameters_of(operator)
        _check_returned(operator, parameters)
        launcher = self.launcher(operator, parameters)
        let_numbers_vary(operator.name(), str(operator._schema))
        for key in keys:
            for registration in launcher.register_for(key):
                keep(registration, lib)
        keep(_C.refuse_nested_tensors(operator.name()), lib)
        if operator._schema.is_mutable:
            keep(_C.count_versions(operator.name()), lib)
            keep(_C.resolve_math_bits(operator.name()), lib)
        _refuse_derivatives(operator, lib)
        if launcher.vmap is not None:
            register_default_vmap(operator.name(), launcher.vmap, lib)
        if any(p.kind == "generator" for p in parameters):
            register_random_vmap(operator, lib)
        register_default_sharding(operator, launcher.sharding, lib)
        if launcher.fake is None:
            return
        torch.library.register_fake(operator.name(), launcher.fake, lib=lib)
        if any(p.role == "out" for p in parameters):
            functionalize_out(operator)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"{self.function.__name__} is a kernel, and an operator calls it: give it to one with "
            "foo_ops.library.register_kernel"
        )


def _refuse_derivatives(operator: torch._ops.OpOverload, lib: torch.library.Library | None) -> None:
    """Let the operator refuse to be differentiated until it is told how."""
    way = "register_variant_autograd" if operator._schema.is_mutable else "register_autograd"
    message = (
        f"{operator.name()}: it has no derivative; to get one, use foo_ops.library.{way}, or else "
        "call it under torch.no_grad() or with detached tensors"
    )
    refuse_derivatives(operator.name(), message, lib)


def _check_returned(operator: torch._ops.OpOverload, parameters: Sequence[Parameter]) -> None:
    returns_written = any(result.alias_info is not None for result in operator._schema.returns)
    for parameter in parameters:
        if returns_written and parameter.is_optional and parameter.role != "read":
            raise TypeError(
                f"{operator.name()}: an argument that it writes and returns must not be optional, "
                f"got {parameter.name}"
            )


@overload
def register_kernel(
    op: str | torch._ops.OpOverload,
    device_types: str | Sequence[str] | None,
    func: None = None,
    /,
    *,
    lib: torch.library.Library | None = None,
) -> Callable[[Any], Any]: ...


@overload
def register_kernel(
    op: str | torch._ops.OpOverload,
    device_types: str | Sequence[str] | None,
    func: Any,
    /,
    *,
    lib: torch.library.Library | None = None,
) -> Any: ...


def register_kernel(
    op: str | torch._ops.OpOverload,
    device_types: str | Sequence[str] | None,
    func: Any = None,
    /,
    *,
    lib: torch.library.Library | None = None,
) -> Any:
    """Register as torch.library.register_kernel does; a kernel of Numba runs without Python.

    Args:
        op: the operator, such as ``"mylib::f"`` or ``"mylib::f.out"``.
        device_types: "cpu", "foo" or both; None means all. For a Python function also the others.
        func: an `elementwise_kernel`, a `tile_kernel`, or a Python function. Without it this is a
            decorator.
        lib: the registration ends with it; without it, with the process.

    Raises:
        TypeError: for a kernel of Numba, when it takes other arguments than the operator has.
        ValueError: for a kernel of Numba and a device type other than cpu and foo, and where there
            is no such operator.

    Example:
        >>> foo_ops.library.define("mylib::twice", "(Tensor input) -> Tensor")
        >>> @foo_ops.library.register_kernel("mylib::twice", ("cpu", "foo"))
        ... @foo_ops.library.elementwise_kernel
        ... def twice(x):
        ...     return 2 * x
        >>> torch.ops.mylib.twice(torch.tensor([1.0, 2.0]))
        tensor([2., 4.])
    """
    operator = find(op)
    if func is None:

        def register(func: Any) -> Any:
            register_kernel(op, device_types, func, lib=lib)
            return func

        return register
    lib = own_library(op, lib)
    if not isinstance(func, NumbaKernel):
        return torch.library.register_kernel(op, device_types, counted(op, "kernel", func), lib=lib)
    func.register(operator, _dispatch_keys(device_types), lib)
    return None


def _dispatch_keys(device_types: str | Sequence[str] | None) -> list[str]:
    if device_types is None:
        return list(_DEVICE_KEYS.values())
    if isinstance(device_types, str):
        device_types = (device_types,)
    keys = _DEVICE_KEYS | {key: key for key in _DEVICE_KEYS.values()}
    for device_type in device_types:
        if device_type not in keys:
            raise ValueError(
                f"device_types of a kernel of Numba must be cpu or foo, got {device_type!r}"
            )
    return [keys[device_type] for device_type in device_types]


def count_parameters(function: Callable[..., Any]) -> int:
    return len(inspect.signature(function).parameters)


def add_source(
    operator: torch._ops.OpOverload,
    functions: Sequence[Callable[..., Any]],
    maker: Maker,
    *options: Any,
) -> str:
    """Tell the table of kernels how one is made; return its name there."""
    kernel = operator.name()
    if kernel in KERNELS:
        kernel += f" {next(_serial_numbers)}"
    positional = tuple(map(by_position, functions))
    KERNELS[kernel] = UserKernel(operator.name(), positional, maker, options)
    return kernel


def cpp_parameter(parameter: Parameter, *own_dtypes: Any) -> Any:
    p = parameter
    return _C.Parameter(p.name, p.kind, p.is_optional, p.role, p.choices, p.length, *own_dtypes)


def kinds_of(parameters: Sequence[Parameter]) -> tuple[str, ...]:
    return tuple(
        p.kind + f"[{p.length}]" * (p.length >= 0) + "?" * p.is_optional for p in parameters
    )
