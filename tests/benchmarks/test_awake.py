"""Processes keep the processors awake while the benchmark runs, and end with it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.awake import processors_awake


def busy_processes():
    """List the processors that this process's children keep busy at the lowest priority."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_text() if entry.name.isdigit() else ""
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1] if command else ""
            if "benchmarks.awake" in command and int(parent) == os.getpid():
                pid = int(entry.name)
                if os.sched_getscheduler(pid) == os.SCHED_IDLE:
                    found.append(os.sched_getaffinity(pid))
        except OSError:
            continue
    return sorted(found, key=min)


def test_every_processor_is_busy_until_the_end():
    wanted = [{processor} for processor in sorted(os.sched_getaffinity(0))]
    with processors_awake():
        end = time.monotonic() + 60
        while busy_processes() != wanted and time.monotonic() < end:
            time.sleep(0.05)
        assert busy_processes() == wanted
    assert busy_processes() == []


def test_nobody_is_busy_after_a_failure():
    with pytest.raises(KeyError), processors_awake():
        raise KeyError
    assert busy_processes() == []


def test_nobody_is_busy_for_a_parent_that_is_gone():
    processor = min(os.sched_getaffinity(0))
    # A new interpreter: the module needs no torch.
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.awake", str(processor), "0"], timeout=60, check=False
    )
    assert ended.returncode == 0
