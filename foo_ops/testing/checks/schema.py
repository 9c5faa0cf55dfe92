"""Check an operator against its schema and its fake kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from foo_ops import library
from foo_ops.compat import OpOverload
from foo_ops.library.checks import OPCHECKS
from foo_ops.testing.arguments import (
    as_tuple,
    inside_padding,
    named_tensors,
    tensors_in,
    writes,
    written_tensors,
)
from foo_ops.testing.checks.calls import arguments, run, strides_differ
from foo_ops.testing.checks.matrix import (
    Case,
    Damage,
    all_layouts,
    check,
    essential,
    failing_as,
    first,
    first_and_last,
    first_device,
    gradient_or_not,
    guarded_memory,
    in_first_dtype,
    in_layouts,
    without_cached_fakes,
)
from foo_ops.testing.spec import Sample, check_outputs

# ------------------------------------------------------------------------------- writes and aliases


def whole(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@check(
    "passed to the operator, and compared with a copy; so were the bytes around allocated memory",
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
        raise AssertionError(f"the operator writes outside of {allocation(damage, results)}")
    for (name, tensor), (elements, memory) in zip(named, before):
        if id(tensor) not in declared and not same_bytes(tensor, elements):
            raise AssertionError(
                f"the operator writes its argument {name}, but its schema does not declare this: "
                f"{operator._schema}. Declare the argument as Tensor(a!), or write to a copy"
            )
        tensor.copy_(elements)
        if not torch.equal(whole(tensor), memory):
            raise AssertionError(
                f"the operator writes to the memory of its argument {name} outside of the tensor's "
                "elements"
            )


def allocation(damage: Damage, results: Sequence[Tensor]) -> str:
    """Say which allocation was written out of bounds, and where."""
    address, size, first = damage
    places = [result.untyped_storage().data_ptr() for result in results]
    what = f"output {places.index(address)}" if address in places else "temporary memory"
    place = (
        f"{-first} bytes before its start" if first < 0 else f"{first - size} bytes after its end"
    )
    return f"{what}, an allocation of {size} bytes: the first byte written is {place}"


def same_bytes(one: Tensor, other: Tensor) -> bool:
    dense = (tensor.clone(memory_format=torch.contiguous_format) for tensor in (one, other))
    return torch.equal(*map(whole, dense))


@check("passed to the operator twice", names=essential)
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
                        f"output {position} shares memory with {name}, but the schema does not "
                        f"declare this: {operator._schema}. Return a clone, or declare Tensor(a)"
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
            raise AssertionError(
                f"{what} must be the argument {argument.name} itself, got another tensor"
            )
        if result.numel() > 0 and not shares_memory(result, tensor):
            raise AssertionError(
                f"{what} must share memory with the argument {argument.name} as the schema "
                "declares, got other memory"
            )


def shares_memory(one: Tensor, other: Tensor) -> bool:
    storages = one.untyped_storage(), other.untyped_storage()
    return storages[0].nbytes() > 0 and storages[0].data_ptr() == storages[1].data_ptr()


@check(
    "passed to the operator with out arguments full of NaN",
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
        raise AssertionError(
            "an out argument of the right shape and dtype must keep its memory, got other memory"
        )
    without_outs = Sample(sample.inputs, case.sample().keywords)
    check_outputs(case.spec, without_outs, case.dtype, tuple(outs))


# ------------------------------------------------------------ fake kernel and torch.library.opcheck


OPCHECKS_WITHOUT_AOT = tuple(name for name in OPCHECKS if name != "test_aot_dispatch_dynamic")


@check(
    "passed to torch.library.opcheck",
    dtypes=first_and_last,
    names=essential,
    gradients=gradient_or_not,
    quick=in_first_dtype,
)
def opcheck(case: Case) -> None:
    """Run torch.library.opcheck: schema, autograd registration, fake kernel, AOTAutograd.

    AOTAutograd takes most of the time, so it runs in one dtype on one device here.
    `compiled_for_dynamic_shapes` uses it in another dtype, and all compiled checks on other
    devices.
    """
    sample = arguments(case)
    if case.gradient:
        sample = sample.requiring_grad()
    # AOTAutograd's test also compares the values of two calls, so it excludes random operators.
    whole = (
        case.dtype in first(case.spec)
        and case.device in first_device(case.spec)
        and not case.spec.draws
    )
    names = OPCHECKS if whole else OPCHECKS_WITHOUT_AOT
    with without_cached_fakes():
        results = library.opcheck(
            case.spec.operator, sample.inputs, dict(sample.keywords), test_utils=names,
            raise_exception=False,
        )  # fmt: skip
    failed = [f"{name}: {result}" for name, result in results.items() if result != "SUCCESS"]
    if failed:
        raise AssertionError("; ".join(failed) + hint_at_tag(case.spec.operator))


def hint_at_tag(operator: OpOverload) -> str:
    """Explain that torch functionalizes operators that return written arguments only by a tag."""
    returned = any(result.alias_info is not None for result in operator._schema.returns)
    if not returned or torch.Tag.inplace in operator.tags or operator._overloadname != "default":
        return ""
    return ". If the operator returns the argument that it writes, define it with torch.Tag.inplace"


@check("replaced by fake tensors of the same shapes and strides", quick=in_first_dtype)
def fake_kernel(case: Case) -> None:
    check_fake(case, case.sample())


@check(
    "replaced by fake tensors of the same shapes and strides",
    dtypes=first,
    names=in_layouts,
    layouts=all_layouts,
    quick=in_first_dtype,
)
def fake_kernel_in_layouts(case: Case) -> None:
    check_fake(case, case.sample())


def check_fake(case: Case, sample: Sample) -> None:
    """Compare shape, dtype, device and strides."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from foo_ops.compat import FakeTensorMode, UnsupportedOperatorException

    with without_cached_fakes():
        mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    fake_sample = sample.map(lambda tensor: fake_of(tensor, mode))
    outputs = run(case, sample)
    with mode, failing_as("the fake kernel (torch.library.register_fake)"):
        try:
            fakes = case.spec.call(fake_sample)
        except UnsupportedOperatorException:
            raise AssertionError(
                "the operator has no fake kernel: register one (torch.library.register_fake)"
            ) from None
    if len(fakes) != len(outputs):
        raise AssertionError(
            f"the fake kernel must return {len(outputs)} tensors, got {len(fakes)}"
        )
    for position, (output, fake) in enumerate(zip(outputs, fakes)):
        for what, actual, expected in properties(output, fake):
            if actual != expected:
                raise AssertionError(
                    f"the fake kernel gives output {position} the {what} {actual}, "
                    f"but the kernel {expected}"
                )


def fake_of(tensor: Tensor, mode: Any) -> Tensor:
    """Make a fake tensor of the same shape and strides."""
    from foo_ops.compat import FakeTensor

    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        converted: Tensor = mode.from_tensor(tensor)
        return converted
    # This takes a fifth of the time of from_tensor, which also looks for the base of views.
    layout = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(mode, layout, tensor.device)


def properties(output: Tensor, fake: Tensor) -> Iterator[tuple[str, Any, Any]]:
    """Yield the properties to compare, the fake's first. Sizes that depend on data may differ."""
    known = [size if isinstance(size, int) else None for size in fake.shape]
    if len(known) == output.dim():
        sizes = tuple(real if size is None else size for size, real in zip(known, output.shape))
    else:
        sizes = tuple(fake.shape)
    yield "shape", sizes, tuple(output.shape)
    yield "dtype", fake.dtype, output.dtype
    yield "device", fake.device, output.device
    if None not in known and strides_differ(output, fake):
        yield "stride", tuple(fake.stride()), output.stride()
