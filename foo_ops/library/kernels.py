"""Define operators, and register their Numba kernels: torch.library's functions, extended."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import inspect
import itertools
import re
import sys
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast, overload

import torch

from foo_ops import _C
from foo_ops._process import switch
from foo_ops.compat import OpOverload, SafeKernelFunction
from foo_ops.kernels.compiler.inspection import line_of, returned_counts
from foo_ops.kernels.compiler.interpret import INTERPRETS
from foo_ops.kernels.compiler.kernel import KERNELS, Maker
from foo_ops.kernels.user.sources import UserKernel
from foo_ops.library.operators import (
    DEFINITIONS,
    DISPATCH_KEYS,
    Parameter,
    checking,
    counted,
    define_or_take,
    describe,
    find,
    functionalize_out,
    has_values,
    keep,
    own_library,
    parameters_of,
    parse,
    qualified,
    refuse_derivatives,
)
from foo_ops.library.rules import (
    ShardingRule,
    VmapRule,
    register_default_sharding,
    register_default_vmap,
    register_random_vmap,
)
from foo_ops.library.tensor_numbers import let_numbers_vary

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
    vmap: VmapRule | None
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


# ---------------------------------------------------------------------- refused elementwise kernels

# Refuse operators that an elementwise kernel does not fit, when it is registered.


Functions = Sequence[Callable[..., Any]]
"""The functions of a kernel, one for each way in which it may be called."""


def refuse_whole(operator: OpOverload, parameters: Sequence[Parameter]) -> None:
    """Refuse arguments that are neither elements nor the same for all elements."""
    for parameter in parameters:
        if parameter.kind == "tensors":
            raise TypeError(
                f"{operator.name()}: an elementwise kernel must not take a list of tensors, "
                f"got {parameter.name}; use a tile_kernel"
            )
        if parameter.kind == "generator":
            raise TypeError(
                f"{operator.name()}: an elementwise kernel must not take a generator, since it "
                f"does not know its element, got {parameter.name}; use a tile_kernel"
            )


def check_parameters(
    operator: OpOverload,
    parameters: Sequence[Parameter],
    functions: Functions,
    own: Collection[str],
) -> None:
    inputs = [p for p in parameters if p.role != "out"]
    if not any(p.is_tensor and not p.is_optional and p.name not in own for p in inputs):
        kind = "neither optional nor in own_dtypes" if own else "not optional"
        raise TypeError(
            f"{operator.name()}: an elementwise kernel must take a tensor that is {kind}"
        )
    read = [p.name for p in parameters if p.is_tensor and p.role == "read"]
    for name in set(own) - set(read):
        raise TypeError(
            f"{operator.name()}: own_dtypes must name tensors that are read ({', '.join(read)}), "
            f"got {name}"
        )
    for function in functions:
        taken = count_parameters(function)
        if taken != len(inputs):
            names = ", ".join(p.name for p in inputs)
            raise TypeError(
                f"{operator.name()}: its kernel must take {len(inputs)} arguments ({names}), got "
                f"{describe(function)}, which takes {taken}"
            )


def check_returned(operator: OpOverload, functions: Functions, results: int) -> None:
    """Refuse a wrong number of values if the code shows it; otherwise the compiler does.

    A kernel of gradients is first compiled in a backward pass, which is late to hear of it.
    """
    for function in functions:
        for count, line in returned_counts(function):
            if count not in (None, 0, results):
                raise TypeError(
                    f"{operator.name()}: its kernel must return {results} "
                    f"value{'s' * (results != 1)}, one for each result, got "
                    f"{describe(function)}, which returns {count} in line {line}"
                )


# ----------------------------------------------------------------------------- refused tile kernels

# Refuse tile kernels that their operators cannot have, when they are defined.


def require_no_result(function: Callable[..., Any]) -> None:
    """Refuse a function that returns a value, except a lambda, which always does."""
    for count, line in returned_counts(function):
        if count != 0 and function.__name__ != "<lambda>":
            raise TypeError(
                "a tile kernel must write its results to its arguments and return nothing, got "
                f"{describe(function)}, which returns a value in line {line}"
            )


def require_verdict(function: Callable[..., Any]) -> None:
    """Refuse a function that may return nothing, or several values, instead of True or False."""
    for count, line in returned_counts(function):
        if count not in (1, None):
            raise TypeError(
                "a tile kernel with refuse and without check must return True, or False to refuse "
                f"its arguments, got {describe(function)}, which returns "
                f"{'nothing' if count == 0 else f'{count} values'} in line {line}"
            )


def require_scratch(function: Callable[..., Any], scratch: Mapping[str, Scratch] | None) -> None:
    """Require a dict of scratch memory, with the names that the function has before the tiles."""
    given = scratch or {}
    if not isinstance(given, Mapping) or not all(isinstance(s, Scratch) for s in given.values()):
        raise TypeError(
            "tile_kernel: scratch must be a dict of names and library.scratch(...), got "
            f"{scratch!r}"
        )
    names = list(inspect.signature(function).parameters)
    taken = names[-1 - len(given) : -1]
    if taken != list(given):
        raise TypeError(
            f"tile_kernel: {describe(function)} must take the scratch memory ({', '.join(given)}) "
            f"before its tiles, got {', '.join(taken)}"
        )


def check_late_refusal(operator: OpOverload, parameters: Sequence[Parameter]) -> None:
    for parameter in parameters:
        if parameter.role == "in place" or parameter.kind == "generator":
            raise TypeError(
                f"{operator.name()}: a kernel that returns False to refuse its arguments must "
                f"write to no argument and draw no random numbers, got {parameter.name}, which is "
                f"{'drawn from' if parameter.kind == 'generator' else 'written'}; use check="
            )


def check_lists(operator: OpOverload, parameters: Sequence[Parameter]) -> None:
    for parameter in parameters:
        is_written = parameter.kind == "tensors" and parameter.role != "read"
        if is_written and operator._schema.returns:
            raise TypeError(
                f"{operator.name()}: an operator that writes to a list of tensors must return "
                f"nothing, -> (), got {parameter.name}"
            )
    for result in operator._schema.returns:
        if str(result.real_type) not in ("Tensor", "Optional[Tensor]"):
            raise TypeError(
                f"{operator.name()}: the results of a tile kernel must be tensors, got "
                f"{result.type}"
            )


def refuse_scalars_alone(operator: OpOverload, parameters: Sequence[Parameter]) -> None:
    if any(p.is_tensor and not p.is_optional for p in parameters):
        return
    for parameter in parameters:
        if parameter.kind == "scalar":
            raise TypeError(
                f"{operator.name()}: an operator with a Scalar must have a tensor that is not "
                f"optional, which gives the Scalar its type, got none for {parameter.name}"
            )


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
