"""Compute results in float64, and compare with them.

Two results of the same dtype are never compared: that leaves open which one is off, and how far
both are off differs from processor to processor.
"""

import copy
import math

import torch
from torch.overrides import TorchFunctionMode

RATIO = 1.5
"""Bound on our error over theirs: both results have roundings of their own."""


class Doubles(TorchFunctionMode):
    """Computes in float64 where a function converts to float32, as norms and softmaxes do."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args = [wider(argument) for argument in args]
        kwargs = {name: wider(argument) for name, argument in (kwargs or {}).items()}
        result = function(*args, **kwargs)
        assert not isinstance(result, torch.Tensor) or result.dtype != torch.float32, function
        return result


def wider(argument):
    return torch.float64 if argument is torch.float32 else argument


def exact_copy(module):
    """Copy the module to the cpu with its weights in float64, to be run under `Doubles`."""
    return copy.deepcopy(module).to("cpu", torch.float64)


def assert_near(actual, exact, dtype=None, roundings=16):
    """Check that no element is off by more than ``roundings`` roundings of the largest one.

    ``dtype``: the dtype that rounds, if it is not that of the result.
    """
    assert exact.dtype in (torch.float64, torch.complex128)
    largest = exact.abs().max().item() if exact.numel() else 1.0
    room = roundings * torch.finfo(dtype or actual.dtype).eps * largest
    torch.testing.assert_close(actual.cpu().to(exact.dtype), exact, rtol=0, atol=room)


def assert_as_near(ours, theirs, exact, roundings):
    """Check that each of our results is off by at most ``roundings``, and all of them together
    hardly more than theirs.
    """
    off, theirs_off = (
        [roundings_off(*pair) for pair in zip(results, exact, strict=True)]
        for results in (ours, theirs)
    )
    assert all(count <= roundings for count in off), f"off by {max(off):.3g} roundings"
    off, theirs_off = math.hypot(*off), math.hypot(*theirs_off)
    assert off <= RATIO * theirs_off + 1, f"off by {off:.3g} roundings, theirs by {theirs_off:.3g}"


def roundings_off(result, exact):
    """Return the norm of a tensor's error, in roundings of the norm of the exact tensor.

    The largest difference of a few thousand elements would only measure one element.
    """
    assert exact.dtype == torch.float64
    rounding = torch.finfo(result.dtype).eps * exact.norm().item()
    return (result.cpu().double() - exact).norm().item() / rounding


def units_in_the_last_place(actual, expected, dtype):
    """Return the largest error in ulps, less the reference's own half in float64."""
    last_place = torch.finfo(dtype).eps * torch.exp2(expected.abs().log2().floor())
    errors = (actual.double() - expected).abs() / last_place
    return errors.max().item() - (0.5 if dtype == torch.float64 else 0)
