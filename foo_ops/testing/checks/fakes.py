"""Check the fake kernel, and run torch.library.opcheck."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from foo_ops import library
from foo_ops.library.checks import OPCHECKS
from foo_ops.testing.checks.calls import arguments, run, strides_differ
from foo_ops.testing.checks.contexts import failing_as, without_cached_fakes
from foo_ops.testing.checks.matrix import (
    Case,
    all_layouts,
    check,
    essential,
    first,
    first_and_last,
    first_device,
    gradient_or_not,
    in_first_dtype,
    in_layouts,
)
from foo_ops.testing.spec import Sample

OPCHECKS_WITHOUT_AOT = tuple(name for name in OPCHECKS if name != "test_aot_dispatch_dynamic")


@check(
    "given to torch.library.opcheck as it is",
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


def hint_at_tag(operator: torch._ops.OpOverload) -> str:
    """Explain that torch functionalizes operators that return written arguments only by a tag."""
    returned = any(result.alias_info is not None for result in operator._schema.returns)
    if not returned or torch.Tag.inplace in operator.tags or operator._overloadname != "default":
        return ""
    return ". If it returns the argument that it writes, define it with tags=torch.Tag.inplace"


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
    from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with without_cached_fakes():
        mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    fake_sample = sample.map(lambda tensor: fake_of(tensor, mode))
    outputs = run(case, sample)
    with mode, failing_as("the fake kernel (torch.library.register_fake)"):
        try:
            fakes = case.spec.call(fake_sample)
        except UnsupportedOperatorException:
            raise AssertionError(
                "there is no fake kernel: register one (torch.library.register_fake)"
            ) from None
    if len(fakes) != len(outputs):
        raise AssertionError(f"the fake kernel returns {len(fakes)} tensors, not {len(outputs)}")
    for position, (output, fake) in enumerate(zip(outputs, fakes)):
        for what, actual, expected in properties(output, fake):
            if actual != expected:
                raise AssertionError(
                    f"the fake kernel gives output {position} the {what} {actual}, "
                    f"the kernel gives it {expected}"
                )


def fake_of(tensor: Tensor, mode: Any) -> Tensor:
    """Make a fake tensor of the same shape and strides."""
    from torch._subclasses.fake_tensor import FakeTensor

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
