"""Run cases in worker processes, keep outcomes in a file, and show them."""

import collections
import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# ---------------------------------------------------------------------------------------- processes

# A crash costs one case.


# A suite, a name and a dtype.
Case = tuple[str, ...]
Outcome = str | None

CASE_TIMEOUT = 300
SAVED_EVERY = 30
"""In seconds. On a device that is being brought up each case may crash; a worker starts in 8 s."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Worker:
    """Runs one case after the other in a process, which is replaced after a crash."""

    def __init__(self, device: str, modules: list[str]) -> None:
        self._command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("worker.py"))]
        self._command += [device, *modules]
        self._environment = os.environ | ONE_THREAD
        if device != "foo":
            self._environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        self._process: subprocess.Popen[str] | None = None

    def cases(self) -> list[Case]:
        """Start the process, and return all its cases."""
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=self._environment,
            # Otherwise Ctrl-C would also end the worker, which would look like a crash.
            start_new_session=True,
        )
        answer = self._answer(CASE_TIMEOUT)
        if not isinstance(answer, list):
            command = " ".join(self._command)
            raise RuntimeError(f"conformance: a worker does not start ({answer}): {command}")
        return [tuple(case) for case in answer]

    def run(self, case: Case) -> Outcome:
        """Return None, or an error message."""
        if self._process is None:
            self.cases()
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended
            self._process.stdin.write(json.dumps(case) + "\n")
            self._process.stdin.flush()
        return self._answer(CASE_TIMEOUT)

    def _answer(self, timeout: float) -> Any:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        timer = threading.Timer(timeout, process.kill)
        timer.start()
        line = process.stdout.readline()
        timer.cancel()
        if line:
            return json.loads(line)
        self._process = None
        return f"the process ended with {process.wait()}"

    def interrupt(self) -> None:
        """End the process in the middle of a case."""
        if (process := self._process) is not None:
            process.kill()

    def stop(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()


def run_all(
    selected: list[Case],
    workers: list[Worker],
    outcomes: dict[Case, Outcome],
    save: Callable[[], None],
) -> None:
    """Add the outcomes of the cases, and save them at intervals.

    Ctrl-C drops the cases that are running.
    """
    waiting: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for case in selected:
        waiting.put(case)
    lock, interrupted = threading.Lock(), threading.Event()
    started = saved = time.monotonic()

    def serve(worker: Worker) -> None:
        while not interrupted.is_set():
            try:
                case = waiting.get_nowait()
            except queue.Empty:
                break
            outcome = worker.run(case)
            if not interrupted.is_set():
                keep(case, outcome)
        worker.stop()

    def keep(case: Case, outcome: Outcome) -> None:
        nonlocal saved
        with lock:
            outcomes[case] = outcome
            now = time.monotonic()
            if now - saved > SAVED_EVERY:
                saved = now
                done = len(outcomes) - before
                print(f"{done} of {len(selected)} cases, {now - started:.0f} s", flush=True)
                save()

    before = len(outcomes)
    threads = [threading.Thread(target=serve, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        interrupted.set()
        for worker in workers:
            worker.interrupt()
        raise


# ------------------------------------------------------------------------------------------- scores

# Outcomes in a file; a table of suites, and failures by cause.


KINDS = ("passed", "failed", "cannot")

# The first pattern that matches a message gives its cause.
CAUSES = (
    ("the process ended with -9", "took too long, or memory ran out"),
    ("the process ended with", "crashed"),
    ("NotImplementedError|Could not run|not implemented for", "is not implemented"),
    ("only the cpu raises", "takes what the CPU refuses"),
    ("raises ", "raises an error"),
    ("may be on the CPU|tensor \\d+: ", "tensors of two devices are not refused"),
    ("layout .*, announced", "torch.compile expects another layout"),
    ("draws from the CPU's generator", "draws from the generator of the CPU"),
    ("not close|not equal", "other values"),
    (
        "dtype|layout|requires_grad|shape|strides|number of results|result on",
        "other kind of result",
    ),
)


def cause_of(message: str) -> str:
    return next((cause for pattern, cause in CAUSES if re.search(pattern, message)), "other")


def read_scores(path: Path, device: str, version: str) -> dict[Case, Outcome]:
    """Return the outcomes of an earlier run, if there was one."""
    if not path.exists():
        return {}
    kept = json.loads(path.read_text())
    for what, now in (("device", device), ("torch", version)):
        if kept[what] != now:
            raise ValueError(
                f"conformance: {path} must be a file of {what} {now} to be resumed, got "
                f"{kept[what]}"
            )
    return {tuple(name.split("/")): message for name, message in kept["cases"].items()}


def write_scores(path: Path, device: str, version: str, outcomes: Mapping[Case, Outcome]) -> None:
    cases = {"/".join(case): message for case, message in sorted(outcomes.items())}
    text = json.dumps({"device": device, "torch": version, "cases": cases}, indent=1)
    # Replaced at once: an interrupted run leaves the former file.
    new = path.with_name(path.name + ".new")
    new.write_text(text + "\n")
    new.replace(path)


def read_known(path: Path) -> dict[Case, str]:
    """Read lines such as ``operators/erfinv: why it cannot pass``, with a dtype or without."""
    known = {}
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            name, colon, reason = line.partition(":")
            if not colon or name.count("/") not in (1, 2):
                raise ValueError(
                    f"conformance: {path} must have lines 'suite/name: reason', got {line!r}"
                )
            known[tuple(name.strip().split("/"))] = reason.strip()
    return known


class Report:
    """A summary of outcomes, given the cases that are known not to pass."""

    def __init__(self, outcomes: Mapping[Case, Outcome], known: Mapping[Case, str]) -> None:
        self.counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self.failed: dict[Case, str] = {}
        self.known: dict[Case, str] = {}
        for case, message in sorted(outcomes.items()):
            reason = known.get(case) or known.get(case[:2])
            kind = "passed"
            if reason is not None:
                self.known[case] = reason
                kind = "failed" if message is None else "cannot"
                message = "passes, but is listed as known" if message is None else message
            elif message is not None:
                kind = "failed"
            if kind == "failed":
                assert message is not None
                self.failed[case] = message
            self.counts[case[0], kind] += 1

    def rows(self) -> list[tuple[str, list[int]]]:
        """Return each suite's number of cases, and how many passed, failed and cannot pass."""
        rows = []
        for suite in dict.fromkeys(suite for suite, _ in self.counts):
            numbers = [self.counts[suite, kind] for kind in KINDS]
            rows.append((suite, [sum(numbers), *numbers]))
        return rows

    def print(self) -> None:
        for case, message in self.failed.items():
            print(f"FAILED {'/'.join(case)}: {' '.join(message.split())[:300]}")
        print(f"\n{'':12} {'cases':>7} " + " ".join(f"{kind:>7}" for kind in KINDS))
        for suite, numbers in self.rows():
            print(f"{suite:12} " + " ".join(f"{number:7}" for number in numbers))
        for case, reason in self.known.items():
            print(f"cannot: {'/'.join(case)}: {reason}")

    def page(self, device: str, version: str) -> str:
        """Return a page of Markdown."""
        lines = [f"# Device {device} with PyTorch {version}", ""]
        lines += ["| suite | cases | passed | failed | cannot |", "|---|---:|---:|---:|---:|"]
        for suite, numbers in self.rows():
            lines.append(f"| {suite} | " + " | ".join(map(str, numbers)) + " |")
        causes: dict[str, list[Case]] = collections.defaultdict(list)
        for case, message in self.failed.items():
            causes[cause_of(message)].append(case)
        if causes:
            lines += ["", "## What fails, by cause", ""]
        for cause, cases in sorted(causes.items(), key=lambda item: -len(item[1])):
            names = sorted({"/".join(case[:2]) for case in cases})
            shown = ", ".join(f"`{name}`" for name in names[:20])
            more = f" and {len(names) - 20} more" if len(names) > 20 else ""
            lines.append(f"- **{cause}**: {len(cases)} cases of {shown}{more}")
        if self.known:
            lines += ["", "## What cannot pass", ""]
            lines += [f"- `{'/'.join(case)}`: {why}" for case, why in self.known.items()]
        return "\n".join(lines) + "\n"
