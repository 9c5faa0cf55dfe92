"""Estimate how much a computation may round."""

from __future__ import annotations

import math

import torch


def roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def smallest(dtype: torch.dtype) -> float:
    """Return the smallest positive number: half of it is the error of subnormal numbers."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def compute_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums are accumulated in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def roundings(count: int) -> float:
    """Count the roundings to reckon with in a sum of ``count`` terms, or as many products.

    There are at most ``count``. Since they are independent of each other, they add up to more than
    those of ``8 * sqrt(count)`` with a probability below 3e-14 (Higham and Mary 2019, A new
    approach to probabilistic rounding error analysis, theorem 2.4 with lambda = 8).
    """
    return min(count, 8 * math.sqrt(count))
