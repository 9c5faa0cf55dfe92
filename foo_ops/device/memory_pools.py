"""Give some tensors memory that no others get."""

import contextlib
from collections.abc import Iterator
from typing import Any

from foo_ops._C import device as _C
from foo_ops.device._utils import _get_device_index
from foo_ops.device.memory import memory_snapshot


class MemPool:
    """A pool of device memory, whose segments hold what is allocated under :func:`use_mem_pool`.

    Its memory goes back to the system when the pool and the last tensor in it are gone, at the
    latest when the cache is emptied after that.

    Args:
        allocator: None: foo has one allocator.
        use_on_oom: Whether the pool's free memory serves others when there is no more.
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
        # It was not made.
        if hasattr(self, "_device"):
            _C.remove_pool_user(self._device, self._id)

    @property
    def id(self) -> tuple[int, int]:
        """The name of the pool, which graphs take as well."""
        return self._id

    @property
    def allocator(self) -> None:
        """None: foo has one allocator."""
        return

    def use_count(self) -> int:
        """Return how often the pool is used: by this object, by ``with``, and by graphs."""
        return _C.count_pool_users(self._device, self._id)

    def snapshot(self) -> list[dict[str, Any]]:
        """List the segments of the pool, with their blocks."""
        return memory_snapshot(self.id)


_ONE_ALLOCATOR = (
    "foo has one allocator, and takes no other: its memory is that of the host, which a program "
    "can allocate itself and share through DLPack"
)


@contextlib.contextmanager
def use_mem_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
    """Let this thread allocate from the pool, inside of ``with``.

    Args:
        pool: The pool.
        device: The device whose allocations these are; None for the current one.

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
    """Refuse another allocator.

    Raises:
        NotImplementedError: Always, saying what to do.

    Example:
        >>> torch.foo.change_current_allocator(None)
        Traceback (most recent call last):
            ...
        NotImplementedError: change_current_allocator: foo has one allocator, and takes no...
    """
    raise NotImplementedError(f"change_current_allocator: {_ONE_ALLOCATOR}")
