"""Say how the work of an operator on DTensors is cut among processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from foo_ops.library.operators import find, keep, own_library
from foo_ops.library.vmap import RowReader

# ------------------------------------------------------------------------------------- declarations

# Gets the operator's arguments, with a TensorMeta in place of each tensor.
Rule = Callable[..., str]

RULES: dict[torch._ops.OpOverload, Rule] = {}
_functions: list[Callable[[torch._ops.OpOverload], None]] = []

REST = "..."
WHOLE = "."


def register_sharding(
    op: str | torch._ops.OpOverload,
    sharding: str | Rule | None = None,
    /,
    *,
    lib: torch.library.Library | None = None,
) -> Any:
    """Say along which dimensions an operator on DTensors can be cut among processes.

    ``"b h . ., b h . ., h -> b h . ."`` names the dimensions of the operator's tensors, in the
    order of its schema, as in torch.einsum. The operator must compute the same when it is called
    with equal parts of all tensors along one name:

    - A tensor that has not got the name, or size 1 there, is given to each process as a whole. A
      result is then the sum of what the processes compute, as that for the gradient of a weight.
    - ``.`` is a dimension that is not cut, ``...`` stands for all dimensions before the others,
      which are broadcast. A tensor with fewer dimensions lacks the first ones.
    - Where sizes differ, as the heads of queries and keys do, one is a multiple of the other, and
      only equal parts are given.

    Tensors that are placed in another way are redistributed first, but for those that the operator
    writes, which is refused. Kernels of elements need no declaration: they are cut along all
    dimensions. Nor do kernels of tiles whose source shows that each row is computed on its own.
    All others run on whole tensors until one is given. What can be said with placements alone takes
    ``torch.distributed.tensor.experimental.register_sharding``.

    Args:
        op: the operator, such as ``"mylib::f"``.
        sharding: as above; or a function that returns this, of the operator's arguments, with the
            shape and dtype in place of tensors. It raises NotImplementedError where the operator
            does not take DTensors. Without it this is a decorator.
        lib: the registration ends with it; without it, with the process.

    Raises:
        ValueError: where other tensors are named than the operator has.
        TypeError: for an operator with lists of tensors.

    Example:
        >>> foo_ops.library.define("mylib::column_sums", "(Tensor input) -> Tensor")
        >>> foo_ops.library.register_kernel("mylib::column_sums", "cpu", lambda input: input.sum(0))
        >>> foo_ops.library.register_sharding("mylib::column_sums", "rows columns -> columns")
    """
    operator = find(op)
    if sharding is None:

        def register(rule: Rule) -> Rule:
            register_sharding(op, rule, lib=lib)
            return rule

        return register
    if isinstance(sharding, str):
        parse(operator, sharding)
    rule = sharding if callable(sharding) else make_constant_rule(sharding)
    _register(operator, rule, own_library(op, lib))
    return None


def register_default_sharding(
    operator: torch._ops.OpOverload, rule: Rule, lib: torch.library.Library | None
) -> None:
    """Register the rule that comes with a kernel, for an operator that has none."""
    if operator not in RULES:
        _register(operator, rule, lib)


def for_each_rule(function: Callable[[torch._ops.OpOverload], None]) -> None:
    """Call a function with each operator that has a rule, and that gets one later."""
    for operator in RULES:
        function(operator)
    _functions.append(function)


def make_constant_rule(sharding: str) -> Rule:
    return lambda *arguments, **keywords: sharding


def make_elementwise_sharding(operator: torch._ops.OpOverload) -> Rule:
    """Cut along all dimensions, which are broadcast."""
    return make_uniform_rule(operator, REST)


def make_uniform_rule(operator: torch._ops.OpOverload, dimensions: str) -> Rule:
    """Make the rule that says the same of all tensors."""
    schema = operator._schema
    tensors = sum("Tensor" in str(argument.type) for argument in schema.arguments)
    before, after = (", ".join([dimensions] * it) for it in (tensors, len(schema.returns)))
    return make_constant_rule(f"{before} -> {after}")


def _register(
    operator: torch._ops.OpOverload, rule: Rule, lib: torch.library.Library | None
) -> None:
    RULES[operator] = rule
    keep(_Registration(operator, rule), lib)
    for function in _functions:
        function(operator)


@dataclasses.dataclass(frozen=True)
class _Registration:
    operator: torch._ops.OpOverload
    rule: Rule

    def destroy(self) -> None:
        if RULES.get(self.operator) is self.rule:
            del RULES[self.operator]


@dataclasses.dataclass(frozen=True)
class Sharding:
    """The names of dimensions, for each tensor among the arguments and for each result."""

    arguments: dict[str, tuple[str, ...]]
    results: tuple[tuple[str, ...], ...]


def parse(operator: torch._ops.OpOverload, sharding: str) -> Sharding:
    """Read what `register_sharding` takes, and hold it against the schema."""
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


def _refuse_lists(operator: torch._ops.OpOverload) -> None:
    types = [str(argument.type) for argument in operator._schema.arguments]
    if any("List" in type_ and "Tensor" in type_ for type_ in types):
        raise TypeError(
            f"{operator.name()}: register_sharding is for operators without lists of tensors; "
            "torch.distributed.tensor.experimental.register_sharding takes others"
        )


def _dimensions(tensors: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(tensor.split()) for tensor in tensors.split(","))


def named_dimensions(names: Iterable[str], count: int) -> dict[str, int]:
    """Return which dimensions of a tensor can be cut, by their names.

    Those that ``...`` stands for get names that count from their end: ``...1``, ``...2``.
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


# ----------------------------------------------------------------------------- rows of tile kernels

# Cut the rows of tile kernels among processes, where each is computed on its own.


def make_tile_sharding(operator: torch._ops.OpOverload, read: RowReader) -> Rule:
    """Make the rule of a tile kernel: by its rows, or else on whole tensors."""
    whole = make_uniform_rule(operator, WHOLE)
    names = [argument.name for argument in operator._schema.arguments]

    def rule(*inputs: Any, **keywords: Any) -> str:
        rows = read()
        if rows is None:
            return whole()
        shapes = []
        for argument, tensor in (dict(zip(names, inputs)) | keywords).items():
            count = rows.arguments.get(argument)
            if count is not None and tensor is not None:
                shapes.append(tensor.shape[: len(tensor.shape) - count])
        if any(shape != shapes[0] for shape in shapes):
            return whole()
        before = ", ".join(map(_all_but_inner, rows.arguments.values()))
        return f"{before} -> {', '.join(map(_all_but_inner, rows.results))}"

    return rule


def _all_but_inner(inner: int | None) -> str:
    return WHOLE if inner is None else " ".join([REST, *[WHOLE] * inner])
