"""Map operators under torch.vmap: in one call if possible, else by a loop."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from foo_ops.compat import (
    Argument,
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    OpOverload,
    has_kernel_for_key,
    keyset_full_after,
    pytree,
)
from foo_ops.kernels.compiler.inspection import row_dimensions
from foo_ops.library.operators import Parameter, find, keep, own_library, tensors_in

# ------------------------------------------------------------------------------------- registration


Rule = Callable[..., tuple[Any, Any]]
KEY = "FuncTorchBatched"
DEFAULT_KEY = "FuncTorchBatchedDecomposition"
"""Serves `KEY` where no rule is registered for `KEY` itself: an author's rule replaces nothing."""
KEYS = (KEY, DEFAULT_KEY)


class _Defaults(torch.library.Library):
    """A library whose rules give way to those that an author registers."""

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        super().impl(op_name, fn, DEFAULT_KEY, **options)

    def destroy(self) -> None:
        """End together with the library that keeps this one as a registration."""
        self._destroy()


def register_default_vmap(name: str, rule: Rule, lib: torch.library.Library | None) -> None:
    """Register a kernel's rule, unless the operator has one."""
    if not any(has_kernel_for_key(name, it) for it in KEYS):
        defaults = _Defaults(name.partition("::")[0], "FRAGMENT")
        torch.library.register_vmap(name, rule, lib=defaults)
        keep(defaults, lib)


def register_vmap(
    op: str | OpOverload | torch.library.CustomOpDef,
    func: Rule | None = None,
    /,
    *,
    lib: torch.library.Library | None = None,
) -> Any:
    """Register a rule as torch.library.register_vmap does; it replaces that of a Numba kernel.

    Args:
        op: the operator, such as ``"mylib::f"``.
        func: ``func(info, in_dims, *args, **kwargs)`` returns the results and where their mapped
            dimensions are. If omitted, returns a decorator.
        lib: the registration ends with this library; by default, with the process.

    Example:
        >>> foo_ops.library.define("mylib::negative", "(Tensor input) -> Tensor")
        >>> foo_ops.library.register_kernel(
        ...     "mylib::negative", "cpu", foo_ops.library.elementwise_kernel(lambda x: -x)
        ... )
        >>> @foo_ops.library.register_vmap("mylib::negative")
        ... def rule(info, in_dims, input):
        ...     return torch.ops.mylib.negative(input), in_dims[0]
        >>> torch.vmap(torch.ops.mylib.negative)(torch.ones(2))
        tensor([-1., -1.])
    """
    find(op)
    return torch.library.register_vmap(op, func, lib=own_library(op, lib))


def register_vmap_loop(name: str) -> None:
    """Map an operator by one call per element of the mapped dimension.

    Example:
        >>> @torch.library.custom_op("mylib::sum_of_row", mutates_args=())
        ... def sum_of_row(row: torch.Tensor) -> torch.Tensor:
        ...     assert row.dim() == 1
        ...     return row.sum()
        >>> foo_ops.library.register_vmap_loop("mylib::sum_of_row")
        >>> torch.vmap(torch.ops.mylib.sum_of_row)(torch.ones(3, 2))
        tensor([2., 2., 2.])
    """
    register_vmap(name, make_loop(name))


def make_loop(name: str) -> Rule:
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any, **keywords: Any) -> Any:
        return vmap_by_loop(find(name), info, in_dims, *inputs, **keywords)

    return vmap


def make_loop_in_place(name: str) -> Rule:
    """Make the rule of an operator that writes its arguments: one call per mapped element."""

    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any, **keywords: Any) -> Any:
        operator = find(name)
        arguments, returns = operator._schema.arguments, operator._schema.returns
        given = list(zip(arguments, inputs, in_dims))
        for argument, value, in_dim in given:
            if argument.is_write and value is not None:
                require_mapped(name, argument.name, in_dim)
        if info.batch_size > 0:
            vmap_by_loop(operator, info, in_dims, *inputs, **keywords)
        written = [
            (value, in_dim)
            for result in returns
            for argument, value, in_dim in given
            if argument.is_write and _is_alias(argument, result)
        ]
        if len(written) == 1:
            return written[0]
        return tuple(zip(*written)) if written else (None, None)

    return vmap


def _is_alias(argument: Argument, result: Argument) -> bool:
    aliases = [it.alias_info.before_set for it in (argument, result) if it.alias_info is not None]
    return len(aliases) == 2 and aliases[0] == aliases[1]


def require_mapped(name: str, argument: str, in_dim: Any) -> None:
    """Refuse to write to a tensor or list that is not mapped, and so shared by all elements."""
    if None in (in_dim if isinstance(in_dim, (list, tuple)) else [in_dim]):
        raise RuntimeError(
            f"{name}: {argument} is written, so torch.vmap must map it like the other arguments"
        )


def register_vmap_rows(name: str, *rows: str) -> None:
    """Map an operator that takes any number of leading dimensions, in one call.

    Args:
        name: the operator, whose results have the leading dimensions, too.
        rows: the arguments with leading dimensions. If another one is mapped, there is one call
            per element of the mapped dimension.

    Example:
        >>> foo_ops.library.register_vmap_rows("foo::rms_norm", "input")
        >>> torch.vmap(foo_ops.rms_norm)(torch.tensor([[3.0, 3.0], [1.0, 1.0]]))
        tensor([[1.0000, 1.0000],
                [1.0000, 1.0000]])
    """
    operator = find(name)
    names = [argument.name for argument in operator._schema.arguments]

    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any, **keywords: Any) -> Any:
        positional = list(zip(names, inputs, in_dims))
        if any(in_dim is not None and name not in rows for name, _, in_dim in positional):
            return vmap_by_loop(operator, info, in_dims, *inputs, **keywords)
        arguments = [
            in_front(argument, in_dim, info.batch_size)
            if name in rows and isinstance(argument, Tensor)
            else argument
            for name, argument, in_dim in positional
        ]
        results = operator(*arguments, **keywords)
        return results, 0 if isinstance(results, Tensor) else (0,) * len(results)

    register_vmap(name, vmap)


def in_front(tensor: Tensor, in_dim: int | None, count: int) -> Tensor:
    """Move the mapped dimension to the front, or expand a tensor that is not mapped."""
    return tensor.expand(count, *tensor.shape) if in_dim is None else tensor.movedim(in_dim, 0)


def make_elementwise_rule(
    name: str, parameters: Iterable[Parameter], own: Iterable[str]
) -> Rule | None:
    """Make the rule of an elementwise operator; it broadcasts as the operator does without vmap.

    Args:
        own: the names of tensors that are not promoted to the common dtype.
    """
    parameters, own = list(parameters), set(own)
    if any(p.role == "out" for p in parameters):
        return None

    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any, **keywords: Any) -> Any:
        given = list(zip(parameters, inputs, in_dims))
        tensors = [(p, x, d) for p, x, d in given if isinstance(x, Tensor)]
        rank = max(x.dim() - (d is not None) for _, x, d in tensors)
        common = _common_dtype([(x, d) for p, x, d in tensors if p.name not in own])
        for parameter, _, in_dim in tensors:
            if parameter.role != "read":
                require_mapped(name, parameter.name, in_dim)
        arguments = [
            _aligned(x, d, rank, None if p.name in own else common)
            if isinstance(x, Tensor) and d is not None
            else x
            for p, x, d in given
        ]
        results = find(name)(*arguments, **keywords)
        if parameters[0].role == "in place":
            return inputs[0], in_dims[0]
        return results, in_first_place(results)

    return vmap


def in_first_place(results: Any) -> Any:
    """Return the mapped dimension of each result: 0 for a tensor."""
    return pytree.tree_map(lambda it: 0 if isinstance(it, Tensor) else None, results)


def _common_dtype(tensors: list[tuple[Tensor, int | None]]) -> torch.dtype:
    """Return the dtype to which tensors are promoted, not counting their mapped dimensions."""
    from foo_ops.compat import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

    logical = [
        torch.empty((1,) * (x.dim() - (d is not None)), dtype=x.dtype, device="meta")
        for x, d in tensors
    ]
    kind = ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT
    return elementwise_dtypes(*logical, type_promotion_kind=kind)[1]


def _aligned(tensor: Tensor, in_dim: int, rank: int, common: torch.dtype | None) -> Tensor:
    """Move the mapped dimension before all dimensions that are broadcast."""
    tensor = tensor.movedim(in_dim, 0)
    if common is not None and tensor.dim() == 1:
        # A 0-d tensor does not promote tensors with dimensions; with the mapped one it would.
        tensor = tensor.to(common)
    missing = rank - tensor.dim() + 1
    return tensor.reshape(tensor.shape[0], *(1,) * missing, *tensor.shape[1:])


def vmap_by_loop(
    operator: Callable[..., Any],
    info: Any,
    in_dims: tuple[int | None, ...],
    *inputs: Any,
    **keywords: Any,
) -> tuple[Any, Any]:
    """Call an operator once per element; return the stacked results and their mapped dimensions.

    A function for `register_vmap` can return this pair. A result that is no tensor is that of the
    first call.

    Example:
        >>> @torch.library.custom_op("mylib::norm_of_row", mutates_args=())
        ... def norm_of_row(row: torch.Tensor) -> torch.Tensor:
        ...     assert row.dim() == 1
        ...     return row.norm()
        >>> @foo_ops.library.register_vmap("mylib::norm_of_row")
        ... def vmap(info, in_dims, row):
        ...     operator = torch.ops.mylib.norm_of_row.default
        ...     return foo_ops.library.vmap_by_loop(operator, info, in_dims, row)
        >>> torch.vmap(torch.ops.mylib.norm_of_row)(torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
        tensor([5., 2.])
    """
    if info.batch_size == 0:
        return _mapped_over_nothing(operator, in_dims, inputs, keywords)
    calls = []
    for index in range(info.batch_size):
        chosen = [_element(argument, in_dim, index) for argument, in_dim in zip(inputs, in_dims)]
        calls.append(operator(*chosen, **keywords))
    leaves, specs = zip(*map(pytree.tree_flatten, calls))
    stacked = (
        torch.stack(parts) if isinstance(parts[0], Tensor) else parts[0] for parts in zip(*leaves)
    )
    results = pytree.tree_unflatten(stacked, specs[0])
    return results, in_first_place(results)


def _element(argument: Any, in_dim: Any, index: int) -> Any:
    """Return one call's element of an argument, or of each tensor in a list."""
    if isinstance(in_dim, (list, tuple)):
        return [_element(it, its_dim, index) for it, its_dim in zip(argument, in_dim)]
    return argument if in_dim is None else argument.select(in_dim, index)


def meta_element(argument: Any, in_dim: Any) -> Any:
    """Return one call's element of an argument on device meta, for a fake kernel."""
    if isinstance(in_dim, (list, tuple)):
        return list(map(meta_element, argument, in_dim))
    if not isinstance(argument, Tensor):
        return argument
    shape = list(argument.shape)
    if in_dim is not None:
        del shape[in_dim]
    return torch.empty(shape, dtype=argument.dtype, device="meta")


def _mapped_over_nothing(
    operator: Callable[..., Any],
    in_dims: tuple[int | None, ...],
    inputs: tuple[Any, ...],
    keywords: dict[str, Any],
) -> tuple[Any, Any]:
    """Return the empty results of a loop without calls; the fake kernel gives shapes and dtypes."""

    device = tensors_in(inputs)[0].device

    def none_of(result: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        return torch.empty((0, *result.shape), dtype=result.dtype, device=device)

    results = pytree.tree_map(none_of, operator(*map(meta_element, inputs, in_dims), **keywords))
    return results, in_first_place(results)


# --------------------------------------------------------------------------------- random operators

# Map operators that draw random numbers, as the argument ``randomness`` of torch.vmap says.


# The key of all calls under torch.vmap, even if no tensor is mapped.
_MODE = DispatchKey.FuncTorchVmapMode
# The message of torch's own random operators.
_REFUSAL = (
    "vmap: called random operation while in randomness error mode. Please either use the 'same' or "
    "'different' randomness flags on vmap or perform the randomness operation out of vmap"
)


def register_random_vmap(operator: OpOverload, lib: torch.library.Library | None) -> None:
    """Refuse calls under ``randomness="error"``; under "different", map those that map nothing."""

    def kernel(keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        from foo_ops.compat import current_functorch_interpreter

        interpreter: Any = current_functorch_interpreter()
        if interpreter.randomness() == "error":
            raise RuntimeError(_REFUSAL)
        if interpreter.randomness() == "different":
            args = _mapped(args, interpreter.batch_size(), interpreter.level())
            keys = keys | DispatchKeySet(DispatchKey.FuncTorchBatched)
        rest = keyset_full_after(_MODE)
        return operator.redispatch(keys & rest, *args, **kwargs)

    name = operator.name()
    if not has_kernel_for_key(name, _MODE.name):
        own = torch.library.Library(name.partition("::")[0], "FRAGMENT")
        own.impl(name, kernel, _MODE.name, with_keyset=True)
        keep(_Registration(own), lib)


class _Registration:
    """A registration that ends with the operator's library."""

    def __init__(self, library: torch.library.Library) -> None:
        self._library = library

    def destroy(self) -> None:
        self._library._destroy()


def _mapped(args: tuple[Any, ...], size: int, level: int) -> tuple[Any, ...]:
    """Map the first tensor, if no tensor is mapped at this level."""
    from foo_ops.compat import add_batch_dim, is_batched_tensor, maybe_get_level

    tensors = tensors_in(args)
    is_mapped = any(is_batched_tensor(x) and maybe_get_level(x) == level for x in tensors)
    if is_mapped or not tensors:
        return args
    first = next(place for place, it in enumerate(args) if isinstance(it, Tensor))
    repeated = args[first].expand(size, *args[first].shape)
    return (*args[:first], add_batch_dim(repeated, 0, level), *args[first + 1 :])


def make_random_loop(name: str, parameters: tuple[Parameter, ...]) -> Rule:
    """Make the rule of an operator with a generator: one call per element.

    Under ``randomness="same"`` the generator is reset before each call.
    """
    generators = [parameter.name for parameter in parameters if parameter.kind == "generator"]

    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any, **keywords: Any) -> Any:
        operator: Any = find(name)
        device = tensors_in(inputs)[0].device
        given = dict(zip((p.name for p in parameters), inputs)) | keywords
        drawn_from = [given.get(generator) or _default(device) for generator in generators]
        states = [generator.get_state() for generator in drawn_from]

        def call(*args: Any, **kwargs: Any) -> Any:
            if info.randomness == "same":
                for generator, state in zip(drawn_from, states):
                    generator.set_state(state)
            return operator(*args, **kwargs)

        with ExcludeDispatchKeyGuard(DispatchKeySet(_MODE)):
            return vmap_by_loop(call, info, in_dims, *inputs, **keywords)

    return vmap


def _default(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    generators: tuple[torch.Generator, ...] = torch.get_device_module(device).default_generators
    return generators[device.index or 0]


# ----------------------------------------------------------------------------- rows of tile kernels

# How an operator uses the rows of its tensors, according to its tile kernel.


@dataclasses.dataclass(frozen=True)
class Rows:
    """Number of dimensions of each tensor within a row; None for a tensor that is read whole.

    Attributes:
        arguments: for each tensor argument, by its name in the schema.
        results: for each result, in order.
    """

    arguments: dict[str, int | None]
    results: Sequence[int | None]


RowReader = Callable[[], Rows | None]
"""Reads a kernel's source; returns None if the operator does not compute each row on its own."""


def make_row_reader(
    operator: OpOverload, function: Callable[..., Any] | None, names: Sequence[str]
) -> RowReader:
    """Make a reader of a kernel's source, which runs on first use: it is too slow for an import.

    Args:
        function: the kernel; None if its tiles are not rows.
        names: the kernel's parameters: the operator's arguments, then the results.
    """
    arguments, returns = operator._schema.arguments, operator._schema.returns
    own = {it.name: name for it, name in zip(arguments, names) if "Tensor" in str(it.type)}
    results = list(names[len(arguments) :])
    # The function has no parameters for results: each result is an argument that it writes.
    results = results or [_alias(it, arguments, names) for it in returns]
    written = [*(own[it.name] for it in arguments if it.is_write), *results]

    @functools.cache
    def read() -> Rows | None:
        found = function and row_dimensions(function, [*own.values(), *results], written)
        # The number of rows is that of the first tensor.
        if not found or found[next(iter(own.values()))] != 1:
            return None
        of_arguments = {argument: found[name] for argument, name in own.items()}
        return Rows(of_arguments, [found[name] for name in results])

    return read


def _alias(result: Any, arguments: Sequence[Any], names: Sequence[str]) -> str:
    aliases = result.alias_info.before_set
    return next(
        name
        for argument, name in zip(arguments, names)
        if argument.alias_info is not None and argument.alias_info.before_set == aliases
    )


# ------------------------------------------------------------------------------------- tile kernels

# Map tile kernels under torch.vmap: by their rows in one call, or else by a loop.


def make_tile_rule(
    operator: OpOverload, parameters: Sequence[Parameter], read: RowReader
) -> Rule | None:
    """Make the rule of a tile kernel; ``f.out`` has none, like PyTorch's out variants."""
    name, is_mutable = operator.name(), operator._schema.is_mutable
    if any(parameter.kind == "generator" for parameter in parameters):
        return None if is_mutable else make_random_loop(name, tuple(parameters))
    if any(parameter.role == "out" for parameter in parameters):
        return None
    return make_loop_in_place(name) if is_mutable else _make_rule_of_rows(name, read)


def _make_rule_of_rows(name: str, read: RowReader) -> Rule:
    loop = make_loop(name)

    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any, **keywords: Any) -> Any:
        operator, size = find(name), info.batch_size
        rows = read() if size > 0 and not tensors_in(keywords) else None
        more = None if rows is None else _more_rows(operator, rows, size, in_dims, inputs)
        if more is None:
            return loop(info, in_dims, *inputs, **keywords)
        arguments, first = more
        one = operator(*map(meta_element, inputs, in_dims), **keywords)
        shapes = [_shape_of_more(result, size, first) for result in tensors_in(one)]
        if shapes != _shapes_of(operator, arguments, keywords):
            return loop(info, in_dims, *inputs, **keywords)
        results = operator(*arguments, **keywords)
        if first is not None:
            results = pytree.tree_map_only(
                Tensor, lambda result: result.unflatten(0, (size, first)), results
            )
        return results, in_first_place(results)

    return vmap


def _more_rows(
    operator: OpOverload,
    rows: Rows,
    size: int,
    in_dims: Sequence[Any],
    inputs: Sequence[Any],
) -> tuple[list[Any], int | None] | None:
    """Merge the mapped dimension into the first dimension of rows; return the inputs and its size.

    Tensors thus keep their number of dimensions, on which kernels and fake kernels may depend; a
    tensor of a single row gets one more. Returns None if another tensor is mapped, or if rows would
    be broadcast.
    """
    names = [argument.name for argument in operator._schema.arguments]
    more, before = list(inputs), set()
    for place, (name, tensor, in_dim) in enumerate(zip(names, inputs, in_dims)):
        inner = rows.arguments.get(name)
        if inner is not None and isinstance(tensor, Tensor):
            moved = in_front(tensor, in_dim, size)
            before.add(moved.shape[1 : moved.dim() - inner])
            more[place] = moved.flatten(0, 1) if moved.dim() - inner > 1 else moved
        elif in_dim is not None:
            return None
    if len(before) != 1:
        return None
    (shape,) = before
    return more, shape[0] if len(shape) > 0 else None


def _shape_of_more(result: Tensor, size: int, first: int | None) -> list[int] | None:
    """Return a result's shape with the merged rows; None if it has no dimension of rows."""
    if first is None:
        return [size, *result.shape]
    if result.dim() == 0 or result.shape[0] != first:
        return None
    return [size * first, *result.shape[1:]]


def _shapes_of(
    operator: OpOverload, arguments: Sequence[Any], keywords: dict[str, Any]
) -> list[list[int]] | None:
    """Return the shapes of the results; None if the fake kernel refuses this many rows."""
    arguments = pytree.tree_map_only(Tensor, lambda x: x.to("meta"), arguments)
    try:
        return [list(result.shape) for result in tensors_in(operator(*arguments, **keywords))]
    except (ValueError, TypeError, RuntimeError):
        return None
