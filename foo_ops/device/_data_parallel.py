"""Sends tensors to several devices and back, for ``torch.nn.DataParallel``.

torch compiles these functions of ``torch.nn.parallel.comm`` only for CUDA; its CPU build lacks
them. This module puts them into ``torch._C``, where CUDA tensors still go to torch's own.

A program on the CPU may wrap its model in DataParallel, too: without an accelerator torch then
calls the model directly.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch

from foo_ops.device import devices as foo_devices
from foo_ops.device import streams as foo_streams

Tensors = list[torch.Tensor]


def _device(index: int) -> torch.device:
    return torch.device("cpu") if index < 0 else torch.device("foo", index)


def _check_on_foo(tensors: Sequence[torch.Tensor]) -> None:
    for position, tensor in enumerate(tensors):
        if tensor.device.type != "foo":
            raise RuntimeError(
                f"Expected all input tensors to be on foo, but tensor at index {position} has "
                f"device {tensor.device}"
            )


def broadcast(tensor: torch.Tensor, devices: Sequence[int]) -> Tensors:
    """Return the tensor itself for its own device (the first), and copies for the others."""
    if not devices:
        raise RuntimeError("Expected at least one device to broadcast to")
    if tensor.device.type == "foo" and tensor.get_device() != devices[0]:
        raise RuntimeError("device of src tensor must be first in the broadcast list")
    return [tensor.to(_device(index), non_blocking=True) for index in devices]


def broadcast_out(tensor: torch.Tensor, out: Sequence[torch.Tensor]) -> Tensors:
    _check_on_foo(out)
    for position, each in enumerate(out):
        if each.shape != tensor.shape:
            raise RuntimeError(
                "Expected all output tensors to have same shape as the source tensor "
                f"{tuple(tensor.shape)}, but output tensor at index {position} has shape "
                f"{tuple(each.shape)}"
            )
        if each is not tensor:
            each.copy_(tensor, non_blocking=True)
    return list(out)


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Sequence[int], buffer_size: int
) -> list[Tensors]:
    """Copy each tensor by itself: a common buffer would save no launches here."""
    for position, tensor in enumerate(tensors):
        if devices and tensor.device != _device(devices[0]):
            raise RuntimeError(
                f"all tensors must be on devices[0]: foo:{devices[0]}, but tensor at index "
                f"{position} is on {tensor.device}"
            )
    copies = [broadcast(tensor, devices) for tensor in tensors]
    return [[copy[position] for copy in copies] for position in range(len(devices))]


def scatter(
    tensor: torch.Tensor,
    devices: Sequence[int],
    chunk_sizes: Sequence[int] | None,
    dim: int,
    streams: Sequence[torch.Stream | None] | None,
) -> Tensors:
    if not devices:
        raise RuntimeError("Expected at least one device to scatter to")
    if chunk_sizes is None:
        chunks = tensor.chunk(len(devices), dim)
    elif len(chunk_sizes) != len(devices):
        raise RuntimeError(
            "Expected devices and chunk_sizes to be of same length, but got "
            f"len(devices) = {len(devices)} and len(chunk_sizes) = {len(chunk_sizes)}"
        )
    else:
        chunks = tensor.split_with_sizes(list(chunk_sizes), dim)
    copies = []
    for position, chunk in enumerate(chunks):
        stream = streams[position] if streams else None
        with foo_streams.stream(stream):
            copies.append(chunk.to(_device(devices[position]), non_blocking=True))
    return copies


def scatter_out(
    tensor: torch.Tensor,
    out: Sequence[torch.Tensor],
    dim: int,
    streams: Sequence[torch.Stream | None] | None,
) -> Tensors:
    if not out:
        raise RuntimeError("Expected at least one output tensor to scatter to")
    _check_on_foo(out)
    chunks = tensor.split_with_sizes([each.size(dim) for each in out], dim)
    for position, (each, chunk) in enumerate(zip(out, chunks)):
        with foo_streams.stream(streams[position] if streams else None):
            each.copy_(chunk, non_blocking=True)
    return list(out)


def gather(tensors: Sequence[torch.Tensor], dim: int, destination: int | None) -> torch.Tensor:
    if not tensors:
        raise RuntimeError("Expected at least one tensor to gather from")
    _check_on_foo(tensors)
    if destination is None:
        destination = foo_devices.current_device()
    # Copies to the CPU block, since they are read at once.
    device = _device(destination)
    return torch.cat([each.to(device, non_blocking=device.type == "foo") for each in tensors], dim)


def gather_out(tensors: Sequence[torch.Tensor], out: torch.Tensor, dim: int) -> torch.Tensor:
    if not tensors:
        raise RuntimeError("Expected at least one tensor to gather from")
    _check_on_foo(tensors)
    for target, each in zip(out.split_with_sizes([t.size(dim) for t in tensors], dim), tensors):
        target.copy_(each, non_blocking=out.device.type == "foo")
    return out


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_broadcast": broadcast,
    "_broadcast_coalesced": broadcast_coalesced,
    "_broadcast_out": broadcast_out,
    "_gather": gather,
    "_gather_out": gather_out,
    "_scatter": scatter,
    "_scatter_out": scatter_out,
}


_forward = torch.nn.DataParallel.forward


def _is_on_cpu(module: torch.nn.Module) -> bool:
    devices = {tensor.device.type for tensor in chain(module.parameters(), module.buffers())}
    return devices == {"cpu"}


def forward(self: torch.nn.DataParallel, *inputs: Any, **kwargs: Any) -> Any:
    """Call a model on the CPU directly, as without foo; torch would raise an error."""
    if self.device_ids and self.src_device_obj.type == "foo" and _is_on_cpu(self.module):
        return self.module(*inputs, **kwargs)
    return _forward(self, *inputs, **kwargs)


def register() -> None:
    torch.nn.DataParallel.forward = forward  # type: ignore[method-assign]
    for name, function in FUNCTIONS.items():
        setattr(torch._C, name, _beside(function, getattr(torch._C, name, None)))


def _beside(function: Callable[..., Any], of_cuda: Callable[..., Any] | None) -> Callable[..., Any]:
    if of_cuda is None:
        return function

    def call(tensors: Any, *arguments: Any) -> Any:
        first = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
        is_for_foo = foo_devices.is_available() and not (first is not None and first.is_cuda)
        return (function if is_for_foo else of_cuda)(tensors, *arguments)

    return call
