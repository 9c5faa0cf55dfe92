"""The functions of flash_attn, with and without a cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from foo_ops import library
from foo_ops.library.operators import dtype_name
from foo_ops.ops.attention.formula import given_options
from foo_ops.ops.attention.varlen import check_inputs
from foo_ops.ops.cache_append import INDICES

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
            f"{function}: return_attn_probs must be False if dropout_p is above 0, since the "
            "attention weights are never in memory as a whole, got True"
        )


def _with_weights(output: Tensor, logsumexp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return output, logsumexp, output.new_empty(0)


# ------------------------------------------------------------------------------------------ lengths

# foo::flash_attn_cache_lengths copies the lengths in a cache, or raises an error if they do not
# fit.
#
# The operators that write to the cache take this copy, so that all checks come first, also in a
# compiled graph. Only those blocks are checked that hold keys. ``positions`` are the rows of the
# rotary tables, or -1 without rotation; ``is_paged`` is whether errors call the blocks block_table
# or cache_batch_idx.


NAME = "flash_attn_with_kvcache"
LENGTHS_NAME = "foo::flash_attn_cache_lengths"
library.define(
    LENGTHS_NAME,
    "(Tensor lengths, Tensor blocks, Tensor? leftpad, *, SymInt new, SymInt queries, "
    "SymInt block_size, SymInt num_blocks, SymInt positions, bool is_paged) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


# ----------------------------------------------------------------------------------------- kernel


def refuse(
    lengths: Tensor,
    blocks: Tensor,
    leftpad: Tensor | None,
    new: int,
    queries: int,
    block_size: int,
    num_blocks: int,
    positions: int,
    is_paged: bool,
) -> None:
    """Raise the error of a call for which the kernel returns False."""
    capacity, keys = blocks.shape[1] * block_size, lengths + new
    reason = f"the cache has {capacity} positions"
    _require_range("cache_seqlens", lengths, capacity - new, reason)
    if positions >= 0:
        reason = f"rotary_cos has {positions} positions"
        _require_range("cache_seqlens", lengths, positions - max(new, queries), reason)
    if leftpad is not None:
        # One by one: each sequence has its own number of keys.
        for pad, count in zip(leftpad, keys.tolist()):
            reason = f"the sequence has {count} keys in the cache"
            _require_range("cache_leftpad", pad[None], count, reason)
    starts = torch.arange(blocks.shape[1], device=lengths.device) * block_size
    used, name = blocks[starts < keys[:, None]], "block_table" if is_paged else "cache_batch_idx"
    _require_range(name, used, num_blocks - 1, f"k_cache has {num_blocks} rows")


def _require_range(name: str, tensor: Tensor, most: int, reason: str) -> None:
    outside = tensor[(tensor < 0) | (tensor > most)]
    if outside.numel():
        raise ValueError(
            f"{NAME}: {name} must be in [0, {most}], since {reason}, got {int(outside[0])}"
        )


@library.tile_kernel(tiles=lambda lengths: lengths.size, refuse=refuse)
def kernel(
    lengths: Any,
    blocks: Any,
    leftpad: Any,
    new: Any,
    queries: Any,
    block_size: Any,
    num_blocks: Any,
    positions: Any,
    is_paged: Any,
    output: Any,
    tiles: Any,
) -> bool:
    """Copy lengths; return False if a read or write would be outside the cache and the tables."""
    room = blocks.shape[1] * block_size - new
    if positions >= 0:
        room = min(room, positions - max(new, queries))
    for batch in tiles:
        length = lengths[batch]
        if length < 0 or length > room:
            return False
        keys = length + new
        if leftpad is not None:
            pad = leftpad[batch]
            if pad < 0 or pad > keys:
                return False
        for column in range(blocks.shape[1]):
            block = blocks[batch, column]
            if column * block_size < keys and (block < 0 or block >= num_blocks):
                return False
        output[batch] = length
    return True


# ------------------------------------------------------------------------------------------- fake


@library.register_fake(LENGTHS_NAME)
def fake(lengths: Tensor, blocks: Tensor, leftpad: Tensor | None, **options: Any) -> Tensor:
    _require_rows("lengths", lengths, 1, lengths)
    _require_rows("blocks", blocks, 2, lengths)
    if leftpad is not None:
        _require_rows("leftpad", leftpad, 1, lengths)
    return lengths.new_empty(lengths.shape)


def _require_rows(name: str, tensor: Tensor, dimensions: int, lengths: Tensor) -> None:
    if tensor.dim() != dimensions or tensor.shape[0] != lengths.shape[0]:
        shape = "(B,)" if dimensions == 1 else "(B, blocks)"
        raise ValueError(
            f"flash_attn_cache_lengths: {name} must be {shape} for the B of lengths, got "
            f"{list(tensor.shape)}"
        )


library.register_kernel(LENGTHS_NAME, ("cpu", "foo"), kernel)


@library.register_flops(LENGTHS_NAME)
def flops(*shapes: Any, **options: Any) -> int:
    """Return 0, since the operator only compares integers."""
    return 0


# ------------------------------------------------------------------------------------------- caches


Tables = tuple[Tensor, Tensor]


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYTHING,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Append new keys and values to a cache in place, and attend to all of it. No gradients.

    If an error is raised, nothing has been written, also in a compiled graph.

    Args:
        q: (B, Sq, H, D).
        k_cache, v_cache: (rows, capacity, Hkv, D), any strides, or with block_table
            (num_blocks, block_size, Hkv, D).
        k, v: (B, new, Hkv, D), written behind the cache_seqlens keys that are there.
        rotary_cos, rotary_sin: (positions, R / 2): rotate k and q by the angles of their positions
            in the cache before use. With neither causal nor window_size, all queries have the
            position of the first new key.
        cache_seqlens: how many positions are filled, an int or (B,) int32; by default all. This and
            the following tensors may be int64, too.
        cache_batch_idx: (B,) int32, the row of the cache for each sequence; by default the first B.
        cache_leftpad: (B,) int32, how many positions of the cache come before a sequence's first.
        block_table: (B, blocks) int32, the blocks that hold a sequence's keys, in order.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in flash_attn_func, where Sk
            counts the cache's keys and the new ones.
        rotary_interleaved: pairs are adjacent elements, else half a row apart.
        num_splits: ignored, since the kernel chooses the splits of the keys.
        return_softmax_lse: return also the logsumexp.

    Returns:
        The output, (B, Sq, H, D); the logsumexp is (B, H, Sq) float32, or float64 for float64.

    Raises:
        ValueError: for shapes that do not fit, if the cache is too short for the new keys, and for
            rows and blocks out of range that would be read or written.
        TypeError: for dtypes.
        NotImplementedError: for cache_batch_idx or cache_leftpad with block_table, as in
            flash_attn.

    Example:
        >>> cache = torch.zeros(2, 1, 16, 4, 32)
        >>> query, key, value = torch.randn(3, 1, 1, 4, 32).unbind()
        >>> foo_ops.integrations.flash_attn.flash_attn_with_kvcache(
        ...     query, *cache, key, value, cache_seqlens=0, causal=True
        ... ).equal(value)
        True
    """
    options = Options(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes)
    with torch.no_grad():
        cache = _Cache.of(q, k_cache, v_cache, cache_batch_idx, cache_leftpad, block_table)
        new = _checked_new(k, v, cache, q, cache_seqlens)
        tables = _checked_tables(rotary_cos, rotary_sin, new)
        count = 0 if new is None else new[0].shape[1]
        filled = cache.checked(_filled(cache_seqlens, q, cache), count, q.shape[1], tables)
        if not torch.compiler.is_compiling():
            # In a compiled graph, the fake kernel raises the same errors during tracing.
            cache.check_attention(q, filled, options)
        if new is not None:
            if tables is not None:
                is_local = causal or any(bound >= 0 for bound in window_size)
                queries = _following(filled, q.shape[1]) if is_local else filled[:, None]
                q = _rotated(q, queries, tables, rotary_interleaved)
                keys = _rotated(new[0], _following(filled, count), tables, rotary_interleaved)
                new = keys, new[1]
            cache.append(filled, *new)
        output, logsumexp = cache.attend(q, filled + count, options)
    return (output, logsumexp) if return_softmax_lse else output


class _Cache(NamedTuple):
    """A cache as blocks.

    Attributes:
        keys, values: (num_blocks, block_size, Hkv, D).
        blocks: (B, blocks) int64, the blocks of each sequence.
        is_paged: whether they come from block_table, else from cache_batch_idx.
        leftpad: (B,) int64, or None.
    """

    keys: Tensor
    values: Tensor
    blocks: Tensor
    is_paged: bool
    leftpad: Tensor | None

    @classmethod
    def of(
        cls,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch_idx: Tensor | None,
        leftpad: Tensor | None,
        block_table: Tensor | None,
    ) -> _Cache:
        require_four(NAME, q=q, k_cache=k_cache, v_cache=v_cache)
        _require_shape("v_cache", v_cache, (*k_cache.shape[:3], v_cache.shape[3]), "k_cache")
        for name, tensor in {"cache_batch_idx": batch_idx, "cache_leftpad": leftpad}.items():
            if tensor is not None and block_table is not None:
                raise NotImplementedError(
                    f"{NAME}: {name} must be None if block_table is given, got a tensor"
                )
            if tensor is not None:
                _require_integers(name, tensor, q, ())
        pad = None if leftpad is None else leftpad.long()
        if block_table is not None:
            columns = block_table.shape[-1] if block_table.dim() else 0
            _require_integers("block_table", block_table, q, (columns,))
            return cls(k_cache, v_cache, block_table.long(), True, pad)
        rows = torch.arange(len(q), device=q.device) if batch_idx is None else batch_idx.long()
        return cls(k_cache, v_cache, rows[:, None], False, pad)

    @property
    def block_size(self) -> int:
        return self.keys.shape[1]

    @property
    def capacity(self) -> int:
        return self.blocks.shape[1] * self.block_size

    def places(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the blocks of a sequence's positions (B, n), and the rows in them."""
        return self.blocks.gather(1, positions // self.block_size), positions % self.block_size

    def checked(self, filled: Tensor, new: int, queries: int, tables: Tables | None) -> Tensor:
        """Return a copy of the filled lengths (B,), if all reads and writes are in the cache.

        Args:
            filled: (B,) int64, how many positions of the cache each sequence fills.
            new, queries: how many keys are appended to each sequence, and how many queries it has.
            tables: the rotary tables, which must have a row for each position.
        """
        result: Tensor = torch.ops.foo.flash_attn_cache_lengths.default(
            filled,
            self.blocks,
            self.leftpad,
            new=new,
            queries=queries,
            block_size=self.block_size,
            num_blocks=self.keys.shape[0],
            positions=-1 if tables is None else tables[0].shape[0],
            is_paged=self.is_paged,
        )
        return result

    def append(self, filled: Tensor, k: Tensor, v: Tensor) -> None:
        torch.ops.foo.cache_append.default(self.keys, self.values, k, v, filled, self.blocks)

    def check_attention(self, q: Tensor, filled: Tensor, options: Options) -> None:
        """Raise the errors of foo::attention_varlen before anything is written."""
        arguments, keywords = self._arguments(q, filled, options)
        check_inputs(*arguments, **keywords)

    def attend(self, q: Tensor, filled: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        arguments, keywords = self._arguments(q, filled, options)
        output, logsumexp = torch.ops.foo.attention_varlen.default(*arguments, **keywords)
        output = output.view(*q.shape[:3], output.shape[-1])
        return output, logsumexp.view(q.shape[2], *q.shape[:2]).transpose(0, 1)

    def _arguments(
        self, q: Tensor, filled: Tensor, options: Options
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of foo::attention_varlen."""
        batch, queries = q.shape[:2]
        keys, values, blocks = self.keys, self.values, self.blocks
        if self.leftpad is not None:
            # Blocks of one row, so that a sequence may begin anywhere.
            filled = filled - self.leftpad
            positions = _following(self.leftpad, self.capacity).clamp(max=self.capacity - 1)
            block, row = self.places(positions)
            blocks = block * self.block_size + row
            keys, values = (each.flatten(0, 1)[:, None] for each in (keys, values))
        starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        packed = (q.flatten(0, 1), keys, values, starts * queries, 0 * starts)
        arguments = (*packed, filled.int(), blocks.int(), options.alibi_slopes)
        lengths = {"max_seqlen_q": queries, "max_seqlen_k": self.capacity}
        return arguments, lengths | options.for_foo()


def _following(first: Tensor, count: int) -> Tensor:
    """Return ``count`` positions from ``first`` on for each sequence, (B, count)."""
    return first[:, None] + torch.arange(count, device=first.device)


def _rotated(rows: Tensor, positions: Tensor, tables: Tables, interleaved: bool) -> Tensor:
    """Rotate (B, n, H, D) by the angles of positions, (B, n) or (B, 1)."""
    cosine, sine = (table[positions][:, :, None] for table in tables)
    return torch.ops.foo.rotary_embedding(rows, cosine, sine, interleaved=interleaved)


# ------------------------------------------------------------------------------------------ checks


def _require_shape(name: str, tensor: Tensor, shape: tuple[int, ...], model: str) -> None:
    if tensor.shape != shape:
        raise ValueError(
            f"{NAME}: {name} must have shape {tuple(shape)} to match {model}, got "
            f"{tuple(tensor.shape)}"
        )


def _require_integers(name: str, tensor: Tensor, q: Tensor, columns: tuple[int, ...]) -> None:
    """Require integers, since ``long`` would round other numbers silently."""
    if tensor.dtype not in INDICES:
        raise TypeError(f"{NAME}: {name} must be int32 or int64, got {dtype_name(tensor.dtype)}")
    _require_shape(name, tensor, (len(q), *columns), "q's batch")
    if tensor.device != q.device:
        raise ValueError(f"{NAME}: {name} must be on {q.device} as q is, got {tensor.device}")


def _checked_new(
    k: Tensor | None, v: Tensor | None, cache: _Cache, q: Tensor, cache_seqlens: int | Tensor | None
) -> tuple[Tensor, Tensor] | None:
    if (k is None) != (v is None):
        raise ValueError(f"{NAME}: k and v must be given together, got one of them")
    if k is None or v is None:
        return None
    if cache_seqlens is None:
        raise ValueError(f"{NAME}: cache_seqlens must be given if k is given, got None")
    require_four(NAME, k=k, v=v)
    for name, tensor, model in (("k", k, cache.keys), ("v", v, cache.values)):
        shape = (len(q), k.shape[1], *model.shape[2:])
        _require_shape(name, tensor, shape, f"q, k and {name}_cache")
        if tensor.dtype != model.dtype:
            raise TypeError(
                f"{NAME}: {name} must be {model.dtype} as {name}_cache is, got {tensor.dtype}"
            )
    return k, v


def _checked_tables(
    cosine: Tensor | None, sine: Tensor | None, new: tuple[Tensor, Tensor] | None
) -> Tables | None:
    if (cosine is None) != (sine is None):
        raise ValueError(
            f"{NAME}: rotary_cos and rotary_sin must be given together, got one of them"
        )
    if cosine is None or sine is None:
        return None
    if new is None:
        raise ValueError(f"{NAME}: k must be given if rotary_cos is given, got None")
    if cosine.dim() != 2:
        raise ValueError(
            f"{NAME}: rotary_cos must be (positions, rotary_dim / 2), got {tuple(cosine.shape)}"
        )
    _require_shape("rotary_sin", sine, tuple(cosine.shape), "rotary_cos")
    return cosine, sine


def _filled(cache_seqlens: int | Tensor | None, q: Tensor, cache: _Cache) -> Tensor:
    """Return how many positions of the cache each sequence fills, (B,) int64."""
    if isinstance(cache_seqlens, Tensor):
        _require_integers("cache_seqlens", cache_seqlens, q, ())
        return cache_seqlens.long()
    filled = cache.capacity if cache_seqlens is None else cache_seqlens
    if not isinstance(filled, (int, torch.SymInt)):
        raise TypeError(
            f"{NAME}: cache_seqlens must be an int or a tensor, got {type(filled).__name__}"
        )
    return torch.full((len(q),), filled, device=q.device)
