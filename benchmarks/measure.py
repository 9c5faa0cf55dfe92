"""Time several functions that do the same work, in turns."""

from __future__ import annotations

import timeit
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Contenders = Mapping[str, Callable[[], Any]]

# torch.utils.benchmark.Timer calls a function at least twice before each time it takes, which
# would triple the run: here the turns before serve as warm-up.
SECONDS_PER_TURN = 0.01
"""A turn calls its function as often as takes this long, and at least once."""

LARGEST_DIFFERENCE = 0.02
"""Between two results, relative to their norm: bfloat16 stays below, another formula does not."""


@dataclass(frozen=True)
class Case:
    """One line of the benchmark.

    Attributes:
        section: the name of the table that the line stands in, a key of ``report.SECTIONS``.
        name: says what is measured.
        prepare: makes the functions to compare, by name, ours first. Called with the number of
            threads and the context set.
        threads: for torch.set_num_threads.
        work: operations or bytes of a call, where the table shows a rate.
        context: what all functions run in.
        headline: whether the README shows the line.
    """

    section: str
    name: str
    prepare: Callable[[], Contenders]
    threads: int = 1
    work: float = 0.0
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    headline: bool = False


@dataclass(frozen=True)
class Result:
    """What was measured for a case: the seconds of a call for each contender and each round."""

    section: str
    name: str
    threads: int
    work: float
    headline: bool
    seconds: dict[str, list[float]] = field(default_factory=dict)


def measure(case: Case, rounds: int) -> Result:
    torch.manual_seed(0)
    with torch_threads(case.threads), case.context():
        contenders = case.prepare()
        check_agreement(case, contenders)
        timers = {name: timeit.Timer(function) for name, function in contenders.items()}
        calls = {name: calls_per_turn(timer) for name, timer in timers.items()}
        seconds: dict[str, list[float]] = {name: [] for name in timers}
        for _ in range(rounds):
            for name, timer in timers.items():
                seconds[name].append(timer.timeit(calls[name]) / calls[name])
    return Result(case.section, case.name, case.threads, case.work, case.headline, seconds)


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def calls_per_turn(timer: timeit.Timer) -> int:
    calls = 1
    while (seconds := timer.timeit(calls)) < SECONDS_PER_TURN:
        calls = max(2 * calls, int(calls * SECONDS_PER_TURN / seconds))
    return calls


def check_agreement(case: Case, contenders: Contenders) -> None:
    """Call each function, which compiles what is compiled at first use, and compare the results."""
    (ours, expected), *others = [
        (name, tensors(function())) for name, function in contenders.items()
    ]
    for name, results in others:
        for mine, theirs in zip(expected, results, strict=True):
            difference = (mine.cpu() - theirs.cpu()).norm() / theirs.norm().cpu()
            if not difference <= LARGEST_DIFFERENCE:
                raise ArithmeticError(
                    f"{case.name}: {ours} and {name} must agree, but differ by {difference:.2g}"
                )


def tensors(result: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    """The results to compare. They are copied, since an out= variant will overwrite them."""
    parts = (result,) if isinstance(result, Tensor) else result
    return [part.detach().float().clone() for part in parts]
