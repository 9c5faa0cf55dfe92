"""foo::softmax_cross_entropy computes the loss of a classifier or a language model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foo_ops import language, library
from foo_ops._process import after_import
from foo_ops.library.operators import find
from foo_ops.ops.arguments import (
    compute_type,
    has_elements,
    require_device,
    require_floating,
    require_int64,
    require_like,
    require_rows,
    require_shape,
    require_sums,
)
from foo_ops.ops.cross_entropy import sharding

# ----------------------------------------------------------------------- foo::softmax_cross_entropy

#     logsumexp = log(sum_v exp(x_v))
#     loss = (1 - smoothing) (logsumexp - x_target) + smoothing (logsumexp - mean_v x_v)
#
# A row of V logits takes V steps of a running maximum and sum (Milakov and Gimelshein 2018,
# algorithm 3), in chunks that stay in the L1 cache. Besides the logits, one number per row is saved
# for the gradient; neither probabilities nor their logarithms are stored.


ARGUMENTS = "float label_smoothing=0.0, SymInt ignore_index=-100"
library.define(
    "foo::softmax_cross_entropy",
    f"(Tensor logits, Tensor target, *, {ARGUMENTS}) "
    "-> (Tensor loss, Tensor logsumexp, Tensor mean)",
    tags=torch.Tag.pt2_compliant_tag,
)
library.define(
    "foo::softmax_cross_entropy_backward",
    "(Tensor? grad_loss, Tensor? grad_logsumexp, Tensor? grad_mean, Tensor logits, Tensor target, "
    f"Tensor logsumexp, *, {ARGUMENTS}) -> Tensor grad_logits",
    tags=torch.Tag.pt2_compliant_tag,
)
CHUNK = 1024
# Beyond this, rounding the logsumexp changes probabilities by more than 2^-16, and they are divided
# by their sum.
LARGE = 256.0
REDUCTIONS = ("none", "mean", "sum")


def softmax_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    return_logsumexp: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the cross-entropy of softmax(logits) with the target classes, in nats.

    Args:
        logits: (..., V), floating-point, any strides. float16 and bfloat16 are computed in float32.
        target: (...), int64, classes in [0, V), or ignore_index.
        reduction: "none" gives a loss for each row, "sum" their sum, "mean" their mean over the
            rows that are not ignored (NaN if there is none).
        label_smoothing: in [0, 1], the share of the target that is spread over all classes.
        ignore_index: rows with this target have loss zero and no gradient.
        return_logsumexp: return the logsumexp of each row, (...), too, for a loss on it.

    Returns:
        The loss, float32 (float64 for float64 logits), since half precision would round it. Has a
        gradient for logits, also through logsumexp. A row with a logit of +inf has NaN for loss and
        gradients, as in torch.nn.functional.cross_entropy.

    Raises:
        ValueError, TypeError: for shapes, dtypes and options that do not fit.
        IndexError: for a target that is no class.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
        >>> foo_ops.softmax_cross_entropy(logits, torch.tensor([0, 1]), reduction="none")
        tensor([0.1269, 0.6931])
    """
    require_reduction("softmax_cross_entropy", reduction)
    loss, logsumexp, mean = torch.ops.foo.softmax_cross_entropy(
        logits, target, label_smoothing=label_smoothing, ignore_index=ignore_index
    )
    if reduction == "mean":
        # Computed by the kernel: four operators would double the time of one row of 32000 classes.
        loss = mean
    elif reduction == "sum":
        loss = loss.sum()
    return (loss, logsumexp) if return_logsumexp else loss


def require_reduction(operator: str, reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"{operator}: reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}"
        )


# ---------------------------------------------------------------------------------------- kernels


def are_classes(logits: Any, target: Any, ignore_index: Any) -> bool:
    classes = logits.shape[-1]
    for row in range(target.size):
        label = target.flat[row]
        if label != ignore_index and (label < 0 or label >= classes):
            return False
    return True


def refuse(operator: str) -> Callable[[Tensor, Tensor, int], None]:
    def refuse_targets(logits: Tensor, target: Tensor, ignore_index: int) -> None:
        classes = logits.shape[-1]
        is_wrong = (target != ignore_index) & ((target < 0) | (target >= classes))
        if is_wrong.any():
            raise IndexError(
                f"{operator}: target must be a class in [0, {classes}) or "
                f"ignore_index {ignore_index}, got {target[is_wrong][0].item()}"
            )

    return refuse_targets


def count_classes(target: Any, ignore_index: Any) -> Any:
    """Count the rows that are not ignored."""
    count = 0
    for row in range(target.size):
        if target.flat[row] != ignore_index:
            count += 1
    return count


def take_mean(target: Any, ignore_index: Any, loss: Any, mean: Any) -> None:
    total, count = 0.0, count_classes(target, ignore_index)
    for row in range(target.size):
        if target.flat[row] != ignore_index:
            total += loss.flat[row]
    mean.flat[0] = total / count if count else math.nan


@library.tile_kernel(
    contiguous_rows=True,
    finish=take_mean,
    check=are_classes,
    refuse=refuse("softmax_cross_entropy"),
)
def forward_kernel(
    logits: Any,
    target: Any,
    label_smoothing: Any,
    ignore_index: Any,
    loss: Any,
    logsumexp: Any,
    mean: Any,
    rows: Any,
) -> None:
    size = logits.shape[-1]
    for row in rows:
        x = logits.row(row)
        largest, total, logit_sum = language.cast(-math.inf, logits), language.zero(logits), 0.0
        shift = language.zero(logits)
        for start in range(0, size, CHUNK):
            stop = min(start + CHUNK, size)
            peak = largest
            for i in range(start, stop):
                peak = language.accumulate_maximum(peak, x[i])
            # If all logits so far are -inf, differences of infinities would be NaN.
            before, shift = shift, language.zero(logits) if peak == -math.inf else peak
            chunk, values = language.zero(logits), language.zero(logits)
            for i in range(start, stop):
                chunk = language.accumulate(chunk, language.exp(x[i] - shift))
            if label_smoothing != 0.0:
                logit_sum += (before - shift) * start
                for i in range(start, stop):
                    values = language.accumulate(values, x[i] - shift)
            total = total * language.exp(largest - shift) + chunk
            largest, logit_sum = peak, logit_sum + values
        rest = math.log(total)  # NaN beside an infinite logit, as is the loss then.
        logsumexp.flat[row] = largest if largest == math.inf else largest + rest
        label = target.flat[row]
        value = 0.0
        if label != ignore_index:
            # Logits are subtracted first: beside a large one the logarithm would be rounded away.
            value = rest + (1.0 - label_smoothing) * (largest - x[label])
            if label_smoothing != 0.0:
                value -= label_smoothing * logit_sum / size
        loss.flat[row] = value


def make_backward_kernel(is_part: bool) -> library.TileKernel:
    """Make the kernel; for a part of the classes, the sum of all probabilities is unknown."""

    @library.tile_kernel(
        tiles=lambda logits: logits.rows,
        contiguous_rows=True,
        check=are_classes,
        refuse=refuse("softmax_cross_entropy_backward"),
    )
    def backward_kernel(
        grad_loss: Any,
        grad_logsumexp: Any,
        grad_mean: Any,
        logits: Any,
        target: Any,
        logsumexp: Any,
        label_smoothing: Any,
        ignore_index: Any,
        output: Any,
        rows: Any,
    ) -> None:
        """Compute softmax(x) (grad_loss + grad_logsumexp) - grad_loss (the target, smoothed).

        For rows that are not ignored, grad_loss includes their share of grad_mean.
        """
        size = logits.shape[-1]
        share = language.zero(logits)
        if grad_mean is not None:
            share = language.cast(grad_mean.flat[0] / count_classes(target, ignore_index), logits)
        for row in rows:
            x, y = logits.row(row), output.row(row)
            label = target.flat[row]
            slope = language.zero(logits)
            if label != ignore_index:
                slope = share
                if grad_loss is not None:
                    slope = slope + grad_loss.flat[row]
            scale = slope
            if grad_logsumexp is not None:
                scale = scale + grad_logsumexp.flat[row]
            each = language.cast(label_smoothing * slope / size, logits)
            shift = logsumexp.flat[row]
            # A row with an infinite logit has no probabilities: all its gradients are NaN.
            shift += language.cast(math.nan if shift == math.inf else 0.0, logits)
            if not is_part and LARGE < abs(shift) < math.inf:
                total = language.zero(logits)
                for i in range(size):
                    total = language.accumulate(total, language.exp(x[i] - shift))
                scale = scale / total
            for i in range(size):
                y[i] = language.exp(x[i] - shift) * scale - each
            if label != ignore_index:
                once = language.exp(x[label] - shift) * scale - each
                y[label] = once - language.cast(1.0 - label_smoothing, logits) * slope

    return backward_kernel


# ------------------------------------------------------------------------------------------- fake


def check(operator: str, logits: Tensor, target: Tensor, label_smoothing: float) -> None:
    require_floating(operator, logits=logits)
    require_rows(operator, logits=logits)
    require_int64(operator, target=target)
    require_shape(operator, "target", target, logits.shape[:-1], "to match the rows of logits")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{operator}: label_smoothing must be in [0, 1], got {label_smoothing}")


@library.register_fake("foo::softmax_cross_entropy")
def fake(
    logits: Tensor, target: Tensor, *, label_smoothing: float = 0.0, ignore_index: int = -100
) -> tuple[Tensor, Tensor, Tensor]:
    operator = "softmax_cross_entropy"
    require_device(operator, logits=logits, target=target)
    check(operator, logits, target, label_smoothing)
    loss = logits.new_empty(logits.shape[:-1], dtype=compute_type(logits.dtype))
    return loss, torch.empty_like(loss), loss.new_empty(())


@library.register_fake("foo::softmax_cross_entropy_backward")
def fake_backward(
    grad_loss: Tensor | None,
    grad_logsumexp: Tensor | None,
    grad_mean: Tensor | None,
    logits: Tensor,
    target: Tensor,
    logsumexp: Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> Tensor:
    operator = "softmax_cross_entropy_backward"
    gradients = {"grad_loss": grad_loss, "grad_logsumexp": grad_logsumexp}
    others = {"logits": logits, "target": target, "logsumexp": logsumexp}
    require_device(operator, **gradients, grad_mean=grad_mean, **others)
    check(operator, logits, target, label_smoothing)
    require_shape(operator, "logsumexp", logsumexp, target.shape, "as target has")
    require_sums(operator, "logits", logits, logsumexp=logsumexp, grad_mean=grad_mean)
    for name, gradient in gradients.items():
        if gradient is not None:
            require_like(operator, name, gradient, "logsumexp", logsumexp)
    if grad_mean is not None:
        require_shape(operator, "grad_mean", grad_mean, (), "as mean has")
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


library.register_kernel("foo::softmax_cross_entropy", ("cpu", "foo"), forward_kernel)
library.register_kernel(
    "foo::softmax_cross_entropy_backward", ("cpu", "foo"), make_backward_kernel(is_part=False)
)


# --------------------------------------------------------------------------------------- autograd


def composite(
    logits: Tensor, target: Tensor, *, label_smoothing: float = 0.0, ignore_index: int = -100
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute foo::softmax_cross_entropy with torch's own operators."""
    if has_elements(target):
        refuse("softmax_cross_entropy")(logits, target, ignore_index)
    x = logits.to(compute_type(logits.dtype))
    is_ignored = target == ignore_index
    index = target.masked_fill(is_ignored, 0).unsqueeze(-1)
    logarithms = x.log_softmax(-1)
    # Without classes all rows are ignored, and there is nothing to gather.
    of_target = logarithms.gather(-1, index).squeeze(-1) if x.shape[-1] else logarithms.sum(-1)
    loss = (label_smoothing - 1) * of_target
    if label_smoothing != 0.0:
        loss = loss - label_smoothing * logarithms.mean(-1)
    loss = loss.masked_fill(is_ignored, 0)
    return loss, x.logsumexp(-1), loss.sum() / (~is_ignored).sum()


def composite_backward(
    grad_loss: Tensor | None,
    grad_logsumexp: Tensor | None,
    grad_mean: Tensor | None,
    logits: Tensor,
    target: Tensor,
    logsumexp: Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> Tensor:
    """Compute the gradient with torch's own operators, for second derivatives."""
    if has_elements(target):
        refuse("softmax_cross_entropy_backward")(logits, target, ignore_index)
    is_ignored = target == ignore_index
    slope = torch.zeros_like(logsumexp) if grad_loss is None else grad_loss
    if grad_mean is not None:
        slope = slope + grad_mean / (~is_ignored).sum()
    slope = slope.masked_fill(is_ignored, 0).unsqueeze(-1)
    scale = slope if grad_logsumexp is None else slope + grad_logsumexp.unsqueeze(-1)
    classes = logits.shape[-1]
    wanted = F.one_hot(target.masked_fill(is_ignored, 0), max(classes, 1))[..., :classes]
    smoothed = (1 - label_smoothing) * wanted + label_smoothing / max(classes, 1)
    probabilities = logits.to(compute_type(logits.dtype)).softmax(-1)
    return (probabilities * scale - smoothed * slope).to(logits.dtype)


library.register_autograd(
    "foo::softmax_cross_entropy", "foo::softmax_cross_entropy_backward", composite=composite
)
library.register_autograd("foo::softmax_cross_entropy_backward", composite=composite_backward)


# --------------------------------------------------------------------------- vmap, sharding, FLOPs

# In one call, unless grad_mean is mapped: each mapped element has a mean of its own.
library.register_vmap_rows(
    "foo::softmax_cross_entropy_backward",
    "grad_loss",
    "grad_logsumexp",
    "logits",
    "target",
    "logsumexp",
)

after_import("torch.distributed.tensor", sharding.register_softmax)


@library.register_flops("foo::softmax_cross_entropy", takes_tensors=True)
def flops(logits: Tensor, target: Tensor, *, label_smoothing: float = 0.0, **_: Any) -> int:
    """Count a comparison, a difference, an exponential and a sum for each logit."""
    return (4 if label_smoothing == 0.0 else 6) * logits.numel()


@library.register_flops("foo::softmax_cross_entropy_backward", takes_tensors=True)
def backward_flops(
    grad_loss: Tensor | None,
    grad_logsumexp: Tensor | None,
    grad_mean: Tensor | None,
    logits: Tensor,
    *others: Any,
    **_: Any,
) -> int:
    """Count an exponential, a product and two differences for each logit."""
    return 4 * logits.numel()


# ---------------------------------------------------------------------------- a part of the classes

# foo::softmax_cross_entropy_part_backward, for a part of the classes.
#
# It takes the arguments of foo::softmax_cross_entropy_backward, with the logsumexp of all classes.
# That operator divides probabilities by their sum if the logsumexp is large; here the sum of all
# probabilities is unknown. There are no derivatives: DTensor calls this operator below autograd.


NAME = "foo::softmax_cross_entropy_part_backward"
schema = str(find("foo::softmax_cross_entropy_backward")._schema)
library.define(NAME, schema[schema.index("(") :], tags=torch.Tag.pt2_compliant_tag)
library.register_fake(NAME, fake_backward)
library.register_flops(NAME, takes_tensors=True)(backward_flops)
library.register_kernel(NAME, ("cpu", "foo"), make_backward_kernel(is_part=True))
