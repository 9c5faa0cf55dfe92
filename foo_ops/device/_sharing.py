"""Sends tensors of foo through torch.multiprocessing: processes share memory, as on the CPU.

When a storage is first sent, its bytes move into a CPU storage in shared memory, its host storage.
The receiver maps that, and both processes see each other's writes.
"""

import threading
from multiprocessing import reduction
from typing import Any

import torch
from torch.multiprocessing import reductions

from foo_ops._C import device as _C
from foo_ops.device import devices

_Storage = torch.UntypedStorage

# Weak references: to host storages by address, and to storages of foo by address and device index.
_host_storages = reductions.SharedCache()
_foo_storages = reductions.SharedCache()
_lock = threading.Lock()


def register() -> None:
    reduction.register(_Storage, _reduce)


def _reduce(storage: _Storage) -> tuple[Any, ...]:
    if storage.device.type != "foo":
        return reductions.reduce_storage(storage)
    # init() raises in a forked child, which must not wait for a lock held during the fork.
    devices.init()
    with _lock:
        return _rebuild, (_host_storage(storage), storage.device.index)


def _rebuild(host: _Storage, index: int) -> _Storage:
    devices.init()
    with _lock:
        storage = _known(_foo_storages, (host.data_ptr(), index))
        # It may have been resized since, and moved.
        if storage is None or storage.data_ptr() != host.data_ptr():
            storage = _Storage(0, device=f"foo:{index}")
            _place_in(storage, host)
        return storage


def _host_storage(storage: _Storage) -> _Storage:
    host = _known(_host_storages, storage.data_ptr())
    if host is None:
        host = _Storage._new_shared(storage.nbytes()) if storage.nbytes() > 0 else _Storage(0)
        host.copy_(storage)
        _place_in(storage, host)
    return host


def _place_in(storage: _Storage, host: _Storage) -> None:
    _C.place_in(storage, host)
    # Empty storages have no address to find them by.
    if host.nbytes() > 0:
        _host_storages[host.data_ptr()] = reductions.StorageWeakRef(host)
        key = (host.data_ptr(), storage.device.index)
        _foo_storages[key] = reductions.StorageWeakRef(storage)


def _known(storages: reductions.SharedCache, key: Any) -> _Storage | None:
    reference = storages.get(key)
    return None if reference is None else _Storage._new_with_weak_ptr(reference.cdata)
