"""Lists the cases: combinations of devices, dtypes, samples and layouts.

A check is a function of a `Case` with the decorator `check`, which says which cases it runs for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from foo_ops import _C
from foo_ops.library.kernels import check_bounds
from foo_ops.library.operators import dtype_name
from foo_ops.testing.arguments import LAYOUTS, Layout, expanded
from foo_ops.testing.spec import OpSpec, Sample
from foo_ops.testing.tolerance import has_gradients

# ----------------------------------------------------------------------------- state during a check


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Seed torch, so that samples from torch.randn are the same in each call."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(0)
    try:
        yield
    finally:
        torch.set_rng_state(state)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Set the number of threads; for small tensors 1, since more would mostly wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill uninitialised memory with NaN, or with the largest integer."""
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
def without_cached_fakes() -> Iterator[None]:
    """Disable torch's cache of fake tensors, which costs more than it saves with symbolic sizes."""
    from foo_ops.compat import dynamo_config

    with dynamo_config.patch(fake_tensor_cache_enabled=False):
        yield


Damage = tuple[int, int, int]
"""The address and size of an allocation, and the offset of the byte written outside of it."""


@contextlib.contextmanager
def guarded_memory() -> Iterator[list[Damage]]:
    """Put guard bytes around CPU memory; at the end, the list has the damaged ones.

    Offsets before the memory are negative. Memory of foo is not guarded.
    """
    damages: list[Damage] = []
    _C.guard_memory()
    try:
        yield damages
    finally:
        damages += _C.end_guarded_memory()


@contextlib.contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Turn other errors into an AssertionError that says what raised them."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{what} raised {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def fresh_compiler() -> Iterator[None]:
    """Ignore graphs that other checks compiled, in memory or on disk, and leave none behind."""
    from foo_ops.compat import dynamo_config, functorch_config, inductor_config, symbols_config

    torch.compiler.reset()
    with (
        # Graphs cached on disk call operators with the schemas of their time.
        functorch_config.patch(enable_autograd_cache=False),
        # The compiler's own vectorized loops are not under test, and take a third of its time.
        inductor_config.patch({"fx_graph_cache": False, "cpp.simdlen": 1}),
        dynamo_config.patch(capture_dynamic_output_shape_ops=True),
        without_cached_fakes(),
        # Otherwise sizes that are equal by accident, such as the 9 of a fixed weight, become one
        # symbol.
        symbols_config.patch(use_duck_shape=False),
    ):
        yield
    torch.compiler.reset()


# --------------------------------------------------------------------------------- cases and checks


@dataclasses.dataclass(frozen=True)
class Case:
    """One check of an operator. Calling it runs the check.

    Attributes:
        check: the name of the check.
        spec: the operator.
        device: where the operator is called.
        dtype: the sample's dtype.
        name: the sample's name; empty for checks without one.
        layout: applied to the sample's tensors.
        gradient: whether the tensors require gradients.
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
        """Name the case, such as ``rms_norm-foo-float32-opcheck-size7-gradient``."""
        words = [self._operator_name(), self.device, dtype_name(self.dtype), self.check, self.name]
        words += [self.layout.__name__] if self.layout is not None else []
        words += ["gradient"] if self.gradient else []
        return "-".join(word for word in words if word)

    def _operator_name(self) -> str:
        return self.spec.name.partition("::")[2].removesuffix(".default")

    def sample(self) -> Sample:
        """Return the sample on the device, in the layout."""
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
            AssertionError: it says what is wrong with the operator.
        """
        # pytest hides this frame: the operator's author needs the fault, not the check's internals.
        __tracebackhide__ = True
        try:
            with threads(1), check_bounds():
                CHECKS[self.check].run(self)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.treatment()}") from error.__cause__

    def treatment(self) -> str:
        """Describe what the check does to the sample."""
        sample = f"sample {self.name!r}" if self.name else "sample"
        words = [f"The {sample}, {dtype_name(self.dtype)} on {self.device}, was"]
        if self.layout is not None:
            first_line, *_ = (self.layout.__doc__ or "").splitlines()
            words.append(f"laid out by {self.layout.__name__} ({first_line.rstrip('.')}),")
        words.append(CHECKS[self.check].treatment)
        return " ".join(words) + ", requiring gradients" * self.gradient + "."


Run = Callable[[Case], None]
Select = Callable[[OpSpec], Iterable[Any]]
Predicate = Callable[[Case], bool]


@dataclasses.dataclass(frozen=True)
class Check:
    """A check, and the cases that it runs for.

    Attributes:
        treatment: a description of what it does to the sample, after "the sample was".
        run: raises AssertionError.
        dtypes, names, layouts, gradients, devices: select the values to combine, for a spec.
        quick: selects the cases that find most in the least time.
    """

    treatment: str
    run: Run
    dtypes: Select
    names: Select
    layouts: Select
    gradients: Select
    devices: Select
    quick: Predicate

    def cases(self, name: str, spec: OpSpec) -> Iterator[Case]:
        axes = (self.devices, self.dtypes, self.names, self.layouts, self.gradients)
        for values in itertools.product(*(axis(spec) for axis in axes)):
            yield Case(name, spec, *values)


CHECKS: dict[str, Check] = {}


def cases(
    spec: OpSpec, checks: Collection[str] | None = None, *, quick: bool = False
) -> list[Case]:
    """List all cases of an operator, sample by sample.

    Args:
        spec: the operator.
        checks: names of checks in ``CHECKS``; without it all.
        quick: only the third that finds most: each sample in float32 and bfloat16 on the first
            device, the essential ones in other dtypes and on other devices, fake kernels in one
            dtype, and compiled graphs on the last device.

    Raises:
        ValueError: for an unknown check.

    Example:
        >>> from foo_ops.testing import ABS
        >>> [case.id for case in cases(ABS, ["gradcheck"])][:2]
        ['abs-cpu-float64-gradcheck-0-d', 'abs-cpu-float64-gradcheck-empty inside']
    """
    names = CHECKS if checks is None else checks
    for name in names:
        if name not in CHECKS:
            raise ValueError(f"cases: checks must be among {', '.join(CHECKS)}, got {name!r}")
    listed = [
        case
        for name in names
        for case in CHECKS[name].cases(name, spec)
        if not quick or CHECKS[name].quick(case)
    ]
    # Neighbouring cases share reference results (`Remembered`), and pytest's workers get
    # neighbours.
    positions = {name: position for position, name in enumerate(("", *spec.samples))}
    return sorted(listed, key=lambda it: (spec.dtypes.index(it.dtype), positions[it.name]))


# ---------------------------------------------------------------------------- what is run quickly


def always(case: Case) -> bool:
    return True


def on_first_device(case: Case) -> bool:
    return case.device == case.spec.devices[0]


def on_last_device(case: Case) -> bool:
    """Choose foo, where graphs are only traced: Inductor's C++ takes a second and more."""
    return case.device == case.spec.devices[-1]


def in_first_dtype(case: Case) -> bool:
    """Choose one dtype on the first device, since fake kernels do not depend on values."""
    return on_first_device(case) and case.dtype in first(case.spec)


def in_main_dtypes(case: Case) -> bool:
    """Choose float32 and bfloat16 on the first device, and the first of them on others."""
    main = single_and_brain(case.spec)
    return case.dtype in (main if on_first_device(case) else main[:1])


def most_samples(case: Case) -> bool:
    """Choose all samples in float32 and bfloat16, and the essential ones everywhere."""
    is_main = on_first_device(case) and case.dtype in single_and_brain(case.spec)
    return is_main or case.name in case.spec.essential


# ------------------------------------------------------------------------- what is run for what


def check(
    treatment: str,
    *,
    dtypes: Select = lambda spec: spec.dtypes,
    names: Select = lambda spec: spec.samples,
    layouts: Select = lambda spec: (None,),
    gradients: Select = lambda spec: (False,),
    devices: Select = lambda spec: spec.devices,
    quick: Predicate = in_main_dtypes,
) -> Callable[[Run], Run]:
    """Register a function in the table of checks, under its name; see `Check`."""

    def register(run: Run) -> Run:
        axes = (dtypes, names, layouts, gradients, devices)
        CHECKS[run.__name__] = Check(treatment, run, *axes, quick)
        return run

    return register


def differentiable(spec: OpSpec) -> list[torch.dtype]:
    return [dtype for dtype in spec.dtypes if spec.differentiable and has_gradients(dtype)]


def double_precision(spec: OpSpec) -> list[torch.dtype]:
    wide = (torch.float64, torch.complex128)
    return [dtype for dtype in differentiable(spec) if dtype in wide]


def first(spec: OpSpec) -> Sequence[torch.dtype]:
    return spec.dtypes[:1]


def first_if_differentiable(spec: OpSpec) -> list[torch.dtype]:
    return [dtype for dtype in first(spec) if dtype in differentiable(spec)]


def first_and_last(spec: OpSpec) -> list[torch.dtype]:
    """Choose the first and the last, which usually differ most."""
    return list(dict.fromkeys((spec.dtypes[0], spec.dtypes[-1])))


def brain(spec: OpSpec) -> Sequence[torch.dtype]:
    """Choose bfloat16, which formulas convert, or else the first dtype."""
    return [torch.bfloat16] if torch.bfloat16 in spec.dtypes else first(spec)


def single_and_brain(spec: OpSpec) -> list[torch.dtype]:
    """Choose float32 and bfloat16, or else the first dtype."""
    chosen = [dtype for dtype in (torch.float32, torch.bfloat16) if dtype in spec.dtypes]
    return chosen or list(first(spec))


def first_device(spec: OpSpec) -> Sequence[str]:
    return spec.devices[:1]


def essential(spec: OpSpec) -> Collection[str]:
    return spec.essential


def no_name(spec: OpSpec) -> tuple[str]:
    return ("",)


def in_layouts(spec: OpSpec) -> Collection[str]:
    return spec.in_layouts


def all_layouts(spec: OpSpec) -> list[Layout]:
    """Choose all layouts, but not expanded memory for operators that write."""
    return [layout for layout in LAYOUTS if not (spec.mutates and layout is expanded)]


def gradient_or_not(spec: OpSpec) -> tuple[bool, ...]:
    return (False, True) if spec.differentiable and not spec.mutates else (False,)
