"""Find the part of torch.compile that makes a graph wrong, and known faults of PyTorch.

A graph that fails under Inductor is compiled again with the backend aot_eager, which runs the same
functionalised graph operator by operator. If that is right, the operator is not to blame.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from foo_ops.testing.checks.calls import replaced
from foo_ops.testing.checks.matrix import Case, fresh_compiler
from foo_ops.testing.checks.schema import check_fake
from foo_ops.testing.schema import written_tensors
from foo_ops.testing.spec import Sample

BACKENDS = {"cpu": "inductor", "foo": "aot_eager"}

Attempt = Callable[[str, Sequence[Sample]], None]
"""Compiles with a backend, calls with samples, and raises AssertionError if results are wrong."""


class KnownFaultWarning(UserWarning):
    """Names a fault of PyTorch that a check has met and does not count."""


class SpecialisedError(AssertionError):
    """A graph does not serve another size, whatever the backend."""


def check_graph(case: Case, samples: Sequence[Sample], attempt: Attempt) -> bool:
    """Check a graph; return whether it hit a known fault of PyTorch.

    Raises:
        AssertionError: it says which part is wrong.
    """
    backend = BACKENDS[case.device]
    try:
        attempt(backend, samples)
    except SpecialisedError:
        raise
    except AssertionError as error:
        if backend != "inductor":
            raise
        fault = known_fault(case, samples, attempt)
        if fault is None:
            verdict = part_at_fault(case, samples, attempt)
            raise AssertionError(f"{error}. {verdict}") from error.__cause__
        warnings.warn(
            f"{case.id}: not counted, since PyTorch {torch.__version__} is wrong: {fault.words}",
            KnownFaultWarning,
            stacklevel=2,
        )
        return True
    return False


def part_at_fault(case: Case, samples: Sequence[Sample], attempt: Attempt) -> str:
    """Say whether the operator or Inductor is at fault."""
    if not passes(attempt, "aot_eager", samples):
        return (
            "The backend aot_eager, which runs the graph as it is, fails, too: the operator is "
            "wrong, in its schema, its fake kernel or its formula"
        )
    try:
        for sample in samples:
            check_fake(case, sample)
    except AssertionError as error:
        return (
            "The backend aot_eager is right, but Inductor relies on more of the operator's fake "
            f"kernel: {error}"
        )
    return (
        "The backend aot_eager, which runs the same graph, is right, and so is the fake kernel: "
        f"Inductor is wrong (PyTorch {torch.__version__}), and not the operator, unless another of "
        "its checks fails"
    )


def passes(attempt: Attempt, backend: str, samples: Sequence[Sample]) -> bool:
    try:
        attempt(backend, samples)
    except AssertionError:
        return False
    return True


# --------------------------------------------------------------------------- faults of PyTorch's


@dataclasses.dataclass(frozen=True)
class KnownFault:
    """A fault of PyTorch, and how to distinguish it from one of the operator.

    Attributes:
        words: a description of the fault.
        first, last: the affected versions; without the last, all later ones.
        concerns: whether a sample can trigger the fault.
        without: returns the sample with the same values, so that it cannot trigger the fault.
        shows: whether PyTorch has the fault here, with a correct operator.
    """

    words: str
    first: str
    last: str | None
    concerns: Callable[[Case, Sample], bool]
    without: Callable[[Case, Sample], Sample]
    shows: Callable[[], bool]

    def is_of_this_version(self) -> bool:
        version = TorchVersion(torch.__version__)
        return self.first <= version and (self.last is None or version <= self.last)


def known_fault(case: Case, samples: Sequence[Sample], attempt: Attempt) -> KnownFault | None:
    """Return the known fault that alone makes a graph fail, or None.

    Inductor must be right where the fault cannot occur, aot_eager must be right where it can, and
    Inductor must be wrong with another operator, too. So the fault hides none of the operator's.
    """
    for fault in KNOWN_FAULTS:
        if not fault.is_of_this_version() or not any(fault.concerns(case, it) for it in samples):
            continue
        others = [fault.without(case, sample) for sample in samples]
        is_alone = passes(attempt, "inductor", others) and passes(attempt, "aot_eager", samples)
        if is_alone and fault.shows():
            return fault
    return None


def written(case: Case, sample: Sample) -> list[Tensor]:
    return written_tensors(case.spec.operator, sample.inputs, sample.keywords)


def writes_with_offset(case: Case, sample: Sample) -> bool:
    return any(tensor.storage_offset() > 0 for tensor in written(case, sample))


def without_offset(case: Case, sample: Sample) -> Sample:
    """Copy the written tensors to the start of storages of their own."""
    tensors = written(case, sample)
    copies = [
        torch.empty_strided(it.shape, it.stride(), dtype=it.dtype, device=it.device).copy_(it)
        for it in tensors
    ]
    return replaced(sample, tensors, copies)


@functools.cache
def reads_a_clone_elsewhere() -> bool:
    """Whether a clone of a view has wrong values if an operator then writes it."""

    add_one = adding_operator()

    def clone_and_add(x: Tensor) -> Tensor:
        x = x.clone()
        add_one(x)
        return x

    view = torch.arange(4.0)[3:]
    with fresh_compiler():
        compiled = torch.compile(clone_and_add, fullgraph=True)
        return not torch.equal(compiled(view), clone_and_add(view))


@functools.cache
def adding_operator() -> torch._ops.OpOverload:
    """Define an operator that adds 1 to its argument, with PyTorch alone."""

    def add_one(x: Tensor) -> None:
        x.add_(1)

    name = "foo_ops_testing::add_one_"
    torch.library.define(name, "(Tensor(a!) x) -> ()", tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(name, "cpu", add_one)
    torch.library.register_fake(name, lambda x: None)
    return torch.ops.foo_ops_testing.add_one_.default


KNOWN_FAULTS = (
    KnownFault(
        "Inductor takes the clone of a view for the view, and reads it from the beginning of the "
        "memory, where an operator then writes that clone",
        *("2.13", None),
        writes_with_offset,
        without_offset,
        reads_a_clone_elsewhere,
    ),
)
