"""torch.distributed runs on foo: two processes, each on tensors of its own device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("distributed_checks.py")
TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("backend", "checks"),
    [
        ("gloo", ["collectives", "no_copies", "refused"]),
        ("gloo", ["memory_that_moves_meanwhile", "memory_that_is_copied_on_writing"]),
        ("None", ["default_backend"]),
        (
            "gloo",
            [
                "data_parallel",
                "data_parallel_with_sparse_gradients",
                "data_parallel_with_different_starts",
            ],
        ),
        ("gloo", ["fully_sharded", "fully_sharded_first_version", "distributed_tensors"]),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_on_two_processes(backend, checks, tmp_path):
    command = [sys.executable, CHECKS, tmp_path / "store"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    processes = [
        subprocess.Popen(
            [*command, str(rank), backend, *checks],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n\n".join(errors)
