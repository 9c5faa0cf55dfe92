"""Check gradients: against the reference, numerically, and where none is required."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from foo_ops.testing.checks.calls import (
    check_both,
    differentiable_names,
    replaced,
    require_history,
    run,
    run_backward,
    run_both,
    same,
)
from foo_ops.testing.checks.contexts import failing_as, poisoned_memory
from foo_ops.testing.checks.matrix import (
    Case,
    always,
    check,
    differentiable,
    double_precision,
    essential,
    first_device,
    most_samples,
)
from foo_ops.testing.means import check_mean_gradients
from foo_ops.testing.spec import Tensors, check_gradients, cotangents_for


@check("given to it as it is, and differentiated", dtypes=differentiable, quick=most_samples)
def gradients(case: Case) -> None:
    sample = case.sample().requiring_grad()
    with poisoned_memory():
        outputs = run(case, sample)
        require_history(case, sample, outputs)
        check_both(case, sample, outputs, cotangents_for(outputs))
    if case.spec.draws and case.spec.statistic is None:
        names = differentiable_names(case.spec, sample)
        check_mean_gradients(case.spec, sample, case.dtype, names)


@check(
    "given to it as it is, each tensor alone requiring a gradient",
    dtypes=differentiable,
    names=essential,
)
def gradient_of_each_input(case: Case) -> None:
    """Check that outputs and gradients do not depend on which inputs require a gradient."""
    sample = case.sample().requiring_grad()
    outputs, cotangents, expected = run_both(case, sample)
    tensors, names = sample.differentiable(), differentiable_names(case.spec, sample)
    for name, tensor, gradient in zip(names, tensors, expected):
        for other in tensors:
            other.requires_grad_(other is tensor)
        alone = run(case, sample)
        what = f"where {name} alone requires a gradient"
        same(f"the outputs differ {what}", alone, outputs)
        if any(output.requires_grad for output in alone):
            gradients = run_backward(alone, sample, cotangents)
            same(f"the gradient differs {what}", gradients, (gradient,))
        elif gradient.any():
            raise AssertionError(f"no output requires a gradient {what}")


@check(
    "given to it as it is, and differentiated through one output at a time",
    dtypes=differentiable,
    names=essential,
)
def gradient_through_each_output(case: Case) -> None:
    """Check that an undefined gradient of an output acts like zeros."""
    sample = case.sample().requiring_grad()
    names = differentiable_names(case.spec, sample)
    outputs, *_ = run_both(case, sample)
    for position, output in enumerate(outputs):
        if not output.requires_grad:
            continue
        outputs = run(case, sample)
        cotangents = tuple(
            cotangent if index == position else torch.zeros_like(cotangent)
            for index, cotangent in enumerate(cotangents_for(outputs))
        )
        chosen = (outputs[position],)
        gradients = run_backward(chosen, sample, (cotangents[position],))
        with failing_as(f"the gradient through output {position} alone"):
            check_gradients(case.spec, sample, gradients, cotangents, names)


@check(
    "given to it as it is, with and without gradients, under no_grad and inference_mode",
    dtypes=differentiable,
    names=essential,
)
def gradient_only_where_needed(case: Case) -> None:
    sample = case.sample()
    if any(output.requires_grad for output in run(case, sample)):
        raise AssertionError("an output requires a gradient although no input does")
    sample = sample.requiring_grad()
    outputs = run(case, sample)
    require_history(case, sample, outputs)
    with torch.no_grad():
        unrecorded = run(case, sample)
    with torch.inference_mode():
        inference = run(case, sample)
    if not all(output.is_inference() for output in inference):
        raise AssertionError("an output in inference_mode is no inference tensor")
    for mode, results in (("no_grad", unrecorded), ("inference_mode", inference)):
        if any(output.requires_grad for output in results):
            raise AssertionError(f"an output under {mode} requires a gradient")
        plain = tuple(output.clone() for output in results)
        same(f"the outputs differ under {mode}", plain, outputs)


def finite(outputs: Iterable[Tensor]) -> Tensors:
    """Replace infinities and NaN by 0, which numerical derivatives cannot handle."""
    return tuple(output.where(output.isfinite(), 0) for output in outputs)


@check(
    "moved by 1e-6, up and down, one element at a time",
    dtypes=double_precision,
    names=essential,
    devices=first_device,
    quick=always,
)
def gradcheck(case: Case) -> None:
    """Check the formula against numerical derivatives of the kernel itself.

    gradcheck calls the operator twice per element, so it runs on one device. On others, `gradients`
    checks the formula.
    """
    sample = case.sample().requiring_grad()
    tensors = sample.differentiable()
    require_history(case, sample, run(case, sample))

    def function(*values: Tensor) -> Tensors:
        outputs = case.spec.call(replaced(sample, tensors, values))
        return finite(output for output in outputs if output.requires_grad)

    with failing_as("gradcheck"):
        torch.autograd.gradcheck(function, tensors)
