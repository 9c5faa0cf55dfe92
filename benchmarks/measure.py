"""Times several functions that do the same work, in turns."""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from benchmarks.workload import Workload
from foo_ops.testing.checks.matrix import threads as torch_threads

OURS = "foo"
LARGEST_DIFFERENCE = 0.02
"""Largest difference of two results, relative to their norm.

Rounding in bfloat16 stays below it, another formula does not.
"""
THREADS = (1, 2)
"""Numbers of threads that rows are measured with unless others are chosen."""
PAUSE = 0.002
"""Seconds before each turn: idle threads of the previous contender spin about half as long.

The pause is a busy loop: after a sleep of that length, the next 50 ms took 1.2 times as long with
AMX.
"""


class Contender(Protocol):
    """One way to do the work of a case."""

    def results(self) -> list[Tensor]:
        """Return the first call's results to compare, in float32 and on the CPU."""

    def time(self, calls: int, threads: int) -> float:
        """Return the seconds of ``calls`` successive calls on ``threads`` threads."""


@runtime_checkable
class Divided(Contender, Protocol):
    """A contender that also measures the parts of a step."""

    def parts(self, threads: int) -> dict[str, float]:
        """Return the seconds of each part, by its name. A profiler may take long to find them."""


Contenders = Mapping[str, Callable[[], Contender]]
Reference = Callable[[int], float]
"""Measures a rate for a number of threads: work per second."""


class Local:
    """A function of this process."""

    def __init__(
        self,
        function: Callable[[], Any],
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        compared: Callable[[Tensor], Tensor] = torch.clone,
    ) -> None:
        self.function = function
        self.context = context
        self.compared = compared
        self.timer = timeit.Timer(function)

    def results(self) -> list[Tensor]:
        with self.context():
            result = self.function()
        parts = (result,) if isinstance(result, Tensor) else result
        # Cloned, since an out= variant will overwrite them.
        return [self.compared(part.detach().cpu().float()) for part in parts]

    def time(self, calls: int, threads: int) -> float:
        with torch_threads(threads), self.context():
            return self.timer.timeit(calls)


def stay_awake() -> None:
    """Wait for PAUSE without letting the processor rest."""
    end = time.perf_counter() + PAUSE
    while time.perf_counter() < end:
        pass


@dataclass(frozen=True)
class Case:
    """Contenders that are measured together: one table row per number of threads.

    Attributes:
        section: the name of the rows' table, a key of ``report.SECTIONS``.
        name: describes the measurement.
        prepare: makes the functions to compare, by name, ours first.
        threads: the numbers of threads, which also take turns.
        work: operations or bytes of a call, if the table shows a rate.
        steps: equal steps of a call, such as tokens: the rows show the seconds of one.
        context: makes the context that all functions run in.
        references: rates, of which the targets are fractions, measured in every round.
        workload: the workload of attention, in its rows.
        repeat: multiplies the rounds, and lets no contender leave early: for calls that fill a turn
            each, where a few percent count.
        least: the target for our speed relative to the best peer, if there is one.
        headline: whether the README shows these rows.
    """

    section: str
    name: str
    prepare: Callable[[], Contenders]
    threads: tuple[int, ...] = (1,)
    work: float = 0.0
    steps: int = 1
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    references: Mapping[str, Reference] = field(default_factory=dict)
    workload: Workload | None = None
    repeat: int = 1
    least: float | None = None
    headline: bool = False


@dataclass(frozen=True)
class Result:
    """A row of a table: the times of a case on a number of threads.

    Attributes:
        seconds: seconds per step, or else per call, for each contender and each of its turns. The
            turns of round i are the i-th of all contenders; a slow contender leaves after fewer
            rounds.
        references: the rates of the case's references, round by round.
        failures: why contenders have no seconds.
        least: the case's target.
    """

    section: str
    name: str
    threads: int
    work: float
    headline: bool
    seconds: dict[str, list[float]] = field(default_factory=dict)
    references: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    workload: Workload | None = None
    least: float | None = None

    def rates(self, name: str) -> list[float]:
        """Return the work per second of a contender, round by round."""
        return [self.work / seconds for seconds in self.seconds[name]]

    def peers(self) -> list[str]:
        return [name for name in self.seconds if name != OURS]


@dataclass(frozen=True)
class Limits:
    """Limits of the time for measuring.

    Attributes:
        rounds: the number of rounds; in each, every contender takes a turn.
        turn: seconds of a turn, which calls its function at least once. A turn of several calls is
            preceded by as many that do not count.
        contender: seconds after which a contender stops, but not before ``fewest`` turns.
        fewest: the fewest turns, enough for a median and its spread.
        long_call: calls that take more seconds than this get a single turn, that of the estimate.
    """

    rounds: int
    turn: float
    contender: float
    fewest: int = 3
    long_call: float = 1.0


class Turns:
    """The turns of one contender on one number of threads."""

    def __init__(self, contender: Contender, threads: int, limits: Limits) -> None:
        self.contender = contender
        self.threads = threads
        self.limits = limits
        self.seconds: list[float] = []
        # Dynamo compiles for each number of threads, which is a constant in the code.
        contender.time(1, threads)
        self.calls, estimate = calls_per_turn(contender, threads, limits.turn)
        self.fewest = limits.fewest
        self.spent = 0.0
        if estimate > limits.long_call:
            self.fewest = 1
            self.add(estimate)

    def take(self) -> None:
        """Take one turn, unless the contender's time is used up."""
        if len(self.seconds) >= self.fewest and self.spent >= self.limits.contender:
            return
        stay_awake()
        if self.calls > 1:
            # Warm-up calls, not counted: the caches still hold another contender's data, and take
            # 20 ms to become ours.
            self.contender.time(self.calls, self.threads)
        self.add(self.contender.time(self.calls, self.threads))

    def add(self, seconds: float) -> None:
        self.seconds.append(seconds / self.calls)
        self.spent += seconds


def calls_per_turn(contender: Contender, threads: int, turn: float) -> tuple[int, float]:
    """Return how many calls fill a turn, and about how many seconds one takes."""
    calls = 1
    while (seconds := contender.time(calls, threads)) < turn:
        calls = max(2 * calls, int(calls * turn / seconds))
    return calls, seconds / calls


def measure(case: Case, limits: Limits) -> list[Result]:
    """Return a result for each number of threads, and behind these the results of parts.

    The order of contenders is reversed in every other round, so that none always precedes or
    follows the same other.
    """
    torch.manual_seed(0)
    if case.repeat > 1:
        rounds = limits.rounds * case.repeat
        limits = replace(limits, rounds=rounds, fewest=rounds)
    with case.context():
        contenders, failures = prepare(case)
        turns = {
            threads: {name: Turns(it, threads, limits) for name, it in contenders.items()}
            for threads in case.threads
        }
        references: dict[int, dict[str, list[float]]] = {
            threads: {name: [] for name in case.references} for threads in case.threads
        }
        for round in range(limits.rounds):
            for threads in case.threads:
                order = list(turns[threads].values())
                for contender in reversed(order) if round % 2 else order:
                    contender.take()
                for name, rate in case.references.items():
                    references[threads][name].append(rate(threads))
        parts = [
            it for threads in case.threads for it in part_results(case, contenders, threads, limits)
        ]
    results = [
        Result(
            case.section,
            case.name,
            threads,
            case.work,
            case.headline,
            {
                name: [each / case.steps for each in it.seconds]
                for name, it in turns[threads].items()
            },
            references[threads],
            failures,
            case.workload,
            case.least,
        )
        for threads in case.threads
    ]
    return results + parts


def part_results(
    case: Case, contenders: Mapping[str, Contender], threads: int, limits: Limits
) -> Iterator[Result]:
    """Return a result for each part of a step, of the contenders that measure parts."""
    divided = {name: it for name, it in contenders.items() if isinstance(it, Divided)}
    rounds = [
        {name: it.parts(threads) for name, it in divided.items()} for _ in range(limits.fewest)
    ]
    for part in dict.fromkeys(part for parts in rounds[0].values() for part in parts):
        seconds = {name: [parts[name][part] for parts in rounds] for name in divided}
        name = f"{case.name}: {part}"
        yield Result(case.section, name, threads, work=0.0, headline=False, seconds=seconds)


def prepare(case: Case) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return the contenders whose results agree with ours, and the reasons why others do not run.

    Raises:
        ArithmeticError: if no peer's results agree with ours.
    """
    contenders: dict[str, Contender] = {}
    results: dict[str, list[Tensor]] = {}
    failures: dict[str, str] = {}
    for name, make in case.prepare().items():
        try:
            contender = make()
            results[name] = contender.results()
        except Exception as error:
            if name == OURS:
                raise
            failures[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
        else:
            contenders[name] = contender
    differences = {
        name: difference(results[OURS], results[name]) for name in results if name != OURS
    }
    wrong = {name: it for name, it in differences.items() if not it <= LARGEST_DIFFERENCE}
    if wrong and len(wrong) == len(differences):
        raise ArithmeticError(f"{case.name}: {OURS} differs from each peer: {wrong}")
    for name, it in wrong.items():
        del contenders[name]
        failures[name] = f"its result differs by {it:.2g} from ours and others"
    return contenders, failures


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Return the largest difference of all tensors, each relative to its norm."""
    return max(
        float((mine - other).norm() / other.norm())
        for mine, other in zip(ours, theirs, strict=True)
    )
