"""Compare dtypes that an operator has on CUDA and not on the CPU with the CPU in a wider dtype."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.testing._comparison import default_tolerances
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils._pytree import tree_leaves, tree_map

from foo_ops.testing.conformance.comparison import (
    is_there,
    leaf,
    map_sample,
    mapper,
    outcome,
    sample_there,
)
from foo_ops.testing.conformance.fakes import check_announced
from foo_ops.testing.conformance.samples import (
    call_of,
    differentiable,
    inputs_with_gradient,
    is_strided,
    name_of,
    weights_of,
)

WIDER = {
    torch.bool: torch.uint8,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.float32: torch.float64,
}
# The CPU has this one by the name of another variant.
AS_ON_CPU = {"nn.functional.batch_norm.without_cudnn"}

# The CPU draws other numbers in float64.
DRAWS_IN_FLOAT32 = {"nn.functional.rrelu"}

# The CPU has no kernel for them in any dtype; tests/device compares their values.
ON_CUDA_ALONE = {
    "torch.ops.aten._efficient_attention_forward",
    "torch.ops.aten._flash_attention_forward",
}

# In units of the last place of the largest element: gradients consist of several operators, and
# each rounds its results.
ALLOWED_ROUNDINGS = 8


def _without_nan(self: torch.Tensor) -> torch.Tensor:
    return torch.where(self.isnan(), 0, self)


def _nansum(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.sum(_without_nan(self), *args, **kwargs)


def _nanmean(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    counts = torch.sum(~self.isnan(), *args, **{**kwargs, "dtype": None})
    return torch.sum(_without_nan(self), *args, **kwargs) / counts


def _histc(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.histc(self.double(), *args, **kwargs)


# The CPU has no kernel for complex numbers, or for integers, of any width.
FORMULAS: dict[str, Callable[..., Any]] = {
    "histc": _histc,
    "nanmean": _nanmean,
    "nansum": _nansum,
}


def check_in_wider_dtype(
    op: Any, sample: Any, dtype: torch.dtype, what: str, gradients: bool
) -> None:
    sample = map_sample(mapper(leaf), sample)
    there = sample_there(op, sample)
    name = name_of(op)
    actual, error = outcome(call_of(op, there))
    if name in ON_CUDA_ALONE:
        if error is not None:
            raise AssertionError(f"{what}: raises {error!r}") from error
        _check_announced(op, there, actual, what)
        return
    wide = sample if name in AS_ON_CPU else _widened(sample, name in DRAWS_IN_FLOAT32)
    expected, expected_error = outcome(call_of(FORMULAS.get(op.name, op), wide))
    if expected_error is not None:
        assert error is not None, f"{what}: only the cpu raises {expected_error!r}"
        return
    if error is not None:
        raise AssertionError(f"{what}: raises {error!r}") from error
    _compare(actual, expected, what)
    _check_announced(op, there, actual, what)
    _check_variants(op, there, actual, what)
    if gradients:
        actual = there.output_process_fn_grad(actual)
        _check_gradients(actual, sample.output_process_fn_grad(expected), there, wide, what)


def _widened(sample: SampleInput, to_float32: bool) -> SampleInput:
    def wide(dtype: torch.dtype) -> torch.dtype:
        if to_float32 and dtype.is_floating_point:
            return torch.float32
        return WIDER.get(dtype, dtype)

    def widen(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return wide(value)
        if not isinstance(value, torch.Tensor):
            return copy.copy(value)
        return value.detach().to(wide(value.dtype)).requires_grad_(value.requires_grad)

    return map_sample(mapper(widen), sample)


def _compare(actual: Any, expected: Any, what: str) -> None:
    actual_leaves, expected_leaves = tree_leaves(actual), tree_leaves(expected)
    assert len(actual_leaves) == len(expected_leaves), f"{what}: other number of results"
    for one, other in zip(actual_leaves, expected_leaves):
        if isinstance(other, torch.Tensor):
            assert is_there(one), f"{what}: result on {one.device}"
            assert one.requires_grad == other.requires_grad, f"{what}: requires_grad"
            _compare_tensors(one.detach().cpu(), other.detach(), what)


def _compare_tensors(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if actual.layout != torch.strided:
        actual, expected = actual.to_dense(), expected.to_dense()
    rounded = expected.to(actual.dtype)
    options: dict[str, Any] = {}
    if actual.is_floating_point() or actual.is_complex():
        finite = rounded[rounded.isfinite()]
        largest = finite.to(expected.dtype).abs().max().item() if finite.numel() else 0.0
        rtol, atol = default_tolerances(actual.dtype)
        rounding = torch.finfo(actual.dtype).eps * largest
        options = {"rtol": rtol, "atol": max(atol, ALLOWED_ROUNDINGS * rounding)}
    if actual.is_complex():
        # Infinite ones have several forms, and assert_close has none of half precision.
        wanted = rounded.isfinite()
        actual, rounded = (each.to(torch.complex128)[wanted] for each in (actual, rounded))
    torch.testing.assert_close(
        actual, rounded, equal_nan=True, **options, msg=lambda message: f"{what}: {message}"
    )


def _check_announced(op: Any, there: SampleInput, result: Any, what: str) -> None:
    check_announced(result, lambda to_fake: call_of(op, map_sample(mapper(to_fake), there)), what)


def _check_variants(op: Any, there: SampleInput, result: Any, what: str) -> None:
    """Check that ``out=`` and in place give the same numbers."""
    there = map_sample(
        mapper(lambda each: each.detach() if isinstance(each, torch.Tensor) else each), there
    )
    if op.supports_out and is_strided(there):
        for make in (torch.zeros_like, lambda each: each.new_empty(0)):
            out = tree_map(make, result)
            written = call_of(op, there, out=out)()
            for one, other, expected in zip(*map(tree_leaves, (written, out, result))):
                assert one is other, f"{what}, out=: another tensor comes back"
                _assert_equal(one, expected, f"{what}, out=")
    in_place = op.get_inplace()
    if in_place is None or there.broadcasts_input or not isinstance(result, torch.Tensor):
        return
    target = there.input.clone()
    if target.dtype != result.dtype:
        return
    written = in_place(target, *there.args, **there.kwargs)
    assert written is target, f"{what}, in place: another tensor comes back"
    _assert_equal(written, result, f"{what}, in place")


def _assert_equal(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape} not {expected.shape}"
    equal = (actual == expected) | ((actual != actual) & (expected != expected))
    assert equal.all(), f"{what}: other values"


def _check_gradients(
    actual: Any, expected: Any, there: SampleInput, wide: SampleInput, what: str
) -> None:
    outputs, expected_outputs = differentiable(actual), differentiable(expected)
    inputs, wide_inputs = inputs_with_gradient(there), inputs_with_gradient(wide)
    if not expected_outputs or not wide_inputs:
        return
    weights = [weights_of(each.detach()) for each in outputs]
    wide_weights = [weight.cpu().to(each.dtype) for weight, each in zip(weights, expected_outputs)]
    _compare(
        torch.autograd.grad(outputs, inputs, weights, allow_unused=True),
        torch.autograd.grad(expected_outputs, wide_inputs, wide_weights, allow_unused=True),
        f"{what}, gradient",
    )
