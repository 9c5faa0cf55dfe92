"""Ring attention computes on two and four processes what attention does on one."""

from pathlib import Path

import pytest
from support.ranks import run_on_ranks

CHECKS = Path(__file__).with_name("ring_checks.py")


@pytest.mark.parametrize("ranks", [2, 4])
def test_on_processes(ranks, tmp_path):
    checks = ("values_and_gradients", "lengths_that_differ", "half_precision")
    run_on_ranks(CHECKS, ranks, tmp_path, *checks, "part_of_the_processes")
