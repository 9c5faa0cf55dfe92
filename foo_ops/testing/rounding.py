"""Estimates of rounding errors."""

from __future__ import annotations

import math

import torch


def roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def smallest(dtype: torch.dtype) -> float:
    """Return the smallest positive number; half of it is the error of subnormal numbers."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def compute_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums are accumulated in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def roundings(count: int) -> float:
    """Return the number of roundings to allow for in a sum or product of ``count`` terms.

    There are at most ``count``. Since they are independent, their total exceeds ``8 * sqrt(count)``
    roundings with a probability below 3e-14 (Higham and Mary 2019, A new approach to probabilistic
    rounding error analysis, theorem 2.4 with lambda = 8).
    """
    return min(count, 8 * math.sqrt(count))
