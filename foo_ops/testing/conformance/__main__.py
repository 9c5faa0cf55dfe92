"""Compare PyTorch's own operators, modules and optimizers on a device with the CPU."""

import argparse
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from foo_ops.testing.conformance.scores import (
    Case,
    Outcome,
    Report,
    Worker,
    read_known,
    read_scores,
    run_all,
    write_scores,
)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m foo_ops.testing.conformance", description=__doc__.splitlines()[0]
    )
    result.add_argument("--device", default="foo", help="the device to compare with the CPU")
    result.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module to import first, which registers the device",
    )
    result.add_argument(
        "--out", type=Path, help="a file for the outcomes; a second run resumes from the file"
    )
    result.add_argument("--page", type=Path, help="a file for a page with the scores")
    result.add_argument(
        "--only",
        type=expression,
        default="",
        help="a regular expression: run the cases whose suite/name/dtype matches",
    )
    result.add_argument(
        "--skip", type=expression, help="a regular expression: leave out the cases that match"
    )
    result.add_argument("--known", type=Path, help="a file with lines 'suite/name: reason'")
    result.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    return result


def expression(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(
            f"must be a regular expression, got {text!r}: {error}"
        ) from error


def run(arguments: argparse.Namespace, known: Mapping[Case, str]) -> bool:
    """Run the selected cases, print the outcomes, and return whether all are as expected."""
    started = time.monotonic()
    device, out = arguments.device, arguments.out
    kept = read_scores(out, device, torch.__version__) if out else {}
    workers = [Worker(device, arguments.modules) for _ in range(arguments.processes)]
    cases = workers[0].cases()
    selected = [case for case in cases if arguments.only.search("/".join(case))]
    if arguments.skip:
        selected = [case for case in selected if not arguments.skip.search("/".join(case))]
    if not selected:
        sys.exit(f"conformance: --only and --skip leave none of the {len(cases)} cases")
    outcomes: dict[Case, Outcome] = dict(kept)

    def save() -> None:
        if out:
            write_scores(out, device, torch.__version__, outcomes)

    try:
        run_all([case for case in selected if case not in kept], workers, outcomes, save)
    except KeyboardInterrupt:
        done = len(outcomes.keys() & set(selected))
        sys.exit(f"conformance: interrupted after {done} of {len(selected)} cases")
    finally:
        save()
    report = Report({case: outcomes[case] for case in selected}, known)
    report.print()
    if arguments.page:
        arguments.page.write_text(report.page(device, torch.__version__))
    print(f"{time.monotonic() - started:.0f} s, {arguments.processes} processes")
    return not report.failed


def main() -> None:
    arguments = parser().parse_args()
    known = read_known(arguments.known) if arguments.known else {}
    sys.exit(not run(arguments, known))


if __name__ == "__main__":
    main()
