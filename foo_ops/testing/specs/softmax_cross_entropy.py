"""foo::softmax_cross_entropy in the table of operators."""

from __future__ import annotations

from typing import Any

import torch

from foo_ops.testing import reference
from foo_ops.testing.spec import Maker, OpSpec, Sample, random


def loss_sample(
    name: str, rows: tuple[int, ...], classes: int, *, ignored: int = 0, **keywords: Any
) -> Maker:
    """Make a sample whose first ``ignored`` targets are the ignored index."""

    def make(dtype: torch.dtype) -> Sample:
        (logits,) = random(name, (*rows, classes), dtype=dtype)
        generator = torch.Generator().manual_seed(classes)
        target = torch.randint(max(classes, 1), rows, generator=generator)
        target.view(-1)[:ignored] = keywords.get("ignore_index", -100)
        return Sample((logits, target), keywords)

    return make


def special(dtype: torch.dtype) -> Sample:
    """Make logits with masks (one row entirely), NaN, infinity, and large differences."""
    logits, target = loss_sample("special", (6,), 19)(dtype).inputs
    target[:] = 3
    logits[0, 4:] = -torch.inf
    logits[1] = -torch.inf
    logits[2, 5], logits[3, 6] = torch.nan, torch.inf
    logits[4, 3], logits[5, 7] = -3e4, 3e4
    return Sample((logits, target))


def late_maximum(dtype: torch.dtype) -> Sample:
    """Make growing rows of several chunks, so that sums are rescaled again and again."""
    logits, target = loss_sample("late", (2,), 5001)(dtype).inputs
    return Sample((logits + torch.linspace(-50, 50, 5001).to(dtype), target))


def large_and_alike(dtype: torch.dtype) -> Sample:
    """Make logits so large, of either sign, that the logarithm of the sum is lost beside them."""
    logits, target = loss_sample("alike", (4,), 1501, label_smoothing=0.1)(dtype).inputs
    logits[:2] = (logits[:2] + 3e4).to(dtype)
    logits[2:] = (logits[2:] - 3e4).to(dtype)
    if dtype != torch.float16:
        logits[0], logits[2] = 1e9, -1e9
    return Sample((logits, target), {"label_smoothing": 0.1})


SOFTMAX_CROSS_ENTROPY = OpSpec(
    operator=torch.ops.foo.softmax_cross_entropy.default,
    reference=reference.softmax_cross_entropy,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sized=lambda dtype, size: loss_sample("sized", (2, size), size + 2)(dtype),
    samples={
        "0-d": loss_sample("0-d", (), 9),
        "one class": loss_sample("one class", (3,), 1),
        "several chunks": loss_sample("several chunks", (3, 2), 3001, label_smoothing=0.1),
        "late maximum": late_maximum,
        "ignored": loss_sample("ignored", (7,), 11, ignored=3, label_smoothing=0.2),
        "own ignored": loss_sample("own ignored", (7,), 11, ignored=3, ignore_index=5),
        "all smooth": loss_sample("all smooth", (4,), 33, label_smoothing=1.0),
        "special values": special,
        "large and alike": large_and_alike,
    },
    essential=("size1", "size7", "ignored"),
    large=loss_sample("large", (150,), 3001),
)
