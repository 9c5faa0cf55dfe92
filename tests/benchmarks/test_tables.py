"""The benchmark's terminal tables: nothing is cut off, and each compares like with like."""

import io

import pytest
from rich.console import Console

from benchmarks import report, results_file
from benchmarks.measure import Result
from benchmarks.models import SECTION

CONTENDERS = (
    "foo", "torch", "llama.cpp", "compiled",
    *(f"{name}, {bits} bits" for name in ("foo", "llama.cpp") for bits in (8, 4)),
)  # fmt: skip


@pytest.fixture
def result():
    """Make a row whose n-th contender takes n seconds for 840 tokens."""
    seconds = {name: [place + 1.0] * 3 for place, name in enumerate(CONTENDERS)}
    return Result(SECTION, "Llama training step, bfloat16", 2, 840.0, True, seconds)


def test_options_are_compared_with_the_same_options(result):
    header, row = report.table_of(None, SECTION, [result])
    figures = dict(zip(header, row, strict=True))
    assert figures["foo / torch"].startswith("2.00")
    assert figures["foo / llama.cpp"].startswith("3.00")
    assert figures["foo, 8 bits / llama.cpp, 8 bits"].startswith("1.40")
    assert figures["foo, 4 bits / llama.cpp, 4 bits"].startswith("1.33")
    assert len(header) == 2 + len(CONTENDERS) + 5


@pytest.mark.parametrize("width", [70, 120, 200, 250])
def test_tables_fit_the_terminal(result, width):
    """Columns that do not fit go to another table below."""
    machine = dict.fromkeys(results_file.machine_facts(), "known")
    content = results_file.Content("2026-01-01", "default", machine, [result], None)
    console = Console(width=width, record=True, file=io.StringIO())
    report.print_tables(console, content)
    lines = console.export_text().splitlines()
    assert "apply makes slower:" in lines
    row = report.table_of(content, SECTION, [result])[1]
    tables = [line for line in lines if line.startswith("│")]
    assert len(tables) == sum(line.startswith("┏") for line in lines) > (width < 250)
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in tables]
    assert all(part[:2] == row[:2] for part in cells)
    assert [cell for part in cells for cell in part[2:]] == row[2:]
    assert all(len(line) <= width for line in lines)
