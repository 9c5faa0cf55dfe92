"""Compare models of transformers with themselves after `apply`: ``make test-models``.

    python tests/models.py [--only PATTERN ...] [--part K/N] [--list] [--publish]

Makes a small model with random weights of every model type of the installed transformers for which
this is possible: the base model and one with a head. Hidden states, gradients and generated tokens
in float32 are compared with float64, without padding and with padding on both sides. Models that
cannot be made are listed with the reason. ``--publish`` writes the table of docs/transformers.md.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from support.parts import part, part_of

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "build" / "models.json"
WORKERS = 2
SECONDS = 60
"""CPU seconds for all classes of a model type; then a signal ends the process."""
WAITING = 900
"""Wall-clock seconds after which a process without an answer is killed."""
MEMORY = 8 << 30
"""Bytes of a worker's address space, mostly for libraries."""


class Worker:
    """A process that checks one model type after another, and is replaced when it dies."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def check(self, model_type: str) -> list[dict[str, Any]]:
        """Return the rows of a model type; crashes and timeouts give rows, too."""
        process = self.started()
        assert process.stdin is not None
        rows: list[dict[str, Any]] = []
        try:
            process.stdin.write(f"{model_type}\n")
            process.stdin.flush()
            for row in self.answers(process):
                rows.append(row)
        except (EOFError, BrokenPipeError) as error:
            self.stop()
            rows.append({"type": model_type, "class": "", "verdict": "ended", "reason": f"{error}"})
        return rows

    def started(self) -> subprocess.Popen[str]:
        if self.process is None or self.process.poll() is not None:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, "--worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                text=True,
                cwd=REPOSITORY,
            )
        return self.process

    def answers(self, process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
        """Yield a worker's answers to one question, until an empty one."""
        assert process.stdout is not None
        timer = threading.Timer(WAITING, process.kill)
        timer.start()
        try:
            for line in process.stdout:
                if not (row := json.loads(line)):
                    return
                yield row
        finally:
            timer.cancel()
        code = process.wait()
        slow = code == -signal.SIGPROF
        raise EOFError(f"takes more than {SECONDS} s" if slow else f"ended with {code}")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def work() -> None:
    """Read model types from standard input; answer each with rows, then an empty one."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    # Models that print must not write between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Importing transformers' models takes seconds; only workers need them.
    import torch
    from support.model_zoo.checks import check
    from support.model_zoo.classes import classes_of

    torch.set_num_threads(1)
    for line in sys.stdin:
        model_type = line.strip()
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        for row in rows_of(model_type, classes_of, check):
            print(json.dumps(row), file=answers, flush=True)
        print("{}", file=answers, flush=True)


def rows_of(model_type: str, classes_of: Any, check: Any) -> Iterator[dict[str, Any]]:
    not_made = {"type": model_type, "class": "", "verdict": "not made"}
    try:
        kinds = classes_of(model_type)
    except Exception as error:
        yield not_made | {"reason": f"import: {error}"}
        return
    if not kinds:
        yield not_made | {"reason": "no model has this configuration"}
    for kind in kinds:
        start = time.monotonic()
        try:
            row = check(model_type, kind)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:300]
            row = {"type": model_type, "class": kind.__name__, "verdict": "raises"}
            row["reason"] = reason
        yield row | {"seconds": round(time.monotonic() - start, 1)}


def check_all(types: Sequence[str], workers: int = WORKERS) -> Iterator[dict[str, Any]]:
    """Yield the rows of the model types, in the order of ``types``."""
    free = [Worker() for _ in range(workers)]

    def check(model_type: str) -> list[dict[str, Any]]:
        worker = free.pop()
        try:
            return worker.check(model_type)
        finally:
            free.append(worker)

    try:
        with ThreadPoolExecutor(workers) as pool:
            for rows in pool.map(check, types):
                yield from rows
    finally:
        for worker in free:
            worker.stop()


def is_wrong(row: dict[str, Any]) -> bool:
    return row["verdict"] in ("differs", "raises", "ended")


def line_of(row: dict[str, Any]) -> str:
    replaced = ", ".join(f"{name} {count}" for name, count in row.get("replaced", {}).items())
    name = f"{row['type']} {row['class']}".strip()
    return f"{name}: {row['verdict']}" + "".join(
        f"; {it}" for it in (replaced, row.get("reason", "")) if it
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="model types, as in a shell")
    parser.add_argument("--part", type=part, metavar="K/N", help="the Kth of N parts, from 1")
    parser.add_argument("--list", action="store_true", help="only the names of the model types")
    parser.add_argument("--publish", action="store_true", help="write docs/transformers.md")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return 0
    if options.publish and (options.only or options.part):
        parser.error("--publish must be without --only and --part: the table has all models")
    # Imported here: a worker closes its standard output before it imports.
    from support.model_zoo.classes import model_types
    from support.model_zoo.table import publish

    types = model_types()
    if options.only:
        types = [it for it in types if any(fnmatch.fnmatch(it, one) for one in options.only)]
    if options.part:
        types = part_of(types, options.part)
    if options.list:
        print(*types, sep="\n")
        return 0
    rows = []
    for row in check_all(types):
        print(line_of(row), flush=True)
        rows.append(row)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(rows, indent=1))
    verdicts = Counter(row["verdict"] for row in rows)
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    if options.publish:
        publish(rows)
    return 1 if any(map(is_wrong, rows)) else 0


if __name__ == "__main__":
    sys.exit(main())
