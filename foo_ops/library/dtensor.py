"""Turn declared shardings into the strategies by which DTensor calls operators.

Imported together with torch.distributed.tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from foo_ops.compat import (
    OpOverload,
    OpSchema,
    OpSpec,
    OpStrategy,
    RuntimeSchemaInfo,
    TensorMeta,
    clear_sharding_cache,
    expand_to_full_mesh_op_strategy,
    is_tensor_evenly_shardable_on_dim,
    propagate_tensor_meta,
    sharding_propagator,
)
from foo_ops.library.rules import REST, RULES, for_each_rule, named_dimensions, parse_sharding


class Dimensions(NamedTuple):
    """A tensor's shape, the names of its dimensions, and those that can be sharded."""

    shape: torch.Size
    names: tuple[str, ...]
    named: dict[str, int]


def register_strategy(operator: OpOverload) -> None:
    """Let DTensor shard an operator by its rule."""
    if operator in sharding_propagator.op_strategy_funcs:
        # As in torch.distributed.tensor.debug, which would import FSDP while FSDP imports this.
        sharding_propagator.propagate_op_sharding.cache_clear()
        clear_sharding_cache()
    options = [it.name for it in operator._schema.arguments if it.kwarg_only]
    # All arguments are part of the key of DTensor's cache, including whether one is None.
    info = RuntimeSchemaInfo(static_argnum=0, static_kwargkey=options)
    sharding_propagator.register_op_strategy(operator, make_strategy(operator), info)


def make_strategy(operator: OpOverload) -> Callable[[OpSchema], OpStrategy]:
    arguments = operator._schema.arguments
    written = [it.name for it in arguments if it.is_write]

    def strategy(op_schema: OpSchema) -> OpStrategy:
        rule = RULES[operator]
        sharding = parse_sharding(operator, rule(*op_schema.args_meta, **op_schema.kwargs_meta))
        given = dict(zip((it.name for it in arguments), op_schema.args_meta))
        given |= op_schema.kwargs_meta
        inputs = {name: it for name, it in given.items() if isinstance(it, TensorMeta)}
        results = _result_metas(op_schema)
        dimensions = [_dimensions(sharding.arguments[name], it) for name, it in inputs.items()]
        of_results = [_dimensions(it, meta) for it, meta in zip(sharding.results, results)]
        found = expand_to_full_mesh_op_strategy(
            op_schema.get_mesh_from_args(),
            op_schema,
            list(_placements(dimensions, of_results)),
            output_tensor_meta=results,
            input_index=len(results),
            allow_uneven_sharding=True,
        )
        specs = (*op_schema.args_strategy, *op_schema.kwargs_strategy)
        placed = [it.strategies[0].output_spec.placements for it in specs]
        kept = [place for place, name in enumerate(inputs) if name in written]
        uneven = _names_of_several_sizes(dimensions)
        strategies = [
            it
            for it in found.strategies
            if _is_even(it, dimensions, uneven)
            and all(_input(it, place) == placed[place] for place in kept)
        ]
        if not strategies:
            name, placements = next((n, p) for n, p in zip(inputs, placed) if n in written)
            raise NotImplementedError(
                f"{operator.name()}: {name} is written and cannot be redistributed, so its "
                f"placements must follow the sharding {rule(*given.values())}, got "
                f"{', '.join(map(repr, placements))}"
            )
        return OpStrategy(strategies)

    return strategy


def _result_metas(op_schema: OpSchema) -> Sequence[TensorMeta]:
    """Return shapes and dtypes of the whole results, from the fake kernel."""

    def spec(argument: object) -> object:
        if isinstance(argument, OpStrategy):
            return argument.strategies[0].output_spec
        return argument

    schema = OpSchema(
        op_schema.op,
        tuple(map(spec, op_schema.args_schema)),
        {name: spec(it) for name, it in op_schema.kwargs_schema.items()},
        schema_info=op_schema.schema_info,
    )
    metas = propagate_tensor_meta(schema)
    if metas is None or isinstance(metas, TensorMeta):
        return () if metas is None else (metas,)
    return [it for it in metas if it is not None]


def _dimensions(names: tuple[str, ...], meta: TensorMeta) -> Dimensions:
    return Dimensions(meta.shape, names, named_dimensions(names, len(meta.shape)))


def _sizes(dimensions: Iterable[Dimensions], name: str) -> list[int]:
    """Return the different sizes of the dimensions with this name, except 1."""
    sizes: list[int] = []
    for shape, _, named in dimensions:
        if name in named and shape[named[name]] != 1 and shape[named[name]] not in sizes:
            sizes.append(shape[named[name]])
    return sizes


def _names_of_several_sizes(dimensions: Sequence[Dimensions]) -> list[str]:
    names = {name for it in dimensions for name in it.named}
    return [name for name in names if len(_sizes(dimensions, name)) > 1]


def _placements(
    inputs: Sequence[Dimensions], results: Sequence[Dimensions]
) -> Iterable[list[Placement | None]]:
    """Yield placements of results and inputs: all replicated, or sharded along one name."""
    yield [Replicate()] * (len(results) + len(inputs))
    for name in dict.fromkeys(name for it in inputs for name in it.named):
        sizes = _sizes(inputs, name)
        if not sizes or (name.startswith(REST) and not _is_shared(results, name, sizes)):
            continue
        # Empty results are gradients that nobody requested: replicate them.
        yield [
            *(
                _placement(it, name, sizes, Partial() if math.prod(it.shape) else Replicate())
                for it in results
            ),
            *(_placement(it, name, sizes, Replicate()) for it in inputs),
        ]


def _is_shared(results: Iterable[Dimensions], name: str, sizes: list[int]) -> bool:
    """Whether all results that have leading dimensions have this one."""
    return len(sizes) == 1 and all(
        name in it.named and it.shape[it.named[name]] == sizes[0]
        for it in results
        if REST in it.names
    )


def _placement(tensor: Dimensions, name: str, sizes: list[int], otherwise: Placement) -> Placement:
    shape, _, named = tensor
    return Shard(named[name]) if name in named and shape[named[name]] in sizes else otherwise


def _input(strategy: OpSpec, place: int) -> tuple[Placement, ...]:
    assert strategy.input_specs is not None
    return strategy.input_specs[place].placements


def _is_even(strategy: OpSpec, inputs: Sequence[Dimensions], names: Iterable[str]) -> bool:
    """Whether dimensions of different sizes are sharded into equal parts."""
    assert strategy.input_specs is not None
    return all(
        is_tensor_evenly_shardable_on_dim(shape, spec, named[name])
        for spec, (shape, _, named) in zip(strategy.input_specs, inputs)
        for name in names
        if name in named and shape[named[name]] != 1
    )


for_each_rule(register_strategy)
