"""Logits that a loss may never need: what a language model's head would give, not yet computed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from foo_ops.ops.linear import linear
from foo_ops.ops.linear_cross_entropy import linear_cross_entropy

# By its own name it would be the method of logits.
Number = float


class Ratio(NamedTuple):
    """A factor whose parts are kept apart, so that c / c is 1 for every c."""

    numerator: Number = 1.0
    denominator: Number = 1.0

    def times(self, numerator: Number, denominator: Number) -> Ratio:
        return Ratio(self.numerator * numerator, self.denominator * denominator)

    def value(self) -> Number:
        return self.numerator / self.denominator


ONE = Ratio()


class DeferredLogits:
    """``outer * tanh(inner * logits)``, or ``inner * logits``, of a head's input and weights.

    A model may scale and bound its logits, change their shape, and convert them to float32. Their
    cross-entropy is foo::linear_cross_entropy. For anything else they are computed, once, and
    are a tensor from then on.

    Attributes:
        hidden: (..., K), the head's input.
        weight: (V, K).
        bias: (V,), or None.
        inner, outer: what the logits are multiplied by before and after the tanh; outer is None
            without a tanh.
        dtype: of the logits.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inner: Ratio = ONE,
        outer: Ratio | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.inner, self.outer = inner, outer
        self.dtype = hidden.dtype if dtype is None else dtype
        self.computed: Tensor | None = None

    def tensor(self) -> Tensor:
        """Compute the logits."""
        if self.computed is None:
            logits = linear(self.hidden, self.weight, self.bias) * self.inner.value()
            if self.outer is not None:
                logits = logits.tanh() * self.outer.value()
            self.computed = logits.to(self.dtype)
        return self.computed

    def changed(self, **attributes: Any) -> DeferredLogits:
        names = ("hidden", "weight", "bias", "inner", "outer", "dtype")
        return DeferredLogits(**{name: getattr(self, name) for name in names} | attributes)

    # ------------------------------------------------------------------ what needs no computation

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    def float(self) -> DeferredLogits:
        return self.changed(dtype=torch.float32)

    def contiguous(self) -> DeferredLogits:
        return self

    def reshape(self, *shape: int) -> Any:
        if shape[-1] != self.weight.shape[0]:
            return self.tensor().reshape(*shape)
        return self.changed(hidden=self.hidden.reshape(*shape[:-1], self.hidden.shape[-1]))

    view = reshape

    def tanh(self) -> Any:
        if self.outer is not None:
            return self.tensor().tanh()
        return self.changed(outer=ONE)

    def scaled(self, numerator: Number, denominator: Number) -> DeferredLogits:
        if self.outer is None:
            return self.changed(inner=self.inner.times(numerator, denominator))
        return self.changed(outer=self.outer.times(numerator, denominator))

    def __mul__(self, other: Any) -> Any:
        is_number = isinstance(other, (int, float))
        return self.scaled(other, 1.0) if is_number else self.tensor() * other

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        is_number = isinstance(other, (int, float))
        return self.scaled(1.0, other) if is_number else self.tensor() / other

    def __getitem__(self, index: Any) -> Any:
        """Choose positions; the logits of each must be whole (``[..., :-1, :]``)."""
        is_whole = isinstance(index, tuple) and index[0] is Ellipsis and index[-1] == slice(None)
        if not is_whole or len(index) > self.hidden.dim() + 1:
            return self.tensor()[index]
        return self.changed(hidden=self.hidden[index])

    # -------------------------------------------------------------------------------- the loss

    def cross_entropy(
        self,
        target: Tensor,
        reduction: str = "mean",
        ignore_index: int = -100,
        label_smoothing: Number = 0.0,
    ) -> Tensor | None:
        """Compute the loss as `foo_ops.linear_cross_entropy`, or return None where it cannot."""
        if self.computed is not None or target.dtype != torch.int64:
            return None
        hidden, bias, scale, softcap = self.hidden, self.bias, self.inner.value(), 0.0
        if self.outer is not None:
            softcap = self.outer.value()
            if softcap <= 0.0:
                return None
            # The operator divides by the soft cap what it is given.
            scale = self.inner.times(*self.outer).value()
        if scale != 1.0:
            hidden, bias = hidden * scale, None if bias is None else bias * scale
        loss: Any = linear_cross_entropy(
            hidden,
            self.weight,
            target.to(hidden.device),
            bias,
            reduction=reduction,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
            softcap=softcap,
        )
        return loss

    # ----------------------------------------------------------------------- all other uses

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        first = arguments[0] if arguments else None
        if isinstance(first, DeferredLogits):
            if function is torch.tanh:
                return first.tanh()
            if function is F.cross_entropy and (loss := functional_loss(*arguments, **keywords)):
                return loss[0]
        arguments = [computed(it) for it in arguments]
        return function(*arguments, **{name: computed(it) for name, it in keywords.items()})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)


def functional_loss(
    logits: DeferredLogits, target: Tensor, weight: Tensor | None = None, **options: Any
) -> tuple[Tensor] | None:
    """Return what `torch.nn.functional.cross_entropy` would, or None where it must."""
    if weight is not None or logits.hidden.dim() != 2 or target.dim() != 1:
        return None
    options = {name: it for name, it in options.items() if it is not None}
    if options.keys() - {"reduction", "ignore_index", "label_smoothing"}:
        return None
    loss = logits.cross_entropy(target, **options)
    return None if loss is None else (loss.to(logits.dtype),)


def computed(value: Any) -> Any:
    return value.tensor() if isinstance(value, DeferredLogits) else value
