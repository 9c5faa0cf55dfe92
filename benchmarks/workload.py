"""The workloads of attention's benchmark, and how much work they are."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PACKED_TENTHS = (1, 2, 3, 4)
"""Lengths of packed sequences, in tenths of the total: as unequal as in real text."""


@dataclass(frozen=True)
class Workload:
    """The shapes, dtype and direction of a call.

    Attributes:
        direction: "forward" or "backward".
        dtype: the name: float32, bfloat16 or float16.
        copies: the number of input sets, used in turn, like the caches of a model's layers, so they
            are not in the processor's cache.
        value_dim: the head dimension of value, if it differs from that of query and key.
        has_bias: whether a bias for each head, query and key is added, which requires a gradient.
        dropout_p: as in `attention`.
        window: the number of keys that a query sees, up to its own.
        is_packed: whether sequences of different lengths follow each other, without padding.
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
    value_dim: int = 0
    has_bias: bool = False
    dropout_p: float = 0.0
    window: int = 0
    is_packed: bool = False

    @property
    def has_no_options(self) -> bool:
        """Return whether there are no options beside dense or causal."""
        return not (
            self.value_dim or self.has_bias or self.dropout_p or self.window or self.is_packed
        )

    @property
    def is_backward(self) -> bool:
        return self.direction == "backward"

    @property
    def is_decoding(self) -> bool:
        return self.query_length == 1

    @property
    def heads(self) -> str:
        """Return ``8``, or ``32/8`` where heads share keys and values."""
        if self.query_heads == self.key_heads:
            return str(self.query_heads)
        return f"{self.query_heads}/{self.key_heads}"

    @property
    def head_dims(self) -> str:
        """Return ``64``, or ``192/128`` where value has another dimension."""
        return f"{self.head_dim}/{self.value_dim}" if self.value_dim else str(self.head_dim)

    @property
    def mask(self) -> str:
        return "causal" if self.is_causal else "dense"

    @property
    def option(self) -> str:
        """Name the options."""
        parts = {
            "value of another dimension": self.value_dim,
            "bias with gradient": self.has_bias,
            f"dropout {self.dropout_p}": self.dropout_p,
            f"window {self.window}": self.window,
            f"{len(PACKED_TENTHS)} packed sequences": self.is_packed,
        }
        return ", ".join(text for text, is_there in parts.items() if is_there)

    def sequence_lengths(self) -> list[int]:
        """Return the lengths of the packed sequences; the last gets the remainder."""
        lengths = [self.key_length * tenths // 10 for tenths in PACKED_TENTHS[:-1]]
        return [*lengths, self.key_length - sum(lengths)]

    def visible_pairs(self) -> int:
        """Count the visible pairs of a query and a key, per head."""
        if self.is_packed:
            alone = (
                dataclasses.replace(self, is_packed=False, query_length=length, key_length=length)
                for length in self.sequence_lengths()
            )
            return sum(workload.visible_pairs() for workload in alone)
        if not self.is_causal:
            return self.query_length * self.key_length
        most = self.window or self.key_length
        return sum(min(query + 1, most) for query in range(self.query_length))

    def flops(self) -> float:
        """Count the useful operations: 2 * D per visible pair and matrix product.

        The products are scores and output; backward the scores again, the gradient of the weights
        and those of query, key and value.

        >>> Workload("forward", "float32", False, 512, 512, 64).flops() == 4 * 8 * 512 * 512 * 64
        True
        """
        value_dim = self.value_dim or self.head_dim
        dims = 3 * self.head_dim + 2 * value_dim if self.is_backward else self.head_dim + value_dim
        return 2.0 * dims * self.batch * self.query_heads * self.visible_pairs()

    def cache_bytes(self) -> int:
        """Return the bytes of the keys and values."""
        itemsize = getattr(torch, self.dtype).itemsize
        return 2 * self.batch * self.key_heads * self.key_length * self.head_dim * itemsize

    def inputs(self) -> list[tuple[Tensor, ...]]:
        """Make ``copies`` sets of query, key, value and any bias; the same in every process."""
        generator = torch.Generator().manual_seed(0)

        def tensor(shape: tuple[int, ...]) -> Tensor:
            values = torch.randn(shape, generator=generator).to(getattr(torch, self.dtype))
            return values.requires_grad_(self.is_backward or self.has_bias)

        return [tuple(tensor(shape) for shape in self.shapes()) for _ in range(self.copies)]

    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the inputs.

        Packed sequences have no batch dimension, and heads come second.
        """
        sizes = (
            (self.query_heads, self.query_length, self.head_dim),
            (self.key_heads, self.key_length, self.head_dim),
            (self.key_heads, self.key_length, self.value_dim or self.head_dim),
        )
        if self.is_packed:
            return [(length, heads, dim) for heads, length, dim in sizes]
        bias = (self.query_heads, self.query_length, self.key_length)
        return [
            *((self.batch, *size) for size in sizes),
            *([(1, *bias)] if self.has_bias else []),
        ]

    def in_turn(self, function: Callable[..., Any]) -> Callable[[], Any]:
        """Return a function without arguments that uses the next set of inputs in each call."""
        sets = itertools.cycle(self.inputs())
        return lambda: function(*next(sets))

    def grad_output(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        query, _, value, *_ = self.shapes()
        shape = (*query[:-1], value[-1])
        return torch.randn(shape, generator=generator).to(getattr(torch, self.dtype))

    # ------------------------------------------------------------------ for those who lack options

    def mask_arguments(self) -> dict[str, Any]:
        """Return mask arguments for functions that do not support windows."""
        if not self.window:
            return {"is_causal": self.is_causal}
        distance = torch.arange(self.query_length)[:, None] - torch.arange(self.key_length)
        return {"attn_mask": (distance >= 0) & (distance < self.window)}

    def one_by_one(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return the function itself, or for packed sequences a loop over them."""
        if not self.is_packed:
            return function
        lengths = self.sequence_lengths()

        def call(*inputs: Tensor) -> Tensor:
            sequences = zip(*(tensor.transpose(0, 1)[None].split(lengths, 2) for tensor in inputs))
            return torch.cat([function(*it)[0].transpose(0, 1) for it in sequences])

        return call

    def comparable(self, result: Tensor) -> Tensor:
        """Return the values that must agree: the norm if each contender draws its own dropout."""
        return torch.linalg.vector_norm(result) if self.dropout_p else result
