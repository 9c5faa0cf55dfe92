"""Load the object code of a kernel from disk, or compile it and keep it there.

A kernel is compiled at its first use for a signature, which is mostly one dtype (see
foo_ops/csrc/launch/kernel_table.h), and stored as ``<kernel>-<signature>-<hash>.o`` in the folder
``cache_directory()``. The hash covers the sources of the kernel and of the modules it imports, the
versions of NumPy, Numba and LLVM, and the processor with its features and vector width. Loading a
stored kernel needs llvmlite but not Numba, whose import alone takes 0.3 s.

Numba's own cache cannot be used: a function made inside a factory misses it in the next process.
The stored object code refers only to libc and libm, so that it has no address of another process.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import logging
import sys
from typing import Any

import numpy

from foo_ops.kernels.compiler import cache, emit, sources
from foo_ops.kernels.compiler.emit import without_garbage_collection
from foo_ops.kernels.compiler.fingerprint import MOST
from foo_ops.kernels.compiler.kernel import Source
from foo_ops.kernels.compiler.sources import UpgradeError, is_upgraded

with without_garbage_collection():
    import llvmlite
    import llvmlite.binding as llvm

    from foo_ops.kernels.compiler.processor import (
        has_matrix_unit,
        target,
        use_matrix_unit,
        use_pairs,
        vector_bits,
    )

logger = logging.getLogger("foo_ops")

_INSTALLED_NUMBA = importlib.metadata.version("numba")
# The versions that this process runs; those on disk may have changed. NumPy computes constants.
_NUMBA = getattr(sys.modules.get("numba"), "__version__", _INSTALLED_NUMBA)
_NUMPY = numpy.__version__
# The engine and its libraries keep the code alive: for ever, as callers keep addresses.
_libraries: list[Any] = []


def load(source: Source, signature: str, name: str) -> int:
    """Return the address of a kernel's C function, compiled if it is not on disk."""
    return link(_object_code(source, signature), name)


def _object_code(source: Source, signature: str) -> bytes:
    build = functools.partial(source.build, signature)
    try:
        key = _key(source, signature)
    except UpgradeError:
        _warn_of_upgrade()
        return emit.compile_kernel(build)
    if key is None:
        _warn_of_references(source)
        return emit.compile_kernel(build)
    name = cache.file_name(f"{source.title}-{signature}", key)
    code = cache.read(name)
    if code is None:
        code = emit.compile_kernel(build)
        if is_upgraded() or importlib.metadata.version("numba") != _INSTALLED_NUMBA:
            _warn_of_upgrade()
        else:
            cache.write(name, code)
    return code


def _warn_of_references(source: Source) -> None:
    logger.warning(
        "the kernel %s is compiled by each process, since its functions refer to more than %d "
        "others, classes and objects",
        *(source.title, MOST),
    )


@functools.cache
def _warn_of_upgrade() -> None:
    logger.warning(
        "compiled kernels are not kept, since foo_ops or Numba has changed on disk while this "
        "process was running"
    )


def _key(source: Source, signature: str) -> str | None:
    """Hash everything that the object code depends on; None if that is too much to visit."""
    fingerprint = source.fingerprint(signature)
    if fingerprint.content is None:
        return None
    parts = [
        signature,
        sys.version,
        _NUMBA,
        _NUMPY,
        llvmlite.__version__,
        repr(llvm.llvm_version_info),
        *target(),
        str(vector_bits()),
        str(use_pairs()),
        str(use_matrix_unit()),
        # This call also requests the unit from Linux, for a stored kernel that uses it.
        str(has_matrix_unit()),
    ]
    digest = hashlib.sha256("\n".join(parts).encode())
    digest.update(fingerprint.content)
    digest.update(sources.digest(fingerprint.modules))
    return digest.hexdigest()[:16]


def link(code: bytes, name: str) -> int:
    """Link object code into this process for ever; return the address of its function."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    if not _libraries:
        # The other linker maps the sections of an object one by one: in a process with much memory,
        # they may be further apart than an instruction reaches.
        _libraries.append(llvm.create_lljit_compiler(use_jit_link=True))
    builder = llvm.JITLibraryBuilder().add_object_img(code).add_current_process()
    library = builder.export_symbol(emit.ENTRY).link(_libraries[0], name)
    _libraries.append(library)
    return library[emit.ENTRY]
