"""Programs in which code other than kernels uses a tensor's address, and correct ones."""

import ctypes
import threading

import numba
import numpy as np
import torch
from support.stream_helpers import SIZE, ones


def address_of(tensor):
    return ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_float))


def at_hand(tensor, right):
    return tensor.cpu() if right else tensor


def c_reads(*, right):
    x = at_hand(ones(), right)
    ctypes.string_at(x.data_ptr(), 16)


def c_writes(*, right):
    x = at_hand(ones(), right)
    ctypes.memset(x.data_ptr(), 0, 16)


def numpy_reads(*, right):
    x = at_hand(ones(), right)
    np.ctypeslib.as_array(address_of(x), (SIZE,)).sum()


def numpy_writes(*, right):
    x = at_hand(ones(), right)
    np.ctypeslib.as_array(address_of(x), (SIZE,))[:] = 2


def another_thread_reads(*, right):
    x = at_hand(ones(), right)
    thread = threading.Thread(target=ctypes.string_at, args=(x.data_ptr(), 16))
    thread.start()
    thread.join()


def result_of_a_kernel(*, right):
    y = torch.nn.functional.softmax(torch.randn(64, 64, device="foo"), dim=-1)
    y = at_hand(y, right)
    ctypes.string_at(y.data_ptr(), 16)


def gradient_of_a_large_weight(*, right):
    x = torch.randn(600, 600, device="foo", requires_grad=True)
    (x @ x).sum().backward()
    gradient = at_hand(x.grad, right)
    ctypes.string_at(gradient.data_ptr(), 16)


@numba.njit
def first_of(array):
    return array[0]


def compiled_code_reads(*, right):
    x = at_hand(ones(), right)
    first_of(np.ctypeslib.as_array(address_of(x), (SIZE,)))


def freed_memory(*, right):
    x = at_hand(ones(), right)
    address = x.data_ptr()
    if not right:
        del x
    ctypes.string_at(address, 16)


PROGRAMS = [
    c_reads,
    c_writes,
    numpy_reads,
    numpy_writes,
    another_thread_reads,
    result_of_a_kernel,
    gradient_of_a_large_weight,
    compiled_code_reads,
    freed_memory,
]
