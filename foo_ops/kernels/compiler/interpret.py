"""Run users' kernels as Python, where print and debuggers work (FOO_INTERPRET=1).

A launcher calls such a kernel through an address, like a compiled one: the address of a callback. A
Python exception cannot pass through C++: it is kept, for the thread of the call, until the launcher
calls `reraise`. Imports neither Numba nor LLVM.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from foo_ops._process import switch

# Fixed for a process, since launchers keep the addresses of kernels.
INTERPRETS = bool(switch("FOO_INTERPRET"))

_raised = threading.local()
# Kept for the life of the process, as callers keep their addresses.
_callbacks: list[Any] = []


def callback(function: Callable[..., None], arguments: int) -> int:
    """Return the address of a C function that calls a Python function with 64-bit arguments."""

    def call(*numbers: int) -> None:
        # After one range of a kernel has raised, the others are not run.
        if _error() is None:
            try:
                function(*numbers)
            except BaseException as error:
                _raised.error = error

    made = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * arguments)(call)
    _callbacks.append(made)
    address = ctypes.cast(made, ctypes.c_void_p).value
    assert address is not None
    return address


def reraise() -> None:
    """Raise the exception that a kernel has raised in this thread, once."""
    error = _error()
    if error is not None:
        _raised.error = None
        raise error


def _error() -> BaseException | None:
    return getattr(_raised, "error", None)
