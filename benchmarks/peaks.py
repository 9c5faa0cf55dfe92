"""Measures the machine's peaks: operations of its vector units, reading of memory.

The targets of attention are fractions of these rates, so both are measured in the same rounds.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from benchmarks.cores import processors_by_core
from benchmarks.measure import Reference, Result
from foo_ops.kernels.compiler import cache, emit
from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.compiler.processor import has_bfloat16_dot, has_matrix_unit, vector_bits
from foo_ops.kernels.simd.amx import (
    ROWS,
    matrix_configure,
    matrix_dot,
    matrix_load,
    matrix_release,
    matrix_store,
    matrix_zero,
)
from foo_ops.kernels.simd.arithmetic import splat
from foo_ops.kernels.simd.memory import load_vector, pointer_to, store
from foo_ops.kernels.simd.narrow import BFLOAT

FMA, BF16_DOT, READ = "FMA peak", "bf16 dot peak", "read bandwidth"
MATRIX = "matrix unit peak"

CHAINS = 12
"""Independent sums: two units with a latency of 4 need 8 of them; 16 registers can hold 14."""
LONG_RUN = 1 << 14
"""Numbers in each of the four runs that are read at a time.

Some processors prefetch only within such runs: a Zen 3 reads 15 GB/s sequentially, and 23 in four
runs.
"""
SECONDS = 0.01
"""Approximate duration of a measurement."""
OVERLAP = 0.9
"""Least share of the time, from the first start to the last end, in which all threads run."""
ATTEMPTS = 20
DEFAULT_L3 = 32 << 20


# --------------------------------------------------------------------------------------- kernels


def fma_kernel() -> Kernel:
    """Make a kernel of (address of sum, of a, of b, iterations) that sums all chains.

    sum, a and b are float32 vectors.
    """
    lanes = vector_bits() // 32
    vector = ir.VectorType(ir.FloatType(), lanes)
    return chains_kernel(f"llvm.fma.v{lanes}f32", lanes, vector, lambda a, b, c: (a, b, c))


def bf16_dot_kernel() -> Kernel:
    """Make the same kernel as `fma_kernel`, with a and b of twice as many bfloat16."""
    bits = vector_bits()
    vector = ir.VectorType(BFLOAT, bits // 16)
    name = f"llvm.x86.avx512bf16.dpbf16ps.{bits}"
    return chains_kernel(name, bits // 32, vector, lambda a, b, c: (c, a, b))


def chains_kernel(
    instruction: str,
    lanes: int,
    operand: ir.VectorType,
    arguments: Callable[[Any, Any, Any], tuple[Any, ...]],
) -> Kernel:
    """Make a loop over ``CHAINS`` sums, each updated once by the instruction, all in registers."""
    vector = ir.VectorType(ir.FloatType(), lanes)

    @intrinsic
    def chains(typing_context: Any, sum: Any, a: Any, b: Any, iterations: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            result, *places = [
                builder.inttoptr(address, ir.IntType(8).as_pointer()) for address in args[:3]
            ]
            a, b = [
                builder.load(builder.bitcast(place, operand.as_pointer()), align=4)
                for place in places
            ]
            # Each starts at another number, or the compiler might merge them all.
            starts = [ir.Constant(vector, [float(chain)] * lanes) for chain in range(CHAINS)]
            sums = [cgutils.alloca_once_value(builder, start) for start in starts]
            function_type = ir.FunctionType(vector, [it.type for it in arguments(a, b, starts[0])])
            function = cgutils.get_or_insert_function(builder.module, function_type, instruction)
            with cgutils.for_range(builder, args[3]):
                for place in sums:
                    builder.store(
                        builder.call(function, arguments(a, b, builder.load(place))), place
                    )
            total = functools.reduce(builder.fadd, [builder.load(place) for place in sums])
            builder.store(total, builder.bitcast(result, vector.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp, types.intp), generate

    def kernel(sum, a, b, iterations):  # type: ignore[no-untyped-def]
        chains(sum, a, b, iterations)

    return Kernel(kernel, (types.intp,) * 4)


def matrix_kernel() -> Kernel:
    """Make the same kernel as `fma_kernel`, with ``CHAINS`` matrix unit products per iteration.

    The sum is one of its four accumulator registers; a and b are a register of bfloat16 each.
    """
    pairs, floats = pointer_to("bfloat16x2"), pointer_to("float32")

    def kernel(sum, a, b, iterations):  # type: ignore[no-untyped-def]
        matrix_configure()
        matrix_zero(0)
        matrix_zero(1)
        matrix_zero(2)
        matrix_zero(3)
        matrix_load(4, pairs(a), ROWS)
        matrix_load(5, pairs(b), ROWS)
        for _ in range(3 * iterations):
            matrix_dot(0, 4, 5)
            matrix_dot(1, 4, 5)
            matrix_dot(2, 4, 5)
            matrix_dot(3, 4, 5)
        matrix_store(0, floats(sum), ROWS)
        matrix_release()

    return Kernel(kernel, (types.intp,) * 4)


def read_kernel() -> Kernel:
    """Make a kernel of (address of sum, of data, count, run) that adds up float32.

    It reads four runs of ``run`` numbers at a time. The count is a multiple of four runs, and a run
    is a multiple of the vector; the sum is one vector.
    """
    LANES = vector_bits() // 32  # noqa: N806
    floats = pointer_to("float32")

    def kernel(sum, data, count, run):  # type: ignore[no-untyped-def]
        source = floats(data)
        zero = splat(types.float32(0.0), LANES)
        first, second, third, fourth = zero, zero, zero, zero
        for start in range(0, count, 4 * run):
            for index in range(start, start + run, LANES):
                first = first + load_vector(source, index, LANES)
                second = second + load_vector(source, index + run, LANES)
                third = third + load_vector(source, index + 2 * run, LANES)
                fourth = fourth + load_vector(source, index + 3 * run, LANES)
        store(floats(sum), 0, (first + second) + (third + fourth))

    return Kernel(kernel, (types.intp,) * 4)


@functools.cache
def compiled(build: Callable[[], Kernel]) -> Callable[..., None]:
    """Return the C function, which ctypes calls with the GIL released."""
    code = emit.compile_kernel(build)
    address = cache.link(code, f"{build.__name__}-{vector_bits()}")
    arguments = [ctypes.c_int64] * len(build().argument_types)
    return ctypes.CFUNCTYPE(None, *arguments)(address)


# ----------------------------------------------------------------------------------------- rates


def compute_peak(dtype: str) -> str:
    """Return the peak that attention in this dtype is compared with."""
    if dtype == "bfloat16" and has_matrix_unit():
        return MATRIX
    return BF16_DOT if dtype == "bfloat16" and has_bfloat16_dot() else FMA


def measure_peaks(counts: Sequence[int], rounds: int) -> list[Result]:
    """Return a row for each rate and number of threads."""
    rows = []
    peaks = (FMA, BF16_DOT, MATRIX) if has_matrix_unit() else (FMA, BF16_DOT)
    for name in (*peaks, READ):
        section = "bandwidth" if name == READ else "peaks"
        if name == BF16_DOT and not has_bfloat16_dot():
            reason = f"this processor has no AVX512-BF16, so bfloat16 is compared with the {FMA}"
            rows.append(Result(section, name, 1, 0.0, True, failures={name: reason}))
            continue
        (rate,) = references(name).values()
        for threads in counts:
            seconds = {name: [1 / rate(threads) for _ in range(rounds)]}
            rows.append(Result(section, name, threads, 1.0, True, seconds))
    return rows


def references(name: str) -> dict[str, Reference]:
    rates = {FMA: fma_rate, BF16_DOT: bf16_dot_rate, MATRIX: matrix_rate, READ: read_rate}
    return {name: rates[name]}


def fma_rate(threads: int) -> float:
    """Return the operations per second of float32 fused multiply-adds."""
    return _chains_rate(fma_kernel, torch.float32, 2 * vector_bits() // 32, threads)


def bf16_dot_rate(threads: int) -> float:
    """Return the operations per second of AVX512-BF16's dot products of pairs."""
    return _chains_rate(bf16_dot_kernel, torch.bfloat16, 2 * vector_bits() // 16, threads)


def matrix_rate(threads: int) -> float:
    """Return the operations per second of a matrix unit on bfloat16.

    An instruction updates 16 x 16 sums by 32 products each.
    """
    return _chains_rate(matrix_kernel, torch.bfloat16, 2 * ROWS * ROWS * 2 * ROWS, threads)


def _chains_rate(
    build: Callable[[], Kernel], dtype: torch.dtype, operations: int, threads: int
) -> float:
    """Return the rate of a chains kernel; ``operations`` counts those of one instruction."""
    kernel = compiled(build)
    # Products below one keep the sums of fused multiply-adds finite.
    a, b = torch.full((2, ROWS * 2 * ROWS), 0.5, dtype=dtype)
    sums = torch.zeros(threads, ROWS * ROWS)

    def run(thread: int, iterations: int) -> None:
        kernel(sums[thread].data_ptr(), a.data_ptr(), b.data_ptr(), iterations)

    iterations = _iterations(run)
    seconds = timed(lambda thread: run(thread, iterations), threads)
    return threads * iterations * CHAINS * operations / seconds


def _iterations(run: Callable[[int, int], None]) -> int:
    """Return how many iterations take about `SECONDS`."""
    probe = 100_000
    start = time.perf_counter()
    run(0, probe)
    return max(1, int(probe * SECONDS / (time.perf_counter() - start)))


def read_rate(threads: int) -> float:
    """Return the bytes per second that threads read from an array beyond the L3 cache.

    Each reads its share, sequentially or four runs at a time, whichever is faster.
    """
    kernel = compiled(read_kernel)
    data = _beyond_the_caches()
    sums = torch.zeros(threads, 16)
    lanes = vector_bits() // 32
    long_run = min(LONG_RUN, data.numel() // threads // (4 * lanes) * lanes)
    count = data.numel() // threads // (4 * long_run) * (4 * long_run)

    def seconds(length: int) -> float:
        def run(thread: int) -> None:
            kernel(sums[thread].data_ptr(), data[thread * count :].data_ptr(), count, length)

        return timed(run, threads)

    return threads * count * data.itemsize / min(map(seconds, (lanes, long_run)))


@functools.cache
def _beyond_the_caches() -> torch.Tensor:
    return torch.ones(max(256 << 20, bytes_beyond_the_caches()) // 4)


def timed(run: Callable[[int], None], threads: int) -> float:
    """Return the seconds of ``run(0)``, ``run(1)``, ... together, from first start to last end.

    If a thread starts late, two seem as slow as one, so this is repeated until all overlap; the
    attempt with the largest overlap counts.
    """
    best, seconds = 0.0, math.inf
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(ATTEMPTS):
            starts, ends = at_once(run, threads, pool)
            whole = max(ends) - min(starts)
            overlap = (min(ends) - max(starts)) / whole
            if overlap > best or seconds == math.inf:
                best, seconds = overlap, whole
            if best >= OVERLAP:
                break
    return seconds


def at_once(
    run: Callable[[int], None], threads: int, pool: ThreadPoolExecutor
) -> tuple[list[float], list[float]]:
    """Return the times at which each thread started and ended.

    Each is pinned to a processor, and to a core of its own if there are enough; otherwise the
    processes that keep processors awake could lead the system to put two threads on one core.
    """
    barrier, processors = Barrier(threads), processors_by_core()

    def work(thread: int) -> tuple[float, float]:
        if threads <= len(processors):
            os.sched_setaffinity(0, {processors[thread]})
        barrier.wait()
        start = time.perf_counter()
        run(thread)
        return start, time.perf_counter()

    starts, ends = zip(*pool.map(work, range(threads)))
    return list(starts), list(ends)


# ---------------------------------------------------------------------------------------- caches


def caches() -> dict[str, int]:
    """Return the bytes of the first processor's caches, L1d, L1i, L2, L3; empty if unknown."""
    found = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = [
            (folder / name).read_text().strip() for name in ("level", "type", "size")
        ]
        name = f"L{level}{ {'Data': 'd', 'Instruction': 'i'}.get(kind, '') }"
        found[name] = int(size.removesuffix("K")) * 1024
    return found


def bytes_beyond_the_caches() -> int:
    """Return four times the L3 cache, but at most a 48th of the memory.

    Each contender has as many bytes, and a small virtual machine may see all of a large shared
    cache.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(4 * l3_bytes(), memory // 48)


def l3_bytes() -> int:
    return caches().get("L3", DEFAULT_L3)
