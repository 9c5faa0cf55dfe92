"""Write products with another dtype of the result, ``torch.mm(..., out_dtype=torch.float32)``, as
products of wider matrices in graphs that Inductor compiles: it has the former for CUDA alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor.decomposition import decompositions

# The fake kernel of baddbmm.dtype fails in PyTorch 2.13, on every device.
NAMES = ("mm", "bmm", "addmm")


def _widened(name: str, of_torch: Callable[..., Any] | None) -> Callable[..., Any]:
    function: Callable[..., Tensor] = getattr(torch, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [each for each in args if isinstance(each, Tensor)]
        if tensors[0].device.type != "foo":
            return of_torch(*args, **kwargs) if of_torch else NotImplemented
        dtype, *factors = args[len(tensors) :]
        factors_by_name = dict(zip(("beta", "alpha"), factors))
        return function(*(each.to(dtype) for each in tensors), **factors_by_name, **kwargs)

    return call


def register() -> None:
    for name in NAMES:
        operator = getattr(torch.ops.aten, name).dtype
        decompositions[operator] = _widened(name, decompositions.get(operator))
