"""Check values, of contiguous tensors and of others."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from foo_ops.testing.checks.calls import check_both, run
from foo_ops.testing.checks.contexts import poisoned_memory
from foo_ops.testing.checks.matrix import Case, all_layouts, check, differentiable, in_layouts
from foo_ops.testing.layouts import Layout
from foo_ops.testing.spec import check_outputs, cotangents_for


@check("given to it as it is, and fresh memory was full of NaN")
def values(case: Case) -> None:
    """Check every sample, in memory that is full of NaN where it was not written."""
    sample = case.sample()
    with poisoned_memory():
        outputs = run(case, sample)
    for position, output in enumerate(outputs):
        if output.device.type != case.device:
            raise AssertionError(
                f"output {position} is on {output.device}, its inputs are on {case.device}"
            )
    check_outputs(case.spec, case.sample(), case.dtype, outputs)


@check(
    "given to it, and fresh memory was full of NaN",
    names=in_layouts,
    layouts=all_layouts,
)
def layouts(case: Case) -> None:
    """Check tensors that are not contiguous, with NaN beside them."""
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
