"""Operators on DTensors, on two and four processes, give the results of one process."""

from pathlib import Path

import pytest
from support.parts import whole
from support.ranks import run_on_ranks

CHECKS = Path(__file__).with_name("sharding_checks.py")


@pytest.mark.parametrize("ranks", [2, *whole(4)])
@pytest.mark.parametrize(
    "checks",
    [
        ["on_elements", "on_rows", "on_products", "on_experts"],
        *whole(
            ["on_heads"],
            ["on_dropout"],
            ["on_operators_of_the_kit", "on_written_tensors", "refused", "nothing_travels"],
        ),
    ],
    ids=" ".join,
)
def test_on_processes(ranks, checks, tmp_path):
    run_on_ranks(CHECKS, ranks, tmp_path, *checks)


@pytest.mark.whole
@pytest.mark.parametrize("ranks", [2, 4])
def test_classes_that_are_cut(ranks, tmp_path):
    checks = ("on_classes", "on_rows_and_classes", "nothing_is_gathered", "refused")
    run_on_ranks(CHECKS.with_name("vocabulary_checks.py"), ranks, tmp_path, *checks)
