"""Check that results are equal for any number of threads, and on every device."""

from __future__ import annotations

import dataclasses

import torch

from foo_ops.testing.checks.calls import run, run_backward, same
from foo_ops.testing.checks.contexts import threads
from foo_ops.testing.checks.matrix import (
    Case,
    always,
    check,
    differentiable,
    first,
    no_name,
    single_and_brain,
)
from foo_ops.testing.spec import OpSpec, Tensors, cotangents_for


@check(
    "the large one, given to it with 1, 2, 3 and again 3 threads",
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
    "of size 5, and given to it on foo:0 as well",
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
                f"output {position} is on {output.device}, its inputs are on {case.device}"
            )
    there = dataclasses.replace(case, device="foo:0")
    expected = tuple(output.cpu() for output in run(there, there.sized(5)))
    same("the outputs differ", tuple(output.cpu() for output in outputs), expected)
