"""Eight threads work on the CPU and on foo at once, for some seconds."""

from support.processes import python

RUN = """
import torch
from support import threads_at_work
torch.set_num_threads(1)
print(threads_at_work.run_threads(5))
"""


def test_eight_threads_leave_exact_figures():
    # A separate process, in which nothing else has used the generators or the memory.
    run = python(RUN)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 100
