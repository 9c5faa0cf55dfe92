"""Run checks on several processes that form one torch.distributed group.

A file of checks ends with ``run_checks(globals())``, and a test calls `run_on_ranks` with it.
"""

import datetime
import faulthandler
import re
import sys

import pytest
import torch.distributed as dist
from support.processes import start


def run_on_ranks(script, ranks, tmp_path, *checks, backend="gloo"):
    """Run some functions of a script on each process; fail with their error messages."""
    store = tmp_path / "store"
    started = [start(script, rank, store, ranks, backend, *checks) for rank in range(ranks)]
    ended = [process.wait(300) for process in started]
    assert [it.returncode for it in ended] == [0] * ranks, "\n\n".join(it.stderr for it in ended)


def refuses(error, message):
    """Expect an error with exactly this message."""
    return pytest.raises(error, match=f"^{re.escape(message)}$")


def run_checks(functions):
    """Join the group given on the command line, and run the functions that it names."""
    # A rank that a signal ends says where it was: the other ranks only lose their connection.
    faulthandler.enable()
    rank, file, ranks, backend, *names = sys.argv[1:]
    dist.init_process_group(
        # None: the accelerator's backend.
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
