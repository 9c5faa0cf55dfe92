"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks import report
from benchmarks.cases import cases
from benchmarks.first_call import CALLS, REPOSITORY, measure_first_calls
from benchmarks.measure import Result, measure
from foo_ops import info

README = REPOSITORY / "README.md"
RESULTS = Path("benchmarks/results/latest.json")
ROUNDS, QUICK_ROUNDS = 9, 3
PROCESS_ROUNDS, QUICK_PROCESS_ROUNDS = 3, 1


def main() -> None:
    options = parse_options()
    if options.readme:
        write_readme(options.output)
        return
    results = run(options.quick)
    report.save(options.output, results, options.quick)
    console = Console()
    report.print_tables(console, report.load(options.output))
    console.print(f"Results file: {options.output}", soft_wrap=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure foo_ops beside what a user would call instead.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="small sizes, few rounds: to see that it runs")
    add("--output", type=Path, default=RESULTS, help="the results file")
    add(
        "--readme",
        action="store_true",
        help="measure nothing: write the figures of the results file into README.md",
    )
    return parser.parse_args()


def run(quick: bool) -> list[Result]:
    progress = Console(stderr=True)
    rounds = QUICK_ROUNDS if quick else ROUNDS
    process_rounds = QUICK_PROCESS_ROUNDS if quick else PROCESS_ROUNDS
    todo = cases(quick, info.usable_processors())
    results = [
        measure(case, rounds) for case in track(todo, "Operators", console=progress, transient=True)
    ]
    results += [
        measure_first_calls(name, process_rounds)
        for name in track(CALLS, "First calls", console=progress, transient=True)
    ]
    return results


def write_readme(results_file: Path) -> None:
    if not results_file.is_file():
        sys.exit(f"{results_file} does not exist: run `make bench` first")
    content = report.load(results_file)
    if content["quick"]:
        sys.exit(f"{results_file} is from a quick run, whose figures are not worth publishing")
    report.rewrite_readme(README, content)
    print(f"{README.name} now has the figures of {results_file}")


if __name__ == "__main__":
    main()
