"""Memory of files that are mapped while a model is loaded."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterable

from torch import Tensor

MAPS = "/proc/self/maps"
PRIVATE_FILE = re.compile(r"^(\w+)-(\w+) ...p \w+ \S+ [1-9]\d* ", re.MULTILINE)
"""A line of `MAPS` for a private mapping of a file, which has an inode."""


def release(tensors: Iterable[Tensor]) -> None:
    """Take tensors that are never read again out of memory, if they lie in a mapped file.

    All tensors of a file share a mapping, which stays in memory as long as any of them is used.
    """
    if not os.path.exists(MAPS):
        return
    with open(MAPS) as file:
        mapped = [(int(a, 16), int(b, 16)) for a, b in PRIVATE_FILE.findall(file.read())]
    page = mmap.PAGESIZE
    for tensor in tensors:
        storage = tensor.untyped_storage()
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        if any(first <= start and end <= last for first, last in mapped):
            first, last = -(-start // page) * page, end // page * page
            if first < last:
                ctypes.CDLL(None).madvise(
                    ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED
                )
