"""Count, choose and describe devices."""

import os
import platform
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch

from foo_ops._C import device as _C
from foo_ops.compat import exchange_device as _exchange_device
from foo_ops.compat import maybe_exchange_device as _maybe_exchange_device
from foo_ops.device import memory
from foo_ops.device._utils import _get_device_index


class DeviceProperties(NamedTuple):
    """The result of :func:`get_device_properties`.

    Example:
        >>> properties = torch.foo.get_device_properties("foo:0")
        >>> properties.name.startswith("foo on ")
        True
    """

    name: str
    total_memory: int
    multi_processor_count: int


_DEVICE_COUNT: int = _C.device_count()


def init() -> None:
    """Initialize the device, as its first use does. Raises in a fork of a process that used it.

    Example:
        >>> torch.foo.init()
        >>> torch.foo.is_initialized()
        True
    """
    # Under torch.compile everything goes through operators, which initialize the device.
    if not torch.compiler.is_compiling():
        _C.initialize()


# torch calls this name before it makes the first tensor on the device.
_lazy_init = init


def is_initialized() -> bool:
    """Return whether this process has used the device.

    Example:
        >>> tensor = torch.ones(3, device="foo")
        >>> torch.foo.is_initialized()
        True
    """
    return _C.is_initialized()


def is_available() -> bool:
    """Return whether there is any device.

    Example:
        >>> torch.foo.is_available()
        True
    """
    return device_count() > 0


def _is_in_bad_fork() -> bool:
    """Return whether this process was forked from one that had used the device.

    Such a child cannot use it, as with CUDA: locks and memory of the device may be in any state.
    """
    return _C.is_in_bad_fork()


def device_count() -> int:
    """Return the number of devices: the environment variable FOO_DEVICE_COUNT, or 2.

    Example:
        >>> torch.foo.device_count()
        2
    """
    return _DEVICE_COUNT


def current_device() -> int:
    """Return the index of the current device, which ``device="foo"`` means.

    Example:
        >>> torch.foo.current_device()
        0
    """
    init()
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    """Make a device the current one. A negative index changes nothing.

    Example:
        >>> torch.foo.set_device("foo:1")
        >>> torch.ones(3, device="foo").device
        device(type='foo', index=1)
        >>> torch.foo.set_device(0)
    """
    index = _get_device_index(device)
    if index >= 0:
        _C.set_device(index)


class device:  # noqa: N801 (the name it has in torch.cuda)
    """Make a device the current one inside of ``with``. A negative index changes nothing.

    Example:
        >>> with torch.foo.device(1):
        ...     torch.ones(3, device="foo").device
        device(type='foo', index=1)
    """

    def __init__(self, device: Any) -> None:
        self.idx = _get_device_index(device, optional=True)
        self.prev_idx = -1

    def __enter__(self) -> None:
        if self.idx >= 0:
            self.prev_idx = _exchange_device(self.idx)

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        if self.idx >= 0:
            _maybe_exchange_device(self.prev_idx)
        return False


class device_of(device):  # noqa: N801 (the name it has in torch.cuda)
    """Make the device of a tensor or storage the current one inside of ``with``.

    Tensors and storages that are not on foo change nothing.

    Example:
        >>> tensor = torch.ones(3, device="foo:1")
        >>> with torch.foo.device_of(tensor):
        ...     torch.foo.current_device()
        1
    """

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.get_device() if obj.device.type == "foo" else -1)


def synchronize(device: Any = None) -> None:
    """Check the argument; there is nothing to wait for, as operators finish before they return.

    Example:
        >>> torch.foo.synchronize("foo:1")
    """
    init()
    torch.accelerator.synchronize(_get_device_index(device, optional=True))


def get_device_name(device: Any = None) -> str:
    """Return ``foo on`` and the name of the processor.

    Example:
        >>> torch.foo.get_device_name()
        'foo on ...'
    """
    return get_device_properties(device).name


def get_device_properties(device: Any = None) -> DeviceProperties:
    """Return the name of a device, its memory in bytes, and the number of processors.

    Example:
        >>> import os
        >>> torch.foo.get_device_properties().multi_processor_count == os.cpu_count()
        True
    """
    init()
    _, total_memory = memory.mem_get_info(device)
    return DeviceProperties(
        name=f"foo on {platform.processor() or platform.machine()}",
        total_memory=total_memory,
        multi_processor_count=os.cpu_count() or 1,
    )


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Return major and minor version of the device, those of foo_ops.

    Example:
        >>> major, minor = torch.foo.get_device_capability()
        >>> foo_ops.__version__.startswith(f"{major}.{minor}.")
        True
    """
    init()
    index = _get_device_index(device, optional=True)
    _C.check_device_index(index)
    from foo_ops import __version__

    major, minor, *_ = __version__.split(".")
    return int(major), int(minor)


def can_device_access_peer(device: Any, peer_device: Any) -> bool:
    """Return whether two devices differ: each can read all others' memory, which is the host's.

    Example:
        >>> torch.foo.can_device_access_peer(0, 1)
        True
    """
    init()
    index, peer = _get_device_index(device, optional=True), _get_device_index(peer_device)
    _C.check_device_index(index)
    _C.check_device_index(peer)
    return index != peer


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return True: bfloat16 tensors work on every CPU.

    Example:
        >>> torch.foo.is_bf16_supported()
        True
    """
    return True


def is_tf32_supported() -> bool:
    """Return False: float32 is multiplied as float32.

    Example:
        >>> torch.foo.is_tf32_supported()
        False
    """
    return False


def ipc_collect() -> None:
    """Do nothing: shared memory is released when the last process has freed it.

    Example:
        >>> torch.foo.ipc_collect()
    """
    init()
