"""Check values: with contiguous and other tensors, any number of threads, on every device."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from foo_ops.testing.arguments import Layout
from foo_ops.testing.checks.calls import check_both, run, run_backward, same
from foo_ops.testing.checks.matrix import (
    Case,
    all_layouts,
    always,
    check,
    differentiable,
    first,
    in_layouts,
    most_samples,
    no_name,
    poisoned_memory,
    single_and_brain,
    threads,
)
from foo_ops.testing.spec import OpSpec, Sample, Tensors, check_means, check_outputs, cotangents_for
from foo_ops.testing.tolerance import seeded

# ------------------------------------------------------------------------------- values and layouts


@check("passed to the operator, and fresh memory was full of NaN", quick=most_samples)
def values(case: Case) -> None:
    """Check every sample, with uninitialised memory full of NaN."""
    sample = case.sample()
    with poisoned_memory():
        outputs = run(case, sample)
    for position, output in enumerate(outputs):
        if output.device.type != case.device:
            raise AssertionError(
                f"output {position} must be on {case.device} as the inputs are, got {output.device}"
            )
    try:
        check_outputs(case.spec, case.sample(), case.dtype, outputs)
    except AssertionError as error:
        raise AssertionError(f"{error}{hint_at_draws(case, sample, outputs)}") from None
    if case.spec.draws:
        check_means(case.spec, sample, case.dtype)


def hint_at_draws(case: Case, sample: Sample, outputs: Tensors) -> str:
    """Hint at ``draws=`` if the operator returns another result in each call."""
    again = case.spec.call(sample)
    if all(torch.equal(one.nan_to_num(), it.nan_to_num()) for one, it in zip(outputs, again)):
        return ""
    return (
        ". Another call gives another result: if the operator draws random numbers, set draws= of "
        "the OpSpec to the number of calls whose mean is compared with the reference"
    )


@check(
    "passed to the operator with the same seed twice, and with others",
    dtypes=lambda spec: first(spec) if spec.draws else (),
    names=no_name,
    quick=always,
)
def draws_follow_the_seed(case: Case) -> None:
    """Check that only the seed decides what is drawn, and that later calls draw other numbers."""
    samples = [dataclasses.replace(case, name=name).sample() for name in case.spec.essential]
    follows = advances = False
    for sample in samples:
        with seeded(0):
            expected, following = (sample.call(case.spec.function) for _ in range(2))
        with seeded(0):
            again = sample.call(case.spec.function)
        same("two calls with the same seed differ", again, expected)
        advances |= differ(following, expected)
        for seed in (1, 2, 3):
            with seeded(seed):
                follows |= differ(sample.call(case.spec.function), expected)
    if not follows:
        raise AssertionError(
            "four seeds give the same results: no numbers are drawn from the device's generator"
        )
    if not advances:
        raise AssertionError("a second call draws the same numbers as the first")


def differ(one: Tensors, other: Tensors) -> bool:
    try:
        same("", one, other)
    except AssertionError:
        return True
    return False


@check(
    "passed to the operator, and fresh memory was full of NaN",
    names=in_layouts,
    layouts=all_layouts,
)
def layouts(case: Case) -> None:
    """Check non-contiguous tensors, with NaN around their elements."""
    assert case.layout is not None
    try:
        check_in_layout(case, case.layout)
    except AssertionError as error:
        contiguous = dataclasses.replace(case, layout=None)
        raise AssertionError(f"{error}. {layout_verdict(contiguous, case.layout)}") from None


def check_in_layout(case: Case, layout: Layout) -> None:
    sample = case.sample()
    recorded = case.dtype in differentiable(case.spec)
    if recorded:
        sample = sample.requiring_grad()
    with poisoned_memory():
        outputs = run(case, sample)
        if recorded:
            check_both(case, sample, outputs, tuple(map(layout, cotangents_for(outputs))))
        else:
            check_outputs(case.spec, case.sample(), case.dtype, outputs)
    if case.spec.draws:
        check_means(case.spec, case.sample(), case.dtype)


def layout_verdict(case: Case, layout: Layout) -> str:
    """Say whether the layout is to blame."""

    def contiguous(tensor: Tensor) -> Tensor:
        return layout(tensor).clone(memory_format=torch.contiguous_format)

    try:
        check_in_layout(dataclasses.replace(case, layout=contiguous), contiguous)
    except AssertionError:
        return "Contiguous tensors with the same numbers give a wrong result, too"
    return (
        "Contiguous tensors with the same numbers give the right result: the kernel or the formula "
        f"does not follow the strides and the offset of {layout.__name__}"
    )


# ------------------------------------------------------------------------------ threads and devices


@check(
    "the large one, passed to the operator with 1, 2, 3 and again 3 threads",
    dtypes=lambda spec: single_and_brain(spec) if spec.large is not None else (),
    names=no_name,
)
def same_bits_for_any_number_of_threads(case: Case) -> None:
    sample = case.large()
    if case.dtype in differentiable(case.spec):
        sample = sample.requiring_grad()
    expected: Tensors | None = None
    for count in (1, 2, 3, 3):
        with threads(count):
            outputs = run(case, sample)
            gradients = run_backward(outputs, sample, cotangents_for(outputs))
        results = tuple(tensor.detach() for tensor in (*outputs, *gradients))
        if expected is not None:
            same(f"{count} threads give other results than 1", results, expected)
        expected = expected or results


def second_foo(spec: OpSpec) -> tuple[str, ...]:
    several = "foo" in spec.devices and torch.get_device_module("foo").device_count() > 1
    return ("foo:1",) if several else ()


@check(
    "of size 5, and passed to the operator on foo:0 as well",
    dtypes=first,
    names=no_name,
    devices=second_foo,
    quick=always,
)
def second_device(case: Case) -> None:
    """Check that results on the second device equal those on the first."""
    outputs = run(case, case.sized(5))
    for position, output in enumerate(outputs):
        if output.device != torch.device(case.device):
            raise AssertionError(
                f"output {position} must be on {case.device} as the inputs are, got {output.device}"
            )
    there = dataclasses.replace(case, device="foo:0")
    expected = tuple(output.cpu() for output in run(there, there.sized(5)))
    same("the outputs differ", tuple(output.cpu() for output in outputs), expected)
