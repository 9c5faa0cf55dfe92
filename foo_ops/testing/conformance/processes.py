"""Run cases in worker processes, so that a crash costs one case."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
