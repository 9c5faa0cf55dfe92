"""foo::attention in the table of operators: samples, and bounds of errors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from foo_ops.testing import reference
from foo_ops.testing.spec import Dtypes, OpSpec, Remembered, Sample, Tensors, random
from foo_ops.testing.tolerance import compute_type, roundings, roundoff, smallest

# ------------------------------------------------------------------------------------------ samples


TensorMaker = Callable[[torch.dtype], Tensor]


def attention_sample(
    *,
    batch: int = 2,
    heads: int = 2,
    key_heads: int | None = None,
    queries: int = 9,
    keys: int = 11,
    head_dim: int = 16,
    value_dim: int | None = None,
    bias: TensorMaker | None = None,
    slopes: TensorMaker | None = None,
    sinks: TensorMaker | None = None,
    **keywords: Any,
) -> Callable[[torch.dtype], Sample]:
    """Make a function that draws query, key and value of these sizes."""
    key_heads = heads if key_heads is None else key_heads
    value_dim = head_dim if value_dim is None else value_dim

    def make(dtype: torch.dtype) -> Sample:
        tensors = random(
            f"attention {batch} {heads} {key_heads} {queries} {keys} {head_dim} {value_dim}",
            (batch, heads, queries, head_dim),
            (batch, key_heads, keys, head_dim),
            (batch, key_heads, keys, value_dim),
            dtype=dtype,
        )
        makers = (bias, slopes, sinks)
        others = (None if make is None else make(dtype) for make in makers)
        return Sample((*tensors, *others), keywords)

    return make


def random_bias(*shape: int, float32: bool = False) -> TensorMaker:
    """Draw a bias, or sinks, in the query's dtype or in float32."""
    return lambda dtype: random(f"{shape}", shape, dtype=torch.float32 if float32 else dtype)[0]


def random_slopes(*shape: int, float32: bool = False) -> TensorMaker:
    """Draw small slopes of both signs, so that distant keys still count."""
    return lambda dtype: random_bias(*shape, float32=float32)(dtype) / 8


def random_mask(*shape: int, blind: Sequence[int] = ()) -> TensorMaker:
    """Draw a bool mask that is half True; the rows ``blind`` see no key."""

    def make(dtype: torch.dtype) -> Tensor:
        mask = random(f"mask {shape}", shape, dtype=torch.float64)[0] > 0
        mask[..., list(blind), :] = False
        return mask

    return make


def half_infinite_bias(*shape: int) -> TensorMaker:
    """Draw a bias with -inf where a mask would be False; the last row sees nothing."""
    sees = random_mask(*shape, blind=[-1])
    return lambda dtype: random_bias(*shape)(dtype).where(sees(dtype), -math.inf)


def large_scores(dtype: torch.dtype) -> Sample:
    """Make scores of up to 1e4, whose softmax is one-hot: exp must not overflow."""
    query, *others = attention_sample(head_dim=32, keys=70)(dtype).inputs
    assert query is not None
    return Sample((query * 1000, *others))


def rising_scores(queries: int, keys: int) -> Callable[[torch.dtype], Sample]:
    """Put the largest score last, so that every tile of keys rescales the sums so far."""

    def make(dtype: torch.dtype) -> Sample:
        sample = attention_sample(queries=queries, keys=keys, head_dim=8, scale=0.5)(dtype)
        query, key, *others = sample.inputs
        assert query is not None
        assert key is not None
        steps = torch.linspace(0, 40, keys, dtype=torch.float64).unsqueeze(-1).to(dtype)
        return Sample((torch.ones_like(query), key * 0.1 + steps, *others), sample.keywords)

    return make


def large_scores_with_softcap(dtype: torch.dtype) -> Sample:
    return Sample(large_scores(dtype).inputs, {"softcap": 20.0})


def large_scores_with_sinks(dtype: torch.dtype) -> Sample:
    """Put the first head's sink among the scores, and the second's above all."""
    *tensors, _ = large_scores(dtype).inputs
    return Sample((*tensors, torch.tensor([100.0, 20_000.0]).to(dtype)))


def mask_of_parts(keys: int) -> TensorMaker:
    """Make a mask (2, 1, 1, keys): one batch sees a run of keys, the other a single key."""
    mask = torch.zeros(2, 1, 1, keys, dtype=torch.bool)
    mask[0, :, :, keys // 3 : keys // 2] = True
    mask[1, :, :, -1] = True
    return lambda _: mask


# ------------------------------------------------------------------------------------------- errors

# The bounds are of first order in the roundoff u of the compute type (float32, or float64), element
# by element, computed from the exact values. Sizes are sums of magnitudes; results are rounded once
# more, to their own dtype.
#
#     score       s = cap(scale q.k) + bias - slope distance       `Scores`
#     weight      p = exp(s - logsumexp)
#     output      o = sum p v
#     delta       d = sum(do o) - dlogsumexp       from the o that was stored
#     grad score  ds = p (sum(do v) - d)
#     gradients   dq = scale sum ds cap' k,  dk = scale sum ds cap' q,  dv = sum p do,
#                 dbias = sum ds,  dslope = -sum ds distance,  dsink = -sum exp(sink - logsumexp) d
#
# An exponential errs by up to 4 units in the last place, and by 3 roundings of its argument: of the
# difference, and of the product with log2(e). When the running maximum grows, sums are multiplied
# by an exponential: once per TILE keys.
#
# In bfloat16, p and ds may be rounded to bfloat16 before a product, and in float16 to two parts of
# bfloat16: a relative error that is independent of u. Processors flush subnormal numbers to zero in
# such products, and in their sums.


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
        detached = sample.map(Tensor.detach)
        given = ("forward", detached.inputs, detached.keywords, dtype)
        return _LAST_FORWARD.result(lambda: cls.computed(detached, dtype), *given)

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


# ----------------------------------------------------------------------------------- foo::attention


SMALL: dict[str, Any] = {"queries": 3, "keys": 5, "head_dim": 3}

HEAD_DIMS = (1, 3, 16, 37, 64, 80, 128, 256)

LENGTHS = ((1, 1), (1, 129), (63, 64), (64, 65), (65, 63), (127, 129), (129, 127), (130, 1))

HEADS = ((1, 1), (2, 1), (4, 2), (8, 1), (6, 2), (4, 4))

MANY_KEYS = (1, 63, 511, 512, 513, 1025, 5000)

BASIC_SAMPLES: dict[str, Callable[[torch.dtype], Sample]] = {
    "no options": attention_sample(),
    "causal": attention_sample(queries=11, is_causal=True),
    "more keys than queries, causal": attention_sample(queries=7, keys=13, is_causal=True),
    "more queries than keys, causal": attention_sample(queries=13, keys=7, is_causal=True),
    **{f"head dim {dim}": attention_sample(head_dim=dim, keys=66) for dim in HEAD_DIMS},
    "value dim 5 of 16": attention_sample(value_dim=5),
    "value dim 100 of 8": attention_sample(head_dim=8, value_dim=100, is_causal=True),
    "value dim 1 of 256": attention_sample(head_dim=256, value_dim=1),
    "value dim 512 of 576": attention_sample(head_dim=576, value_dim=512, queries=9, keys=70),
    **{
        f"{queries} queries, {keys} keys{', causal' * is_causal}": attention_sample(
            batch=1, queries=queries, keys=keys, is_causal=is_causal
        )
        for queries, keys in LENGTHS
        for is_causal in (False, True)
    },
    **{
        f"{heads} heads on {key_heads}{', causal' * is_causal}": attention_sample(
            heads=heads, key_heads=key_heads, queries=70, is_causal=is_causal
        )
        for heads, key_heads in HEADS
        for is_causal in (False, True)
    },
    "no batch": attention_sample(batch=0),
    "no heads": attention_sample(heads=0),
    "no queries": attention_sample(queries=0),
    "no keys": attention_sample(keys=0),
    "no keys, causal": attention_sample(keys=0, is_causal=True),
    "no keys, bias": attention_sample(keys=0, bias=random_bias(2, 1, 9, 1)),
    "no queries, bias": attention_sample(queries=0, bias=random_bias(1, 1, 1, 11)),
    "scale 0": attention_sample(scale=0.0),
    "scale 3": attention_sample(scale=3.0, is_causal=True),
    "negative scale": attention_sample(scale=-0.5, bias=random_bias(9, 11)),
    "large scores": large_scores,
    "rising scores": rising_scores(3, 300),
    "bias (Sq, Sk)": attention_sample(bias=random_bias(9, 11)),
    "bias (1, 1, 1, Sk)": attention_sample(bias=random_bias(1, 1, 1, 11)),
    "bias (Sk)": attention_sample(bias=random_bias(11), is_causal=True),
    "bias (B, 1, Sq, Sk)": attention_sample(bias=random_bias(2, 1, 9, 11)),
    "bias (B, 1, 1, Sk)": attention_sample(bias=random_bias(2, 1, 1, 11)),
    "bias (1, H, 1, 1)": attention_sample(bias=random_bias(1, 2, 1, 1)),
    "bias (H, Sq, Sk)": attention_sample(bias=random_bias(2, 9, 11), is_causal=True),
    "bias (B, H, Sq, Sk)": attention_sample(bias=random_bias(2, 2, 9, 11)),
    "bias (Sq, 1)": attention_sample(bias=random_bias(9, 1)),
    "bias 0-d": attention_sample(bias=random_bias()),
    "bias (1, 1)": attention_sample(bias=random_bias(1, 1), is_causal=True),
    "bias in float32": attention_sample(bias=random_bias(2, 9, 11, float32=True)),
    "bias over several tiles": attention_sample(
        queries=130, keys=131, bias=random_bias(130, 131), is_causal=True
    ),
    "bias (B, 1, 1, Sk) over several tiles": attention_sample(
        queries=130, keys=131, bias=random_bias(2, 1, 1, 131)
    ),
    "bias (1, H, Sq, 1) over several tiles": attention_sample(
        queries=130, keys=131, bias=random_bias(1, 2, 130, 1)
    ),
    "bias 0-d over several tiles": attention_sample(queries=130, keys=131, bias=random_bias()),
    "bias for grouped heads": attention_sample(
        heads=6, key_heads=2, bias=random_bias(6, 9, 11), is_causal=True
    ),
    "bias (H, Sq, 1) for grouped heads": attention_sample(
        heads=6, key_heads=2, bias=random_bias(6, 9, 1)
    ),
    "bias (B, 1, 1, Sk) for grouped heads": attention_sample(
        heads=6, key_heads=2, bias=random_bias(2, 1, 1, 11)
    ),
    "bias (Sq, Sk) for grouped heads over several tiles": attention_sample(
        queries=130, keys=131, heads=4, key_heads=2, bias=random_bias(130, 131)
    ),
    "bias with -inf": attention_sample(bias=half_infinite_bias(9, 11)),
    "bias of -inf alone": attention_sample(
        bias=lambda dtype: torch.full((1, 2, 1, 1), -math.inf, dtype=dtype)
    ),
    "mask (Sq, Sk)": attention_sample(bias=random_mask(9, 11)),
    "mask (B, 1, 1, Sk)": attention_sample(bias=random_mask(2, 1, 1, 11)),
    "mask with rows that see nothing": attention_sample(
        bias=random_mask(2, 2, 9, 11, blind=[0, 4, 8])
    ),
    "mask with rows that see nothing, causal": attention_sample(
        queries=70, keys=70, bias=random_mask(70, 70, blind=[1, 64]), is_causal=True
    ),
    "small, grouped heads and bias": attention_sample(
        **SMALL, heads=4, key_heads=2, value_dim=2, bias=random_bias(4, 1, 5), is_causal=True
    ),
    "small, mask with a row that sees nothing": attention_sample(
        **SMALL, bias=random_mask(2, 1, 3, 5, blind=[1])
    ),
    "small, row of -inf": attention_sample(**SMALL, bias=half_infinite_bias(3, 5), scale=0.7),
    # Few queries: the keys are split, and the results of the splits are merged.
    **{
        f"{queries} queries, {keys} keys": attention_sample(
            batch=1, queries=queries, keys=keys, heads=4, key_heads=2
        )
        for queries, keys in (*((1, keys) for keys in MANY_KEYS), (3, 1025))
    },
    "1 query, 1025 keys, mask of parts": attention_sample(
        queries=1, keys=1025, bias=mask_of_parts(1025)
    ),
    "1 query, 1025 keys, rising scores": rising_scores(1, 1025),
    "mask 0-d, True": attention_sample(bias=lambda dtype: torch.tensor(True)),
    "mask 0-d, False": attention_sample(bias=lambda dtype: torch.tensor(False)),
}

# All options at once, except a mask, for grouped heads.
ALL: dict[str, Any] = {
    "heads": 4,
    "key_heads": 2,
    "slopes": random_slopes(2, 4),
    "sinks": random_bias(4),
    "softcap": 3.0,
}

# Queries, keys, window_left, window_right.
WINDOWS = (
    *((11, 11, 3, -1), (11, 11, -1, 2), (11, 11, 2, 1), (11, 11, 0, 0), (11, 11, 100, 100)),
    *((7, 13, -1, 0), (13, 7, -1, 0), (7, 13, 2, 3), (13, 7, 2, 3), (13, 7, 0, -1), (3, 200, 5, 0)),
    *((200, 260, -1, 0), (260, 200, -1, 0), (300, 300, 10, 10), (300, 300, 0, 0)),
    *(
        (200, 200, 63, 0),
        (200, 200, 64, 0),
        (200, 200, 65, 0),
        (200, 200, 0, 63),
        (200, 200, 0, 64),
    ),
    *((97, 330, 95, 1), (96, 320, 0, 96), (190, 70, 20, 40), (1, 400, 100, 0), (400, 1, 50, 50)),
)

# Windows, softcap, ALiBi slopes and sinks.
OPTION_SAMPLES: dict[str, Callable[[torch.dtype], Sample]] = {
    # Windows around the sizes of tiles and blocks; whole tiles before and behind are not seen.
    **{
        f"window {left}, {right} of {queries} queries, {keys} keys": attention_sample(
            batch=1, queries=queries, keys=keys, window_left=left, window_right=right
        )
        for queries, keys, left, right in WINDOWS
    },
    **{
        f"window of {queries} queries, {keys} keys, causal": attention_sample(
            queries=queries, keys=keys, window_left=3, window_right=2, is_causal=True
        )
        for queries, keys in ((11, 11), (7, 13), (13, 7))
    },
    "window for grouped heads": attention_sample(
        heads=6, key_heads=2, queries=70, keys=140, window_left=30, window_right=0
    ),
    # With heads side by side in a block of queries, of which one tile of keys is seen by none.
    **{
        f"window {left} of {queries} queries, {keys} keys for grouped heads, causal": (
            attention_sample(
                heads=heads,
                key_heads=2,
                queries=queries,
                keys=keys,
                is_causal=True,
                window_left=left,
            )
        )
        for heads, queries, keys, left in ((4, 12, 25, 0), (8, 12, 25, 3), (8, 9, 75, 60))
    },
    "window, no keys": attention_sample(keys=0, window_right=0),
    "window, bias": attention_sample(
        queries=100, keys=230, bias=random_bias(2, 1, 100, 230), window_left=70, window_right=0
    ),
    "window, bias (1, H, 1, 1)": attention_sample(
        queries=100, keys=230, bias=random_bias(1, 2, 1, 1), window_left=10, window_right=20
    ),
    "window, mask with rows that see nothing": attention_sample(
        queries=100, keys=130, bias=random_mask(100, 130, blind=[0, 63, 99]), window_right=0
    ),
    "softcap": attention_sample(softcap=1.5),
    "softcap, causal": attention_sample(queries=70, keys=70, softcap=30.0, is_causal=True),
    "softcap, bias": attention_sample(bias=random_bias(2, 9, 11), softcap=1.0, scale=2.0),
    "softcap, mask": attention_sample(bias=random_mask(9, 11, blind=[3]), softcap=0.5),
    "softcap, large scores": large_scores_with_softcap,
    "slopes (H)": attention_sample(slopes=random_slopes(2)),
    "slopes (B, H)": attention_sample(slopes=random_slopes(2, 2)),
    "slopes in float32": attention_sample(slopes=random_slopes(2, 2, float32=True)),
    "slopes, more keys than queries, causal": attention_sample(
        queries=70, keys=150, slopes=random_slopes(2), window_right=0
    ),
    "slopes, more queries than keys": attention_sample(
        queries=150, keys=70, slopes=random_slopes(2, 2)
    ),
    "slopes for grouped heads": attention_sample(heads=6, key_heads=2, slopes=random_slopes(2, 6)),
    "sinks": attention_sample(sinks=random_bias(2)),
    "sinks (B, H)": attention_sample(sinks=random_bias(2, 2)),
    "sinks (B, H), 1 query, 2100 keys, grouped heads": attention_sample(
        queries=1, keys=2100, heads=6, key_heads=2, sinks=random_bias(2, 6)
    ),
    "sinks in float32": attention_sample(sinks=random_bias(2, float32=True)),
    "sinks above all scores": attention_sample(
        sinks=lambda dtype: torch.full((2,), 90, dtype=dtype)
    ),
    "sinks below all scores": attention_sample(
        sinks=lambda dtype: torch.full((2,), -math.inf, dtype=dtype)
    ),
    "sinks, no keys": attention_sample(keys=0, sinks=random_bias(2)),
    "sinks, rows that see nothing": attention_sample(
        bias=random_mask(2, 2, 9, 11, blind=[0, 4, 8]), sinks=random_bias(2)
    ),
    "sinks, rows before the first key": attention_sample(
        queries=150, keys=20, sinks=random_bias(2), window_right=0
    ),
    "sinks, large scores": large_scores_with_sinks,
    # Two key splits.
    "all options, 1 query, 2100 keys": attention_sample(
        **ALL, queries=1, keys=2100, bias=random_bias(4, 1, 2100), window_left=1900, window_right=0
    ),
    "all options": attention_sample(
        **ALL, bias=random_bias(4, 1, 11), is_causal=True, window_left=4, window_right=0
    ),
    "all options over several tiles": attention_sample(
        **ALL,
        queries=130,
        keys=200,
        head_dim=24,
        value_dim=40,
        bias=random_bias(2, 1, 130, 200),
        window_left=90,
        window_right=1,
    ),
    "all options over several tiles, causal": attention_sample(
        **ALL, queries=200, keys=130, bias=random_bias(200, 130), is_causal=True, window_left=10
    ),
    "all options, mask": attention_sample(
        **ALL, queries=100, keys=130, bias=random_mask(100, 130, blind=[0, 5]), window_left=70
    ),
    "small, all options": attention_sample(
        **SMALL, **ALL, value_dim=2, bias=random_bias(4, 1, 5), window_left=2, window_right=0
    ),
    "small, all options, mask": attention_sample(
        **(SMALL | {"queries": 6}),
        **ALL,
        bias=random_mask(2, 1, 6, 5, blind=[2]),
        is_causal=True,
        window_right=1,
    ),
}

ATTENTION = OpSpec(
    operator=torch.ops.foo.attention.default,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sizes=(),
    samples=BASIC_SAMPLES | OPTION_SAMPLES,
    essential=(
        "small, grouped heads and bias",
        "small, all options",
        "small, all options, mask",
    ),
    in_layouts=(
        "small, grouped heads and bias",
        "small, all options",
        "all options over several tiles",
        "all options, 1 query, 2100 keys",
        "head dim 37",
        "head dim 64",
        "4 heads on 2, causal",
        "bias over several tiles",
        "bias in float32",
        "mask with rows that see nothing, causal",
    ),
    sized=lambda dtype, size: attention_sample(
        **ALL,
        queries=size,
        keys=size + 3,
        head_dim=8,
        value_dim=4,
        bias=random_bias(2, 1, 1, size + 3),
        is_causal=True,
        window_left=7,
        window_right=5,
    )(dtype),
    large=attention_sample(
        **ALL,
        queries=200,
        keys=230,
        bias=random_bias(2, 1, 200, 1),
        is_causal=True,
        window_left=150,
        window_right=0,
    ),
    reference=reference.attention,
    output_budget=output_budget,
    gradient_budget=gradient_budget,
)
