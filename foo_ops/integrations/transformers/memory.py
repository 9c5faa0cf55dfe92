"""Memory of files that are mapped while a model is loaded."""

from __future__ import annotations

import ctypes
import mmap
import os
import re

from torch import Tensor

from foo_ops._C import release_result_memory

LIBRARY = ctypes.CDLL(None)
"""The C library. Python makes classes for each object of this kind."""
PAGE_OUT = 21
"""Linux's MADV_PAGEOUT, which Python does not name; earlier kernels than 5.4 ignore it."""
MAPS = "/proc/self/maps"
PRIVATE_FILE = re.compile(r"^(\w+)-(\w+) ...p \w+ \S+ [1-9]\d* ", re.MULTILINE)
"""A line of `MAPS` for a private mapping of a file, which has an inode."""


class Mappings:
    """The files that are mapped into this process when it is made."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        if os.path.exists(MAPS):
            with open(MAPS) as file:
                found = PRIVATE_FILE.findall(file.read())
            self.ranges = [(int(start, 16), int(end, 16)) for start, end in found]

    def release(self, tensor: Tensor, is_read_again: bool = False) -> None:
        """Take a dense tensor out of memory, if it lies in a file.

        All tensors of a file share a mapping, which stays in memory as long as any of them is used.

        Args:
            is_read_again: whether someone may have written to the tensor and read it again. Then
                the system's own cache of the file is dropped, too.
        """
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        # The first and the last page may have parts of other tensors.
        page = mmap.PAGESIZE
        first, last = -(-start // page) * page, end // page * page
        if first < last and any(low <= start and end <= high for low, high in self.ranges):
            advice = PAGE_OUT if is_read_again else mmap.MADV_DONTNEED
            LIBRARY.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)


def trim() -> None:
    """Give free memory back to the system: that of results, and what glibc keeps between blocks."""
    release_result_memory()
    if hasattr(LIBRARY, "malloc_trim"):
        LIBRARY.malloc_trim(0)
