"""Streams and events. Operators finish before they return, whatever the stream."""

from types import TracebackType
from typing import Any

import torch

from foo_ops._C import device as _C
from foo_ops._C import sanitizer as _sanitizer
from foo_ops.compat import DeviceType
from foo_ops.device._utils import _get_device_index
from foo_ops.device.devices import init

# ------------------------------------------------------------------------------- streams and events


# torch's own classes use the accelerator of the process, which is foo.
Stream = torch.Stream
Event = torch.Event

_FOO = int(DeviceType.PrivateUse1.value)


def _stream_by_id(stream_id: int, index: int) -> torch.Stream:
    _C.check_device_index(index)
    return torch.Stream(stream_id=stream_id, device_index=index, device_type=_FOO)


def default_stream(device: Any = None) -> torch.Stream:
    """Return a device's default stream, current until :func:`set_stream` chooses another.

    Example:
        >>> torch.foo.default_stream().stream_id
        0
    """
    init()
    return _stream_by_id(0, _get_device_index(device, optional=True))


def current_stream(device: Any = None) -> torch.Stream:
    """Return the current stream of a device.

    Example:
        >>> torch.foo.current_stream() == torch.foo.default_stream()
        True
    """
    return torch.accelerator.current_stream(_get_device_index(device, optional=True))


def set_stream(stream: torch.Stream | None) -> None:
    """Make a stream the current one, and its device too. None changes nothing.

    Example:
        >>> torch.foo.set_stream(torch.foo.Stream())
        >>> torch.foo.current_stream() == torch.foo.default_stream()
        False
        >>> torch.foo.set_stream(torch.foo.default_stream())
    """
    if stream is not None:
        torch.accelerator.set_stream(stream)


class StreamContext:
    """Makes a stream, and its device, the current one inside of ``with``.

    None changes nothing.

    Example:
        >>> stream = torch.foo.Stream()
        >>> with torch.foo.StreamContext(stream):
        ...     torch.foo.current_stream() == stream
        True
    """

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream
        # The current streams at each entry: of this stream's device, and of the current device.
        self._previous: list[tuple[torch.Stream, torch.Stream]] = []

    def __enter__(self) -> None:
        if self.stream is not None:
            self._previous.append((current_stream(self.stream.device), current_stream()))
            set_stream(self.stream)

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.stream is not None:
            for stream in self._previous.pop():
                set_stream(stream)


def stream(stream: torch.Stream | None) -> StreamContext:
    """Return the :class:`StreamContext` of a stream.

    Example:
        >>> with torch.foo.stream(torch.foo.Stream()):
        ...     total = torch.ones(3, device="foo").sum()
        >>> total.item()
        3.0
    """
    return StreamContext(stream)


# ---------------------------------------------------------------------------------- synchronization


_MODES = ("default", "warn", "error")


def set_sync_debug_mode(debug_mode: int | str) -> None:
    """Ignore, warn about or raise for operators that make the host wait for the device.

    These are ``item()``, ``bool(tensor)`` and the like, blocking copies between host and device,
    and operators whose results' sizes depend on values, such as ``nonzero``. ``synchronize()`` does
    not count. The message names the operator.

    Args:
        debug_mode: "default" or 0 does nothing, "warn" or 1 warns, "error" or 2 raises RuntimeError
            before the operator runs.

    Raises:
        ValueError: For any other mode.

    Example:
        >>> torch.foo.set_sync_debug_mode("error")
        >>> torch.ones((), device="foo").item()
        Traceback (most recent call last):
            ...
        RuntimeError: aten::item: called a synchronizing operation: the host waits for the device
        >>> torch.foo.set_sync_debug_mode("default")
    """
    mode = _MODES.index(debug_mode) if debug_mode in _MODES else debug_mode
    if mode not in range(len(_MODES)):
        raise ValueError(
            'set_sync_debug_mode: debug_mode must be "default", "warn", "error", 0, 1 or 2, '
            f"got {debug_mode!r}"
        )
    _sanitizer.set_sync_debug_mode(mode)


def get_sync_debug_mode() -> int:
    """Return 0 for "default", 1 for "warn", 2 for "error".

    Example:
        >>> torch.foo.get_sync_debug_mode()
        0
    """
    return _sanitizer.get_sync_debug_mode()
