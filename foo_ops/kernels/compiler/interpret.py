"""Run the kernels of users as plain Python, where print and debuggers work (FOO_INTERPRET=1).

A launcher calls such a kernel as it calls a compiled one, through an address: that of a callback.
What the kernel raises cannot pass through C++. It waits, in the thread of the call, until the
launcher asks for it. Light: no Numba, no LLVM.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from foo_ops._switches import switch

# A process does one or the other: launchers keep the addresses of kernels.
INTERPRETS = bool(switch("FOO_INTERPRET"))

_raised = threading.local()
# As long as the process, as callers keep their addresses.
_callbacks: list[Any] = []


def callback(function: Callable[..., None], arguments: int) -> int:
    """Return the address of a C function that calls one of Python, with addresses and numbers."""

    def call(*numbers: int) -> None:
        # Where one range of a kernel has raised, the others are not run.
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
    """Raise what a kernel has raised in this thread, once."""
    error = _error()
    if error is not None:
        _raised.error = None
        raise error


def _error() -> BaseException | None:
    return getattr(_raised, "error", None)
