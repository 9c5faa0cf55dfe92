"""Compare the mean results of an operator that draws random numbers with its reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foo_ops.testing.draws import budget_of, means
from foo_ops.testing.schema import tensors_in
from foo_ops.testing.spec import OpSpec, Sample, assert_within, cotangents_for, exact
from foo_ops.testing.tolerance import gradients_of


def check_means(spec: OpSpec, sample: Sample, dtype: torch.dtype) -> None:
    """Assert that the mean results of an operator that draws random numbers are correct."""
    plain = sample.map(Tensor.detach)
    expected = plain.exact().call(spec.reference)

    def call() -> Sequence[Tensor]:
        outputs = plain.call(spec.function)
        if spec.statistic is None:
            return outputs
        return tensors_in(spec.statistic(outputs, *plain.inputs, **plain.keywords))

    found = means(call, spec.draws)
    if len(found) != len(expected):
        raise AssertionError(
            f"its {'statistic' if spec.statistic else 'call'} gives {len(found)} tensors, its "
            f"reference {len(expected)}"
        )
    for position, (mean, value) in enumerate(zip(found, expected)):
        what = f"the mean of {'statistic' if spec.statistic else 'output'} {position}"
        budget = budget_of(mean, dtype, exact(value), spec.tolerances)
        assert_within(f"{what} over {spec.draws} seeds", mean.value(), exact(value), budget)


def check_mean_gradients(
    spec: OpSpec, sample: Sample, dtype: torch.dtype, names: Sequence[str]
) -> None:
    """Assert that the mean gradients of such an operator are those of the reference."""
    exact_sample = sample.exact().requiring_grad()
    outputs = exact_sample.call(spec.reference)
    cotangents = cotangents_for(outputs)
    expected = gradients_of(outputs, exact_sample.differentiable(), cotangents)

    def call() -> Sequence[Tensor]:
        results = sample.call(spec.function)
        given = [c.to(result) for c, result in zip(cotangents, results)]
        return gradients_of(results, sample.differentiable(), given)

    for name, mean, value in zip(names, means(call, spec.draws), expected):
        budget = budget_of(mean, dtype, value, spec.tolerances)
        what = f"the mean of the gradient of {name} over {spec.draws} seeds"
        assert_within(what, mean.value(), value, budget)
