"""The table of loading: its files can be read, and their sizes are those of 4 bits."""

import math

import pytest

from benchmarks import loading
from benchmarks.measure import prepare

QUICK = loading.QUICK
KINDS = [(kind, QUICK) for kind in (*loading.PACKED, *loading.HALVES)]


@pytest.mark.parametrize(("kind", "size"), [*KINDS, ("Q4_K", QUICK.mixture())])
def test_files_are_loaded(kind, size):
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    checkpoint = loading.Checkpoint(kind, size)
    numbers = sum(math.prod(shape) for shape in size.shapes().values() if len(shape) > 1)
    assert checkpoint.path.stat().st_size > numbers / 2
    [case] = (
        it
        for it in loading.cases(QUICK, 1)
        if it.section == loading.SECTION and it.name == f"{kind}, {size.name}"
    )
    # The table takes contenders whose results are equal, and there is nothing to compare.
    contenders, failures = prepare(case)
    assert len(contenders) == 2
    assert not failures
    assert loading.Measured(lambda: 3e6).time(2, 1) == 6


def test_the_peak_of_another_process_is_measured():
    pytest.importorskip("transformers")
    makers = loading.memory_contenders("AWQ", loading.QUICK)
    ours, file = (it().time(1, 1) for it in makers.values())
    assert ours > file > 0
