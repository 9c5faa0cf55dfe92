"""Kernels are linked correctly where a process's free memory is scattered."""

import sys

import pytest
from support.processes import run

# Fills every hole above 6 GiB of reserved addresses, except single pages: larger blocks are then
# allocated below.
PROGRAM = """
import ctypes
import torch
import foo_ops

libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
NO_ACCESS, PRIVATE, ANONYMOUS, NO_RESERVE, PAGE = 0, 0x02, 0x20, 0x4000, 4096

def reserve(size):
    return libc.mmap(None, size, NO_ACCESS, PRIVATE | ANONYMOUS | NO_RESERVE, -1, 0)

hidden, target = torch.randn(7, 33, dtype=torch.float64), torch.arange(7)
expected = torch.nn.functional.cross_entropy(hidden, target, reduction="none")
wall = reserve(6 << 30)
above = []
while (page := reserve(PAGE)) > wall:
    above.append(page)
assert len(above) > 100
for page in above[len(above) // 2 :: 4][:20]:
    libc.munmap(page, PAGE)
found = torch.ops.foo.softmax_cross_entropy(hidden.float(), target)[0]
torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="this is how Linux places memory")
def test_constants_lie_beside_their_code(tmp_path):
    run(PROGRAM, tmp_path)
