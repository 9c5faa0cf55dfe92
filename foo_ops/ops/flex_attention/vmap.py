"""Map flex attention under torch.vmap: in one call if all rows of the batch are treated alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foo_ops import library
from foo_ops.compat import pytree
from foo_ops.ops.attention.rules import Fold, shape_of

Dims = tuple[Any, ...]


def is_fold(dims: Dims, mask: Sequence[Tensor | None], options: dict[str, Any]) -> bool:
    """Whether mapped calls can be folded into the batch of one call.

    Captured tensors and lists of blocks must be common to all calls, and neither programs nor lists
    may depend on the row of the batch.
    """
    texts = "".join(options.get(name, "") for name in ("score_mod", "mask_mod", "backward"))
    return (
        all(it is None for it in pytree.tree_leaves(dims))
        and all(it is None or it.shape[0] == 1 for it in mask)
        and "input batch" not in texts
    )


def vmap(info: Any, in_dims: Dims, *inputs: Any, **options: Any) -> Any:
    """Map foo::flex_attention."""
    operator = torch.ops.foo.flex_attention.default
    captured, *mask = inputs[3:]
    if not is_fold(in_dims[3:], mask, options):
        return library.vmap_by_loop(operator, info, in_dims, *inputs, **options)
    fold = Fold(info.batch_size, shape_of(inputs[0], in_dims[0])[0])
    outputs = operator(*map(fold.tensor, inputs[:3], in_dims), captured, *mask, **options)
    return tuple(map(fold.unfold, outputs)), (0, 0)


def vmap_backward(
    info: Any, in_dims: Dims, *inputs: Any, captured_requires_grad: list[bool], **options: Any
) -> Any:
    """Map foo::flex_attention_backward; each call has its own gradients of captured tensors."""
    operator = torch.ops.foo.flex_attention_backward.default
    options["captured_requires_grad"] = captured_requires_grad
    captured, mask = inputs[5], inputs[8:]
    dims = (in_dims[5], *in_dims[8:])
    if any(captured_requires_grad) or not is_fold(dims, mask, options):
        return library.vmap_by_loop(operator, info, in_dims, *inputs, **options)
    fold = Fold(info.batch_size, shape_of(inputs[2], in_dims[2])[0])
    first = map(fold.tensor, inputs[:5], in_dims)
    results = map(fold.tensor, inputs[6:8], in_dims[6:8])
    *gradients, of_captured = operator(*first, captured, *results, *mask, **options)
    return (*map(fold.unfold, gradients), of_captured), (0, 0, 0, [None] * len(captured))
