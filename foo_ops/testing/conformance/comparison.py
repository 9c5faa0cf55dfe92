"""Bring samples to a device, and compare results and fake tensors with the CPU."""

from collections.abc import Callable
from typing import Any

import torch

from foo_ops.compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    SampleInput,
    default_tolerances,
    pytree,
)

# ------------------------------------------------------------------------------------------ results

# Bring samples to a device, and compare results with the CPU.


# On foo these are own kernels, which round differently from the CPU's, like all foo:: operators.
OWN_PRODUCTS = {
    "aten::addmm",
    "aten::addmv",
    "aten::baddbmm",
    "aten::bmm",
    "aten::mm",
}

# torch chooses the steps of this loss by the device's name.
OTHER_STEPS = {"nn.LinearCrossEntropyLoss"}

# In units of the largest element's last place.
ALLOWED_ROUNDINGS = 8
# If the CPU's result is further from that in float64, the other may be as many times as far from
# the CPU's: float32 gradients of nn.MultiheadAttention have lost 8 of their 24 bits on both.
ALLOWED_TIMES = 4


# Their arguments are on the CPU, whatever the device.
HOST_ARGUMENTS = {"tensor_split"}

# Their results are uninitialised memory.
UNINITIALIZED = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}

# Devices that draw the same random numbers as the CPU.
SAME_NUMBERS = {"cpu", "foo"}

# The device under test, and the name of the current case.
_device = torch.device("cpu")
_current = ""


def choose_device(name: str) -> None:
    global _device
    _device = torch.device(name)


def begin(name: str) -> None:
    """Note which operator or module is compared next."""
    global _current
    _current = name
    if _device.type == "foo":
        torch.foo.reset_operator_counts()  # type: ignore[attr-defined]


def rounds_otherwise() -> bool:
    """Return whether the case used kernels that round differently from the CPU's.

    foo counts which kernels ran. Other devices have their own kernels for everything.
    """
    if _device.type != "foo":
        return True
    counts = torch.foo.operator_counts().items()  # type: ignore[attr-defined]
    ran = {name for name, count in counts if count.own > 0}
    return _current in OTHER_STEPS or any(
        name.startswith("foo::") or name.partition(".")[0] in OWN_PRODUCTS for name in ran
    )


def is_there(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == _device.type


def to_device(value: Any) -> Any:
    """Copy a tensor with strides, storage, pending conjugation and requires_grad."""
    if isinstance(value, torch.nn.Module):
        return value.to(_device)
    if isinstance(value, torch.device) or (isinstance(value, str) and value == "cpu"):
        return _device
    if isinstance(value, torch.Generator):
        return torch.Generator(_device).manual_seed(value.initial_seed())
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout != torch.strided or value.is_quantized or value.is_nested:
        return value.detach().to(_device, copy=True).requires_grad_(value.requires_grad)
    detached = value.detach()
    if detached.is_conj():
        result = to_device(detached.conj()).conj()
    elif detached.is_neg():
        result = to_device(detached._neg_view())._neg_view()
    else:
        storage = detached.untyped_storage()
        memory = torch.empty(0, dtype=torch.uint8).set_(storage).to(_device, copy=True)
        memory = memory[: len(memory) // value.itemsize * value.itemsize].view(value.dtype)
        result = memory.as_strided(detached.size(), detached.stride(), detached.storage_offset())
    return result.requires_grad_(value.requires_grad)


def leaf(value: Any) -> Any:
    """Return a tensor without autograd history, which some samples have."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def mapper(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Memoize a function by tensor, so that a tensor that occurs twice maps to one result."""
    results: dict[int, Any] = {}

    def call(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return function(value)
        if id(value) not in results:
            results[id(value)] = function(value)
        return results[id(value)]

    return call


def sample_there(op: Any, sample: SampleInput) -> SampleInput:
    result = map_sample(mapper(to_device), sample)
    if op.name in HOST_ARGUMENTS:
        result.args = sample.args
    return result


def map_sample(function: Callable[[Any], Any], sample: SampleInput) -> SampleInput:
    """Map tensors, devices and generators; the sample's own method maps tensors only."""
    result = SampleInput(
        pytree.tree_map(function, sample.input),
        args=pytree.tree_map(function, sample.args),
        kwargs=pytree.tree_map(function, sample.kwargs),
    )
    result.output_process_fn_grad = sample.output_process_fn_grad
    result.broadcasts_input = sample.broadcasts_input
    return result


# The state of the CPU's generator at the start of each call; no call on another device may change
# it.
SEEDED = torch.manual_seed(0).get_state()


def outcome(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return a function's result or its error. Random numbers start at the same seed."""
    torch.manual_seed(0)
    try:
        return function(), None
    except Exception as error:
        return None, error


def tolerance(expected: torch.Tensor, error: float) -> dict[str, Any]:
    """Return tolerances for assert_close: torch's own, or wider if large elements round more.

    ``error`` is how far the CPU's result is from that in float64, or 0.
    """
    if not (expected.is_floating_point() and rounds_otherwise()):
        return {}
    finite = expected[expected.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    rtol, atol = default_tolerances(expected.dtype)
    rounding = torch.finfo(expected.dtype).eps * largest
    return {
        "rtol": rtol,
        "atol": max(atol, ALLOWED_ROUNDINGS * rounding, ALLOWED_TIMES * error),
    }


def compare(
    actual: Any,
    expected: Any,
    what: str,
    *,
    values: bool = True,
    exact: Callable[[], Any] | None = None,
) -> None:
    """Compare results with those of the CPU.

    Args:
        values: compare the values, too, and not only dtypes, sizes and strides.
        exact: returns the results in float64. It is called where values are not close.
    """
    actual_leaves, expected_leaves = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
    assert len(actual_leaves) == len(expected_leaves), f"{what}: other number of results"
    for place, (one, other) in enumerate(zip(actual_leaves, expected_leaves)):
        if not isinstance(other, torch.Tensor):
            # A dtype, a number or a size; devices differ by design.
            assert isinstance(other, torch.device) or one == other or one != one, (
                f"{what}: {one} instead of {other}"
            )
            continue
        try:
            compare_tensors(one, other, what, values)
        except AssertionError:
            if exact is None or not other.is_floating_point():
                raise
            error = (other.detach() - pytree.tree_leaves(exact())[place].detach()).abs()
            compare_tensors(one, other, what, values, error.nan_to_num(0.0, 0.0, 0.0).max().item())


def compare_tensors(
    actual: Any, expected: torch.Tensor, what: str, values: bool, error: float = 0.0
) -> None:
    assert isinstance(actual, torch.Tensor), f"{what}: {type(actual)} instead of a tensor"
    assert is_there(actual), f"{what}: result on {actual.device}"
    for attribute in ("dtype", "layout", "requires_grad"):
        one, other = getattr(actual, attribute), getattr(expected, attribute)
        assert one == other, f"{what}: {attribute} {one} instead of {other}"
    if expected.is_nested:
        compare(list(actual.unbind()), list(expected.unbind()), what)
        return
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape} not {expected.shape}"
    if expected.layout == torch.strided:
        assert actual.stride() == expected.stride(), f"{what}: strides {actual.stride()}"
    if values:
        torch.testing.assert_close(
            actual.detach().cpu(),
            expected.detach(),
            equal_nan=True,
            **tolerance(expected.detach(), error),
            msg=lambda message: f"{what}: {message}",
        )


def agree(
    there: Callable[[], Any],
    on_cpu: Callable[[], Any],
    what: str,
    *,
    values: bool = True,
    exact: Callable[[], Any] | None = None,
) -> tuple[Any, Any] | None:
    """Check that both results are the same, as `compare` does; return them, or None if both raise.

    What is random may be so otherwise in float64.
    """
    expected, expected_error = outcome(on_cpu)
    is_random = not torch.equal(torch.get_rng_state(), SEEDED)
    actual, error = outcome(there)
    if _device.type != "cpu":
        assert torch.equal(torch.get_rng_state(), SEEDED), f"{what}: draws from the CPU's generator"
    values = values and not (is_random and _device.type not in SAME_NUMBERS)
    if expected_error is not None:
        assert error is not None, f"{what}: only the cpu raises {expected_error!r}"
        return None
    if error is not None:
        raise AssertionError(f"{what}: raises {error!r}") from error
    compare(actual, expected, what, values=values, exact=None if is_random else exact)
    return actual, expected


# ------------------------------------------------------------------------------------- fake tensors

# Check that fake tensors predict sizes and strides of results, for torch.compile.


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def to_channels_last(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return value
    memory_format = CHANNELS_LAST.get(value.dim(), torch.contiguous_format)
    return value.detach().contiguous(memory_format=memory_format)


def _layouts(result: Any) -> list[Any]:
    return [
        (leaf.dtype, tuple(leaf.shape), leaf.stride())
        for leaf in pytree.tree_leaves(result)
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not leaf.is_nested
    ]


def check_announced(result: Any, call_with: Callable[[Any], Any], what: str) -> None:
    """Compare a result's layouts with fake tensors; ``call_with`` maps a call's tensors."""
    mode = FakeTensorMode()

    def to_fake(value: Any) -> Any:
        return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    call = call_with(to_fake)
    try:
        with mode:
            announced = call()
    except (DataDependentOutputException, DynamicOutputShapeException):
        return  # depends on values, which fake tensors do not have
    actual, expected = _layouts(result), _layouts(announced)
    assert actual == expected, f"{what}: layout {actual}, announced {expected}"
