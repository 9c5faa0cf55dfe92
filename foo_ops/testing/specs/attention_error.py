"""Bounds of the errors of attention's results and gradients.

The bounds are of first order in the roundoff u of the compute type (float32, or float64), element
by element, computed from the exact values. Sizes are sums of magnitudes; results are rounded once
more, to their own dtype.

    score       s = cap(scale q.k) + bias - slope distance       `Scores`
    weight      p = exp(s - logsumexp)
    output      o = sum p v
    delta       d = sum(do o) - dlogsumexp       from the o that was stored
    grad score  ds = p (sum(do v) - d)
    gradients   dq = scale sum ds cap' k,  dk = scale sum ds cap' q,  dv = sum p do,
                dbias = sum ds,  dslope = -sum ds distance,  dsink = -sum exp(sink - logsumexp) d

An exponential errs by up to 4 units in the last place, and by 3 roundings of its argument: of the
difference, and of the product with log2(e). When the running maximum grows, sums are multiplied by
an exponential: once per TILE keys.

In bfloat16, p and ds may be rounded to bfloat16 before a product, and in float16 to two parts of
bfloat16: a relative error that is independent of u. Processors flush subnormal numbers to zero in
such products, and in their sums.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foo_ops.testing import reference
from foo_ops.testing.remembered import Remembered
from foo_ops.testing.rounding import compute_type, roundings, roundoff, smallest
from foo_ops.testing.spec import Dtypes, Sample, Tensors

TILE = 128
# The gradients of a sample are mostly checked right after its outputs.
_LAST_FORWARD = Remembered(most=1)


@dataclasses.dataclass(frozen=True)
class Sum:
    """A result before it is stored, the sum of its terms' magnitudes, and its error so far."""

    value: Tensor
    size: Tensor
    error: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Sum:
        return Sum(function(self.value), function(self.size), function(self.error))

    def stored(self, dtype: torch.dtype) -> Tensor:
        """Return the error after rounding to a dtype."""
        return self.error + roundoff(dtype) * self.value.abs() + smallest(dtype)


@dataclasses.dataclass(frozen=True)
class Rounding:
    """Rounding errors in a call.

    Attributes:
        unit: the roundoff of the compute type.
        operand: the roundoff of weights, and of gradients of scores, as operands of a product.
        tiny: numbers below it may become zero.
    """

    unit: float
    operand: float
    tiny: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> Rounding:
        compute = compute_type(dtype)
        # The float64 reference itself errs as much.
        unit = roundoff(compute) * (2 if dtype == torch.float64 else 1)
        rounded = {torch.bfloat16: 1, torch.float16: 2}
        operand = roundoff(torch.bfloat16) ** rounded[dtype] if dtype in rounded else 0.0
        return cls(unit, operand, 2 * torch.finfo(compute).smallest_normal)

    def summing(self, terms: int) -> float:
        return (roundings(terms) + 4) * self.unit

    def product(self, left: Tensor, left_error: Tensor, right: Tensor, groups: int = 1) -> Sum:
        """Multiply left @ right, summed over groups of heads that share a key head."""
        left_error = left_error + self.operand * left.abs() + self.tiny
        parts = Sum(left @ right, left.abs() @ right.abs(), left_error @ right.abs())
        if groups > 1:
            parts = parts.map(lambda part: part.unflatten(1, (-1, groups)).sum(2))
        terms = left.shape[-1] * groups
        error = parts.error + self.summing(terms) * parts.size + terms * self.tiny
        return dataclasses.replace(parts, error=error)

    def sum_to(self, shape: torch.Size, value: Tensor, error: Tensor) -> Sum:
        """Sum over the dimensions that a tensor of this shape was broadcast to."""
        parts = Sum(value, value.abs(), error).map(lambda part: part.sum_to_size(shape))
        terms = value.numel() // max(shape.numel(), 1)
        return dataclasses.replace(parts, error=parts.error + self.summing(terms) * parts.size)


@dataclasses.dataclass(frozen=True)
class Scores:
    """The scores (batch, heads, queries, keys), -inf where a key is not seen, and their errors.

    Attributes:
        error: 0 where a key is not seen.
        derivative: of the score by ``scale q.k``: 1 without a softcap; with one, 0 where a key is
            not seen. Broadcast, as the next.
        derivative_error: its error.
    """

    score: Tensor
    error: Tensor
    derivative: Tensor
    derivative_error: Tensor

    @classmethod
    def of(cls, sample: Sample, rounding: Rounding) -> Scores:
        query, key = tensor_at(sample, 0), tensor_at(sample, 1)
        bias, slopes = sample.inputs[3:5]
        dropout = ("dropout_mask", "dropout_p")
        options = {name: value for name, value in sample.keywords.items() if name not in dropout}
        score = reference.masked_scores(query, key, bias, slopes, **options)
        sees = score > -math.inf

        scale, unit, softcap = scale_of(sample), rounding.unit, options.get("softcap", 0.0)
        products = abs(scale) * (query.abs() @ key.abs().mT)
        size = abs(scale) * (query @ key.mT).abs()
        error = rounding.summing(query.shape[-1]) * products
        derivative, derivative_error = error.new_ones(()), error.new_zeros(())
        if softcap > 0:
            # The quotient rounds twice, tanh errs by 4 units, and the product by 2.
            capped = softcap * torch.tanh(size / softcap)
            argument_error = (error + 2 * unit * size).where(size.isfinite(), 0)
            lower = softcap * torch.tanh((size - argument_error) / softcap)
            error = capped - lower + 6 * unit * capped
            derivative = (1 - (capped / softcap).square()).where(sees, 0)
            derivative_error = (2 * capped * error / softcap**2 + 4 * unit).where(sees, 0)
            size = capped
        if bias is not None and bias.dtype != torch.bool:
            size = size + bias.abs()
        if slopes is not None:
            distance = reference.distances(query.shape[2], key.shape[2]).abs()
            size = size + slopes[..., None, None].abs() * distance
        # Two additions, and the products with the distance and with log2(e).
        error = (error + 4 * unit * size).where(sees, 0)
        return cls(score, error, derivative, derivative_error)


@dataclasses.dataclass(frozen=True)
class Forward:
    """The weights and the results, and their errors.

    Attributes:
        sample: the sample, with key and value repeated for each query head.
        factor: dropout's factor of each weight.
        weights: before dropout, (batch, heads, queries, keys).
        weights_error: relative error of weights computed from the stored logsumexp.
        logsumexp: 0 where a row sees nothing.
    """

    sample: Sample
    rounding: Rounding
    scores: Scores
    factor: Tensor
    weights: Tensor
    weights_error: Tensor
    output: Sum
    logsumexp: Tensor
    logsumexp_error: Tensor

    @classmethod
    def of(cls, sample: Sample, dtype: torch.dtype) -> Forward:
        plain = sample.map(Tensor.detach)
        given = ("forward", plain.inputs, plain.keywords, dtype)
        return _LAST_FORWARD.result(lambda: cls.computed(plain, dtype), *given)

    @classmethod
    def computed(cls, sample: Sample, dtype: torch.dtype) -> Forward:
        sample = with_key_for_each_query_head(sample)
        value = tensor_at(sample, 2)
        rounding = Rounding.of(dtype)
        unit, keys = rounding.unit, value.shape[2]
        scores = Scores.of(sample, rounding)
        dropout_mask = sample.keywords.get("dropout_mask")
        factor = scores.error.new_ones(())
        if dropout_mask is not None:
            factor = dropout_mask / (1 - sample.keywords["dropout_p"])

        logsumexp = torch.logsumexp(with_sinks(scores.score, sample), -1)
        logsumexp = logsumexp.where(logsumexp > -math.inf, 0)
        difference = scores.score - logsumexp.unsqueeze(-1)
        weights = torch.exp(difference)
        exponent_error = scores.error + 3 * unit * difference.abs().where(weights > 0, 0)
        rescaling = 4 * math.ceil(keys / TILE) * unit
        # Errors of the terms, of their sum, and of its logarithm, to which the maximum is added.
        logsumexp_error = torch.log1p((weights * torch.expm1(exponent_error)).sum(-1))
        logsumexp_error = logsumexp_error + rounding.summing(keys) + rescaling
        logsumexp_error = logsumexp_error + unit * (48 + 3 * logsumexp.abs())
        weights_error = torch.expm1(exponent_error + logsumexp_error.unsqueeze(-1))
        dropped = weights * factor
        return cls(
            sample=sample,
            rounding=rounding,
            scores=scores,
            factor=factor,
            weights=weights,
            weights_error=weights_error,
            output=rounding.product(dropped, dropped * (weights_error + rescaling), value),
            logsumexp=logsumexp,
            logsumexp_error=logsumexp_error,
        )


def output_budget(sample: Sample, dtype: torch.dtype) -> Tensors:
    """Bound the errors of a sample's output and logsumexp."""
    forward = Forward.of(sample, dtype)
    return forward.output.stored(dtype), forward.logsumexp_error


def gradient_budget(sample: Sample, dtypes: Dtypes, cotangents: Tensors) -> Tensors:
    """Bound the errors of the gradients of inputs that require one."""
    assert dtypes[0] is not None
    sums = gradient_sums(sample, dtypes[0], cotangents)
    return stored_gradients(sample, dtypes, sums)


def stored_gradients(sample: Sample, dtypes: Dtypes, sums: Sequence[Sum | None]) -> Tensors:
    return tuple(
        sum_.stored(dtype)
        for sum_, dtype, tensor in zip(sums, dtypes, sample.inputs)
        if sum_ is not None and dtype is not None and tensor is not None and tensor.requires_grad
    )


def gradient_sums(sample: Sample, dtype: torch.dtype, cotangents: Tensors) -> list[Sum | None]:
    """Return the gradient of each input, or None for an input that has none."""
    grad_output, grad_logsumexp = cotangents
    forward = Forward.of(sample, dtype)
    rounding, scores, weights = forward.rounding, forward.scores, forward.weights
    unit, scale = rounding.unit, scale_of(sample)
    query, key, value = (tensor_at(forward.sample, position) for position in range(3))
    summing = rounding.summing(value.shape[-1])

    terms = grad_output * forward.output.value
    delta = terms.sum(-1) - grad_logsumexp
    delta_error = (grad_output.abs() * forward.output.stored(dtype)).sum(-1)
    delta_error = delta_error + summing * (terms.abs().sum(-1) + grad_logsumexp.abs())

    products = forward.factor * (grad_output @ value.mT)
    sizes = forward.factor * (grad_output.abs() @ value.abs().mT)
    weights_error = weights * forward.weights_error + rounding.tiny
    difference = products - delta.unsqueeze(-1)
    grad_score = weights * difference
    grad_score_error = weights_error * difference.abs() + rounding.tiny
    grad_score_error = grad_score_error + weights * (
        summing * sizes + delta_error.unsqueeze(-1) + 2 * unit * difference.abs()
    )
    grad_product = scale * scores.derivative * grad_score
    grad_product_error = 2 * unit * grad_product.abs() + abs(scale) * (
        scores.derivative * grad_score_error + scores.derivative_error * grad_score.abs()
    )

    groups = query.shape[1] // max(tensor_at(sample, 1).shape[1], 1)
    dropped, dropped_error = weights * forward.factor, weights_error * forward.factor
    sums: list[Sum | None] = [
        rounding.product(grad_product, grad_product_error, key),
        rounding.product(grad_product.mT, grad_product_error.mT, query, groups),
        rounding.product(dropped.mT, dropped_error.mT, grad_output, groups),
        *(None, None, None),
    ]
    bias, slopes, sinks = sample.inputs[3:]
    if bias is not None and bias.is_floating_point():
        sums[3] = rounding.sum_to(bias.shape, grad_score, grad_score_error)
    if slopes is not None:
        distance = reference.distances(query.shape[2], key.shape[2]).abs()
        terms, terms_error = -grad_score * distance, grad_score_error * distance
        sum_ = rounding.sum_to(slopes[..., None, None].shape, terms, terms_error)
        sums[4] = sum_.map(lambda part: part[..., 0, 0])
    if sinks is not None:
        difference = sinks.unsqueeze(-1) - forward.logsumexp
        weight = torch.exp(difference)
        difference = difference.abs().where(weight > 0, 0)
        relative = torch.expm1(3 * unit * difference + forward.logsumexp_error)
        error = (weight * relative + rounding.tiny) * delta.abs() + weight * delta_error
        sum_ = rounding.sum_to(sinks.unsqueeze(-1).shape, -weight * delta, error)
        sums[5] = sum_.map(lambda part: part[..., 0])
    return sums


def with_key_for_each_query_head(sample: Sample) -> Sample:
    query, key, value, *others = sample.inputs
    assert query is not None
    assert key is not None
    assert value is not None
    repeated = (reference.for_each_query_head(tensor, query) for tensor in (key, value))
    return dataclasses.replace(sample, inputs=(query, *repeated, *others))


def with_sinks(score: Tensor, sample: Sample) -> Tensor:
    """Add the sinks to the scores of each row, as one more key."""
    sinks = sample.inputs[5]
    if sinks is None:
        return score
    return torch.cat((score, sinks[..., None, None].expand(*score.shape[:3], 1)), -1)


def scale_of(sample: Sample) -> float:
    scale = sample.keywords.get("scale")
    return 1 / math.sqrt(tensor_at(sample, 0).shape[-1]) if scale is None else scale


def tensor_at(sample: Sample, position: int) -> Tensor:
    tensor = sample.inputs[position]
    assert tensor is not None
    return tensor
