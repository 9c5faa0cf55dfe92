"""What an entry in the table of operators is, and how results are compared with it.

Results are not compared within a tolerance that was found by trial, but within an *error budget*:
a bound for each element, in float64, that follows from how often the operator may round and from
the magnitude of what is rounded. What breaks a budget is a bug, or an algorithm that rounds more
often than its budget allows, and then that must be argued there.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from foo_ops.testing.layouts import copy_with_layout

Tensors = tuple[Tensor, ...]
Dtypes = tuple[torch.dtype | None, ...]


@dataclasses.dataclass(frozen=True)
class Sample:
    """The arguments of one call: tensors are positional, the rest are keywords."""

    inputs: tuple[Tensor | None, ...]
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def map(self, function: Callable[[Tensor], Tensor]) -> Sample:
        inputs = tuple(None if tensor is None else function(tensor) for tensor in self.inputs)
        return dataclasses.replace(self, inputs=inputs)

    def to(self, device: str) -> Sample:
        """On a device, with the strides and the offset that each tensor has."""
        return self.map(lambda tensor: copy_with_layout(tensor, device))

    def exact(self) -> Sample:
        """In float64 or complex128, on the cpu."""
        return self.map(exact)

    def requiring_grad(self) -> Sample:
        """With fresh leaves; those that can have a gradient require one."""
        return self.map(
            lambda t: t.detach().requires_grad_(t.is_floating_point() or t.is_complex())
        )

    def differentiable(self) -> list[Tensor]:
        return [tensor for tensor in self.inputs if tensor is not None and tensor.requires_grad]

    def call(self, function: Callable[..., Any]) -> Tensors:
        result = function(*self.inputs, **self.keywords)
        return (result,) if isinstance(result, Tensor) else tuple(result)


@dataclasses.dataclass(frozen=True)
class OpSpec:
    """An operator, and what shows that it is right.

    Attributes:
        operator: the functional overload in ``torch.ops.foo``.
        dtypes: those that the samples come in.
        samples: by name, what makes the sample in a dtype. Tensors are on the cpu.
        essential: the names of a few small samples that stand for all of them where a check is
            slow: gradcheck, opcheck, compilation.
        in_layouts: the names of those whose tensors are also given every one of `LAYOUTS`.
        sized: a sample for a dtype and a size that every dimension of interest grows with.
        large: a sample that the launcher cuts into several tasks.
        reference: the same function, in float64, on the cpu.
        output_budget: how far each output may be from the reference's, of a sample in float64.
        gradient_budget: how far each gradient may be, of a sample in float64, whose tensors
            require gradients as those of the call did, the dtypes that all its tensors had in
            the call, and the gradients of the outputs.
    """

    operator: torch._ops.OpOverload
    dtypes: Sequence[torch.dtype]
    samples: Mapping[str, Callable[[torch.dtype], Sample]]
    essential: Collection[str]
    in_layouts: Collection[str]
    sized: Callable[[torch.dtype, int], Sample]
    large: Callable[[torch.dtype], Sample]
    reference: Callable[..., Tensor | Tensors]
    output_budget: Callable[[Sample, torch.dtype], Tensors]
    gradient_budget: Callable[[Sample, Dtypes, Tensors], Tensors]

    @property
    def name(self) -> str:
        return self.operator.name()

    def __repr__(self) -> str:
        return self.name


# ------------------------------------------------------------------------------------ comparing


def check_outputs(spec: OpSpec, sample: Sample, dtype: torch.dtype, outputs: Tensors) -> None:
    """Assert that what the operator gave for a sample is within its error budget."""
    exact_sample = sample.exact()
    expected = exact_sample.call(spec.reference)
    budgets = spec.output_budget(exact_sample, dtype)
    assert len(outputs) == len(expected) == len(budgets)
    for position, (output, value, budget) in enumerate(zip(outputs, expected, budgets)):
        assert_within(f"output {position}", output, value, budget)


def check_gradients(spec: OpSpec, sample: Sample, gradients: Tensors, cotangents: Tensors) -> None:
    """Assert that the gradients of a sample's tensors are within their error budget.

    Args:
        gradients: of the tensors of ``sample`` that require one, in their order.
        cotangents: the gradients of the operator's outputs that they were computed from.
    """
    exact_sample = sample.map(lambda t: exact(t).detach().requires_grad_(t.requires_grad))
    outputs = exact_sample.call(spec.reference)
    exact_cotangents = tuple(exact(cotangent) for cotangent in cotangents)
    expected = torch.autograd.grad(outputs, exact_sample.differentiable(), exact_cotangents)
    with torch.no_grad():
        dtypes = tuple(None if tensor is None else tensor.dtype for tensor in sample.inputs)
        budgets = spec.gradient_budget(exact_sample, dtypes, exact_cotangents)
    assert len(gradients) == len(expected) == len(budgets)
    for position, (gradient, value, budget) in enumerate(zip(gradients, expected, budgets)):
        assert_within(f"gradient {position}", gradient, value, budget)


def cotangents_for(outputs: Tensors) -> Tensors:
    """Random gradients of the outputs, the same for the same shapes on every device."""
    generator = torch.Generator().manual_seed(len(outputs))
    return tuple(
        torch.randn(output.shape, dtype=output.dtype, generator=generator).to(output.device)
        for output in outputs
    )


def assert_within(what: str, actual: Tensor, expected: Tensor, budget: Tensor) -> None:
    """Assert |actual - expected| <= budget, element by element; NaN and infinities must agree."""
    assert actual.shape == expected.shape, f"{what} has shape {actual.shape}, not {expected.shape}"
    value = exact(actual)
    error = (value - expected).abs()
    wrong = ~((value == expected) | (error <= budget) | (value.isnan() & expected.isnan()))
    if not wrong.any():
        return
    excess = torch.where(wrong, (error / budget).nan_to_num(math.inf, math.inf), 0)
    worst = excess.flatten().argmax()
    place = tuple(int(index) for index in torch.unravel_index(worst, excess.shape))
    raise AssertionError(
        f"{what} is wrong in {int(wrong.sum())} of {wrong.numel()} elements; the worst, at "
        f"{place}, is {value[place].item()} instead of {expected[place].item()}, "
        f"where {budget[place].item():.3g} is allowed"
    )


def exact(tensor: Tensor) -> Tensor:
    """The same numbers in float64 or complex128, on the cpu; integers and bool stay as they are."""
    tensor = tensor.cpu()
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


# -------------------------------------------------------------------------------------- samples


def random(name: str, *shapes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Normal random tensors, the same for the same name in every process, and in every dtype."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return [
        torch.randn(tuple(shape), dtype=wide, generator=generator).to(dtype) for shape in shapes
    ]
