"""Check torch.compile: one graph without breaks, for one size and for all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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
    essential,
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
        torch._inductor.config.patch(fx_graph_cache=False),
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


def compiled(
    case: Case,
    before: Callable[[Tensor], Tensor],
    after: Callable[[Tensor], Tensor] = unchanged,
    **options: Any,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Put the operator among others, so that there is a graph; eager and compiled.

    In the backward pass, what is ``before`` comes after. Each of the two is a program for a C++
    compiler, which takes most of the time of a check.
    """
    operator = case.spec.function

    def function(inputs: Any, keywords: Any) -> list[Any]:
        arguments = [computed_anew(value, before) for value in inputs]
        options = {name: computed_anew(value, before) for name, value in keywords.items()}
        outputs = as_tuple(operator(*arguments, **options))
        return [computed_anew(output, after) for output in outputs]

    backend = BACKENDS[case.device]
    return function, torch.compile(function, backend=backend, fullgraph=True, **options)


def check_compiled(
    case: Case, sample: Sample, eager: Callable[..., Any], graph: Callable[..., Any]
) -> None:
    """Check forward and backward where there are gradients, else forward alone.

    A graph that records them has the same forward pass, so it is not compiled twice.
    """
    if case.dtype in differentiable(case.spec):
        expected = eager_outputs(sample, eager)
        check_compiled_gradients(case, sample.requiring_grad(), expected, graph)
    else:
        check_compiled_forward(case, sample, eager, graph)


def check_compiled_forward(
    case: Case, sample: Sample, eager: Callable[..., Any], graph: Callable[..., Any]
) -> None:
    """Check a graph that records no gradients."""
    with torch.no_grad(), failing_as("torch.compile(fullgraph=True)"):
        outputs = tuple(tensors_in(graph(sample.inputs, dict(sample.keywords))))
    check_compiled_outputs(case, sample, outputs, eager_outputs(sample, eager))


@torch.no_grad()
def eager_outputs(sample: Sample, eager: Callable[..., Any]) -> Tensors:
    return tuple(tensors_in(eager(sample.inputs, dict(sample.keywords))))


def check_compiled_outputs(case: Case, sample: Sample, outputs: Tensors, expected: Tensors) -> None:
    """Compare bit for bit, unless the operator is made of others that may be changed."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(case.spec.name, "CompositeImplicitAutograd"):
        check_outputs(case.spec, sample, case.dtype, outputs)
    else:
        same("compiled, the outputs differ", outputs, expected)


def check_compiled_gradients(
    case: Case, leaves: Sample, expected: Tensors, graph: Callable[..., Any]
) -> None:
    """Compare with the reference: a compiler may have formulas round otherwise."""
    with failing_as("torch.compile(fullgraph=True), where a gradient is needed,"):
        outputs = tuple(tensors_in(graph(leaves.inputs, dict(leaves.keywords))))
        plain = tuple(output.detach() for output in outputs)
        check_compiled_outputs(case, leaves, plain, expected)
        require_history(case, leaves, outputs)
        cotangents = cotangents_for(outputs)
        gradients = gradients_of(outputs, leaves.differentiable(), cotangents)
    names = differentiable_names(case.spec, leaves)
    check_gradients(case.spec, leaves, gradients, cotangents, names)


NEGATED = "compiled by torch.compile, negated twice before"


@check(f"{NEGATED} the operator", dtypes=first, names=essential)
def compiled_graph(case: Case) -> None:
    with fresh_compiler():
        check_compiled(case, case.sample(), *compiled(case, negated_twice, dynamic=False))


@check(
    f"{NEGATED} the operator, under torch.no_grad()",
    dtypes=first_if_differentiable,
    names=lambda spec: list(spec.essential)[-1:],
)
def compiled_for_inference(case: Case) -> None:
    """Check the graph that records no gradients, where `compiled_graph` has one that does."""
    with fresh_compiler():
        functions = compiled(case, negated_twice, dynamic=False)
        check_compiled_forward(case, case.sample(), *functions)


@check(
    f"of size 6, {NEGATED} and after the operator",
    dtypes=first,
    names=no_name,
    layouts=lambda spec: (reversed_dimensions, inside_padding),
)
def compiled_for_layouts(case: Case) -> None:
    with fresh_compiler():
        functions = compiled(case, negated_twice, negated_twice, dynamic=False)
        check_compiled(case, case.sized(6), *functions)


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
        check_compiled(case, case.sized(9), *functions)
        with torch.compiler.set_stance("fail_on_recompile"):
            for size in (6, 19):
                check_without_recompiling(case, size, functions)


def check_without_recompiling(case: Case, size: int, functions: tuple[Any, Any]) -> None:
    try:
        check_compiled(case, case.sized(size), *functions)
    except AssertionError as error:
        if "fail_on_recompile" not in str(error):
            raise
        raise AssertionError(
            f"the graph that was compiled for size 9 does not serve size {size}: the fake kernel, "
            f"or a formula, makes a decision of a size. {error}"
        ) from error
