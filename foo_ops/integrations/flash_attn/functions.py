"""Attention of dense and packed sequences, with the signatures of the flash_attn package."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from foo_ops.ops.attention.options import given_options

# ------------------------------------------------------------------------------------------ options

# Options common to all functions of flash_attn, and checks of layouts.


Window = tuple[int, int]
EVERYTHING = (-1, -1)


class Options(NamedTuple):
    """Options common to all functions.

    Attributes:
        dropout_p: probability that a weight becomes zero.
        softmax_scale: factor of the scores, by default 1 / sqrt(D).
        causal: query i sees the keys up to i + Sk - Sq.
        window_size: (left, right): query i sees the keys from i + Sk - Sq - left to i + Sk - Sq +
            right; -1 means no bound.
        softcap: if above 0, scores become softcap * tanh(score / softcap).
        alibi_slopes: (H,) or (B, H) float32; -slope * |i + Sk - Sq - j| is added to the scores.
    """

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: Window = EVERYTHING
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None

    def for_foo(self) -> dict[str, Any]:
        """Return all options except the slopes as keywords of foo's operators."""
        left, right = (-1 if bound < 0 else bound for bound in self.window_size)
        return given_options(
            scale=self.softmax_scale,
            dropout_p=self.dropout_p,
            window_left=left,
            window_right=0 if self.causal else right,
            softcap=self.softcap,
        )


def unpacked(
    function: str, name: str, packed: Tensor, layout: tuple[str | int, ...]
) -> tuple[Tensor, ...]:
    """Unbind the dimension whose size is an int in the layout."""
    place = next(place for place, size in enumerate(layout) if isinstance(size, int))
    if packed.dim() != len(layout) or packed.shape[place] != layout[place]:
        raise ValueError(
            f"{function}: {name} must be ({', '.join(map(str, layout))}), got {tuple(packed.shape)}"
        )
    return packed.unbind(place)


def require_four(function: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dim() != 4:
            raise ValueError(
                f"{function}: {name} must be (batch, seqlen, heads, head_dim), "
                f"got {tuple(tensor.shape)}"
            )


# ---------------------------------------------------------------------------------------- functions


Results = Tensor | tuple[Tensor, Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYTHING,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """Compute attention, with gradients for q, k, v and alibi_slopes.

    Args:
        q: (B, Sq, H, D).
        k, v: (B, Sk, Hkv, D), H a multiple of Hkv.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes: see `Options`.
        deterministic: ignored, since results are always deterministic.
        return_attn_probs: return also the logsumexp and, as flash_attn does without dropout, an
            empty tensor. Must be False with dropout: the weights are never in memory as a whole.

    Returns:
        The output, (B, Sq, H, D) and contiguous; the logsumexp is (B, H, Sq) float32, or float64
        for float64.
    """
    options = Options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _dense("flash_attn_func", q, k, v, options, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYTHING,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """Compute `flash_attn_func` with keys and values in one tensor, (B, Sk, 2, Hkv, D)."""
    name = "flash_attn_kvpacked_func"
    k, v = unpacked(name, "kv", kv, ("batch", "seqlen", 2, "heads", "head_dim"))
    options = Options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _dense(name, q, k, v, options, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYTHING,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """Compute `flash_attn_func` with query, key and value in one tensor, (B, S, 3, H, D)."""
    name = "flash_attn_qkvpacked_func"
    q, k, v = unpacked(name, "qkv", qkv, ("batch", "seqlen", 3, "heads", "head_dim"))
    options = Options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _dense(name, q, k, v, options, return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYTHING,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Results:
    """Compute attention of packed sequences, with gradients for q, k, v and alibi_slopes.

    Args:
        q: (total_q, H, D).
        k, v: (total_k, Hkv, D), or with block_table (num_blocks, block_size, Hkv, D).
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32: where each sequence begins, and the end.
        max_seqlen_q, max_seqlen_k: upper bounds of the sequences' lengths.
        block_table: (B, blocks) int32: the blocks of each sequence's keys.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs: as in `flash_attn_func`.

    Returns:
        The output, (total_q, H, D); the logsumexp is (H, total_q) float32, or float64 for float64.
    """
    name = "flash_attn_varlen_func"
    options = Options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _packed(name, q, k, v, lengths, options, return_attn_probs, block_table)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYTHING,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """Compute `flash_attn_varlen_func` with keys and values in one tensor, (total_k, 2, Hkv, D)."""
    name = "flash_attn_varlen_kvpacked_func"
    k, v = unpacked(name, "kv", kv, ("total", 2, "heads", "head_dim"))
    options = Options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _packed(name, q, k, v, lengths, options, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYTHING,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """Compute `flash_attn_varlen_func` with all three in one tensor, (total, 3, H, D)."""
    name = "flash_attn_varlen_qkvpacked_func"
    q, k, v = unpacked(name, "qkv", qkv, ("total", 3, "heads", "head_dim"))
    options = Options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    lengths = Lengths(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return _packed(name, q, k, v, lengths, options, return_attn_probs)


class Lengths(NamedTuple):
    """Boundaries of packed sequences, and upper bounds of their lengths."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def _dense(
    function: str, q: Tensor, k: Tensor, v: Tensor, options: Options, return_attn_probs: bool
) -> Results:
    require_four(function, q=q, k=k, v=v)
    _refuse_weights(function, options, return_attn_probs)
    taken = options.for_foo()
    if options.causal and taken.get("window_left", -1) < 0 and q.shape[1] == k.shape[1]:
        # Equivalent to the window, and known as causal without reading sizes.
        del taken["window_right"]
        taken["is_causal"] = True
    output, logsumexp = torch.ops.foo.attention.default(
        *(tensor.transpose(1, 2) for tensor in (q, k, v)), None, options.alibi_slopes, **taken
    )
    output = output.transpose(1, 2).contiguous()
    return _with_weights(output, logsumexp) if return_attn_probs else output


def _packed(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    options: Options,
    return_attn_probs: bool,
    block_table: Tensor | None = None,
) -> Results:
    _refuse_weights(function, options, return_attn_probs)
    output, logsumexp = torch.ops.foo.attention_varlen.default(
        q,
        k,
        v,
        lengths.cu_seqlens_q,
        lengths.cu_seqlens_k,
        None,
        block_table,
        options.alibi_slopes,
        max_seqlen_q=lengths.max_seqlen_q,
        max_seqlen_k=lengths.max_seqlen_k,
        **options.for_foo(),
    )
    return _with_weights(output, logsumexp) if return_attn_probs else output


def _refuse_weights(function: str, options: Options, return_attn_probs: bool) -> None:
    if return_attn_probs and options.dropout_p > 0.0:
        raise NotImplementedError(
            f"{function}: return_attn_probs must be False where dropout_p is above 0, since the "
            "weights are never in memory as a whole, got True"
        )


def _with_weights(output: Tensor, logsumexp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return output, logsumexp, output.new_empty(0)
