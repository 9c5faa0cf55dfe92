"""Compute flex attention densely in float64, with torch's operators alone, to measure errors.

The user's functions are called once, with tensors of all scores in place of numbers: nothing here
is traced, compiled, or shared with the operators.
"""

import dataclasses
import math

import torch

NAMES = ("output", "logsumexp", "query", "key", "value")

ROUNDINGS = {torch.float32: 32, torch.float64: 64, torch.bfloat16: 4, torch.float16: 4}
"""Roundings of a result's norm.

Low precision rounds a result, the weights, and the output from which the gradients start, each by
half a unit; float32 and float64 add as many products as there are keys.
"""


class Tensors:
    """Makes captured tensors, equal for an equal order of calls, and remembers the leaves.

    Numbers are rounded to ``rounded_to`` before they become ``dtype``.
    """

    def __init__(self, device, dtype, rounded_to=None):
        self.device, self.dtype, self.made = device, dtype, []
        self._rounded_to = rounded_to or dtype
        self._generator = torch.Generator().manual_seed(0)

    def new(self, *shape):
        values = torch.randn(shape, generator=self._generator, dtype=torch.float64)
        values = values.to(self._rounded_to).to(self.dtype)
        self.made.append(values.to(self.device).requires_grad_())
        return self.made[-1]

    def integers(self, high, *shape):
        return torch.randint(high, shape, generator=self._generator).to(self.device)


@dataclasses.dataclass(frozen=True)
class Exact:
    """Exact results and gradients, and the size of the terms that each gradient sums."""

    results: list
    sizes: list


def places(batch, heads, queries, keys, first_batch=0):
    """Return each score's batch, head, query and key, as tensors that broadcast with the scores."""
    counts = (batch, heads, queries, keys)
    numbers = [torch.arange(count, dtype=torch.int32) for count in counts]
    numbers[0] = numbers[0] + first_batch
    return [
        it.view([-1 if axis == at else 1 for at in range(4)]) for axis, it in enumerate(numbers)
    ]


def dense(query, key, value, score_mod=None, sees=None, scale=None, first_batch=0):
    """Return output, logsumexp, and the scores before and after ``score_mod``.

    Args:
        sees: a tensor of bools that broadcasts with the scores, or a function of places.
    """
    group = query.shape[1] // max(1, key.shape[1])
    keys, values = (it.repeat_interleave(group, 1) for it in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    products = torch.einsum("bhqd,bhkd->bhqk", query, keys) * scale
    where = places(*products.shape, first_batch)
    scores = products
    if score_mod is not None:
        scores = score_mod(products, *where).to(torch.float64).expand(products.shape)
    if callable(sees):
        sees = sees(*where)
    hidden = scores
    if sees is not None:
        hidden = torch.where(sees, scores, -math.inf)
    blind = hidden.isneginf().all(-1, keepdim=True)
    largest = hidden.detach().amax(-1, keepdim=True) if key.shape[2] else hidden.new_zeros(())
    weights = torch.exp(hidden - torch.where(blind, 0.0, largest))
    total = weights.sum(-1, keepdim=True)
    weights = torch.where(blind, 0.0, weights / torch.where(blind, 1.0, total))
    logsumexp = torch.where(blind, -math.inf, largest + torch.log(torch.where(blind, 1.0, total)))
    output = torch.einsum("bhqk,bhkd->bhqd", weights, values)
    return output, logsumexp.squeeze(-1), scores


def exact_of(inputs, captured, cotangents, score_mod=None, sees=None, **options):
    """Return the exact results for tensors of a call, on any device.

    Args:
        captured: the float64 tensors that ``score_mod`` captures and that have gradients.
        cotangents: the gradients of output and logsumexp.
    """
    inputs = [it.detach().cpu().double().requires_grad_() for it in inputs]
    output, logsumexp, scores = dense(*inputs, score_mod, sees, **options)
    finite = torch.where(logsumexp.isneginf(), 0.0, logsumexp)
    grads = [it.detach().cpu().double() for it in cotangents]
    loss = (output * grads[0]).sum() + (finite * grads[1]).sum()
    leaves = [*inputs, *captured]
    options = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
    gradients = torch.autograd.grad(loss, leaves, **options)
    sizes = [it.detach().norm() for it in (output, finite, *gradients)]
    if captured and scores.requires_grad:
        of_scores = torch.autograd.grad(loss, scores, **options)[0]
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(2, of_scores.shape, generator=generator) * 2 - 1
        for terms in (of_scores.abs(), of_scores * signs):
            terms = torch.where(scores.isfinite(), terms, 0.0)
            sums = torch.autograd.grad(scores, captured, terms, **options)
            sizes[5:] = [size + it.norm() for size, it in zip(sizes[5:], sums)]
    results = [output.detach(), logsumexp.detach(), *gradients]
    return Exact(results, [size.item() for size in sizes])


def assert_results(actual, exact, dtype, roundings=None):
    """Check that each result is off by no more than ``roundings`` roundings of its size."""
    roundings = ROUNDINGS[dtype] if roundings is None else roundings
    names = [*NAMES, *(f"captured {number}" for number in range(len(exact.results) - len(NAMES)))]
    for name, result, value, size in zip(names, actual, exact.results, exact.sizes, strict=True):
        # A gradient has the dtype of the captured tensor.
        eps = roundings * torch.finfo(dtype).eps + torch.finfo(result.dtype).eps
        result = result.detach().cpu().double()
        assert result.shape == value.shape, (name, result.shape, value.shape)
        # A row that sees no key has an infinite logsumexp.
        assert torch.equal(result.isfinite(), value.isfinite()), name
        assert torch.equal(result[~result.isfinite()], value[~value.isfinite()]), name
        error = (result - value)[value.isfinite()].norm().item()
        room = eps * size + 1e-30
        assert error <= room, f"{name} is off by {error:.3g}, which may be {room:.3g}"


def cotangents_of(query, value, dtype):
    """Draw the gradients of output and logsumexp."""
    generator = torch.Generator().manual_seed(7)
    rows = query.shape[:-1]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shapes = (((*rows, value.shape[-1]), dtype), (rows, wide))
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(kind).to(query.device)
        for shape, kind in shapes
    ]


def qkv(sizes, dtype, device, key_heads=None, value_dim=None, head_dim=16):
    """Draw query, key and value; ``sizes`` are (batch, heads, queries, keys)."""
    batch, heads, queries, keys = sizes
    key_heads, value_dim = key_heads or heads, value_dim or head_dim
    generator = torch.Generator().manual_seed(3)
    shapes = (
        (batch, heads, queries, head_dim),
        (batch, key_heads, keys, head_dim),
        (batch, key_heads, keys, value_dim),
    )
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        .to(dtype)
        .to(device)
        .requires_grad_()
        for shape in shapes
    ]


def results_of(function, inputs, captured, cotangents):
    """Return output and logsumexp of a call, and all gradients."""
    output, logsumexp = function(*inputs)
    gradients = torch.autograd.grad(
        (output, logsumexp),
        (*inputs, *captured),
        cotangents,
        allow_unused=True,
        materialize_grads=True,
    )
    return [output, logsumexp, *gradients]
