"""Register Numba kernels: their functions, their scratch memory, and checks of their bounds."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import torch

from foo_ops import _C
from foo_ops._process import switch
from foo_ops.compat import OpOverload
from foo_ops.kernels.compiler.inspection import line_of
from foo_ops.kernels.compiler.interpret import INTERPRETS
from foo_ops.kernels.compiler.kernel import KERNELS, Maker
from foo_ops.kernels.user.sources import UserKernel
from foo_ops.library.operators import (
    DISPATCH_KEYS,
    Parameter,
    counted,
    describe,
    find,
    functionalize_out,
    keep,
    own_library,
    parameters_of,
    refuse_derivatives,
)
from foo_ops.library.sharding import Rule as ShardingRule
from foo_ops.library.sharding import register_default_sharding
from foo_ops.library.tensor_numbers import let_numbers_vary
from foo_ops.library.vmap import Rule, register_default_vmap, register_random_vmap

# ---------------------------------------------------------------------------------------- functions

# Functions written in Python, from which kernels are made.


def is_function(value: object) -> bool:
    """Return whether a value is a function written in Python, or compiled from one by Numba."""
    return isinstance(getattr(value, "py_func", value), types.FunctionType)


def require_function(what: str, value: Any) -> None:
    """Refuse a value that is no Python function, and a generator function.

    The compiler refuses generators, too, but an interpreted kernel would silently do nothing.

    Args:
        what: the beginning of the message, such as "tile_kernel: tiles must be".
        value: the argument.
    """
    if not is_function(value):
        raise TypeError(f"{what} a function written in Python, got {value!r}")
    function = getattr(value, "py_func", value)
    if inspect.isgeneratorfunction(function):
        raise TypeError(
            f"{what} a function without yield, got {describe(function)}, which yields in line "
            f"{line_of(function, 'yield')}"
        )


def by_position(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes keyword-only arguments by position, as kernels get all.

    They follow the others. No argument has a default, since all are given.
    """
    if not isinstance(function, types.FunctionType) or not function.__code__.co_kwonlyargcount:
        return function
    code = function.__code__
    count = code.co_argcount + code.co_kwonlyargcount
    copy = types.FunctionType(
        code.replace(co_argcount=count, co_kwonlyargcount=0),
        function.__globals__,
        function.__name__,
        None,
        function.__closure__,
    )
    copy.__module__ = function.__module__
    return copy


# ------------------------------------------------------------------------------------- registration

# Register the kernels that `elementwise_kernel` and `tile_kernel` make.


_DEVICE_KEYS = {device_type: DISPATCH_KEYS[device_type] for device_type in ("cpu", "foo")}

_serial_numbers = itertools.count(2)

if INTERPRETS:
    _C.interpret_kernels()


@dataclasses.dataclass(frozen=True)
class Launcher:
    """How an operator calls its kernel.

    Attributes:
        register_for: makes the registrations for a dispatch key.
        fake: the fake kernel; None if the operator's author provides it.
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
    def launcher(self, operator: OpOverload, parameters: Sequence[Parameter]) -> Launcher:
        """Make an operator's launcher; raise TypeError if the kernel takes other parameters."""

    def register(
        self,
        operator: OpOverload,
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
            f"{self.function.__name__} is a kernel and cannot be called directly; register it for "
            "an operator with foo_ops.library.register_kernel"
        )


def _refuse_derivatives(operator: OpOverload, lib: torch.library.Library | None) -> None:
    """Make the operator refuse to be differentiated until a derivative is registered."""
    way = "register_variant_autograd" if operator._schema.is_mutable else "register_autograd"
    message = (
        f"{operator.name()}: it has no derivative; to get one, use foo_ops.library.{way}, or "
        "call it under torch.no_grad() or with detached tensors"
    )
    refuse_derivatives(operator.name(), message, lib)


def _check_returned(operator: OpOverload, parameters: Sequence[Parameter]) -> None:
    returns_written = any(result.alias_info is not None for result in operator._schema.returns)
    for parameter in parameters:
        if returns_written and parameter.is_optional and parameter.role != "read":
            raise TypeError(
                f"{operator.name()}: an argument that is written and returned must not be "
                f"optional, got {parameter.name}"
            )


@overload
def register_kernel(
    op: str | OpOverload,
    device_types: str | Sequence[str] | None,
    func: None = None,
    /,
    *,
    lib: torch.library.Library | None = None,
) -> Callable[[Any], Any]: ...


@overload
def register_kernel(
    op: str | OpOverload,
    device_types: str | Sequence[str] | None,
    func: Any,
    /,
    *,
    lib: torch.library.Library | None = None,
) -> Any: ...


def register_kernel(
    op: str | OpOverload,
    device_types: str | Sequence[str] | None,
    func: Any = None,
    /,
    *,
    lib: torch.library.Library | None = None,
) -> Any:
    """Register a kernel as torch.library.register_kernel does; a Numba kernel runs without Python.

    Args:
        op: the operator, such as ``"mylib::f"`` or ``"mylib::f.out"``.
        device_types: "cpu", "foo" or both; None means all. A Python function may have others, too.
        func: an `elementwise_kernel`, a `tile_kernel`, or a Python function. If omitted, returns a
            decorator.
        lib: the registration ends with this library; by default, with the process.

    Raises:
        TypeError: for a Numba kernel that takes other arguments than the operator has.
        ValueError: for a Numba kernel and a device type other than cpu and foo, and if there is no
            such operator.

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
    operator: OpOverload,
    functions: Sequence[Callable[..., Any]],
    maker: Maker,
    *options: Any,
) -> str:
    """Add a kernel's source to the table of kernels; return its name there."""
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


# ----------------------------------------------------------------------------------- scratch memory

# Describe the scratch memory of tile kernels.


Size = int | Callable[..., int]


@dataclasses.dataclass(frozen=True)
class Scratch:
    """Memory that `scratch` describes."""

    sizes: tuple[Size, ...]
    like: str
    per_call: bool

    @property
    def dimensions(self) -> int:
        return len(self.sizes)

    def functions(self) -> list[Callable[..., int]]:
        """Return a function for each size."""
        return [_constant(size) if isinstance(size, int) else size for size in self.sizes]


def _constant(size: int) -> Callable[[], int]:
    def constant() -> int:
        return size

    return constant


def scratch(*sizes: Size, like: str, per_call: bool = False) -> Scratch:
    """Describe scratch memory for a tile kernel, for its option ``scratch``.

    The function gets it as a contiguous view, like a tensor's. Its first contents are undefined;
    under `check_bounds` they are NaN, and -1 for integers.

    Args:
        sizes: for each dimension a number, or a function that is compiled and takes the kernel's
            arguments and results that it names, as ``lambda input: input.shape[-1]``.
        like: the argument or result whose compute type the elements have: float32 if that is
            bfloat16 or float16.
        per_call: all threads of a call share the memory, and ``finish`` may take it. By default
            each thread has memory of its own, which one tile leaves to the next.

    Raises:
        TypeError: for a size that is neither a number nor a function, or without any.

    Example:
        >>> from foo_ops import language
        >>> foo_ops.library.define("mylib::column_sum", "(Tensor input) -> Tensor")
        >>> @foo_ops.library.register_fake("mylib::column_sum")
        ... def column_sum_fake(input):
        ...     return input.new_empty(input.shape[-1:])
        >>> def add_up(output, sums):
        ...     for part in range(1, sums.rows):
        ...         total, other = sums.row(0), sums.row(part)
        ...         for i in range(output.size):
        ...             total[i] += other[i]
        ...     for i in range(output.size):
        ...         output[i] = sums[0, i]
        >>> @foo_ops.library.register_kernel("mylib::column_sum", ("cpu", "foo"))
        ... @foo_ops.library.tile_kernel(
        ...     tiles=lambda: 16,
        ...     scratch={
        ...         "sums": foo_ops.library.scratch(
        ...             16, lambda input: input.shape[-1], like="input", per_call=True
        ...         )
        ...     },
        ...     finish=add_up,
        ... )
        ... def column_sum(input, output, sums, parts):
        ...     for part in parts:
        ...         for i in range(input.shape[-1]):
        ...             sums[part, i] = 0.0
        ...         for row in range(part, input.rows, 16):
        ...             x = input.row(row)
        ...             for i in range(input.shape[-1]):
        ...                 sums[part, i] += x[i]
        >>> torch.ops.mylib.column_sum(torch.ones(5, 3))
        tensor([5., 5., 5.])
    """
    _require(sizes)
    return Scratch(tuple(sizes), like, per_call)


def _require(sizes: Sequence[object]) -> None:
    is_right = all(is_function(size) or type(size) is int for size in sizes)
    if not sizes or not is_right:
        raise TypeError(
            f"scratch: sizes must be ints or functions, one for each dimension, got {sizes}"
        )


# ------------------------------------------------------------------------------------------- bounds

# Let tile kernels check that each access is inside of its tensor.


if switch("FOO_CHECK_BOUNDS"):
    _C.ask_for_bounds_checks()


@contextlib.contextmanager
def check_bounds() -> Iterator[None]:
    """Check every access of the tile kernels that this context calls, on all threads.

    An access outside of its tensor reads 0 or writes nothing. When the kernel is done, the operator
    raises an IndexError, which names the operator, the first such access with its indices, the
    shape, and the line of the kernel. A kernel with checks is compiled separately, and is slower;
    calls outside of the context are as fast as ever.

    An offset into ``x.data`` must lie between the first element and the last one, but may fall
    between two. An address that a kernel takes with `foo_ops.language.address_of` is not checked.

    ``FOO_CHECK_BOUNDS=1`` in the environment does the same for the whole process, and
    `foo_ops.testing` for every operator that it checks.

    Example:
        >>> foo_ops.library.define("mylib::ones", "(Tensor input) -> Tensor")
        >>> @foo_ops.library.register_fake("mylib::ones")
        ... def ones_fake(input):
        ...     return torch.empty_like(input)
        >>> @foo_ops.library.register_kernel("mylib::ones", "cpu")
        ... @foo_ops.library.tile_kernel
        ... def ones(input, output, rows):
        ...     for row in rows:
        ...         for i in range(6):
        ...             output[row, i] = 1.0
        >>> with foo_ops.library.check_bounds():
        ...     try:
        ...         torch.ops.mylib.ones(torch.empty(2, 5))
        ...     except IndexError as error:
        ...         print(str(error).partition(" (")[0])
        ones: output[0, 5] is outside of output, which has shape [2, 5]
    """
    _C.ask_for_bounds_checks()
    try:
        yield
    finally:
        _C.end_bounds_checks()
