"""Targets, and verdicts of rows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks import device, experts, linear, models, quantized_linear
from benchmarks.measure import OURS, Result
from benchmarks.peaks import FMA, MATRIX, READ

PEAK_FRACTIONS = {
    ("float32", "forward", "dense"): 0.82,
    ("float32", "forward", "causal"): 0.75,
    ("bfloat16", "forward", "dense"): 0.70,
    ("bfloat16", "forward", "causal"): 0.62,
    ("float32", "backward", "dense"): 0.75,
    ("float32", "backward", "causal"): 0.65,
    ("bfloat16", "backward", "dense"): 0.55,
    ("bfloat16", "backward", "causal"): 0.48,
}
"""Fractions of the peak on one thread, for lengths from `SHORTEST` and `HEAD_DIMS`, no options.

Useful work counts. The peak is that of vectors: a matrix unit finishes the products of a tile
before the vectors finish its exponentials, so there is no target for it.
"""
SHORTEST = 512
HEAD_DIMS = (64, 128)
FLOAT32 = "our float32"
FLOAT16_FRACTION = 0.9
"""Forward, of our own speed in float32."""
READ_FRACTION = 0.80
"""Fraction of the read bandwidth, with as many threads, in decoding with `DECODING_LENGTH` keys."""
DECODING_LENGTH = 8192
SHORT_SPEEDUP = 1.5
"""Speedup over torch's flash attention, forward, for `SHORT_LENGTH` and a head dimension of 64."""
SHORT_LENGTH = 128
SCALING = 1.85
"""Speedup of two threads over one."""
FIRST_CALL_SECONDS = {"warm": 0.05, "cold": 2.0}
"""Seconds with the compiled kernel on disk, and without."""

LEAST_OF_MODEL = 0.97
"""With `apply`, a speed below this fraction of the model's own is slower, beyond noise."""

DEVICE_LIMITS: dict[str, Callable[[float], float]] = {
    device.FALLBACK: lambda cpu: cpu + 1.5e-6,
    device.ALLOCATION: lambda cpu: 0.5e-6,
    device.TRAINING: lambda cpu: cpu,
}
"""Limits of the seconds of a call on foo, given those of the same call on the CPU."""
DEVICE_SPEEDUP = 4.0
"""Speedup over the CPU where the CPU has page faults for each large result."""


@dataclass(frozen=True)
class Requirement:
    """Requires our rate to be at least ``least`` times another.

    ``measured`` has the ratio of each round, of rates measured in that round.
    """

    reference: str
    least: float
    measured: list[float]

    def shortfall(self) -> str:
        """Describe by how much it is missed; empty if it is met."""
        middle = statistics.median(self.measured)
        if middle >= self.least:
            return ""
        return f"short of {self.least:.2f} x {self.reference} by {1 - middle / self.least:.1%}"


def requirements(result: Result, one_thread: Result | None) -> list[Requirement]:
    """List a row's requirements besides its peers; ``one_thread`` is its row for one thread."""
    workload = result.workload
    if result.section == experts.FEW_TOKENS:
        return [Requirement(READ, experts.READ_TARGET, fractions(result, READ))]
    if workload is None:
        return []
    found = []
    if workload.is_decoding:
        if workload.key_length == DECODING_LENGTH and workload.dtype != "float16":
            found.append(Requirement(READ, READ_FRACTION, fractions(result, READ)))
        return found
    if result.threads == 1:
        if workload.has_no_options:
            found += one_thread_requirements(result)
    elif one_thread is not None and result.threads == 2:
        scaling = ratios(result.rates(OURS), one_thread.rates(OURS))
        found.append(Requirement("one thread", SCALING, scaling))
    return found


def one_thread_requirements(result: Result) -> list[Requirement]:
    workload = result.workload
    assert workload is not None
    found = []
    long = workload.query_length >= SHORTEST and workload.head_dim in HEAD_DIMS
    peak = peak_of(result)
    # Without units for bfloat16, the target is that of float32.
    dtype = "float32" if peak == FMA and workload.dtype == "bfloat16" else workload.dtype
    least = PEAK_FRACTIONS.get((dtype, workload.direction, workload.mask))
    if long and least is not None and workload.dtype != "float16" and peak != MATRIX:
        found.append(Requirement(peak, least, fractions(result, peak)))
    if long and FLOAT32 in result.references:
        measured = fractions(result, FLOAT32)
        found.append(Requirement(FLOAT32, FLOAT16_FRACTION, measured))
    short = (workload.query_length, workload.head_dim) == (SHORT_LENGTH, 64)
    if short and not workload.is_backward and workload.dtype != "float16":
        measured = speedups(result, "flash")
        found.append(Requirement("flash", SHORT_SPEEDUP, measured))
    return found


def target(result: Result) -> float | None:
    """Return the row's target as a fraction of the peak, if it has one."""
    peak = peak_of(result)
    for requirement in requirements(result, None):
        if requirement.reference == peak:
            return requirement.least
        if requirement.reference == FLOAT32:
            float32 = ratios(result.references[FLOAT32], result.references[peak])
            return requirement.least * statistics.median(float32)
    return None


def peak_of(result: Result) -> str:
    """Return the reference that is a peak of the machine."""
    return next(name for name in result.references if name != FLOAT32)


def fractions(result: Result, reference: str) -> list[float]:
    """Return our rate as a fraction of a reference, round by round."""
    return ratios(result.rates(OURS), result.references[reference])


def ratios(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    """Divide round by round, as long as both have rounds."""
    return [mine / other for mine, other in zip(ours, others)]


def speedups(result: Result, peer: str) -> list[float]:
    """Return our speed relative to the peer, round by round.

    Computed from seconds, since the work is the same for both, and rows that are only timed have
    none.
    """
    return ratios(result.seconds[peer], result.seconds[OURS])


def best_peer(result: Result) -> str | None:
    """Return the peer with the fastest median."""
    return min(
        result.peers(), key=lambda name: statistics.median(result.seconds[name]), default=None
    )


def against_peer(result: Result) -> str:
    """Describe by how much a peer is faster than ours; empty if none is.

    A peer that is faster in the median, but not in three of four rounds, is level with ours.
    """
    peer = best_peer(result)
    if peer is None:
        return ""
    _, middle, high = quartiles(speedups(result, peer))
    if middle >= 1:
        return ""
    if high >= 1:
        return f"level with {peer}"
    return f"slower than {peer} by {1 - middle:.1%}"


def verdict(result: Result, one_thread: Result | None) -> str:
    """Return ``reached``, or all targets that the row misses."""
    parts = [it.shortfall() for it in requirements(result, one_thread)]
    parts.append(against_peer(result))
    return "; ".join(filter(None, parts)) or "reached"


def linear_target(result: Result) -> float:
    """Return the target of a row of linear layers, as a fraction of the peak."""
    is_quantized = result.section in quantized_linear.SECTIONS
    return quantized_linear.target(result.name) if is_quantized else linear.target(result.name)


def linear_verdict(result: Result, one_thread: Result | None) -> str:
    """Return ``reached``, or the targets that a row of linear layers misses."""
    parts = [against_peer(result)]
    if one_thread is None:
        peak, least = peak_of(result), linear_target(result)
        parts.append(Requirement(peak, least, fractions(result, peak)).shortfall())
    return "; ".join(filter(None, parts)) or "reached"


def peer_requirement(result: Result) -> Requirement:
    """Return a row's requirement relative to its best peer."""
    peer = best_peer(result)
    assert peer is not None and result.least is not None  # noqa: PT018
    return Requirement(peer, result.least, speedups(result, peer))


def slower_models(results: Sequence[Result]) -> list[tuple[Result, float]]:
    """List the rows in which `apply` makes a model slower, with its relative speed."""
    compared = [
        (it, statistics.median(speedups(it, models.AS_IT_IS)))
        for it in results
        if it.section == models.SECTION and models.AS_IT_IS in it.seconds
    ]
    return [(result, speed) for result, speed in compared if speed < LEAST_OF_MODEL]


def device_limits(result: Result) -> list[float]:
    """Return the limits of the seconds of a call on foo, round by round."""
    limit = DEVICE_LIMITS.get(result.name, lambda cpu: cpu / DEVICE_SPEEDUP)
    peer = result.seconds.get(device.CPU, [0.0] * len(result.seconds[OURS]))
    return [limit(seconds) for seconds in peer]


def device_verdict(result: Result) -> str:
    """Return ``reached``, or by how much the row exceeds its limit.

    A row that exceeds it in the median, but not in three of four rounds, is level with the limit.
    """
    low, middle, _ = quartiles(ratios(result.seconds[OURS], device_limits(result)))
    if middle <= 1:
        return "reached"
    return "level with the limit" if low <= 1 else f"longer by {middle - 1:.1%}"


def first_call_verdict(result: Result) -> str:
    """Return ``reached``, or the first calls that take too long."""
    parts = [
        f"{name} longer than {limit * 1000:.0f} ms"
        for name, limit in FIRST_CALL_SECONDS.items()
        if statistics.median(result.seconds[name]) > limit
    ]
    return "; ".join(parts) or "reached"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
