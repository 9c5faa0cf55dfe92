"""Check torch.compile and torch.export: one graph without breaks, for one size and for all."""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from foo_ops.compat import OpOverload, has_kernel_for_key, pytree
from foo_ops.testing.arguments import (
    as_tuple,
    bound,
    inside_padding,
    reversed_dimensions,
    tensors_in,
    with_each_tensor,
    written_tensors,
)
from foo_ops.testing.checks.calls import differentiable_names, replaced, require_history, same
from foo_ops.testing.checks.matrix import (
    Case,
    always,
    brain,
    check,
    differentiable,
    failing_as,
    first,
    first_device,
    first_if_differentiable,
    fresh_compiler,
    no_name,
    on_last_device,
)
from foo_ops.testing.checks.schema import check_fake
from foo_ops.testing.spec import Sample, Tensors, check_gradients, check_outputs, cotangents_for
from foo_ops.testing.tolerance import gradients_of, has_gradients, seeded

# ----------------------------------------------------------------------------------- parts at fault

# A graph that fails under Inductor is compiled again with the backend aot_eager, which runs the
# same functionalised graph operator by operator. If that is right, the operator is not to blame.


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
            f"{case.id}: not counted, since PyTorch {torch.__version__} has a fault: {fault.words}",
            KnownFaultWarning,
            stacklevel=2,
        )
        return True
    return False


def part_at_fault(case: Case, samples: Sequence[Sample], attempt: Attempt) -> str:
    """Say whether the operator or Inductor is at fault."""
    if not passes(attempt, "aot_eager", samples):
        return (
            "The backend aot_eager, which runs the graph as it is, fails, too: the operator's "
            "schema, fake kernel or formula is wrong"
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
        f"Inductor is wrong (PyTorch {torch.__version__}), not the operator, unless another check "
        "of the operator fails"
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
def adding_operator() -> OpOverload:
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


# ------------------------------------------------------------------------------------ torch.compile


def computed_anew(value: Any, anew: Callable[[Tensor], Tensor]) -> Any:
    """Recompute floating-point tensors; only their values stay the same."""
    if isinstance(value, (list, tuple)):
        return [computed_anew(element, anew) for element in value]
    if isinstance(value, Tensor) and has_gradients(value.dtype):
        return anew(value)
    return value


def negated_twice(tensor: Tensor) -> Tensor:
    """Let the compiler choose the memory layout, which it does not for a copy."""
    return tensor.neg().neg()


def unchanged(tensor: Tensor) -> Tensor:
    return tensor


Functions = tuple[Callable[..., Any], Callable[..., Any]]


def compiled(
    case: Case,
    before: Callable[[Tensor], Tensor],
    after: Callable[[Tensor], Tensor] = unchanged,
    *,
    backend: str,
    dynamic: bool = False,
) -> Functions:
    """Put calls of the operator into a larger graph; return the function, eager and compiled.

    The calls are those of some samples. In the backward pass, ``before`` comes after the operator.
    Each of the two passes is a program for the C++ compiler, which takes most of a check's time, so
    there is one for all samples.
    """
    operator = case.spec.function

    def function(calls: Any) -> list[Any]:
        given = [
            (
                [computed_anew(value, before) for value in inputs],
                {name: computed_anew(value, before) for name, value in keywords.items()},
            )
            for inputs, keywords in calls
        ]
        results = [as_tuple(operator(*inputs, **keywords)) for inputs, keywords in given]
        return [[computed_anew(output, after) for output in outputs] for outputs in results]

    return function, torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)


def call_all(function: Callable[..., Any], samples: Sequence[Sample]) -> list[Tensors]:
    """Return the outputs of each sample, with the same random numbers in every call."""
    with seeded():
        results = function([(sample.inputs, dict(sample.keywords)) for sample in samples])
    return [tuple(tensors_in(outputs)) for outputs in results]


def check_compiled(case: Case, samples: Sequence[Sample], functions: Functions) -> None:
    """Check forward and backward if there are gradients, else only forward.

    A graph that records gradients has the same forward pass, so that is not compiled again.
    """
    if case.dtype in differentiable(case.spec):
        check_compiled_gradients(case, samples, functions)
    else:
        check_compiled_forward(case, samples, functions)


def check_compiled_forward(case: Case, samples: Sequence[Sample], functions: Functions) -> None:
    """Check a graph that records no gradients."""
    eager, graph = functions
    with torch.no_grad():
        with failing_as("torch.compile(fullgraph=True)"):
            outputs = call_all(graph, samples)
        expected = call_all(eager, samples)
    for sample, *results in zip(samples, outputs, expected):
        check_compiled_outputs(case, sample, *results)


def check_compiled_outputs(case: Case, sample: Sample, outputs: Tensors, expected: Tensors) -> None:
    """Compare bit by bit, unless the operator is a composite, whose parts a compiler may change."""
    if has_kernel_for_key(case.spec.name, "CompositeImplicitAutograd"):
        check_outputs(case.spec, sample, case.dtype, outputs)
    else:
        same("compiled, the outputs differ", outputs, expected)


def check_compiled_gradients(case: Case, samples: Sequence[Sample], functions: Functions) -> None:
    """Compare with the reference, since a compiler may change how formulas round."""
    eager, graph = functions
    with torch.no_grad():
        expected = call_all(eager, samples)
    leaves = [sample.requiring_grad() for sample in samples]
    with failing_as("torch.compile(fullgraph=True), where a gradient is needed,"):
        outputs = call_all(graph, leaves)
        cotangents = [cotangents_for(results) for results in outputs]
        for sample, results, values in zip(leaves, outputs, expected):
            detached = tuple(output.detach() for output in results)
            check_compiled_outputs(case, sample, detached, values)
            require_history(case, sample, results)
        tensors = [sample.differentiable() for sample in leaves]
        found = gradients_of(flat(outputs), flat(tensors), flat(cotangents))
    if case.spec.draws:
        # The reference has only their mean, so compare with eager.
        drawn = gradients_of(flat(call_all(eager, leaves)), flat(tensors), flat(cotangents))
        torch.testing.assert_close(found, drawn)
    gradients = iter(found)
    for sample, own, given in zip(leaves, tensors, cotangents):
        names = differentiable_names(case.spec, sample)
        check_gradients(case.spec, sample, [next(gradients) for _ in own], given, names)


def flat(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [tensor for part in parts for tensor in part]


def check_together(
    case: Case,
    samples: Mapping[str, Sample],
    before: Callable[[Tensor], Tensor],
    after: Callable[[Tensor], Tensor] = unchanged,
) -> None:
    """Check one graph for all samples; if it fails, one per sample, to find out which is wrong."""

    def attempt(backend: str, samples: Sequence[Sample]) -> None:
        with fresh_compiler():
            functions = compiled(case, before, after, backend=backend)
            check_compiled(case, samples, functions)

    try:
        attempt(BACKENDS[case.device], list(samples.values()))
    except AssertionError:
        is_known = False
        for name, sample in samples.items():
            try:
                is_known |= check_graph(case, [sample], attempt)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error.__cause__
        if not is_known:
            check_graph(case, list(samples.values()), attempt)
            raise


# The graph is compiled for the first size, and must serve the others.
SIZES = (9, 6, 19)
NEGATED = "compiled by torch.compile, with two negations before"


@check(
    f"replaced by all essential samples in one graph, {NEGATED} the operator",
    dtypes=first,
    names=no_name,
    quick=on_last_device,
)
def compiled_graph(case: Case) -> None:
    named = (dataclasses.replace(case, name=name) for name in case.spec.essential)
    samples = {f"sample {each.name!r}": each.sample() for each in named}
    check_together(case, samples, negated_twice)


@check(
    f"passed to a graph under torch.no_grad(), {NEGATED} the operator",
    dtypes=first_if_differentiable,
    names=lambda spec: list(spec.essential)[-1:],
    quick=on_last_device,
)
def compiled_for_inference(case: Case) -> None:
    """Check the graph without gradients; that of `compiled_graph` records them."""

    def attempt(backend: str, samples: Sequence[Sample]) -> None:
        with fresh_compiler():
            functions = compiled(case, negated_twice, backend=backend)
            check_compiled_forward(case, samples, functions)

    check_graph(case, [case.sample()], attempt)


@check(
    f"of size 6, with reversed dimensions and then inside of padding, both in one graph, {NEGATED} "
    "and after the operator",
    dtypes=first,
    names=no_name,
    quick=on_last_device,
)
def compiled_for_layouts(case: Case) -> None:
    samples = {
        f"layout {layout.__name__}": dataclasses.replace(case, layout=layout).sized(6)
        for layout in (reversed_dimensions, inside_padding)
    }
    check_together(case, samples, negated_twice, negated_twice)


@check(
    "of size 9, and then of sizes 6 and 19 for the same graph of torch.compile(dynamic=True), with "
    "a copy before the operator",
    dtypes=brain,
    names=no_name,
    quick=on_last_device,
)
def compiled_for_dynamic_shapes(case: Case) -> None:
    """Check that one graph serves all sizes."""

    def attempt(backend: str, samples: Sequence[Sample]) -> None:
        first, *others = samples
        with fresh_compiler():
            functions = compiled(case, torch.clone, backend=backend, dynamic=True)
            check_compiled(case, [first], functions)
            with torch.compiler.set_stance("fail_on_recompile"):
                for size, sample in zip(SIZES[1:], others):
                    check_without_recompiling(case, first, sample, size, functions)

    check_graph(case, [case.sized(size) for size in SIZES], attempt)


def check_without_recompiling(
    case: Case, first: Sample, sample: Sample, size: int, functions: Functions
) -> None:
    try:
        check_compiled(case, [sample], functions)
    except AssertionError as error:
        if "fail_on_recompile" not in str(error):
            raise
        raise SpecialisedError(
            reason_of_recompiling(case, first, sample, size, str(error))
        ) from error


def reason_of_recompiling(case: Case, first: Sample, sample: Sample, size: int, error: str) -> str:
    """Say which sizes a graph was specialised to."""
    operator = case.spec.operator
    described = f"the graph compiled for size 9 does not serve size {size}"
    pairs = zip(named_sizes(operator, first), named_sizes(operator, sample))
    small = [
        f"{name} was {size} and is {other}"
        for (name, size), (_, other) in pairs
        if size != other and min(size, other) < 2
    ]
    if small:
        return (
            f"{described}: {', '.join(small)}, and PyTorch compiles another graph for each size 0 "
            "or 1, whatever the operator. Let `sized` give at least 2 for sizes from 5"
        )
    return (
        f"{described}: the fake kernel or a formula was specialised to a size"
        f"{decided_size(operator, error)}. Comparing a size with 0 or 1, as for broadcasting, "
        f"specialises, too. {error}"
    )


def named_sizes(operator: OpOverload, sample: Sample) -> Iterator[tuple[str, int]]:
    """Yield the sizes and integers of a call, with their names from the schema."""
    for argument, value in bound(operator, sample.inputs, sample.keywords):
        name = argument.name
        if isinstance(value, Tensor):
            yield from ((f"{name}.shape[{d}]", size) for d, size in enumerate(value.shape))
        elif type(value) is int:
            yield name, value


def decided_size(operator: OpOverload, error: str) -> str:
    """Name the size that failed Dynamo's guard."""
    position = r"calls\[\d+\]\[(?:0\]\[(\d+)|1\]\['(\w+)')\]"
    found = re.search(
        rf"{position}.*?size mismatch at index (\d+). expected (\d+), actual (\d+)",
        error,
        re.DOTALL,
    )
    if not found:
        return ""
    place, keyword, dimension, before, now = found.groups()
    name = keyword or operator._schema.arguments[int(place)].name
    return f", {name}.shape[{dimension}], which was {before} and is {now}"


# --------------------------------------- open sizes: data-dependent ones, and those of torch.export


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
    "of size 9, and then of sizes 6 and 19 for the same graph of "
    "torch.compile(dynamic=True, backend='aot_eager'), with sizes counted by torch.nonzero before "
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
    "of size 9, exported by torch.export with dynamic sizes, strict and not, also with sizes "
    "counted by torch.nonzero before the operator, and then run with sizes 6, 9 and 19",
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
    how = f"torch.export.export(strict={strict})" + " with counted sizes" * any(dimensions)
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
