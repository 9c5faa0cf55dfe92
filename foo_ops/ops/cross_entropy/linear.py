"""foo::linear_cross_entropy computes the loss of a language model from its last layer's input."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foo_ops import _C, library
from foo_ops._process import after_import
from foo_ops.ops.arguments import compute_type
from foo_ops.ops.cross_entropy import sharding
from foo_ops.ops.cross_entropy.softmax import composite as composite_of_logits
from foo_ops.ops.cross_entropy.softmax import composite_backward as composite_backward_of_logits
from foo_ops.ops.cross_entropy.softmax import require_reduction
from foo_ops.ops.linear import any_requires_grad, product_flops

# ------------------------------------------------------------------------ foo::linear_cross_entropy

#     logits = softcap tanh((hidden weight^T + bias) / softcap)
#     logsumexp = log(sum_v exp(logits_v))
#     loss = (1 - smoothing) (logsumexp - logits_target) + smoothing (logsumexp - mean_v logits_v)
#
# Logits exist a tile at a time, in the caches. The backward pass recomputes them, some classes at a
# time for all rows, and multiplies their gradients by weight and hidden; or it reads exponentials
# that `linear_cross_entropy_training` below keeps.
#
# Gradients that are computed in the forward pass, in chunks of rows (Liger-Kernel), take three
# products instead of four. But with 1024 rows, 1024 wide, and 32000 classes, a step made of these
# operators in chunks of 256 rows took 0.97 of the time in float32, and 2.0 in bfloat16: each chunk
# reads and writes the float32 sums of the weight's gradient, which are as large as the logits, or
# twice as large.


TAGS = torch.Tag.pt2_compliant_tag
ARGUMENTS = "float label_smoothing=0.0, SymInt ignore_index=-100, float softcap=0.0"
library.define(
    "foo::linear_cross_entropy",
    f"(Tensor hidden, Tensor weight, Tensor target, Tensor? bias=None, *, {ARGUMENTS}) "
    "-> (Tensor loss, Tensor logsumexp, Tensor mean)",
    tags=TAGS,
)
# The gradient of a tensor that requires none has size 0.
library.define(
    "foo::linear_cross_entropy_backward",
    "(Tensor? grad_loss, Tensor? grad_logsumexp, Tensor? grad_mean, Tensor hidden, Tensor weight, "
    "Tensor target, Tensor? bias, Tensor logsumexp, *, bool hidden_requires_grad=True, "
    f"bool weight_requires_grad=True, bool bias_requires_grad=False, {ARGUMENTS}) "
    "-> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)",
    tags=TAGS,
)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    softcap: float = 0.0,
    return_logsumexp: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the cross-entropy of softmax(hidden @ weight.T + bias) with the target classes.

    It is `foo_ops.softmax_cross_entropy` of `foo_ops.linear`, but logits and their gradients take
    no memory. If gradients are recorded and there is no softcap, it keeps exponentials of as many
    rows as hidden has columns, which are no more numbers than weight has. The backward pass
    recomputes the logits of other rows.

    Args:
        hidden: (..., K), float16, bfloat16, float32 or float64, any strides.
        weight: (V, K), of hidden's dtype, any strides.
        target: (...), int64, classes in [0, V), or ignore_index.
        bias: (V,), of hidden's dtype.
        reduction: "none" gives a loss for each row, "sum" their sum, "mean" their mean over the
            rows that are not ignored (NaN if there is none).
        label_smoothing: in [0, 1], the share of the target that is spread over all classes.
        ignore_index: rows with this target have loss zero and no gradient.
        softcap: if positive, logits become softcap * tanh(logits / softcap).
        return_logsumexp: return the logsumexp of each row, (...), too, for a loss on it.

    Returns:
        The loss in nats, float32 (float64 for float64). Logits are not rounded to half precision.
        Has gradients for hidden, weight and bias, also through logsumexp, of every order. Gradients
        in half precision are summed in float32 and rounded once. The result does not depend on the
        number of threads. A row with a logit of +inf has NaN for its loss and its gradients, as in
        torch.nn.functional.cross_entropy, and inf for its logsumexp.

    Raises:
        ValueError, TypeError: for shapes, dtypes and options that do not fit.
        IndexError: for a target that is no class.

    Example:
        >>> hidden, weight = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[2.0, 0.0]] * 2)
        >>> foo_ops.linear_cross_entropy(hidden, weight, torch.tensor([0, 1]), reduction="none")
        tensor([0.6931, 0.6931])
    """
    require_reduction("linear_cross_entropy", reduction)
    operator = torch.ops.foo.linear_cross_entropy
    # Training keeps further results, so that it has a schema of its own. Exponentials of capped
    # logits are not kept.
    if not softcap > 0.0 and any_requires_grad(hidden, weight, bias):
        operator = torch.ops.foo.linear_cross_entropy_training
    loss, logsumexp, mean, *_ = operator.default(
        hidden,
        weight,
        target,
        bias,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        softcap=softcap,
    )
    if reduction == "mean":
        loss = mean
    elif reduction == "sum":
        loss = loss.sum()
    return (loss, logsumexp) if return_logsumexp else loss


# ------------------------------------------------------------------------------------------- fake


@library.register_fake("foo::linear_cross_entropy")
def fake(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    _C.check_linear_cross_entropy(hidden, weight, target, bias, label_smoothing, softcap)
    loss = hidden.new_empty(hidden.shape[:-1], dtype=compute_type(hidden.dtype))
    return loss, torch.empty_like(loss), loss.new_empty(())


@library.register_fake("foo::linear_cross_entropy_backward")
def fake_backward(
    grad_loss: Tensor | None,
    grad_logsumexp: Tensor | None,
    grad_mean: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    logsumexp: Tensor,
    *,
    hidden_requires_grad: bool = True,
    weight_requires_grad: bool = True,
    bias_requires_grad: bool = False,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    _C.check_linear_cross_entropy_backward(
        grad_loss,
        grad_logsumexp,
        grad_mean,
        hidden,
        weight,
        target,
        bias,
        logsumexp,
        bias_requires_grad,
        label_smoothing,
        softcap,
    )
    return (
        hidden.new_empty(hidden.shape if hidden_requires_grad else 0),
        hidden.new_empty(weight.shape if weight_requires_grad else 0),
        hidden.new_empty(weight.shape[0] if bias_requires_grad else 0),
    )


# --------------------------------------------------------------------------------------- autograd


def product_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute logits without a soft cap, in the compute type."""
    tensors = (hidden, weight) if bias is None else (hidden, weight, bias)
    return F.linear(*(it.to(compute_type(it.dtype)) for it in tensors))


def capped(logits: Tensor, softcap: float) -> Tensor:
    return softcap * (logits / softcap).tanh() if softcap > 0.0 else logits


def composite(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute foo::linear_cross_entropy with torch's own operators."""
    return composite_of_logits(
        capped(product_of(hidden, weight, bias), softcap),
        target,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
    )


def composite_backward(
    grad_loss: Tensor | None,
    grad_logsumexp: Tensor | None,
    grad_mean: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    logsumexp: Tensor,
    *,
    hidden_requires_grad: bool = True,
    weight_requires_grad: bool = True,
    bias_requires_grad: bool = False,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients with torch's own operators, for second derivatives."""
    product = product_of(hidden, weight, bias)
    grad = composite_backward_of_logits(
        grad_loss,
        grad_logsumexp,
        grad_mean,
        capped(product, softcap),
        target,
        logsumexp,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
    )
    if softcap > 0.0:
        grad = grad * (1 - (product / softcap).tanh().square())
    grad_hidden = grad_weight = grad_bias = hidden.new_empty(0)
    if hidden_requires_grad:
        grad_hidden = (grad @ weight.to(grad.dtype)).to(hidden.dtype)
    if weight_requires_grad:
        grad_weight = torch.einsum("...v,...k->vk", grad, hidden.to(grad.dtype)).to(hidden.dtype)
    if bias_requires_grad:
        grad_bias = torch.einsum("...v->v", grad).to(hidden.dtype)
    return grad_hidden, grad_weight, grad_bias


library.register_autograd(
    "foo::linear_cross_entropy", "foo::linear_cross_entropy_backward", composite=composite
)
library.register_autograd("foo::linear_cross_entropy_backward", composite=composite_backward)


# ---------------------------------------------------------------- sharding, vmap, autocast, FLOPs

after_import("torch.distributed.tensor", sharding.register_linear)


def vmap_rule(info: Any, in_dims: Any, *inputs: Any, **keywords: Any) -> tuple[Any, Any]:
    """Map rows in one call; each element of the mapped dimension has a mean of its own."""
    operator = torch.ops.foo.linear_cross_entropy.default
    dims = dict(zip(("hidden", "weight", "target", "bias"), in_dims))
    if info.batch_size == 0 or any(dims.get(name) is not None for name in ("weight", "bias")):
        return library.vmap_by_loop(operator, info, in_dims, *inputs, **keywords)
    hidden, target = (
        inputs[place].expand(info.batch_size, *inputs[place].shape)
        if in_dims[place] is None
        else inputs[place].movedim(in_dims[place], 0)
        for place in (0, 2)
    )
    loss, logsumexp, _ = operator(hidden, inputs[1], target, *inputs[3:], **keywords)
    # Single rows have no dimension of rows: -1 is 1 then.
    rows = info.batch_size, -1
    count = (target != keywords.get("ignore_index", -100)).reshape(rows).sum(1)
    return (loss, logsumexp, loss.reshape(rows).sum(1) / count), (0, 0, 0)


library.register_vmap("foo::linear_cross_entropy", vmap_rule)
library.register_vmap_loop("foo::linear_cross_entropy_backward")
library.register_autocast("foo::linear_cross_entropy")


@library.register_flops("foo::linear_cross_entropy")
def flops(hidden_shape: torch.Size, weight_shape: torch.Size, *others: Any, **_: Any) -> int:
    """Count the product, as torch counts linear layers."""
    return product_flops(hidden_shape, weight_shape[0])


@library.register_flops("foo::linear_cross_entropy_backward", takes_tensors=True)
def backward_flops(
    grad_loss: Tensor | None,
    grad_logsumexp: Tensor | None,
    grad_mean: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    *others: Any,
    hidden_requires_grad: bool = True,
    weight_requires_grad: bool = True,
    **_: Any,
) -> int:
    """Count the product that is recomputed, and one for each gradient of a matrix."""
    products = 1 + hidden_requires_grad + weight_requires_grad
    return products * product_flops(hidden.shape, weight.shape[0])


# --------------------------------------------------------------- foo::linear_cross_entropy_training

# foo::linear_cross_entropy_training is foo::linear_cross_entropy for calls that record gradients.
#
# It keeps exp(logit - base) for the backward pass, rounded as the gradients of logits are before
# they are multiplied, and so computes three products instead of four. The base is the maximum of a
# row's logits so far, so that no exponential exceeds 1. It keeps as many rows as hidden has
# columns, which are no more numbers than weight has. For the gradients of other rows, and for all
# with a soft cap, logits are recomputed.


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
    """Make the exponentials and bases of no rows, for calls that keep none."""
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
    """Register with DTensor, which is imported by now."""
    from torch.distributed.tensor import DTensor

    def forward(mode: Any, _: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> LossAndKept:
        operator = torch.ops.foo.linear_cross_entropy.default
        results = sharding.linear_forward(mode, operator, types, args, kwargs)
        return (*results, *keep_nothing(args[0].to_local(), args[1].shape[0]))

    def backward(
        mode: Any, _: Any, types: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        operator = torch.ops.foo.linear_cross_entropy_backward.default
        return sharding.linear_backward(mode, operator, types, args[:-2], kwargs)

    name = "foo::linear_cross_entropy_training"
    library.register_torch_dispatch(name, DTensor, forward)
    library.register_torch_dispatch(f"{name}_backward", DTensor, backward)


after_import("torch.distributed.tensor", register_sharding)


@library.register_vmap("foo::linear_cross_entropy_training")
def vmap_training_rule(info: Any, in_dims: Any, *inputs: Any, **options: Any) -> tuple[Any, Any]:
    """Map rows in one call, without exponentials: they would not be those of each call alone."""
    results, out_dims = vmap_rule(info, in_dims, *inputs, **options)
    weight, dim = inputs[1], in_dims[1]
    classes = weight.shape[0 if dim is None or dim % weight.dim() > 0 else 1]
    return (*results, *keep_nothing(inputs[0], classes)), (*out_dims, None, None)


library.register_vmap_loop("foo::linear_cross_entropy_training_backward")
library.register_autocast("foo::linear_cross_entropy_training")
library.register_flops("foo::linear_cross_entropy_training")(flops)


@library.register_flops("foo::linear_cross_entropy_training_backward", takes_tensors=True)
def training_backward_flops(
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
