"""foo::softmax_cross_entropy and foo::linear_cross_entropy in the table of operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foo_ops.testing import reference
from foo_ops.testing.spec import Dtypes, Maker, OpSpec, Sample, Tensors, random
from foo_ops.testing.tolerance import bound, compute_type, roundings, roundoff

# ----------------------------------------------------------------------- foo::softmax_cross_entropy


def logits_sample(
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


def special_logits(dtype: torch.dtype) -> Sample:
    """Make logits with masks (one row entirely), NaN, infinity, and large differences."""
    logits, target = logits_sample("special", (6,), 19)(dtype).inputs
    target[:] = 3
    logits[0, 4:] = -torch.inf
    logits[1] = -torch.inf
    logits[2, 5], logits[3, 6] = torch.nan, torch.inf
    logits[4, 3], logits[5, 7] = -3e4, 3e4
    return Sample((logits, target))


def late_maximum_of_logits(dtype: torch.dtype) -> Sample:
    """Make growing rows of several chunks, so that sums are rescaled again and again."""
    logits, target = logits_sample("late", (2,), 5001)(dtype).inputs
    return Sample((logits + torch.linspace(-50, 50, 5001).to(dtype), target))


def large_and_alike(dtype: torch.dtype) -> Sample:
    """Make logits so large, of either sign, that the logarithm of the sum is lost beside them."""
    logits, target = logits_sample("alike", (4,), 1501, label_smoothing=0.1)(dtype).inputs
    logits[:2] = (logits[:2] + 3e4).to(dtype)
    logits[2:] = (logits[2:] - 3e4).to(dtype)
    if dtype != torch.float16:
        logits[0], logits[2] = 1e9, -1e9
    return Sample((logits, target), {"label_smoothing": 0.1})


SOFTMAX_CROSS_ENTROPY = OpSpec(
    operator=torch.ops.foo.softmax_cross_entropy.default,
    reference=reference.softmax_cross_entropy,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sized=lambda dtype, size: logits_sample("sized", (2, size), size + 2)(dtype),
    samples={
        "0-d": logits_sample("0-d", (), 9),
        "one class": logits_sample("one class", (3,), 1),
        "several chunks": logits_sample("several chunks", (3, 2), 3001, label_smoothing=0.1),
        "late maximum": late_maximum_of_logits,
        "ignored": logits_sample("ignored", (7,), 11, ignored=3, label_smoothing=0.2),
        "own ignored": logits_sample("own ignored", (7,), 11, ignored=3, ignore_index=5),
        "all smooth": logits_sample("all smooth", (4,), 33, label_smoothing=1.0),
        "special values": special_logits,
        "large and alike": large_and_alike,
    },
    essential=("size1", "size7", "ignored"),
    large=logits_sample("large", (150,), 3001),
)


# ------------------------------------------------------------------------ foo::linear_cross_entropy

# An error of a logit is a relative error of its probability. The gradients of logits have that
# error and, as bfloat16, their own rounding; those of hidden, weight and bias are sums of products
# with them.


def hidden_sample(
    name: str,
    rows: tuple[int, ...],
    width: int,
    classes: int,
    *,
    has_bias: bool = True,
    ignored: int = 0,
    **keywords: Any,
) -> Maker:
    """Make a sample whose first ``ignored`` targets are the ignored index."""

    def make(dtype: torch.dtype) -> Sample:
        shapes = ((*rows, width), (classes, width), (classes,))
        hidden, weight, bias = random(name, *shapes, dtype=dtype)
        generator = torch.Generator().manual_seed(classes)
        target = torch.randint(max(classes, 1), rows, generator=generator)
        target.view(-1)[:ignored] = keywords.get("ignore_index", -100)
        inputs = (hidden, weight, target, bias) if has_bias else (hidden, weight, target)
        return Sample(inputs, keywords)

    return make


def special_hidden(dtype: torch.dtype) -> Sample:
    """Make masked classes, rows with NaN and infinity, and logits that are far apart."""
    hidden, weight, target, bias = hidden_sample("special", (6,), 5, 19)(dtype).inputs
    target[:] = 3
    bias[4:9], bias[10] = -torch.inf, 3e4
    hidden[1, 2], hidden[2, 4] = torch.nan, torch.inf
    hidden[4] *= 100
    return Sample((hidden, weight, target, bias))


def late_maximum(dtype: torch.dtype) -> Sample:
    """Make growing logits in several splits, so that sums are rescaled again and again."""
    hidden, weight, target, bias = hidden_sample("late", (3,), 4, 33_001)(dtype).inputs
    bias = (bias + torch.linspace(-50, 50, 33_001)).to(dtype)
    return Sample((hidden, weight, target, bias), {"label_smoothing": 0.1})


def error_of_logits(hidden: Tensor, weight: Tensor, logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Bound the errors of differences of logits and their logsumexp, relative to 1."""
    unit = roundoff(compute_type(dtype))
    sums = roundings(hidden.shape[-1] + 2) * reference.linear(hidden.abs(), weight.abs())
    # The 16 are for the functions, and the rounding of the logsumexp.
    error = unit * (sums + logits.abs() + logits.logsumexp(-1, keepdim=True).abs() + 16)
    error = error.nan_to_num(0.0, 0.0, 0.0)
    return 2 * error + error.amax(-1, keepdim=True)


def gradient_budget(
    sample: Sample, dtypes: Dtypes, cotangents: Tensors, *, roundings_of_logits: int = 1
) -> Tensors:
    """Bound the errors of the gradients of tensors that require one.

    If exponentials are kept, the gradients of logits are rounded twice.
    """
    hidden, weight, target, *bias = sample.inputs
    dtype = dtypes[0]
    assert dtype is not None
    logits = reference.linear(hidden, weight, *bias)
    if softcap := sample.keywords.get("softcap", 0.0):
        logits = softcap * torch.tanh(logits / softcap)
    is_ignored = target == sample.keywords.get("ignore_index", -100)
    of_loss, of_logsumexp, of_mean = (it.abs() for it in cotangents)
    slope = (of_loss + of_mean / (~is_ignored).sum()).masked_fill(is_ignored, 0).unsqueeze(-1)
    classes = logits.shape[-1]
    smoothing = sample.keywords.get("label_smoothing", 0.0)
    wanted = torch.nn.functional.one_hot(target.masked_fill(is_ignored, 0), classes)
    magnitude = logits.softmax(-1) * (slope + of_logsumexp.unsqueeze(-1))
    magnitude = magnitude + slope * ((1 - smoothing) * wanted + smoothing / classes)
    rounding = roundoff(dtype if dtype == torch.bfloat16 else compute_type(dtype))
    error = magnitude * error_of_logits(hidden, weight, logits, dtype)
    error = error + roundings_of_logits * magnitude * rounding
    products = (
        ("...v,vk->...k", (weight,), classes),
        ("...v,...k->vk", (hidden,), target.numel()),
        ("...v->v", (), target.numel()),
    )
    budgets = []
    for tensor, (formula, others, terms) in zip((hidden, weight, *bias), products):
        factors = [it.abs() for it in others]
        largest, off = (torch.einsum(formula, it, *factors) for it in (magnitude, error))
        # The sum of magnitudes bounds the value.
        if tensor.requires_grad:
            budgets.append(off + bound(largest, largest, terms, dtype))
    return tuple(budgets)


LINEAR_CROSS_ENTROPY = OpSpec(
    operator=torch.ops.foo.linear_cross_entropy.default,
    reference=reference.linear_cross_entropy,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sized=lambda dtype, size: hidden_sample("sized", (2, size), size + 3, size + 2)(dtype),
    samples={
        "vector": hidden_sample("vector", (), 19, 9),
        "no bias": hidden_sample("no bias", (3, 4), 35, 18, has_bias=False),
        "one class": hidden_sample("one class", (3,), 5, 1),
        "no depth": hidden_sample("no depth", (3,), 0, 5),
        "one row": hidden_sample("one row", (1,), 65, 700),
        "several chunks": hidden_sample("several chunks", (35,), 70, 4301, label_smoothing=0.1),
        "late maximum": late_maximum,
        "capped": hidden_sample("capped", (6,), 33, 130, softcap=3.0, label_smoothing=0.2),
        "ignored": hidden_sample("ignored", (7,), 6, 11, ignored=3, label_smoothing=0.2),
        "own ignored": hidden_sample("own ignored", (7,), 6, 11, ignored=3, ignore_index=5),
        "all smooth": hidden_sample("all smooth", (4,), 8, 33, label_smoothing=1.0),
        "special values": special_hidden,
    },
    essential=("size1", "size7", "ignored", "capped"),
    in_layouts=("size7", "no bias"),
    large=hidden_sample("large", (301,), 130, 3001),
    gradient_budget=gradient_budget,
)
