"""Attention reads only memory of its tensors, and needs little memory."""

import signal

import pytest
from support.parts import whole
from support.processes import python

# Tensors end right before a protected page, or begin right after one: the first read outside ends
# the process with a segmentation fault. Arguments: the name of a dtype.
FENCED = """
import ctypes
import mmap
import sys
import torch
from foo_ops import testing
from foo_ops.testing import ATTENTION, ATTENTION_VARLEN, LAYOUTS

PAGE = mmap.PAGESIZE
PROT_NONE = 0
protect = ctypes.CDLL(None, use_errno=True).mprotect


def fence(memory, offset):
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + offset
    assert protect(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), PROT_NONE) == 0


def fenced(tensor, at_end):
    if tensor.numel() == 0:
        return tensor
    steps = zip(tensor.shape, tensor.stride())
    count = 1 + sum((size - 1) * stride for size, stride in steps)
    size = count * tensor.element_size()
    room = -(-size // PAGE) * PAGE
    memory = mmap.mmap(-1, room + 2 * PAGE)
    offset = PAGE + (room - size if at_end else 0)
    elements = torch.frombuffer(memory, dtype=tensor.dtype, count=count, offset=offset)
    elements.copy_(tensor.as_strided((count,), (1,)))
    fence(memory, 0)
    fence(memory, PAGE + room)
    return elements.as_strided(tensor.shape, tensor.stride())


def run(spec, sample, at_end):
    sample = sample.map(lambda tensor: fenced(tensor, at_end)).requiring_grad()
    outputs = sample.call(spec.operator)
    cotangents = tuple(fenced(tensor, at_end) for tensor in testing.cotangents_for(outputs))
    torch.autograd.grad(outputs, sample.differentiable(), cotangents)


if sys.argv[1:] == ["cross the fence"]:
    tensor = fenced(torch.ones(1000), True)
    ctypes.string_at(tensor.data_ptr(), tensor.nbytes + 1)
torch.set_num_threads(1)
dtype = getattr(torch, sys.argv[1])
for spec in (ATTENTION, ATTENTION_VARLEN):
    for name, make in spec.samples.items():
        sample = make(dtype)
        run(spec, sample, True)
        if name in spec.in_layouts:
            run(spec, sample, False)
            for layout in LAYOUTS:
                run(spec, sample.map(layout), True)
                run(spec, sample.map(layout), False)
print("inside")
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", *whole("float64", "float16")])
def test_nothing_outside_of_the_tensors_is_read(dtype):
    process = python(FENCED, dtype)
    assert (process.returncode, process.stdout.strip()) == (0, "inside"), process.stderr


def test_a_read_outside_would_be_noticed():
    assert python(FENCED, "cross the fence").returncode == -signal.SIGSEGV


MEMORY = """
import resource
import torch

def step(length):
    query, key, value = (torch.randn(1, 1, length, 16).requires_grad_() for _ in range(3))
    output, logsumexp = torch.ops.foo.attention(query, key, value, is_causal=True)
    (output.sum() + logsumexp.sum()).backward()
    assert all(tensor.grad.isfinite().all() for tensor in (query, key, value))

step(100)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step(32768)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_grows_with_the_length():
    """Forward and backward run at length 32768, where a matrix of scores needs 4 GiB.

    Query, key, value, the output and all gradients have 2 MiB each: 14 MiB.
    """
    process = python(MEMORY)
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) < 64 * 1024


KEPT_MEMORY = """
import os
import torch

def resident():
    with open("/proc/self/statm") as status:
        return int(status.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def step(length):
    query, key, value = torch.randn(3, 1, 1, length, 256).unbind()
    query.requires_grad_()
    output = torch.ops.foo.attention(query, key, value, window_left=0, window_right=0)[0]
    torch.autograd.grad(output, query, torch.ones_like(output))

step(2000)
before = resident()
step(10_000)
print(resident() - before)
"""


def test_memory_that_is_kept():
    """The backward pass keeps its 33 MB of sums for 2000 keys, but not its 164 MB for 10000."""
    process = python(KEPT_MEMORY)
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) < 2**26


BIAS_MEMORY = """
import resource
import sys
import torch

def step(length):
    tensors = torch.randn(3, 1, 1, length, 16).to(sys.argv[1]).unbind()
    query, key, value = (tensor.clone().requires_grad_() for tensor in tensors)
    bias = torch.zeros(1, 1, 1, length, device=sys.argv[1], requires_grad=True)
    output, logsumexp = torch.ops.foo.attention(query, key, value, bias)
    (output.sum() + logsumexp.sum()).backward()
    assert bias.grad.isfinite().all()

# Compiles all kernels: the keys of few queries are split from 1025 keys on.
step(1100)
with open("/proc/self/status") as status:
    (used,) = (int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (used + 2**25, -1))
step(4096)
try:
    torch.empty(4096, 4096, device=sys.argv[1]).zero_()
except RuntimeError:
    print("the limit holds")
"""


def test_memory_of_the_gradient_of_a_bias(device):
    """4096 queries and keys fit in 32 MiB, where the scores alone would need 64 MiB."""
    process = python(BIAS_MEMORY, device)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == "the limit holds"


PAGED_MEMORY = """
import resource
import sys
import torch

def step(columns):
    query = torch.randn(9, 2, 16).to(sys.argv[1]).requires_grad_()
    cache = torch.randn(6, 16, 2, 16).to(sys.argv[1]).requires_grad_()
    starts_q, starts_k, used = (
        torch.tensor(list_, dtype=torch.int32, device=sys.argv[1])
        for list_ in ([0, 4, 9], [0, 40, 80], [40, 33])
    )
    table = torch.zeros(2, columns, dtype=torch.int32, device=sys.argv[1])
    table[:, :3] = torch.tensor([[0, 1, 2], [3, 4, 5]])
    output, _ = torch.ops.foo.attention_varlen(
        query, cache, cache, starts_q, starts_k, used, table, max_seqlen_q=5, max_seqlen_k=40
    )
    output.sum().backward()
    assert cache.grad.isfinite().all()

step(3)
with open("/proc/self/status") as status:
    (used,) = (int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (used + 2**25, -1))
step(2**18)
try:
    torch.empty(2**25, device=sys.argv[1]).zero_()
except RuntimeError:
    print("the limit holds")
"""


def test_memory_of_blocks_that_are_not_in_use(device):
    """A table with room for 4 million keys per sequence, 512 MiB of them, works in 32 MiB."""
    process = python(PAGED_MEMORY, device)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == "the limit holds"
