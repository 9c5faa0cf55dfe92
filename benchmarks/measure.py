"""Time several functions that do the same work, in turns."""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.workload import Workload

OURS = "foo"
LARGEST_DIFFERENCE = 0.02
"""Between two results, relative to their norm: bfloat16 stays below, another formula does not."""
THREADS = (1, 2)
"""The numbers of threads that rows are measured on, as far as there are processors."""
PAUSE = 0.002
"""Before each turn, in seconds: idle threads of the contender before spin about half as long.

It is spent in a loop: after a sleep of as long, the next 50 ms took 1.2 times as long with AMX."""


class Contender(Protocol):
    """One way to do the work of a case."""

    def results(self) -> list[Tensor]:
        """Return the results of the first call that are compared, in float32 and on the CPU."""

    def time(self, calls: int, threads: int) -> float:
        """Return the seconds of so many calls in a row on so many threads."""


Contenders = Mapping[str, Callable[[], Contender]]
Reference = Callable[[int], float]
"""From a number of threads to a rate, measured now: work per second."""


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


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Case:
    """The contenders that are measured together: one row of a table for each number of threads.

    Attributes:
        section: the name of the table that the rows stand in, a key of ``report.SECTIONS``.
        name: says what is measured.
        prepare: makes the functions to compare, by name, ours first.
        threads: the numbers of threads, which take turns, too.
        work: operations or bytes of a call, where the table shows a rate.
        context: what all functions run in.
        references: rates that the targets are fractions of, measured in every round.
        workload: what attention works on, in its rows.
        repeat: how many times the usual rounds, and no contender leaves early: for calls that fill
            a turn each, where a few percent count.
        least: how many times as fast as its only peer ours is to be, where that is asked.
        headline: whether the README shows the rows.
    """

    section: str
    name: str
    prepare: Callable[[], Contenders]
    threads: tuple[int, ...] = (1,)
    work: float = 0.0
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
        seconds: of a call, for each contender and each turn it took. The turns of round i are the
            i-th of all contenders; a slow contender leaves after fewer rounds.
        references: the rates of the case's references, round by round.
        failures: why a contender has no seconds.
        least: the case's.
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
    """How long measuring may take.

    Attributes:
        rounds: in each of which every contender takes a turn.
        turn: a turn calls its function as often as takes so many seconds, and at least once. Before
            several calls as many are made that do not count.
        contender: seconds after which a contender leaves, but not before ``fewest`` turns.
        fewest: turns for a median and its spread.
        long_call: a call that takes more seconds than this gets a single turn, the one that has
            shown how long it takes.
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
        self.calls, estimate = calls_per_turn(contender, threads, limits.turn)
        self.fewest = limits.fewest
        self.spent = 0.0
        if estimate > limits.long_call:
            self.fewest = 1
            self.add(estimate)

    def take(self) -> None:
        """Take one turn, unless the contender has had its time."""
        if len(self.seconds) >= self.fewest and self.spent >= self.limits.contender:
            return
        stay_awake()
        if self.calls > 1:
            # As many that do not count: the caches are still those of another contender, and take
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
    """Return a result for each number of threads.

    The contenders go in one order in every other round and the other way round in between, so that
    none is always the one before another or after it.
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
    return [
        Result(
            case.section,
            case.name,
            threads,
            case.work,
            case.headline,
            {name: it.seconds for name, it in turns[threads].items()},
            references[threads],
            failures,
            case.workload,
            case.least,
        )
        for threads in case.threads
    ]


def prepare(case: Case) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return the contenders whose results agree with ours, and why the others do not take part.

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
    """Return the largest of all tensors' differences, each relative to its norm."""
    return max(
        float((mine - other).norm() / other.norm())
        for mine, other in zip(ours, theirs, strict=True)
    )
