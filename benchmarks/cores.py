"""Detects how many cores two threads get: some machines have two processors and one core."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import Result

LEAST_SCALING = 1.3
"""Least speedup of a loop in registers on two threads over one, if they have two cores.

Two threads of one core are far below, two cores are near 2 on a machine that is otherwise idle.
"""
SYSTEM = Path("/sys")


def one_core(peaks: Sequence[Result], name: str) -> str:
    """Return a sentence if two threads get one core only, else nothing.

    Args:
        peaks: the rows of the machine's peaks.
        name: the peak that depends on nothing but the core.
    """
    rates = {
        it.threads: statistics.median(1 / seconds for seconds in it.seconds[name])
        for it in peaks
        if it.name == name and name in it.seconds
    }
    if not {1, 2} <= rates.keys() or rates[2] >= LEAST_SCALING * rates[1]:
        return ""
    return (
        f"This machine gives two threads one core only ({reason()}): the {name} is "
        f"{rates[1] / 1e9:.0f} GFLOP/s on one thread and {rates[2] / 1e9:.0f} on two. Rows of two "
        "threads cannot be judged."
    )


def reason() -> str:
    """Explain why two threads may get one core, as far as the system shows it."""
    processors = sorted(os.sched_getaffinity(0))
    quota = processors_allowed()
    if quota is not None and quota < 2:
        return f"its control group may use {quota:g} processors"
    if len({core_of(processor) for processor in processors}) < len(processors):
        return "its processors are threads of the same core"
    return "the system shows more, as virtual machines do whose processors are threads of one core"


def core_of(processor: int) -> str:
    """Return the processors of a processor's core as listed by Linux, or the processor itself."""
    path = SYSTEM / f"devices/system/cpu/cpu{processor}/topology/thread_siblings_list"
    try:
        return path.read_text().strip()
    except OSError:
        return str(processor)


def processors_allowed() -> float | None:
    """Return how many processors this process's control group may use; None without a quota."""
    try:
        quota, period = (SYSTEM / "fs/cgroup/cpu.max").read_text().split()
    except OSError:
        try:
            folder = SYSTEM / "fs/cgroup/cpu"
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")
            )
        except OSError:
            return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


def processors_by_core() -> list[int]:
    """List the usable processors, one of each core first, then the second of each."""
    cores: dict[str, list[int]] = {}
    for processor in sorted(os.sched_getaffinity(0)):
        cores.setdefault(core_of(processor), []).append(processor)
    return sorted(
        (processor for core in cores.values() for processor in core),
        key=lambda processor: (cores[core_of(processor)].index(processor), processor),
    )
