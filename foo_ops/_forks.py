"""Make a fork wait until the compiler of kernels is idle.

Otherwise a child would find the compiler in the middle of its work, with locks that nobody
releases, since the thread that holds them is not in the child. This holds from the start of torch:
other code may compile with Numba before any kernel is needed here.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

# Held while the compiler works, and during a fork.
compiler_lock: Any = threading.RLock()
_held: list[Any] = []


def compiler_locks() -> list[Any]:
    """Return the locks of the compiler, in the order in which it takes them."""
    numba = getattr(sys.modules.get("numba.core.compiler_lock"), "global_compiler_lock", None)
    return [compiler_lock] if numba is None else [compiler_lock, numba._lock]


def _before_fork() -> None:
    for lock in compiler_locks():
        lock.acquire()
        _held.append(lock)


def _after_fork() -> None:
    """Release the locks in the parent, and in the child, whose thread is the one that took them."""
    while _held:
        _held.pop().release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
