"""Work that makes many objects which live on."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """To look through all objects is a fifth of the time of a compiler, and 0.1 s beside torch."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            _count_as_old()
            gc.enable()


def _count_as_old() -> None:
    """Move all objects into the oldest generation, unlooked at.

    Else the next collection, of the youngest, goes through all that was made meanwhile. Objects
    that somebody else has frozen stay so.
    """
    if gc.get_freeze_count() == 0:
        gc.freeze()
        gc.unfreeze()
