"""Keep processors from resting: after a rest of 20 ms the next 50 ms take 1.2 times as long.

A process that waits, for zentorch's or for a compiler, rests; then the next contender would pay
for it. ``python -m benchmarks.awake PROCESSOR PARENT`` keeps one processor busy.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

COUNT = 1_000_000
"""Steps of counting, some ten milliseconds, between two looks at whether the parent is there."""


@contextmanager
def processors_awake() -> Iterator[None]:
    """Each usable processor counts, at a priority that gives way to everything else.

    It takes the processor for less than a hundredth of the time that others want it for.
    """
    counting = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.awake", str(processor), str(os.getpid())]
        )
        for processor in sorted(os.sched_getaffinity(0))
    ]
    try:
        yield
    finally:
        for process in counting:
            process.terminate()
            process.wait()


def keep_awake(processor: int, parent: int) -> None:
    """Count on a processor while the parent lives."""
    os.sched_setaffinity(0, {processor})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while os.getppid() == parent:
        for _ in range(COUNT):
            pass


if __name__ == "__main__":
    keep_awake(int(sys.argv[1]), int(sys.argv[2]))
