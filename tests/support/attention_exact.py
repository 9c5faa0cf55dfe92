"""Compute attention and its gradients by closed formulas in NumPy, to measure errors.

Nothing here is shared with the operators, with foo_ops/testing/reference.py or with autograd.
Terms that cancel there, such as 1 - tanh^2, are written here so that they do not. Results are in
float64, or in long double where the error of float64 itself is measured.
"""

import dataclasses
import math

import numpy as np

NAMES = ("output", "logsumexp", "query", "key", "value", "attn_bias", "alibi_slopes", "sinks")


@dataclasses.dataclass(frozen=True)
class Softmax:
    """Softmax weights with a sink; the sink's own weight is kept apart."""

    weights: np.ndarray
    of_sink: np.ndarray
    logsumexp: np.ndarray

    @classmethod
    def of(cls, scores, sinks):
        top = np.maximum(scores.max(-1, keepdims=True), sinks)
        top = np.where(np.isfinite(top), top, 0)
        weights, of_sink = np.exp(scores - top), np.exp(sinks - top)
        total = weights.sum(-1, keepdims=True) + of_sink
        with np.errstate(divide="ignore", invalid="ignore"):
            logsumexp = top + np.log(total)
            return cls(*(np.where(total > 0, w / total, 0) for w in (weights, of_sink)), logsumexp)


def as_array(value, number):
    if isinstance(value, np.ndarray):
        return value.astype(number)
    return value.detach().cpu().double().numpy().astype(number)


def sums_to(array, shape):
    """Sum over the dimensions along which an array of this shape was broadcast."""
    array = array.sum(tuple(range(array.ndim - len(shape))))
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1)
    return array.sum(axes, keepdims=True).reshape(shape)


def exact_attention(
    inputs,
    cotangents,
    *,
    number=np.float64,
    is_causal=False,
    scale=None,
    window_left=-1,
    window_right=-1,
    softcap=0.0,
    dropout_factors=None,
):
    """Return outputs and gradients by name, as arrays.

    Each gradient that is a sum over keys has a companion, such as "attn_bias terms": the sum of the
    absolute values of its terms, to which rounding errors are proportional.

    Args:
        inputs: query, key, value, attn_bias, alibi_slopes and sinks; the last three may be missing.
        cotangents: the gradients of output and logsumexp.
        number: the type to compute in.
        dropout_factors: the factor of each weight under dropout.
    """
    arrays = [None if value is None else as_array(value, number) for value in inputs]
    query, key, value, bias, slopes, sinks = (*arrays, None, None, None)[:6]
    grad_output, grad_logsumexp = (as_array(value, number) for value in cotangents)
    heads, group = query.shape[1], query.shape[1] // key.shape[1]
    keys, values = (np.repeat(array, group, 1) for array in (key, value))
    scale = number(1 / math.sqrt(query.shape[-1]) if scale is None else scale)

    scores, slope_of_cap = scale * (query @ keys.swapaxes(-1, -2)), number(1)
    if softcap > 0:
        small = np.exp(-2 * np.abs(scores / number(softcap)))
        scores = number(softcap) * np.tanh(scores / number(softcap))
        slope_of_cap = 4 * small / (1 + small) ** 2
    if bias is not None:
        scores = scores + bias
    queries, count = scores.shape[-2:]
    distance = np.arange(queries)[:, None] + count - queries - np.arange(count)
    if slopes is not None:
        scores = scores - slopes[..., None, None] * np.abs(distance)
    sees = np.ones((queries, count), bool)
    sees &= (np.arange(queries)[:, None] >= np.arange(count)) | (not is_causal)
    sees &= (distance <= window_left) | (window_left < 0)
    sees &= (distance >= -window_right) | (window_right < 0)
    scores = np.where(sees, scores, -np.inf)
    sink_scores = np.full(heads, -np.inf, number) if sinks is None else sinks
    softmax = Softmax.of(scores, sink_scores[:, None, None])

    factor = number(1) if dropout_factors is None else as_array(dropout_factors, number)
    dropped = softmax.weights * factor
    products = factor * (grad_output @ values.swapaxes(-1, -2))
    delta = (softmax.weights * products).sum(-1, keepdims=True) - grad_logsumexp[..., None]
    grad_scores = softmax.weights * (products - delta)
    sizes = factor * (np.abs(grad_output) @ np.abs(values).swapaxes(-1, -2))
    delta_sizes = (softmax.weights * sizes).sum(-1, keepdims=True)
    delta_sizes = delta_sizes + np.abs(grad_logsumexp)[..., None]
    grad_sizes = softmax.weights * (sizes + delta_sizes)
    grad_products = scale * grad_scores * slope_of_cap

    def of_key_heads(array):
        return array.reshape(len(array), -1, group, *array.shape[2:]).sum(2)

    def of_bias(gradient):
        return None if bias is None else sums_to(gradient, bias.shape)

    def of_slopes(gradient, nearest=0):
        if slopes is None:
            return None
        return sums_to((gradient * (np.abs(distance) - nearest)).sum((-1, -2)), slopes.shape)

    def of_sinks(gradient):
        if sinks is None:
            return None
        return sums_to((softmax.of_sink * gradient)[..., 0].sum(-1), sinks.shape)

    def slope_terms():
        if slopes is None:
            return None
        # The distance common to all pairs multiplies a row's sum, which is nearly zero.
        nearest = np.abs(distance)[sees].min(initial=10**9)
        rows = np.abs(grad_scores.sum(-1)).sum(-1) * nearest
        return of_slopes(grad_sizes, nearest) + sums_to(rows, slopes.shape)

    terms = (of_bias(grad_sizes), slope_terms(), of_sinks(delta_sizes))
    return {f"{name} terms": sizes for name, sizes in zip(NAMES[5:], terms, strict=True)} | dict(
        zip(
            NAMES,
            (
                dropped @ values,
                softmax.logsumexp[..., 0],
                grad_products @ keys,
                of_key_heads(grad_products.swapaxes(-1, -2) @ query),
                of_key_heads(dropped.swapaxes(-1, -2) @ grad_output),
                of_bias(grad_scores),
                of_slopes(-grad_scores),
                of_sinks(-delta),
            ),
            strict=True,
        )
    )


def relative_error(actual, exact):
    """Return the norm of the difference, divided by the norm of the exact result."""
    difference = (as_array(actual, exact.dtype) - exact).ravel()
    return float(np.linalg.norm(difference) / np.linalg.norm(exact.ravel()))
