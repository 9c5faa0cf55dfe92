"""Calls of many shapes keep 16 threads busy, and small ones wake none: simulated, not timed."""

import pytest
import torch

from benchmarks import plans
from benchmarks.plans import attention, flex, linear, varlen
from foo_ops import _C
from foo_ops.kernels.compiler.processor import vector_registers

THREADS = 16
# Blocks of 96 queries, for 16 registers, divide some lengths less evenly: 0.67 to 0.89.
LEAST = 0.9 if vector_registers() == 32 else 0.65
ENOUGH_TILES = 256

CASES = [
    *plans.cases(),
    *(attention(heads, 2048, is_causal=True) for heads in (3, 5, 17)),
    *(attention(1, length) for length in (2048, 3000, 8192)),
    attention(8, 2048, key_heads=2, is_causal=True),
    attention(1, 64, 32768),
    attention(8, 1, 32768, key_heads=2, dim=128),
    *(attention(heads, 2048, is_causal=True, backward=True) for heads in (2, 3, 5, 8, 17, 20, 33)),
    *(attention(heads, 1024, backward=True) for heads in (4, 7, 9, 40, 100)),
    *(attention(1, length, backward=True) for length in (3000, 8192)),
    attention(8, 2048, key_heads=1, is_causal=True, backward=True),
    attention(8, 128, 8192, backward=True),
    attention(6, 4096, is_causal=True, backward=True, dtype=torch.bfloat16),
    *(varlen(lengths, heads) for lengths, heads in (((4096,), 4), ((128,) * 40, 8))),
    *(varlen(lengths, heads, backward=True) for lengths, heads in (((4096,), 4), ((128,) * 40, 8))),
    flex(3, 4096),
    flex(3, 4096, backward=True),
    *(linear(*sizes) for sizes in ((1024, 1024, 1024), (512, 4096, 1024), (3000, 700, 5000))),
    *(
        linear(*sizes, gradients=True)
        for sizes in ((1024, 1024, 1024), (2048, 2816, 1024), (3000, 1000, 2000))
    ),
    *(
        linear(*sizes, gradients=gradients, by_mkl=True)
        for sizes in ((1024, 1024, 1024), (4096, 2048, 4096), (3000, 1000, 2000))
        for gradients in (False, True)
    ),
]


ENOUGH = [it for it in CASES if it.tiles >= ENOUGH_TILES]


@pytest.mark.parametrize("case", ENOUGH, ids=lambda case: case.name)
def test_threads_have_equal_work(case):
    assert plans.balance(case, THREADS) >= LEAST


# Calls from a few multiplications to more than 128 threads are worth.
SIZES = [
    *(linear(1, width, width) for width in (64, 128, 200, 256, 300, 512, 1000, 2000)),
    *(linear(16, width, width) for width in (64, 128, 256, 512)),
    *(attention(4, 1, keys) for keys in (16, 64, 128, 500, 4000)),
    *(attention(heads, length) for heads, length in ((1, 16), (4, 32), (8, 64), (12, 200))),
    *(attention(2, length, backward=True) for length in (8, 32, 100)),
    varlen((10, 20, 30), heads=2),
]


def time_on(threads: int, work: float) -> float:
    return work / threads + (threads * _C.WORK_OF_THREAD if threads > 1 else 0)


@pytest.mark.parametrize("threads", [1, 2, 4, 16, 64, 128])
@pytest.mark.parametrize("case", SIZES, ids=lambda case: case.name)
def test_a_call_runs_on_one_thread_if_that_takes_less_time_than_all(case, threads):
    for loop in case.plan(threads):
        work = sum(map(sum, loop.costs))
        assert time_on(loop.threads, work) == min(time_on(1, work), time_on(threads, work))
