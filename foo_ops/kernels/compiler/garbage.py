"""Keep Python's garbage collector from work that makes many objects which live on."""

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
def without_garbage_collection() -> Iterator[None]:
    """Stop the collector, which takes a fifth of a compiler's time, and 0.1 s beside torch.

    It is stopped by a threshold of 0. `gc.disable` is left to others, who may call it in another
    thread meanwhile.
    """
    _begin()
    try:
        yield
    finally:
        _end()


def _begin() -> None:
    global _workers, _thresholds
    with _lock:
        _workers += 1
        if _workers == 1:
            _thresholds = gc.get_threshold()
            gc.set_threshold(0, *_thresholds[1:])


def _end() -> None:
    global _workers
    with _lock:
        _workers -= 1
        # Not where somebody else has set others meanwhile.
        if _workers == 0 and gc.get_threshold()[0] == 0:
            _count_as_old()
            gc.set_threshold(*_thresholds)


def _count_as_old() -> None:
    """Move all objects into the oldest generation, unlooked at.

    Otherwise the next collection, of the youngest, goes through all that was made meanwhile.
    Objects that somebody else has frozen stay so.
    """
    if gc.get_freeze_count() == 0:
        gc.freeze()
        gc.unfreeze()
