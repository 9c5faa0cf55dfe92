"""Register how PyTorch's other parts call an operator.

These are torch.vmap, DTensor, nested tensors, autocast and FlopCounterMode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foo_ops import _C
from foo_ops._process import after_import
from foo_ops.compat import (
    Argument,
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    NestedTensor,
    OpOverload,
    has_kernel_for_key,
    is_autocast_available,
    key_for_device,
    keyset_full_after,
    pytree,
)
from foo_ops.kernels.compiler.inspection import count_operations
from foo_ops.library.operators import (
    Parameter,
    find,
    keep,
    library_of,
    own_library,
    short_name,
    tensors_in,
)

# --------------------------------------------------------------------------------------- torch.vmap


VmapRule = Callable[..., tuple[Any, Any]]
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


def register_default_vmap(name: str, rule: VmapRule, lib: torch.library.Library | None) -> None:
    """Register a kernel's rule, unless the operator has one."""
    if not any(has_kernel_for_key(name, it) for it in KEYS):
        defaults = _Defaults(name.partition("::")[0], "FRAGMENT")
        torch.library.register_vmap(name, rule, lib=defaults)
        keep(defaults, lib)


def register_vmap(
    op: str | OpOverload | torch.library.CustomOpDef,
    func: VmapRule | None = None,
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


def make_loop(name: str) -> VmapRule:
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any, **keywords: Any) -> Any:
        return vmap_by_loop(find(name), info, in_dims, *inputs, **keywords)

    return vmap


def make_loop_in_place(name: str) -> VmapRule:
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
) -> VmapRule | None:
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


# ------------------------------------------------------------------- torch.vmap of random operators

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
        keep(_RegisteredRule(own), lib)


class _RegisteredRule:
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


def make_random_loop(name: str, parameters: tuple[Parameter, ...]) -> VmapRule:
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


# ------------------------------------------------------------------------------------------ DTensor

# Takes the operator's arguments, with a TensorMeta in place of each tensor.
ShardingRule = Callable[..., str]

RULES: dict[OpOverload, ShardingRule] = {}
_functions: list[Callable[[OpOverload], None]] = []

REST = "..."
WHOLE = "."


def register_sharding(
    op: str | OpOverload,
    sharding: str | ShardingRule | None = None,
    /,
    *,
    lib: torch.library.Library | None = None,
) -> Any:
    """Declare along which dimensions an operator on DTensors can be sharded.

    ``"b h . ., b h . ., h -> b h . ."`` names the dimensions of the operator's tensors, in the
    order of its schema, as in torch.einsum. The operator must compute the same if it is called
    with equal parts of all tensors along one name:

    - A tensor without the name, or with size 1 there, is replicated. A result without the name is
      the sum of what the processes compute, as the gradient of a weight is.
    - ``.`` is a dimension that is not sharded, ``...`` stands for all dimensions before the others,
      which are broadcast. A tensor with fewer dimensions lacks the first ones.
    - If sizes differ, as the heads of queries and keys do, one is a multiple of the other, and only
      equal parts are given.

    Tensors with other placements are redistributed first; if the operator writes them, the call is
    refused. Elementwise kernels need no declaration: they are sharded along all dimensions. Nor do
    tile kernels whose source shows that each row is computed on its own. All others run on whole
    tensors until one is given. For rules that need placements there is
    ``torch.distributed.tensor.experimental.register_sharding``.

    Args:
        op: the operator, such as ``"mylib::f"``.
        sharding: as above; or a function that returns this from the operator's arguments, with the
            shape and dtype in place of tensors. It raises NotImplementedError if the operator does
            not take DTensors. If omitted, returns a decorator.
        lib: the registration ends with this library; by default, with the process.

    Raises:
        ValueError: if the tensors named are not those of the operator.
        TypeError: for an operator with lists of tensors.

    Example:
        >>> foo_ops.library.define("mylib::column_sums", "(Tensor input) -> Tensor")
        >>> foo_ops.library.register_kernel("mylib::column_sums", "cpu", lambda input: input.sum(0))
        >>> foo_ops.library.register_sharding("mylib::column_sums", "rows columns -> columns")
    """
    operator = find(op)
    if sharding is None:

        def register(rule: ShardingRule) -> ShardingRule:
            register_sharding(op, rule, lib=lib)
            return rule

        return register
    if isinstance(sharding, str):
        parse_sharding(operator, sharding)
    rule = sharding if callable(sharding) else make_constant_rule(sharding)
    _register(operator, rule, own_library(op, lib))
    return None


def register_default_sharding(
    operator: OpOverload, rule: ShardingRule, lib: torch.library.Library | None
) -> None:
    """Register a kernel's rule, unless the operator has one."""
    if operator not in RULES:
        _register(operator, rule, lib)


def for_each_rule(function: Callable[[OpOverload], None]) -> None:
    """Call a function with each operator that has a rule or gets one later."""
    for operator in RULES:
        function(operator)
    _functions.append(function)


def make_constant_rule(sharding: str) -> ShardingRule:
    return lambda *arguments, **keywords: sharding


def make_elementwise_sharding(operator: OpOverload) -> ShardingRule:
    """Make the rule that shards along all dimensions, which are broadcast."""
    return make_uniform_rule(operator, REST)


def make_uniform_rule(operator: OpOverload, dimensions: str) -> ShardingRule:
    """Make the rule with the same dimensions for all tensors."""
    schema = operator._schema
    tensors = sum("Tensor" in str(argument.type) for argument in schema.arguments)
    before, after = (", ".join([dimensions] * it) for it in (tensors, len(schema.returns)))
    return make_constant_rule(f"{before} -> {after}")


def _register(operator: OpOverload, rule: ShardingRule, lib: torch.library.Library | None) -> None:
    RULES[operator] = rule
    keep(_RegisteredSharding(operator, rule), lib)
    for function in _functions:
        function(operator)


@dataclasses.dataclass(frozen=True)
class _RegisteredSharding:
    operator: OpOverload
    rule: ShardingRule

    def destroy(self) -> None:
        if RULES.get(self.operator) is self.rule:
            del RULES[self.operator]


@dataclasses.dataclass(frozen=True)
class Sharding:
    """The names of dimensions, for each tensor among the arguments and for each result."""

    arguments: dict[str, tuple[str, ...]]
    results: tuple[tuple[str, ...], ...]


def parse_sharding(operator: OpOverload, sharding: str) -> Sharding:
    """Parse a declaration for `register_sharding`, and check it against the schema."""
    schema = operator._schema
    _refuse_lists(operator)
    names = [it.name for it in schema.arguments if "Tensor" in str(it.type)]
    before, arrow, after = sharding.partition("->")
    arguments = _dimensions(before)
    results = _dimensions(after) if schema.returns else ()
    if not arrow or (len(arguments), len(results)) != (len(names), len(schema.returns)):
        raise ValueError(
            f"{operator.name()}: sharding must name the dimensions of {', '.join(names)} -> "
            f"{len(schema.returns)} results, got {sharding!r}"
        )
    for tensor in (*arguments, *results):
        if REST in tensor[1:]:
            raise ValueError(
                f"{operator.name()}: sharding must have ... before other dimensions, "
                f"got {' '.join(tensor)!r}"
            )
    return Sharding(dict(zip(names, arguments)), results)


def _refuse_lists(operator: OpOverload) -> None:
    types = [str(argument.type) for argument in operator._schema.arguments]
    if any("List" in type_ and "Tensor" in type_ for type_ in types):
        raise TypeError(
            f"{operator.name()}: register_sharding does not support lists of tensors; use "
            "torch.distributed.tensor.experimental.register_sharding"
        )


def _dimensions(tensors: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(tensor.split()) for tensor in tensors.split(","))


def named_dimensions(names: Iterable[str], count: int) -> dict[str, int]:
    """Return the dimensions of a tensor that can be sharded, by their names.

    Dimensions of ``...`` get names that count from its end: ``...1``, ``...2``.
    """
    own = [name for name in names if name != REST]
    found = {
        name: count - back
        for back, name in enumerate(reversed(own), 1)
        if name != WHOLE and back <= count
    }
    rest = count - len(own)
    if REST in names:
        found |= {f"{REST}{rest - dimension}": dimension for dimension in range(rest)}
    return found


# ----------------------------------------------------------------------------------- nested tensors


NESTED_KEY = "AutogradNestedTensor"


def register_nested_rows(
    name: str,
    *rows: str,
    elementwise: bool = False,
    lib: torch.library.Library | None = None,
) -> None:
    """Let an operator of any number of leading dimensions take jagged nested tensors, in one call.

    Without this, an operator with a Numba kernel refuses nested tensors.

    Args:
        name: the operator, whose results have the leading dimensions, too.
        rows: the arguments with leading dimensions. All of them are nested or none, in parts of the
            same lengths.
        elementwise: whether each element is a row of its own. If not, parts that are side by side
            in the last dimension are refused.
        lib: the registration ends with this library; by default, with the process.

    Example:
        >>> foo_ops.library.define("mylib::half", "(Tensor input) -> Tensor")
        >>> foo_ops.library.register_kernel(
        ...     "mylib::half", "cpu", foo_ops.library.elementwise_kernel(lambda x: x / 2)
        ... )
        >>> foo_ops.library.register_nested_rows("mylib::half", "input", elementwise=True)
        >>> parts = [torch.tensor([[2.0]]), torch.tensor([[4.0], [6.0]])]
        >>> nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
        >>> torch.ops.mylib.half(nested).values()
        tensor([[1.],
                [2.],
                [3.]])
    """
    operator = find(name)
    name = operator.name()
    names = [argument.name for argument in operator._schema.arguments]
    for row in rows:
        if row not in names:
            raise ValueError(f"{name}: rows must be among the arguments {names}, got {row!r}")

    def kernel(*inputs: Any, **keywords: Any) -> Any:
        given = dict(zip(names, inputs)) | keywords
        require_dense(operator, {n: it for n, it in given.items() if n not in rows})
        tensors = {n: given[n] for n in rows if isinstance(given.get(n), Tensor)}
        first = _require_same_parts(short_name(operator), tensors, elementwise)
        given |= {n: _rows_of(it) for n, it in tensors.items()}
        results = operator(*list(given.values())[: len(inputs)], **{n: given[n] for n in keywords})
        parts = _parts_of(first)
        return pytree.tree_map_only(Tensor, lambda it: _Nested.apply(it, parts), results)

    library_of(name, lib).impl(name.partition("::")[2], kernel, NESTED_KEY)
    # In inference mode, tensors reach the kernel by way of the refusal.
    keep(_C.refuse_nested_tensors(name), own_library(name, lib))


def require_dense(operator: OpOverload, arguments: dict[str, Any]) -> None:
    for argument, value in arguments.items():
        if any(tensor.is_nested for tensor in tensors_in(value)):
            raise NotImplementedError(
                f"{short_name(operator)}: {argument} must be a dense tensor, got a nested one"
            )


def _require_same_parts(
    operator: str, tensors: dict[str, Tensor], elementwise: bool
) -> NestedTensor:
    """Return the first tensor; all must have its parts."""
    for argument, tensor in tensors.items():
        if tensor.is_nested:
            _require_jagged(operator, argument, tensor, elementwise)
    first, *others = tensors
    for argument in others:
        if _places_of(tensors[first]) != _places_of(tensors[argument]):
            raise ValueError(
                f"{operator}: {argument} must be ragged like {first}, got shapes "
                f"{list(tensors[argument].shape)} and {list(tensors[first].shape)}"
            )
    nested = tensors[first]
    assert isinstance(nested, NestedTensor)
    return nested


def _require_jagged(operator: str, argument: str, tensor: Tensor, elementwise: bool) -> None:
    if not isinstance(tensor, NestedTensor):
        raise NotImplementedError(
            f"{operator}: {argument} must be dense or nested with layout torch.jagged, got a "
            f"nested tensor with layout {tensor.layout}"
        )
    if tensor._ragged_idx == tensor.dim() - 1 and not elementwise:
        raise NotImplementedError(
            f"{operator}: {argument} must not be ragged in the last dimension, "
            f"got shape {list(tensor.shape)}"
        )


def _places_of(tensor: Tensor) -> Any:
    """Return a key for the places of parts: an equal symbol means equal offsets or lengths."""
    if not isinstance(tensor, NestedTensor):
        return None
    where = None if tensor.lengths() is None else id(tensor.offsets())
    return tensor.shape[: tensor._ragged_idx + 1], where


def _parts_of(nested: NestedTensor) -> dict[str, Any]:
    """Return the arguments that make a nested tensor of the same parts, besides its values."""
    return {
        "offsets": nested.offsets(),
        "lengths": nested.lengths(),
        "_metadata_cache": nested._metadata_cache,
        "_ragged_idx": nested._ragged_idx,
    }


def _rows_of(nested: NestedTensor) -> Tensor:
    """Return the rows of all parts, with zeros in the gaps between them.

    A gap could contain NaN, and then gradients of weights would be NaN, too.
    """
    rows: Tensor = _Values.apply(nested)
    lengths, offsets, dimension = nested.lengths(), nested.offsets(), nested._ragged_idx - 1
    if lengths is None:
        return rows
    starts = offsets[: lengths.shape[0]]
    ones = torch.ones_like(starts)
    changes = starts.new_zeros(rows.shape[dimension] + 1)
    changes = changes.index_add(0, starts, ones).index_add(0, starts + lengths, -ones)
    is_row = changes.cumsum(0)[:-1] > 0
    shape = (-1, *[1] * (rows.dim() - dimension - 1))
    return torch.where(is_row.view(shape), rows, 0)


class _Values(torch.autograd.Function):
    """The rows of all parts. NestedTensor.values() can't be differentiated three times."""

    @staticmethod
    def forward(nested: NestedTensor) -> Tensor:
        return nested._values.detach()

    @staticmethod
    def setup_context(context: Any, inputs: tuple[NestedTensor], output: Tensor) -> None:
        context.parts = _parts_of(inputs[0])

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Tensor:
        return _Nested.apply(grad, context.parts)


class _Nested(torch.autograd.Function):
    """Rows in the parts of another tensor, to which the result can be added.

    torch.nested.nested_tensor_from_jagged can be differentiated only once, and cannot be traced.
    """

    @staticmethod
    def forward(values: Tensor, parts: dict[str, Any]) -> Tensor:
        return NestedTensor(values.detach(), **parts)

    @staticmethod
    def setup_context(context: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Values.apply(grad), None


# ----------------------------------------------------------------------------------------- autocast


class Autocast(NamedTuple):
    """How an operator follows the autocast of a device type.

    Attributes:
        dtype: other than autocast's own.
        uncast: names of arguments that stay as they are, or a function that returns them.
    """

    dtype: torch.dtype | None
    uncast: Sequence[str] | Callable[..., Sequence[str]]

    def uncast_in(self, *inputs: Any, **keywords: Any) -> Sequence[str]:
        """Return the names of a call's arguments that stay as they are."""
        return self.uncast(*inputs, **keywords) if callable(self.uncast) else self.uncast


AUTOCASTS: dict[str, dict[str, Autocast]] = {}
"""For each operator, the device types whose autocast it follows."""


def register_autocast(
    op: str | OpOverload | torch.library.CustomOpDef,
    device_type: str | None = None,
    cast_inputs: torch.dtype | None = None,
    /,
    *,
    uncast: Sequence[str] | Callable[..., Sequence[str]] = (),
    lib: torch.library.Library | None = None,
) -> None:
    """Register autocast as torch.library does, for operators with keyword arguments, too.

    Under torch.autocast, floating-point tensors on the device are cast, except float64.

    Args:
        op: the operator.
        device_type: cpu, foo, or another that has autocast. By default, both cpu and foo.
        cast_inputs: the dtype to cast to. By default, that of autocast, as for matrix products.
        uncast: the names of arguments that stay as they are, such as scales of float32; or a
            function of the operator's arguments that returns them.
        lib: the registration ends with this library; by default, with the process.

    Raises:
        ValueError: for a device type that has no autocast, and arguments that the operator does not
            have.

    Example:
        >>> @foo_ops.library.numba_op("mylib::scaled_by")
        ... def scaled_by(x: float, *, factor: float = 1.0) -> float:
        ...     return x * factor
        >>> foo_ops.library.register_autocast("mylib::scaled_by")
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     torch.ops.mylib.scaled_by(torch.ones(2), factor=3.0)
        tensor([3., 3.], dtype=torch.bfloat16)
    """
    operator = find(op)
    names = [it.name for it in operator._schema.arguments]
    for name in () if callable(uncast) else uncast:
        if name not in names:
            raise ValueError(
                f"register_autocast: uncast must have arguments of {operator.name()}, got {name}"
            )
    rule = Autocast(cast_inputs, uncast)
    for type_ in ("cpu", "foo") if device_type is None else (device_type,):
        if not is_autocast_available(type_):
            raise ValueError(f"Device type '{type_}' does not support autocast.")
        key = "Autocast" + key_for_device(type_)
        kernel = _autocast_kernel(operator, type_, rule, key)
        AUTOCASTS.setdefault(operator.name(), {})[type_] = rule
        library_of(operator.name(), lib).impl(operator.name().partition("::")[2], kernel, key)


def cast_as_autocast(*arguments: Any) -> tuple[Any, ...]:
    """Cast tensors as for an operator with `register_autocast`, if autocast is on.

    For functions that call other operators in its place, which then get the same dtypes.
    """
    for type_ in ("cpu", "foo"):
        if torch.is_autocast_enabled(type_):
            arguments = tuple(_cast(it, type_, torch.get_autocast_dtype(type_)) for it in arguments)
    return arguments


def _autocast_kernel(
    operator: OpOverload, device_type: str, rule: Autocast, key: str
) -> Callable[..., Any]:
    excluded = DispatchKeySet(getattr(DispatchKey, key))
    names = [it.name for it in operator._schema.arguments]

    def kernel(*inputs: Any, **keywords: Any) -> Any:
        to = rule.dtype or torch.get_autocast_dtype(device_type)
        uncast = rule.uncast_in(*inputs, **keywords)

        def cast(name: str, argument: Any) -> Any:
            return argument if name in uncast else _cast(argument, device_type, to)

        with ExcludeDispatchKeyGuard(excluded):
            return operator(
                *map(cast, names, inputs),
                **{name: cast(name, value) for name, value in keywords.items()},
            )

    return kernel


def _cast(argument: Any, device_type: str, dtype: torch.dtype) -> Any:
    if isinstance(argument, (list, tuple)):
        return type(argument)(_cast(it, device_type, dtype) for it in argument)
    if (
        isinstance(argument, Tensor)
        and argument.is_floating_point()
        and argument.dtype != torch.float64
        and argument.device.type == device_type
    ):
        return argument.to(dtype)
    return argument


# -------------------------------------------------------------------------------------------- FLOPs


def register_flops(
    *names: str, takes_tensors: bool = False
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorate the function that computes the floating-point operations of these operators.

    The function takes the operator's arguments, with shapes in place of tensors unless
    ``takes_tensors`` is set. It serves torch.utils.flop_counter.FlopCounterMode, and replaces an
    earlier one. An elementwise operator needs none: for each element of the result, the operations
    and calls in its function are counted. torch's operators count as nothing, except products and
    convolutions.

    Example:
        >>> from torch.utils.flop_counter import FlopCounterMode
        >>> @foo_ops.library.numba_op("mylib::multiply_add")
        ... def multiply_add(x: float, y: float) -> float:
        ...     return x * y + 1.0
        >>> @foo_ops.library.register_flops("mylib::multiply_add")
        ... def count(x_shape, y_shape, **keywords):
        ...     return 2 * torch.Size(x_shape).numel()
        >>> with FlopCounterMode(display=False) as counter:
        ...     result = torch.ops.mylib.multiply_add(torch.ones(4, 8), torch.ones(4, 8))
        >>> counter.get_total_flops()
        64
    """
    packets = [find(name)._overloadpacket for name in names]

    def register(formula: Callable[..., int]) -> Callable[..., int]:
        def add() -> None:
            from torch.utils.flop_counter import flop_registry, register_flop_formula

            for packet in packets:
                # A packet may be there twice: its hash changes with each overload that is defined.
                while packet in flop_registry:
                    del flop_registry[packet]
            register_flop_formula(packets, get_raw=takes_tensors)(formula)

        _with_counter(add)
        return formula

    return register


@dataclasses.dataclass(frozen=True)
class _ElementwiseFlops:
    function: Callable[..., Any]

    def __call__(self, *arguments: Any, out_val: Any = None, **keywords: Any) -> int:
        """Count the operations of a call; if it returns nothing, it writes to an argument."""
        results = [tensor.numel() for tensor in tensors_in(out_val)]
        elements = results or [tensor.numel() for tensor in tensors_in((arguments, keywords))]
        return max(elements) * count_operations(self.function)


def count_elementwise(operator: OpOverload, function: Callable[..., Any]) -> None:
    """Count a function's operations for each element, unless `register_flops` gave a formula."""

    def add() -> None:
        from torch.utils.flop_counter import flop_registry

        packet = operator._overloadpacket
        if isinstance(flop_registry.get(packet), (_ElementwiseFlops, type(None))):
            flop_registry[packet] = _ElementwiseFlops(function)

    _with_counter(add)


def _with_counter(add: Callable[[], None]) -> None:
    # Its import takes a tenth of a second where Triton is installed.
    after_import("torch.utils.flop_counter", add)
