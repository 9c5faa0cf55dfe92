"""Call an operator in checks, compare results, and report all failures at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from foo_ops.compat import has_kernel_for_key
from foo_ops.library.operators import DISPATCH_KEYS, dtype_name
from foo_ops.testing.arguments import named_tensors, out_names, unwritten
from foo_ops.testing.checks.matrix import Case, cases, failing_as
from foo_ops.testing.spec import (
    OpSpec,
    Sample,
    Tensors,
    check_gradients,
    check_outputs,
    cotangents_for,
)
from foo_ops.testing.tolerance import gradients_of, has_gradients

# -------------------------------------------------------------------------------------------- calls

# Call an operator in checks, and compare results.


def arguments(case: Case) -> Sample:
    """Return the arguments of a direct call, out arguments included."""
    sample = case.sample()
    functional = case.spec.functional
    if functional is None:
        return sample
    outs = list(map(unwritten, sample.call(functional)))
    if case.layout is not None:
        outs = list(map(case.layout, outs))
    names = out_names(case.spec.operator, functional)
    return Sample(sample.inputs, dict(sample.keywords) | dict(zip(names, outs)))


def run(case: Case, sample: Sample) -> Tensors:
    """Return the outputs of a call."""
    what = (
        f"{case.spec.name}, whose OpSpec promises {dtype_name(case.dtype)} on {case.device}, "
        f"called with {described(sample)}"
    )
    with failing_as(what):
        return case.spec.call(sample)


def replaced(sample: Sample, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> Sample:
    """Return the sample with some of its tensors replaced by values."""
    by_tensor = dict(zip(map(id, tensors), values))
    return sample.map(lambda tensor: by_tensor.get(id(tensor), tensor))


def run_backward(outputs: Tensors, sample: Sample, cotangents: Tensors) -> Tensors:
    """Return the gradients of a sample's tensors."""
    with failing_as("the gradient formula"):
        return gradients_of(outputs, sample.differentiable(), cotangents)


def run_both(case: Case, sample: Sample) -> tuple[Tensors, Tensors, Tensors]:
    """Return outputs, their gradients, and the gradients of the sample's tensors."""
    outputs = run(case, sample)
    require_history(case, sample, outputs)
    cotangents = cotangents_for(outputs)
    return outputs, cotangents, run_backward(outputs, sample, cotangents)


def require_history(case: Case, sample: Sample, outputs: Tensors) -> None:
    """Require a gradient formula, and a gradient for each output whose reference has one."""
    of_device = f"Autograd{DISPATCH_KEYS[torch.device(case.device).type]}"
    keys = ("CompositeImplicitAutograd", "Autograd", of_device)
    name = case.spec.name
    if not any(has_kernel_for_key(name, key) for key in keys):
        # A Python kernel may still have gradients, but only in eager mode.
        raise AssertionError(
            "the operator has no gradient formula: register one (torch.library.register_autograd), "
            "or set differentiable=False in the OpSpec"
        )
    if all(output.requires_grad for output in outputs if has_gradients(output.dtype)):
        return
    if case.spec.statistic is not None:
        return  # The reference computes the mean of the statistic.
    exact_sample = sample.exact().requiring_grad()
    expected = exact_sample.call(case.spec.reference)
    for position, (output, value) in enumerate(zip(outputs, expected)):
        if value.requires_grad and not output.requires_grad:
            raise AssertionError(
                f"output {position} does not require a gradient although an input does, and the "
                "reference's does: the formula marks the output as not differentiable"
            )


def check_both(case: Case, sample: Sample, outputs: Tensors, cotangents: Tensors) -> None:
    """Check values and gradients."""
    check_outputs(case.spec, sample, case.dtype, outputs)
    gradients = run_backward(outputs, sample, cotangents)
    names = differentiable_names(case.spec, sample)
    check_gradients(case.spec, sample, gradients, cotangents, names)


def differentiable_names(spec: OpSpec, sample: Sample) -> list[str]:
    tensors = named_tensors(spec.operator, sample.inputs, sample.keywords)
    return [name for name, tensor in tensors if tensor.requires_grad]


def described(sample: Sample) -> str:
    return ", ".join(
        f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}" for tensor in sample.tensors()
    )


def same(what: str, actual: Tensors, expected: Tensors) -> None:
    """Require two results to be equal bit by bit, except for NaN payloads, and in their strides."""
    try:
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from None
    for position, (one, other) in enumerate(zip(actual, expected)):
        if strides_differ(one, other):
            raise AssertionError(
                f"{what}: tensor {position} has strides {one.stride()}, not {other.stride()}"
            )


def strides_differ(one: Tensor, other: Tensor) -> bool:
    """Whether strides differ where they matter; the stride of a dimension of size 1 does not."""
    strides = zip(one.shape, one.stride(), other.stride())
    return one.numel() > 0 and any(size > 1 and here != there for size, here, there in strides)


# ------------------------------------------------------------------------------------------ verdict

# Report all failures at once.


class OperatorCheckError(AssertionError):
    """Raised if an operator fails some of its checks.

    Attributes:
        failures: the cases that failed, each with its error.
    """

    def __init__(
        self, spec: OpSpec, count: int, failures: Sequence[tuple[Case, Exception]]
    ) -> None:
        self.failures = failures
        lines = [f"{spec.name} fails {len(failures)} of {count} cases"]
        of_checks: dict[str, list[tuple[Case, Exception]]] = {}
        for failure in failures:
            of_checks.setdefault(failure[0].check, []).append(failure)
        for check, ((case, error), *others) in of_checks.items():
            lines.append(f"\n{case.id}: {error}")
            if others:
                lines.append(f"{len(others)} more cases of {check}: {listed(others)}")
        super().__init__("\n".join(lines))


def listed(failures: Sequence[tuple[Case, Exception]]) -> str:
    """List the first ten."""
    names = [case.id for case, _ in failures[:10]]
    return ", ".join(names + ["..."] * (len(failures) > len(names)))


def check_operator(
    spec: OpSpec, *, checks: Collection[str] | None = None, quick: bool = False
) -> None:
    """Run all checks of an operator, and report all failures at once.

    Args:
        spec: the operator, with samples and a reference.
        checks: names of checks in ``CHECKS``; without it all of them run.
        quick: run only the third of the cases that finds most; see `cases`.

    Raises:
        OperatorCheckError: an AssertionError that says what is wrong; it spells out one failure of
            each check, and names the others.

    Example:
        >>> from foo_ops.testing import ABS
        >>> check_operator(ABS, checks=["gradcheck", "opcheck"])
    """
    failures: list[tuple[Case, Exception]] = []
    chosen = cases(spec, checks, quick=quick)
    for case in chosen:
        try:
            case()
        except Exception as error:
            failures.append((case, error))
    if failures:
        raise OperatorCheckError(spec, len(chosen), failures)
