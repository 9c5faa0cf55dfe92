"""Users' functions of scores, each with the tensors whose gradients it needs.

A maker takes ``new(*shape)``, which makes a tensor that requires a gradient, and ``integers(high,
*shape)``. Shapes are those of `SIZES`.
"""

import functools

import torch
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

SIZES = BATCH, HEADS, QUERIES, KEYS = 2, 3, 5, 7
MAKERS = {}


def score_mod(maker):
    MAKERS[maker.__name__] = maker
    return maker


@score_mod
def alibi(new, integers):
    slopes = new(HEADS)
    return lambda score, b, h, q, k: score + slopes[h] * (k - q)


@score_mod
def fixed_alibi(new, integers):
    return lambda score, b, h, q, k: score - 2.0 ** (-(h + 1) * 8.0 / HEADS) * (q - k).abs()


@score_mod
def soft_cap(new, integers):
    return lambda score, b, h, q, k: torch.tanh(score / 2) * 2


@score_mod
def temperature(new, integers):
    factor, shift = new(), new(1)
    return lambda score, b, h, q, k: score * factor + shift[0] * shift


@score_mod
def relative_position(new, integers):
    table = new(HEADS, QUERIES + KEYS)
    return lambda score, b, h, q, k: score + table[h, q - k] * score.sigmoid()


@score_mod
def table_in_steps(new, integers):
    table = new(BATCH, HEADS, KEYS, 1)
    return lambda score, b, h, q, k: score * table[b][h][k].squeeze() + table[b, :, k, 0][h]


@score_mod
def twice_the_same(new, integers):
    table = new(HEADS, KEYS)
    return lambda score, b, h, q, k: score * table[h, k] + table[h, k].exp() + table[h][k]


@score_mod
def buckets(new, integers):
    bias, bucket = new(4, HEADS), integers(4, QUERIES + KEYS)
    return lambda score, b, h, q, k: score + bias[bucket[q - k], h]


@score_mod
def embedding(new, integers):
    weight = new(KEYS, HEADS)
    return lambda score, b, h, q, k: score + torch.nn.functional.embedding(k, weight)[h]


@score_mod
def views(new, integers):
    table = new(2, KEYS, HEADS)
    return lambda score, b, h, q, k: score + table[0].T[h, k] + table[:, 2:][b, q // 2, 1]


@score_mod
def computed_tables(new, integers):
    table = new(HEADS, KEYS)
    return lambda score, b, h, q, k: (
        score + (table * 2).exp()[h, k] + torch.arange(9.0, device=k.device)[k].sin()
    )


@score_mod
def causal(new, integers):
    return lambda score, b, h, q, k: torch.where(q >= k, score, -float("inf"))


@score_mod
def filled(new, integers):
    return lambda score, b, h, q, k: score.masked_fill((q - k).abs() > 2, -10) + score


@score_mod
def positions(new, integers):
    return lambda score, b, h, q, k: (
        score * ((q % 3) + (k // 2) + torch.div(q - k, 2, rounding_mode="trunc"))
        + (q / 3)
        + torch.fmod(q - k, 3)
        + ((q << 1) | (k & 3) ^ (b >> 1))
    )


@score_mod
def functions(new, integers):
    return lambda score, b, h, q, k: (
        torch.exp(-score.square())
        + (score.abs() + 1).log()
        + torch.log1p(score * score).sqrt()
        + torch.rsqrt(score.cos() + 2)
        + torch.expm1(score / 4)
        + torch.exp2(score / 4)
        + torch.log2(2 + score.sin())
        + torch.erf(score)
        + score.relu()
        + score.sign()
        + score.floor()
        + (1 - score).trunc()
        + score.ceil()
        + torch.round(score)
    )


@score_mod
def powers(new, integers):
    return lambda score, b, h, q, k: (
        score**2
        + score**3
        + (score**2 + 1) ** 0.5
        + (score**2 + 1) ** -1
        + (score.abs() + 0.1) ** 1.7
        + 1.5**score
        + (score.abs() + 0.1) ** score
        + (q**2 - k**3)
    )


@score_mod
def bounds(new, integers):
    low = new()
    return lambda score, b, h, q, k: (
        score.clamp(-1, 0.5)
        + score.clamp(min=0.3)
        + torch.minimum(score, torch.maximum(low, q - 1.5))
        + torch.clamp(score, max=low)
    )


@score_mod
def activations(new, integers):
    f = torch.nn.functional
    return lambda score, b, h, q, k: (
        f.gelu(score) + f.silu(score) + f.softplus(score) + f.leaky_relu(score) + f.elu(score)
    )


@score_mod
def logic(new, integers):
    flags = integers(2, KEYS).bool()
    return lambda score, b, h, q, k: torch.where(
        (flags[k] & ~(q > 2)) | torch.logical_xor(h, k) & torch.logical_not(b),
        score * 2,
        score.neg(),
    )


@score_mod
def made_inside(new, integers):
    return lambda score, b, h, q, k: (
        score * torch.tensor(3.0)
        + torch.tensor([1.0, 2.0, 3.0], device=h.device)[h]
        + torch.ones_like(score)
        + torch.full_like(score, 0.5) * q
    )


@score_mod
def no_gradient(new, integers):
    return lambda score, b, h, q, k: score.detach() * score + (score > 0).to(score.dtype)


@score_mod
def without_the_score(new, integers):
    table = new(KEYS)
    return lambda score, b, h, q, k: table[k]


@score_mod
def integers_alone(new, integers):
    return lambda score, b, h, q, k: q - k


@score_mod
def straight_through(new, integers):
    class Round(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x.round()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad):
            return grad * 0.5

    return lambda score, b, h, q, k: Round.apply(score)


@score_mod
def composed(new, integers):
    slopes, table = new(HEADS), new(HEADS, KEYS)

    def inner(score, b, h, q, k, factor):
        return score + factor * slopes[h] * (k - q)

    def outer(score, b, h, q, k):
        return torch.tanh(inner(score, b, h, q, k, factor=0.5) + table[h, k])

    return outer


def causal_mask(b, h, q, k):
    return q >= k


def window(size):
    return lambda b, h, q, k: (q - k).abs() <= size


def document_mask(documents):
    return lambda b, h, q, k: documents[q] == documents[k]


def prefix(length):
    return lambda b, h, q, k: k < length[b]


def mask_mods(integers):
    documents = integers(2, KEYS)
    return {
        "causal": causal_mask,
        "window": window(1),
        "document": document_mask(documents),
        "prefix": or_masks(prefix(integers(KEYS, BATCH)), causal_mask),
        "dilated": and_masks(causal_mask, lambda b, h, q, k: (q - k) % 2 == 0),
        "all": and_masks(causal_mask, window(2), document_mask(documents), noop_mask),
        "partial": functools.partial(lambda b, h, q, k, step: q // step >= k // step, step=2),
    }
