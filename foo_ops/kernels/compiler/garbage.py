"""Keep Python's garbage collector from work that makes many objects at once."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
# How many threads are at such work, and the thresholds from before the first of them.
_workers = 0
_thresholds = gc.get_threshold()


@contextlib.contextmanager
def without_garbage_collection(*, leaves_garbage: bool = False) -> Iterator[None]:
    """Stop the collector, which takes a fifth of a compiler's time, and 0.1 s beside torch.

    It is stopped by a threshold of 0. `gc.disable` is left to others, who may call it in another
    thread meanwhile.

    Args:
        leaves_garbage: whether most of what is made is garbage in the end, as the compiler's is,
            and is collected at once: 0.5 MB of a kernel, and not 2 MB, stay until the next
            collection of all objects. An import leaves what lives on.
    """
    _begin()
    try:
        yield
    finally:
        _end(leaves_garbage)


def _begin() -> None:
    global _workers, _thresholds
    with _lock:
        _workers += 1
        if _workers == 1:
            _thresholds = gc.get_threshold()
            gc.set_threshold(0, *_thresholds[1:])


def _end(leaves_garbage: bool) -> None:
    global _workers
    with _lock:
        _workers -= 1
        is_last = _workers == 0
        # Not where somebody else has set others meanwhile.
        if is_last and gc.get_threshold()[0] == 0:
            gc.set_threshold(*_thresholds)
        if not leaves_garbage:
            _count_as_old()
    if leaves_garbage and is_last and gc.isenabled():
        # The young ones are those that were made meanwhile.
        gc.collect(0)


def _count_as_old() -> None:
    """Move all objects into the oldest generation, unlooked at.

    Otherwise the next collection, of the youngest, goes through all that was made meanwhile.
    Objects that somebody else has frozen stay so.
    """
    if gc.get_freeze_count() == 0:
        gc.freeze()
        gc.unfreeze()
