"""foo::flex_attention computes attention whose scores a user's function changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foo_ops import _C, library
from foo_ops.library.operators import is_known
from foo_ops.ops.attention.dense import empty_results, product_flops
from foo_ops.ops.flex_attention.cache import traced
from foo_ops.ops.flex_attention.derivatives import composite, register_gradients
from foo_ops.ops.flex_attention.vmap import vmap, vmap_backward

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

TAGS: tuple[torch.Tag, ...] = (torch.Tag.pt2_compliant_tag,)

MASK = (
    "Tensor? kv_num_blocks=None, Tensor? kv_indices=None, Tensor? full_kv_num_blocks=None, "
    "Tensor? full_kv_indices=None"
)
# The programs' texts are in the language of foo_ops/kernels/flex/program.py.
PROGRAMS = (
    'str score_mod="", str mask_mod="", str backward="", float[] numbers=[], int[] integers=[], '
    "float? scale=None"
)
OPTIONS = f"{PROGRAMS}, SymInt query_block=128, SymInt key_block=128"

library.define(
    "foo::flex_attention",
    f"(Tensor query, Tensor key, Tensor value, Tensor[] captured, {MASK}, *, {OPTIONS}) "
    "-> (Tensor output, Tensor logsumexp)",
    tags=TAGS,
)

# The gradient of a captured tensor has size 0 if it is not needed.
library.define(
    "foo::flex_attention_backward",
    "(Tensor grad_output, Tensor grad_logsumexp, Tensor query, Tensor key, Tensor value, "
    f"Tensor[] captured, Tensor output, Tensor logsumexp, {MASK}, *, "
    f"bool[] captured_requires_grad, {OPTIONS}) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor[] grad_captured)",
    tags=TAGS,
)


Function = Callable[..., Tensor]


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Function | None = None,
    block_mask: BlockMask | Function | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention with a function that changes scores and another one that masks keys.

    It takes the arguments of torch.nn.attention.flex_attention.flex_attention, on CPU and on foo,
    forward and backward. The functions are compiled into our own vectorised kernels, once for each
    function: new lengths, new numbers and new captured tensors compile nothing.

    Args:
        query: (B, Hq, Sq, D), float16, bfloat16, float32 or float64, any strides, D up to 256.
        key: (B, Hkv, Sk, D), or with a batch of 1 for all rows of query's.
        value: (B, Hkv, Sk, Dv), Dv up to 256.
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)`` returns the new score, before the
            softmax; all are tensors of one number, the score in float32 (float64 for float64). It
            consists of operations on single numbers and on elements of captured tensors. These get
            gradients if they require some, summed in the score's dtype.
        block_mask: a BlockMask of torch's create_block_mask, of any block size; blocks that are
            masked as a whole cost nothing. Or ``mask_mod(b, h, q_idx, kv_idx)`` itself, which is
            first evaluated for blocks of 128.
        scale: factor of the products of query and key, by default 1 / sqrt(D).
        enable_gqa: each head of key and value serves Hq / Hkv heads of query in a row.
        return_lse: return the logarithm of the softmax's denominator, too.
        kernel_options: ignored, since they tune Triton kernels.

    Returns:
        The output, (B, Hq, Sq, Dv) in query's dtype, and with ``return_lse`` the natural logsumexp,
        (B, Hq, Sq) in float32 (float64 for float64). A query that sees no key has output 0 and
        logsumexp -inf. Both can be differentiated, twice; the second time in O(Sq * Sk) memory.

    Raises:
        ValueError: for shapes that do not fit together, and functions that do not fit scores.
        NotImplementedError: for a function with other operations than those on single numbers; the
            message has the line.
        TypeError: for dtypes.
        IndexError: if a function indexes a captured tensor outside of its shape.

    Example:
        >>> query, key, value = torch.randn(3, 1, 8, 100, 64).unbind()
        >>> slopes = torch.rand(8)
        >>> def alibi(score, b, h, q_idx, kv_idx):
        ...     return score + slopes[h] * (kv_idx - q_idx)
        >>> def causal(b, h, q_idx, kv_idx):
        ...     return q_idx >= kv_idx
        >>> foo_ops.flex_attention(query, key, value, alibi, causal).shape
        torch.Size([1, 8, 100, 64])
    """
    query, key, value = cast(query, key, value)
    if key.dim() == value.dim() == query.dim() == 4 and _is_shared(key, value, query):
        key, value = (it.expand(query.shape[0], -1, -1, -1) for it in (key, value))
    has_groups = query.dim() == key.dim() == 4 and is_known(query.shape[1] != key.shape[1])
    if has_groups and not enable_gqa:
        raise ValueError(
            f"flex_attention: key must have {query.shape[1]} heads as query has, or enable_gqa "
            f"must be True, got {key.shape[1]}"
        )
    mask_mod, lists, blocks = _parts(block_mask, query, key)
    if torch.compiler.is_dynamo_compiling():
        from foo_ops.ops.flex_attention.compile import compiled

        inputs = (query, key, value)
        output, logsumexp = compiled(
            "flex_attention", inputs, score_mod, mask_mod, lists, scale, blocks
        )
        return (output, logsumexp) if return_lse else output
    programs = traced(score_mod, mask_mod, query)
    output, logsumexp = torch.ops.foo.flex_attention.default(
        query, key, value, programs.captured, *lists,
        score_mod=programs.score_mod, mask_mod=programs.mask_mod, backward=programs.backward,
        numbers=programs.numbers, integers=programs.integers, scale=scale, **blocks,
    )  # fmt: skip
    return (output, logsumexp) if return_lse else output


def _is_shared(key: Tensor, value: Tensor, query: Tensor) -> bool:
    """Return whether key and value have a batch of 1, which all rows of query's batch share."""
    has_one = is_known(key.shape[0] == 1) and is_known(value.shape[0] == 1)
    return has_one and is_known(query.shape[0] != 1)


def cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast floats to the dtype of autocast, if it is on; captured tensors are not cast."""
    device = tensors[0].device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(it if it.dtype == torch.float64 else it.to(dtype) for it in tensors)


def _parts(
    block_mask: BlockMask | Function | None, query: Tensor, key: Tensor
) -> tuple[Function | None, tuple[Tensor | None, ...], dict[str, int]]:
    """Return the mask_mod, the lists of blocks, and the block sizes of any kind of mask."""
    from torch.nn.attention.flex_attention import BlockMask

    from foo_ops.compat import LARGE_SPARSE_BLOCK_SIZE

    if not isinstance(block_mask, BlockMask):
        return block_mask, (), {}
    query_block, key_block = block_mask.BLOCK_SIZE
    lengths, own = (query.shape[2], key.shape[2]), block_mask.shape[-2:]
    # torch expresses no mask as one block of this size.
    is_none = query_block == key_block == LARGE_SPARSE_BLOCK_SIZE
    differs = any(is_known(one != other) for one, other in zip(own, lengths))
    if not is_none and differs:
        raise ValueError(
            f"flex_attention: block_mask must cover {lengths[0]} queries and {lengths[1]} keys, "
            f"got {own[0]} and {own[1]}"
        )
    lists = (
        *(block_mask.kv_num_blocks, block_mask.kv_indices),
        *(block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    )
    sizes = {"query_block": query_block, "key_block": key_block}
    return block_mask.mask_mod, lists, sizes


# ------------------------------------------------------------------------------------ fake kernels


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captured: list[Tensor],
    *mask: Tensor | None,
    query_block: int = 128,
    key_block: int = 128,
    **_: Any,
) -> None:
    lists = (*mask, *(None,) * (4 - len(mask)))
    _C.check_flex_attention(query, key, value, captured, *lists, query_block, key_block)


@library.register_fake("foo::flex_attention")
def fake(
    query: Tensor, key: Tensor, value: Tensor, captured: list[Tensor], *mask: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    _check(query, key, value, captured, *mask, **options)
    return empty_results(query, value)


def register_fake_backward(name: str, check: Callable[..., None]) -> None:
    """Register the fake kernel of a backward operator.

    Args:
        name: the operator's name, without its namespace.
        check: the check of the forward pass, with the same arguments.
    """

    @library.register_fake(f"foo::{name}")
    def fake_backward(
        grad_output: Tensor,
        grad_logsumexp: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        captured: list[Tensor],
        output: Tensor,
        logsumexp: Tensor,
        *others: Any,
        captured_requires_grad: list[bool],
        **options: Any,
    ) -> tuple[Any, ...]:
        check(query, key, value, captured, *others, **options)
        _C.check_attention_results(
            name, grad_output, grad_logsumexp, query, value, output, logsumexp
        )
        _C.check_captured_requirements(name, captured, captured_requires_grad)
        gradients = (tensor.new_empty(tensor.shape) for tensor in (query, key, value))
        of_captured = [
            tensor.new_empty(tensor.shape if is_needed else (0,))
            for tensor, is_needed in zip(captured, captured_requires_grad)
        ]
        return (*gradients, of_captured)


register_fake_backward("flex_attention_backward", _check)


# ---------------------------------------------------------------------------------------- autograd


register_gradients("foo::flex_attention", composite)


# -------------------------------------------------------------------------------------------- vmap

library.register_vmap("foo::flex_attention", vmap)
library.register_vmap("foo::flex_attention_backward", vmap_backward)


# ------------------------------------------------------------------------------------------- FLOPs


@library.register_flops("foo::flex_attention")
def flops(query_shape: Any, key_shape: Any, value_shape: Any, *others: Any, **_: Any) -> int:
    """Count two matrix products; a mask does not reduce them, as in torch's counts."""
    return sum(product_flops(query_shape, key_shape, value_shape))


@library.register_flops("foo::flex_attention_backward")
def backward_flops(
    grad_output_shape: Any,
    grad_logsumexp_shape: Any,
    query_shape: Any,
    key_shape: Any,
    value_shape: Any,
    *others: Any,
    **_: Any,
) -> int:
    """Count five products, as `foo_ops.ops.attention.dense.backward_flops` does."""
    scores, values = product_flops(query_shape, key_shape, value_shape)
    return 3 * scores + 2 * values
