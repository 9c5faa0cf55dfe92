"""The checks that every operator has to pass, ours as anyone's: one table, one matrix.

Each check is a function of a `Case`: an operator, a device, a dtype, a sample. `cases` lists them,
the pytest plugin makes a test of each, and `check_operator` runs them all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from foo_ops import library
from foo_ops.testing.layouts import (
    LAYOUTS,
    Layout,
    expanded,
    inside_padding,
    reversed_dimensions,
)
from foo_ops.testing.schema import (
    as_tuple,
    named_tensors,
    out_names,
    tensors_in,
    unwritten,
    writes,
    written_tensors,
)
from foo_ops.testing.spec import (
    OpSpec,
    Sample,
    Tensors,
    check_gradients,
    check_outputs,
    cotangents_for,
    gradients_of,
    has_gradients,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One check of an operator. Calling it runs the check.

    Attributes:
        check: the name of the check.
        spec: the operator.
        device: where it is called.
        dtype: of the sample.
        name: of the sample; empty where a check needs none of them.
        layout: what is done to the sample's tensors.
        gradient: they require one.
    """

    check: str
    spec: OpSpec
    device: str
    dtype: torch.dtype
    name: str = ""
    layout: Layout | None = None
    gradient: bool = False

    @property
    def id(self) -> str:
        """Such as ``rms_norm-foo-float32-opcheck-size7-gradient``."""
        words = [self._operator_name(), self.device, dtype_name(self.dtype), self.check, self.name]
        words += [self.layout.__name__] if self.layout is not None else []
        words += ["gradient"] if self.gradient else []
        return "-".join(word for word in words if word)

    def _operator_name(self) -> str:
        return self.spec.name.partition("::")[2].removesuffix(".default")

    def sample(self) -> Sample:
        """On the device, in the layout."""
        with seeded():
            sample = self.spec.samples[self.name](self.dtype)
        return self.placed(sample)

    def sized(self, size: int) -> Sample:
        with seeded():
            sample = self.spec.sized(self.dtype, size)
        return self.placed(sample)

    def large(self) -> Sample:
        assert self.spec.large is not None
        with seeded():
            sample = self.spec.large(self.dtype)
        return self.placed(sample)

    def placed(self, sample: Sample) -> Sample:
        if self.layout is not None:
            sample = sample.map(self.layout)
        return sample.to(self.device)

    def __call__(self) -> None:
        """Run the check.

        Raises:
            AssertionError: which says what is wrong with the operator.
        """
        # pytest leaves out such frames: the author wants to know what is wrong, not who found it.
        __tracebackhide__ = True
        try:
            with threads(1):
                CHECKS[self.check].run(self)
        except AssertionError as error:
            raise error.with_traceback(None)  # noqa: B904


Run = Callable[[Case], None]
Select = Callable[[OpSpec], Iterable[Any]]


@dataclasses.dataclass(frozen=True)
class Check:
    """A check, and the cases that it is run for.

    Attributes:
        run: raises AssertionError.
        dtypes, names, layouts, gradients, devices: of each spec, which ones are combined.
    """

    run: Run
    dtypes: Select
    names: Select
    layouts: Select
    gradients: Select
    devices: Select

    def cases(self, name: str, spec: OpSpec) -> Iterator[Case]:
        axes = (self.devices, self.dtypes, self.names, self.layouts, self.gradients)
        for values in itertools.product(*(axis(spec) for axis in axes)):
            yield Case(name, spec, *values)


CHECKS: dict[str, Check] = {}


def cases(spec: OpSpec, checks: Collection[str] | None = None) -> list[Case]:
    """All that is to be checked of an operator.

    Args:
        spec: the operator.
        checks: the names of checks, of those in ``CHECKS``; without it all.

    Raises:
        ValueError: for a check that there is not.

    Example:
        >>> from foo_ops.testing import ABS
        >>> [case.id for case in cases(ABS, ["gradcheck"])][:2]
        ['abs-cpu-float64-gradcheck-0-d', 'abs-cpu-float64-gradcheck-empty inside']
    """
    names = CHECKS if checks is None else checks
    for name in names:
        if name not in CHECKS:
            raise ValueError(f"cases: checks must be among {', '.join(CHECKS)}, got {name!r}")
    return [case for name in names for case in CHECKS[name].cases(name, spec)]


class OperatorCheckError(AssertionError):
    """An operator fails some of its checks.

    Attributes:
        failures: the cases that failed, each with its error.
    """

    def __init__(
        self, spec: OpSpec, count: int, failures: Sequence[tuple[Case, Exception]]
    ) -> None:
        self.failures = failures
        lines = [f"{spec.name} fails {len(failures)} of {count} cases"]
        for check, of_check in itertools.groupby(failures, lambda failure: failure[0].check):
            (case, error), *others = of_check
            lines.append(f"\n{case.id}: {error}")
            if others:
                lines.append(f"{len(others)} more cases of {check}: {listed(others)}")
        super().__init__("\n".join(lines))


def listed(failures: Sequence[tuple[Case, Exception]]) -> str:
    """The first ten."""
    names = [case.id for case, _ in failures[:10]]
    return ", ".join(names + ["..."] * (len(failures) > len(names)))


def check_operator(spec: OpSpec, *, checks: Collection[str] | None = None) -> None:
    """Run everything that an operator has to pass, and report all that fails at once.

    Args:
        spec: the operator, with samples and a reference.
        checks: the names of some checks, of those in ``CHECKS``; without it all of them run.

    Raises:
        OperatorCheckError: an AssertionError that says what is wrong; of each check one failure is
            spelled out, and the others are named.

    Example:
        >>> from foo_ops.testing import ABS
        >>> check_operator(ABS, checks=["gradcheck", "opcheck"])
    """
    failures: list[tuple[Case, Exception]] = []
    chosen = cases(spec, checks)
    for case in chosen:
        try:
            case()
        except Exception as error:
            failures.append((case, error))
    if failures:
        raise OperatorCheckError(spec, len(chosen), failures)


# ------------------------------------------------------------------------- what is run for what


def check(
    *,
    dtypes: Select = lambda spec: spec.dtypes,
    names: Select = lambda spec: spec.samples,
    layouts: Select = lambda spec: (None,),
    gradients: Select = lambda spec: (False,),
    devices: Select = lambda spec: spec.devices,
) -> Callable[[Run], Run]:
    """Put a function into the table of checks, by its name."""

    def register(run: Run) -> Run:
        CHECKS[run.__name__] = Check(run, dtypes, names, layouts, gradients, devices)
        return run

    return register


def differentiable(spec: OpSpec) -> list[torch.dtype]:
    return [dtype for dtype in spec.dtypes if spec.differentiable and has_gradients(dtype)]


def double_precision(spec: OpSpec) -> list[torch.dtype]:
    wide = (torch.float64, torch.complex128)
    return [dtype for dtype in differentiable(spec) if dtype in wide]


def first(spec: OpSpec) -> Sequence[torch.dtype]:
    return spec.dtypes[:1]


def first_and_last(spec: OpSpec) -> list[torch.dtype]:
    """The last is the one that lies farthest from the first."""
    return list(dict.fromkeys((spec.dtypes[0], spec.dtypes[-1])))


def single_and_brain(spec: OpSpec) -> list[torch.dtype]:
    """float32 and bfloat16, or else the first."""
    chosen = [dtype for dtype in (torch.float32, torch.bfloat16) if dtype in spec.dtypes]
    return chosen or list(first(spec))


def essential(spec: OpSpec) -> Collection[str]:
    return spec.essential


def no_name(spec: OpSpec) -> tuple[str]:
    return ("",)


def in_layouts(spec: OpSpec) -> Collection[str]:
    return spec.in_layouts


def all_layouts(spec: OpSpec) -> list[Layout]:
    """What is written cannot lie in memory that is repeated."""
    return [layout for layout in LAYOUTS if not (spec.mutates and layout is expanded)]


def gradient_or_not(spec: OpSpec) -> tuple[bool, ...]:
    return (False, True) if spec.differentiable and not spec.mutates else (False,)


# ------------------------------------------------------------------------------------- contexts


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Samples may come from torch.randn, and each call is to give the same."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(0)
    try:
        yield
    finally:
        torch.set_rng_state(state)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """For many small tensors one: on a busy machine threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that is allocated and not initialised is full of NaN, or of the largest integer."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


@contextlib.contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Errors that are no verdict of a check become one: ``what`` raised them."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{what} raised {type(error).__name__}: {error}") from error


# ---------------------------------------------------------------------------- calls and results


def run(case: Case, sample: Sample) -> Tensors:
    """The outputs of a call."""
    what = (
        f"{case.spec.name}, whose OpSpec promises {dtype_name(case.dtype)} on {case.device}, "
        f"called with {described(sample)}"
    )
    with failing_as(what):
        return case.spec.call(sample)


def run_backward(outputs: Tensors, sample: Sample, cotangents: Tensors) -> Tensors:
    """The gradients of a sample's tensors."""
    with failing_as("the formula of its gradient"):
        return gradients_of(outputs, sample.differentiable(), cotangents)


def run_both(case: Case, sample: Sample) -> tuple[Tensors, Tensors, Tensors]:
    """Outputs, their gradients, and the gradients of the sample's tensors."""
    outputs = run(case, sample)
    require_history(case, sample, outputs)
    cotangents = cotangents_for(outputs)
    return outputs, cotangents, run_backward(outputs, sample, cotangents)


AUTOGRAD_KEYS = {"cpu": ("AutogradCPU",), "foo": ("AutogradPrivateUse1",)}


def require_history(case: Case, sample: Sample, outputs: Tensors) -> None:
    """There is a formula, and outputs require a gradient where those of the reference do."""
    keys = ("CompositeImplicitAutograd", "Autograd", *AUTOGRAD_KEYS[torch.device(case.device).type])
    name = case.spec.name
    if not any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys):
        # A kernel in Python may have gradients all the same, but only in eager mode.
        raise AssertionError(
            "there is no formula of its gradient: register one (torch.library.register_autograd), "
            "or say differentiable=False in the OpSpec"
        )
    if all(output.requires_grad for output in outputs if has_gradients(output.dtype)):
        return
    exact_sample = sample.exact().requiring_grad()
    expected = exact_sample.call(case.spec.reference)
    for position, (output, value) in enumerate(zip(outputs, expected)):
        if value.requires_grad and not output.requires_grad:
            raise AssertionError(
                f"output {position} does not require a gradient although an input does, and the "
                "reference's does: its formula marks the output as not differentiable"
            )


def check_both(case: Case, sample: Sample, outputs: Tensors, cotangents: Tensors) -> None:
    """Values, and the gradients that follow from them."""
    check_outputs(case.spec, sample, case.dtype, outputs)
    gradients = run_backward(outputs, sample, cotangents)
    names = differentiable_names(case.spec, sample)
    check_gradients(case.spec, sample, gradients, cotangents, names)


def differentiable_names(spec: OpSpec, sample: Sample) -> list[str]:
    tensors = named_tensors(spec.operator, sample.inputs, sample.keywords)
    return [name for name, tensor in tensors if tensor.requires_grad]


def described(sample: Sample) -> str:
    return ", ".join(
        f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}" for tensor in sample.tensors()
    )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def same(what: str, actual: Tensors, expected: Tensors, *, check_stride: bool = True) -> None:
    """Bit for bit, dtypes and layouts included, but for the payload of a NaN."""
    try:
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=0, equal_nan=True, check_stride=check_stride
        )
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from None


# ------------------------------------------------------------------------- values and gradients


@check()
def values(case: Case) -> None:
    """Of every sample, in memory that is full of NaN where it was not written."""
    sample = case.sample()
    with poisoned_memory():
        outputs = run(case, sample)
    for position, output in enumerate(outputs):
        if output.device.type != case.device:
            raise AssertionError(
                f"output {position} is on {output.device}, its inputs are on {case.device}"
            )
    check_outputs(case.spec, case.sample(), case.dtype, outputs)


@check(dtypes=differentiable)
def gradients(case: Case) -> None:
    sample = case.sample().requiring_grad()
    with poisoned_memory():
        outputs = run(case, sample)
        require_history(case, sample, outputs)
        check_both(case, sample, outputs, cotangents_for(outputs))


@check(names=in_layouts, layouts=all_layouts)
def layouts(case: Case) -> None:
    """Values and gradients of tensors that are not contiguous; what lies beside them is NaN."""
    assert case.layout is not None
    try:
        check_in_layout(case, case.layout)
    except AssertionError as error:
        contiguous = dataclasses.replace(case, layout=None)
        raise AssertionError(f"{error}. {layout_verdict(contiguous, case.layout)}") from error


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
    """Whether the layout is to blame."""

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


@check(dtypes=differentiable, names=essential)
def gradient_of_each_input(case: Case) -> None:
    """Which inputs need a gradient decides who computes, and never what comes out."""
    sample = case.sample().requiring_grad()
    outputs, cotangents, expected = run_both(case, sample)
    tensors, names = sample.differentiable(), differentiable_names(case.spec, sample)
    for name, tensor, gradient in zip(names, tensors, expected):
        for other in tensors:
            other.requires_grad_(other is tensor)
        alone = run(case, sample)
        what = f"where {name} alone requires a gradient"
        same(f"the outputs differ {what}", alone, outputs)
        if any(output.requires_grad for output in alone):
            gradients = run_backward(alone, sample, cotangents)
            same(f"the gradient differs {what}", gradients, (gradient,))
        elif gradient.any():
            raise AssertionError(f"no output requires a gradient {what}")


@check(dtypes=differentiable, names=essential)
def gradient_through_each_output(case: Case) -> None:
    """An output that nothing depends on has no gradient: as good as one of zeros."""
    sample = case.sample().requiring_grad()
    names = differentiable_names(case.spec, sample)
    outputs, *_ = run_both(case, sample)
    for position, output in enumerate(outputs):
        if not output.requires_grad:
            continue
        outputs = run(case, sample)
        cotangents = tuple(
            cotangent if index == position else torch.zeros_like(cotangent)
            for index, cotangent in enumerate(cotangents_for(outputs))
        )
        chosen = (outputs[position],)
        gradients = run_backward(chosen, sample, (cotangents[position],))
        with failing_as(f"the gradient through output {position} alone"):
            check_gradients(case.spec, sample, gradients, cotangents, names)


@check(dtypes=differentiable, names=essential)
def gradient_only_where_needed(case: Case) -> None:
    sample = case.sample()
    if any(output.requires_grad for output in run(case, sample)):
        raise AssertionError("an output requires a gradient although no input does")
    sample = sample.requiring_grad()
    outputs = run(case, sample)
    require_history(case, sample, outputs)
    with torch.no_grad():
        unrecorded = run(case, sample)
    with torch.inference_mode():
        inference = run(case, sample)
    if not all(output.is_inference() for output in inference):
        raise AssertionError("an output in inference_mode is no inference tensor")
    for mode, results in (("no_grad", unrecorded), ("inference_mode", inference)):
        if any(output.requires_grad for output in results):
            raise AssertionError(f"an output under {mode} requires a gradient")
        plain = tuple(output.clone() for output in results)
        same(f"the outputs differ under {mode}", plain, outputs)


def finite(outputs: Iterable[Tensor]) -> Tensors:
    """Numerical derivatives know no infinity."""
    return tuple(output.where(output.isfinite(), 0) for output in outputs)


@check(dtypes=double_precision, names=essential)
def gradcheck(case: Case) -> None:
    """The formula against numerical derivatives of the kernel itself."""
    sample = case.sample().requiring_grad()
    tensors = sample.differentiable()
    require_history(case, sample, run(case, sample))

    def function(*values: Tensor) -> Tensors:
        replaced = dict(zip(map(id, tensors), values))
        outputs = case.spec.call(sample.map(lambda t: replaced.get(id(t), t)))
        return finite(output for output in outputs if output.requires_grad)

    with failing_as("gradcheck"):
        torch.autograd.gradcheck(function, tensors)


# ------------------------------------------------------------------------------ schema and fakes


def arguments(case: Case) -> Sample:
    """Those of a plain call, out arguments included."""
    sample = case.sample()
    functional = case.spec.functional
    if functional is None:
        return sample
    outs = list(map(unwritten, sample.call(functional)))
    if case.layout is not None:
        outs = list(map(case.layout, outs))
    names = out_names(case.spec.operator, functional)
    return Sample(sample.inputs, dict(sample.keywords) | dict(zip(names, outs)))


def whole(tensor: Tensor) -> Tensor:
    """The bytes of the memory that a tensor lies in."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@check(names=essential, layouts=lambda spec: (None, inside_padding))
def writes_only_what_is_declared(case: Case) -> None:
    """Neither an argument nor memory beside it, unless the schema says ``Tensor(a!)``."""
    sample, operator = arguments(case), case.spec.operator
    named = list(named_tensors(operator, sample.inputs, sample.keywords))
    declared = {id(tensor) for tensor in written_tensors(operator, sample.inputs, sample.keywords)}
    before = [(tensor.clone(), whole(tensor).clone()) for _, tensor in named]
    with failing_as(case.spec.name):
        sample.call(operator)
    for (name, tensor), (elements, memory) in zip(named, before):
        if id(tensor) not in declared and not same_bytes(tensor, elements):
            raise AssertionError(
                f"it writes its argument {name}, and its schema does not say so: "
                f"{operator._schema}. Declare it as Tensor(a!), or write a copy"
            )
        tensor.copy_(elements)
        if not torch.equal(whole(tensor), memory):
            raise AssertionError(
                f"it writes to the memory of its argument {name} beside the elements that it got"
            )


def same_bytes(one: Tensor, other: Tensor) -> bool:
    dense = (tensor.clone(memory_format=torch.contiguous_format) for tensor in (one, other))
    return torch.equal(*map(whole, dense))


@check(names=essential)
def aliases_only_what_is_declared(case: Case) -> None:
    """An output shares memory with an argument, or with another, only where the schema says so."""
    sample, operator = arguments(case), case.spec.operator
    named = list(named_tensors(operator, sample.inputs, sample.keywords))
    returns = operator._schema.returns
    with failing_as(case.spec.name):
        result = operator(*sample.inputs, **sample.keywords)
    results = (result,) if len(returns) == 1 else as_tuple(result)
    seen = [(f"its argument {name}", tensor) for name, tensor in named]
    for position, (result, declared) in enumerate(zip(results, returns)):
        if declared.alias_info is not None:
            require_alias(case, f"output {position}", result, declared, dict(named))
            continue
        for tensor in tensors_in(result):
            for name, other in seen:
                if shares_memory(tensor, other):
                    raise AssertionError(
                        f"output {position} shares memory with {name}, and its schema does not say "
                        f"so: {operator._schema}. Return a clone, or declare it as Tensor(a)"
                    )
            seen.append((f"output {position}", tensor))


def require_alias(
    case: Case, what: str, result: Tensor, declared: Any, named: dict[str, Tensor]
) -> None:
    """A return that is declared to alias an argument does so; one that is written is it."""
    for argument in case.spec.operator._schema.arguments:
        alias = argument.alias_info
        if alias is None or alias.before_set != declared.alias_info.before_set:
            continue
        tensor = named[argument.name]
        if writes(argument) and result is not tensor:
            raise AssertionError(f"{what} must be its argument {argument.name} itself, and is not")
        if result.numel() > 0 and not shares_memory(result, tensor):
            raise AssertionError(
                f"{what} shares no memory with its argument {argument.name}, as its schema says"
            )


def shares_memory(one: Tensor, other: Tensor) -> bool:
    storages = one.untyped_storage(), other.untyped_storage()
    return storages[0].nbytes() > 0 and storages[0].data_ptr() == storages[1].data_ptr()


@check(
    dtypes=lambda spec: spec.dtypes if spec.functional is not None else (),
    names=in_layouts,
    layouts=all_layouts,
)
def out_in_layouts(case: Case) -> None:
    """Out arguments of the right shape keep their memory and their strides, and get the values."""
    sample = arguments(case)
    outs = written_tensors(case.spec.operator, sample.inputs, sample.keywords)
    places = [(out.data_ptr(), out.stride()) for out in outs]
    with failing_as(case.spec.name):
        sample.call(case.spec.operator)
    if places != [(out.data_ptr(), out.stride()) for out in outs]:
        raise AssertionError("an out argument of the right shape and dtype was given other memory")
    plain = Sample(sample.inputs, case.sample().keywords)
    check_outputs(case.spec, plain, case.dtype, tuple(outs))


@check(dtypes=first_and_last, names=essential, gradients=gradient_or_not)
def opcheck(case: Case) -> None:
    """torch.library.opcheck: schema, autograd registration, fake kernel, AOTAutograd."""
    sample = arguments(case)
    if case.gradient:
        sample = sample.requiring_grad()
    results = library.opcheck(
        case.spec.operator, sample.inputs, dict(sample.keywords), raise_exception=False
    )
    failed = [f"{name}: {result}" for name, result in results.items() if result != "SUCCESS"]
    if failed:
        raise AssertionError("; ".join(failed))


@check()
def fake_kernel(case: Case) -> None:
    check_fake(case)


@check(dtypes=first, names=in_layouts, layouts=all_layouts)
def fake_kernel_in_layouts(case: Case) -> None:
    check_fake(case)


def check_fake(case: Case) -> None:
    """Shape, dtype, device and strides."""
    from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    outputs = run(case, case.sample())
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    fake_sample = case.sample().map(mode.from_tensor)
    with mode, failing_as("the fake kernel (torch.library.register_fake)"):
        try:
            fakes = case.spec.call(fake_sample)
        except UnsupportedOperatorException:
            raise AssertionError(
                "there is no fake kernel: register one (torch.library.register_fake)"
            ) from None
    if len(fakes) != len(outputs):
        raise AssertionError(f"the fake kernel returns {len(fakes)} tensors, not {len(outputs)}")
    for position, (output, fake) in enumerate(zip(outputs, fakes)):
        for what, actual, expected in properties(output, fake):
            if actual != expected:
                raise AssertionError(
                    f"the fake kernel gives output {position} the {what} {actual}, "
                    f"the kernel gives it {expected}"
                )


def properties(output: Tensor, fake: Tensor) -> Iterator[tuple[str, Any, Any]]:
    """What must agree, that of the fake first. A size that depends on data may be any."""
    known = [size if isinstance(size, int) else None for size in fake.shape]
    if len(known) == output.dim():
        sizes = tuple(real if size is None else size for size, real in zip(known, output.shape))
    else:
        sizes = tuple(fake.shape)
    yield "shape", sizes, tuple(output.shape)
    yield "dtype", fake.dtype, output.dtype
    yield "device", fake.device, output.device
    if None not in known and output.numel() > 0:
        strides = zip(output.shape, fake.stride(), output.stride())
        # The stride of a dimension of size 1 means nothing.
        differ = any(size > 1 and one != other for size, one, other in strides)
        yield "stride", fake.stride() if differ else output.stride(), output.stride()


# -------------------------------------------------------------------------------------- compiled


BACKENDS = {"cpu": "inductor", "foo": "aot_eager"}


@contextlib.contextmanager
def fresh_compiler() -> Iterator[None]:
    """Nothing that another check compiled, in memory or on disk, and nothing left for the next."""
    import torch._functorch.config
    import torch._inductor.config

    torch.compiler.reset()
    with (
        # A graph that was kept on disk still calls operators with the schemas of its day.
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
    ):
        yield
    torch.compiler.reset()


def doubled(value: Any) -> Any:
    """Tensors that may have gradients times two, which is exact."""
    if isinstance(value, (list, tuple)):
        return [doubled(element) for element in value]
    if isinstance(value, Tensor) and has_gradients(value.dtype):
        return value * 2
    return value


def compiled(case: Case, **options: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The operator between others, so that there is a graph around it; eager and compiled."""
    operator = case.spec.function

    def function(inputs: Any, keywords: Any) -> list[Any]:
        arguments = [doubled(value) for value in inputs]
        outputs = operator(*arguments, **{name: doubled(value) for name, value in keywords.items()})
        return [doubled(output) for output in as_tuple(outputs)]

    backend = BACKENDS[case.device]
    return function, torch.compile(function, backend=backend, fullgraph=True, **options)


def check_compiled(
    case: Case, sample: Sample, eager: Callable[..., Any], graph: Callable[..., Any]
) -> None:
    """Forward with and without gradients, and backward."""
    keywords = dict(sample.keywords)
    with torch.no_grad():
        expected = tuple(tensors_in(eager(sample.inputs, keywords)))
        with failing_as("torch.compile(fullgraph=True)"):
            outputs = tuple(tensors_in(graph(sample.inputs, keywords)))
    check_compiled_outputs(case, sample, outputs, expected)
    if case.dtype in differentiable(case.spec):
        check_compiled_gradients(case, sample.requiring_grad(), expected, graph)


def check_compiled_outputs(case: Case, sample: Sample, outputs: Tensors, expected: Tensors) -> None:
    """Bit for bit, unless the operator is made of others, which a compiler may change."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(case.spec.name, "CompositeImplicitAutograd"):
        halves = tuple(output / 2 if has_gradients(output.dtype) else output for output in outputs)
        check_outputs(case.spec, sample.map(doubled), case.dtype, halves)
    else:
        same("compiled, the outputs differ", outputs, expected)


def check_compiled_gradients(
    case: Case, leaves: Sample, expected: Tensors, graph: Callable[..., Any]
) -> None:
    """A compiler may have formulas round otherwise: they are compared with the reference's."""
    with failing_as("torch.compile(fullgraph=True), where a gradient is needed,"):
        outputs = tuple(tensors_in(graph(leaves.inputs, dict(leaves.keywords))))
        plain = tuple(output.detach() for output in outputs)
        check_compiled_outputs(case, leaves, plain, expected)
        require_history(case, leaves, outputs)
        cotangents = cotangents_for(outputs)
        gradients = gradients_of(outputs, leaves.differentiable(), cotangents)
    # Of 2 f(2 x): the gradients of f at 2 x, for twice the cotangents, times 2.
    inner = leaves.map(lambda tensor: doubled(tensor.detach())).requiring_grad()
    halves = tuple(gradient / 2 for gradient in gradients)
    names = differentiable_names(case.spec, inner)
    check_gradients(case.spec, inner, halves, tuple(map(doubled, cotangents)), names)


@check(dtypes=first, names=essential)
def compiled_graph(case: Case) -> None:
    with fresh_compiler():
        check_compiled(case, case.sample(), *compiled(case, dynamic=False))


@check(dtypes=first, names=no_name, layouts=lambda spec: (reversed_dimensions, inside_padding))
def compiled_for_layouts(case: Case) -> None:
    with fresh_compiler():
        check_compiled(case, case.sized(6), *compiled(case, dynamic=False))


@check(dtypes=single_and_brain, names=no_name)
def compiled_for_dynamic_shapes(case: Case) -> None:
    """One graph serves all sizes."""
    with fresh_compiler():
        functions = compiled(case, dynamic=True)
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


# ----------------------------------------------------------------------------- threads, devices


@check(dtypes=lambda spec: single_and_brain(spec) if spec.large is not None else (), names=no_name)
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


@check(dtypes=first, names=no_name, devices=second_foo)
def second_device(case: Case) -> None:
    """As on the first."""
    outputs = run(case, case.sized(5))
    for position, output in enumerate(outputs):
        if output.device != torch.device(case.device):
            raise AssertionError(
                f"output {position} is on {output.device}, its inputs are on {case.device}"
            )
    there = dataclasses.replace(case, device="foo:0")
    expected = tuple(output.cpu() for output in run(there, there.sized(5)))
    same("the outputs differ", tuple(output.cpu() for output in outputs), expected)
