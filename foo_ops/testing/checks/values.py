"""Check values, with contiguous and other tensors."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from foo_ops.testing.checks.calls import check_both, run, same
from foo_ops.testing.checks.contexts import poisoned_memory
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
)
from foo_ops.testing.draws import seeded
from foo_ops.testing.layouts import Layout
from foo_ops.testing.means import check_means
from foo_ops.testing.spec import Sample, Tensors, check_outputs, cotangents_for


@check("given to it as it is, and fresh memory was full of NaN", quick=most_samples)
def values(case: Case) -> None:
    """Check every sample, with uninitialised memory full of NaN."""
    sample = case.sample()
    with poisoned_memory():
        outputs = run(case, sample)
    for position, output in enumerate(outputs):
        if output.device.type != case.device:
            raise AssertionError(
                f"output {position} is on {output.device}, its inputs are on {case.device}"
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
        ". Another call gives another result: where the operator draws random numbers, draws= of "
        "the OpSpec says over how many calls the reference is their mean"
    )


@check(
    "given to it with the same seed twice, and with others",
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
            "four seeds give the same results: it draws no numbers from the generator of its device"
        )
    if not advances:
        raise AssertionError("a second call draws the numbers of the first one again")


def differ(one: Tensors, other: Tensors) -> bool:
    try:
        same("", one, other)
    except AssertionError:
        return True
    return False


@check(
    "given to it, and fresh memory was full of NaN",
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
        return "The same numbers in contiguous tensors are wrong, too"
    return (
        "The same numbers in contiguous tensors give the right result: the kernel, or its formula, "
        f"does not follow the strides and the offset of {layout.__name__}"
    )
