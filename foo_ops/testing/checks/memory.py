"""Check an operator's writes and its aliases against its schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foo_ops.testing.checks.calls import arguments
from foo_ops.testing.checks.contexts import Damage, failing_as, guarded_memory
from foo_ops.testing.checks.matrix import Case, all_layouts, check, essential, in_layouts
from foo_ops.testing.layouts import inside_padding
from foo_ops.testing.schema import as_tuple, named_tensors, tensors_in, writes, written_tensors
from foo_ops.testing.spec import Sample, check_outputs


def whole(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@check(
    "given to it, and compared with what it was before, as were bytes around what it allocates",
    names=essential,
    layouts=lambda spec: (None, inside_padding),
)
def writes_only_what_is_declared(case: Case) -> None:
    """Check that only ``Tensor(a!)`` is written: no other argument, and nothing beside one."""
    sample, operator = arguments(case), case.spec.operator
    named = list(named_tensors(operator, sample.inputs, sample.keywords))
    declared = {id(tensor) for tensor in written_tensors(operator, sample.inputs, sample.keywords)}
    before = [(tensor.clone(), whole(tensor).clone()) for _, tensor in named]
    with guarded_memory() as damages, failing_as(case.spec.name):
        results = sample.call(operator)
    for damage in damages:
        raise AssertionError(f"it writes beside {allocation(damage, results)}")
    for (name, tensor), (elements, memory) in zip(named, before):
        if id(tensor) not in declared and not same_bytes(tensor, elements):
            raise AssertionError(
                f"it writes its argument {name}, and its schema does not say so: "
                f"{operator._schema}. Declare it as Tensor(a!), or write a copy"
            )
        tensor.copy_(elements)
        if not torch.equal(whole(tensor), memory):
            raise AssertionError(
                f"it writes to the memory of its argument {name} beside the elements that it got"
            )


def allocation(damage: Damage, results: Sequence[Tensor]) -> str:
    """Say which allocation was written out of bounds, and where."""
    address, size, first = damage
    places = [result.untyped_storage().data_ptr() for result in results]
    what = f"output {places.index(address)}" if address in places else "memory to work in"
    place = f"{-first} bytes before it" if first < 0 else f"{first - size} bytes after its end"
    return f"{what}, {size} bytes that it allocated: the first such byte is {place}"


def same_bytes(one: Tensor, other: Tensor) -> bool:
    dense = (tensor.clone(memory_format=torch.contiguous_format) for tensor in (one, other))
    return torch.equal(*map(whole, dense))


@check("given to it as it is, twice", names=essential)
def aliases_only_what_is_declared(case: Case) -> None:
    """Check that outputs share memory only as the schema says, and never with earlier outputs."""
    sample, operator = arguments(case), case.spec.operator
    named = list(named_tensors(operator, sample.inputs, sample.keywords))
    returns = operator._schema.returns
    with failing_as(case.spec.name):
        earlier = operator(*sample.inputs, **sample.keywords)
        result = operator(*sample.inputs, **sample.keywords)
    results = (result,) if len(returns) == 1 else as_tuple(result)
    seen = [(f"its argument {name}", tensor) for name, tensor in named]
    if not operator._schema.is_mutable:
        seen += [("a result of an earlier call", tensor) for tensor in tensors_in(earlier)]
    for position, (result, declared) in enumerate(zip(results, returns)):
        if declared.alias_info is not None:
            require_alias(case, f"output {position}", result, declared, dict(named))
            continue
        for tensor in tensors_in(result):
            for name, other in seen:
                if shares_memory(tensor, other):
                    raise AssertionError(
                        f"output {position} shares memory with {name}, and its schema does not say "
                        f"so: {operator._schema}. Return a clone, or declare it as Tensor(a)"
                    )
            seen.append((f"output {position}", tensor))


def require_alias(
    case: Case, what: str, result: Tensor, declared: Any, named: dict[str, Tensor]
) -> None:
    """Require that a return aliases its declared argument; a written one must be returned."""
    for argument in case.spec.operator._schema.arguments:
        alias = argument.alias_info
        if alias is None or alias.before_set != declared.alias_info.before_set:
            continue
        tensor = named[argument.name]
        if writes(argument) and result is not tensor:
            raise AssertionError(f"{what} must be its argument {argument.name} itself, and is not")
        if result.numel() > 0 and not shares_memory(result, tensor):
            raise AssertionError(
                f"{what} shares no memory with its argument {argument.name}, as its schema says"
            )


def shares_memory(one: Tensor, other: Tensor) -> bool:
    storages = one.untyped_storage(), other.untyped_storage()
    return storages[0].nbytes() > 0 and storages[0].data_ptr() == storages[1].data_ptr()


@check(
    "given to it with out arguments full of NaN",
    dtypes=lambda spec: spec.dtypes if spec.functional is not None else (),
    names=in_layouts,
    layouts=all_layouts,
)
def out_in_layouts(case: Case) -> None:
    """Check that out arguments keep storage and strides, and receive the values."""
    sample = arguments(case)
    outs = written_tensors(case.spec.operator, sample.inputs, sample.keywords)
    places = [(out.data_ptr(), out.stride()) for out in outs]
    with failing_as(case.spec.name):
        sample.call(case.spec.operator)
    if places != [(out.data_ptr(), out.stride()) for out in outs]:
        raise AssertionError("an out argument of the right shape and dtype was given other memory")
    plain = Sample(sample.inputs, case.sample().keywords)
    check_outputs(case.spec, plain, case.dtype, tuple(outs))
