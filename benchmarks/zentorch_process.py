"""Runs zentorch in a process of its own, so that its import does not affect the others.

``python -m benchmarks.zentorch_process DESCRIPTOR`` serves a `Zentorch` through a connection.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import timeit
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import stay_awake
from benchmarks.workload import Workload


class Zentorch:
    """Calls zentorch's attention as its compiler does.

    Raises the errors of zentorch's process, such as ModuleNotFoundError if it is not installed.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.first = request("prepare", workload)

    def results(self) -> list[Tensor]:
        return [self.workload.comparable(torch.from_numpy(self.first))]

    def time(self, calls: int, threads: int) -> float:
        return request("time", calls, threads)


def request(name: str, *arguments: Any) -> Any:
    connection = process()
    try:
        connection.send((name, arguments))
        succeeded, value = connection.recv()
    except (EOFError, OSError) as error:
        raise RuntimeError("zentorch has ended its process") from error
    if not succeeded:
        raise value
    return value


@functools.cache
def process() -> Connection:
    """Start and connect to the one process, which ends with the connection."""
    here, there = Pipe()
    subprocess.Popen(
        [sys.executable, "-m", "benchmarks.zentorch_process", str(there.fileno())],
        pass_fds=[there.fileno()],
        # As zentorch's users have it, without foo_ops.
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    there.close()
    return here


# ----------------------------------------------------------------------------- in that process


class Server:
    """Serves one workload at a time."""

    def __init__(self) -> None:
        self.timer = timeit.Timer()

    def prepare(self, workload: Workload) -> Any:
        """Prepare the inputs, and return the output for the first set."""
        import zentorch  # noqa: F401

        arguments = {"dropout_p": workload.dropout_p, **workload.mask_arguments()}
        if "attn_mask" in arguments:
            # zentorch does not support bool masks.
            seen = arguments["attn_mask"]
            hidden = torch.full(seen.shape, -torch.inf, dtype=getattr(torch, workload.dtype))
            arguments["attn_mask"] = hidden.masked_fill(seen, 0.0)

        def function(*inputs: Tensor) -> Tensor:
            output, _ = torch.ops.zentorch.zentorch_sdpa.default(*inputs, **arguments)
            return output

        call = workload.in_turn(workload.one_by_one(function))
        self.timer = timeit.Timer(call)
        return call().float().numpy()

    def time(self, calls: int, threads: int) -> float:
        torch.set_num_threads(threads)
        stay_awake()
        return self.timer.timeit(calls)


def serve(connection: Connection) -> None:
    server = Server()
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = True, getattr(server, name)(*arguments)
        except Exception as error:
            answer = False, error
        connection.send(answer)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
