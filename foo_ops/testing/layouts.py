"""Memory layouts: functions that store the same tensor in different ways."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Layout = Callable[[Tensor], Tensor]


def copy_with_layout(tensor: Tensor, device: str) -> Tensor:
    """Copy the whole storage to a device, seen with the tensor's own strides and offset.

    Example:
        >>> copy = copy_with_layout(torch.ones(4, 6)[1:, ::2], "foo")
        >>> copy.stride(), copy.storage_offset()
        ((6, 2), 6)
    """
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = tensor.as_strided((elements,), (1,), 0).to(device, copy=True)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def junk(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return elements that must not be read: NaN, the largest integer, or True."""
    value: float = math.nan
    if tensor.dtype == torch.bool:
        value = True
    elif not tensor.is_floating_point() and not tensor.is_complex():
        value = torch.iinfo(tensor.dtype).max
    return torch.full(tuple(shape), value, dtype=tensor.dtype, device=tensor.device)


def hint_at_junk(values: Tensor) -> str:
    """Say how many of the wrong elements are junk, and what that means."""
    nothing = junk(values, ())
    is_junk = values.isnan() if nothing.isnan() else values == nothing
    count = int(is_junk.sum())
    if count == 0 or values.dtype == torch.bool:
        return ""
    return (
        f". {count} of them are {nothing.item()}: memory that nobody has written is full of it "
        "here. So the kernel leaves elements unwritten, or reads fresh memory, or reads beside "
        "its input"
    )


def reversed_dimensions(tensor: Tensor) -> Tensor:
    """Make the first dimension dense in memory, and give the last the largest stride."""
    order = list(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


def every_second(tensor: Tensor) -> Tensor:
    """Give the last dimension a stride of 2."""
    return torch.stack((tensor, junk(tensor, tensor.shape)), -1)[..., 0]


def inside_padding(tensor: Tensor) -> Tensor:
    """Slice a larger tensor in every dimension, so that no two dimensions can be merged."""
    larger = junk(tensor, [size + 3 for size in tensor.shape])
    place = tuple(slice(1, 1 + size) for size in tensor.shape)
    larger[place] = tensor
    return larger[place]


def at_odd_offset(tensor: Tensor) -> Tensor:
    """Align the first element to nothing but its own size."""
    flat = torch.cat((junk(tensor, [3]), tensor.flatten()))
    return flat[3:].view(tensor.shape)


def second_and_third_exchanged(tensor: Tensor) -> Tensor:
    """Store (batch, length, heads, ...), and show it as (batch, heads, length, ...)."""
    if tensor.dim() < 3:
        return tensor
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def expanded(tensor: Tensor) -> Tensor:
    """Repeat the first slice of each dimension but the last, with stride 0."""
    first = tensor[tuple(slice(0, 1) for _ in tensor.shape[:-1])]
    return first.expand(tensor.shape) if tensor.numel() > 0 else tensor


LAYOUTS = (
    reversed_dimensions,
    every_second,
    inside_padding,
    at_odd_offset,
    second_and_third_exchanged,
    expanded,
)
