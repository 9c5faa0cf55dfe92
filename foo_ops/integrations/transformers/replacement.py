"""How a module gets another forward: its class becomes a subclass of what it was.

The module stays the object that it is, with its parameters, hooks and names, and ``isinstance`` and
``super`` hold. The subclass has the name of its base, which transformers writes into files.
"""

from __future__ import annotations

import copyreg
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, is_fake
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.modules.module import _has_any_global_hook

from foo_ops.library.operators import FLOATING


class Replacement:
    """The base of classes that are put before a module's own; each has a forward.

    Attributes:
        original, replacement: the two classes of which `subclass` has made this one.
    """

    original: ClassVar[type[nn.Module]]
    replacement: ClassVar[type[Replacement]]

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        """Whether forward computes what the module's own does."""
        raise NotImplementedError

    @classmethod
    def attributes(cls, original: type[nn.Module]) -> dict[str, Any]:
        """Return what the subclass has that depends on the module's own class."""
        return {}

    @classmethod
    def forget(cls, module: nn.Module) -> None:
        """Take from a module what it has for this forward alone."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the two classes, since nothing can be imported that has both."""
        made: Any = super().__reduce_ex__(max(int(protocol), 2))
        if made[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return made
        state, *others = made[2:]
        return new, (self.replacement, self.original), self.copied(state), *others

    def copied(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the attributes that a copy starts with."""
        return state


class OtherGlobals(Replacement):
    """The base of replacements that keep a module's own forward, and change what it finds.

    A forward that looks a function up by its global name finds another one there, in the modules
    that are replaced and in no others.
    """

    @classmethod
    def names(cls, forward: Any) -> dict[str, Any]:
        """Return the objects that forward finds, by their global names."""
        return {}

    @classmethod
    def attributes(cls, original: type[nn.Module]) -> dict[str, Any]:
        forward: Any = original.forward
        return {"forward": with_globals(forward, cls.names(forward))}


def with_globals(function: types.FunctionType, names: dict[str, Any]) -> types.FunctionType:
    """Return the function with other objects under some global names."""
    namespace = {**function.__globals__, **names}
    # By this name torch.compile would look the objects up in the module, and find the old ones.
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
    """Make the class of modules that are both."""
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
    module.__class__ = subclass(replacement, original)


def put_back(module: Any) -> None:
    """Undo `replace`. A class that others have put before ours since then stays, with ours."""
    if is_replaced(module):
        module.forget(module)
        module.__class__ = type(module).original


def is_replaced(module: nn.Module) -> bool:
    return "original" in vars(type(module)) and isinstance(module, Replacement)


# ------------------------------------------------------------------------------------ what fits


PLAIN = (Tensor, nn.Parameter)
"""The types of weights that kernels take; others, as of quantisers, bring their own products."""
KINDS = (*PLAIN, FakeTensor, FunctionalTensor)
"""The types of tensors that kernels take, and those that stand for them while a graph is made."""
DEVICES = ("cpu", "foo", "meta")


def has_numbers(tensor: Any) -> bool:
    """Whether a tensor has values that can be looked at."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return (
        type(tensor) in PLAIN
        and not tensor.is_meta
        and not is_wrapped(tensor)
        and not is_fake(tensor)
    )


def is_taken(tensor: Any) -> bool:
    """Whether foo's operators compute with such a tensor as torch's do."""
    return (
        type(tensor) in KINDS
        and tensor.dtype in FLOATING
        and tensor.layout is torch.strided
        and (tensor.is_cpu or tensor.device.type in DEVICES)
    )


def are_alike(input: Any, *others: Any) -> bool:
    """Whether foo's operators take these tensors, all of one dtype and on one device.

    A module is recognised with tensors of one dtype. Where they are mixed, some modules promote,
    some cast, and some refuse: its own forward tells, and is called.
    """
    if not is_taken(input):
        return False
    dtype, is_cpu = input.dtype, input.is_cpu
    # Each layer asks, for each token: attributes of tensors take 40 ns, and devices 100.
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
    """Whether foo's matrix products take these tensors: alike, or cast by autocast to be so."""
    if are_alike(input, *others):
        return True
    given = [it for it in (input, *others) if it is not None]
    return all(map(is_taken, given)) and are_cast_alike(*given)


def are_cast_alike(*tensors: Tensor) -> bool:
    """Whether autocast converts tensors, all on one device, to one dtype."""
    device = tensors[0].device
    return torch.is_autocast_enabled(device.type) and all(
        it.device == device and it.is_floating_point() and it.dtype != torch.float64
        for it in tensors
    )


def memory_order(tensor: Tensor) -> list[int] | None:
    """Return the dimensions of a tensor as they lie in memory, the one with adjacent elements last.

    Results of elementwise functions lie like their input. Where operators of rows cannot write
    such a result, since the elements of its rows are not adjacent, this is None.
    """
    strides = tensor.stride()
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    return order if strides and 0 not in strides and order[-1] == len(order) - 1 else None


def permuted_back(tensor: Tensor, order: list[int]) -> Tensor:
    """Undo ``permute(order)``."""
    return tensor.permute([order.index(dim) for dim in range(len(order))])


# ----------------------------------------------------------------------------------- recognition


ROUNDINGS = 16
"""Of the largest number in a row, between a module's own results and ours."""


def has_own_forward(module: nn.Module) -> bool:
    """Whether the forward that is called is not the class's, as hooks of others make it."""
    return "forward" in vars(module)


def holds(module: nn.Module, name: str) -> bool:
    """Whether a module has another one in it whose class has a name of this kind."""
    return any(name in type(it).__name__ for it in module.modules() if it is not module)


def has_hooks(module: Any) -> bool:
    """Whether more than its forward has to run, so that another module cannot do it instead."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or has_own_forward(module)
        or _has_any_global_hook()
    )


def stand_in(
    module: nn.Module,
    parameters: Mapping[str, Tensor] | None = None,
    modules: Mapping[str, Callable[..., Any]] | None = None,
) -> nn.Module:
    """Return a module of the same class and attributes with other parameters, in training."""
    made = object.__new__(type(module))
    own = vars(module)
    vars(made).update(own, training=True)
    vars(made)["_parameters"] = {**own["_parameters"], **(parameters or {})}
    vars(made)["_modules"] = {**own["_modules"], **(modules or {})}
    return made


def is_near(own: Any, ours: Tensor) -> bool:
    """Whether a module's own result is ours but for roundings, in dtype and in what overflows."""
    if not isinstance(own, Tensor) or (own.shape, own.dtype) != (ours.shape, ours.dtype):
        return False
    is_finite = ours.isfinite()
    if not torch.equal(own.isfinite(), is_finite):
        return False
    rounding = torch.finfo(ours.dtype).eps
    own, ours = (it.masked_fill(~is_finite, 0).double() for it in (own, ours))
    room = ROUNDINGS * rounding * ours.abs().amax(-1, keepdim=True)
    return bool(((own - ours).abs() <= room).all())
