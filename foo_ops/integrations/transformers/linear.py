"""foo::linear in torch's linear layers and GPT-2's ``Conv1D``."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from foo_ops.compat import pytree
from foo_ops.integrations.transformers.replacement import (
    WEIGHT_TYPES,
    Replacement,
    can_multiply,
    has_hooks,
    has_own_forward,
)
from foo_ops.ops.cross_entropy.linear import linear_cross_entropy
from foo_ops.ops.linear import linear

# ---------------------------------------------------------------------------------- deferred logits

# The output of a language model's head, computed only if needed.


# In the class below, ``float`` is the method of logits.
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


def autocast_of(device_type: str) -> dict[str, Any]:
    """Return the current options of `torch.autocast`."""
    return {
        "device_type": device_type,
        "dtype": torch.get_autocast_dtype(device_type),
        "enabled": torch.is_autocast_enabled(device_type),
    }


Change = Callable[[Tensor], Tensor]
"""The effect of a method on the computed logits."""


def method_of_tensor(name: str, describe: Callable[..., dict[str, Any] | None]) -> Any:
    """Return a method of Tensor as a method of `DeferredLogits`.

    Args:
        describe: takes the arguments of the method; returns the attributes in which the result
            differs from these logits, or None where they must be computed.
    """
    method = getattr(Tensor, name)

    @wraps(method, assigned=("__name__",))
    def either(self: DeferredLogits, *arguments: Any, **keywords: Any) -> Any:
        attributes = describe(self, *arguments, **keywords) if self.is_pending() else None
        if attributes is None:
            return method(self.tensor(), *arguments, **keywords)
        return self.changed(lambda it: method(it, *arguments, **keywords), attributes)

    return either


def deferring(describe: Callable[..., dict[str, Any] | None]) -> Any:
    """Make a method from the function that describes its result; a decorator."""
    return method_of_tensor(describe.__name__, describe)


class DeferredLogits:
    """Logits that are not yet computed, given by a head's input and weights.

    A model may scale and bound its logits, reshape them, and convert them to float32; all this
    stays deferred. Their cross-entropy is foo::linear_cross_entropy. Any other use computes them
    once, together with all logits derived from them or that they derive from, by the functions that
    were called. From then on each is that tensor, so writes are seen by all that share its memory.

    They have the special methods of a tensor and all of its attributes.

    Attributes:
        hidden: (..., K), the head's input.
        weight: (V, K).
        bias: (V,), or None.
        inner_factor, outer_factor: the logits are ``outer * tanh(inner * logits)``, or without an
            outer factor ``inner * logits``.
        converted: the dtype of the logits, if it is not that of the input.
        origin: the logits that these derive from, and the function that derives them; None for a
            head's own logits, and once computed.
        is_recorded: whether gradients were recorded when the head was called.
        autocast: the options of `torch.autocast` at that call.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inner_factor: Ratio = ONE,
        outer_factor: Ratio | None = None,
        converted: torch.dtype | None = None,
        origin: tuple[DeferredLogits, Change] | None = None,
    ) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.inner_factor, self.outer_factor = inner_factor, outer_factor
        self.converted, self.origin = converted, origin
        self.made: list[weakref.ref[DeferredLogits]] = []
        self.is_recorded = torch.is_grad_enabled()
        self.autocast: dict[str, Any] = (
            autocast_of(hidden.device.type) if origin is None else origin[0].autocast
        )
        self.computed: Tensor | None = None

    def tensor(self) -> Tensor:
        """Compute the logits, and all logits derived from the same head."""
        if self.computed is None:
            first = self
            while first.origin is not None:
                first = first.origin[0]
            with (
                torch.inference_mode(False),
                torch.set_grad_enabled(self.is_recorded),
                torch.autocast(**self.autocast),
            ):
                first.become(linear(first.hidden, first.weight, first.bias))
        assert self.computed is not None
        return self.computed

    def become(self, tensor: Tensor) -> None:
        self.computed, self.origin = tensor, None
        for reference in self.made:
            made = reference()
            if made is not None and made.origin is not None:
                made.become(made.origin[1](tensor))

    def is_pending(self) -> bool:
        """Whether logits derived from these can stay deferred, too."""
        return self.computed is None and self.is_recorded == torch.is_grad_enabled()

    def changed(self, change: Change, attributes: dict[str, Any]) -> DeferredLogits:
        """Return the deferred result of ``change``: logits with these attributes."""
        names = ("hidden", "weight", "bias", "inner_factor", "outer_factor", "converted")
        same = {name: getattr(self, name) for name in names}
        made = type(self)(**same | attributes, origin=(self, change))
        self.made.append(weakref.ref(made))
        return made

    # ------------------------------------------------------------------ what needs no computation

    @property
    def shape(self) -> torch.Size:
        if self.computed is not None:
            return self.computed.shape
        return torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def device(self) -> torch.device:
        return self.hidden.device if self.computed is None else self.computed.device

    @property
    def dtype(self) -> torch.dtype:
        if self.computed is not None:
            return self.computed.dtype
        if self.converted is not None:
            return self.converted
        is_cast = self.autocast["enabled"] and self.hidden.dtype != torch.float64
        dtype: torch.dtype = self.autocast["dtype"] if is_cast else self.hidden.dtype
        return dtype

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    @deferring
    def float(self, **options: Any) -> dict[str, Any]:
        return {"converted": torch.float32}

    @deferring
    def contiguous(self, **options: Any) -> dict[str, Any]:
        return {}

    def resized(self, *shape: Any, **options: Any) -> dict[str, Any] | None:
        sizes = shape[0] if shape and isinstance(shape[0], (tuple, list)) else shape
        if options or not sizes or sizes[-1] != self.weight.shape[0]:
            return None
        return {"hidden": self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1])}

    reshape = method_of_tensor("reshape", resized)
    view = method_of_tensor("view", resized)

    @deferring
    def tanh(self) -> dict[str, Any] | None:
        return {"outer_factor": ONE} if self.outer_factor is None else None

    def scaled(self, numerator: Any, denominator: Any) -> dict[str, Any] | None:
        if not all(isinstance(it, (int, Number)) for it in (numerator, denominator)):
            return None
        name = "inner_factor" if self.outer_factor is None else "outer_factor"
        return {name: getattr(self, name).times(numerator, denominator)}

    def multiplied(self, other: Any) -> dict[str, Any] | None:
        return self.scaled(other, 1.0)

    __mul__ = method_of_tensor("__mul__", multiplied)
    __rmul__ = method_of_tensor("__rmul__", multiplied)

    @deferring
    def __truediv__(self, other: Any) -> dict[str, Any] | None:
        return self.scaled(1.0, other)

    @deferring
    def __getitem__(self, index: Any) -> dict[str, Any] | None:
        """Select positions, with all logits of each (``[..., :-1, :]``)."""
        is_whole = (
            isinstance(index, tuple)
            and len(index) in range(2, self.ndim + 2)
            and index[0] is Ellipsis
            and all(isinstance(it, slice) for it in index[1:])
            and index[-1] == slice(None)
        )
        return {"hidden": self.hidden[index]} if is_whole else None

    __hash__ = object.__hash__

    # -------------------------------------------------------------------------------- the loss

    def cross_entropy(
        self,
        target: Tensor,
        reduction: str = "mean",
        ignore_index: int = -100,
        label_smoothing: Number = 0.0,
    ) -> Tensor | None:
        """Compute the loss as `foo_ops.linear_cross_entropy`, or return None where it cannot."""
        if not self.is_pending() or target.dtype != torch.int64:
            return None
        hidden, bias, scale, softcap = self.hidden, self.bias, self.inner_factor.value(), 0.0
        if self.outer_factor is not None:
            softcap = self.outer_factor.value()
            if softcap <= 0.0:
                return None
            # The operator divides its logits by the softcap.
            scale = self.inner_factor.times(*self.outer_factor).value()
        if scale != 1.0:
            hidden, bias = hidden * scale, None if bias is None else bias * scale
        with torch.autocast(**self.autocast):
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
        arguments, keywords = pytree.tree_map(computed, (arguments, keywords))
        return function(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)


def property_of_tensor(name: str) -> Any:
    def read(self: DeferredLogits) -> Any:
        return getattr(self.tensor(), name)

    def write(self: DeferredLogits, value: Any) -> None:
        setattr(self.tensor(), name, value)

    return property(read, write)


OF_CLASSES = {"__new__", "__init_subclass__", "__subclasshook__", "__torch_dispatch__"}


def is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def complete(logits: type[DeferredLogits]) -> None:
    """Add what bypasses ``__getattr__`` to the class: special methods, and assignments."""
    for name in set(dir(Tensor)) - vars(logits).keys() - OF_CLASSES:
        attribute = inspect.getattr_static(Tensor, name)
        if is_special(name):
            if callable(attribute) and attribute is not getattr(object, name, None):
                setattr(logits, name, method_of_tensor(name, lambda *_, **__: None))
        elif inspect.isdatadescriptor(attribute):
            setattr(logits, name, property_of_tensor(name))


complete(DeferredLogits)


Base: Any = Tensor
"""Tensor, untyped: its attributes have other types than those of deferred logits."""


class DeferredTensor(DeferredLogits, Base):
    """Deferred logits that are also a Tensor for ``isinstance``, without storage."""

    @staticmethod
    def __new__(
        cls: type[DeferredTensor], hidden: Tensor, weight: Tensor, *_: Any, **__: Any
    ) -> DeferredTensor:
        shape = (*hidden.shape[:-1], weight.shape[0])
        return Base._make_wrapper_subclass(cls, shape, dtype=hidden.dtype, device=hidden.device)

    @classmethod
    def __torch_dispatch__(cls, operator: Any, *_: Any) -> Any:
        raise NotImplementedError(f"{operator}: not supported on logits that are not computed yet")


def defer(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> DeferredLogits:
    # torch.compile does not trace the creation of wrapper subclasses.
    kind = DeferredLogits if torch.compiler.is_compiling() else DeferredTensor
    return kind(hidden, weight, bias)


def functional_loss(
    logits: DeferredLogits, target: Tensor, weight: Tensor | None = None, **options: Any
) -> tuple[Tensor] | None:
    """Return the cross-entropy in a tuple, or None where PyTorch must compute it."""
    if weight is not None or logits.hidden.dim() != 2 or target.dim() != 1:
        return None
    options = {name: it for name, it in options.items() if it is not None}
    if options.keys() - {"reduction", "ignore_index", "label_smoothing"}:
        return None
    loss = logits.cross_entropy(target, **options)
    if loss is None:
        return None
    # Under autocast PyTorch returns it in float32.
    is_cast = torch.is_autocast_enabled(logits.device.type) and logits.dtype != torch.float64
    return (loss.to(torch.float32 if is_cast else logits.dtype),)


def computed(value: Any) -> Any:
    return value.tensor() if isinstance(value, DeferredLogits) else value


# ------------------------------------------------------------------------------------------- layers


def is_supported(module: nn.Module) -> bool:
    """Whether a layer has its class's forward and a floating-point weight of a supported type."""
    weight: Any = module.weight
    is_weight = type(weight) in WEIGHT_TYPES and weight.is_floating_point()
    return is_weight and not has_own_forward(module)


class Deferred(threading.local):
    """The head whose output this thread defers.

    Attributes:
        head: the head of a model that is called for its loss (`fused_loss`). Per thread, since
            others may call the same model for its logits.
    """

    head: Any = None


deferred = Deferred()


class FooLinear(Replacement):
    """Replaces `torch.nn.Linear`."""

    weight: Tensor
    bias: Tensor | None
    _parameters: Any

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        return type(module).forward is nn.Linear.forward and is_supported(module)

    def forward(self, input: Tensor) -> Any:
        own = self._parameters
        # Attribute lookup is slow, and only needed under a parametrization.
        is_own = "weight" in own and "bias" in own
        weight, bias = (own["weight"], own["bias"]) if is_own else (self.weight, self.bias)
        if not can_multiply(input, weight, bias):
            return super().forward(input)  # type: ignore[misc]
        if deferred.head is self:
            return defer(input, weight, bias)
        return torch.ops.foo.linear.default(input, weight, bias)


def is_lone(layer: Any) -> bool:
    """Whether a layer is one of ours, without hooks or parametrizations."""
    is_ours = getattr(type(layer), "forward", None) is FooLinear.forward
    return is_ours and not has_hooks(layer) and type(layer.weight) in WEIGHT_TYPES


def lone_parameters(layer: Any) -> tuple[Tensor, Tensor | None] | None:
    """Return the arguments of foo::linear for a layer of ours, or None."""
    if is_lone(layer):
        return layer.weight, layer.bias
    is_ours = getattr(type(layer), "forward", None) is FooConv1D.forward
    if not is_ours or has_hooks(layer) or type(layer.weight) not in WEIGHT_TYPES:
        return None
    return layer.weight.t(), layer.bias


def lone_weight(layer: Any) -> Tensor | None:
    """Return the weight of a layer of ours without bias, or None."""
    return layer.weight if is_lone(layer) and layer.bias is None else None


class FooConv1D(Replacement):
    """Replaces transformers' ``Conv1D``, a linear layer with the weight transposed."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        return type(module).forward is Conv1D.forward and is_supported(module)

    def forward(self, x: Tensor) -> Any:
        # Conv1D's own forward views the input as rows, and raises if it cannot.
        if not can_multiply(x, self.weight, self.bias) or not x.is_contiguous():
            return super().forward(x)  # type: ignore[misc]
        return torch.ops.foo.linear.default(x, self.weight.t(), self.bias)
