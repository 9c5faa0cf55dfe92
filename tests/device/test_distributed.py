"""torch.distributed runs on foo: two processes, each on tensors of its own device."""

from pathlib import Path

import pytest
from support.ranks import run_on_ranks

CHECKS = Path(__file__).with_name("distributed_checks.py")


@pytest.mark.whole
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
        ("gloo", ["sync_batch_norm"]),
        ("gloo", ["fully_sharded", "fully_sharded_first_version", "distributed_tensors"]),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_on_two_processes(backend, checks, tmp_path):
    run_on_ranks(CHECKS, 2, tmp_path, *checks, backend=backend)
