"""Keys and values of 8 bits that are numbers wherever they are not read as integers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


def numbers(integers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply int8 (B, H, S, D) by (B, H, S)."""
    return (integers.to(scales.dtype) * scales.unsqueeze(-1)).to(dtype)


Base: Any = Tensor
"""Without the types of what a tensor is made with."""


class Integers(Base):
    """What `numbers` returns, computed for each operator that is given it.

    Attention of implementation ``"foo"`` reads the integers and their scales as they are. Models
    whose attention is their own, or which do more with keys and values, need not know of them.

    Attributes:
        integers: int8, (B, H, S, D).
        scales: (B, H, S).
    """

    integers: Tensor
    scales: Tensor

    @staticmethod
    def __new__(
        cls: type[Integers], integers: Tensor, scales: Tensor, dtype: torch.dtype
    ) -> Integers:
        made = Base._make_wrapper_subclass(cls, integers.shape, dtype=dtype, device=integers.device)
        made.integers, made.scales = integers, scales
        return made

    def numbers(self) -> Tensor:
        return numbers(self.integers, self.scales, self.dtype)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, operator: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        arguments, keywords = tree_map_only(Integers, Integers.numbers, (arguments, keywords or {}))
        return operator(*arguments, **keywords)
