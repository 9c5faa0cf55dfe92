"""Entries of the table of operators, and comparison of results with them.

Results are compared with a float64 reference, each element within its *error budget*: a bound in
float64. A spec may derive it from how often the operator may round and from the magnitude of the
rounded values, as the specs of this package do. Exceeding such a budget is a bug, or an algorithm
that rounds more often than the budget allows, which must then be argued in the spec. Without one,
the budget is a relative and an absolute tolerance that follow from the dtype (tolerance.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import math
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from foo_ops.compat import OpOverload
from foo_ops.testing.arguments import (
    copy_with_layout,
    functional_form,
    hint_at_junk,
    overload,
    tensors_in,
    with_each_tensor,
)
from foo_ops.testing.tolerance import (
    budget_of,
    gradient_tolerance,
    gradients_of,
    has_gradients,
    means,
    seeded,
    spreads_of_gradients,
    tolerance,
)

# ------------------------------------------------------------------------------ memoized references

# Samples are the same on every device, in most layouts, and in the checks of values, of gradients
# and of compiled graphs. A reference depends on nothing but the values of its arguments.


Tensors = tuple[Tensor, ...]

T = TypeVar("T")
MOST, MOST_BYTES = 4096, 16 << 20
"""Limits of the results kept per operator, and of their bytes. Neighbouring cases share them."""
# Types for which equal values mean equal results.
_CONSTANTS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


class Remembered:
    """Results by the contents of their arguments; the oldest are dropped.

    The latest result is kept, however large it is.
    """

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._results: OrderedDict[Hashable, Any] = OrderedDict()
        self._bytes = 0

    def result(self, compute: Callable[[], T], *given: Any) -> T:
        """Return the result of ``compute``, which is called only for new arguments.

        Args:
            compute: computes the result from ``given``; nobody may write to it.
            given: tensors, numbers, strings and dtypes, in lists and dicts, too. If there is
                anything else, such as a function, nothing is remembered.
        """
        key = _contents(given)
        if key is None:
            return compute()
        if key not in self._results:
            self._results[key] = compute()
            self._bytes += _size(self._results[key])
            self._forget()
        self._results.move_to_end(key)
        result: T = self._results[key]
        return result

    def _forget(self) -> None:
        while len(self._results) > 1 and (
            len(self._results) > self._most or self._bytes > self._most_bytes
        ):
            _, oldest = self._results.popitem(last=False)
            self._bytes -= _size(oldest)


_latest: tuple[Any, Remembered] = None, Remembered()


def results_of(spec: Any) -> Remembered:
    """Return the results of an operator's reference. Those of the operator before are forgotten:
    checks go through one after the other, and 16 MB of each were 300 MB in the end.
    """
    global _latest
    if _latest[0] is not spec:
        _latest = spec, Remembered()
    return _latest[1]


def _size(result: Any) -> int:
    """Return the total bytes of a result's tensors."""
    if isinstance(result, (list, tuple)):
        return sum(map(_size, result))
    return result.nbytes if isinstance(result, Tensor) else 0


def _contents(given: Any) -> Hashable | None:
    """Return a key that is equal for equal contents, bit by bit, or None if there is none."""
    if isinstance(given, Mapping):
        given = (tuple(given), *given.values())
    if isinstance(given, (list, tuple)):
        parts = tuple(map(_contents, given))
        return None if None in parts else (type(given), *parts)
    return _contents_of(given) if _has_contents(given) else None


def _has_contents(leaf: Any) -> bool:
    return isinstance(leaf, _CONSTANTS) or (
        isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_quantized
    )


def _contents_of(leaf: Any) -> Hashable:
    if not isinstance(leaf, Tensor):
        return type(leaf), repr(leaf)  # 1, 1.0 and True are equal.
    leaf_on_cpu = leaf.detach().cpu().resolve_conj().resolve_neg()
    numbers = leaf_on_cpu.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)
    # Processors have instructions for SHA-256: it takes less than half of blake2b's time.
    digest = hashlib.sha256(numbers.numpy().data).digest()
    return leaf.dtype, leaf.shape, leaf.requires_grad, digest


def expected_outputs(
    spec: Any, exact_sample: Any, dtype: torch.dtype
) -> tuple[Tensors, Tensors | None]:
    """Return the reference's outputs, and their budgets if the spec defines some."""
    expected: Tensors = exact_sample.call(spec.reference)
    budget = spec.output_budget
    return expected, None if budget is None else budget(exact_sample, dtype)


def expected_gradients(
    spec: Any, exact_sample: Any, dtypes: tuple[torch.dtype | None, ...], cotangents: Tensors
) -> tuple[Tensors, Sequence[Tensor], Tensors | None]:
    """Return the reference's gradients, and either their spreads or the spec's own budgets."""
    outputs = exact_sample.call(spec.reference)
    if not any(output.requires_grad for output in outputs):
        raise AssertionError(
            "no output of the reference requires a gradient: write it with torch's operators, or "
            "set differentiable=False in the OpSpec"
        )
    tensors = exact_sample.differentiable()
    expected = gradients_of(outputs, tensors, cotangents, once=False)
    if spec.gradient_budget is None:
        return expected, spreads_of_gradients(outputs, tensors, cotangents, expected), None
    with torch.no_grad():
        return expected, (), spec.gradient_budget(exact_sample, dtypes, cotangents)


# ------------------------------------------------------------- entries of the table, and comparison


Dtypes = tuple[torch.dtype | None, ...]
Maker = Callable[[torch.dtype], "Sample"]


@dataclasses.dataclass(frozen=True)
class Sample:
    """The arguments of one call, tensors on the cpu.

    Attributes:
        inputs: the positional arguments: tensors, lists of tensors, None, numbers.
        keywords: the keyword arguments.

    Example:
        >>> sample = Sample((torch.tensor([3.0, 4.0]),), {"dim": 0})
        >>> sample.call(torch.nn.functional.normalize)
        (tensor([0.6000, 0.8000]),)
    """

    inputs: tuple[Any, ...]
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def map(self, function: Callable[[Tensor], Tensor]) -> Sample:
        return Sample(
            with_each_tensor(function, self.inputs), with_each_tensor(function, self.keywords)
        )

    def to(self, device: str) -> Sample:
        """Return the sample on a device, with each tensor's strides and offset."""
        return self.map(lambda tensor: copy_with_layout(tensor, device))

    def exact(self) -> Sample:
        """Return the sample in float64 or complex128, on the cpu."""
        return self.map(exact)

    def requiring_grad(self) -> Sample:
        """Return the sample with new leaves, which require gradients if their dtype can."""
        return self.map(lambda t: t.detach().requires_grad_(has_gradients(t.dtype)))

    def tensors(self) -> list[Tensor]:
        return tensors_in((self.inputs, dict(self.keywords)))

    def differentiable(self) -> list[Tensor]:
        return [tensor for tensor in self.tensors() if tensor.requires_grad]

    def call(self, function: Callable[..., Any]) -> Tensors:
        """Return the tensors that a function returns, also those in lists."""
        return tuple(tensors_in(function(*self.inputs, **self.keywords)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpSpec:
    """An operator, its reference, and samples to check it with.

    Attributes:
        operator: an overload (``torch.ops.mylib.f.default``), ``torch.ops.mylib.f``, or the result
            of torch.library.custom_op.
        reference: the same function, in float64, on the cpu; its gradients come from autograd. For
            an operator that writes its arguments, it returns the operator's results, without the
            arguments themselves, and then the arguments' new values.
        dtypes: the dtypes of the samples.
        sized: returns a sample for a dtype and a size that every dimension of interest grows with.
            Sizes from 5 to 19 must be possible; with torch.compile one graph has to serve them all.
        sizes: the sizes that become samples, called ``size0`` and so on: empty, one, and odd.
        samples: other samples by name: functions of the dtype. torch's generator is seeded before
            each, so random numbers are the same in each call.
        devices: devices that the operator supports.
        essential: the names of a few small samples for slow checks: gradcheck, opcheck,
            compilation. By default those of ``sizes`` below 10.
        in_layouts: the names of the samples that are also checked in each of `LAYOUTS`. By default
            the essential ones.
        large: a sample that is cut into several tasks; its results have to be equal, bit by bit,
            for any number of threads. None skips this check.
        differentiable: whether the operator has gradients.
        tolerances: relative and absolute ones for some dtypes, instead of `TOLERANCES`.
        output_budget: instead of tolerances: returns how far each output may be from the
            reference's, given a sample in float64 and the dtype of the call.
        gradient_budget: likewise for each gradient, given a sample in float64, whose tensors
            require gradients as those of the call did, the dtypes of the call's positional tensors,
            and the gradients of the outputs.
        draws: for an operator that draws random numbers: the number of calls, with one seed each,
            whose mean is compared with the reference, which gives the mean of each result. The same
            seed must give the same bits.
        statistic: for a reference that gives the mean of something other than the outputs: a
            function of the tuple of outputs and the arguments of the call that returns a tensor or
            several.
        functional: for an out variant: the operator whose results have the shapes and dtypes that
            the out arguments need. See `variant`.

    Raises:
        ValueError: if ``essential`` or ``in_layouts`` names an unknown sample, or if there is
            nothing to check.

    Example:
        >>> from foo_ops.testing import OpSpec, Sample, check_operator
        >>> spec = OpSpec(
        ...     operator=torch.ops.foo.abs,
        ...     reference=torch.abs,
        ...     dtypes=(torch.float32, torch.bfloat16),
        ...     sized=lambda dtype, size: Sample((torch.randn(size, size + 1).to(dtype),)),
        ... )
        >>> check_operator(spec, checks=["values", "layouts"])
    """

    operator: OpOverload
    reference: Callable[..., Tensor | Tensors]
    dtypes: Sequence[torch.dtype]
    sized: Callable[[torch.dtype, int], Sample]
    sizes: Sequence[int] = (0, 1, 7, 67)
    samples: Mapping[str, Maker] = dataclasses.field(default_factory=dict)
    devices: Sequence[str] = ("cpu", "foo")
    essential: Collection[str] = ()
    in_layouts: Collection[str] = ()
    large: Maker | None = None
    differentiable: bool = True
    tolerances: Mapping[torch.dtype, tuple[float, float]] = dataclasses.field(default_factory=dict)
    output_budget: Callable[[Sample, torch.dtype], Tensors] | None = None
    gradient_budget: Callable[[Sample, Dtypes, Tensors], Tensors] | None = None
    draws: int = 0
    statistic: Callable[..., Tensor | Tensors] | None = None
    functional: OpOverload | None = None

    def __post_init__(self) -> None:
        makers = (partial(of_size, self.sized, size) for size in self.sizes)
        samples: dict[str, Maker] = {
            f"size{size}": maker for size, maker in zip(self.sizes, makers)
        }
        samples |= self.samples
        essential = self.essential or [f"size{size}" for size in self.sizes if size < 10]
        derived = {
            "operator": overload(self.operator),
            "samples": samples,
            "sizes": (),
            "essential": essential,
            "in_layouts": self.in_layouts or essential,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        self._validate()

    def _validate(self) -> None:
        for field in ("dtypes", "devices", "samples", "essential"):
            if not getattr(self, field):
                raise ValueError(f"OpSpec({self}): {field} must not be empty")
        if self.draws == 1 or self.draws < 0:
            raise ValueError(f"OpSpec({self}): draws must be 0 or at least 2, got {self.draws}")
        if self.statistic is not None and not self.draws:
            raise ValueError(
                f"OpSpec({self}): a statistic must be given together with draws, got none"
            )
        for field in ("essential", "in_layouts"):
            for name in getattr(self, field):
                if name not in self.samples:
                    raise ValueError(
                        f"OpSpec({self}): {field} must name samples, got {name!r}; the samples "
                        f"are {', '.join(self.samples)}"
                    )

    @property
    def name(self) -> str:
        return self.operator.name()

    def __repr__(self) -> str:
        return self.name

    @property
    def mutates(self) -> bool:
        """Whether the schema declares written arguments."""
        return self.operator._schema.is_mutable

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        """Return the operator's functional form, which writes no argument and can be compiled."""
        return functional_form(self.operator, self.functional)

    @property
    def remembered(self) -> Remembered:
        """Return the reference's results so far."""
        return results_of(self)

    def call(self, sample: Sample) -> Tensors:
        """Return the operator's results, then the arguments that it writes, as copies."""
        with seeded() if self.draws else contextlib.nullcontext():
            return sample.call(self.function)

    def variant(self, operator: Any, **changes: Any) -> OpSpec:
        """Return the spec of an in-place or out variant, with the essential samples.

        Args:
            operator: the variant. Out arguments need not be in the samples: they are created, full
                of junk, like the results of this operator. The out variant has no gradients.
            changes: attributes that differ from this spec's, such as ``dtypes``.

        Example:
            >>> from foo_ops.testing import ABS
            >>> ABS.variant(torch.ops.foo.abs_, dtypes=(torch.float32, torch.bfloat16))
            foo::abs_
            >>> ABS.variant(torch.ops.foo.abs.out)
            foo::abs.out
        """
        variant = overload(operator)
        names = {argument.name for argument in self.operator._schema.arguments}
        has_out = any(argument.name not in names for argument in variant._schema.arguments)
        derived: dict[str, Any] = {
            "operator": variant,
            "samples": {name: self.samples[name] for name in self.essential},
            "in_layouts": [name for name in self.in_layouts if name in self.essential],
        }
        if has_out:
            derived |= {"functional": self.operator, "differentiable": False}
        return dataclasses.replace(self, **(derived | changes))


def of_size(sized: Callable[[torch.dtype, int], Sample], size: int, dtype: torch.dtype) -> Sample:
    return sized(dtype, size)


# ------------------------------------------------------------------------------------ comparing


def check_outputs(spec: OpSpec, sample: Sample, dtype: torch.dtype, outputs: Tensors) -> None:
    """Assert that the outputs for a sample are within their error budget.

    Example:
        >>> from foo_ops.testing import ABS
        >>> sample = Sample((torch.tensor([-1.0, 2.0]),))
        >>> check_outputs(ABS, sample, torch.float32, (torch.tensor([1.0, 3.0]),))
        Traceback (most recent call last):
        AssertionError: output 0 is wrong in 1 of 2 elements; the worst, at (1,), is 3.0 ...
    """
    if spec.draws:
        return  # `check_means` compares their means.
    detached = sample.map(Tensor.detach)
    expected, budgets = spec.remembered.result(
        lambda: expected_outputs(spec, detached.exact(), dtype),
        *("outputs", detached.inputs, detached.keywords, dtype),
    )
    if len(outputs) != len(expected):
        raise AssertionError(
            f"the operator has {len(outputs)} outputs, but its reference {len(expected)}"
            + ", counting the arguments that are written" * spec.mutates
        )
    if budgets is None:
        allowed = partial(tolerance, spec.tolerances)
        budgets = tuple(map(allowed, outputs, expected))
    assert len(budgets) == len(outputs)
    for position, (output, value, budget) in enumerate(zip(outputs, expected, budgets)):
        assert_within(f"output {position}", output, value, budget, "output_budget=")


def check_gradients(
    spec: OpSpec,
    sample: Sample,
    gradients: Sequence[Tensor],
    cotangents: Tensors,
    names: Sequence[str] = (),
) -> None:
    """Assert that the gradients of a sample's tensors are within their error budget.

    Args:
        gradients: gradients of the tensors of ``sample`` that require one, in order.
        cotangents: the gradients of the operator's outputs that they were computed from.
        names: names of these tensors, for the message.

    Example:
        >>> from foo_ops.testing import ABS
        >>> sample = Sample((torch.tensor([-1.0, 2.0]),)).requiring_grad()
        >>> outputs = ABS.call(sample)
        >>> cotangents = cotangents_for(outputs)
        >>> gradients = torch.autograd.grad(outputs, sample.tensors(), cotangents)
        >>> check_gradients(ABS, sample, gradients, cotangents)
    """
    if spec.draws:
        return  # `check_mean_gradients` compares their means.
    dtypes = tuple(tensor.dtype if isinstance(tensor, Tensor) else None for tensor in sample.inputs)

    def compute() -> tuple[Tensors, Sequence[Tensor], Tensors | None]:
        exact_sample = sample.map(lambda t: exact(t).detach().requires_grad_(t.requires_grad))
        return expected_gradients(spec, exact_sample, dtypes, tuple(map(exact, cotangents)))

    expected, spreads, budgets = spec.remembered.result(
        compute, *("gradients", sample.inputs, sample.keywords, dtypes, cotangents)
    )
    if budgets is None:
        allowed = partial(gradient_tolerance, spec.tolerances)
        budgets = tuple(map(allowed, gradients, expected, spreads))
    assert len(gradients) == len(expected) == len(budgets)
    names = names or [str(position) for position in range(len(gradients))]
    for name, gradient, value, budget in zip(names, gradients, expected, budgets):
        assert_within(f"the gradient of {name}", gradient, value, budget, "gradient_budget=")


def cotangents_for(outputs: Tensors) -> Tensors:
    """Draw gradients of the outputs, equal for equal shapes on every device.

    They are zeros for outputs that can have none, such as indices.

    Example:
        >>> values, indices = cotangents_for(torch.ones(4).topk(2))
        >>> values.shape, indices
        (torch.Size([2]), tensor([0, 0]))
    """
    generator = torch.Generator().manual_seed(len(outputs))
    return tuple(
        torch.randn(output.shape, dtype=output.dtype, generator=generator).to(output.device)
        if has_gradients(output.dtype)
        else torch.zeros_like(output)
        for output in outputs
    )


def assert_within(
    what: str, actual: Tensor, expected: Tensor, budget: Tensor, knob: str = ""
) -> None:
    """Assert |actual - expected| <= budget, element by element; NaN and infinities must agree."""
    if actual.shape != expected.shape:
        raise AssertionError(
            f"{what} must have shape {tuple(expected.shape)} as the reference has, got "
            f"{tuple(actual.shape)}"
        )
    value, expected = (t.byte() if t.dtype == torch.bool else t for t in (exact(actual), expected))
    error = (value - expected).abs()
    is_within = error <= budget
    if is_within.all():  # A shortcut: the rest takes three times as many operations.
        return
    wrong = ~((value == expected) | is_within | (value.isnan() & expected.isnan()))
    if not wrong.any():
        return
    excess = torch.where(wrong, (error / budget).nan_to_num(math.inf, math.inf), 0)
    worst = excess.flatten().argmax()
    place = tuple(int(index) for index in torch.unravel_index(worst, excess.shape))
    allowed_by = f" (by tolerances= or {knob} of the OpSpec)" if knob else ""
    raise AssertionError(
        f"{what} is wrong in {int(wrong.sum())} of {wrong.numel()} elements; the worst, at "
        f"{place}, is {value[place].item()} instead of {expected[place].item()}, "
        f"where {budget[place].item():.3g} is allowed"
        + (hint_at_junk(actual.cpu()[wrong]) or allowed_by)
    )


def exact(tensor: Tensor) -> Tensor:
    """Return the same values in float64 or complex128; integers and bool stay as they are."""
    tensor = tensor.cpu()
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


# -------------------------------------------------------------------------------------- samples


def random(name: str, *shapes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Draw normal random tensors, equal for equal names in every process and dtype.

    Example:
        >>> query, key = random("my sample", (2, 3), (5, 3), dtype=torch.bfloat16)
        >>> again, _ = random("my sample", (2, 3), (5, 3), dtype=torch.bfloat16)
        >>> torch.equal(query, again)
        True
    """
    wide = torch.complex128 if dtype.is_complex else torch.float64
    drawn = _drawn(name, tuple(map(tuple, shapes)), wide)
    return [tensor.to(dtype, copy=True) for tensor in drawn]


@functools.lru_cache(1024)
def _drawn(name: str, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> list[Tensor]:
    """Draw the numbers once for all checks, dtypes and devices."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return [torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes]


# ------------------------------------------------------ means of operators that draw random numbers


def check_means(spec: OpSpec, sample: Sample, dtype: torch.dtype) -> None:
    """Assert that the mean results of an operator that draws random numbers are correct."""
    detached = sample.map(Tensor.detach)
    expected = detached.exact().call(spec.reference)

    def call() -> Sequence[Tensor]:
        outputs = detached.call(spec.function)
        if spec.statistic is None:
            return outputs
        return tensors_in(spec.statistic(outputs, *detached.inputs, **detached.keywords))

    found = means(call, spec.draws)
    if len(found) != len(expected):
        raise AssertionError(
            f"the {'statistic' if spec.statistic else 'call'} gives {len(found)} tensors, but the "
            f"reference {len(expected)}"
        )
    for position, (mean, value) in enumerate(zip(found, expected)):
        what = f"the mean of {'statistic' if spec.statistic else 'output'} {position}"
        budget = budget_of(mean, dtype, exact(value), spec.tolerances)
        assert_within(f"{what} over {spec.draws} seeds", mean.value(), exact(value), budget)


def check_mean_gradients(
    spec: OpSpec, sample: Sample, dtype: torch.dtype, names: Sequence[str]
) -> None:
    """Assert that the mean gradients of such an operator are those of the reference."""
    exact_sample = sample.exact().requiring_grad()
    outputs = exact_sample.call(spec.reference)
    cotangents = cotangents_for(outputs)
    expected = gradients_of(outputs, exact_sample.differentiable(), cotangents)

    def call() -> Sequence[Tensor]:
        results = sample.call(spec.function)
        given = [c.to(result) for c, result in zip(cotangents, results)]
        return gradients_of(results, sample.differentiable(), given)

    for name, mean, value in zip(names, means(call, spec.draws), expected):
        budget = budget_of(mean, dtype, value, spec.tolerances)
        what = f"the mean of the gradient of {name} over {spec.draws} seeds"
        assert_within(what, mean.value(), value, budget)
