"""The table of loading: its files can be read, and their sizes are those of 4 bits."""

import pytest

from benchmarks import loading
from benchmarks.measure import prepare

KINDS = (*loading.PACKED, *loading.HALVES)


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_loaded(kind):
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    checkpoint = loading.Checkpoint(kind, loading.QUICK)
    numbers = sum(
        rows * columns[0] for rows, *columns in loading.QUICK.shapes().values() if columns
    )
    size = checkpoint.path.stat().st_size
    assert size > numbers / 2
    [case] = (
        it
        for it in loading.cases(loading.QUICK, 1)
        if it.section == loading.SECTION and it.name.startswith(kind)
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
