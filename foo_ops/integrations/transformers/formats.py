"""Formats of files with linear layers of 4 and 8 bits: AWQ, GPTQ and compressed-tensors.

Each reads a layer's tensors into the layout of foo's kernels without rounding, and writes them
back. Four bits are a nibble; files have eight of them in an int32, the first one lowest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from foo_ops.integrations.transformers.packed import FooPackedLinear, Integers
from foo_ops.library.operators import dtype_name
from foo_ops.ops.linear_quantized import GROUP_SIZES, unpack_integers

Stored = Mapping[str, Tensor]
"""A layer's tensors in a file, by the last part of their names."""

# ----------------------------------------------------------------------------------------- nibbles


PER_WORD = 8
LOWER = 0x0F0F0F0F
"""The lower nibble of each byte of a word."""


def nibbles(words: Tensor) -> Tensor:
    """Unpack (..., M) int32 into (..., 8 M) uint8."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)


def words_of(numbers: Tensor) -> Tensor:
    """Pack (..., 8 M) uint8, each less than 16, into (..., M) int32."""
    lower, upper = numbers.unflatten(-1, (-1, 2)).unbind(-1)
    return (lower | upper << 4).contiguous().view(torch.int32)


def joined(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Pair the nibbles of two words, those with even numbers in one result, odd ones in the other.

    A byte of a result has a nibble of ``lower`` in its lower half and one of ``upper`` above it.
    """
    even = lower & LOWER | (upper & LOWER) << 4
    odd = lower >> 4 & LOWER | upper & ~LOWER
    return even, odd


def packed_rows(words: Tensor, group_size: int) -> Tensor:
    """Repack (N, K / 8) int32 as `foo_ops.quantize_weight` does, (N, K / 2) uint8."""
    halves = words.unflatten(1, (-1, 2, group_size // 2 // PER_WORD))
    even, odd = (it.view(torch.uint8) for it in joined(*halves.unbind(2)))
    return torch.stack((even, odd), -1).flatten(1)


def group_size_of(stored: int) -> int | None:
    """Return the kernels' group size for groups of a file, which are then repeated."""
    return next((it for it in reversed(GROUP_SIZES) if stored % it == 0), None)


def repeated(tensor: Tensor, times: int) -> Tensor:
    """Repeat the numbers of each group for the kernels' smaller groups."""
    return tensor.contiguous() if times == 1 else tensor.repeat_interleave(times, 1)


# ----------------------------------------------------------------------------------------- formats


class UnreadableError(Exception):
    """A layer of a file that no kernel of ours multiplies; its text says why."""


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise UnreadableError(reason)


def require_layout(stored: Stored, name: str, dtype: torch.dtype | None, *shape: int) -> None:
    """Refuse a tensor of another dtype or shape; ``None`` is any floating dtype."""
    require(name in stored, f"{name} is missing")
    found = stored[name]
    fits = found.is_floating_point() if dtype is None else found.dtype == dtype
    expected = "floating" if dtype is None else dtype_name(dtype)
    require(
        fits and tuple(found.shape) == shape,
        f"{name} must be {expected} {shape}, got {dtype_name(found.dtype)} {tuple(found.shape)}",
    )


class Format:
    """The layout of one linear layer in a file.

    Attributes:
        method: the name that a model's configuration has for it.
    """

    method: ClassVar[str]

    @classmethod
    def is_in(cls, stored: Stored) -> bool:
        """Whether a layer's tensors have this format."""
        raise NotImplementedError

    @classmethod
    def find(cls, stored: Stored, rows: int, columns: int, config: Any) -> Format:
        """Return the format of a layer (N, K), from the shapes of its tensors.

        Raises:
            UnreadableError: if no kernel of ours multiplies it.
        """
        raise NotImplementedError

    def read(self, stored: Stored, dtype: torch.dtype) -> Integers:
        raise NotImplementedError

    def write(self, layer: FooPackedLinear) -> dict[str, Tensor]:
        raise NotImplementedError


def groups_in(stored: Stored, name: str, dim: int, columns: int) -> int:
    """Return the size of a file's groups, from the number of scales along a dimension."""
    require(name in stored, f"{name} is missing")
    scales = stored[name]
    groups = scales.shape[dim] if scales.dim() == 2 else 0
    require(
        groups > 0 and columns % groups == 0 and group_size_of(columns // groups) is not None,
        f"{name} must have groups whose size is a multiple of 32, got shape {tuple(scales.shape)} "
        f"for {columns} inputs",
    )
    return columns // groups


@dataclass(frozen=True)
class Awq(Format):
    """AWQ's GEMM format.

    ``qweight`` (K, N / 8) and ``qzeros`` (G, N / 8) have nibbles of adjacent outputs, in the order
    of `ORDER`; ``scales`` are (G, N).

    Attributes:
        group_size: of the file.
    """

    method = "awq"
    ORDER: ClassVar[tuple[int, ...]] = (0, 2, 4, 6, 1, 3, 5, 7)
    """The output of each nibble of a word."""
    group_size: int

    @classmethod
    def is_in(cls, stored: Stored) -> bool:
        return "qweight" in stored

    @classmethod
    def find(cls, stored: Stored, rows: int, columns: int, config: Any) -> Format:
        layout = str(getattr(config.format, "value", config.format))
        require(layout == "gemm", f"its version must be gemm, got {layout}")
        require(config.bits == 4, f"it must have 4 bits, got {config.bits}")
        size = groups_in(stored, "scales", 0, columns)
        require_layout(stored, "qweight", torch.int32, columns, rows // PER_WORD)
        require_layout(stored, "scales", None, columns // size, rows)
        require_layout(stored, "qzeros", torch.int32, columns // size, rows // PER_WORD)
        return cls(size)

    def read(self, stored: Stored, dtype: torch.dtype) -> Integers:
        size = group_size_of(self.group_size)
        halves = stored["qweight"].unflatten(0, (-1, 2, size // 2))  # type: ignore[operator]
        # Transposed as words: torch moves four bytes as fast as one.
        even, odd = (it.flatten(0, 1).t().contiguous() for it in joined(*halves.unbind(1)))
        # By `ORDER`, the bytes of even are outputs 0, 4, 1 and 5, those of odd 2, 6, 3 and 7.
        columns = torch.stack((even, odd), 1).view(torch.uint8).unflatten(-1, (-1, 2, 2))
        weight = columns.permute(0, 4, 1, 3, 2).flatten(0, 3)
        zeros = nibbles(stored["qzeros"]).unflatten(1, (-1, PER_WORD))
        order = torch.tensor(self.ORDER, device=zeros.device).argsort()
        times = self.group_size // size  # type: ignore[operator]
        zero = repeated(zeros[..., order].flatten(1).t().to(dtype), times)
        return Integers(weight, repeated(stored["scales"].t().to(dtype), times), zero)

    def write(self, layer: FooPackedLinear) -> dict[str, Tensor]:
        integers, scale, zero = in_groups_of(layer, self.group_size)
        order = torch.tensor(self.ORDER, device=scale.device)

        def packed(numbers: Tensor) -> Tensor:
            return words_of(numbers.t().unflatten(1, (-1, PER_WORD))[..., order].flatten(1))

        return {
            "qweight": packed(integers),
            "qzeros": packed(zero),
            "scales": scale.t().contiguous(),
        }


def in_groups_of(layer: FooPackedLinear, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the integers (N, K), scales and zeros of a layer with 4 bits, in a file's groups."""
    times = group_size // layer.group_size  # type: ignore[operator]
    integers = unpack_integers(layer.weight, layer.scale.shape[1]).flatten(1)
    zero: Any = layer.zero
    return integers, layer.scale[:, ::times], zero[:, ::times].to(torch.uint8)


FORMATS: dict[str, tuple[type[Format], ...]] = {it.method: (it,) for it in (Awq,)}
