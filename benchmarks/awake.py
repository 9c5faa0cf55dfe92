"""Keep processors awake: after 20 ms of idling, the next 50 ms take 1.2 times as long.

A process that waits, for zentorch's or for a compiler, idles; the next contender would pay for it.
``python -m benchmarks.awake PROCESSOR PARENT`` keeps one processor busy.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

YIELDS = 10_000
"""Yields between two checks that the parent is alive: some milliseconds."""


@contextmanager
def processors_awake() -> Iterator[None]:
    """Keep each usable processor busy with a process that yields to all others."""
    busy = []
    try:
        for processor in sorted(os.sched_getaffinity(0)):
            command = [sys.executable, "-m", "benchmarks.awake", str(processor), str(os.getpid())]
            busy.append(subprocess.Popen(command))
        yield
    finally:
        for process in busy:
            process.terminate()
            process.wait()


def keep_awake(processor: int, parent: int) -> None:
    """Yield a processor to others in a loop, as long as the parent lives.

    A process that only counted would now and then hold a processor that others need for 4 ms.
    """
    # Ctrl-C ends the parent, which then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.sched_setaffinity(0, {processor})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while os.getppid() == parent:
        for _ in range(YIELDS):
            os.sched_yield()


if __name__ == "__main__":
    keep_awake(int(sys.argv[1]), int(sys.argv[2]))
