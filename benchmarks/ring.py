"""Time ring attention and count its memory, on several processes beside one.

``python -m benchmarks.ring`` prints a table for a sequence of 65536, forward and backward, causal
and balanced, on device foo, which counts every byte. Processes on one machine share its cores, so
the table shows the memory of each, and the overhead of the ring.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from foo_ops import device
from foo_ops.distributed import ring_attention, shard_sequence

REPOSITORY = Path(__file__).parents[1]
HEADS, KEY_HEADS, HEAD_DIM = 8, 2, 64


def measure(length: int, rounds: int) -> tuple[float, float]:
    """Return the seconds of a forward and a backward pass, and the peak MiB besides the inputs."""
    generator = torch.Generator().manual_seed(0)
    parts = [
        shard_sequence(
            torch.randn(1, heads, length, HEAD_DIM, generator=generator), is_balanced=True
        )
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    inputs = [part.to("foo").requires_grad_() for part in parts]
    inputs_only = device.memory_allocated()
    device.reset_peak_memory_stats()
    seconds = [step(inputs) for _ in range(rounds + 1)]
    most = device.max_memory_allocated() - inputs_only
    return statistics.median(seconds[1:]), most / 2**20


def step(inputs: list[Tensor]) -> float:
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    output = ring_attention(*inputs, is_causal=True, is_balanced=True)
    assert isinstance(output, Tensor)
    torch.autograd.grad(output, inputs, torch.ones_like(output))
    return time.perf_counter() - start


def run_rank(rank: int, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // arguments.processes))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{arguments.store}",
        rank=rank,
        world_size=arguments.processes,
    )
    seconds, most = measure(arguments.length, arguments.rounds)
    if rank == 0:
        print_row(arguments.processes, seconds, most)
    dist.destroy_process_group()


def print_row(processes: int, seconds: float, most: float) -> None:
    print(f"| {processes} | {seconds:.2f} | {most:.1f} |", flush=True)


def run_ranks(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.ring", f"--length={arguments.length}"]
        command += [f"--rounds={arguments.rounds}"]
        command += [f"--processes={arguments.processes}", f"--store={folder}/store"]
        ranks = [
            subprocess.Popen([*command, f"--rank={rank}"], cwd=REPOSITORY)
            for rank in range(arguments.processes)
        ]
        for rank in ranks:
            if rank.wait() != 0:
                raise SystemExit("benchmarks.ring: a process failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--length", type=int, default=65536, help="of the sequence")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="after one that is not counted")
    # For the processes that this one starts.
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(arguments.rank, arguments)
        return
    print(
        f"causal attention of {arguments.length} tokens, {HEADS} heads over {KEY_HEADS} of "
        f"{HEAD_DIM}, float32, forward and backward, torch {torch.__version__}\n"
    )
    print(
        "| processes | seconds | MiB beside the inputs, each |\n| ---: | ---: | ---: |", flush=True
    )
    print_row(1, *measure(arguments.length, arguments.rounds))
    run_ranks(arguments)


if __name__ == "__main__":
    main()
