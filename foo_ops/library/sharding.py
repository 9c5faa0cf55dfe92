"""Declare how operators on DTensors are sharded among processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from foo_ops.compat import OpOverload
from foo_ops.library.operators import find, keep, own_library
from foo_ops.library.vmap import RowReader

# ------------------------------------------------------------------------------------- declarations

# Takes the operator's arguments, with a TensorMeta in place of each tensor.
Rule = Callable[..., str]

RULES: dict[OpOverload, Rule] = {}
_functions: list[Callable[[OpOverload], None]] = []

REST = "..."
WHOLE = "."


def register_sharding(
    op: str | OpOverload,
    sharding: str | Rule | None = None,
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
    operator: OpOverload, rule: Rule, lib: torch.library.Library | None
) -> None:
    """Register a kernel's rule, unless the operator has one."""
    if operator not in RULES:
        _register(operator, rule, lib)


def for_each_rule(function: Callable[[OpOverload], None]) -> None:
    """Call a function with each operator that has a rule or gets one later."""
    for operator in RULES:
        function(operator)
    _functions.append(function)


def make_constant_rule(sharding: str) -> Rule:
    return lambda *arguments, **keywords: sharding


def make_elementwise_sharding(operator: OpOverload) -> Rule:
    """Make the rule that shards along all dimensions, which are broadcast."""
    return make_uniform_rule(operator, REST)


def make_uniform_rule(operator: OpOverload, dimensions: str) -> Rule:
    """Make the rule with the same dimensions for all tensors."""
    schema = operator._schema
    tensors = sum("Tensor" in str(argument.type) for argument in schema.arguments)
    before, after = (", ".join([dimensions] * it) for it in (tensors, len(schema.returns)))
    return make_constant_rule(f"{before} -> {after}")


def _register(operator: OpOverload, rule: Rule, lib: torch.library.Library | None) -> None:
    RULES[operator] = rule
    keep(_Registration(operator, rule), lib)
    for function in _functions:
        function(operator)


@dataclasses.dataclass(frozen=True)
class _Registration:
    operator: OpOverload
    rule: Rule

    def destroy(self) -> None:
        if RULES.get(self.operator) is self.rule:
            del RULES[self.operator]


@dataclasses.dataclass(frozen=True)
class Sharding:
    """The names of dimensions, for each tensor among the arguments and for each result."""

    arguments: dict[str, tuple[str, ...]]
    results: tuple[tuple[str, ...], ...]


def parse(operator: OpOverload, sharding: str) -> Sharding:
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


# ----------------------------------------------------------------------------- rows of tile kernels

# Shard the rows of tile kernels that compute each row on its own.


def make_tile_sharding(operator: OpOverload, read: RowReader) -> Rule:
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
