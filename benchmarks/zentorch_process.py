"""Runs zentorch in a process of its own, so that its import does not affect the others."""

from __future__ import annotations

import functools
import timeit
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import stay_awake
from benchmarks.own_process import OwnProcess
from benchmarks.workload import Workload


class Zentorch:
    """Calls zentorch's attention as its compiler does.

    Raises the errors of zentorch's process, such as ModuleNotFoundError if it is not installed.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.first = process().request("prepare", workload)

    def results(self) -> list[Tensor]:
        return [self.workload.comparable(torch.from_numpy(self.first))]

    def time(self, calls: int, threads: int) -> float:
        return process().request("time", calls, threads)


@functools.cache
def process() -> OwnProcess:
    """Start the one process for all workloads."""
    return OwnProcess("benchmarks.zentorch_process:Server")


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
