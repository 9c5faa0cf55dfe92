"""Check torch.compile: one graph without breaks, for one size and for all."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from foo_ops.testing.checks.calls import differentiable_names, require_history, same
from foo_ops.testing.checks.contexts import failing_as, without_cached_fakes
from foo_ops.testing.checks.matrix import (
    Case,
    brain,
    check,
    differentiable,
    first,
    first_if_differentiable,
    no_name,
)
from foo_ops.testing.layouts import inside_padding, reversed_dimensions
from foo_ops.testing.schema import as_tuple, tensors_in
from foo_ops.testing.spec import (
    Sample,
    Tensors,
    check_gradients,
    check_outputs,
    cotangents_for,
)
from foo_ops.testing.tolerance import gradients_of, has_gradients

BACKENDS = {"cpu": "inductor", "foo": "aot_eager"}


@contextlib.contextmanager
def fresh_compiler() -> Iterator[None]:
    """Forget what another check compiled, in memory or on disk, and leave nothing behind."""
    import torch._functorch.config
    import torch._inductor.config
    import torch.fx.experimental._config

    torch.compiler.reset()
    with (
        # A graph that was kept on disk still calls operators with the schemas of its day.
        torch._functorch.config.patch(enable_autograd_cache=False),
        # Vectors of the compiler's own loops are not what is checked, and a third of its time.
        torch._inductor.config.patch({"fx_graph_cache": False, "cpp.simdlen": 1}),
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        without_cached_fakes(),
        # Sizes that are equal by accident, as the 9 of a fixed weight, would be taken for one.
        torch.fx.experimental._config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
    ):
        yield
    torch.compiler.reset()


def computed_anew(value: Any, anew: Callable[[Tensor], Tensor]) -> Any:
    """Compute tensors anew whose numbers stay the same: they may be all that a function takes."""
    if isinstance(value, (list, tuple)):
        return [computed_anew(element, anew) for element in value]
    if isinstance(value, Tensor) and has_gradients(value.dtype):
        return anew(value)
    return value


def negated_twice(tensor: Tensor) -> Tensor:
    """Let the compiler choose where it lies, which it does not for a copy."""
    return tensor.neg().neg()


def unchanged(tensor: Tensor) -> Tensor:
    return tensor


Functions = tuple[Callable[..., Any], Callable[..., Any]]


def compiled(
    case: Case,
    before: Callable[[Tensor], Tensor],
    after: Callable[[Tensor], Tensor] = unchanged,
    **options: Any,
) -> Functions:
    """Put calls of the operator among others, so that there is a graph; eager and compiled.

    The calls are those of some samples. In the backward pass, what is ``before`` comes after. Each
    of the two is a program for a C++ compiler, which takes most of the time of a check: one for all
    samples, since they wait for each other.
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

    backend = BACKENDS[case.device]
    return function, torch.compile(function, backend=backend, fullgraph=True, **options)


def call_all(function: Callable[..., Any], samples: Sequence[Sample]) -> list[Tensors]:
    """Return the outputs of each sample."""
    results = function([(sample.inputs, dict(sample.keywords)) for sample in samples])
    return [tuple(tensors_in(outputs)) for outputs in results]


def check_compiled(case: Case, samples: Sequence[Sample], functions: Functions) -> None:
    """Check forward and backward where there are gradients, else forward alone.

    A graph that records them has the same forward pass, so it is not compiled twice.
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
    """Compare bit for bit, unless the operator is made of others that may be changed."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(case.spec.name, "CompositeImplicitAutograd"):
        check_outputs(case.spec, sample, case.dtype, outputs)
    else:
        same("compiled, the outputs differ", outputs, expected)


def check_compiled_gradients(case: Case, samples: Sequence[Sample], functions: Functions) -> None:
    """Compare with the reference: a compiler may have formulas round otherwise."""
    eager, graph = functions
    with torch.no_grad():
        expected = call_all(eager, samples)
    leaves = [sample.requiring_grad() for sample in samples]
    with failing_as("torch.compile(fullgraph=True), where a gradient is needed,"):
        outputs = call_all(graph, leaves)
        cotangents = [cotangents_for(results) for results in outputs]
        for sample, results, values in zip(leaves, outputs, expected):
            plain = tuple(output.detach() for output in results)
            check_compiled_outputs(case, sample, plain, values)
            require_history(case, sample, results)
        tensors = [sample.differentiable() for sample in leaves]
        gradients = iter(gradients_of(flat(outputs), flat(tensors), flat(cotangents)))
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
    """Check one graph for all samples; where it is wrong, one for each says which sample it is."""
    try:
        check_graph(case, list(samples.values()), before, after)
    except AssertionError:
        for name, sample in samples.items():
            try:
                check_graph(case, [sample], before, after)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error.__cause__
        raise


def check_graph(
    case: Case,
    samples: Sequence[Sample],
    before: Callable[[Tensor], Tensor],
    after: Callable[[Tensor], Tensor],
) -> None:
    with fresh_compiler():
        check_compiled(case, samples, compiled(case, before, after, dynamic=False))


NEGATED = "compiled by torch.compile, negated twice before"


@check(
    f"each of the essential ones, {NEGATED} the operator, all in one graph",
    dtypes=first,
    names=no_name,
)
def compiled_graph(case: Case) -> None:
    named = (dataclasses.replace(case, name=name) for name in case.spec.essential)
    samples = {f"sample {each.name!r}": each.sample() for each in named}
    check_together(case, samples, negated_twice)


@check(
    f"{NEGATED} the operator, under torch.no_grad()",
    dtypes=first_if_differentiable,
    names=lambda spec: list(spec.essential)[-1:],
)
def compiled_for_inference(case: Case) -> None:
    """Check the graph that records no gradients, where `compiled_graph` has one that does."""
    with fresh_compiler():
        functions = compiled(case, negated_twice, dynamic=False)
        check_compiled_forward(case, [case.sample()], functions)


@check(
    f"of size 6, its dimensions reversed and then inside of padding, {NEGATED} and after the "
    "operator, both in one graph",
    dtypes=first,
    names=no_name,
)
def compiled_for_layouts(case: Case) -> None:
    samples = {
        f"layout {layout.__name__}": dataclasses.replace(case, layout=layout).sized(6)
        for layout in (reversed_dimensions, inside_padding)
    }
    check_together(case, samples, negated_twice, negated_twice)


@check(
    "of size 9, and then of sizes 6 and 19 for the same graph (dynamic=True), compiled by "
    "torch.compile, copied before the operator",
    dtypes=brain,
    names=no_name,
)
def compiled_for_dynamic_shapes(case: Case) -> None:
    """Check that one graph serves all sizes."""
    with fresh_compiler():
        functions = compiled(case, torch.clone, dynamic=True)
        check_compiled(case, [case.sized(9)], functions)
        with torch.compiler.set_stance("fail_on_recompile"):
            for size in (6, 19):
                check_without_recompiling(case, size, functions)


def check_without_recompiling(case: Case, size: int, functions: Functions) -> None:
    try:
        check_compiled(case, [case.sized(size)], functions)
    except AssertionError as error:
        if "fail_on_recompile" not in str(error):
            raise
        raise AssertionError(
            f"the graph that was compiled for size 9 does not serve size {size}: the fake kernel, "
            f"or a formula, makes a decision of a size. {error}"
        ) from error
