"""Find the address of a kernel. The compiler runs in a thread of its own. Light: no Numba, no LLVM.

Python runs the handlers of signals in the main thread, between any two steps of what it does. While
that only waits for another thread, an exception of a handler, such as KeyboardInterrupt, leaves
nothing half done, and the handler itself may need a kernel. The compiler goes on, and the next call
finds what it has made.
"""

from __future__ import annotations

import queue
import sys
import threading
import traceback

from foo_ops._forks import compiler_lock, compiler_locks
from foo_ops.kernels.compiler.interpret import INTERPRETS, callback
from foo_ops.kernels.compiler.kernel import KERNELS, KernelError, Source

_addresses: dict[tuple[str, str], int] = {}


def resolve(kernel: str, signature: str) -> int:
    """Return the address of the C function for ``kernel``, compiled or loaded at the first call.

    Thread-safe, and may be called by handlers of signals. Raises `KernelError` where the kernel
    cannot be compiled.
    """
    address = _addresses.get((kernel, signature))
    if address is not None:
        return address
    if _must_stay_in_this_thread():
        return _find(kernel, signature)
    return _find_in_a_thread(kernel, signature)


def _find_in_a_thread(kernel: str, signature: str) -> int:
    # Unlike other queues and locks, it may be used by a signal's handler while it is in use.
    results: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()

    def find() -> None:
        try:
            results.put((_find(kernel, signature), None))
        except BaseException as error:
            results.put((0, error))

    thread = threading.Thread(target=find, name="foo_ops compiler")
    try:
        thread.start()
    except RuntimeError:
        # There are too many threads, or the interpreter is about to end.
        return _find(kernel, signature)
    address, error = results.get()
    if error is None:
        return address
    try:
        raise error
    finally:
        # Its traceback refers to this frame.
        del error


def _find(kernel: str, signature: str) -> int:
    with compiler_lock:
        address = _addresses.get((kernel, signature))
        if address is None:
            address = _addresses[kernel, signature] = _load(kernel, signature)
        return address


def _load(kernel: str, signature: str) -> int:
    source = KERNELS[kernel]
    try:
        address = _made(source, signature, f"{kernel}-{signature}")
    except MemoryError:
        raise
    except Exception as error:
        raise source.explain(signature, error) or _told_in_full(kernel, signature, error) from error
    source.settle()
    return address


def _made(source: Source, signature: str, name: str) -> int:
    interpreted = source.interpret(signature) if INTERPRETS else None
    if interpreted is not None:
        return callback(interpreted.function, len(interpreted.argument_types))
    from foo_ops.kernels.compiler.load import load

    return load(source, signature, name)


def _told_in_full(kernel: str, signature: str, error: Exception) -> KernelError:
    story = "".join(traceback.format_exception(error))
    return KernelError(
        f"{kernel}: the kernel for {signature} cannot be compiled: {error!r}\n\n{story}"
    )


def _must_stay_in_this_thread() -> bool:
    """Whether another thread would wait for this one, which would wait for it."""
    # Code that runs while a kernel is compiled, as in a user's intrinsic, may need another one.
    return any(lock._is_owned() for lock in compiler_locks()) or _is_importing()


def _is_importing() -> bool:
    """Whether this thread is in the middle of an import: the compiler might import the same."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
    return False
