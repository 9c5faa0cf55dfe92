"""The results file, and the tables that are made of it."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import foo_ops
from benchmarks.measure import Result
from foo_ops import info
from foo_ops.kernels.target import vector_bits

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


@dataclass(frozen=True)
class Section:
    """A table. ``unit`` names a time (us, ms) or a rate (GB/s, GFLOP/s)."""

    title: str
    unit: str


# A ratio is that of the figures shown, so the titles say which way is better.
SECTIONS = {
    "calls": Section("A call with 8 floats, microseconds (less is better)", "us"),
    "abs": Section("Elementwise, GB/s of memory read and written (more is better)", "GB/s"),
    "attention forward": Section(
        "Attention forward, 8 heads of 64, GFLOP/s (more is better)", "GFLOP/s"
    ),
    "attention backward": Section(
        "Attention backward, 8 heads of 64, GFLOP/s (more is better)", "GFLOP/s"
    ),
    "first call": Section(
        "First call in a process, milliseconds: warm with the kernels on disk, cold without", "ms"
    ),
}
SECONDS_IN_UNIT = {"us": 1e-6, "ms": 1e-3}


# ---------------------------------------------------------------------------------- results file


def machine() -> dict[str, str]:
    """What the figures depend on."""
    return {
        "processor": info.known(info.processor_name),
        "llvm target": info.known(info.llvm_target),
        "vector units": info.known(info.vector_units),
        "vector bits": str(vector_bits()),
        "processors": str(info.usable_processors()),
        "system": platform.platform(),
        "python": platform.python_version(),
        "foo_ops": foo_ops.__version__,
        "torch": torch.__version__,
        "numba": importlib.metadata.version("numba"),
        "llvmlite": importlib.metadata.version("llvmlite"),
    }


def save(path: Path, results: Sequence[Result], quick: bool) -> None:
    content = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "quick": quick,
        "machine": machine(),
        "results": [dataclasses.asdict(result) for result in results],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def load(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text())
    return {**content, "results": [Result(**result) for result in content["results"]]}


def caption(content: dict[str, Any]) -> str:
    """Say what the tables show, and where it was measured."""
    machine = content["machine"]
    versions = ", ".join(
        f"{name} {machine[name]}" for name in ("foo_ops", "torch", "numba", "llvmlite")
    )
    rounds = sorted(
        {len(times) for result in content["results"] for times in result.seconds.values()}
    )
    return (
        f"{machine['processor']}, vectors of {machine['vector bits']} bits, "
        f"{machine['processors']} processors; {versions}; Python {machine['python']}; "
        f"{content['date'][:10]}. Medians of {' or '.join(map(str, rounds))} rounds in which all "
        "contenders take turns; the ratio is taken round by round, with its quartiles in brackets."
    )


# ---------------------------------------------------------------------------------------- tables


def header(results: Sequence[Result]) -> list[str]:
    ours, *peers = results[0].seconds
    columns = ["case", "threads", ours]
    for peer in peers:
        columns += [peer, f"{ours} / {peer}"]
    return columns


def row(result: Result, unit: str) -> list[str]:
    ours, *peers = [
        [figure(seconds, result.work, unit) for seconds in times]
        for times in result.seconds.values()
    ]
    cells = [result.name, str(result.threads), number(statistics.median(ours))]
    for peer in peers:
        cells += [number(statistics.median(peer)), ratio(ours, peer)]
    return cells


def figure(seconds: float, work: float, unit: str) -> float:
    if unit in SECONDS_IN_UNIT:
        return seconds / SECONDS_IN_UNIT[unit]
    return work / seconds / 1e9


def number(value: float) -> str:
    """Three significant digits: 1.23, 12.3, 123, 1234."""
    digits = max(0, 2 - (len(str(int(value))) - 1))
    return f"{value:.{digits}f}"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    ratios = [mine / other for mine, other in zip(ours, theirs)]
    if len(ratios) == 1:
        return f"{ratios[0]:.2f}"
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def by_section(results: Sequence[Result]) -> dict[str, list[Result]]:
    return {
        name: rows
        for name in SECTIONS
        if (rows := [result for result in results if result.section == name])
    }


def print_tables(console: Console, content: dict[str, Any]) -> None:
    for name, results in by_section(content["results"]).items():
        section = SECTIONS[name]
        table = Table(title=section.title, title_justify="left", title_style="bold")
        for column in header(results):
            table.add_column(column, justify="left" if column == "case" else "right")
        for result in results:
            table.add_row(*row(result, section.unit))
        console.print(table)
    console.print(caption(content))


# ---------------------------------------------------------------------------------------- README


def markdown(content: dict[str, Any]) -> str:
    """The headline rows as Markdown."""
    parts = []
    headlines = [result for result in content["results"] if result.headline]
    for name, results in by_section(headlines).items():
        section = SECTIONS[name]
        columns = header(results)
        lines = [columns, ["---", *["---:"] * (len(columns) - 1)]]
        lines += [row(result, section.unit) for result in results]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        parts.append(f"**{section.title}**\n\n{table}")
    return "\n\n".join([*parts, caption(content)])


def rewrite_readme(path: Path, content: dict[str, Any]) -> None:
    """Put the headline rows between the two marks."""
    text = path.read_text()
    before, found_begin, rest = text.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not (found_begin and found_end):
        raise ValueError(f"{path} must have the marks {BEGIN} and {END}")
    path.write_text(f"{before}{BEGIN}\n\n{markdown(content)}\n\n{END}{after}")
