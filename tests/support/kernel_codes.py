"""Compiles kernels from edited sources, in forks of a process that has imported none of them.

Reads lines of JSON: an edit, as a path below foo_ops/kernels and its new text, or null; kernels as
pairs of a name and a signature; whether LLVM makes machine code, or Numba its IR alone. Writes a
line for each: key and code hash of each kernel, with the error in place of a failed hash, and the
modules of foo_ops/kernels that were imported for them.
"""

import contextlib
import functools
import hashlib
import json
import os
import sys
from pathlib import Path

import foo_ops.ops  # noqa: F401
from foo_ops import kernels
from foo_ops.kernels.compiler import cache, emit, sources
from foo_ops.kernels.compiler.kernel import KERNELS, Kernel

FOLDER = Path(kernels.__file__).parent


def in_fork(function):
    """Run a function in a fork and return its result."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(writing, "w") as file:
            json.dump(function(), file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        answer = file.read()
    os.waitpid(child, 0)
    return json.loads(answer)


def kernel_modules():
    return {it for it in sys.modules if it.startswith("foo_ops.kernels.")}


def made(kernels, emits):
    """Return keys and codes of kernels, and their modules, as a new process would."""
    if not emits:
        emit._emit = lambda module, vectorizes: str(module).encode()
    sources._AT_IMPORT.update(sources._state())
    before = kernel_modules()
    return [key_and_code(*it) for it in kernels], sorted(kernel_modules() - before)


def key_and_code(name, signature):
    kernel = KERNELS[name]
    key = cache._key(kernel, signature)
    try:
        code = emit.compile_kernel(functools.partial(kernel.build, signature))
    except Exception as error:
        return key, repr(error)
    return key, hashlib.sha256(code).hexdigest()


@contextlib.contextmanager
def edited(edit):
    if edit is None:
        yield
        return
    name, text = edit
    path = FOLDER / name
    before, status = path.read_text(), path.stat()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(before)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def main():
    # A file that is edited twice within a second keeps one date.
    sys.dont_write_bytecode = True
    # Loads Numba and the compiler's own modules, which no edit changes.
    emit.compile_kernel(lambda: Kernel(lambda: None, ()))
    print(json.dumps(sorted(kernel_modules())), flush=True)
    for line in sys.stdin:
        edit, *wanted = json.loads(line)
        with edited(edit):
            answer = in_fork(functools.partial(made, *wanted))
        print(json.dumps(answer), flush=True)


main()
