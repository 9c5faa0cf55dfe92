"""A transformer block of our operators trains on several processes as on one."""

from pathlib import Path

import pytest
from support.ranks import run_on_ranks

CHECKS = Path(__file__).with_name("module_checks.py")


@pytest.mark.whole
@pytest.mark.parametrize(
    ("ranks", "checks"),
    [
        (2, ["tensor_parallel", "fully_sharded"]),
        (4, ["tensor_parallel", "fully_sharded", "tensor_parallel_and_fully_sharded"]),
    ],
    ids=str,
)
def test_on_processes(ranks, checks, tmp_path):
    run_on_ranks(CHECKS, ranks, tmp_path, *checks)
