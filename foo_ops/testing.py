"""One table of all operators, for tests and benchmarks: samples, references, error budgets.

A new operator is covered by adding its `OpSpec` to `OPERATORS`: tests/test_operators.py takes
values, gradients, layouts, opcheck and compilation from there.

Results are not compared within a tolerance that was found by trial, but within an *error budget*:
a bound for each element, in float64, that follows from how often the operator may round and from
the magnitude of what is rounded. What breaks a budget is a bug, or an algorithm that rounds more
often than its budget allows, and then that must be argued there.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from foo_ops import reference

Tensors = tuple[Tensor, ...]


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
            slow: gradcheck, opcheck, layouts, compilation.
        sized: a sample for a dtype and a size that every dimension of interest grows with.
        large: a sample that the launcher cuts into several tasks.
        reference: the same function, in float64, on the cpu.
        output_budget: how far each output may be from the reference's, of a sample in float64.
        gradient_budget: how far each gradient may be, of a sample in float64, whose tensors
            require gradients as those of the call did, and the gradients of the outputs.
    """

    operator: torch._ops.OpOverload
    dtypes: Sequence[torch.dtype]
    samples: Mapping[str, Callable[[torch.dtype], Sample]]
    essential: Sequence[str]
    sized: Callable[[torch.dtype, int], Sample]
    large: Callable[[torch.dtype], Sample]
    reference: Callable[..., Tensor | Tensors]
    output_budget: Callable[[Sample, torch.dtype], Tensors]
    gradient_budget: Callable[[Sample, torch.dtype, Tensors], Tensors]

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


def check_gradients(
    spec: OpSpec, sample: Sample, dtype: torch.dtype, gradients: Tensors, cotangents: Tensors
) -> None:
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
        budgets = spec.gradient_budget(exact_sample, dtype, exact_cotangents)
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
    """The same numbers in float64 or complex128, on the cpu; bool stays bool."""
    tensor = tensor.cpu()
    if tensor.dtype == torch.bool:
        return tensor
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


# -------------------------------------------------------------------------------------- layouts


def copy_with_layout(tensor: Tensor, device: str) -> Tensor:
    """A copy of the whole storage on a device, seen with the tensor's own strides and offset."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = tensor.as_strided((elements,), (1,), 0).to(device, copy=True)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def junk(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Elements that must not be read: NaN, or for bool True."""
    value = True if tensor.dtype == torch.bool else math.nan
    return torch.full(tuple(shape), value, dtype=tensor.dtype, device=tensor.device)


def reversed_dimensions(tensor: Tensor) -> Tensor:
    """The first dimension is dense in memory, the last has the largest stride."""
    order = list(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


def every_second(tensor: Tensor) -> Tensor:
    """The last dimension has stride 2."""
    return torch.stack((tensor, junk(tensor, tensor.shape)), -1)[..., 0]


def inside_padding(tensor: Tensor) -> Tensor:
    """A slice of a larger tensor in every dimension, so that no two dimensions can be merged."""
    larger = junk(tensor, [size + 3 for size in tensor.shape])
    place = tuple(slice(1, 1 + size) for size in tensor.shape)
    larger[place] = tensor
    return larger[place]


def at_odd_offset(tensor: Tensor) -> Tensor:
    """Dense, but its first element is aligned to nothing but the element's size."""
    flat = torch.cat((junk(tensor, [3]), tensor.flatten()))
    return flat[3:].view(tensor.shape)


def second_and_third_exchanged(tensor: Tensor) -> Tensor:
    """As (batch, length, heads, head_dim) lies in memory, seen as (batch, heads, length, ...)."""
    if tensor.dim() < 3:
        return tensor
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def expanded(tensor: Tensor) -> Tensor:
    """The first slice of each dimension but the last, repeated with stride 0."""
    first = tensor[tuple(slice(0, 1) for _ in tensor.shape[:-1])]
    return first.expand(tensor.shape) if tensor.numel() > 0 else tensor


LAYOUTS = (
    reversed_dimensions,
    every_second,
    inside_padding,
    at_odd_offset,
    second_and_third_exchanged,
    expanded,
)


# ------------------------------------------------------------------------------------- rounding


def roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def smallest(dtype: torch.dtype) -> float:
    """The smallest positive number: rounding errs by half of it where numbers are subnormal."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def compute_type(dtype: torch.dtype) -> torch.dtype:
    """What sums are accumulated in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def random(name: str, *shapes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Normal random tensors, the same for the same name in every process, and in every dtype."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return [
        torch.randn(tuple(shape), dtype=wide, generator=generator).to(dtype) for shape in shapes
    ]


# ------------------------------------------------------------------------------------------ abs

ABS_SHAPES: dict[str, tuple[int, ...]] = {
    "0-d": (),
    "empty": (0,),
    "empty inside": (3, 0, 2),
    "one": (1,),
    "odd": (7,),
    "vector and tail": (67,),
    "matrix": (5, 7),
    "4-d": (2, 3, 4, 5),
    "6-d": (2, 1, 3, 1, 2, 2),
    "several tasks": (3, 33_333),
}


def abs_sample(name: str, shape: Sequence[int]) -> Callable[[torch.dtype], Sample]:
    return lambda dtype: Sample(tuple(random(name, shape, dtype=dtype)))


def abs_special(dtype: torch.dtype) -> Sample:
    values = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0]
    if dtype.is_complex:
        parts = [(real, imag) for real in values for imag in values]
        return Sample((torch.tensor([complex(*pair) for pair in parts], dtype=dtype),))
    info = torch.finfo(dtype)
    values += [info.min, info.max, -info.tiny, -info.smallest_normal / 2, -smallest(dtype)]
    return Sample((torch.tensor(values, dtype=dtype),))


def abs_output_budget(sample: Sample, dtype: torch.dtype) -> Tensors:
    """Real: exact. Complex: the squares, their sum and the root are rounded in float64, then the
    result to the dtype; the reference rounds in float64 too."""
    (value,) = sample.call(reference.abs)
    if not dtype.is_complex:
        return (torch.zeros_like(value),)
    part = dtype.to_real()
    return ((roundoff(part) + 5 * roundoff(torch.float64)) * value + smallest(part),)


def abs_gradient_budget(sample: Sample, dtype: torch.dtype, cotangents: Tensors) -> Tensors:
    """Real: exact. Complex: sgn rounds in the modulus (3), the division and the product (3)."""
    (cotangent,) = cotangents
    rounded = 6 * roundoff(dtype.to_real()) if dtype.is_complex else 0.0
    return (rounded * cotangent.abs(),)


ABS = OpSpec(
    operator=torch.ops.foo.abs.default,
    dtypes=(
        *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
        *(torch.complex64, torch.complex128),
    ),
    samples={name: abs_sample(name, shape) for name, shape in ABS_SHAPES.items()}
    | {"special values": abs_special},
    essential=("0-d", "empty inside", "vector and tail", "4-d"),
    sized=lambda dtype, size: abs_sample("sized", (size, size + 1))(dtype),
    large=abs_sample("large", (7, 50_001)),
    reference=reference.abs,
    output_budget=abs_output_budget,
    gradient_budget=abs_gradient_budget,
)


OPERATORS = (ABS,)
