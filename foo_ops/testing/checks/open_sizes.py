"""Check programs with open sizes: data-dependent ones, and those of torch.export."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from foo_ops.testing.checks.compilation import (
    check_compiled,
    check_compiled_outputs,
    fresh_compiler,
)
from foo_ops.testing.checks.contexts import failing_as
from foo_ops.testing.checks.matrix import (
    Case,
    always,
    brain,
    check,
    first,
    first_device,
    no_name,
)
from foo_ops.testing.draws import seeded
from foo_ops.testing.schema import as_tuple, tensors_in, with_each_tensor
from foo_ops.testing.spec import Sample

TRACED, OTHERS = 9, (6, 19)

Dimensions = Sequence[Sequence[int]]
"""Dimensions of each tensor of a sample."""


def dimensions_that_grow(case: Case) -> Dimensions:
    """Return the dimensions of each tensor whose sizes differ between samples."""
    traced, *others = (case.sized(size).tensors() for size in (TRACED, *OTHERS))
    return [
        [dim for dim in range(one.dim()) if any(one.shape[dim] != it.shape[dim] for it in rest)]
        for one, *rest in zip(traced, *others)
    ]


def counted(tensor: Tensor, dimensions: Sequence[int]) -> Tensor:
    """Return the tensor with data-dependent sizes, like those of ``tensor[mask]``."""
    for dim in dimensions:
        mask = torch.ones(tensor.shape[dim], dtype=torch.bool, device=tensor.device)
        tensor = tensor.index_select(dim, mask.nonzero().flatten())
    return tensor


def with_counted(dimensions: Dimensions, inputs: Any, keywords: Any) -> Any:
    """Return arguments whose tensors have data-dependent sizes."""
    growing = iter(dimensions)
    return with_each_tensor(lambda it: counted(it, next(growing)), [inputs, keywords])


@check(
    "of size 9, and then of sizes 6 and 19 for the same graph, compiled by "
    "torch.compile(dynamic=True, backend='aot_eager'), its sizes counted by torch.nonzero before "
    "the operator",
    dtypes=brain,
    names=no_name,
    devices=first_device,
    quick=always,
)
def compiled_for_counted_sizes(case: Case) -> None:
    check_counted_sizes(case, dimensions_that_grow(case))


def check_counted_sizes(case: Case, dimensions: Dimensions) -> None:
    """Check that the fake kernel and formulas decide nothing by unknown sizes."""
    operator = case.spec.function

    def function(calls: Any) -> list[Any]:
        given = [with_counted(dimensions, list(inputs), keywords) for inputs, keywords in calls]
        return [list(as_tuple(operator(*inputs, **keywords))) for inputs, keywords in given]

    with fresh_compiler():
        graph = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
        for size in (TRACED, *OTHERS):
            check_compiled(case, [case.sized(size)], (function, graph))


class Program(torch.nn.Module):
    """A call of an operator, whose tensors and integers are inputs of an exported program."""

    def __init__(self, case: Case, dimensions: Dimensions) -> None:
        super().__init__()
        self._operator, self._dimensions = case.spec.function, dimensions
        self._leaves, self._tree = flattened(case.sized(TRACED))

    def forward(self, varying: list[Any]) -> list[Tensor]:
        """Call the operator with the sample's arguments, some of them replaced."""
        given = iter(varying)
        leaves = [next(given) if varies(it) else it for it in self._leaves]
        inputs, keywords = with_counted(
            self._dimensions, *pytree.tree_unflatten(leaves, self._tree)
        )
        return list(tensors_in(as_tuple(self._operator(*inputs, **keywords))))


def flattened(sample: Sample) -> tuple[list[Any], Any]:
    return pytree.tree_flatten([list(sample.inputs), dict(sample.keywords)])


def varies(leaf: Any) -> bool:
    """Return whether a value may change between runs of an exported program."""
    return isinstance(leaf, Tensor) or type(leaf) is int


def varying_of(sample: Sample) -> list[Any]:
    return list(filter(varies, flattened(sample)[0]))


def open_dimensions(case: Case) -> Iterator[Any]:
    """Yield the dynamic shapes of each tensor and integer, as torch.export needs them."""
    from torch.export import Dim

    growing = iter(dimensions_that_grow(case))
    traced, *others = (varying_of(case.sized(size)) for size in (TRACED, *OTHERS))
    for one, *rest in zip(traced, *others):
        if isinstance(one, Tensor):
            yield dict.fromkeys(next(growing), Dim.DYNAMIC)
        else:
            yield Dim.DYNAMIC if any(one != it for it in rest) else None


@check(
    "of size 9, exported by torch.export with the sizes that grow left open, strict and not, and "
    "with sizes counted by torch.nonzero before the operator, and then run with sizes 6, 9 and 19",
    dtypes=first,
    names=no_name,
    devices=first_device,
    quick=always,
)
def exported(case: Case) -> None:
    for strict in (True, False):
        for dimensions in (dimensions_that_grow(case), [[] for _ in case.sized(TRACED).tensors()]):
            check_exported(case, dimensions, strict)


def check_exported(case: Case, dimensions: Dimensions, strict: bool) -> None:
    """Check one exported program, with data-dependent sizes in the given dimensions."""
    how = f"torch.export.export(strict={strict})" + ", of counted sizes," * any(dimensions)
    with fresh_compiler(), torch.no_grad():
        with failing_as(how):
            program = torch.export.export(
                Program(case, dimensions),
                (varying_of(case.sized(TRACED)),),
                dynamic_shapes=(list(open_dimensions(case)),),
                strict=strict,
            ).module()
        for size in (TRACED, *OTHERS):
            sample = case.sized(size)
            with failing_as(f"the program of {how} run with size {size}"), seeded():
                outputs = tuple(program(varying_of(case.sized(size))))
            with seeded():
                expected = case.spec.call(sample)
            check_compiled_outputs(case, sample, outputs, expected)
