"""Eight threads work on the CPU and on foo at once, for some seconds."""

import os
import subprocess
import sys
from pathlib import Path

RUN = """
import torch
from support import threads_at_work
torch.set_num_threads(1)
print(threads_at_work.run_threads(5))
"""


def test_eight_threads_leave_exact_figures():
    # A process of its own, in which nothing else has used the generators or the memory.
    tests = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([tests, *sys.path])}
    run = subprocess.run(
        [sys.executable, "-c", RUN], env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 100
