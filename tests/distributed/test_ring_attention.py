"""Ring attention on two and four processes computes the attention of one."""

from pathlib import Path

import pytest
from support.ranks import run_on_ranks

CHECKS = Path(__file__).with_name("ring_checks.py")


@pytest.mark.whole
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_processes(ranks, tmp_path):
    checks = ("errors", "values_and_gradients", "lengths_that_differ", "half_precision")
    run_on_ranks(CHECKS, ranks, tmp_path, *checks, "part_of_the_processes")


@pytest.mark.whole
@pytest.mark.parametrize("ranks", [2, 4])
def test_options(ranks, tmp_path):
    run_on_ranks(CHECKS, ranks, tmp_path, "windows", "added_to_scores", "large_scores")


@pytest.mark.whole
@pytest.mark.parametrize("ranks", [2, 4])
def test_in_context_parallel(ranks, tmp_path):
    run_on_ranks(CHECKS, ranks, tmp_path, "in_context_parallel", "refused_in_context_parallel")
