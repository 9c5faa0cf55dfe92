"""Check further derivatives, and torch.vmap, where the operator supports them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from foo_ops.testing.checks.calls import replaced
from foo_ops.testing.checks.matrix import (
    Case,
    always,
    check,
    double_precision,
    essential,
    first,
    first_device,
)
from foo_ops.testing.spec import (
    Sample,
    Tensors,
    assert_within,
    check_outputs,
    cotangents_for,
)
from foo_ops.testing.tolerance import gradients_of, has_gradients

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
    "given to it with tangents, as forward-mode differentiation does",
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
    "given to torch.vmap beside itself in another order",
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
    has_rule = torch._C._dispatch_has_kernel_for_dispatch_key(case.spec.name, "FuncTorchBatched")
    how = (
        "" if has_rule else " (by a loop of PyTorch's, as the operator has no rule for torch.vmap)"
    )
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
    functorch: Any = torch._C._functorch
    functorch._set_vmap_fallback_warning_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_warning_enabled(True)


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
