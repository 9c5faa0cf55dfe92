"""Run checks on several processes that are one group of torch.distributed.

A file of checks ends with ``run_checks(globals())``, and a test calls `run_on_ranks` with it.
"""

import datetime
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

TESTS = Path(__file__).parents[1]


def run_on_ranks(script, ranks, tmp_path, *checks, backend="gloo"):
    """Run some functions of a script on each process, and fail with what they say."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    arguments = [tmp_path / "store", str(ranks), backend, *checks]
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), *arguments],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, "\n\n".join(errors)


def refuses(error, message):
    """Expect an error with exactly this message."""
    return pytest.raises(error, match=f"^{re.escape(message)}$")


def run_checks(functions):
    """Join the group as the command line says, and run the functions that it names."""
    rank, file, ranks, backend, *names = sys.argv[1:]
    dist.init_process_group(
        # None: that of the accelerator.
        None if backend == "None" else backend,
        init_method=f"file://{file}",
        rank=int(rank),
        world_size=int(ranks),
        timeout=datetime.timedelta(seconds=100),
    )
    for name in names:
        functions[name]()
    dist.barrier()
    dist.destroy_process_group()
