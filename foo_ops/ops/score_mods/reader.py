"""See what a function reads, before PyTorch does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from foo_ops.ops.score_mods.builder import name_of
from foo_ops.ops.score_mods.recorder import Number, Recorder, unsupported

# Values that leave a tensor for Python, where no operation sees them.
READERS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)


class Reader(TorchFunctionMode):
    """Tell what a function reads: the objects that it holds, before PyTorch unwraps them.

    Captured tensors have stand-ins among numbers without values. ``tensor[number]`` becomes an
    operation, where PyTorch would ask for the number's value.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function with stand-ins, or, of wrapped tensors alone, outside of the trace."""
        if func in READERS:
            self._recorder.reads_values = True
        if func is torch.Tensor.__getitem__:
            tensor, index = args
            items = list(index) if isinstance(index, tuple) else [index]
            if any(isinstance(it, Tensor) for it in items):
                return self._indexed(tensor, items)
        return self._call(func, args, kwargs or {})

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [it for it in pytree.tree_leaves((args, kwargs)) if isinstance(it, Tensor)]
        if any(isinstance(it, Number) for it in tensors):
            args, kwargs = pytree.tree_map_only(Tensor, self._recorder.stand_in, (args, kwargs))
        elif any(map(self._is_of_others, tensors)):
            return self._recorder.outside(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _is_of_others(self, tensor: Tensor) -> bool:
        """Whether torch.func or torch.export has to see what becomes of a tensor."""
        if torch._ops._len_torch_dispatch_stack_pre_dispatch():
            return id(tensor) not in self._recorder.created
        return torch._C._functorch.is_functorch_wrapped_tensor(tensor)

    def _indexed(self, tensor: Tensor, items: list[Any]) -> Any:
        """Return an element, or a part: slices are cut first, since they hold for all scores."""
        if Ellipsis in (it for it in items if not isinstance(it, Tensor)):
            place = next(i for i, it in enumerate(items) if it is Ellipsis)
            items[place : place + 1] = [slice(None)] * (tensor.dim() - len(items) + 1)
        for item in items:
            if isinstance(item, bool) or not isinstance(item, (Tensor, int, slice)):
                raise unsupported(f"an index that is {type(item).__name__}")
            if isinstance(item, Tensor) and (item.dim() or item.dtype in (torch.bool, torch.uint8)):
                raise unsupported(f"an index of {name_of(item.dtype)} and shape {list(item.shape)}")
        slices = tuple(it if isinstance(it, slice) else slice(None) for it in items)
        if any(it != slice(None) for it in slices):
            tensor = self._call(torch.Tensor.__getitem__, (tensor, slices), {})
        return self._call(torch.ops.aten.index, (tensor, list(_indices(items, tensor.device))), {})


def _indices(items: list[Any], device: torch.device) -> Iterator[Tensor | None]:
    for item in items:
        if isinstance(item, slice):
            yield None
        else:
            yield item if isinstance(item, Tensor) else torch.tensor(item, device=device)
