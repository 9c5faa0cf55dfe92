"""What a row of attention's benchmark works on, and how much work that is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BACKWARD_WORK = 2.5
"""Of the forward pass's work: five products of matrices, where that has two."""


@dataclass(frozen=True)
class Workload:
    """Shapes, dtype and direction of a call.

    Attributes:
        direction: "forward" or "backward".
        dtype: by its name: float32, bfloat16 or float16.
        copies: so many sets of inputs are used in turn. The caches of a model's layers follow each
            other in the same way, and are not in the processor's cache.
    """

    direction: str
    dtype: str
    is_causal: bool
    query_length: int
    key_length: int
    head_dim: int
    batch: int = 1
    query_heads: int = 8
    key_heads: int = 8
    copies: int = 1

    @property
    def is_backward(self) -> bool:
        return self.direction == "backward"

    @property
    def is_decoding(self) -> bool:
        return self.query_length == 1

    @property
    def heads(self) -> str:
        """``8``, or ``32/8`` where heads share keys and values."""
        if self.query_heads == self.key_heads:
            return str(self.query_heads)
        return f"{self.query_heads}/{self.key_heads}"

    @property
    def mask(self) -> str:
        return "causal" if self.is_causal else "dense"

    def visible_pairs(self) -> int:
        """Pairs of a query and a key that it sees, for each head."""
        if not self.is_causal:
            return self.query_length * self.key_length
        return sum(min(query + 1, self.key_length) for query in range(self.query_length))

    def flops(self) -> float:
        """Useful operations: two products of matrices, each 2 * D for a visible pair.

        >>> Workload("forward", "float32", False, 512, 512, 64).flops() == 4 * 8 * 512 * 512 * 64
        True
        """
        forward = 4.0 * self.batch * self.query_heads * self.visible_pairs() * self.head_dim
        return forward * (BACKWARD_WORK if self.is_backward else 1.0)

    def cache_bytes(self) -> int:
        """Bytes of the keys and values."""
        itemsize = getattr(torch, self.dtype).itemsize
        return 2 * self.batch * self.key_heads * self.key_length * self.head_dim * itemsize

    def inputs(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """``copies`` sets of query, key and value, the same in every process."""
        generator = torch.Generator().manual_seed(0)
        query_shape = (self.batch, self.query_heads, self.query_length, self.head_dim)
        key_shape = (self.batch, self.key_heads, self.key_length, self.head_dim)

        def tensor(shape: tuple[int, ...]) -> Tensor:
            values = torch.randn(shape, generator=generator).to(getattr(torch, self.dtype))
            return values.requires_grad_(self.is_backward)

        return [
            (tensor(query_shape), tensor(key_shape), tensor(key_shape)) for _ in range(self.copies)
        ]

    def in_turn(self, function: Callable[[Tensor, Tensor, Tensor], Any]) -> Callable[[], Any]:
        """The function of no arguments that takes the next set of inputs with each call."""
        sets = itertools.cycle(self.inputs())
        return lambda: function(*next(sets))

    def grad_output(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        shape = (self.batch, self.query_heads, self.query_length, self.head_dim)
        return torch.randn(shape, generator=generator).to(getattr(torch, self.dtype))
