"""Times the examples fairly, and prints tables."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 96
"""Width of tables in characters, also for logs, which have no console width."""


def positive(text: str) -> int:
    """Read a whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text}")
    return int(text)


def median_seconds(contenders: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Time functions that do the same work.

    They take turns, so that a noisy neighbour slows them all. The first round loads or compiles
    kernels and is not counted.
    """
    durations: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, function in contenders.items():
            start = time.perf_counter()
            function()
            durations[name].append(time.perf_counter() - start)
    return {name: statistics.median(column[1:]) for name, column in durations.items()}


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; all columns but the first are aligned to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for position, column in enumerate(header):
        table.add_column(column, justify="right" if position else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=WIDTH, markup=False, highlight=False).print(table)
