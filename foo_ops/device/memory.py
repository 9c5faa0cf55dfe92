"""Memory statistics, exact to the byte, and control of freed blocks and pools."""

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from foo_ops._C import device as _C
from foo_ops.device._utils import _get_device_index

# -------------------------------------------------------------------------------- figures and cache

# Memory statistics, exact to the byte, and control of the cache of freed blocks.


def _index(device: Any) -> int:
    index = _get_device_index(device, optional=True)
    _C.check_device_index(index)
    return index


def _nested(figures: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in figures.items():
        *levels, last = name.split(".")
        level = result
        for each in levels:
            level = level.setdefault(each, {})
        level[last] = value
    return result


def memory_stats(device: Any = None) -> "OrderedDict[str, Any]":
    """Return the allocator's figures, under the names of ``torch.cuda.memory_stats``.

    ``allocated_bytes`` counts the bytes that tensors requested, rounded up to 64; ``active_bytes``
    the blocks that hold them; ``reserved_bytes`` the memory that the device has from the system.
    Empty until the device is first used.

    Example:
        >>> tensor = torch.ones(1000, device="foo")
        >>> torch.foo.memory_stats()["allocated_bytes.all.current"] >= tensor.nbytes
        True
    """
    if not _C.is_initialized():
        return OrderedDict()
    return torch.accelerator.memory_stats(_index(device))


def memory_allocated(device: Any = None) -> int:
    """Return the bytes that tensors hold now.

    Example:
        >>> before = torch.foo.memory_allocated()
        >>> tensor = torch.ones(1000, device="foo")
        >>> torch.foo.memory_allocated() - before
        4032
    """
    return memory_stats(device).get("allocated_bytes.all.current", 0)


def max_memory_allocated(device: Any = None) -> int:
    """Return the most bytes that tensors held since the last :func:`reset_peak_memory_stats`.

    Example:
        >>> torch.foo.reset_peak_memory_stats()
        >>> before = torch.foo.memory_allocated()
        >>> total = torch.ones(1000, device="foo").sum().item()
        >>> torch.foo.max_memory_allocated() - before >= 4000
        True
    """
    return memory_stats(device).get("allocated_bytes.all.peak", 0)


def memory_reserved(device: Any = None) -> int:
    """Return the bytes that the device holds now, for tensors and in its cache.

    Example:
        >>> tensor = torch.ones(1000, device="foo")
        >>> torch.foo.memory_reserved() >= torch.foo.memory_allocated()
        True
    """
    return memory_stats(device).get("reserved_bytes.all.current", 0)


def max_memory_reserved(device: Any = None) -> int:
    """Return the most bytes that the device held since :func:`reset_peak_memory_stats`.

    Example:
        >>> torch.foo.max_memory_reserved() >= torch.foo.memory_reserved()
        True
    """
    return memory_stats(device).get("reserved_bytes.all.peak", 0)


def reset_peak_memory_stats(device: Any = None) -> None:
    """Reset the peaks to the present values.

    Example:
        >>> torch.foo.reset_peak_memory_stats()
        >>> torch.foo.max_memory_allocated() == torch.foo.memory_allocated()
        True
    """
    torch.accelerator.reset_peak_memory_stats(_index(device))


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Reset the sums of allocated and freed memory to zero.

    Example:
        >>> torch.foo.reset_accumulated_memory_stats()
        >>> torch.foo.memory_stats()["allocated_bytes.all.allocated"]
        0
    """
    torch.accelerator.reset_accumulated_memory_stats(_index(device))


def empty_cache() -> None:
    """Return all unused memory of all devices to the system.

    Example:
        >>> total = torch.ones(1000, device="foo").sum().item()
        >>> torch.foo.empty_cache()
    """
    torch.accelerator.empty_cache()


def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
    """Return the figures of :func:`memory_stats` as nested dicts, one level per word of a name.

    Example:
        >>> torch.foo.init()
        >>> sorted(torch.foo.memory_stats_as_nested_dict()["active_bytes"]["all"])
        ['allocated', 'current', 'freed', 'peak']
    """
    return _nested(memory_stats(device))


def device_memory_used(device: Any = None) -> int:
    """Return :func:`memory_reserved`, since only this process uses the device.

    Example:
        >>> torch.foo.device_memory_used() >= torch.foo.memory_allocated()
        True
    """
    return memory_reserved(device)


def get_allocator_backend() -> str:
    """Return ``native``, PyTorch's name for a device's own caching allocator.

    Example:
        >>> torch.foo.get_allocator_backend()
        'native'
    """
    return "native"


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return the bytes that the device can still reserve, and its total bytes.

    The devices share the memory of the host unless FOO_MEMORY_LIMIT gives each its own.

    Example:
        >>> free, total = torch.foo.mem_get_info()
        >>> 0 <= free <= total
        True
    """
    return torch.accelerator.get_memory_info(_index(device))


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """Limit the memory that a device may reserve to a fraction, from 0 to 1, of its total.

    Beyond it, after the cache was emptied, ``torch.OutOfMemoryError`` is raised.

    Example:
        >>> torch.foo.set_per_process_memory_fraction(0.5)
        >>> torch.foo.get_per_process_memory_fraction()
        0.5
        >>> torch.foo.set_per_process_memory_fraction(1.0)
    """
    if not isinstance(fraction, float):
        raise TypeError(
            "set_per_process_memory_fraction: fraction must be a float, got "
            f"{type(fraction).__name__}"
        )
    _C.set_memory_fraction(fraction, _index(device))


def get_per_process_memory_fraction(device: Any = None) -> float:
    """Return the fraction of its total memory that a device may reserve.

    Example:
        >>> torch.foo.get_per_process_memory_fraction()
        1.0
    """
    return _C.memory_fraction(_index(device))


def caching_allocator_alloc(size: int, device: Any = None) -> int:
    """Return the address of a block of memory, for code that shares it with the allocator.

    Example:
        >>> address = torch.foo.caching_allocator_alloc(1024)
        >>> torch.foo.caching_allocator_delete(address)
    """
    return _C.allocate(size, _index(device))


def caching_allocator_delete(mem_ptr: int) -> None:
    """Free a block that :func:`caching_allocator_alloc` returned.

    Example:
        >>> before = torch.foo.memory_allocated()
        >>> torch.foo.caching_allocator_delete(torch.foo.caching_allocator_alloc(1024))
        >>> torch.foo.memory_allocated() - before
        0
    """
    _C.deallocate(mem_ptr)


def host_memory_stats() -> "OrderedDict[str, Any]":
    """Return the figures of pinned memory, under the names that ``torch.cuda`` gives them.

    ``allocated_bytes`` counts the blocks, in use or cached, and ``active_bytes`` those in use.
    ``num_host_alloc`` and ``num_host_free`` count calls to the system. Empty until the device is
    first used.

    Example:
        >>> pinned = torch.ones(1000).pin_memory()
        >>> torch.foo.host_memory_stats()["active_bytes.current"] >= pinned.nbytes
        True
    """
    return OrderedDict(_C.pinned_memory_stats() if _C.is_initialized() else {})


def host_memory_stats_as_nested_dict() -> dict[str, Any]:
    """Return :func:`host_memory_stats` as nested dicts, one level per word of a name.

    Example:
        >>> torch.foo.init()
        >>> sorted(torch.foo.host_memory_stats_as_nested_dict()["active_bytes"])
        ['allocated', 'current', 'freed', 'peak']
    """
    return _nested(host_memory_stats())


def reset_peak_host_memory_stats() -> None:
    """Reset the peaks of pinned memory to the present values.

    Example:
        >>> torch.foo.reset_peak_host_memory_stats()
    """
    _C.reset_peak_pinned_memory_stats()


def reset_accumulated_host_memory_stats() -> None:
    """Reset the sums of allocated and freed pinned memory to zero.

    Example:
        >>> torch.foo.reset_accumulated_host_memory_stats()
    """
    _C.reset_accumulated_pinned_memory_stats()


def memory_cached(device: Any = None) -> int:
    """Return :func:`memory_reserved`, under its former name.

    Example:
        >>> torch.foo.memory_cached() == torch.foo.memory_reserved()
        True
    """
    _warn_renamed("memory_cached", "memory_reserved")
    return memory_reserved(device)


def max_memory_cached(device: Any = None) -> int:
    """Return :func:`max_memory_reserved`, under its former name.

    Example:
        >>> torch.foo.max_memory_cached() == torch.foo.max_memory_reserved()
        True
    """
    _warn_renamed("max_memory_cached", "max_memory_reserved")
    return max_memory_reserved(device)


def reset_max_memory_allocated(device: Any = None) -> None:
    """Call :func:`reset_peak_memory_stats`, which resets all peaks.

    Example:
        >>> torch.foo.reset_max_memory_allocated()
    """
    _warn_resets_all("reset_max_memory_allocated")
    reset_peak_memory_stats(device)


def reset_max_memory_cached(device: Any = None) -> None:
    """Call :func:`reset_peak_memory_stats`, which resets all peaks.

    Example:
        >>> torch.foo.reset_max_memory_cached()
    """
    _warn_resets_all("reset_max_memory_cached")
    reset_peak_memory_stats(device)


# The text of torch.cuda's warning.
def _warn_renamed(old: str, new: str) -> None:
    warnings.warn(
        f"`torch.foo.{old}` has been renamed to `torch.foo.{new}`", FutureWarning, stacklevel=3
    )


def _warn_resets_all(name: str) -> None:
    warnings.warn(
        f"torch.foo.{name} now calls torch.foo.reset_peak_memory_stats, which resets /all/ peak "
        "memory stats.",
        FutureWarning,
        stacklevel=3,
    )


def memory_snapshot(mempool_id: tuple[int, int] | None = None) -> list[dict[str, Any]]:
    """List all segments of all devices, with their blocks, as ``torch.cuda.memory_snapshot``.

    Args:
        mempool_id: The pool whose segments are listed; None for all pools.

    Example:
        >>> tensor = torch.ones(1000, device="foo")
        >>> segments = torch.foo.memory_snapshot()
        >>> any(segment["address"] <= tensor.data_ptr() for segment in segments)
        True
    """
    segments = _C.memory_snapshot()
    if mempool_id is None:
        return segments
    return [it for it in segments if it["segment_pool_id"] == tuple(mempool_id)]


def _format_bytes(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    exponent = min((count.bit_length() - 1) // 10, 4)
    unit = ("KiB", "MiB", "GiB", "TiB")[exponent - 1]
    return f"{count / 1024**exponent:,.2f} {unit}"


_SUMMARY_ROWS: tuple[tuple[str, str, Callable[[int], str]], ...] = (
    ("allocated_bytes", "Allocated memory", _format_bytes),
    ("requested_bytes", "Requested memory", _format_bytes),
    ("active_bytes", "Active memory", _format_bytes),
    ("reserved_bytes", "Reserved memory", _format_bytes),
    ("inactive_split_bytes", "Non-releasable memory", _format_bytes),
    ("allocation", "Allocations", str),
    ("segment", "Reserved segments", str),
    ("inactive_split", "Non-releasable blocks", str),
)
_SUMMARY_COLUMNS = {
    "current": "Current",
    "peak": "Peak",
    "allocated": "Total alloc",
    "freed": "Total freed",
}


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """Format :func:`memory_stats` as a table. ``abbreviated`` leaves out the two pools.

    Example:
        >>> print(torch.foo.memory_summary(abbreviated=True))
        Memory of device foo:0
        ...
    """
    index = _index(device)
    _C.initialize()
    stats = memory_stats(index)
    pools = {"all": "", "large_pool": "  large blocks", "small_pool": "  small blocks"}
    if abbreviated:
        pools = {"all": ""}
    lines = [
        f"Memory of device foo:{index}",
        f"out of memory: {stats['num_ooms']}, cache emptied to allocate: "
        f"{stats['num_alloc_retries']}",
        "",
        " | ".join([f"{'':24}"] + [f"{title:>12}" for title in _SUMMARY_COLUMNS.values()]),
    ]
    for key, title, form in _SUMMARY_ROWS:
        for pool, name in pools.items():
            cells = [form(stats[f"{key}.{pool}.{column}"]) for column in _SUMMARY_COLUMNS]
            lines.append(" | ".join([f"{name or title:24}"] + [f"{cell:>12}" for cell in cells]))
    return "\n".join(lines) + "\n"


# -------------------------------------------------------------------------------------------- pools

# Separate memory for some tensors.


class MemPool:
    """A pool of device memory for allocations under :func:`use_mem_pool`.

    Its memory returns to the system when the pool and the last tensor in it are gone, at the latest
    when the cache is emptied after that.

    Args:
        allocator: None: foo has one allocator.
        use_on_oom: Whether other allocations may use the pool's free memory when there is no more.
        no_split: Whether each tensor has a segment of its own.

    Raises:
        NotImplementedError: For an allocator.

    Example:
        >>> pool = torch.foo.MemPool()
        >>> with torch.foo.use_mem_pool(pool):
        ...     tensor = torch.ones(1000, device="foo")
        >>> [segment["allocated_size"] for segment in pool.snapshot()]
        [4032]
    """

    def __init__(
        self, allocator: None = None, use_on_oom: bool = False, no_split: bool = False
    ) -> None:
        if allocator is not None:
            raise NotImplementedError(f"MemPool: {_ONE_ALLOCATOR}")
        self._id = _C.new_pool_id()
        self._options = (use_on_oom, no_split)
        self._device = _get_device_index(None, optional=True)
        _C.add_pool_user(self._device, self._id, *self._options)

    def __del__(self) -> None:
        # The constructor may have raised.
        if hasattr(self, "_device"):
            _C.remove_pool_user(self._device, self._id)

    @property
    def id(self) -> tuple[int, int]:
        """The id of the pool, which graphs accept as well."""
        return self._id

    @property
    def allocator(self) -> None:
        """None: foo has one allocator."""
        return

    def use_count(self) -> int:
        """Return the number of users of the pool: this object, ``with`` blocks, and graphs."""
        return _C.count_pool_users(self._device, self._id)

    def snapshot(self) -> list[dict[str, Any]]:
        """List the segments of the pool, with their blocks."""
        return memory_snapshot(self.id)


_ONE_ALLOCATOR = (
    "device foo does not support other allocators; its memory is host memory, which a program can "
    "allocate itself and share through DLPack"
)


@contextlib.contextmanager
def use_mem_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
    """Make this thread allocate from the pool, inside of ``with``.

    Args:
        pool: The pool.
        device: The device to allocate on; None for the current one.

    Example:
        >>> pool = torch.foo.MemPool()
        >>> with torch.foo.use_mem_pool(pool):
        ...     tensor = torch.ones(1000, device="foo")
        ...     pool.use_count()
        2
    """
    index = _get_device_index(device, optional=True)
    _C.add_pool_user(index, pool.id, *pool._options)
    _C.begin_pool(index, pool.id)
    try:
        yield
    finally:
        _C.end_pool(index, pool.id)
        _C.remove_pool_user(index, pool.id)


def change_current_allocator(allocator: Any) -> None:
    """Raise NotImplementedError: the allocator cannot be replaced.

    Raises:
        NotImplementedError: Always; it says what to do instead.

    Example:
        >>> torch.foo.change_current_allocator(None)
        Traceback (most recent call last):
            ...
        NotImplementedError: change_current_allocator: device foo does not support other ...
    """
    raise NotImplementedError(f"change_current_allocator: {_ONE_ALLOCATOR}")
