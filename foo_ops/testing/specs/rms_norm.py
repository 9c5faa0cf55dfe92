"""foo::rms_norm, foo::add_rms_norm and their gradient in the table of operators."""

from __future__ import annotations

from typing import Any

import torch

from foo_ops.testing import reference
from foo_ops.testing.spec import Maker, OpSpec, Sample, random

HALF = (torch.bfloat16, torch.float16)


def sized(dtype: torch.dtype, size: int) -> Sample:
    return rms_norm_sample("sized", (2, size, size + 3))(dtype)


def rms_norm_sample(
    name: str, shape: tuple[int, ...], *, has_weight: bool = True, **keywords: Any
) -> Maker:
    def make(dtype: torch.dtype) -> Sample:
        input, weight = random(name, shape, shape[-1:], dtype=dtype)
        return Sample((input, weight if has_weight else None), keywords)

    return make


def wide_weight(dtype: torch.dtype) -> Sample:
    """Use a float32 weight, as models in half precision do in their norms."""
    input, weight = rms_norm_sample("wide weight", (5, 67))(dtype).inputs
    return Sample((input, weight.float()))


def special(dtype: torch.dtype) -> Sample:
    """Make rows with zeros, NaN, infinity, and numbers whose squares are large or small."""
    (input,) = random("special", (6, 19), dtype=dtype)
    input[0] = 0
    input[1, 3], input[2, 5] = torch.nan, torch.inf
    input[3] *= 1e-4
    input[4] *= 1e3
    return Sample((input, None))


RMS_NORM = OpSpec(
    operator=torch.ops.foo.rms_norm.default,
    reference=reference.rms_norm,
    dtypes=(torch.float32, torch.float64, *HALF),
    sized=sized,
    samples={
        "vector": rms_norm_sample("vector", (19,)),
        "no weight": rms_norm_sample("no weight", (3, 4, 33), has_weight=False, eps=0.25),
        "4-d": rms_norm_sample("4-d", (2, 3, 2, 17), eps=1e-5),
        "no columns": rms_norm_sample("no columns", (3, 0)),
        "wide weight": wide_weight,
        "special values": special,
    },
    essential=("size1", "size7", "no weight"),
    large=rms_norm_sample("large", (301, 1001)),
)


def add_sample(name: str, shape: tuple[int, ...], *, has_weight: bool = True) -> Maker:
    def make(dtype: torch.dtype) -> Sample:
        input, residual, weight = random(name, shape, shape, shape[-1:], dtype=dtype)
        return Sample((input, residual, weight if has_weight else None))

    return make


ADD_RMS_NORM = OpSpec(
    operator=torch.ops.foo.add_rms_norm.default,
    reference=reference.add_rms_norm,
    dtypes=RMS_NORM.dtypes,
    sized=lambda dtype, size: add_sample("sized", (2, size, size + 3))(dtype),
    samples={
        "vector": add_sample("vector", (19,)),
        "no weight": add_sample("no weight", (3, 4, 33), has_weight=False),
        "no columns": add_sample("no columns", (3, 0)),
    },
    essential=("size1", "size7", "no weight"),
    large=add_sample("large", (301, 1001)),
    # The sum is rounded before it is normalised.
    tolerances={torch.float16: (3e-3, 3e-3), torch.bfloat16: (2e-2, 2e-2)},
)
