"""Reads and writes the results file."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import machine_facts
from benchmarks.measure import Result
from benchmarks.sections import SECTIONS
from benchmarks.workload import Workload


@dataclass(frozen=True)
class Content:
    """The contents of a results file."""

    date: str
    mode: str
    machine: dict[str, str]
    results: list[Result]
    one_core: str = ""
    """A sentence if two threads get one core only, else empty."""

    def is_like(self, other: Content) -> bool:
        """Return whether both have the same machine, versions and mode."""
        facts = (self.machine, self.mode, self.one_core)
        return facts == (other.machine, other.mode, other.one_core)

    def is_judged(self, result: Result) -> bool:
        """Return whether the row is judged; rows of threads that share a core are not."""
        return result.threads == 1 or not self.one_core

    def one_thread(self, result: Result) -> Result | None:
        """Return the row of one thread that a row of several threads is compared with."""
        return None if result.threads == 1 else self.on_threads(result, 1)

    def on_threads(self, result: Result, threads: int) -> Result | None:
        """Return the row of the same case with this number of threads."""
        key = (result.section, result.name, threads)
        rows = [it for it in self.results if (it.section, it.name, it.threads) == key]
        return rows[0] if rows else None

    def by_section(self, headline: bool = False) -> dict[str, list[Result]]:
        """Return the rows of each table; with ``headline`` those that the README shows."""
        found: dict[str, list[Result]] = {}
        for name in SECTIONS:
            rows = [it for it in self.results if it.section == name and it.headline >= headline]
            if rows:
                found[name] = rows
        return found

    def failures(self) -> list[str]:
        """List the contenders that were missing, with reasons and numbers of rows."""
        reasons = [
            f"{name}: {reason}" for it in self.results for name, reason in it.failures.items()
        ]
        return [f"{reason} ({reasons.count(reason)} rows)" for reason in dict.fromkeys(reasons)]


def save(path: Path, results: Sequence[Result], mode: str, one_core: str = "") -> None:
    """Write results; other tables in the file, of this machine and mode, are kept."""
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    content = Content(date, mode, machine_facts(), list(results), one_core)
    if path.is_file() and (earlier := load(path)).is_like(content):
        measured = {result.section for result in results}
        kept = [it for it in earlier.results if it.section not in measured]
        content = dataclasses.replace(content, results=[*kept, *results])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dataclasses.asdict(content), indent=1) + "\n")


def load(path: Path) -> Content:
    content = json.loads(path.read_text())
    return Content(**{**content, "results": [result_of(row) for row in content["results"]]})


def result_of(row: dict[str, Any]) -> Result:
    workload = row["workload"] and Workload(**row["workload"])
    return Result(**{**row, "workload": workload})
