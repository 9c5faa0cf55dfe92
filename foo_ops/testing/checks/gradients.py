"""Check gradients, further derivatives, and torch.vmap, where the operator supports them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from foo_ops.compat import has_kernel_for_key, set_vmap_fallback_warning_enabled
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
from foo_ops.testing.checks.matrix import (
    Case,
    always,
    check,
    differentiable,
    double_precision,
    essential,
    failing_as,
    first,
    first_device,
    most_samples,
    poisoned_memory,
)
from foo_ops.testing.spec import (
    Sample,
    Tensors,
    assert_within,
    check_gradients,
    check_mean_gradients,
    check_outputs,
    cotangents_for,
)
from foo_ops.testing.tolerance import gradients_of, has_gradients

# ---------------------------------------------------------------------------------------- gradients

# Against the reference, numerically, and where none is required.


@check("passed to the operator, and differentiated", dtypes=differentiable, quick=most_samples)
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
    "passed to the operator, each tensor alone requiring a gradient",
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
    "passed to the operator, and differentiated through one output at a time",
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
    "passed to the operator with and without gradients, under no_grad and inference_mode",
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
        raise AssertionError("an output in inference_mode is not an inference tensor")
    for mode, results in (("no_grad", unrecorded), ("inference_mode", inference)):
        if any(output.requires_grad for output in results):
            raise AssertionError(f"an output under {mode} requires a gradient")
        copies = tuple(output.clone() for output in results)
        same(f"the outputs differ under {mode}", copies, outputs)


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


# --------------------------------------------------------------- further derivatives and torch.vmap


# Raised by operators without such a derivative or rule.
NOT_THERE = (NotImplementedError, RuntimeError)
# For float64: such results are sums of products of three and more numbers.
TOLERANCE = 1e-6


@check(
    "differentiated twice, along random directions",
    dtypes=double_precision,
    names=essential,
    devices=first_device,
    quick=always,
)
def second_derivatives(case: Case) -> None:
    """Check the derivatives of the gradient; an operator without them must say so."""
    if case.spec.draws:
        return  # The reference has only the mean, here and below.
    sample = case.sample().requiring_grad()
    directions = cotangents_for(tuple(sample.differentiable()))
    try:
        found = second_derivatives_of(case.spec.call, sample, directions)
    except NOT_THERE:
        return
    expected = second_derivatives_of(
        lambda exact: exact.call(case.spec.reference), sample.exact().requiring_grad(), directions
    )
    for position, (one, other) in enumerate(zip(found, expected)):
        require_close(f"the second derivative by tensor {position}", one, other)


def second_derivatives_of(
    call: Callable[[Sample], Tensors], sample: Sample, directions: Tensors
) -> Tensors:
    """Differentiate the gradients along their directions with respect to the sample's tensors."""
    outputs, tensors = call(sample), sample.differentiable()
    gradients = gradients_of(outputs, tensors, cotangents_for(outputs), recorded_again=True)
    if not any(gradient.requires_grad for gradient in gradients):
        return tuple(map(torch.zeros_like, tensors))
    return gradients_of(gradients, tensors, directions)


@check(
    "passed to the operator with tangents, as in forward-mode differentiation",
    dtypes=double_precision,
    names=essential,
    devices=first_device,
    quick=always,
)
def forward_mode(case: Case) -> None:
    if case.spec.draws:
        return
    sample = case.sample()
    tangents = cotangents_for(tuple(sample.requiring_grad().differentiable()))
    with forward_ad.dual_level():
        duals = iter(tangents)
        with_tangents = sample.map(
            lambda it: forward_ad.make_dual(it, next(duals)) if has_gradients(it.dtype) else it
        )
        try:
            outputs = case.spec.call(with_tangents)
        except NOT_THERE:
            return
        found = [forward_ad.unpack_dual(output).tangent for output in outputs]
    expected = tangents_of_reference(case, sample, tangents)
    for position, (one, other) in enumerate(zip(found, expected)):
        # torch.library's autograd loses tangents silently; the operator's author cannot change
        # that.
        if one is not None and other is not None:
            require_close(f"the tangent of output {position}", one, other)


def tangents_of_reference(case: Case, sample: Sample, tangents: Tensors) -> Sequence[Tensor | None]:
    """Compute J t as the derivative of J^T c by c, which works for all operators of torch.

    An output that depends on no tensor has no tangent.
    """
    exact = sample.exact().requiring_grad()
    outputs = exact.call(case.spec.reference)
    recorded = [output for output in outputs if output.requires_grad]
    units = [torch.zeros_like(output, requires_grad=True) for output in recorded]
    pulled = gradients_of(recorded, exact.differentiable(), units, recorded_again=True)
    found = iter(gradients_of(pulled, units, tangents))
    return [next(found) if output.requires_grad else None for output in outputs]


@check(
    "passed to torch.vmap, stacked with a copy in another order",
    dtypes=first,
    names=essential,
    devices=first_device,
    quick=always,
)
def mapped(case: Case) -> None:
    """Check that a mapped call equals one call per sample."""
    sample = case.sample()
    tensors = sample.tensors()
    if case.spec.mutates or case.spec.draws or not tensors:
        return
    other = reordered(case, sample)

    def function(*values: Tensor) -> Tensors:
        return case.spec.call(replaced(sample, tensors, values))

    try:
        with without_advice_on_speed():
            outputs = torch.vmap(function)(*map(torch.stack, zip(tensors, other.tensors())))
    except NOT_THERE:
        return
    # Without a rule PyTorch loops over calls; the message then must not blame a rule.
    has_rule = has_kernel_for_key(case.spec.name, "FuncTorchBatched")
    how = "" if has_rule else " (by PyTorch's loop, since the operator has no rule for torch.vmap)"
    for index, given in enumerate((sample, other)):
        try:
            check_outputs(case.spec, given, case.dtype, tuple(it[index] for it in outputs))
        except AssertionError as error:
            where = f"element {index} of the mapped dimension{how}"
            raise AssertionError(f"{where}: {error}") from None


@contextlib.contextmanager
def without_advice_on_speed() -> Iterator[None]:
    """Suppress PyTorch's warning that an operator without a rule is called per element.

    C++ writes it to standard error, past Python's warning filters.
    """
    set_vmap_fallback_warning_enabled(False)
    try:
        yield
    finally:
        set_vmap_fallback_warning_enabled(True)


def reordered(case: Case, sample: Sample) -> Sample:
    """Return the sample with its floating-point values reordered, if that is a valid sample."""
    other = sample.map(lambda it: it.flip(0) if it.dim() > 0 and has_gradients(it.dtype) else it)
    try:
        outputs = case.spec.call(other)
    except Exception:
        # The order may matter.
        return sample
    # And blocks of a cache that were never written may be read.
    return other if all(it.isfinite().all() for it in outputs) else sample


def require_close(what: str, found: Tensor, expected: Tensor) -> None:
    """Require agreement where the float64 result is finite, relative to the largest element."""
    is_finite = expected.isfinite()
    expected = expected.where(is_finite, 0)
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    budget = torch.full(expected.shape, TOLERANCE * (1.0 + largest), dtype=torch.float64)
    assert_within(what, found.cpu().where(is_finite, 0), expected, budget)
