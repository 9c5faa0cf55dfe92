"""Reference implementations of all operators, as simple as possible, for tests and benchmarks.

Inputs and results are float64 (complex128), and gradients come from autograd. Nothing here is
shared with the operators, and none of it is fast: attention builds the whole matrix of scores.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def abs(input: Tensor) -> Tensor:
    """Return the absolute value; for complex numbers the modulus."""
    return torch.abs(input)


def rms_norm(input: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6) -> Tensor:
    """Divide rows by their root mean square, and multiply by a weight."""
    output = input / torch.sqrt(input.square().mean(-1, keepdim=True) + eps)
    return output if weight is None else output * weight


def add_rms_norm(
    input: Tensor, residual: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Return the norm of a sum, and the sum."""
    total = input + residual
    return rms_norm(total, weight, eps=eps), total


def layer_norm(
    input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """Subtract the mean of rows, divide by their standard deviation, apply weight and bias."""
    centred = input - input.mean(-1, keepdim=True)
    output = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)
    output = output if weight is None else output * weight
    return output if bias is None else output + bias


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Return the norm of a sum, and the sum."""
    total = input + residual
    return layer_norm(total, weight, bias, eps=eps), total


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply rows by a matrix, and add a bias."""
    output = torch.einsum("...k,nk->...n", input, weight)
    return output if bias is None else output + bias


def groups_of(offsets: Tensor) -> Iterator[tuple[int, int]]:
    """Yield the first and the last row of each group, the last one excluded."""
    first = 0
    for end in offsets.tolist():
        yield first, end
        first = end


def grouped_linear(
    input: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Multiply each group of rows by its matrix."""
    # Zeros that have a gradient, which are all of the output if there are no groups.
    output = input @ input.new_zeros(input.shape[1], weight.shape[1])
    for group, (first, end) in enumerate(groups_of(offsets)):
        rows = linear(input[first:end], weight[group], None if bias is None else bias[group])
        output = output.index_add(0, torch.arange(first, end), rows)
    return output


def activation_of(
    gate: Tensor,
    *,
    activation: str = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    **_: Any,
) -> Tensor:
    """Activate gates, which are at most ``limit``."""
    x = gate if limit is None else torch.where(gate > limit, limit, gate)
    if activation == "silu":
        return x * torch.sigmoid(alpha * x)
    if activation in ("relu", "relu2"):
        return torch.where(x < 0, 0, x) ** (2 if activation == "relu2" else 1)
    if activation == "gelu":
        return x * torch.special.ndtr(x)
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def factor_of(
    up: Tensor, *, limit: float | None = None, up_offset: float = 0.0, **_: Any
) -> Tensor:
    """Return the factors of activated gates."""
    if limit is not None:
        up = torch.where(up > limit, limit, torch.where(up < -limit, -limit, up))
    return up + up_offset


def moe_experts(
    hidden: Tensor,
    expert_index: Tensor,
    expert_weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    is_gated: bool = True,
    is_interleaved: bool = False,
    **options: Any,
) -> Tensor:
    """Add up, for each token, the results of its experts, one expert after the other."""
    output = hidden.new_zeros(hidden.shape[0], down.shape[1])
    for expert in range(gate_up.shape[0]):
        tokens, choices = torch.where(expert_index == expert)
        x = linear(
            hidden[tokens],
            gate_up[expert],
            gate_up_bias[expert] if gate_up_bias is not None else None,
        )
        gate, half = x, x.shape[1] // 2
        if is_gated:
            gate = x[:, ::2] if is_interleaved else x[:, :half]
        x_activated = activation_of(gate, **options)
        if is_gated:
            x_activated = x_activated * factor_of(
                x[:, 1::2] if is_interleaved else x[:, half:], **options
            )
        rows = linear(
            x_activated, down[expert], down_bias[expert] if down_bias is not None else None
        )
        output = output.index_add(0, tokens, rows * expert_weight[tokens, choices, None])
    return output


SECTION = 512


def input_of_8_bits(input: Tensor, scale: Tensor, by_section: bool) -> Tensor:
    """Round rows for a weight with a scale for each row or group, or by sections of the depth."""
    if by_section:
        return torch.cat([rows_of_8_bits(it, 1) for it in input.split(SECTION, -1)], -1)
    return rows_of_8_bits(input, scale.shape[1] if scale.dim() == 2 else 1)


def rows_of_8_bits(input: Tensor, groups: int) -> Tensor:
    """Round each group of a row to 255 equal steps; gradients pass straight through.

    Steps are as wide as in float32, to which float64 numbers of low precision are converted.
    """
    if not input.shape[-1]:
        return input
    numbers = input.detach().float().unflatten(-1, (groups, -1))
    largest = numbers.abs().max(-1, keepdim=True).values
    inverse = torch.div(torch.tensor(127.0).to(largest), largest)
    is_small = largest < 2.0**-100
    integers = torch.where(is_small, 0.0, (numbers * inverse).round()).double()
    rounded = integers * torch.div(largest, 127.0).double()
    rounded = torch.where(largest.isfinite(), rounded, torch.nan).flatten(-2)
    return rounded + (input - torch.where(input.isfinite(), input, 0.0).detach()).nan_to_num(0.0)


def weight_of_8_bits(
    numbers: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, least: int, most: int
) -> Tensor:
    """Return numbers (N, K) of groups that are rounded to 8 bits by sections.

    Steps are as wide as in float32: a 127th of the largest magnitude that a section's codes, of
    which ``least`` and ``most`` are the ends, can have.
    """
    groups, rounded = scale.shape[1], []
    if not numbers.numel():
        return numbers
    codes, scale, zero = (
        it.detach().float() for it in (codes.unflatten(1, (groups, -1)), scale, zero)
    )
    largest = torch.maximum((scale * (most - zero)).abs(), (scale * (least - zero)).abs())
    for some in torch.arange(groups, device=scale.device).split(SECTION // codes.shape[2]):
        magnitude = largest[:, some].amax(1, keepdim=True)
        is_small = magnitude < 2.0**-100
        inverse = torch.div(torch.full_like(magnitude, 127.0), magnitude)
        factor = scale[:, some] * torch.where(is_small, 0.0, inverse)
        steps = ((codes[:, some] - zero[:, some, None]) * factor[..., None]).round().double()
        width = torch.where(is_small, 0.0, magnitude / 127.0).double()[..., None]
        rounded.append(torch.where(magnitude[..., None].isfinite(), steps * width, torch.nan))
    return torch.cat(rounded, 1).flatten(1)


def linear_by_section(
    input: Tensor, numbers: Tensor, rounded: Tensor, bias: Tensor | None
) -> Tensor:
    """Multiply by rounded numbers, with the gradients of those that are not."""
    return linear(input, numbers, bias) + linear(input.detach(), (rounded - numbers).detach())


def linear_int8(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    activations: int | None = None,
    by_section: bool = False,
) -> Tensor:
    """Multiply rows by an int8 weight, scale the columns, or their groups, and add a bias."""
    if activations is not None:
        input = input_of_8_bits(input, scale, by_section)
    if scale.dim() == 2:
        numbers = numbers_of_int8(weight, scale)
        if by_section:
            none = torch.zeros_like(scale)
            rounded = weight_of_8_bits(numbers, weight, scale, none, -128, 127)
            return linear_by_section(input, numbers, rounded, bias)
        return linear(input, numbers, bias)
    output = torch.einsum("...k,nk,n->...n", input, weight.to(input.dtype), scale)
    return output if bias is None else output + bias


def numbers_of_int8(weight: Tensor, scale: Tensor) -> Tensor:
    """Dequantize integers whose groups, as many as scale has columns, have a scale each."""
    if not scale.numel():
        return weight.to(scale.dtype)
    return weight.to(scale.dtype) * scale.repeat_interleave(weight.shape[1] // scale.shape[1], 1)


def numbers_of_fp8(weight: Tensor) -> Tensor:
    """Return the numbers of codes of sign, 4 bits of exponent and 3 of mantissa, in float64."""

    def number_of(code: int) -> float:
        sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
        magnitude = 2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else mantissa / 2**9
        if (exponent, mantissa) == (15, 7):
            magnitude = math.nan
        return -magnitude if sign else magnitude

    numbers = torch.tensor([number_of(code) for code in range(256)], dtype=torch.float64)
    return numbers.to(weight.device)[weight.long()]


def linear_fp8(input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply rows by a weight of 8-bit floating-point numbers, like `linear_int8`."""
    return linear_int8(input, numbers_of_fp8(weight), scale, bias)


def numbers_of_mxfp4(weight: Tensor, scale: Tensor) -> Tensor:
    """Return the numbers of codes of sign, two bits of exponent and one of mantissa, in float64."""

    def number_of(code: int) -> float:
        sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
        magnitude = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
        return -magnitude if sign else magnitude

    numbers = torch.tensor([number_of(code) for code in range(16)], dtype=torch.float64)
    numbers = numbers.to(weight.device)
    value = torch.empty((*weight.shape[:-1], 2 * weight.shape[-1]), dtype=torch.float64)
    value = value.to(weight.device)
    value[..., ::2] = numbers[(weight % 16).long()]
    value[..., 1::2] = numbers[torch.div(weight, 16, rounding_mode="floor").long()]
    powers = torch.tensor([*(2.0 ** (it - 127) for it in range(255)), torch.nan])
    factors = powers.double().to(weight.device)[scale.long()]
    return value * factors.repeat_interleave(32, -1)


def linear_mxfp4(
    input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Multiply rows by an MXFP4 weight, and add a bias."""
    return linear(input, numbers_of_mxfp4(weight, scale), bias)


def numbers_of_table4(weight: Tensor, scale: Tensor, table: Tensor) -> Tensor:
    """Return the numbers of codes, the first of a byte in its lower bits, times their scales."""
    codes = torch.empty((weight.shape[0], 2 * weight.shape[1]), dtype=torch.int64)
    codes = codes.to(weight.device)
    codes[:, ::2] = weight % 16
    codes[:, 1::2] = torch.div(weight, 16, rounding_mode="floor")
    numbers = table.index_select(0, codes.flatten()).view(codes.shape)
    return numbers * scale.repeat_interleave(codes.shape[1] // max(scale.shape[1], 1), 1)


def linear_table4(
    input: Tensor, weight: Tensor, scale: Tensor, table: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Multiply rows by the numbers of 4-bit codes, and add a bias."""
    return linear(input, numbers_of_table4(weight, scale, table), bias)


def linear_int4(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor,
    bias: Tensor | None = None,
    *,
    group_size: int,
    activations: int | None = None,
    by_section: bool = False,
) -> Tensor:
    """Multiply rows by a dequantized 4-bit weight, and add a bias."""
    if activations is not None:
        input = input_of_8_bits(input, scale, by_section)
    numbers = numbers_of_int4(weight, scale, zero, group_size)
    if by_section:
        codes = numbers_of_int4(weight, torch.ones_like(scale), torch.zeros_like(zero), group_size)
        rounded = weight_of_8_bits(numbers, codes, scale, zero, 0, 15)
        return linear_by_section(input, numbers, rounded, bias)
    return linear(input, numbers, bias)


def numbers_of_int4(weight: Tensor, scale: Tensor, zero: Tensor, group_size: int) -> Tensor:
    """Dequantize: unpack the lower four bits of a group's bytes, and then the upper ones."""
    bytes = weight.to(scale.dtype).unflatten(1, (scale.shape[1], group_size // 2))
    integers = torch.cat((bytes % 16, bytes.div(16, rounding_mode="floor")), 2)
    return ((integers - zero[..., None]) * scale[..., None]).flatten(1)


def linear_activation(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str
) -> Tensor:
    """Apply an activation to the result of `linear`."""
    return activation_of(linear(input, weight, bias), activation=activation)


def linear_silu_mul(input: Tensor, gate_weight: Tensor, up_weight: Tensor) -> Tensor:
    """Multiply by two matrices, and gate the second product by the first."""
    return silu_mul(linear(input, gate_weight), linear(input, up_weight))


def linear_silu_mul_quantized(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    activations: int | None = None,
    by_section: bool = False,
) -> Tensor:
    """Multiply by the integers of two matrices, and gate the second product by the first."""
    rounding: dict[str, Any] = {"activations": activations, "by_section": by_section}
    if zero is None:
        both = linear_int8(input, weight, scale, **rounding)
    else:
        size = 2 * weight.shape[1] // scale.shape[1] if scale.shape[1] else 32
        both = linear_int4(input, weight, scale, zero, group_size=size, **rounding)
    return silu_mul(*both.chunk(2, -1))


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Compute the gate of a SwiGLU."""
    return activation_of(gate) * up


def cache_append(
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return copies of the caches with the new keys and values."""
    results = key_cache.clone(), value_cache.clone()
    for result, rows in zip(results, (key, value)):
        for batch, first in enumerate(positions.tolist()):
            if block_table is None:
                result[batch].narrow(1, first, rows.shape[2]).copy_(rows[batch])
                continue
            for position, row in enumerate(rows[batch], first):
                block, place = divmod(position, result.shape[1])
                result[int(block_table[batch, block]), place] = row
    return results


def rotary_embedding(
    input: Tensor,
    cosine: Tensor,
    sine: Tensor,
    *,
    interleaved: bool = False,
    inverse: bool = False,
) -> Tensor:
    """Multiply pairs of elements, as complex numbers, by cosine + i sine."""
    half = cosine.shape[-1]
    angles = torch.complex(cosine, -sine if inverse else sine)
    turning, rest = input[..., : 2 * half], input[..., 2 * half :]
    if interleaved:
        pairs = torch.complex(turning[..., 0::2], turning[..., 1::2]) * angles
        turned = torch.stack((pairs.real, pairs.imag), -1).flatten(-2)
    else:
        pairs = torch.complex(turning[..., :half], turning[..., half:]) * angles
        turned = torch.cat((pairs.real, pairs.imag), -1)
    return torch.cat((turned, rest), -1)


def softmax_cross_entropy(
    logits: Tensor, target: Tensor, *, label_smoothing: float = 0.0, ignore_index: int = -100
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's loss, its logsumexp, and the mean of the losses."""
    logsumexp = logits.logsumexp(-1)
    is_ignored = target == ignore_index
    chosen = logits.gather(-1, target.masked_fill(is_ignored, 0).unsqueeze(-1)).squeeze(-1)
    loss = (1 - label_smoothing) * (logsumexp - chosen)
    if label_smoothing:
        loss = loss + label_smoothing * (logsumexp - logits.mean(-1))
    # With an infinite logit all probabilities are NaN, as in softmax.
    loss = loss * torch.where(logsumexp == torch.inf, torch.nan, 1.0)
    return loss.masked_fill(is_ignored, 0), logsumexp, loss[~is_ignored].mean()


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    softcap: float = 0.0,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `softmax_cross_entropy` of the logits of a linear layer."""
    logits = linear(hidden, weight, bias)
    if softcap > 0.0:
        logits = softcap * torch.tanh(logits / softcap)
    return softmax_cross_entropy(logits, target, **options)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    dropout_mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the softmax of the scores times value, and the logsumexp of the scores.

    Args:
        query: (batch, heads, queries, head_dim)
        key: (batch, key_heads, keys, head_dim); query's head ``h`` attends to key's head
            ``h // (heads // key_heads)``.
        value: (batch, key_heads, keys, value_dim)
        attn_bias: broadcasts to (batch, heads, queries, keys); bool, or added to the scores.
        alibi_slopes: (heads,) or (batch, heads); times the distance, subtracted from the scores.
        sinks: (heads,) or (batch, heads), one more logit for each row, which only counts in the
            denominator.
        dropout_mask: (batch, heads, queries, keys), True for the probabilities that dropout keeps;
            they are divided by ``1 - dropout_p``. It does not change the denominator.

    Returns:
        (batch, heads, queries, value_dim) and (batch, heads, queries).
    """
    scores = masked_scores(
        query,
        key,
        attn_bias,
        alibi_slopes,
        is_causal=is_causal,
        scale=scale,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
    )
    if sinks is not None:
        scores = torch.cat((scores, sinks[..., None, None].expand(*scores.shape[:3], 1)), -1)
    # A row that sees nothing has no softmax: use zeros, and replace the result at the end.
    sees = (scores > -math.inf).any(-1) | scores.isnan().any(-1)
    scores = scores.where(sees.unsqueeze(-1), 0)
    # Beside scores of 1e20 the logarithm of the sum would be lost, so subtract a shift first.
    size = torch.logsumexp(scores.detach(), -1)
    size = size.where(size.isfinite(), 0)
    scores = scores - size.unsqueeze(-1)
    logsumexp = torch.logsumexp(scores, -1)
    probabilities = torch.exp(scores - logsumexp.unsqueeze(-1))[..., : key.shape[2]]
    logsumexp = logsumexp + size
    if dropout_mask is not None:
        probabilities = probabilities.where(dropout_mask, 0) / (1 - dropout_p)
    output = probabilities @ for_each_query_head(value, query)
    return output.where(sees.unsqueeze(-1), 0), logsumexp.where(sees, -math.inf)


def masked_scores(
    query: Tensor,
    key: Tensor,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
) -> Tensor:
    """Return scores (batch, heads, queries, keys), -inf where a query does not see a key."""
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    scores = scale * (query @ for_each_query_head(key, query).mT)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    distance = distances(query.shape[2], key.shape[2])
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[..., None, None] * distance.abs()
    sees = torch.ones_like(distance, dtype=torch.bool)
    if is_causal:
        sees = sees.tril()
    if window_left >= 0:
        sees = sees & (distance <= window_left)
    if window_right >= 0:
        sees = sees & (distance >= -window_right)
    if attn_bias is not None and attn_bias.dtype == torch.bool:
        sees = sees & attn_bias
    elif attn_bias is not None:
        scores = scores + attn_bias
    return scores.where(sees, -math.inf)


def distances(queries: int, keys: int) -> Tensor:
    """Return the distance of each key before each query, (queries, keys), aligned at the end."""
    return torch.arange(keys - queries, keys).unsqueeze(-1) - torch.arange(keys)


def for_each_query_head(tensor: Tensor, query: Tensor) -> Tensor:
    """Repeat key or value (batch, key_heads, ...) to (batch, heads, ...)."""
    heads, key_heads = query.shape[1], tensor.shape[1]
    return tensor.repeat_interleave(heads // max(key_heads, 1), dim=1)


def in_order(pages: Tensor, blocks: Tensor) -> Tensor:
    """Return a sequence's blocks (num_blocks, block_size, heads, ...) as (heads, rows, ...)."""
    return pages[blocks].flatten(0, 1).transpose(0, 1)


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Compute attention within each of several packed sequences, at least one.

    Args:
        query: (total_queries, heads, head_dim); sequence ``b`` has the rows from
            ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]``.
        key: (total_keys, key_heads, head_dim), likewise with ``cu_seqlens_k``. With ``block_table``
            (blocks, block_size, key_heads, head_dim).
        value: as key, with value_dim.
        seqused_k: (sequences,), how many of its keys each sequence uses; None for all.
        block_table: (sequences, most_blocks), the blocks that hold a sequence's keys.
        alibi_slopes, sinks: (heads,) or (sequences, heads)
        max_seqlen_q: an upper bound of the sequences' lengths, as max_seqlen_k for the keys in use.
        dropout_mask: (heads, total_queries, max_seqlen_k), as for attention.
        options: as for attention.

    Returns:
        (total_queries, heads, value_dim) and (heads, total_queries).
    """
    outputs, logsumexps = [], []
    for sequence in sequences(cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, key):
        assert len(sequence.queries) <= max_seqlen_q
        assert len(sequence.keys) <= max_seqlen_k
        if dropout_mask is not None:
            options["dropout_mask"] = dropout_mask[
                :, sequence.queries, : len(sequence.keys)
            ].unsqueeze(0)
        output, logsumexp = attention(
            *sequence.select(query, key, value),
            alibi_slopes=sequence.of_heads(alibi_slopes),
            sinks=sequence.of_heads(sinks),
            **options,
        )
        outputs.append(output.squeeze(0).transpose(0, 1))
        logsumexps.append(logsumexp.squeeze(0))
    return torch.cat(outputs), torch.cat(logsumexps, 1)


@dataclasses.dataclass(frozen=True)
class Sequence:
    """The place of a sequence in a packed batch.

    Attributes:
        index: its index in the batch.
        queries: the rows of query.
        keys: the rows of key and value; with blocks, rows of ``flatten(0, 1)`` of both.
        paged: whether there are blocks.
    """

    index: int
    queries: Tensor
    keys: Tensor
    paged: bool

    def select(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sequence's query, key and value, as for attention, in a batch of one."""
        if self.paged:
            key, value = key.flatten(0, 1), value.flatten(0, 1)
        parts = (query[self.queries], key[self.keys], value[self.keys])
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in parts)
        return query, key, value

    def of_heads(self, tensor: Tensor | None) -> Tensor | None:
        """Return the sequence's slopes or sinks, (heads,)."""
        return tensor if tensor is None or tensor.dim() == 1 else tensor[self.index]


def sequences(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    key: Tensor,
) -> Iterator[Sequence]:
    """Yield the sequences of a packed batch, in order."""
    for index in range(len(cu_seqlens_q) - 1):
        first_query, last_query = cu_seqlens_q[index : index + 2].tolist()
        first_key, last_key = cu_seqlens_k[index : index + 2].tolist()
        used = last_key - first_key if seqused_k is None else int(seqused_k[index])
        positions = torch.arange(used)
        if block_table is None:
            keys = first_key + positions
        else:
            size = key.shape[1]
            blocks = block_table[index].long()[positions // size]
            assert (blocks >= 0).all()
            keys = blocks * size + positions % size
        queries = torch.arange(first_query, last_query)
        yield Sequence(index, queries, keys, paged=block_table is not None)
