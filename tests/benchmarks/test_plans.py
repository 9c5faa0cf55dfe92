"""Calls of many shapes are cut into jobs that keep 16 threads busy: a simulation, no timing."""

import pytest
import torch

from benchmarks import plans
from benchmarks.plans import attention, flex, linear, varlen
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
