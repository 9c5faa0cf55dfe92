"""foo::linear_cross_entropy_training is foo::linear_cross_entropy where gradients are recorded.

It keeps exp(logit - base) for the backward pass, rounded as the gradients of logits are before they
are multiplied, and so computes three products in place of four. The base is the maximum of a row's
logits so far, so that no exponential exceeds 1. It keeps as many rows as hidden has columns, which
are no more numbers than weight has. The gradients of other rows, and all those with a soft cap,
come from logits that are computed anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foo_ops import _C, library
from foo_ops._after_import import after_import
from foo_ops.ops import linear_cross_entropy_sharding as sharding
from foo_ops.ops.arguments import compute_type
from foo_ops.ops.linear import product_flops
from foo_ops.ops.linear_cross_entropy import (
    ARGUMENTS,
    TAGS,
    composite,
    composite_backward,
    fake,
    fake_backward,
    flops,
    vmap_rule,
)

Loss = tuple[Tensor, Tensor, Tensor]
LossAndKept = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

library.define(
    "foo::linear_cross_entropy_training",
    f"(Tensor hidden, Tensor weight, Tensor target, Tensor? bias=None, *, {ARGUMENTS}) "
    "-> (Tensor loss, Tensor logsumexp, Tensor mean, Tensor exponentials, Tensor bases)",
    tags=TAGS,
)
library.define(
    "foo::linear_cross_entropy_training_backward",
    "(Tensor? grad_loss, Tensor? grad_logsumexp, Tensor? grad_mean, Tensor hidden, Tensor weight, "
    "Tensor target, Tensor? bias, Tensor logsumexp, Tensor exponentials, Tensor bases, *, "
    "bool hidden_requires_grad=True, bool weight_requires_grad=True, "
    f"bool bias_requires_grad=False, {ARGUMENTS}) "
    "-> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)",
    tags=TAGS,
)


def make_kept(hidden: Tensor, classes: int, rows: int, blocks: int) -> tuple[Tensor, Tensor]:
    sums = compute_type(hidden.dtype)
    factors = hidden.dtype if hidden.dtype == torch.bfloat16 else sums
    exponentials = hidden.new_empty(rows, classes, dtype=factors)
    return exponentials, hidden.new_empty(blocks, rows, dtype=sums)


def keep_nothing(hidden: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Make what stands for exponentials that were not kept."""
    return make_kept(
        hidden, classes, *_C.linear_cross_entropy_kept_sizes(0, hidden.shape[-1], classes, 0.0)
    )


# ------------------------------------------------------------------------------------------- fake


@library.register_fake("foo::linear_cross_entropy_training")
def fake_training(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    softcap: float = 0.0,
    **options: Any,
) -> LossAndKept:
    results = fake(hidden, weight, target, bias, softcap=softcap, **options)
    classes, depth = weight.shape
    sizes = _C.linear_cross_entropy_kept_sizes(target.numel(), depth, classes, softcap)
    return (*results, *make_kept(hidden, classes, *sizes))


@library.register_fake("foo::linear_cross_entropy_training_backward")
def fake_training_backward(*arguments: Any, softcap: float = 0.0, **options: Any) -> Loss:
    *others, exponentials, bases = arguments
    results = fake_backward(*others, softcap=softcap, **options)
    _C.check_linear_cross_entropy_kept(*others[3:6], exponentials, bases, softcap)
    return results


# --------------------------------------------------------------------------------------- autograd


def composite_training(hidden: Tensor, weight: Tensor, *others: Any, **options: Any) -> LossAndKept:
    """Compute foo::linear_cross_entropy_training with torch's own operators."""
    results = composite(hidden, weight, *others, **options)
    return (*results, *keep_nothing(hidden, weight.shape[0]))


def composite_training_backward(*arguments: Any, **options: Any) -> Loss:
    return composite_backward(*arguments[:-2], **options)


library.register_autograd(
    "foo::linear_cross_entropy_training",
    "foo::linear_cross_entropy_training_backward",
    composite=composite_training,
)
library.register_autograd(
    "foo::linear_cross_entropy_training_backward", composite=composite_training_backward
)


# ---------------------------------------------------------------- sharding, vmap, autocast, FLOPs


def register_sharding() -> None:
    """Tell DTensor, which is imported by now."""
    from torch.distributed.tensor import DTensor

    def forward(mode: Any, _: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> LossAndKept:
        operator = torch.ops.foo.linear_cross_entropy.default
        results = sharding.forward(mode, operator, types, args, kwargs)
        return (*results, *keep_nothing(args[0].to_local(), args[1].shape[0]))

    def backward(
        mode: Any, _: Any, types: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        operator = torch.ops.foo.linear_cross_entropy_backward.default
        return sharding.backward(mode, operator, types, args[:-2], kwargs)

    name = "foo::linear_cross_entropy_training"
    library.register_torch_dispatch(name, DTensor, forward)
    library.register_torch_dispatch(f"{name}_backward", DTensor, backward)


after_import("torch.distributed.tensor", register_sharding)


@library.register_vmap("foo::linear_cross_entropy_training")
def vmap_training_rule(info: Any, in_dims: Any, *inputs: Any, **options: Any) -> tuple[Any, Any]:
    """Map rows in one call, whose exponentials are not those of each call alone."""
    results, out_dims = vmap_rule(info, in_dims, *inputs, **options)
    weight, dim = inputs[1], in_dims[1]
    classes = weight.shape[0 if dim is None or dim % weight.dim() > 0 else 1]
    return (*results, *keep_nothing(inputs[0], classes)), (*out_dims, None, None)


library.register_vmap_loop("foo::linear_cross_entropy_training_backward")
library.register_autocast("foo::linear_cross_entropy_training")
library.register_flops("foo::linear_cross_entropy_training")(flops)


@library.register_flops("foo::linear_cross_entropy_training_backward", takes_tensors=True)
def backward_flops(
    grad_loss: Tensor | None,
    grad_logsumexp: Tensor | None,
    grad_mean: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    logsumexp: Tensor,
    exponentials: Tensor,
    *others: Any,
    hidden_requires_grad: bool = True,
    weight_requires_grad: bool = True,
    **_: Any,
) -> int:
    """Count one product for each gradient of a matrix, and one for rows that were not kept."""
    classes, depth = weight.shape
    anew = product_flops(torch.Size((target.numel() - exponentials.shape[0], depth)), classes)
    return anew + (hidden_requires_grad + weight_requires_grad) * product_flops(
        hidden.shape, classes
    )
