"""Map operators under torch.vmap: in one call where that is possible, else by a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from foo_ops.library.operators import Parameter, find, keep, own_library, tensors_in

Rule = Callable[..., tuple[Any, Any]]
KEY = "FuncTorchBatched"
DEFAULT_KEY = "FuncTorchBatchedDecomposition"
"""It stands for `KEY` where nothing is registered for that: an author's rule replaces nothing."""
KEYS = (KEY, DEFAULT_KEY)


class _Defaults(torch.library.Library):
    """A library whose rules give way to those that an author registers."""

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        super().impl(op_name, fn, DEFAULT_KEY, **options)

    def destroy(self) -> None:
        """End with the library that keeps this one as a registration of its own."""
        self._destroy()


def register_default_vmap(name: str, rule: Rule, lib: torch.library.Library | None) -> None:
    """Register the rule of a kernel, for an operator that has none."""
    if not any(torch._C._dispatch_has_kernel_for_dispatch_key(name, it) for it in KEYS):
        defaults = _Defaults(name.partition("::")[0], "FRAGMENT")
        torch.library.register_vmap(name, rule, lib=defaults)
        keep(defaults, lib)


def register_vmap(
    op: str | torch._ops.OpOverload | torch.library.CustomOpDef,
    func: Rule | None = None,
    /,
    *,
    lib: torch.library.Library | None = None,
) -> Any:
    """Register as torch.library.register_vmap does, in place of the rule of a kernel of Numba.

    Args:
        op: the operator, such as ``"mylib::f"``.
        func: ``func(info, in_dims, *args, **kwargs)`` returns the results and where their mapped
            dimensions are. Without it this is a decorator.
        lib: the registration ends with it; without it, with the process.

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
    """Map an operator by a call for each element of the mapped dimension.

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
    """Make the rule of an operator that writes its arguments: a call for each of their parts."""

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


def _is_alias(argument: torch._C.Argument, result: torch._C.Argument) -> bool:
    aliases = [it.alias_info.before_set for it in (argument, result) if it.alias_info is not None]
    return len(aliases) == 2 and aliases[0] == aliases[1]


def require_mapped(name: str, argument: str, in_dim: Any) -> None:
    """Refuse to write to a tensor, or a list of them, that all elements of a map share."""
    if None in (in_dim if isinstance(in_dim, (list, tuple)) else [in_dim]):
        raise RuntimeError(
            f"{name}: {argument} is written, and must be mapped by torch.vmap as other arguments "
            "are"
        )


def register_vmap_rows(name: str, *rows: str) -> None:
    """Map an operator that takes any number of leading dimensions, in one call.

    Args:
        name: the operator, whose results have the leading dimensions, too.
        rows: names the arguments that have them. Where another one is mapped, there is a call for
            each element of the mapped dimension.

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
    """Move the mapped dimension to the front, or repeat what is not mapped."""
    return tensor.expand(count, *tensor.shape) if in_dim is None else tensor.movedim(in_dim, 0)


def make_elementwise_rule(
    name: str, parameters: Iterable[Parameter], own: Iterable[str]
) -> Rule | None:
    """Make the rule of an elementwise operator, which broadcasts as it does without a map.

    Args:
        own: names the tensors that are not promoted to a common dtype.
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
    """Say that all results are mapped in their first dimension."""
    return pytree.tree_map(lambda it: 0 if isinstance(it, Tensor) else None, results)


def _common_dtype(tensors: list[tuple[Tensor, int | None]]) -> torch.dtype:
    """Return the dtype to which tensors are promoted, whose mapped dimensions do not count."""
    from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

    logical = [
        torch.empty((1,) * (x.dim() - (d is not None)), dtype=x.dtype, device="meta")
        for x, d in tensors
    ]
    kind = ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT
    return elementwise_dtypes(*logical, type_promotion_kind=kind)[1]


def _aligned(tensor: Tensor, in_dim: int, rank: int, common: torch.dtype | None) -> Tensor:
    """Move the mapped dimension before all that are broadcast."""
    tensor = tensor.movedim(in_dim, 0)
    if common is not None and tensor.dim() == 1:
        # A number does not promote tensors with dimensions; now it has one.
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
    """Return what a function for register_vmap does: the results, stacked, and where.

    A result that is no tensor is that of the first call.

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
    """Return what one call of a loop takes: of a list, from each tensor."""
    if isinstance(in_dim, (list, tuple)):
        return [_element(it, its_dim, index) for it, its_dim in zip(argument, in_dim)]
    return argument if in_dim is None else argument.select(in_dim, index)


def meta_element(argument: Any, in_dim: Any) -> Any:
    """Return what one call of a loop takes, on the device meta, for a fake kernel."""
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
    """Return what a loop without calls does: the fake kernel tells what a call would return."""

    device = tensors_in(inputs)[0].device

    def none_of(result: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        return torch.empty((0, *result.shape), dtype=result.dtype, device=device)

    results = pytree.tree_map(none_of, operator(*map(meta_element, inputs, in_dims), **keywords))
    return results, in_first_place(results)
