"""Find the address of a kernel. The compiler runs in a separate thread.

Python runs signal handlers in the main thread, between any two of its steps. While the main thread
only waits for the compiler's, an exception of a handler, such as KeyboardInterrupt, leaves nothing
half done, and the handler itself may use a kernel. The compiler goes on, and the next call finds
its result. Imports neither Numba nor LLVM.
"""

from __future__ import annotations

import queue
import sys
import threading
import traceback

from foo_ops._process import compiler_lock, compiler_locks
from foo_ops.kernels.compiler.interpret import INTERPRETS, callback
from foo_ops.kernels.compiler.kernel import KERNELS, KernelError, Source

_addresses: dict[tuple[str, str], int] = {}


def resolve(kernel: str, signature: str) -> int:
    """Return the address of the C function for ``kernel``, compiled or loaded at the first call.

    Thread-safe, and may be called by signal handlers. Raises `KernelError` if the kernel cannot be
    compiled.
    """
    address = _addresses.get((kernel, signature))
    if address is not None:
        return address
    if _must_stay_in_this_thread():
        return _find(kernel, signature)
    return _find_in_a_thread(kernel, signature)


def _find_in_a_thread(kernel: str, signature: str) -> int:
    # A SimpleQueue is reentrant: a signal handler may use it while it is in use.
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
        # There are too many threads, or the interpreter is shutting down.
        return _find(kernel, signature)
    address, error = results.get()
    if error is None:
        return address
    try:
        raise error
    finally:
        # The error's traceback refers to this frame: break the cycle.
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
    from foo_ops.kernels.compiler.cache import load

    return load(source, signature, name)


def _told_in_full(kernel: str, signature: str, error: Exception) -> KernelError:
    story = "".join(traceback.format_exception(error))
    return KernelError(
        f"{kernel}: the kernel for {signature} cannot be compiled: {error!r}\n\n{story}"
    )


def _must_stay_in_this_thread() -> bool:
    """Whether compiling in another thread would deadlock with this one."""
    # Code that runs during compilation, as in a user's intrinsic, may need another kernel.
    return any(lock._is_owned() for lock in compiler_locks()) or _is_importing()


def _is_importing() -> bool:
    """Whether this thread is importing a module, which the compiler might need too.

    Only the frames of the import system on its stack tell: Python has no function that says
    which thread imports. The walk is made once for each kernel.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
    return False
