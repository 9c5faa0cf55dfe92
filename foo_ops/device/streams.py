"""Streams and events. Every operator is done when it returns, whatever stream is current."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from foo_ops._C import device as _C
from foo_ops.device._utils import _get_device_index

# torch's own classes serve the accelerator of the process, which is foo.
Stream = torch.Stream
Event = torch.Event

_FOO = int(torch._C._autograd.DeviceType.PrivateUse1.value)


def _stream_by_id(stream_id: int, index: int) -> torch.Stream:
    _C.check_device_index(index)
    return torch.Stream(stream_id=stream_id, device_index=index, device_type=_FOO)


def default_stream(device: Any = None) -> torch.Stream:
    return _stream_by_id(0, _get_device_index(device, optional=True))


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_get_device_index(device, optional=True))


def set_stream(stream: torch.Stream | None) -> None:
    """Make a stream the current one, and its device too. None changes nothing."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    """Context manager that makes a stream, and its device, the current one."""
    return nullcontext() if stream is None else stream
