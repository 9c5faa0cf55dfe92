"""Run the benchmark from the command line."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks import cases, peaks, report, results_file
from benchmarks.awake import processors_awake
from benchmarks.cores import one_core
from benchmarks.first_call import CALLS, measure_first_calls
from benchmarks.measure import THREADS, Limits, Result, measure
from benchmarks.plots import save_plots
from benchmarks.publish import Published, publish
from foo_ops import info

RESULTS = Path("benchmarks/results/latest.json")
WIDTH = 250
"""Width of the tables if the output is not a terminal."""


@dataclass(frozen=True)
class Mode:
    """Sizes, time limits, first calls, and the number of processes for each first call."""

    sizes: cases.Sizes
    limits: Limits
    first_calls: tuple[str, ...]
    processes: int


MODES = {
    "default": Mode(cases.DEFAULT, Limits(rounds=9, turn=0.01, contender=0.3), tuple(CALLS), 3),
    "full": Mode(cases.FULL, Limits(rounds=15, turn=0.02, contender=2.0), tuple(CALLS), 5),
    "quick": Mode(cases.QUICK, Limits(rounds=3, turn=0.002, contender=0.02), tuple(CALLS)[:2], 1),
}


def main() -> None:
    options = parse_options()
    if options.publish:
        publish_figures(options.output, Published(), options.only)
        return
    start = time.monotonic()
    with processors_awake():
        for results, sentence in run(MODES[options.mode], options.only, options.threads):
            results_file.save(options.output, results, options.mode, sentence)
    minutes = (time.monotonic() - start) / 60
    content = results_file.load(options.output)
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    report.print_tables(console, content, with_efficiency=bool(options.threads))
    plots = save_plots(content, options.output.parent)
    for path in (options.output, *(options.output.parent / name for name in plots)):
        console.print(f"Written: {path}", soft_wrap=True)
    console.print(f"Measured in {minutes:.1f} minutes")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure foo_ops beside what a user would call instead. "
        "Takes half an hour on two cores, and saves the results after each table.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    sections = [dashed(name) for name in report.SECTIONS]
    modes = parser.add_mutually_exclusive_group()
    for name, text in (
        ("quick", "small sizes, few rounds, two minutes: to see that it runs"),
        ("full", "longer sequences and more rounds; takes an hour"),
    ):
        modes.add_argument(
            f"--{name}", action="store_const", const=name, dest="mode", default="default", help=text
        )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=sections,
        default=sections,
        metavar="SECTION",
        help="the tables to measure; others that the results file has of this machine stay",
    )
    parser.add_argument(
        "--threads",
        type=thread_counts,
        help="numbers of threads, as in 1,2,4: also print how efficiently rows use them",
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="the results file")
    parser.add_argument(
        "--publish",
        action="store_true",
        help="measure nothing: write the results file's figures into README.md and docs/, "
        "or with --only those of a page that shows no others",
    )
    return parser.parse_args()


def thread_counts(text: str) -> tuple[int, ...]:
    """Read numbers of threads: ``thread_counts("1,2")`` is ``(1, 2)``."""
    processors = info.usable_processors()
    counts = tuple(sorted({int(it) for it in text.split(",")}))
    if counts[0] < 1 or counts[-1] > processors:
        raise argparse.ArgumentTypeError(f"they must be from 1 to {processors}, got {text}")
    return counts


def run(
    mode: Mode, sections: Sequence[str], counts: tuple[int, ...] | None = None
) -> Iterator[tuple[list[Result], str]]:
    """Measure the rows of these tables; yield all results after each table.

    Each yield also has a sentence if two threads get one core only, else an empty one.
    """
    usable = tuple(count for count in THREADS if count <= info.usable_processors())
    threads = counts or usable
    todo = [it for it in cases.cases(mode.sizes, threads, counts) if dashed(it.section) in sections]
    first_calls = mode.first_calls if "first-call" in sections else ()
    rates = peaks.measure_peaks(threads, mode.limits.rounds)
    results = [it for it in rates if dashed(it.section) in sections]
    sentence = one_core(rates, peaks.FMA)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(todo) + len(first_calls))
        for _, table in itertools.groupby(todo, key=lambda case: case.section):
            for case in table:
                progress.update(task, description=f"{case.section}: {case.name}")
                results += measure(case, mode.limits)
                progress.advance(task)
            yield results, sentence
        for name in first_calls:
            progress.update(task, description=f"first call: {name}")
            results.append(measure_first_calls(name, mode.processes))
            progress.advance(task)
    if first_calls or not todo:
        yield results, sentence


def dashed(section: str) -> str:
    """Return a table's name as on the command line."""
    return section.replace(" ", "-")


def publish_figures(path: Path, places: Published, only: Sequence[str]) -> None:
    if not path.is_file():
        sys.exit(f"{path} does not exist: run `make bench` first")
    content = results_file.load(path)
    if content.mode == "quick":
        sys.exit(f"{path} is from a quick run, whose figures are not worth publishing")
    sections = [name for name in report.SECTIONS if dashed(name) in only]
    if missing := [name for name in sections if name not in content.by_section()]:
        sys.exit(f"{path} has no rows of {', '.join(missing)}: run all of `make bench`")
    written = publish(content, places, sections)
    names = " and ".join(path.name for path in written)
    print(f"{names or 'No page'} now has the figures of {path}")


if __name__ == "__main__":
    main()
