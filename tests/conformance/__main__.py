"""Compare PyTorch's own operators, modules and optimizers on foo with the CPU.

``python tests/conformance`` runs all in worker processes, so that a crash is one failure, and ends
with a table. ``--only PATTERN`` runs the cases whose ``suite/name/dtype`` it matches.
"""

import argparse
import collections
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
import traceback

CASE_TIMEOUT = 300


def work() -> None:
    """Work: read one case a line, and write one outcome a line."""
    import cases

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what torch prints must not mix with the answers
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        try:
            cases.run(cases.Case(*json.loads(line)))
            message = None
        except Exception as error:
            message = str(error) or traceback.format_exc()
        print(json.dumps(message), file=answers)


class Worker:
    """Runs one case after the other in a process, which is replaced after a crash."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def run(self, case: tuple[str, ...]) -> str | None:
        """Return None, or what went wrong."""
        if self.process is None:
            self._start()
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        return self._answer(CASE_TIMEOUT)

    def _start(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        assert self._answer(CASE_TIMEOUT) == "ready", "conformance: a worker does not start"

    def _answer(self, timeout: float) -> str | None:
        process = self.process
        assert process is not None
        assert process.stdout is not None
        timer = threading.Timer(timeout, process.kill)
        timer.start()
        line = process.stdout.readline()
        timer.cancel()
        if line:
            return json.loads(line)
        self.process = None
        return f"the process ended with {process.wait()}"

    def stop(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait()


def run_all(selected: list[tuple[str, ...]], processes: int) -> dict[tuple[str, ...], str | None]:
    waiting: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()
    for case in selected:
        waiting.put(case)
    outcomes: dict[tuple[str, ...], str | None] = {}
    started = time.monotonic()

    def serve() -> None:
        worker = Worker()
        while True:
            try:
                case = waiting.get_nowait()
            except queue.Empty:
                break
            outcomes[case] = worker.run(case)
            if len(outcomes) % 500 == 0:
                passed = time.monotonic() - started
                print(f"{len(outcomes)} of {len(selected)} cases, {passed:.0f} s", flush=True)
        worker.stop()

    threads = [threading.Thread(target=serve) for _ in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def reason_of(case: tuple[str, ...]) -> str | None:
    from known import KNOWN

    return KNOWN.get(case) or KNOWN.get(case[:2])


def report(outcomes: dict[tuple[str, ...], str | None]) -> bool:
    """Print the failures and the table; return whether all is as it should be."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    known = {}
    for case, message in sorted(outcomes.items()):
        reason = reason_of(case)
        kind = "passed" if message is None else "failed"
        if reason is not None:
            kind = "cannot" if message is not None else "failed"
            known[case] = reason
            message = message and None if kind == "cannot" else "passes, but is listed as known"
        counts[case[0], kind] += 1
        if kind == "failed":
            print(f"FAILED {'/'.join(case)}: {' '.join(str(message).split())[:300]}")
    print(f"\n{'':12} {'cases':>7} {'passed':>7} {'failed':>7} {'cannot':>7}")
    for suite in dict.fromkeys(suite for suite, _ in counts):
        numbers = [counts[suite, kind] for kind in ("passed", "failed", "cannot")]
        print(f"{suite:12} " + " ".join(f"{number:7}" for number in (sum(numbers), *numbers)))
    for case, reason in known.items():
        print(f"cannot: {'/'.join(case)}: {reason}")
    return all(kind != "failed" for _, kind in counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a pattern for suite/name/dtype")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work()
        return
    import cases

    selected = [
        tuple(case) for case in cases.all_cases() if re.search(arguments.only, "/".join(case))
    ]
    started = time.monotonic()
    outcomes = run_all(selected, arguments.processes)
    is_good = report(outcomes) and bool(selected)
    print(f"{time.monotonic() - started:.0f} s, {arguments.processes} processes")
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
