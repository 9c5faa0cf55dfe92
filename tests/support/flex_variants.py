"""Variants of attention that users write for flex_attention, as functions of single numbers.

A maker takes ``new(*shape)``, which makes a tensor that requires a gradient, and ``integers(high,
*shape)``; it returns a score_mod and a mask_mod, either of which may be None. Shapes are those of
`SIZES`.
"""

import torch
from torch.nn.attention.flex_attention import and_masks, or_masks

SIZES = BATCH, HEADS, QUERIES, KEYS = 2, 4, 70, 90
# Row length of an image of KEYS pixels.
WIDTH = 10
VARIANTS = {}


def variant(maker):
    VARIANTS[maker.__name__] = maker
    return maker


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return (q - k <= 8) & (q - k >= -3)


def dilated(b, h, q, k):
    return ((q - k).abs() <= 24) & ((q - k) % 4 == 0)


def strided(b, h, q, k):
    return (q - k < 5) | (k % 8 == 7)


def document_of(documents):
    return lambda b, h, q, k: documents[b, q] == documents[b, k]


def prefix_of(lengths):
    return lambda b, h, q, k: k < lengths[b]


@variant
def no_function(new, integers):
    return None, None


@variant
def causal_alone(new, integers):
    return None, causal


@variant
def alibi(new, integers):
    slopes = new(HEADS)
    return lambda score, b, h, q, k: score + slopes[h] * (k - q), None


@variant
def alibi_by_powers(new, integers):
    return (
        lambda score, b, h, q, k: score - torch.exp2(-(h + 1) * 8.0 / HEADS) * (q - k).abs()
    ), causal


@variant
def soft_cap(new, integers):
    return lambda score, b, h, q, k: 2.0 * torch.tanh(score / 2.0), causal


@variant
def soft_cap_that_learns(new, integers):
    cap = new()
    return lambda score, b, h, q, k: cap * torch.tanh(score / cap), None


@variant
def sliding_window(new, integers):
    return None, window


@variant
def prefix_lm(new, integers):
    return None, or_masks(prefix_of(integers(KEYS, BATCH)), causal)


@variant
def prefix_lm_by_scores(new, integers):
    length = integers(KEYS, BATCH)
    return (
        lambda score, b, h, q, k: torch.where((k < length[b]) | (q >= k), score, -float("inf"))
    ), None


@variant
def documents(new, integers):
    numbers = integers(3, BATCH, KEYS).sort(-1).values
    return None, and_masks(document_of(numbers), causal)


@variant
def documents_with_alibi(new, integers):
    slopes, numbers = new(HEADS), integers(3, BATCH, KEYS).sort(-1).values
    return (lambda score, b, h, q, k: score - slopes[h].exp() * (q - k)), and_masks(
        document_of(numbers), causal
    )


@variant
def dilated_window(new, integers):
    return None, dilated


@variant
def neighbourhood(new, integers):
    def sees(b, h, q, k):
        row, column = q // WIDTH, q % WIDTH
        row = row.clamp(1, QUERIES // WIDTH - 2)
        column = column.clamp(2, WIDTH - 3)
        return ((row - k // WIDTH).abs() <= 1) & ((column - k % WIDTH).abs() <= 2)

    return None, sees


@variant
def neighbourhood_with_bias(new, integers):
    table = new(HEADS, 2 * (KEYS // WIDTH) + 1, 2 * WIDTH + 1)

    def add(score, b, h, q, k):
        rows, columns = q // WIDTH - k // WIDTH, q % WIDTH - k % WIDTH
        return score + table[h, rows + KEYS // WIDTH, columns + WIDTH]

    return add, lambda b, h, q, k: (q // WIDTH - k // WIDTH).abs() <= 2


@variant
def sparse(new, integers):
    return None, and_masks(causal, strided)


@variant
def heads_of_two_kinds(new, integers):
    return None, lambda b, h, q, k: (q >= k) & ((h % 2 == 0) | (q - k < 6))


@variant
def relative_position(new, integers):
    return lambda score, b, h, q, k: score + (q - k), causal


@variant
def relative_position_table(new, integers):
    table = new(QUERIES + KEYS, HEADS)
    return lambda score, b, h, q, k: score + table[q - k + KEYS, h], None


@variant
def falling_table(new, integers):
    table = new(HEADS, QUERIES + KEYS)
    return lambda score, b, h, q, k: score + table[h, k - q + QUERIES], causal


@variant
def dense_bias(new, integers):
    bias = new(BATCH, HEADS, QUERIES, KEYS)
    return lambda score, b, h, q, k: score + bias[b, h, q, k], None


@variant
def bias_of_keys(new, integers):
    bias, gate = new(BATCH, KEYS), new(HEADS, QUERIES)
    return lambda score, b, h, q, k: score * gate[h, q].sigmoid() + bias[b, k], None


@variant
def t5_buckets(new, integers):
    table = new(32, HEADS)

    def bucket(distance):
        is_behind = (distance > 0).to(torch.int32) * 16
        distance = distance.abs()
        size = torch.log(distance.to(torch.float32).clamp(min=1.0) / 8) / 2.5257286443
        large = (8 + (size * 8).to(torch.int32)).clamp(max=15)
        return is_behind + torch.where(distance < 8, distance, large)

    return lambda score, b, h, q, k: score + table[bucket(k - q), h], None


@variant
def tanh_of_a_table(new, integers):
    table, scale = new(HEADS, KEYS), new(1)
    return (
        lambda score, b, h, q, k: 3 * torch.tanh((score * scale[0] + table[h, k]) / 3)
    ), or_masks(causal, prefix_of(integers(KEYS, BATCH)))


@variant
def embeddings(new, integers):
    codebook, words = new(5, 5), integers(5, BATCH, KEYS)
    return lambda score, b, h, q, k: score + codebook[words[b, q], words[b, k]], causal


@variant
def poisoned_zeros(new, integers):
    """Turn scores that are exactly zero, such as those beyond the last query, into NaN."""
    zeros = integers(1, HEADS)
    return lambda score, b, h, q, k: score + zeros[h] * torch.log(score.abs()), None
