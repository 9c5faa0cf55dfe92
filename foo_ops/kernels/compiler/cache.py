"""Load the object code of a kernel from disk, or compile it and keep it there."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import logging
import os
import pwd
import re
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy

from foo_ops.kernels.compiler import emit, sources
from foo_ops.kernels.compiler.emit import without_garbage_collection
from foo_ops.kernels.compiler.fingerprint import MOST
from foo_ops.kernels.compiler.kernel import Source
from foo_ops.kernels.compiler.sources import UpgradeError, is_upgraded

# -------------------------------------------------------------------------------------------- files

# A failure here only costs time: the kernel is compiled again. If the folder exceeds
# FOO_CACHE_LIMIT, the least recently used kernels are removed (`_remove_old`).
#
# Code that another user could have written would run with this user's rights. So the folder and its
# files are opened first, and the owner of the open descriptor is checked: somebody who may rename
# folders on the path can exchange them in between, but cannot make one that belongs to this user.


logger = logging.getLogger("foo_ops")

CHECKSUM_SIZE = hashlib.sha256().digest_size
# The suffix of a file until it is complete. A file with it that is an hour old was left behind by a
# process that was killed.
UNFINISHED = ".foo_ops-unfinished"
_SECONDS_TO_FINISH = 3600
# A kernel has 5 to 300 KB.
_LIMIT = "1G"
# Some file systems take names of no more than 143 bytes.
_LONGEST_TITLE = 100


def cache_directory() -> Path | None:
    """Return the folder of compiled kernels: FOO_CACHE_DIR, or foo_ops in the user's cache folder.

    Returns None for a user without a home folder, as in some containers.
    """
    chosen = os.environ.get("FOO_CACHE_DIR")
    if chosen:
        return Path(chosen)
    caches = os.environ.get("XDG_CACHE_HOME")
    home = os.environ.get("HOME") or _registered_home()
    if not caches and not home:
        return None
    return Path(caches or f"{home}/.cache") / "foo_ops"


def _registered_home() -> str | None:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return None


def file_name(title: str, key: str) -> str:
    """Return a kernel's file name. The key distinguishes kernels whose titles are cut off."""
    short = title.encode()[:_LONGEST_TITLE].decode(errors="ignore")
    return f"{short}-{key}.o"


def read(name: str) -> bytes | None:
    """Return the object code in a file, or None if it is missing, damaged or not trusted."""
    path = cache_directory()
    try:
        if path is None:
            return None
        with _opened_folder(path) as folder:
            content = _content(name, folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn_once(f"compiled kernels are not kept, since {path} cannot be used: {error.strerror}")
        return None
    if content is None:
        return None
    checksum, code = content[:CHECKSUM_SIZE], content[CHECKSUM_SIZE:]
    if hashlib.sha256(code).digest() != checksum:
        logger.warning("the cached kernel %s is broken and is compiled again", path / name)
        return None
    return code


def _content(name: str, folder: int) -> bytes | None:
    try:
        # O_NONBLOCK: opening a pipe that somebody put there would block.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn_once(f"the cached kernel {name} is compiled again: {error.strerror}")
        return None
    try:
        status = os.fstat(descriptor)
        # os.fdopen fails for a folder.
        if not stat.S_ISREG(status.st_mode):
            return None
        distrust = _distrust(status)
        if distrust is not None:
            _warn_once(f"the cached kernel {name} is compiled again: {distrust}")
            return None
        _mark_as_used(descriptor, status)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def _mark_as_used(descriptor: int, status: os.stat_result) -> None:
    """Set the time of the last access: most file systems do so once a day, or never."""
    # This fails for another user's file, or on a read-only disk.
    with contextlib.suppress(OSError):
        os.utime(descriptor, ns=(time.time_ns(), status.st_mtime_ns))


def obstacle() -> str | None:
    """Make the folder; return the reason why no kernel can be kept in it, or None."""
    path = cache_directory()
    if path is None:
        return "there is no home folder: set FOO_CACHE_DIR"
    try:
        _make_private(path)
        with _opened_folder(path) as folder:
            _write_into(folder, f"probe{UNFINISHED}", b"")
            os.unlink(f"probe{UNFINISHED}", dir_fd=folder)
    except OSError as error:
        return f"{path} cannot be used: {error.strerror}"
    return None


def write(name: str, code: bytes) -> None:
    """Store object code atomically: another process sees all of it or nothing."""
    path = cache_directory()
    if path is None:
        _warn_once(
            "compiled kernels are not kept, since there is no home folder: set FOO_CACHE_DIR"
        )
        return
    try:
        _make_private(path)
        with _opened_folder(path) as folder:
            _remove_unfinished(folder)
            _write_into(folder, name, hashlib.sha256(code).digest() + code)
            _remove_old(folder, name)
    except IsADirectoryError:
        _warn_once(f"compiled kernels are not kept, since {path / name} is a folder")
    except OSError as error:
        _warn_once(f"compiled kernels are not kept, since {path} cannot be used: {error.strerror}")


def _write_into(folder: int, name: str, content: bytes) -> None:
    unfinished = os.urandom(8).hex() + UNFINISHED
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    descriptor = os.open(unfinished, flags, 0o600, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.unlink(unfinished, dir_fd=folder)
        raise


def _remove_unfinished(folder: int) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(UNFINISHED):
                with contextlib.suppress(OSError):
                    age = time.time() - entry.stat(follow_symlinks=False).st_mtime
                    if age > _SECONDS_TO_FINISH:
                        os.unlink(entry.name, dir_fd=folder)


def _remove_old(folder: int, newest: str) -> None:
    """Remove the least recently used kernels until the others are within the limit."""
    limit = _limit()
    with os.scandir(folder) as entries:
        kernels = [entry for entry in entries if entry.name.endswith(".o")]
    # Another process may have removed a file meanwhile.
    found = []
    for entry in kernels:
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(entry.name, dir_fd=folder, follow_symlinks=False)
            found.append((status.st_atime_ns, entry.name, status.st_size))
    excess = sum(size for _, _, size in found) - limit
    for _, name, size in sorted(found):
        if excess <= 0:
            return
        if name != newest:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
            excess -= size


def _limit() -> int:
    text = os.environ.get("FOO_CACHE_LIMIT") or _LIMIT
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    if match is None:
        _warn_once(
            "FOO_CACHE_LIMIT must be a number of bytes, such as 1000000, 512M or 2G, got "
            f"{text!r}; {_LIMIT} is used"
        )
        return 2**30
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]


def _make_private(path: Path) -> None:
    """Make a folder, and missing folders above it, accessible to this user only."""
    if not path.exists():
        _make_private(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


@contextlib.contextmanager
def _opened_folder(path: Path) -> Iterator[int]:
    """Open a folder that only this user and root may write to; yield its descriptor."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        distrust = _distrust(os.fstat(descriptor))
        if distrust is not None:
            raise PermissionError(0, distrust)
        yield descriptor
    finally:
        os.close(descriptor)


def _distrust(status: os.stat_result) -> str | None:
    """Return the reason if anybody else than this user and root could have written it, or None."""
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "users other than its owner may write to it"
    return None


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


# ------------------------------------------------------------------------------------------ kernels

# A kernel is compiled at its first use for a signature, which is mostly one dtype (see
# foo_ops/csrc/launch/kernel_table.h), and stored as ``<kernel>-<signature>-<hash>.o`` in the folder
# ``cache_directory()``. The hash covers the sources of the kernel and of the modules it imports,
# the versions of NumPy, Numba and LLVM, and the processor with its features and vector width.
# Loading a stored kernel needs llvmlite but not Numba, whose import alone takes 0.3 s.
#
# Numba's own cache cannot be used: a function made inside a factory misses it in the next process.
# The stored object code refers only to libc and libm, so that it has no address of another process.


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
    name = file_name(f"{source.title}-{signature}", key)
    code = read(name)
    if code is None:
        code = emit.compile_kernel(build)
        if is_upgraded() or importlib.metadata.version("numba") != _INSTALLED_NUMBA:
            _warn_of_upgrade()
        else:
            write(name, code)
    return code


def _warn_of_references(source: Source) -> None:
    logger.warning(
        "the kernel %s is compiled by each process, since its functions refer to more than %d "
        "functions, classes and objects",
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
