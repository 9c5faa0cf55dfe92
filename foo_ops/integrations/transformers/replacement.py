"""Gives a module another forward, by changing its class to a subclass of its own.

The module keeps its identity, parameters, hooks and names, and ``isinstance`` and ``super`` work.
The subclass has the name of its base, since transformers writes it into files.
"""

from __future__ import annotations

import copyreg
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foo_ops.compat import (
    FakeTensor,
    FunctionalTensor,
    has_any_global_hook,
    is_fake,
    is_functorch_wrapped_tensor,
)
from foo_ops.library.operators import FLOATING


class Replacement:
    """Base class of replacements, which precede a module's own class and have a forward.

    Attributes:
        original, replacement: the two classes that `subclass` has combined.
    """

    original: ClassVar[type[nn.Module]]
    replacement: ClassVar[type[Replacement]]

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        """Whether this forward computes the same as the module's own."""
        raise NotImplementedError

    @classmethod
    def attributes(cls, original: type[nn.Module]) -> dict[str, Any]:
        """Return attributes of the subclass that depend on the module's own class."""
        return {}

    @classmethod
    def prepare(cls, module: nn.Module) -> None:
        """Add attributes that only this forward needs, to a module that it recognises."""

    @classmethod
    def forget(cls, module: nn.Module) -> None:
        """Remove attributes that only this forward needs."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the two classes, since their combination cannot be imported."""
        made: Any = super().__reduce_ex__(max(int(protocol), 2))
        if made[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return made
        state, *others = made[2:]
        return new, (self.replacement, self.original), self.copied(state), *others

    def copied(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a copy."""
        return state


class OtherGlobals(Replacement):
    """Base class of replacements that keep a module's own forward, but change its globals.

    A forward that looks up a function by its global name finds ours, in the replaced modules and in
    no others.
    """

    @classmethod
    def names(cls, forward: Any) -> dict[str, Any]:
        """Return the objects that forward is to find, by their global names."""
        return {}

    @classmethod
    def attributes(cls, original: type[nn.Module]) -> dict[str, Any]:
        forward: Any = original.forward
        return {"forward": with_globals(forward, cls.names(forward))}


def with_globals(function: types.FunctionType, names: dict[str, Any]) -> types.FunctionType:
    """Return the function with some of its globals replaced."""
    namespace = {**function.__globals__, **names}
    # With this name, torch.compile would look up the globals in the module, and find the old ones.
    del namespace["__name__"]
    made = types.FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    for name in ("__module__", "__qualname__", "__doc__", "__annotations__"):
        setattr(made, name, getattr(function, name))
    return made


@cache
def subclass(replacement: Any, original: Any) -> Any:
    """Make the class that combines both."""
    names = ("__module__", "__qualname__", "__doc__")
    attributes = {name: getattr(original, name) for name in names}
    attributes |= {"original": original, "replacement": replacement}
    attributes |= replacement.attributes(original)
    return type(original.__name__, (replacement, original), attributes)


def new(replacement: Any, original: Any) -> Any:
    made = subclass(replacement, original)
    return made.__new__(made)


def replace(module: Any, replacement: Any) -> None:
    original: Any = type(module)
    replacement.prepare(module)
    module.__class__ = subclass(replacement, original)


def put_back(module: Any) -> None:
    """Undo `replace`. If others have put a class before ours since then, both stay."""
    if is_replaced(module):
        module.forget(module)
        module.__class__ = type(module).original


def is_replaced(module: nn.Module) -> bool:
    return "original" in vars(type(module)) and isinstance(module, Replacement)


# ------------------------------------------------------------------------------------ what fits


WEIGHT_TYPES = (Tensor, nn.Parameter)
"""Types of weights that kernels accept; others, such as quantisers', bring their own products."""
KINDS = (*WEIGHT_TYPES, FakeTensor, FunctionalTensor)
"""Types of tensors that kernels accept, and those that represent them during tracing."""
DEVICES = ("cpu", "foo", "meta")


def has_numbers(tensor: Any) -> bool:
    """Whether a tensor has values that can be read."""
    return (
        type(tensor) in WEIGHT_TYPES
        and not tensor.is_meta
        and not is_functorch_wrapped_tensor(tensor)
        and not is_fake(tensor)
    )


def is_taken(tensor: Any) -> bool:
    """Whether foo's operators support such a tensor as torch's do."""
    return (
        type(tensor) in KINDS
        and tensor.dtype in FLOATING
        and tensor.layout is torch.strided
        and (tensor.is_cpu or tensor.device.type in DEVICES)
    )


def are_alike(input: Any, *others: Any) -> bool:
    """Whether foo's operators support these tensors, all of one dtype and on one device.

    Modules are recognised with tensors of one dtype. With mixed dtypes, some modules promote, some
    cast and some raise, so the module's own forward is called.
    """
    if not is_taken(input):
        return False
    dtype, is_cpu = input.dtype, input.is_cpu
    # Runs in each layer for each token: attributes of tensors take 40 ns, devices 100.
    for it in others:
        if it is not None and (
            it.dtype is not dtype
            or type(it) not in KINDS
            or it.layout is not torch.strided
            or not (it.is_cpu if is_cpu else it.device == input.device)
        ):
            return False
    return True


def can_multiply(input: Any, *others: Any) -> bool:
    """Whether foo's matrix products support these tensors: alike, or made alike by autocast."""
    if are_alike(input, *others):
        return True
    given = [it for it in (input, *others) if it is not None]
    return all(map(is_taken, given)) and are_cast_alike(*given)


def are_cast_alike(*tensors: Tensor) -> bool:
    """Whether autocast converts these tensors, all on one device, to one dtype."""
    device = tensors[0].device
    return torch.is_autocast_enabled(device.type) and all(
        it.device == device and it.is_floating_point() and it.dtype != torch.float64
        for it in tensors
    )


def memory_order(tensor: Tensor) -> list[int] | None:
    """Return a tensor's dimensions in memory order, the one with adjacent elements last.

    Results of elementwise functions have the memory order of their input. Returns None if row
    operators cannot write such a result, because the elements of its rows are not adjacent.
    """
    strides = tensor.stride()
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    return order if strides and 0 not in strides and order[-1] == len(order) - 1 else None


def permuted_back(tensor: Tensor, order: list[int]) -> Tensor:
    """Undo ``permute(order)``."""
    return tensor.permute([order.index(dim) for dim in range(len(order))])


# ----------------------------------------------------------------------------------- recognition


ROUNDINGS = 16
"""Allowed between a module's own results and ours, in roundings of the row's largest number."""


def has_own_forward(module: nn.Module) -> bool:
    """Whether an instance attribute replaces the class's forward, as others' hooks do."""
    return "forward" in vars(module)


def holds(module: nn.Module, name: str) -> bool:
    """Whether a submodule's class name contains ``name``."""
    return any(name in type(it).__name__ for it in module.modules() if it is not module)


def has_hooks(module: Any) -> bool:
    """Whether calling a module runs more than its class's forward, so no other may do its work."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or has_own_forward(module)
        or has_any_global_hook()
    )


def stand_in(
    module: nn.Module,
    parameters: Mapping[str, Tensor | None] | None = None,
    modules: Mapping[str, Callable[..., Any]] | None = None,
) -> nn.Module:
    """Return a module of the same class and attributes, with other parameters, in training mode."""
    made = object.__new__(type(module))
    own = vars(module)
    vars(made).update(own, training=True)
    vars(made)["_parameters"] = {**own["_parameters"], **(parameters or {})}
    vars(made)["_modules"] = {**own["_modules"], **(modules or {})}
    return made


def is_near(own: Any, ours: Tensor) -> bool:
    """Whether a module's result equals ours up to rounding, with the same dtype and overflows."""
    if not isinstance(own, Tensor) or (own.shape, own.dtype) != (ours.shape, ours.dtype):
        return False
    is_finite = ours.isfinite()
    if not torch.equal(own.isfinite(), is_finite):
        return False
    rounding = torch.finfo(ours.dtype).eps
    own, ours = (it.masked_fill(~is_finite, 0).double() for it in (own, ours))
    room = ROUNDINGS * rounding * ours.abs().amax(-1, keepdim=True)
    return bool(((own - ours).abs() <= room).all())
