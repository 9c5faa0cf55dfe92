"""How evenly calls share their work among threads, simulated: nothing is computed or timed.

``python -m benchmarks.plans`` prints a table for up to 128 threads, on a machine with any number of
cores; with ``--publish`` it writes the table into docs/architecture.md. A call's launcher cuts the
work as it does for a real call, and the objects that hand jobs to threads are the launcher's own.
The last row says how wide a matrix must be for all threads to multiply one row by it.
"""

from __future__ import annotations

import heapq
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.attention.flex_attention import create_block_mask

import foo_ops
from benchmarks.pages import replace_between_marks
from foo_ops import _C
from foo_ops.testing.checks.matrix import threads as torch_threads

TILE = 128
"""Queries, and keys, of a tile of scores."""
PRODUCT_TILE = 64
"""Rows, and columns, of the smallest block of a matrix product."""
ADDING = 0.4
"""Share of the work on a tile of the backward pass that adds to sums of keys: two of five products.

Threads with blocks of the same keys add to a tile one after the other.
"""
SLOW = 0.5
"""Speed of a thread that shares its core."""
THREADS = (2, 16, 64, 128)
PAGE = Path("docs/architecture.md")


@dataclass(frozen=True)
class Case:
    """A call with ``tiles`` tiles of work.

    ``tile`` is the multiplications of one if jobs with the same keys add to it in turn, else 0.
    ``family`` names the processors whose matrix products are PyTorch's.
    """

    name: str
    call: Callable[[], object]
    tiles: int
    tile: float
    family: str = "none"

    def plan(self, threads: int) -> list[_C.PlannedLoop]:
        """The parallel loops of the call on so many threads."""
        family = _C.set_torch_products(self.family)
        try:
            with torch_threads(threads), torch.no_grad():
                return _C.plan_of(self.call)
        finally:
            _C.set_torch_products(family)


@dataclass(frozen=True)
class Simulation:
    """Work of each thread, and the time that the slowest takes; a thread does 1 in a time of 1."""

    work: list[float]
    time: float


def simulate(
    loop: _C.PlannedLoop, speeds: Sequence[float], tile: float, joins_chains: bool = True
) -> Simulation:
    """Run a loop's jobs on threads of these speeds, each handed out when its thread is free.

    Unless threads join chains that others have begun, each chain whose jobs take turns is one job,
    as it was up to version 0.2.
    """
    costs = [list(chain) for chain in loop.costs]
    joins_chains = joins_chains or tile == 0
    if not joins_chains:
        costs = [[sum(chain)] for chain in costs if chain]
    has_chains = loop.has_chains and joins_chains
    threads = min(loop.threads, sum(map(len, costs)))
    jobs = _C.JobChains(costs, threads) if has_chains else _C.ThreadShares(len(costs), threads)
    # When, at which speed and until when the earlier jobs of a chain run.
    earlier: list[list[tuple[float, float, float]]] = [[] for _ in costs]
    work, finish = [0.0] * len(speeds), 0.0
    free = [(0.0, thread) for thread in range(threads)]
    while free:
        start, thread = heapq.heappop(free)
        taken = jobs.take(thread)
        if taken is None or taken == -1:
            continue
        chain, position = taken if has_chains else (taken, 0)
        cost = costs[chain][position]
        end = start + cost / speeds[thread]
        if has_chains and tile > 0:
            for begun, speed, ended in earlier[chain]:
                end = max(end, min(ended, begun + cost / speed) + ADDING * tile)
            earlier[chain].append((start, speeds[thread], end))
        work[thread] += cost
        finish = max(finish, end)
        heapq.heappush(free, (end, thread))
    return Simulation(work, finish)


def balance(case: Case, threads: int) -> float:
    """Mean over largest work of a thread, loop by loop."""
    loops = [simulate(loop, [1.0] * threads, case.tile) for loop in case.plan(threads)]
    total = sum(sum(loop.work) for loop in loops)
    return total / threads / sum(max(loop.work) for loop in loops)


def efficiency(case: Case, threads: int, slowest: float = 1.0, joins_chains: bool = True) -> float:
    """Work over what the threads could have done in the time, if one has the speed ``slowest``."""
    speeds = [slowest] + [1.0] * (threads - 1)
    loops = [simulate(loop, speeds, case.tile, joins_chains) for loop in case.plan(threads)]
    total = sum(sum(loop.work) for loop in loops)
    return total / sum(speeds) / sum(loop.time for loop in loops)


# -------------------------------------------------------------------------------------------- calls


def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype)


def tiles_of(heads: int, queries: int, keys: int, is_causal: bool) -> int:
    rows, columns = -(-queries // TILE), -(-keys // TILE)
    return heads * (rows * (rows + 1) // 2 if is_causal else rows * columns)


def attention(
    heads: int, queries: int, keys: int = 0, *, key_heads: int = 0, dim: int = 64,
    is_causal: bool = False, backward: bool = False, dtype: torch.dtype = torch.float32,
) -> Case:  # fmt: skip
    """Attention of one row of the batch; as many keys and key heads unless given."""
    keys, key_heads = keys or queries, key_heads or heads
    shape = f"{heads}/{key_heads}" if key_heads != heads else f"{heads}"
    name = f"{shape} x {queries} x {keys} x {dim}{' causal' if is_causal else ''}"
    query, output = empty(1, heads, queries, dim, dtype=dtype), empty(1, heads, queries, dim)
    key = value = empty(1, key_heads, keys, dim, dtype=dtype)
    statistics = torch.zeros(1, heads, queries)

    def forward_call() -> object:
        return torch.ops.foo.attention(query, key, value, is_causal=is_causal)

    def backward_call() -> object:
        return torch.ops.foo.attention_backward(
            output.to(dtype), statistics, query, key, value, None, None, None, output.to(dtype),
            statistics, None, is_causal=is_causal,
        )  # fmt: skip

    return Case(
        f"attention {'backward' if backward else 'forward'} {name}",
        backward_call if backward else forward_call,
        tiles_of(heads, queries, keys, is_causal),
        5 * TILE * TILE * dim if backward else 0,
    )


def varlen(lengths: Sequence[int], heads: int = 8, *, backward: bool = False) -> Case:
    """Packed sequences, causal."""
    total, longest, dim = sum(lengths), max(lengths), 64
    places = torch.tensor([0, *lengths]).cumsum(0).int()
    query = key = value = output = empty(total, heads, dim)
    statistics = torch.zeros(heads, total)
    sizes = {"max_seqlen_q": longest, "max_seqlen_k": longest, "window_right": 0}

    def forward_call() -> object:
        return torch.ops.foo.attention_varlen(query, key, value, places, places, **sizes)

    def backward_call() -> object:
        return torch.ops.foo.attention_varlen_backward(
            output, statistics, query, key, value, places, places, None, None, None, None, output,
            statistics, None, **sizes,
        )  # fmt: skip

    return Case(
        f"varlen {'backward' if backward else 'forward'} {heads} x {min(lengths)} to {longest} x "
        f"{dim} causal",
        backward_call if backward else forward_call,
        sum(tiles_of(heads, length, length, is_causal=True) for length in lengths),
        5 * TILE * TILE * dim if backward else 0,
    )


def flex(heads: int, length: int, *, backward: bool = False) -> Case:
    """Flex attention with a causal block mask."""
    dim = 64
    query = empty(1, heads, length, dim).requires_grad_(backward)
    mask = create_block_mask(
        lambda batch, head, query, key: query >= key, None, None, length, length, "cpu"
    )

    def forward_call() -> object:
        return foo_ops.flex_attention(query, query, query, block_mask=mask)

    call = forward_call
    if backward:
        with torch.enable_grad():
            output = foo_ops.flex_attention(query, query, query, block_mask=mask)

        def call() -> object:
            return torch.autograd.grad(output, query, output, retain_graph=True)

    return Case(
        f"flex {'backward' if backward else 'forward'} {heads} x {length} x {dim} causal",
        call,
        tiles_of(heads, length, length, is_causal=True),
        5 * TILE * TILE * dim if backward else 0,
    )


def linear(
    rows: int, width: int, outputs: int, *, gradients: bool = False, by_mkl: bool = False
) -> Case:
    """A linear layer, or its gradients of input and weight.

    It is in bfloat16, or in float32 by MKL, as on Intel's processors.
    """
    dtype = torch.float32 if by_mkl else torch.bfloat16
    inputs, weight = (empty(size, width, dtype=dtype) for size in (rows, outputs))
    gradient = empty(rows, outputs, dtype=dtype)

    def forward_call() -> object:
        return torch.ops.foo.linear(inputs, weight)

    def gradients_call() -> object:
        return torch.ops.foo.linear_backward(gradient, inputs, weight)

    blocks = [-(-size // PRODUCT_TILE) for size in (rows, width, outputs)]
    products = [(blocks[0], blocks[2])]
    if gradients:
        products = [(blocks[0], blocks[1]), (blocks[2], blocks[1])]
    name = f"linear{' gradients' if gradients else ''}{' by MKL' if by_mkl else ''}"
    return Case(
        f"{name} {rows} x {width} x {outputs}",
        gradients_call if gradients else forward_call,
        min(bands * columns for bands, columns in products),
        0.0,
        "intel-avx512" if by_mkl else "none",
    )


def cases() -> list[Case]:
    """The calls of the table."""
    return [
        attention(16, 4096, is_causal=True),
        attention(1, 4096, is_causal=True),
        attention(12, 1024, is_causal=True),
        attention(32, 1, 8192, key_heads=8, dim=128),
        varlen((3000, 500, 1200, 100, 2000)),
        flex(8, 2048),
        attention(16, 2048, is_causal=True, backward=True),
        attention(12, 2048, is_causal=True, backward=True),
        attention(24, 1024, backward=True),
        attention(32, 2048, key_heads=8, is_causal=True, backward=True),
        attention(1, 2048, backward=True),
        attention(1, 4096, is_causal=True, backward=True),
        attention(1, 16384, is_causal=True, backward=True),
        attention(1, 32768, is_causal=True, backward=True),
        varlen((3000, 500, 1200, 100, 2000), backward=True),
        flex(8, 2048, backward=True),
        linear(1024, 1024, 2816),
        linear(1024, 1024, 2816, gradients=True),
        linear(1024, 1024, 2816, by_mkl=True),
        linear(1024, 1024, 2816, gradients=True, by_mkl=True),
        linear(1, 4096, 4096),
    ]


# -------------------------------------------------------------------------------------------- table


def least_width(threads: int) -> int:
    """The multiple of 8 from which on all threads multiply one row by a square matrix."""
    return next(
        width
        for width in itertools.count(8, 8)
        if linear(1, width, width).plan(threads)[0].threads == threads
    )


def table() -> str:
    """Efficiency for numbers of threads, in Markdown."""
    names = [f"{threads} threads" for threads in THREADS]
    lines = [
        f"| call | tiles | {' | '.join(names)} | 16, one of half speed |",
        f"| --- | ---: |{' ---: |' * len(names)} ---: |",
    ]
    for case in cases():
        cells = [cell(case, threads) for threads in THREADS] + [cell(case, 16, SLOW)]
        lines.append(f"| {case.name} | {case.tiles} | {' | '.join(cells)} |")
    widths = [f"{least_width(threads)}" for threads in (*THREADS, 16)]
    lines.append(f"| linear 1 x n x n, least n of all threads | | {' | '.join(widths)} |")
    return "\n".join(lines) + "\n"


def cell(case: Case, threads: int, slowest: float = 1.0) -> str:
    now = f"{efficiency(case, threads, slowest):.2f}"
    before = f"{efficiency(case, threads, slowest, joins_chains=False):.2f}"
    return now if now == before else f"{now} ({before})"


def main() -> None:
    text = table()
    if "--publish" in sys.argv[1:]:
        replace_between_marks(PAGE, "plans", text)
    print(text, end="")


if __name__ == "__main__":
    main()
