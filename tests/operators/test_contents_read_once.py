"""Integer tensors are read once: another thread may rewrite them after the checks."""

import threading
import time

import pytest
import torch
from support.parts import whole
from support.processes import python

from foo_ops import library

DEVICES = ("cpu", "foo")


def picked_when_told(input, index, progress, flag, output, tiles):
    """Wait until another thread has rewritten the index, some ten seconds at most."""
    for _ in tiles:
        count = 0
        while flag[0] == 0 and count < 2**33:
            count += 1
            # The write forces LLVM to read the flag again.
            progress[0] = count
        for i in range(index.size):
            output[i] = input[index[i]]


def are_inside(index, input):
    is_inside = True
    for i in range(index.size):
        is_inside &= 0 <= index[i] < input.size
    return is_inside


def refuse(input, index):
    raise IndexError(f"pick: index must be in [0, {input.size(0)}), got {index.tolist()}")


@pytest.fixture(scope="module", autouse=True)
def lib():
    lib = library.Library("foo_once", "FRAGMENT")
    kernel = library.tile_kernel(picked_when_told, tiles=lambda: 1, check=are_inside, refuse=refuse)
    for name, index in (("pick", "Tensor index"), ("pick_", "Tensor(b!) index")):
        lib.define(f"{name}(Tensor input, {index}, Tensor(a!) progress, Tensor flag) -> Tensor")
        library.register_fake(
            f"foo_once::{name}",
            lambda input, index, progress, flag: input.new_empty(index.shape),
            lib=lib,
        )
        library.register_kernel(f"foo_once::{name}", DEVICES, kernel, lib=lib)
    return lib


@pytest.mark.parametrize("name", ["pick", "pick_"])
@pytest.mark.parametrize("step", [1, 2])
def test_a_tile_kernel_uses_the_numbers_that_it_checked(name, step, device):
    input = torch.arange(5.0, device=device)
    index = torch.tensor([4, 0, 1, 0, 2, 0], device=device)[::step]
    expected = index.tolist()
    progress, flag = torch.zeros(2, 1, dtype=torch.int64, device=device)

    def rewrite():
        while progress[0].item() == 0:
            time.sleep(0.001)
        index.fill_(3)
        flag.fill_(1)

    operator = getattr(torch.ops.foo_once, name)
    # Compiles the kernel.
    operator(input, index, torch.zeros_like(progress), torch.ones_like(flag))
    thread = threading.Thread(target=rewrite)
    thread.start()
    output = operator(input, index, progress, flag)
    thread.join()
    assert progress[0] > 0
    assert output.tolist() == expected


def test_refuse_gets_the_numbers_that_were_checked(device):
    input, index = torch.arange(5.0, device=device), torch.tensor([4, 7], device=device)
    progress, flag = torch.ones(2, 1, dtype=torch.int64, device=device)
    for strided in (index, index.repeat_interleave(2)[::2]):
        with pytest.raises(IndexError, match=r"\Apick: index must be in \[0, 5\), got \[4, 7\]\Z"):
            torch.ops.foo_once.pick(input, strided, progress, flag)


# Another thread rewrites a tensor that the operator checks, without a new version for autograd.
PROGRAM = """
import ctypes, sys, threading, time
import numpy, torch, foo_ops

device = sys.argv[1]
torch.set_num_threads(2)

def numbers(values):
    '''A tensor, and an array over its memory.'''
    tensor = values.int().to(device)
    number = ctypes.c_int32 * tensor.numel()
    return tensor, numpy.frombuffer(number.from_address(tensor.data_ptr()), dtype=numpy.int32)

batch, blocks, page, pages = 8, 64, 16, 64
key, value = torch.randn(2, blocks, page, 2, 64, device=device)
query = torch.randn(batch, 4, 64, device=device, requires_grad=True)
starts = torch.arange(batch + 1)
table, table_memory = numbers(torch.randint(0, blocks, (batch, pages)))
queries, query_memory = numbers(starts)
keys, key_memory = numbers(starts * page * pages)
used, used_memory = numbers(torch.full((batch,), page * pages))
memory = [(array, array.copy()) for array in (table_memory, query_memory, key_memory, used_memory)]
is_over = False

def rewrite():
    while not is_over:
        for array, values in memory:
            array[:] = 2**30
            time.sleep(0.0002)
            array[:] = values
            time.sleep(0.0005)

thread = threading.Thread(target=rewrite)
thread.start()
done, refused, end = 0, 0, time.time() + 4
while time.time() < end:
    try:
        output, _ = torch.ops.foo.attention_varlen(
            query, key, value, queries, keys, used, table, max_seqlen_q=1, max_seqlen_k=page * pages
        )
        output.sum().backward()
        done += 1
    except ValueError as error:
        assert str(error).startswith("attention_varlen: "), error
        refused += 1
is_over = True
thread.join()
assert done > 0 and refused > 0, (done, refused)
"""


# Here it rewrites the lists of blocks, which are read before any work, and again for gradients.
BLOCKS_PROGRAM = """
import ctypes, sys, threading, time
import numpy, torch, foo_ops

device = sys.argv[1]
torch.set_num_threads(2)
rows, columns = 64, 64
counts = torch.full((1, 1, rows), columns, dtype=torch.int32, device=device)
indices = torch.arange(columns, dtype=torch.int32, device=device).repeat(1, 1, rows, 1)
number = ctypes.c_int32
memory = [
    numpy.frombuffer((number * it.numel()).from_address(it.data_ptr()), dtype=numpy.int32)
    for it in (counts, indices)
]
memory = [(array, array.copy()) for array in memory]
query, key, value = torch.randn(3, 1, 1, 16 * rows, 8, device=device).unbind()
query.requires_grad_()
is_over = False

def rewrite():
    while not is_over:
        for array, values in memory:
            array[:] = 2**30 if array.size == rows else -(2**20)
            time.sleep(0.0002)
            array[:] = values
            time.sleep(0.0005)

thread = threading.Thread(target=rewrite)
thread.start()
done, refused, end = 0, 0, time.time() + 4
while time.time() < end:
    try:
        output, _ = torch.ops.foo.flex_attention(
            query, key, value, [], counts, indices, query_block=16, key_block=16
        )
        output.sum().backward()
        done += 1
    except ValueError as error:
        assert str(error).startswith("flex_attention: "), error
        refused += 1
is_over = True
thread.join()
assert done > 0 and refused > 0, (done, refused)
"""


@pytest.mark.whole
def test_flex_attention_while_another_thread_rewrites_its_lists_of_blocks(device):
    result = python(BLOCKS_PROGRAM, device)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("device", ["foo", *whole("cpu")])
def test_attention_varlen_while_another_thread_rewrites_its_lengths_and_blocks(device):
    """An operator that read the tensors twice crashed here within seconds."""
    result = python(PROGRAM, device)
    assert result.returncode == 0, result.stderr
